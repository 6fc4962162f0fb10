"""SwiGLU ops against FP64 autograd: `pytest tests/kernels/test_swiglu.py`.

The backward's arithmetic is compared with the truth at the decoded gate and up, where nothing but FP32 rounding is
left; the code's own noise has its place in a second test. Products of Gaussians have heavy tails: 1 dB extra.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, Quantized, decode_groups, encode_groups
from overcoat.kernels import swiglu as ops
from tests import exact
from tests.exact import E4M3_DB, E5M2_DB, KEPT_DB, assert_close, assert_close_float32, combined_db, leaf
from tests.kernels.samples import normal

WIDTH = 200
tokens_ = pytest.mark.parametrize("tokens", [1, 7, 61])
codes_ = pytest.mark.parametrize("code", list(KEPT_DB))
# Operations in a row: sigmoid is good to a few units of the last place, then five products and a sum.
TERMS = 16


def kept(gate_up, code, group_size=128):
    """codes, maxima; and gate_up as those decode."""
    codes, group_amax, _ = ops.swiglu_encode(gate_up, code, group_size)
    halves = Quantized(codes.unflatten(1, (2, -1)), group_amax.flatten(0, 1))
    return codes, group_amax, decode_groups(halves, code, group_size).flatten(1)


def gradients(gate_up, dh):
    """h and the gradient of gate_up, FP64."""
    gate_up = leaf(gate_up)
    h = exact.swiglu(gate_up)
    h.backward(dh.double())
    return h.detach(), gate_up.grad


@tokens_
@codes_
def test_encode(tokens, code, device):
    gate_up = normal(tokens, 2 * WIDTH, dtype=torch.bfloat16).to(device)
    gate_up[:, WIDTH - 1] = 100.0  # the last of gate: groups that spanned into up would show it there
    codes, group_amax, h_amax = ops.swiglu_encode(gate_up, code, 128)
    for half in (0, 1):
        part = gate_up[:, half * WIDTH : (half + 1) * WIDTH]
        expected = encode_groups(part, code, 128)
        assert torch.equal(codes[:, half * WIDTH : (half + 1) * WIDTH].float(), expected.data.float())
        assert torch.equal(group_amax[:, half], expected.scale)
    assert_close_float32("max |h|", exact.swiglu(gate_up.double()).abs().amax(), h_amax, TERMS)


@tokens_
def test_quantize(tokens, device):
    gate_up = normal(tokens, 2 * WIDTH, dtype=torch.bfloat16).to(device)
    _, _, h_amax = ops.swiglu_encode(gate_up, "sqrt8", 128)
    data, scale = ops.swiglu_quantize(gate_up, h_amax)
    assert data.float().abs().max() == 448, "both passes must agree on the maximum"
    assert_close("h", exact.swiglu(gate_up.double()), data.double() * scale.double(), E4M3_DB, extra=1.0)


@tokens_
@codes_
def test_backward_arithmetic(tokens, code, device):
    gate_up, dh = (3 * normal(tokens, 2 * WIDTH)).to(device), normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, decoded = kept(gate_up, code)
    h, expected = gradients(decoded, dh)
    scale = h.abs().max().float() / 448
    dgate_up, h_t = ops.swiglu_backward(dh, codes, group_amax, scale, code, 128)
    for name, half in (("dgate", slice(0, WIDTH)), ("dup", slice(WIDTH, None))):
        assert_close_float32(name, expected[:, half], dgate_up[:, half], TERMS)
    assert h_t.shape == (WIDTH, -(-tokens // 16) * 16)
    assert h_t[:, tokens:].float().count_nonzero() == 0
    assert_close("h^T", h, h_t[:, :tokens].t().double() * scale.double(), E4M3_DB, extra=1.0)


@codes_
def test_backward_from_kept_codes(code, device):
    gate_up, dh = normal(61, 2 * WIDTH).to(device), normal(61, WIDTH, seed=1).to(device)
    h, expected = gradients(gate_up, dh)
    codes, group_amax, _ = kept(gate_up, code)
    scale = h.abs().max().float() / 448
    dgate_up, h_t = ops.swiglu_backward(dh, codes, group_amax, scale, code, 128)
    noise = combined_db(KEPT_DB[code], KEPT_DB[code])  # gate's and up's
    assert_close("dgate", expected[:, :WIDTH], dgate_up[:, :WIDTH], noise, extra=1.0)
    assert_close("dup", expected[:, WIDTH:], dgate_up[:, WIDTH:], noise, extra=1.0)
    assert_close("h^T", h, h_t[:, :61].t().double() * scale.double(), combined_db(E4M3_DB, noise), extra=1.0)


@tokens_
def test_backward_straight_to_fp8(tokens, device):
    gate_up, dh = normal(tokens, 2 * WIDTH).to(device), normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, decoded = kept(gate_up, "sqrt8")
    h, expected = gradients(decoded, dh)
    scale = h.abs().max().float() / 448
    largest = ops.swiglu_backward_amax(dh, codes, group_amax, "sqrt8", 128)
    assert_close_float32("amax", expected.abs().max(), largest, TERMS)
    data, data_t, d_scale, h_t = ops.swiglu_backward_quantize(
        dh, codes, group_amax, scale, largest, "e5m2", "sqrt8", 128
    )
    assert torch.equal(h_t.float(), ops.swiglu_backward(dh, codes, group_amax, scale, "sqrt8", 128)[1].float())
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    assert_close("dgate_up", expected, data.double() * d_scale.double(), E5M2_DB, extra=1.0)


def test_large_gates_saturate_without_nan(device):
    """silu(-200) is -0, silu(200) is 200: no exp overflows on the way, forward or backward."""
    gate = torch.tensor([-200.0, -90.0, 90.0, 200.0], device=device)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    _, expected = gradients(gate_up, torch.ones(1, 4, device=device))
    codes, group_amax, h_amax = ops.swiglu_encode(gate_up, "sqrt8", 16)
    assert h_amax.item() == 200.0
    dgate_up, _ = ops.swiglu_backward(torch.ones(1, 4, device=device), codes, group_amax, h_amax / 448, "sqrt8", 16)
    # sqrt8's largest relative step is 1/127 of the group's maximum: 200 / 127 on the gate, hence on du = silu(gate).
    torch.testing.assert_close(dgate_up.double(), expected, rtol=0, atol=200 / 127)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("place", [3, WIDTH + 3], ids=["gate", "up"])
def test_non_finite_reaches_forward_and_backward(bad, place, device):
    gate_up = normal(4, 2 * WIDTH).to(device)
    gate_up[2, place] = bad
    codes, group_amax, h_amax = ops.swiglu_encode(gate_up, "sqrt8", 128)
    data, scale = ops.swiglu_quantize(gate_up, h_amax)
    assert not (data.float() * scale).isfinite().any()
    dgate_up, h_t = ops.swiglu_backward(torch.ones(4, WIDTH, device=device), codes, group_amax, scale, "sqrt8", 128)
    assert not dgate_up[2, :128].isfinite().all()
    assert not h_t[:, 2].float().isfinite().all()
