"""Add up the partial sums of a kernel's programs in a fixed order: gradients of norms and biases are deterministic.

Each of Q programs has summed its own rows; here these Q sums become one. The buffer, about 4 MB, is in the L2 cache, so
speed depends on the loads in flight: a program takes two 32-byte sectors of 512 rows at once, eight loads of 16 bytes
per thread before the first addition.

Legend: Q programs of the kernel before, C columns.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from overcoat.kernels.device import max_magnitude, power_of_2
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel

# A tile has at most ROWS x COLUMNS elements. A thread holds ELEMENTS of it, unless that leaves fewer than 4 warps.
ROWS, COLUMNS = 512, 16
ELEMENTS = 32


@triton.jit
def _sum_rows(partial_ptr, out_ptr, Q, C, BQ: tl.constexpr, BC: tl.constexpr):
    """Store the sums over all Q rows of this program's columns."""
    q, c = tl.arange(0, BQ), tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BQ, BC), tl.float32)
    for q0 in range(0, Q, BQ):
        rows = partial_ptr + tl.cast(q0, tl.int64) * C + (q[:, None] * C + c[None, :])
        total += tl.load(rows, mask=(q < Q - q0)[:, None] & (c < C)[None, :], other=0.0)
    tl.store(out_ptr + c, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=c < C)


@kernel
def _sum_partials_kernel(
    first_ptr,  # (Q, C) FP32
    second_ptr,  # (Q, C) FP32, if the grid's second axis is 2 long
    first_sum_ptr,  # (C,)
    second_sum_ptr,  # (C,)
    top_ptr,  # (Q,) FP32, at least 0, if HAS_TOP
    amax_ptr,  # 0-d FP32: the largest of them, if HAS_TOP
    Q, C, HAS_TOP: tl.constexpr,
    QP: tl.constexpr,  # Q rounded up to a power of 2
    BQ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) * BC >= C:
        # An extra program takes the maximum, so that no program has both jobs.
        if HAS_TOP:
            q = tl.arange(0, QP)
            top = max_magnitude(tl.load(top_ptr + q, mask=q < Q, other=0.0), 0)
            tl.store(amax_ptr, top, mask=tl.program_id(1) == 0)
    elif tl.program_id(1) == 0:
        _sum_rows(first_ptr, first_sum_ptr, Q, C, BQ, BC)
    else:
        _sum_rows(second_ptr, second_sum_ptr, Q, C, BQ, BC)


def sum_partials_into(
    partials: Sequence[Tensor], sums: Sequence[Tensor], tops: Optional[Tensor] = None, amax: Optional[Tensor] = None
) -> None:
    """Write the sums over the rows of one or two partials (Q, C) FP32 to sums (C,) of any dtype; max(tops) to amax."""
    (programs, columns), first, first_sum = partials[0].shape, partials[0], sums[0]
    rows, wants_top = min(power_of_2(programs), ROWS), tops is not None
    _sum_partials_kernel[(cdiv(columns, COLUMNS) + wants_top, len(partials))](
        first, partials[-1], first_sum, sums[-1], first if tops is None else tops, first if amax is None else amax,
        programs, columns, wants_top, power_of_2(programs) if wants_top else 1, rows, COLUMNS,
        num_warps=min(max(rows * COLUMNS // (32 * ELEMENTS), 4), 16),
    )  # fmt: skip


def sum_partials(*partials: Tensor) -> tuple[Tensor, ...]:
    """Return the sums over the rows of one or two partials (Q, C), FP32 (C,) each, in one launch."""
    sums = tuple(partial.new_empty(partial.shape[1], dtype=torch.float32) for partial in partials)
    sum_partials_into(partials, sums)
    return sums
