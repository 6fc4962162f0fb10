"""The kernels of kernels/gpu/rope.py equal their references (with head norms, summed otherwise, nearly)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import rope as ops
from overcoat.kernels.gpu import rope_norm_backward
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

# Tokens, positions, query heads, key/value heads, head width.
CASES = [(1, 1, 1, 1, 16), (14, 7, 2, 2, 80), (35, 35, 4, 2, 128), (40, 20, 3, 1, 64)]
CASES += [] if INTERPRETED else [(61, 61, 4, 2, 128), (2000, 1000, 32, 32, 128), (1000, 1000, 28, 4, 128)]


def tables(positions: int, width: int, dtype: torch.dtype = torch.bfloat16):
    """cos and sin; the halves differ, as the op's contract allows."""
    angle = torch.randn(positions, width, device=DEVICE) * 3
    return (1.3 * angle.cos()).to(dtype), (1.3 * angle.sin()).to(dtype)


def split_heads(x, num_q, num_kv):
    """The columns of q, k and v: views, whose rows lie apart."""
    width = x.shape[1] // (num_q + 2 * num_kv)
    return x.split((num_q * width, num_kv * width, num_kv * width), 1)


def laid_out(parts):
    """The same gradients as views of one buffer, as columns of wider ones, apart, and stored column by column."""
    wider = [torch.cat((part, part.neg()), 1)[:, : part.shape[1]] for part in parts]
    return parts, wider, [part.contiguous() for part in parts], [part.t().contiguous().t() for part in parts]


def head_weights(width: int, wanted: bool):
    return tuple(torch.randn(width, device=DEVICE).bfloat16() if wanted else None for _ in range(2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_qk_rope(case, head_norm, dtype):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width, dtype)
    arguments = (*tables(positions, width, dtype), *head_weights(width, head_norm), 1e-6, num_q, num_kv)
    ours, theirs = ops.qk_rope.kernel(qkv, *arguments), ops.qk_rope.reference(qkv, *arguments)
    assert_equal(ours, theirs, exact=not head_norm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
def test_encode_and_decode(case, head_norm, code):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width)
    center = None if width == 80 else torch.randn(qkv.shape[1], device=DEVICE)
    arguments = (center, *tables(positions, width), *head_weights(width, head_norm), 1e-6, num_q, num_kv, code)
    ours, theirs = qkv.clone(), qkv.clone()
    kept_reference = ops.qk_rope_encode_.reference(theirs, *arguments)
    assert_equal(ops.qk_rope_encode_.kernel(ours, *arguments), kept_reference)
    assert_equal(ours, theirs, exact=not head_norm)
    decoded = ops.qk_rope_decode.kernel(*kept_reference, *arguments, torch.bfloat16)
    reference = ops.qk_rope_decode.reference(*kept_reference, *arguments, torch.bfloat16)
    assert_equal(decoded, reference, exact=not head_norm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
def test_backward(case, fmt):
    tokens, positions, num_q, num_kv, width = case
    parts = split_heads(awkward(tokens, (num_q + 2 * num_kv) * width), num_q, num_kv)
    cos, sin = tables(positions, width)
    arguments = (None, cos, sin, None, None, 0.0, num_q)
    theirs = ops.qk_rope_backward.reference(*parts, *arguments)
    for inputs in laid_out(parts):
        assert_equal(ops.qk_rope_backward.kernel(*inputs, *arguments), theirs)
        top = ops.qk_rope_backward_amax.kernel(*inputs, cos, sin, num_q)
        assert_equal(top, ops.qk_rope_backward_amax.reference(*inputs, cos, sin, num_q))
        assert top >= 0.99 * amax.reference(theirs[0])
        ours = ops.qk_rope_backward_quantize.kernel(*inputs, cos, sin, top, fmt, num_q)
        assert_equal(ours, ops.qk_rope_backward_quantize.reference(*inputs, cos, sin, top, fmt, num_q))


# No multiples of a tile's tokens or heads; head widths with odd halves, of one element, of several tiles.
NORM_CASES = [*CASES, (5, 5, 28, 4, 12), (67, 67, 5, 1, 2), (3, 3, 1, 1, 384)]


def norm_backward_arguments(case, norms, dtype=torch.bfloat16, eps=1e-6):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width, dtype)
    if eps == 0:
        qkv = torch.randn_like(qkv)
    weights = (weight if name in norms else None for name, weight in zip("qk", head_weights(width, True)))
    gradients = split_heads(torch.randn_like(qkv), num_q, num_kv)
    return *gradients, qkv, *tables(positions, width, dtype), *weights, eps, num_q


def assert_norm_gradient(ours, theirs, norms, num_q, num_kv):
    """Heads with a norm are as near as another order of summation allows, all others equal bit for bit."""
    for name, a, b in zip("qkv", split_heads(ours[0], num_q, num_kv), split_heads(theirs[0], num_q, num_kv)):
        assert_equal(a.contiguous(), b.contiguous(), exact=name not in norms)
    for a, b, heads in zip(ours[1:], theirs[1:], (num_q, num_kv)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * (heads * len(ours[0])) ** 0.5)


@pytest.mark.parametrize("case", NORM_CASES)
@pytest.mark.parametrize("norms", ["qk", "q", "k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_with_head_norms(case, norms, dtype):
    arguments = norm_backward_arguments(case, norms, dtype)
    ours, theirs = ops.qk_rope_backward.kernel(*arguments), ops.qk_rope_backward.reference(*arguments)
    assert_norm_gradient(ours, theirs, norms, *case[2:4])


@pytest.mark.parametrize("case", NORM_CASES)
def test_backward_with_head_norms_in_few_programs(case, monkeypatch):
    """Programs that walk along many tiles, and eps = 0, with which the rows past the end must not divide by zero."""
    monkeypatch.setattr(rope_norm_backward, "RESIDENT", 3)
    arguments = norm_backward_arguments(case, "qk", eps=0.0)
    ours, theirs = ops.qk_rope_backward.kernel(*arguments), ops.qk_rope_backward.reference(*arguments)
    assert not theirs[1].isnan().any()
    assert_norm_gradient(ours, theirs, "qk", *case[2:4])


@pytest.mark.parametrize("case", NORM_CASES[:4])
def test_backward_with_head_norms_of_strided_parts(case):
    """Wherever attention leaves the gradients of q, k and v, the same bits."""
    dq, dk, dv, *rest = norm_backward_arguments(case, "qk")
    parts = (dq, dk, dv)
    first, *others = [ops.qk_rope_backward.kernel(*inputs, *rest) for inputs in laid_out(parts)]
    for ours in others:
        assert all(torch.equal(a, b) for a, b in zip(ours, first))
    assert_norm_gradient(first, ops.qk_rope_backward.reference(*parts, *rest), "qk", *case[2:4])


@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_head_norm_gradients_are_deterministic():
    arguments = norm_backward_arguments((5000, 5000, 32, 8, 128), "qk")
    runs = [ops.qk_rope_backward.kernel(*arguments) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
    assert_norm_gradient(runs[0], ops.qk_rope_backward.reference(*arguments), "qk", 32, 8)
