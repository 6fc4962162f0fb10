"""Fused block-scaled ops against FP64 and against their parts: `pytest tests/kernels/test_blockwise_fused.py`."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels import swiglu
from overcoat.kernels.blockwise import block_quantize_both
from tests import exact
from tests.exact import E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded

tokens_ = pytest.mark.parametrize("tokens", [1, 7, 150])


def assert_same(ours, theirs):
    """Equal values; the same count of them."""
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.float(), b.float())


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
