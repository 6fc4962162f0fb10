"""Rotary embedding and head norm against FP64 autograd: `pytest tests/kernels/test_rope.py`.

The tables are Gaussian numbers, not cosines and sines: the backward must be the transposed map, which for true angles
equals the inverse and would hide the difference (scaled RoPE variants fold a factor into cos and sin). The halves of a
row differ too.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, Quantized, decode_groups, encode_groups
from overcoat.kernels import rope as ops
from overcoat.kernels import rope_backward, rope_quantize
from tests import exact
from tests.exact import BF16_DB, E5M2_DB, assert_close, assert_close_float32, leaf
from tests.kernels.samples import normal

EPS = 1e-2  # large enough that a wrong one shows
# tokens, positions, query heads, key/value heads, width
SHAPES = [(1, 1, 1, 1, 8), (14, 7, 4, 2, 24), (61, 61, 6, 2, 16), (6, 2, 3, 3, 2)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
norms = pytest.mark.parametrize("norms", ["", "q", "k", "qk"])


def inputs(shape, norms, device):
    """qkv, cos, sin, q_weight, k_weight in FP32; and what every op takes last."""
    tokens, positions, num_q, num_kv, width = shape
    qkv = normal(tokens, (num_q + 2 * num_kv) * width).to(device)
    cos, sin = (normal(positions, width, seed=seed).to(device) for seed in (1, 2))
    q_weight, k_weight = (
        (1 + 0.5 * normal(width, seed=seed)).to(device) if name in norms else None
        for name, seed in (("q", 3), ("k", 4))
    )
    return qkv, cos, sin, q_weight, k_weight, EPS, num_q, num_kv


def split(x, num_q, num_kv, width):
    """The columns of q, k and v: views, whose rows lie apart."""
    return x.split((num_q * width, num_kv * width, num_kv * width), 1)


def doubles(arguments):
    return [leaf(x) if isinstance(x, torch.Tensor) else x for x in arguments]


# Rounding errors in a row: the mean of a head's squares, and the head norm's and the rotation's dozen operations.
def terms(shape):
    return shape[4] + 12


@shapes
@norms
def test_forward(shape, norms, device):
    arguments = inputs(shape, norms, device)
    expected = exact.rope(*doubles(arguments))
    assert_close_float32("rotated", expected, ops.qk_rope(*arguments), terms(shape))
    got = ops.qk_rope(arguments[0].bfloat16(), *arguments[1:])
    assert got.dtype == torch.bfloat16
    if shape[0] > 1:
        assert_close("rotated", exact.rope(arguments[0].bfloat16().double(), *doubles(arguments[1:])), got, BF16_DB)


@shapes
@norms
def test_backward(shape, norms, device):
    arguments = inputs(shape, norms, device)
    truth = doubles(arguments)
    dy = normal(*arguments[0].shape, seed=7).to(device)
    exact.rope(*truth).backward(dy.double())
    qkv = arguments[0] if norms else None
    dqkv, dq_weight, dk_weight = rope_backward.qk_rope_backward(*split(dy, *shape[2:]), qkv, *arguments[1:-1])
    assert_close_float32("dqkv", truth[0].grad, dqkv, 3 * terms(shape))
    tokens, _, num_q, num_kv, _ = shape
    for name, weight, got, heads in (("q", truth[3], dq_weight, num_q), ("k", truth[4], dk_weight, num_kv)):
        if weight is None:
            assert got.numel() == 0
        else:
            assert_close_float32(f"d{name}_weight", weight.grad, got, tokens * heads + terms(shape))


def test_v_passes_unchanged(device):
    arguments = inputs(SHAPES[1], "qk", device)
    width, num_kv = SHAPES[1][4], SHAPES[1][3]
    v = slice(-width * num_kv, None)
    assert torch.equal(ops.qk_rope(*arguments)[:, v], arguments[0][:, v])
    parts = split(arguments[0], *SHAPES[1][2:])
    assert torch.equal(rope_backward.qk_rope_backward(*parts, *arguments[:-1])[0][:, v], parts[2])


def make_center(qkv, centered):
    return qkv.float().mean(0) if centered else None


@shapes
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize("centered", [False, True], ids=["", "centered"])
def test_encode_in_place_equals_encode_then_rotate(shape, norms, centered, device):
    qkv, *rest = inputs(shape, norms, device)
    qkv = qkv.bfloat16()
    center = make_center(qkv, centered)
    codes, group_amax = encode_groups(qkv.float() - center if centered else qkv, "sqrt8", shape[4])
    expected = ops.qk_rope(qkv, *rest)
    got_codes, got_amax = ops.qk_rope_encode_(qkv, center, *rest, "sqrt8")
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_amax, group_amax)
    torch.testing.assert_close(qkv, expected, rtol=2.0**-8, atol=0)  # CPU: equal; a kernel may differ in the last bit


@shapes
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize("code", ["sqrt8", "e4m3"])
@pytest.mark.parametrize("centered", [False, True], ids=["", "centered"])
def test_decode_equals_decode_then_rotate(shape, norms, code, centered, device):
    qkv, *rest = inputs(shape, norms, device)
    codes, group_amax = encode_groups(qkv, code, shape[4])
    center = make_center(qkv + 1, centered)
    values = decode_groups(Quantized(codes, group_amax), code, shape[4]) + (center if centered else 0)
    got = ops.qk_rope_decode(codes, group_amax, center, *rest, code, torch.float32)
    assert_close_float32("rotated", exact.rope(*doubles((values, *rest))), got, terms(shape))


@shapes
def test_backward_straight_to_fp8(shape, device):
    qkv, cos, sin, _, _, _, num_q, num_kv = inputs(shape, "", device)
    tokens = shape[0]
    dy = normal(*qkv.shape, seed=7).to(device)
    truth = doubles((qkv, cos, sin))
    exact.rope(*truth, None, None, 0.0, num_q, num_kv).backward(dy.double())
    parts = split(dy, *shape[2:])
    largest = rope_quantize.qk_rope_backward_amax(*parts, cos, sin, num_q)
    assert_close_float32("amax", truth[0].grad.abs().max(), largest, terms(shape))
    data, data_t, scale = rope_quantize.qk_rope_backward_quantize(*parts, cos, sin, largest, "e5m2", num_q)
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    if tokens > 1:
        assert_close("dqkv", truth[0].grad, data.double() * scale.double(), E5M2_DB)
