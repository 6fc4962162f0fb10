"""The kernel of kernels/gpu/rope_norm_backward.py equals its reference, nearly: norms are summed otherwise."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import rope_backward
from tests.kernels.gpu.compare import INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.rope_cases import CASES, head_weights, laid_out, split_heads, tables

pytestmark = NEEDS_GPU

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
    ours, theirs = (
        rope_backward.qk_rope_backward.kernel(*arguments),
        rope_backward.qk_rope_backward.reference(*arguments),
    )
    assert_norm_gradient(ours, theirs, norms, *case[2:4])


@pytest.mark.parametrize("case", NORM_CASES)
def test_backward_with_head_norms_in_few_programs(case, monkeypatch):
    """Programs that walk along many tiles, and eps = 0, with which the rows past the end must not divide by zero."""
    monkeypatch.setattr(rope_backward, "RESIDENT", 3)
    arguments = norm_backward_arguments(case, "qk", eps=0.0)
    ours, theirs = (
        rope_backward.qk_rope_backward.kernel(*arguments),
        rope_backward.qk_rope_backward.reference(*arguments),
    )
    assert not theirs[1].isnan().any()
    assert_norm_gradient(ours, theirs, "qk", *case[2:4])


@pytest.mark.parametrize("case", NORM_CASES[:4])
def test_backward_with_head_norms_of_strided_parts(case):
    """Wherever attention leaves the gradients of q, k and v, the same bits."""
    dq, dk, dv, *rest = norm_backward_arguments(case, "qk")
    parts = (dq, dk, dv)
    first, *others = [rope_backward.qk_rope_backward.kernel(*inputs, *rest) for inputs in laid_out(parts)]
    for ours in others:
        assert all(torch.equal(a, b) for a, b in zip(ours, first))
    assert_norm_gradient(first, rope_backward.qk_rope_backward.reference(*parts, *rest), "qk", *case[2:4])


@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_head_norm_gradients_are_deterministic():
    arguments = norm_backward_arguments((5000, 5000, 32, 8, 128), "qk")
    runs = [rope_backward.qk_rope_backward.kernel(*arguments) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
    assert_norm_gradient(runs[0], rope_backward.qk_rope_backward.reference(*arguments), "qk", 32, 8)


def test_no_tokens():
    arguments = norm_backward_arguments((0, 7, 2, 1, 16), "q")
    ours, theirs = (
        rope_backward.qk_rope_backward.kernel(*arguments),
        rope_backward.qk_rope_backward.reference(*arguments),
    )
    assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]
