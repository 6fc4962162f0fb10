"""FP8 in `eval()`, for a reference model that computes what the policy does: `pytest tests/models/test_eval_fp8.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from tests.models.zoo import make_batch, make_model


def log_probabilities(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Of each token, as DPO and GRPO compute them."""
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)


def pair(kind: str = "llama", recipe: Recipe | None = None) -> tuple[nn.Module, nn.Module, overcoat.Report]:
    """A policy that trains and its reference, of equal weights."""
    policy = make_model(kind, layers=2)
    reference = copy.deepcopy(policy)
    overcoat.convert(policy, recipe)
    report = overcoat.convert(reference, recipe, eval_fp8=True)
    return policy.train(), reference.eval().requires_grad_(False), report


@pytest.mark.parametrize(
    ("kind", "mask", "recipe"),
    [
        *(("llama", mask, Recipe()) for mask in ("causal", "packed", "left-padded", "right-padded")),
        ("llama", "causal", Recipe.leanest()),
        ("llama", "packed", Recipe(linear_scaling="block")),
        ("gemma2", "right-padded", Recipe()),
        ("mixtral", "causal", Recipe()),
    ],
)
def test_the_margin_is_zero_at_the_first_step(kind: str, mask: str, recipe: Recipe, device: torch.device) -> None:
    policy, reference, report = pair(kind, recipe)
    inputs = {name: x.to(device) for name, x in make_batch(mask).items()}
    policy, reference = policy.to(device), reference.to(device)
    with torch.no_grad():
        theirs = log_probabilities(reference, inputs)
    ours = log_probabilities(policy, inputs)
    assert torch.equal(ours, theirs)
    assert ours.requires_grad
    assert [ran for ran in report.running().values() if ran != "all logits"] == ["FP8"] * 2
    with torch.inference_mode():
        assert torch.equal(log_probabilities(reference, inputs), ours)


def test_without_it_the_two_differ_and_converting_again_takes_it_back() -> None:
    policy, reference, report = pair()
    plain, inputs = make_model("llama", layers=2).eval(), make_batch()
    assert "in eval() too" in report.layers[0].detail
    report = overcoat.convert(reference)
    assert "eval()" not in report.layers[0].detail
    with torch.no_grad():
        bf16 = log_probabilities(reference, inputs)
        assert torch.equal(bf16, log_probabilities(plain, inputs))
        assert not torch.equal(bf16, log_probabilities(policy, inputs))
    assert report.running()["model.layers.0"] == "eval(): the original forward"


def test_no_cache_unless_asked_for_and_generate_is_the_original() -> None:
    """With a cache the layers run as they are, and say so: tokens are those of a model that was not converted."""
    _, reference, report = pair()
    plain, inputs = make_model("llama", layers=2).eval(), make_batch()
    with torch.no_grad():
        assert reference(input_ids=inputs["input_ids"]).past_key_values is None
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match=r"computes in its original precision: .*use_cache=True"):
        tokens = reference.generate(inputs["input_ids"], **options)
    assert torch.equal(tokens, plain.generate(inputs["input_ids"], **options))
    assert "cache was asked for" in report.running()["model.layers.1"]
    assert reference.generate(inputs["input_ids"], use_cache=False, **options).shape == tokens.shape
    assert report.running()["model.layers.1"] == "FP8"


def test_a_reference_by_disabled_adapters() -> None:
    """PEFT's reference is the policy without adapters: B is zero at the first step."""
    peft: Any = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("llama", layers=2), peft.LoraConfig(r=4, target_modules="all-linear"))
    overcoat.convert(model, eval_fp8=True)
    model.train()
    ours, inputs = log_probabilities(model, make_batch()), make_batch()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(log_probabilities(model.eval(), inputs), ours)
