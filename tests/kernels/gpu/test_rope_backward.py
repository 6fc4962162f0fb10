"""The kernels of kernels/gpu/rope_backward.py equal their references."""

from __future__ import annotations

import pytest

from overcoat.kernels import rope_backward, rope_quantize
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import FORMATS, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.rope_cases import CASES, laid_out, split_heads, tables

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    tokens, positions, num_q, num_kv, width = case
    parts = split_heads(awkward(tokens, (num_q + 2 * num_kv) * width), num_q, num_kv)
    cos, sin = tables(positions, width)
    arguments = (None, cos, sin, None, None, 0.0, num_q)
    theirs = rope_backward.qk_rope_backward.reference(*parts, *arguments)
    for inputs in laid_out(parts):
        assert_equal(rope_backward.qk_rope_backward.kernel(*inputs, *arguments), theirs)
        top = rope_quantize.qk_rope_backward_amax.kernel(*inputs, cos, sin, num_q)
        assert_equal(top, rope_quantize.qk_rope_backward_amax.reference(*inputs, cos, sin, num_q))
        assert top >= 0.99 * amax.reference(theirs[0])
        largest, sums = rope_quantize.qk_rope_backward_amax_sums.kernel(*inputs, cos, sin, num_q)
        assert_equal(largest, top)
        values = rope_backward.rope_gradient(*inputs, cos, sin, num_q).double()
        # At most 5 additions one after another in a tile, then 9 and one for every 512 tiles: each may round.
        assert ((sums - values.sum(0)).abs() <= 16 * 2.0**-24 * values.abs().sum(0)).all()
        for fmt in FORMATS:
            ours = rope_quantize.qk_rope_backward_quantize.kernel(*inputs, cos, sin, top, fmt, num_q)
            assert_equal(ours, rope_quantize.qk_rope_backward_quantize.reference(*inputs, cos, sin, top, fmt, num_q))
