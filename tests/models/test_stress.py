"""Converted models where numbers are extreme or shapes minimal, against FP64: `pytest tests/models/test_stress.py`.

Each case is held against the same model with FP8 GEMMs alone: over all matrices their noise may grow by 1 dB.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from tests.emulation import emulate_fp8_gemms, sqnr
from tests.models.test_numerics import SameRoutes, relative_noise
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly

# More where one seed is above the limit.
SEEDS = (1, 3)


def outliers(model: nn.Module) -> None:
    """One channel of the residual stream 30 times as large, each seventh norm weight 10."""
    model.get_input_embeddings().weight[:, 5] *= 30
    for name, parameter in model.named_parameters():
        if "layernorm" in name and parameter.dim() == 1:
            parameter[::7] = 10.0


def dead_norms(model: nn.Module) -> None:
    """A third of the norm weights zero, a third 1e-4 of what they were."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name and parameter.dim() == 1:
            parameter[::3], parameter[1::3] = 0.0, parameter[1::3] * 1e-4


def strong_sinks(model: nn.Module) -> None:
    """All but some 1e-4 of the attention goes to the sinks."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter += 14.0


class Case(NamedTuple):
    """A kind of model, configuration fields, a batch, a recipe, what is done to the parameters, and whether documents
    begin with the padding token: its embedding is 0, it sees itself alone, so its v and o are 0, and the next norm's
    gradient is 1 / sqrt(eps) times as large as others."""

    kind: str
    fields: dict[str, Any] = {}  # noqa: RUF012
    mask: str = "causal"
    shape: tuple[int, int] = (2, 61)
    recipe: Recipe = Recipe()
    change: Optional[Callable[[nn.Module], None]] = None
    padding_first: bool = False


LEANEST, BLOCKS, WHOLE_ATTENTION = Recipe.leanest(), Recipe(linear_scaling="block"), Recipe(kept_attention="bf16")
CASES = {
    "outliers": Case("llama", change=outliers),
    "outliers, recomputed": Case("starcoder2", recipe=LEANEST, change=outliers),
    "outliers behind norms": Case("olmo2", change=outliers),
    "dead norms": Case("llama", change=dead_norms),
    "dead norms after": Case("olmo2", change=dead_norms),
    "dead norms with biases": Case("starcoder2", recipe=LEANEST, change=dead_norms),
    "one key head": Case("llama", {"num_key_value_heads": 1}),
    "one key head, norms of q and k": Case("qwen3", {"num_key_value_heads": 1}, "packed", recipe=LEANEST),
    "one key head, blocks": Case("phi3", {"num_key_value_heads": 1}, "left-padded", recipe=BLOCKS),
    "a token sees itself alone": Case("mistral", {"sliding_window": 1}),
    "a short window, packed": Case("olmo3", {"sliding_window": 5}, "packed", recipe=LEANEST),
    "a short window, padded": Case("gemma3", {"sliding_window": 7}, "left-padded", recipe=WHOLE_ATTENTION),
    "two tokens": Case("gpt2", shape=(1, 2), recipe=BLOCKS),
    "small logits": Case("granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "small logits, side by side": Case("cohere", {"logit_scale": 1 / 16}),
    "branches of 1%": Case("granite", {"residual_multiplier": 0.01}),
    "nearly all of q, k and v clipped": Case("olmo", {"clip_qkv": 0.1}),
    "clipped, recomputed": Case("olmo", {"clip_qkv": 0.2}, "packed", recipe=LEANEST),
    "sinks, attention whole": Case("gpt_oss", mask="packed", recipe=WHOLE_ATTENTION),
    "padding first": Case("llama", {"pad_token_id": 0}, padding_first=True),
    "padding first, recomputed": Case("llama", {"pad_token_id": 0}, "packed", recipe=LEANEST, padding_first=True),
    "padding first, norms after": Case("olmo2", {"pad_token_id": 0}, "packed", padding_first=True),
    "sinks, recomputed": Case("gpt_oss", mask="packed", recipe=LEANEST),
    "sinks take nearly all": Case("gpt_oss", change=strong_sinks),
}


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model(**inputs, use_cache=False).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def made(case: Case, seed: int) -> tuple[Any, dict[str, Tensor]]:
    model: Any = make_model(case.kind, seed=seed, **case.fields).float()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others have no FP64
    if case.change is not None:
        with torch.no_grad():
            case.change(model)
    inputs = make_batch(case.mask, *case.shape, seed=seed)
    if case.padding_first:
        first = inputs["position_ids"] == 0 if case.mask == "packed" else torch.arange(case.shape[1]) == 0
        inputs["input_ids"] = inputs["labels"] = inputs["input_ids"].masked_fill(first, 0)
        assert not model.get_input_embeddings()(torch.tensor(0)).any()
    return model, inputs


# Each of these in CI; the others differ in the kind of model or in the recipe.
FIRST = (
    "outliers",
    "outliers behind norms",
    "dead norms",
    "dead norms with biases",
    "one key head",
    "a token sees itself alone",
    "a short window, packed",
    "two tokens",
    "small logits",
    "branches of 1%",
    "nearly all of q, k and v clipped",
    "padding first",
    "sinks take nearly all",
)


@pytest.mark.parametrize("name", mostly_nightly(CASES, FIRST))
def test_it_is_as_good_as_fp8_gemms_alone(name: str) -> None:
    case = CASES[name]
    for seeds in SEEDS:
        if (lost := lost_in_db(case, seeds)) < 1:
            return
    raise AssertionError(f"{lost:.2f} dB below FP8 GEMMs alone")


def lost_in_db(case: Case, seeds: int) -> float:
    """Of all matrices' gradients together."""
    noise = floor = 0.0
    for seed in range(seeds):
        model, inputs = made(case, seed)
        exact = gradients(copy.deepcopy(model).double(), inputs)
        in_blocks = case.recipe.linear_scaling == "block"
        emulated = gradients(emulate_fp8_gemms(model, case.recipe.grad_format, in_blocks), inputs)
        assert len(overcoat.convert(model, case.recipe).converted) == 4
        ours = gradients(model, inputs)
        assert ours.keys() == exact.keys()
        assert all(x.isfinite().all() for x in ours.values())
        largest = max(float(x.norm()) for x in exact.values())
        # Where a token sees itself alone q and k have no gradient, but for rounding.
        for name in (name for name, x in exact.items() if x.dim() > 1 and x.norm() > 1e-6 * largest):
            noise += relative_noise(exact[name], ours[name])
            floor += relative_noise(exact[name], emulated[name])
    return 10 * math.log10(noise / floor)


