"""A converted model under FSDP2 (`fully_shard`), in two processes: `pytest tests/distributed/test_fsdp.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import overcoat
from overcoat import Recipe
from overcoat.models.frozen import frozen_of
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly
from tests.processes import on_many, on_two, repeating, two_of

RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    "offloaded": Recipe(offload_blocks="all"),
    "block scales": Recipe(linear_scaling="block"),
    "fp8 head": Recipe(head="fp8"),
}
# Qwen2: RMSNorm, SwiGLU, biases of q, k, v. Starcoder2: LayerNorm, GELU, biases, and a head tied to the embedding.
# Mixtral: weights of three dimensions.
CASES = (
    ("qwen2", ("default", "leanest", "offloaded", "block scales", "fp8 head")),
    ("starcoder2", ("default",)),
    ("mixtral", ("default", "leanest")),
    ("qwen2", ("paper",)),
    ("starcoder2", tuple(name for name in RECIPES if name != "default")),
)


def _save_gradients(rank: int, kind: str, recipes: Sequence[str], device: str, folder: str) -> None:
    for name in recipes:
        grads = _sharded_gradients(kind, device, RECIPES[name])
        if rank == 0:
            torch.save(grads, Path(folder) / name)


def _batch(device: str) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in make_batch().items()}


def _sharded_gradients(kind: str, device: str, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The whole gradients of a first step; a second one runs to its end."""
    model = make_model(kind, layers=3).to(device)
    overcoat.convert(model, recipe)
    for layer in model.model.layers:
        fully_shard(layer)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if recipe.checkpoint is None and not is_tied:
        fully_shard(model.lm_head)  # by itself: its weight is gathered by the hooks of its own call
    fully_shard(model)
    # Both ranks see the same batch, so the averaged gradient is that of one process.
    model(**_batch(device)).loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[name] = parameter.grad.full_tensor()
    return grads


@two_of
@pytest.mark.parametrize(("kind", "recipes"), mostly_nightly(CASES, CASES[:3]))
def test_sharded_gradients_equal_those_of_one_process(
    kind: str, recipes: Sequence[str], device: str, tmp_path: Path
) -> None:
    """All recipes in one pair of processes, which take longer to begin than a step does."""
    on_two(_save_gradients, device, kind, recipes, device, str(tmp_path))
    with repeating(device):
        for recipe_name in recipes:
            sharded = torch.load(tmp_path / recipe_name)
            model = make_model(kind, layers=3).to(device)
            overcoat.convert(model, RECIPES[recipe_name])
            model(**_batch(device)).loss.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(sharded[name], parameter.grad, rtol=0, atol=0, msg=f"{recipe_name}: {name}")


def _adapted(device: str, dora: bool, recipe: Recipe | None = None) -> Any:
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, use_dora=dora)
    model = peft.get_peft_model(make_model("llama", layers=2).to(device), config, autocast_adapter_dtype=False)
    overcoat.convert(model, recipe)
    return model.train()


def _save_adapters(rank: int, device: str, folder: str, dora: bool) -> None:
    model = _adapted(device, dora)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        model(**_batch(device)).loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    if rank == 0:
        torch.save(grads, Path(folder) / "adapters")


@pytest.mark.parametrize("dora", [False, True])
@two_of
def test_sharded_adapters_have_the_gradients_of_one_process(device: str, dora: bool, tmp_path: Path) -> None:
    on_two(_save_adapters, device, device, str(tmp_path), dora)
    model, sharded = _adapted(device, dora), torch.load(tmp_path / "adapters")
    with repeating(device):
        model(**_batch(device)).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == sharded.keys()
    assert all("lora_" in name for name in expected)
    for name, grad in expected.items():
        torch.testing.assert_close(sharded[name], grad, rtol=0, atol=0, msg=name)


def _frozen(rank: int, scaling: Any) -> None:
    recipe, processes = Recipe(linear_scaling=scaling, frozen_weights="fp8"), dist.get_world_size()
    model = _adapted("cpu", False, recipe)
    loss = model(**_batch("cpu")).loss
    loss.backward()
    decoded = {name: p.decoded() for name, p in model.named_parameters() if frozen_of(p) is not None}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert overcoat.convert(model, recipe).weights[0].startswith(f"{len(decoded)} frozen weights held")
    assert set(overcoat.fp8_all_gather(model).fp8) >= decoded.keys()
    for _ in range(2):
        model.zero_grad()
        found = model(**_batch("cpu")).loss
        found.backward()
        assert torch.equal(found, loss)
    for name, expected in gradients.items():  # a third is rounded
        grad = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, expected, rtol=0 if processes < 3 else 2**-7, atol=0)
    for name, whole in decoded.items():
        param: Any = model.get_parameter(name)
        codes = frozen_of(param).held
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.untyped_storage().nbytes() == -(-len(whole) // processes) * whole.shape[1]
        assert torch.equal(model.state_dict()[name].full_tensor(), whole)
    with pytest.raises(ValueError, match="sharded"):
        overcoat.convert(model, Recipe(linear_scaling=scaling))


@pytest.mark.parametrize(("processes", "scaling"), [(1, "block"), (2, "tensor"), (2, "block"), (3, "block")])
def test_frozen_codes_are_sharded_and_gathered_as_codes(processes: int, scaling: str) -> None:
    on_many(processes, _frozen, "cpu", scaling)
