"""The kernels of kernels/gpu/rope.py equal their references (with head norms, summed otherwise, nearly)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import rope as ops
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.rope_cases import CASES, head_weights, tables

pytestmark = NEEDS_GPU


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
    center = None if width == 80 else torch.randn(num_kv * width, device=DEVICE)
    arguments = (center, *tables(positions, width), *head_weights(width, head_norm), 1e-6, num_q, num_kv, code)
    ours, theirs = qkv.clone(), qkv.clone()
    kept_reference = ops.qk_rope_encode12_.reference(theirs, *arguments)
    kept = ops.qk_rope_encode12_.kernel(ours, *arguments)
    assert_equal(ours, theirs, exact=not head_norm)
    whole = (center, None, None, num_q, num_kv, code, torch.float32)
    if (
        INTERPRETED
    ):  # maxima in BF16 are truncated there: other codes, which stand for nearly the same; E4M3's carry too
        found, true = (ops.qk_rope_decode12.reference(*each, *whole) for each in (kept, kept_reference))
        assert (found - true).abs().max() <= (0.5 if code == "e4m3" else 2.0**-5) * true.abs().max()
        assert_equal(kept[2], kept_reference[2])
    else:
        assert_equal(kept, kept_reference)
    for rotation in (arguments[1:3], (None, None)):
        last = (center, *rotation, num_q, num_kv, code, torch.bfloat16)
        decoded = ops.qk_rope_decode12.kernel(*kept_reference, *last)
        assert_equal(decoded, ops.qk_rope_decode12.reference(*kept_reference, *last))


def test_head_norms_of_two_dtypes():
    q_weight, k_weight = head_weights(16, True)
    qkv, shared = awkward(14, 4 * 16), tables(7, 16)
    mixed = (qkv, *shared, q_weight, k_weight.float(), 1e-6, 2, 1)
    assert_equal(ops.qk_rope.kernel(*mixed), ops.qk_rope.kernel(qkv, *shared, q_weight, k_weight, 1e-6, 2, 1))
