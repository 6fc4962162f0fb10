"""The rotated-back gradient straight in FP8 blocks: the two steps in one, and the kernel, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels.blockwise import block_quantize_both
from overcoat.kernels.rope_backward import qk_rope_backward
from overcoat.kernels.rope_blockwise import qk_rope_block_backward
from tests.kernels.compare import DEVICE, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal
from tests.kernels.test_rope import tables

formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


@pytest.mark.parametrize(("num_q", "num_kv", "width"), [(2, 2, 64), (4, 2, 64), (1, 1, 128), (3, 1, 24)])
@formats
def test_it_is_rotated_then_quantized(num_q, num_kv, width, fmt, device):
    tokens, positions = 14, 7
    parts = [normal(tokens, n * width, seed=n).to(device) for n in (num_q, num_kv, num_kv)]
    cos, sin = normal(positions, width, seed=8).to(device), normal(positions, width, seed=9).to(device)
    plain = qk_rope_backward(*parts, None, cos, sin, None, None, 0.0, num_q)[0]
    for ours, theirs in zip(qk_rope_block_backward(*parts, cos, sin, fmt, num_q), block_quantize_both(plain, fmt)):
        assert torch.equal(ours.float(), theirs.float())


# Tokens, positions, query heads, key/value heads, head width.
CASES = [(1, 1, 1, 1, 128), (134, 67, 4, 2, 64), (61, 61, 2, 1, 256), (20, 20, 8, 8, 80), (7, 7, 3, 1, 80)]
CASES += [] if INTERPRETED else [(2000, 1000, 32, 32, 128), (1000, 1000, 28, 4, 128)]


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("fmt", "dtype"), [("e5m2", torch.bfloat16), ("e4m3", torch.float32)])
def test_kernel(case, fmt, dtype):
    tokens, positions, num_q, num_kv, width = case
    views = awkward(tokens, (num_q + 2 * num_kv) * width, dtype).split(
        (num_q * width, num_kv * width, num_kv * width), 1
    )
    rest = (*tables(positions, width, dtype), fmt, num_q)
    expected = qk_rope_block_backward.reference(*views, *rest)
    for parts in (views, [part.contiguous() for part in views], [part.t().contiguous().t() for part in views]):
        assert_equal(qk_rope_block_backward.kernel(*parts, *rest), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_where_a_scale_is_not_finite(value):
    """134 tokens are padded to 144; the scales of the last block, and of row 133, are those of its bad value."""
    dy = torch.randn(134, 256, device=DEVICE).bfloat16()
    dy[133, 7] = value
    ones = torch.ones(67, 128, device=DEVICE)
    _, _, rotated_t, scale = qk_rope_block_backward.kernel(dy, dy, dy, ones, ones, "e5m2", 2)
    assert not scale[1].isfinite().all()
    assert rotated_t.shape[1] == 144
    assert not rotated_t.view(torch.uint8)[:, 134:].any()
    assert rotated_t.view(torch.uint8)[:, :133].any()
