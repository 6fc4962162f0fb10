"""The kernels of activation_backward.py and activation_blockwise.py equal their references; sums over tokens, added
otherwise, nearly."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import activation as forward
from overcoat.kernels import activation_backward as ops
from overcoat.kernels import activation_blockwise as block_ops
from tests.kernels.compare import DEVICE, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.activation_cases import OUTPUTS, block_cases, cases, gradient, inputs, shapes

pytestmark = NEEDS_GPU


def kept(shape, activation, gated, code, group_size):
    """(dh, codes, maxima), and h's scale."""
    codes, group_amax, top = forward.activation_encode.reference(
        inputs(shape, gated), activation, gated, code, group_size
    )
    return (gradient(shape), codes, group_amax), top / 448


@shapes
@cases
def test_backward(shape, code, group_size, activation, gated):
    arguments, scale = kept(shape, activation, gated, code, group_size)
    how = (activation, code, group_size)
    ours = ops.activation_backward.kernel(*arguments, scale, *how)
    assert_equal(ours, ops.activation_backward.reference(*arguments, scale, *how))
    for fmt, has_bias in OUTPUTS:
        both = (*arguments, scale, torch.full((), 3e4, device=DEVICE), fmt, has_bias, *how)
        *ours, sums, h_t = ops.activation_backward_quantize.kernel(*both)
        *theirs, expected, expected_h = ops.activation_backward_quantize.reference(*both)
        assert_equal([*ours, h_t], [*theirs, expected_h])
        assert_equal(sums, expected, exact=False, steps=8)


@shapes
@block_cases
def test_block_backward(shape, code, group_size, activation, gated):
    arguments, _ = kept(shape, activation, gated, code, group_size)
    how = (activation, code, group_size)
    ours = block_ops.activation_block_backward.kernel(*arguments, *how)
    assert_equal(ours, block_ops.activation_block_backward.reference(*arguments, *how))
    for fmt, has_bias in OUTPUTS:
        both = (*arguments, fmt, has_bias, *how)
        *ours, sums = block_ops.activation_block_backward_quantize.kernel(*both)
        *theirs, expected = block_ops.activation_block_backward_quantize.reference(*both)
        assert_equal(ours, theirs)
        assert_equal(sums, expected, exact=False, steps=8)


@pytest.mark.parametrize(("tokens", "activation", "gated"), [(16, "silu", True), (48, "gelu", False)])
def test_tokens_that_need_no_padding(tokens, activation, gated):
    """Part of a tile, and one and a half: rows that do not exist are stored nowhere."""
    arguments, scale = kept((tokens, 200), activation, gated, "sqrt8", 128)
    how = (activation, "sqrt8", 128)
    ours = ops.activation_backward.kernel(*arguments, scale, *how)
    assert_equal(ours, ops.activation_backward.reference(*arguments, scale, *how))
    both = (*arguments, scale, torch.full((), 100.0, device=DEVICE), "e5m2", False, *how)
    assert_equal(ops.activation_backward_quantize.kernel(*both), ops.activation_backward_quantize.reference(*both))


@pytest.mark.parametrize("bad", ["h", "dz"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("gated", [False, True])
def test_padding_is_zero_even_where_a_scale_is_not_finite(bad, value, gated):
    codes, group_amax, _ = forward.activation_encode.reference(inputs((7, 100), gated), "silu", gated, "sqrt8", 128)
    one, other = torch.ones((), device=DEVICE), torch.full((), value, device=DEVICE)
    scale, top = (other, one) if bad == "h" else (one, other)
    both = (gradient((7, 100)), codes, group_amax, scale, top, "e5m2", True, "silu", "sqrt8", 128)
    _, data_t, _, _, h_t = ops.activation_backward_quantize.kernel(*both)
    assert data_t[:, 7:].float().count_nonzero() == 0
    assert h_t[:, 7:].float().count_nonzero() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_where_a_block_s_scale_is_not_finite(value):
    """134 tokens are padded to 144; the scales of the last block, and of row 133, are those of its bad value."""
    codes, group_amax, _ = forward.activation_encode.reference(awkward(134, 512), "silu", True, "sqrt8", 128)
    dh = torch.randn(134, 256, device=DEVICE).bfloat16()
    dh[133, 7] = value
    how = (dh, codes, group_amax)
    _, h_t, _ = block_ops.activation_block_backward.kernel(*how, "silu", "sqrt8", 128)
    _, _, dz_t, scale, again, *_ = block_ops.activation_block_backward_quantize.kernel(
        *how, "e5m2", False, "silu", "sqrt8", 128
    )
    assert not scale[1].isfinite().all()
    for operand in (h_t, dz_t, again):
        assert operand.shape[1] == 144
        assert not operand.view(torch.uint8)[:, 134:].any()
        assert operand.view(torch.uint8)[:, :133].any()
