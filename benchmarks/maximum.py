"""The time it takes to find max |y| of a norm's output, one-stage and two-stage (COAT's Group Scaling).

    one stage    y is written in BF16 and read once more for its maximum
    two stages   the kernel that computes the norm's statistics also finds each row's maximum; the maximum of those T
                 numbers is the tensor's, and y in BF16 never exists

What the first stage adds to the statistics kernel is found with the same kernel without maxima (`rstd_alone`). The
paper's first stage leaves one maximum for each 1x16 group instead of one for each row: its second stage is timed too.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.common import time_ms
from overcoat.kernels.device import EXACT, power_of_2
from overcoat.kernels.instructions import to_float32
from overcoat.kernels.norm import STATS_ELEMENTS, rmsnorm_stats
from overcoat.kernels.quantize import amax
from overcoat.kernels.tiles import load_inside

EPS = 1e-6
PAPER_GROUP = 16
REPEATS = 100


@triton.jit
def _rstd_kernel(
    x_ptr,  # (T, H)
    rstd_ptr,  # (T,) FP32
    eps,
    H: tl.constexpr,
    HP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    x = to_float32(load_inside(x_ptr + row * H + h, None if H == HP else h < H))
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(x * x, 0) / H + eps))


def rstd_alone(x: Tensor) -> Tensor:
    """rstd (T,) FP32 of x (T, H), contiguous: `rmsnorm_stats` without the maxima."""
    tokens, hidden = x.shape
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    padded = power_of_2(hidden)
    warps = min(max(padded // (32 * STATS_ELEMENTS), 4), 32)  # as that kernel's launch has it
    _rstd_kernel[(tokens,)](x, rstd, EPS, hidden, padded, num_warps=warps, **EXACT)
    return rstd


def time_maximum(tokens: int, hidden: int) -> dict[str, float]:
    """Median ms of every part, with cold caches, and what finding the maximum costs in one stage and in two."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    row_amax = torch.rand(tokens, device="cuda")
    group_amax = torch.rand(tokens, hidden // PAPER_GROUP, device="cuda")
    parts = {
        "statistics and row maxima": lambda: rmsnorm_stats(x, weight, EPS),
        "statistics alone": lambda: rstd_alone(x),
        "maximum of the row maxima": lambda: amax(row_amax),
        "maximum of 1x16 maxima": lambda: amax(group_amax),
        "maximum of the tensor": lambda: amax(x),
        "maximum of the tensor, torch": lambda: x.abs().amax(),
    }
    times = {name: time_ms(function, repeats=REPEATS)["ms"] for name, function in parts.items()}
    first = times["statistics and row maxima"] - times["statistics alone"]
    return {
        **times,
        "one stage": times["maximum of the tensor"],
        "two stages": first + times["maximum of the row maxima"],
    }
