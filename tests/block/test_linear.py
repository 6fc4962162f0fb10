"""The three products of a linear layer, exactly: `pytest tests/block/test_linear.py`.

Small integers under a scale of 1 (the maximum is said to be the format's own) have no rounding in either FP8 format,
and their products none in FP32: every result equals that of integer arithmetic.
"""

from __future__ import annotations

import pytest
import torch

from overcoat import Recipe
from overcoat.block import linear as products
from overcoat.block.linear import dgrad, linear_backward, linear_gemm, quantize_gradient, wgrad
from overcoat.block.spec import Linear
from overcoat.formats import E4M3, Quantized
from overcoat.kernels.blockwise import block_quantize_t
from overcoat.kernels.quantize import quantize_both
from tests.emulation import rounded
from tests.kernels.samples import normal

K = 32
ROWS = (16, 24, 8)
TOP = {"e4m3": torch.tensor(448.0), "e5m2": torch.tensor(57344.0)}  # a scale of 1
tokens_ = pytest.mark.parametrize("tokens", [1, 7, 33])


def integers(*shape, seed=0, dtype=torch.bfloat16):
    """-4 .. 4: E5M2 has all of them."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(tokens, dtype=torch.bfloat16):
    """x, weights, dy, and x as wgrad's operand."""
    x, dy = integers(tokens, K, dtype=dtype), integers(tokens, sum(ROWS), seed=1, dtype=dtype)
    weights = [integers(rows, K, seed=2 + rows, dtype=dtype) for rows in ROWS]
    x8, x_t, scale = quantize_both(x, TOP["e4m3"], "e4m3")
    return x, weights, dy, Quantized(x8, scale), Quantized(x_t, scale)


def linear(weights, biases=None):
    return Linear(tuple(weights), (None,) * len(weights) if biases is None else tuple(biases))


# ---- forward ------------------------------------------------------------------------------------------------------


@tokens_
def test_product_of_stacked_weights_with_bias(tokens):
    x, weights, _, x8, _ = layer(tokens, torch.float32)
    bias = integers(sum(ROWS), seed=5)
    y, w_amax = linear_gemm(*x8, linear(weights, bias.split(ROWS)), torch.float32, TOP["e4m3"])
    assert torch.equal(y, x @ torch.cat(weights).t() + bias.float())
    assert w_amax == 448
    plain, _ = linear_gemm(*x8, linear(weights), torch.bfloat16, TOP["e4m3"])
    assert torch.equal(plain, (x @ torch.cat(weights).t()).bfloat16())


# ---- the output gradient ------------------------------------------------------------------------------------------


def test_sums_are_of_the_gradient_itself_in_fp32():
    """513 ones: BF16 would say 512, E5M2 under the scale of a maximum of 3 would not even hold the ones."""
    dy = torch.ones(513, 16, dtype=torch.bfloat16)
    dy[:, 1] = 3.0
    found = quantize_gradient(dy, linear([dy, dy], [None, torch.zeros(4)]), Recipe())
    assert found.sums.dtype == torch.float32
    assert found.sums.tolist() == [513.0, 1539.0, *[513.0] * 14]


# ---- backward -----------------------------------------------------------------------------------------------------


@tokens_
@pytest.mark.parametrize("which", [(), (1,), (0, 2), (0, 1, 2)], ids=["none", "second", "outer", "all"])
def test_gradients_of_each_weight_and_of_the_biases_there_are(tokens, which):
    x, weights, dy, _, x_t = layer(tokens)
    biases = [integers(rows, dtype=torch.float32) if place in which else None for place, rows in enumerate(ROWS)]
    dx, dweights, dbiases = linear_backward(dy, x_t, linear(weights, biases), TOP["e4m3"], Recipe(), TOP["e5m2"])
    assert torch.equal(dx, (dy.float() @ torch.cat(weights).float()).bfloat16())
    for part, weight, dweight, bias, dbias in zip(dy.split(ROWS, 1), weights, dweights, biases, dbiases, strict=True):
        assert dweight.dtype == weight.dtype
        assert torch.equal(dweight, (part.t().float() @ x.float()).bfloat16())
        assert (dbias is None) == (bias is None)
        if dbias is not None:
            assert dbias.dtype == bias.dtype
            assert torch.equal(dbias, part.float().sum(0))


def test_frozen_weights_have_no_gradient_but_pass_it_on():
    _, weights, dy, _, _ = layer(7)
    biases = [None, torch.zeros(ROWS[1]), None]
    dx, dweights, dbiases = linear_backward(dy, None, linear(weights, biases), TOP["e4m3"], Recipe(), TOP["e5m2"])
    assert dweights == (None, None, None)
    assert torch.equal(dx, (dy.float() @ torch.cat(weights).float()).bfloat16())
    assert torch.equal(dbiases[1], dy.split(ROWS, 1)[1].float().sum(0))


@pytest.mark.parametrize("tokens", [1, 150])
def test_block_scales_are_those_of_their_product(tokens):
    """No maximum of the weights: dx has blocks along N, dW along the tokens, both products exact but for rounding."""
    dy, weight = normal(tokens, 200), normal(200, 130, seed=1)
    recipe = Recipe(linear_scaling="block")
    x = normal(tokens, 130, seed=2)
    x_t = Quantized(*block_quantize_t(x, "e4m3"))
    found = linear_backward(dy, x_t, linear([weight]), None, recipe)
    by_rows, by_columns = rounded(dy, E4M3, (1, 128)), rounded(dy, E4M3, (128, 1))
    factors = (by_rows, rounded(weight, E4M3, (128, 128))), (by_columns.t(), rounded(x, E4M3, (128, 1)))
    for ours, (a, b) in zip((found.dx, found.dweights[0]), factors):
        # An FP32 sum of n products: at most n roundings of the sum of their sizes; two of the scales besides.
        allowed = (a.shape[1] + 2) * 2.0**-24 * (a.abs() @ b.abs())
        assert ((ours.double() - a @ b).abs() <= allowed).all()


@pytest.mark.parametrize(("tokens", "fast"), [(1, True), (32, True), (33, False)])
def test_long_sums_over_tokens_are_promoted(tokens, fast, monkeypatch):
    """dW adds up as many products as there are tokens, with their padding; dx as many as there are outputs."""
    seen = []
    original = products.gemm
    monkeypatch.setattr(products, "FAST_WGRAD_TOKENS", 32)
    monkeypatch.setattr(products, "gemm", lambda *args: seen.append(args[6]) or original(*args))
    _, weights, dy, _, x_t = layer(tokens)
    gradient = quantize_gradient(dy, linear(weights), Recipe())
    wgrad(gradient, x_t, torch.float32)
    dgrad(gradient, linear(weights), TOP["e4m3"])
    assert seen == [fast, True]
