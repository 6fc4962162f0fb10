"""Operands of a small block made together, against those of a large one, made where they are read, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import overcoat
from overcoat import Recipe
from overcoat.block import linear
from overcoat.block.spec import Block, Branch, Linear
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly


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
@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    mostly_nightly(
        itertools.product(("llama", "gpt_neox", "olmo2", "gpt2"), (None, "block")),
        [("llama", None), ("gpt_neox", "block"), ("olmo2", None), ("gpt2", "block")],
    ),
)
def test_a_block_is_the_same_to_the_bit(kind, checkpoint, device, monkeypatch):
    made, recipe = [], Recipe(checkpoint=checkpoint)
    together = linear.with_operands
    monkeypatch.setattr("overcoat.block.run.with_operands", lambda *args: made.append(together(*args)) or made[-1])
    ours = gradients(kind, recipe, device)
    assert all(branch.in_proj.operand is not None for block in made for branch in block.branches)
    monkeypatch.setattr(linear, "SMALL", 0)
    expected = gradients(kind, recipe, device)
    assert made[-1].branches[0].in_proj.operand is None
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
        in_proj, out_proj, up, down = (Linear((weight,), (None,)) for weight in weights)
        block = Block((Branch(None, in_proj, out_proj), Branch(None, up, down)))
        assert (linear.with_operands(block, 1, Recipe()) is block) == is_other


@pytest.mark.parametrize(
    ("hidden", "inner", "tokens", "small"),
    [
        (2048, 5504, 2**20, True),
        (2048, 8192, 4096, True),
        (2048, 8192, 8192, False),
        (4096, 11008, 2048, True),
        (4096, 11008, 4096, False),
        (8192, 28672, 512, True),
    ],
)
def test_a_block_is_small_by_its_weights_or_by_its_tokens(hidden, inner, tokens, small, monkeypatch):
    """Hidden 2048 with any number of tokens, OLMo-1B with two rows of 2,048, a 7B with one, a 70B with a quarter."""
    monkeypatch.setattr(linear, "quantize_parameters", lambda weights, counts: [[None] * len(counts)] * 3)
    shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    linears = [Linear((torch.empty(shape, device="meta"),), (None,)) for shape in shapes]
    block = Block((Branch(None, *linears[:2]), Branch(None, *linears[2:])))
    assert (linear.with_operands(block, tokens, Recipe()) is not block) == small