def by_chance(count: int) -> float:
    """dB between two noise powers of so many independent errors each, as tests/exact.py derives it."""
    return 26 / math.sqrt(count)


ONE_TOKEN = [
    (kind, leanest) for kind in ("llama", "gemma2", "olmo2", "gpt_oss", "mixtral") for leanest in (False, True)
]


@pytest.mark.parametrize(("kind", "leanest"), mostly_nightly(ONE_TOKEN, ONE_TOKEN[::3]))
def test_rows_of_one_token(kind: str, leanest: bool) -> None:
    """The loss has no token to predict, the hidden states are right."""
    model, inputs = made(Case(kind, shape=(2, 1)), 0)
    original, emulated = copy.deepcopy(model).double(), emulate_fp8_gemms(model)
    overcoat.convert(model, LEANEST if leanest else Recipe())
    exact, of_gemms, hidden = (
        each.model(inputs["input_ids"], use_cache=False).last_hidden_state for each in (original, emulated, model)
    )
    hidden.square().sum().backward()
    assert sqnr(exact, hidden) > sqnr(exact, of_gemms) - 1 - by_chance(hidden.numel())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(x.isfinite().all() for x in found.values())
    of_values = next(x.norm() for name, x in found.items() if "v_proj.weight" in name)
    if kind != "gpt_oss":  # where a sink competes with the one key
        assert all(x.norm() < 1e-6 * of_values for name, x in found.items() if "k_proj.weight" in name)


@pytest.mark.parametrize("kind", mostly_nightly(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"), ("mixtral", "gpt_oss")))
def test_the_loss_of_routers_is_transformers_own(kind: str) -> None:
    """It is seen through the converted layers, and its gradient reaches the routers; half of four experts each."""
    experts = dict.fromkeys(("num_experts", "num_local_experts"), 4)
    fields = {**experts, "output_router_logits": True, "router_aux_loss_coef": 50.0}
    noise, of_losses, total = torch.zeros(2), torch.zeros(2, 2), 0
    for seed in range(4):
        model, inputs = made(Case(kind, fields, "right-padded"), seed)
        models = [copy.deepcopy(model).double(), emulate_fp8_gemms(model), model]
        assert len(overcoat.convert(model).converted) == 4
        routes = SameRoutes()
        with mock.patch.object(torch, "topk", routes):
            results = []
            for each in models:
                results.append(each(**inputs, use_cache=False))
                results[-1].loss.backward()
                routes.later = 0
        exact, *others = results
        assert exact.loss > 10 * (exact.loss - 50 * exact.aux_loss)  # most of it
        for which, theirs in enumerate(others):
            found = torch.stack([theirs.loss - exact.loss, theirs.aux_loss - exact.aux_loss])
            of_losses[which] += found.detach().square()
        parameters = (dict(each.named_parameters()) for each in models)
        of_original, *of_others = parameters
        for name in (name for name in of_original if name.endswith(("gate.weight", "router.weight"))):
            noise += torch.tensor([relative_noise(of_original[name].grad, each[name].grad) for each in of_others])
            total += int((inputs["labels"] != -100).sum())
    # A token is one error of a router's gradient. Of four numbers' squares by those of four others 53 is the quantile
    # of 99.9% (F distribution).
    assert 10 * math.log10(noise[1] / noise[0]) < 1 + by_chance(total)
    assert (of_losses[1] < 53 * of_losses[0]).all()
