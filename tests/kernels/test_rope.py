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
    dqkv, dq_weight, dk_weight = ops.qk_rope_backward(*split(dy, *shape[2:]), qkv, *arguments[1:-1])
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
    assert torch.equal(ops.qk_rope_backward(*parts, *arguments[:-1])[0][:, v], parts[2])


@shapes
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize("centered", [False, True], ids=["", "centered"])
@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
def test_encode_and_decode(shape, norms, centered, code, device):
    """In place it is `qk_rope`; what is kept decodes to what was there, q and k bit for bit, v to 8 bits."""
    qkv, *rest = inputs(shape, norms, device)
    qkv = qkv.bfloat16()
    before, expected = qkv.float(), ops.qk_rope(qkv, *rest)
    cos, sin, _, _, _, num_q, num_kv = rest
    cut = (num_q + num_kv) * shape[4]
    center = before[:, cut:].mean(0) if centered else None
    codes, lower, amax = ops.qk_rope_encode12_(qkv, center, *rest, code)
    torch.testing.assert_close(qkv, expected, rtol=2.0**-8, atol=0)  # CPU: equal; a kernel may differ in the last bit
    kept = (codes, lower, amax, center)
    decoded = ops.qk_rope_decode12(*kept, None, None, num_q, num_kv, code, torch.float32)
    v, v_amax = encode_groups(before[:, cut:] - (center if centered else 0), code, shape[4])
    assert torch.equal(codes[:, cut:].contiguous().view(v.dtype).float(), v.float())
    assert torch.equal(amax[:, num_q + num_kv :].reshape(v_amax.shape), v_amax)
    values = decode_groups(Quantized(v, v_amax), code, shape[4]) + (center if centered else 0)
    torch.testing.assert_close(decoded[:, cut:], values, rtol=1e-6, atol=1e-6)
    x, found = (y[:, :cut].unflatten(1, (-1, shape[4])) for y in (before, decoded))
    small = x.abs() < 2.0**-14 * x.abs().amax(-1, keepdim=True)
    assert torch.equal(found[~small], x[~small])
    assert ((found - x).abs() <= 2.0**-22 * x.abs().amax(-1, keepdim=True)).all()
    rotated = ops.qk_rope_decode12(*kept, cos, sin, num_q, num_kv, code, torch.float32)
    truth = exact.rope(*doubles((decoded, cos, sin)), None, None, 0.0, num_q, num_kv)
    assert_close_float32("rotated", truth, rotated, terms(shape))


@shapes
def test_backward_straight_to_fp8(shape, device):
    qkv, cos, sin, _, _, _, num_q, num_kv = inputs(shape, "", device)
    tokens = shape[0]
    dy = normal(*qkv.shape, seed=7).to(device)
    truth = doubles((qkv, cos, sin))
    exact.rope(*truth, None, None, 0.0, num_q, num_kv).backward(dy.double())
    parts = split(dy, *shape[2:])
    largest = ops.qk_rope_backward_amax(*parts, cos, sin, num_q)
    assert_close_float32("amax", truth[0].grad.abs().max(), largest, terms(shape))
    data, data_t, scale = ops.qk_rope_backward_quantize(*parts, cos, sin, largest, "e5m2", num_q)
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    if tokens > 1:
        assert_close("dqkv", truth[0].grad, data.double() * scale.double(), E5M2_DB)
