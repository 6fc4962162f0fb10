"""The kernels of kernels/gpu/rope.py equal their references (with head norms, summed otherwise, nearly)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import rope as ops
from tests.kernels.gpu.compare import DEVICE, NEEDS_GPU, assert_equal, awkward
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
    center = None if width == 80 else torch.randn(qkv.shape[1], device=DEVICE)
    arguments = (center, *tables(positions, width), *head_weights(width, head_norm), 1e-6, num_q, num_kv, code)
    ours, theirs = qkv.clone(), qkv.clone()
    kept_reference = ops.qk_rope_encode_.reference(theirs, *arguments)
    assert_equal(ops.qk_rope_encode_.kernel(ours, *arguments), kept_reference)
    assert_equal(ours, theirs, exact=not head_norm)
    decoded = ops.qk_rope_decode.kernel(*kept_reference, *arguments, torch.bfloat16)
    reference = ops.qk_rope_decode.reference(*kept_reference, *arguments, torch.bfloat16)
    assert_equal(decoded, reference, exact=not head_norm)


def test_head_norms_of_two_dtypes():
    q_weight, k_weight = head_weights(16, True)
    qkv, shared = awkward(14, 4 * 16), tables(7, 16)
    mixed = (qkv, *shared, q_weight, k_weight.float(), 1e-6, 2, 1)
    assert_equal(ops.qk_rope.kernel(*mixed), ops.qk_rope.kernel(qkv, *shared, q_weight, k_weight, 1e-6, 2, 1))
