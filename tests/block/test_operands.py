"""Operands of a small block made together, against those of a large one, made where they are read, bit for bit."""

from __future__ import annotations

import pytest
import torch

import overcoat
from overcoat import Recipe
from overcoat.block import operands
from overcoat.block.spec import Block, Branch, Linear
from tests.models.zoo import make_batch, make_model


def gradients(kind: str, recipe: Recipe, device: str) -> list[torch.Tensor]:
    """The loss of two steps, between which a weight has grown, and the second's gradients."""
    model = make_model(kind, layers=2).to(device)
    overcoat.convert(model, recipe)
    batch = {name: value.to(device) for name, value in make_batch("causal", length=32).items()}
    losses = []
    for _ in range(2):
        model.zero_grad()
        losses.append(model(**batch).loss)
        losses[-1].backward()
        with torch.no_grad():
            largest = max(model.parameters(), key=lambda parameter: parameter.dim() * 1000 + parameter.shape[0])
            largest.mul_(1.5)
    return [*losses, *[parameter.grad for parameter in model.parameters()]]


# Norms before; a parallel block, whose q, k and v are rows of one weight; norms after; a GELU and biases.
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "olmo2", "gpt2"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(checkpoint="block")], ids=["", "checkpoint"])
def test_a_block_is_the_same_to_the_bit(kind, recipe, device, monkeypatch):
    made = []
    together = operands.with_operands
    monkeypatch.setattr("overcoat.block.run.with_operands", lambda *args: made.append(together(*args)) or made[-1])
    ours = gradients(kind, recipe, device)
    assert all(branch.into.operand is not None for block in made for branch in block.branches)
    monkeypatch.setattr(operands, "SMALL", 0)
    expected = gradients(kind, recipe, device)
    assert made[-1].branches[0].into.operand is None
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)


class Other(torch.Tensor):
    """Stands for DTensor and the like, which are not their memory."""


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_weights_of_other_kinds_are_left_to_the_dispatcher(place):
    """A kernel that takes all of a block's weights would be asked for because of the first."""
    weights = [torch.randn(16, 16, dtype=torch.bfloat16) for _ in range(4)]
    for is_other in (False, True):
        if is_other:
            weights[place] = weights[place].as_subclass(Other)
        into, out, up, down = (Linear((weight,), (None,)) for weight in weights)
        block = Block((Branch(None, into, out), Branch(None, up, down)))
        assert (operands.with_operands(block, Recipe()) is block) == is_other
