"""The three products with block scales against FP64 products of the rounded operands.

Operands are rounded by the specification (formats.py) in the layout that each product contracts; what is left is an
FP32 sum of n products: at most n roundings of the sum of their sizes, and two of each product by the scales.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, Quantized
from overcoat.kernels.blockwise import block_quantize, block_quantize_t
from overcoat.ops.blockwise import dgrad, forward_product, wgrad, whole_blocks
from tests.emulation import rounded
from tests.kernels.samples import normal

TOKENS = pytest.mark.parametrize("tokens", [1, 7, 130])
# (rows of the stacked weights, K): blocks of their own; blocks that span two weights; less than a block.
SHAPES = pytest.mark.parametrize(("rows", "width"), [((128, 256), 128), ((40, 200, 8), 136), ((8,), 24)])


def uneven(*shape, seed):
    """Rows and columns of very different size, so that a scale of another block would show."""
    exponents = torch.arange(shape[0])[:, None] // 37 % 5 + torch.arange(shape[1]) // 61 % 4
    return normal(*shape, seed=seed) * 4.0**exponents


def assert_product(a, b, ours, bias=0.0):
    """`ours` is a @ b + bias in FP32."""
    allowed = (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs() + abs(bias))
    assert ours.dtype == torch.float32
    assert ours.shape == (a.shape[0], b.shape[1])
    assert ((ours.double() - (a @ b + bias)).abs() <= allowed).all()


@TOKENS
@SHAPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward(tokens, rows, width, with_bias):
    x, weights = uneven(tokens, width, seed=0), [uneven(n, width, seed=n) for n in rows]
    bias = 100 * normal(sum(rows), seed=3) if with_bias else None
    y = forward_product(Quantized(*block_quantize(x, "e4m3")), weights, bias, torch.float32)
    stacked = rounded(torch.cat(weights), E4M3, (128, 128))
    assert_product(rounded(x, E4M3, (1, 128)), stacked.t(), y, bias.double() if with_bias else torch.zeros(1))


@TOKENS
@SHAPES
def test_dgrad(tokens, rows, width):
    dy, weights = uneven(tokens, sum(rows), seed=1), [uneven(n, width, seed=n) for n in rows]
    dx = dgrad(Quantized(*block_quantize(dy, "e4m3")), weights, torch.float32)
    assert_product(rounded(dy, E4M3, (1, 128)), rounded(torch.cat(weights), E4M3, (128, 128)), dx)


@TOKENS
def test_wgrad_pads_tokens_with_nothing(tokens):
    dy, x = uneven(tokens, 40, seed=1), uneven(tokens, 136, seed=2)
    dw = wgrad(Quantized(*block_quantize_t(dy, "e4m3")), Quantized(*block_quantize_t(x, "e4m3")), torch.float32)
    assert_product(rounded(dy, E4M3, (128, 1)).t(), rounded(x, E4M3, (128, 1)), dw)


def test_the_result_is_rounded_once_to_its_dtype():
    x, weight = Quantized(*block_quantize(normal(5, 64), "e4m3")), normal(24, 64, seed=1)
    bias = normal(24, seed=2)
    assert torch.equal(
        forward_product(x, [weight], bias, torch.bfloat16), forward_product(x, [weight], bias, torch.float32).bfloat16()
    )


@pytest.mark.parametrize(
    ("widths", "whole"), [((), True), ((128,), True), ((128, 256), True), ((256, 64, 64), False), ((200,), False)]
)
def test_whole_blocks(widths, whole):
    """Two halves that fill a block together do not count: each is quantized alone."""
    assert whole_blocks(*widths) is whole
