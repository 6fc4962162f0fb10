"""The weights of linear layers as FP8 operands of their products: of a layer when it is read, of a small block at once.

A small block's operands are made together, as launches take longer than what they do (kernels/operands.py). They are
there for the whole of its forward, and transposed for the whole of its backward: a byte for each of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor
from torch.nn import Parameter

from overcoat.block.gathered import gathered_blocks, gathered_operand, is_gathered
from overcoat.block.spec import Block, ForwardScales, Linear
from overcoat.kernels.operands import OPERANDS, numbers_of, quantize_parameters, stack_operands
from overcoat.kernels.weights import block_stack_weights, stack_weights
from overcoat.recipe import Recipe

# A small block has less work, weights times tokens, of which no more than `MANY` count: there the host, which launches,
# is slower than the GPU. Hidden 2048, some 50 million weights, is small with any number of tokens, a 7B's block, 202
# million, with one row of 2,048. Elsewhere a byte for each weight would add to the peak, and launches take little.
SMALL, MANY = 2**39, 2**13


def stack_weights_of(linear: Linear) -> list[Tensor]:
    """The weights (N_i, K), rows in the operand's order."""
    if not linear.orders:
        return list(linear.weights)
    return [w if order is None else order.take(w) for w, order in zip(linear.weights, linear.orders, strict=True)]


def operand(linear: Linear, transposed: bool, amax: Optional[Tensor]) -> Sequence[Tensor]:
    """Weights (N_i, K) as one E4M3 operand, (sum N, K) or (K, sum N); its 0-d scale; their 0-d maximum."""
    if linear.operand is not None:
        return linear.operand
    if is_gathered(linear):
        return gathered_operand(linear, transposed)
    weights = stack_weights_of(linear)
    if amax is None:
        return [each for (each,) in quantize_parameters(weights, [len(weights)])]
    return *stack_weights(weights, amax, transposed), amax


def block_operand(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand in 128x128 blocks, (sum N, K) or (K, sum N), and the blocks' scales."""
    if is_gathered(linear):
        return gathered_blocks(linear, transposed)
    return block_stack_weights(stack_weights_of(linear), transposed)


def with_operands(block: Block, tokens: int, recipe: Recipe, cached: Optional[Sequence[ForwardScales]] = None) -> Block:
    """The block with the operands of its forward, if it is small; known: what that has found, for those of the
    backward, which are transposed."""
    linears = [linear for branch in block.branches for linear in (branch.in_proj, branch.out_proj)]
    if recipe.linear_scaling != "tensor" or len(linears) > OPERANDS or any(map(is_gathered, linears)):
        return block
    weights: list[Any] = []
    for linear in linears:
        weights += linear.weights
    # Of other kinds (DTensor) the dispatcher says what is wrong: an op asks the first alone.
    size = sum([w.numel() for w in weights])  # compiled code of a small model need not ask how many tokens there are
    is_large = size * MANY >= SMALL and size * tokens >= SMALL
    if is_large or not {*map(type, weights)} <= {Tensor, Parameter}:
        return block
    stacks = [stack_weights_of(linear) for linear in linears]
    ordered, counts = [w for stack in stacks for w in stack], [len(stack) for stack in stacks]
    if cached is None:
        data, scales, amaxes = quantize_parameters(ordered, counts)
    else:
        maxima: list[Any] = [each for branch in cached for each in (branch.in_proj, branch.out_proj)]
        *data, numbers = stack_operands(ordered, counts, maxima, True)
        scales, amaxes = numbers_of(numbers), maxima
    made = zip(linears, data, scales, amaxes, strict=True)
    ready = iter([linear._replace(operand=operand) for linear, *operand in made])
    branches = [branch._replace(in_proj=next(ready), out_proj=next(ready)) for branch in block.branches]
    return block._replace(branches=tuple(branches))
