"""GELU with block scales against PyTorch's own in FP64: `pytest tests/kernels/test_gelu_blockwise.py`.

The backward's truth is that at the decoded u, as in test_gelu.py.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import encode_groups
from overcoat.kernels import gelu_blockwise as block_ops
from overcoat.kernels.gelu import gelu
from tests.exact import E4M3_DB, E5M2_DB, assert_close, assert_close_float32
from tests.kernels.samples import normal
from tests.kernels.test_gelu import TERMS, WIDTH, backward_case, exact, forms, kept, tokens_


def blocks(data, scale):
    """Values of a 1x128 operand (R, C) with scales (ceil(C / 128), R), FP64."""
    return data.double() * scale.double().t().repeat_interleave(128, 1)[:, : data.shape[1]]


@tokens_
@forms
def test_block_forward(tokens, approximate, device):
    u = normal(tokens, WIDTH, dtype=torch.bfloat16).to(device)
    data, scale, codes, group_amax = block_ops.gelu_block_quantize(u, approximate, "sqrt8", 128)
    assert_close("h", exact(u, u, approximate)[0], blocks(data, scale), E4M3_DB, extra=1.0)
    expected = encode_groups(u, "sqrt8", 128)
    assert torch.equal(codes, expected.data)
    assert torch.equal(group_amax, expected.scale)


@tokens_
@forms
def test_block_backward(tokens, approximate, device):
    arguments, how, h, expected = backward_case(tokens, approximate, device)
    du, *h_t = block_ops.gelu_block_backward(*arguments, *how)
    assert_close_float32("du", expected, du, TERMS)
    assert_close("h^T", h.t(), blocks(*h_t)[:, :tokens], E4M3_DB, extra=1.0)
    *results, sums = block_ops.gelu_block_backward_quantize(*arguments, "e5m2", True, *how)
    assert_close("du", expected, blocks(*results[:2]), E5M2_DB, extra=1.0)
    assert_close("du^T", expected.t(), blocks(*results[2:4])[:, :tokens], E5M2_DB, extra=1.0)
    assert_close_float32("sums over tokens", expected.sum(0), sums, TERMS + tokens)
    for ours, theirs in zip(results[4:], h_t, strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert block_ops.gelu_block_backward_quantize(*arguments, "e5m2", False, *how)[-1].shape == (0,)


@forms
def test_each_block_has_the_scale_of_its_own_maximum(approximate, device):
    """Rows of very different size, the second block of a row a thousand times its first; one block of zeros."""
    u = normal(3, WIDTH).to(device) * torch.tensor([[1e-3], [1.0], [30.0]], device=device)
    u[:, 128:] *= 1000
    u[1, :128] = 0.0
    data, scale, *_ = block_ops.gelu_block_quantize(u, approximate, "sqrt8", 128)
    h = gelu(u, approximate)[0].abs()
    largest = torch.stack([h[:, :128].amax(1), h[:, 128:].amax(1)])
    expected = largest / 448
    expected[0, 1] = 1.0
    torch.testing.assert_close(scale, expected, rtol=2.0**-22, atol=0)
    top = torch.stack([data[:, :128].float().abs().amax(1), data[:, 128:].float().abs().amax(1)])
    assert top.tolist() == [[448.0, 0.0, 448.0], [448.0] * 3]


@pytest.mark.parametrize(("code", "group_size"), [("int8", 32), ("e4m3", 64), ("sqrt8", 16)])
def test_other_codes_and_groups(code, group_size, device):
    """Groups of any size lie beside the operand's blocks: what is kept and rebuilt is that of `encode_groups`."""
    u, dh = normal(5, WIDTH).to(device), normal(5, WIDTH, seed=1).to(device)
    *operand, codes, group_amax = block_ops.gelu_block_quantize(u, "tanh", code, group_size)
    for ours, same in zip(operand, block_ops.gelu_block_quantize(u, "tanh", "sqrt8", 128)):
        assert torch.equal(ours.float(), same.float())
    expected = encode_groups(u, code, group_size)
    assert torch.equal(codes.float(), expected.data.float())
    assert torch.equal(group_amax, expected.scale)
    _, _, decoded = kept(u, code, group_size)
    h, slope = exact(decoded, dh, "tanh")
    du, *h_t = block_ops.gelu_block_backward(dh, codes, group_amax, "tanh", code, group_size)
    assert_close_float32("du", slope, du, TERMS)
    assert_close("h^T", h.t(), blocks(*h_t)[:, :5], E4M3_DB, extra=1.0)


@tokens_
def test_tokens_are_padded_with_zeros(tokens, device):
    u, dh = normal(tokens, WIDTH).to(device), normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, _ = kept(u, "sqrt8")
    arguments = (dh, codes, group_amax, "e5m2", False, "none", "sqrt8", 128)
    _, _, du_t, du_scale, h_t, h_scale, _ = block_ops.gelu_block_backward_quantize(*arguments)
    for operand, scale in ((du_t, du_scale), (h_t, h_scale)):
        assert operand.shape == (WIDTH, -(-tokens // 16) * 16)
        assert operand[:, tokens:].float().count_nonzero() == 0
        assert scale.shape == (1, WIDTH)


def test_gradients_are_in_their_own_format_and_dtype(device):
    u, dh = normal(7, WIDTH).to(device), normal(7, WIDTH, dtype=torch.bfloat16, seed=1).to(device)
    codes, group_amax, decoded = kept(u, "sqrt8")
    how = ("tanh", "sqrt8", 128)
    du, h_t, _ = block_ops.gelu_block_backward(dh, codes, group_amax, *how)
    assert (du.dtype, h_t.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    results = block_ops.gelu_block_backward_quantize(dh, codes, group_amax, "e4m3", True, *how)
    assert [results[place].dtype for place in (0, 2, 4)] == [torch.float8_e4m3fn] * 3
    assert_close("du", exact(decoded, dh, "tanh")[1], blocks(*results[:2]), E4M3_DB, extra=1.0)
    wide = block_ops.gelu_block_backward_quantize(dh, codes, group_amax, "e5m2", True, *how)
    assert [wide[place].dtype for place in (0, 2, 4)] == [torch.float8_e5m2, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@forms
def test_non_finite_reaches_forward_and_backward(bad, approximate, device):
    u = normal(4, WIDTH).to(device)
    u[2, 3] = bad
    data, data_scale, codes, group_amax = block_ops.gelu_block_quantize(u, approximate, "sqrt8", 128)
    assert not blocks(data, data_scale)[2].isfinite().all()
    du, *h_t = block_ops.gelu_block_backward(torch.ones_like(u), codes, group_amax, approximate, "sqrt8", 128)
    assert not du[2, :128].isfinite().all()
    assert not blocks(*h_t)[:, 2].isfinite().all()
    assert du[[0, 1, 3]].isfinite().all()
