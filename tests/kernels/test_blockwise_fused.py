"""Fused block-scaled ops against FP64 and against their parts: `pytest tests/kernels/test_blockwise_fused.py`."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import Quantized, decode_groups
from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels import norm, norm_blockwise, rope_backward, rope_blockwise, swiglu
from overcoat.kernels.blockwise import block_quantize_both, block_quantize_t
from tests import exact
from tests.exact import E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, assert_close_float32, combined_db
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded

tokens_ = pytest.mark.parametrize("tokens", [1, 7, 150])
EPS = 1e-5


def assert_same(ours, theirs):
    """Equal values; the same count of them."""
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.float(), b.float())


@tokens_
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("affine", ["none", "weight", "weight+bias"])
@pytest.mark.parametrize("added", [False, True], ids=["", "sum"])
def test_norm(tokens, centered, affine, added, device):
    x = (3 * normal(tokens, 200) + 1).to(device, torch.bfloat16)
    weight = (1 + 0.3 * normal(200, seed=5)).to(device) if "weight" in affine else None
    bias = normal(200, seed=6).to(device) if "bias" in affine and centered else None
    inputs = (x,)
    if added:
        inputs = (normal(tokens, 200, seed=7).to(device, torch.bfloat16), x)
        x, *results = norm_blockwise.add_norm_block_quantize(*inputs, weight, bias, EPS, centered, "sqrt8", 64)
        assert torch.equal(x, inputs[0] + inputs[1])
    else:
        results = norm_blockwise.norm_block_quantize(x, weight, bias, EPS, centered, "sqrt8", 64)
    y8, scale, codes, group_amax, rstd = results
    truth = exact.norm(x.double(), *(p if p is None else p.double() for p in (weight, bias)), EPS, centered)
    assert_close("y", truth, decoded(y8, scale), E4M3_DB)
    xhat = exact.norm(x.double(), None, None, EPS, centered)
    assert_close("xhat", xhat, decode_groups(Quantized(codes, group_amax), "sqrt8", 64), KEPT_DB["sqrt8"])
    wide = x.double() - (x.double().mean(1, keepdim=True) if centered else 0)
    assert_close_float32("rstd", (wide.square().mean(1) + EPS).rsqrt(), rstd, 200)


@tokens_
def test_norm_keeps_the_codes_of_the_unfused_norm(tokens, device):
    x, weight = normal(tokens, 200).to(device), normal(200, seed=1).to(device)
    _, _, codes, group_amax, rstd = norm_blockwise.norm_block_quantize(x, weight, None, EPS, False, "int8", 128)
    top = torch.ones((), device=device)
    assert_same((codes, group_amax), norm.norm_quantize(x, None, rstd, weight, None, top, "int8", 128)[2:])


@tokens_
@pytest.mark.parametrize("width", [130, 256])
def test_swiglu_forward(tokens, width, device):
    gate_up = normal(tokens, 2 * width, dtype=torch.bfloat16).to(device)
    h8, scale, codes, group_amax = ops.swiglu_block_quantize(gate_up, "sqrt8", 64)
    assert_same((codes, group_amax), swiglu.swiglu_encode(gate_up, "sqrt8", 64)[:2])
    assert_close("h", exact.swiglu(gate_up.double()), decoded(h8, scale), E4M3_DB, extra=1.0)


@tokens_
@pytest.mark.parametrize("width", [130, 256])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_swiglu_backward(tokens, width, fmt, device):
    gate_up = normal(tokens, 2 * width).to(device).requires_grad_()
    dh = normal(tokens, width, seed=1).to(device)
    _, _, codes, group_amax = ops.swiglu_block_quantize(gate_up.detach(), "sqrt8", 64)
    h = exact.swiglu(gate_up.double())
    (truth,) = torch.autograd.grad(h, gate_up, dh.double())
    noise = combined_db(KEPT_DB["sqrt8"], KEPT_DB["sqrt8"])
    gradient, h_t, h_scale = ops.swiglu_block_backward(dh, codes, group_amax, "sqrt8", 64)
    assert_close("dgate_up", truth, gradient, noise, extra=1.0)
    assert h_t[:, tokens:].float().count_nonzero() == 0
    assert_close("h^T", h.t(), decoded(h_t, h_scale)[:, :tokens], combined_db(E4M3_DB, noise), extra=1.0)

    data, scale, data_t, scale_t, *h_again = ops.swiglu_block_backward_quantize(dh, codes, group_amax, fmt, "sqrt8", 64)
    assert_same(h_again, (h_t, h_scale))
    assert_same((data, scale, data_t, scale_t), block_quantize_both(gradient, fmt))
    db = combined_db(FLOAT8_DB[fmt], noise)
    assert_close("dgate_up", truth, decoded(data, scale), db, extra=1.0)
    assert_close("dgate_up^T", truth.t(), decoded(data_t, scale_t)[:, :tokens], db, extra=1.0)


@pytest.mark.parametrize(("num_q", "num_kv", "width"), [(2, 2, 64), (4, 2, 64), (1, 1, 128), (3, 1, 24)])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_rope_backward(num_q, num_kv, width, fmt, device):
    tokens, positions = 14, 7
    parts = [normal(tokens, n * width, seed=n).to(device) for n in (num_q, num_kv, num_kv)]
    cos, sin = normal(positions, width, seed=8).to(device), normal(positions, width, seed=9).to(device)
    plain = rope_backward.qk_rope_backward(*parts, None, cos, sin, None, None, 0.0, num_q)[0]
    ours = rope_blockwise.qk_rope_block_backward(*parts, cos, sin, fmt, num_q)
    assert_same(ours, block_quantize_both(plain, fmt))
    assert_same(ours[2:], block_quantize_t(plain, fmt))
