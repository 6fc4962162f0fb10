"""Kernels of the forward in kernels/swiglu.py: gate and up in 8-bit groups, their product in FP8.

Bytes moved, with V = T * I * 2 (2.69 U in Llama):

    swiglu_encode             2 V read, 1 V of codes written
    swiglu_quantize           2 V read, 1/2 V written

Everything equals the reference bit for bit.

Legend: T tokens, I intermediate width, G group size, GP = G rounded up to a power of 2, n = ceil(I / G).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    atomic_amax,
    encode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
    sigmoid,
    to_float8,
)
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device
from overcoat.kernels.gpu.tiles import listed_groups

# Pairs of gate and up that a program encodes. It is one warp: what others have found by then decides whether it looks
# for a maximum. Several warps would read that each for itself, and some might look and wait for those that do not.
ENCODE_TILE = 1024
# Columns of a row whose product a program takes.
PRODUCT_COLUMNS = 2048
SILU_BOUND = tl.constexpr(0.2785)
# More than the products' rounding can add to a bound.
ROUNDING = tl.constexpr(1.0 + 2.0**-20)


@triton.jit
def _encode_half(values_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE: tl.constexpr):
    """Load (NG, GP) values of gate or up, write their codes and maxima; returns both in FP32."""
    x = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(x, 1).to(tl.bfloat16)
    tl.store(amax_ptr + places, amax, mask=known)
    amax = amax.to(tl.float32)
    tl.store(codes_ptr + offsets, encode(x, amax[:, None], CODE), mask=inside)
    return x, amax


@triton.jit
def _bound(gate, up, gate_amax):
    """Bits of a number that max |gate sigmoid(gate) up| of a tile does not exceed; NaN where it may be NaN.

    silu(x) is at most x for positive x and at least -0.27847 for all others; at -inf it is NaN.
    """
    bound = max_magnitude(larger(gate, SILU_BOUND) * tl.abs(up), 1) * ROUNDING
    bound = tl.where(gate_amax < float("inf"), bound, float("nan"))
    return max_magnitude(bound, 0).to(tl.int32, bitcast=True)


@kernel
def _swiglu_encode_kernel(
    gate_up_ptr,  # (T, 2I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    top_ptr,  # 0-d int32: bits of max |h|
    groups,  # T * n
    n,
    I,  # noqa: E741
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column
    places = group + row * n  # among (T, 2, n)
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    gate, gate_amax = _encode_half(gate_up_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE)
    up, _ = _encode_half(gate_up_ptr + I, codes_ptr + I, amax_ptr + n, offsets, places, inside, known, CODE)
    # Half of the special function unit's work would be h, of which only the largest is wanted. Once the first programs
    # have found large values few tiles can hold a larger one, and only those compute theirs. Which do depends on who
    # comes first; the result does not.
    if _bound(gate, up, gate_amax) > seen:
        h = gate * sigmoid(gate) * up
        atomic_amax(top_ptr, max_magnitude(max_magnitude(h, 1), 0))


def swiglu_encode(gate_up: Tensor, code: str, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (T, 2I), maxima (T, 2, n), max |h| (0-d FP32) of gate_up (T, 2I)."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    n, gp = cdiv(width, group_size), power_of_2(group_size)
    codes = torch.empty(gate_up.shape, dtype=group_code(code).dtype, device=gate_up.device)
    amax = torch.empty((tokens, 2, n), dtype=torch.bfloat16, device=gate_up.device)
    top = torch.zeros((), dtype=torch.int32, device=gate_up.device)
    count = max(ENCODE_TILE // gp, 1)
    with on_device(gate_up):
        _swiglu_encode_kernel[(cdiv(tokens * n, count),)](
            gate_up, codes, amax, top, tokens * n, n, width,
            group_size, gp, CODES[code], count, num_warps=1, **EXACT,
        )  # fmt: skip
    return codes, amax, top.view(torch.float32)


@kernel
def _swiglu_quantize_kernel(
    gate_up_ptr,  # (T, 2I)
    amax_ptr,  # 0-d FP32
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # 0-d FP32
    I,  # noqa: E741
    INVERSE_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up_ptr + row * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    h = gate * sigmoid(gate) * up * inverse_of(scale)
    tl.store(h_ptr + row * I + column, to_float8(h, tl.float8e4nv), mask=inside)


def swiglu_quantize(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    h, scale = torch.empty((tokens, width), dtype=E4M3.dtype, device=gate_up.device), torch.empty_like(amax)
    with on_device(gate_up):
        _swiglu_quantize_kernel[(tokens, cdiv(width, PRODUCT_COLUMNS))](
            gate_up, amax, h, scale, width, inverse_max("e4m3"), PRODUCT_COLUMNS, num_warps=4, **EXACT
        )
    return h, scale
