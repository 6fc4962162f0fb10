"""Kernels of kernels/norm.py: row statistics, the norm's output in FP8 with its kept codes, and the backward.

Bytes moved, with U = T * H * 2: statistics 1 U, 3 U with the residual's addition; norm_quantize 2 U (reads x, writes
one byte each of y and codes); norm_backward 3.5 U (reads dy, codes and dresidual, writes dx).

A row's sums are taken in another order than PyTorch's, so rstd may differ from the reference's in its last bits, and
with it dx by one BF16 step. Given the statistics, norm_quantize equals the reference bit for bit. The parameter
gradients are deterministic: each program adds up its own rows, and partials.py adds the programs' sums in order.

Legend: T tokens, H hidden, HP = H rounded up to a power of 2, G group size, n = ceil(H / G), Q programs.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    decode,
    encode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.gpu.groups import GROUP_TILE
from overcoat.kernels.gpu.hardware import to_float32
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.gpu.partials import sum_partials_into
from overcoat.kernels.gpu.tiles import listed_groups, load_inside

# Elements of a row that one thread holds.
STATS_ELEMENTS = 32
BACKWARD_ELEMENTS = 8
# The backward is bound by the loads in flight: with 64 registers a thread two programs of 4096 columns fit on each of
# an H200's 132 multiprocessors, left to itself the compiler takes 81 and one fits (122 us instead of 85).
BACKWARD_REGISTERS = 64
LANE = tl.constexpr(8)
BACKWARD_RESIDENT = 132 * 65536 // BACKWARD_REGISTERS * BACKWARD_ELEMENTS


def _row_warps(width: int, elements: int) -> int:
    """Warps for a program that holds a whole row: between 4 and 32."""
    return min(max(width // (32 * elements), 4), 32)


# ---- statistics -------------------------------------------------------------------------------------------------


@kernel
def _stats_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H), if ADD
    sum_ptr,  # (T, H): residual + x, of which the statistics are then, if ADD
    weight_ptr,  # (H,), if HAS_WEIGHT
    bias_ptr,  # (H,), if HAS_BIAS
    mean_ptr,  # (T,) FP32, if CENTERED
    rstd_ptr,  # (T,) FP32
    row_amax_ptr,  # (T,) FP32: max |y|
    eps,
    H: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HP: tl.constexpr,
):
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, HP)
    inside = None if H == HP else h < H  # None: every element exists, and no mask is taken along
    x = to_float32(load_inside(x_ptr + row * H + h, inside))
    if ADD:
        x += to_float32(load_inside(residual_ptr + row * H + h, inside))
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * H + h, rounded, mask=inside)
        x = to_float32(rounded)
    if CENTERED:
        mean = tl.sum(x, 0) / H
        tl.store(mean_ptr + row, mean)
        x = x - mean
        if H < HP:
            x = tl.where(inside, x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if HAS_WEIGHT:
        y = y * to_float32(load_inside(weight_ptr + h, inside))
    if HAS_BIAS:
        y = y + to_float32(load_inside(bias_ptr + h, inside))
    tl.store(row_amax_ptr + row, max_magnitude(y, 0))


def _launch_stats(
    x: Tensor,
    added: Optional[tuple[Tensor, Tensor]],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """mean (rstd unless `centered`), rstd, row maxima; `added`: the residual, and where its sum with x goes."""
    weight, bias = dense(weight, bias)
    tokens, hidden = x.shape
    rstd, row_amax = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    mean = torch.empty_like(rstd) if centered else rstd
    padded = power_of_2(hidden)
    with on_device(x):
        _stats_kernel[(tokens,)](
            x, *((x, x) if added is None else added), x if weight is None else weight, x if bias is None else bias,
            mean, rstd, row_amax, eps, hidden,
            added is not None, centered, weight is not None, bias is not None, padded,
            num_warps=_row_warps(padded, STATS_ELEMENTS), **EXACT,
        )  # fmt: skip
    return mean, rstd, row_amax


def stats(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """mean (rstd unless `centered`), rstd and each row's max |y|, (T,) FP32 each, of x (T, H)."""
    return _launch_stats(x.contiguous(), None, weight, bias, eps, centered)


def add_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `stats` of x."""
    y, residual = dense(y, residual)
    x = torch.empty_like(y)
    return x, *_launch_stats(y, (residual, x), weight, bias, eps, centered)


# ---- output in FP8, kept codes --------------------------------------------------------------------------------------


@kernel
def _norm_quantize_kernel(
    x_ptr,  # (T, H)
    mean_ptr,  # (T,) FP32, if CENTERED
    rstd_ptr,  # (T,) FP32
    weight_ptr,  # (H,), if HAS_WEIGHT
    bias_ptr,  # (H,), if HAS_BIAS
    amax_ptr,  # 0-d FP32
    y_ptr,  # (T, H) E4M3
    scale_ptr,  # 0-d FP32
    codes_ptr,  # (T, H) 8-bit
    group_amax_ptr,  # (T * n,) BF16
    groups,  # T * n
    n,
    H,
    INVERSE_MAX: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)
    group, row, known, h, inside = listed_groups(groups, n, H, G, GP, NG)
    offsets = row.to(tl.int64)[:, None] * H + h
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.load(mean_ptr + row, mask=known, other=0.0)[:, None], 0.0)
    xhat = x * tl.load(rstd_ptr + row, mask=known, other=0.0)[:, None]
    group_amax = max_magnitude(xhat, 1).to(tl.bfloat16)
    tl.store(group_amax_ptr + group, group_amax, mask=known)
    tl.store(codes_ptr + offsets, encode(xhat, group_amax.to(tl.float32)[:, None], CODE), mask=inside)
    y = xhat
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, to_float8(y * inverse_of(scale), tl.float8e4nv), mask=inside)


def norm_quantize(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    amax: Tensor,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y in E4M3 (T, H), its scale, codes of xhat (T, H), their maxima (T, n)."""
    x, mean, rstd, weight, bias = dense(x, mean, rstd, weight, bias)
    tokens, hidden = x.shape
    n, padded = cdiv(hidden, group_size), power_of_2(group_size)
    y, scale = torch.empty(x.shape, dtype=E4M3.dtype, device=x.device), torch.empty_like(amax)
    codes = torch.empty(x.shape, dtype=group_code(code).dtype, device=x.device)
    group_amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=x.device)
    count = max(GROUP_TILE // padded, 1)
    with on_device(x):
        _norm_quantize_kernel[(cdiv(tokens * n, count),)](
            x, rstd if mean is None else mean, rstd, x if weight is None else weight, x if bias is None else bias,
            amax, y, scale, codes, group_amax, tokens * n, n, hidden,
            inverse_max("e4m3"), mean is not None, weight is not None, bias is not None,
            group_size, padded, CODES[code], count, num_warps=4, **EXACT,
        )  # fmt: skip
    return y, scale, codes, group_amax


# ---- backward -----------------------------------------------------------------------------------------------------


@kernel
def _norm_backward_kernel(
    dy_ptr,  # (T, H)
    codes_ptr,  # (T, H) 8-bit
    group_amax_ptr,  # (T, n) BF16
    rstd_ptr,  # (T,) FP32
    weight_ptr,  # (H,), if HAS_WEIGHT
    dresidual_ptr,  # (T, H), if HAS_RESIDUAL
    dx_ptr,  # (T, H)
    partial_ptr,  # (1 or 2, Q, H) FP32: each program's sums of dy * xhat, and of dy if HAS_BIAS
    top_ptr,  # (Q,) FP32: each program's max |dx|
    T,
    H,
    n,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    NGP: tl.constexpr,  # n rounded up to a power of 2
    CODE: tl.constexpr,
):
    g = tl.arange(0, NGP)
    h = g[:, None] * G + tl.arange(0, GP)[None, :]
    inside = (h < H) & (tl.arange(0, GP) < G)[None, :]
    dweight = tl.zeros((NGP, GP), tl.float32)
    if HAS_BIAS:
        dbias = tl.zeros((NGP, GP), tl.float32)
    top = tl.zeros((NGP, GP // LANE), tl.float32)
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * H
        dy = tl.load(dy_ptr + start + h, mask=inside, other=0.0).to(tl.float32)
        codes = tl.load(codes_ptr + start + h, mask=inside, other=0.0)
        amax = tl.load(group_amax_ptr + tl.cast(row, tl.int64) * n + g, mask=g < n, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            dresidual = tl.load(dresidual_ptr + start + h, mask=inside, other=0.0).to(tl.float32)
        xhat = decode(codes, amax[:, None], CODE)
        product = dy * xhat
        dweight += product
        if HAS_BIAS:
            dbias += dy
        gradient = dy
        if HAS_WEIGHT:
            # Read again for every row, from the L1 cache: kept, it would take a register for each element.
            gradient = dy * tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
        dx = gradient - xhat * (tl.sum(tl.sum(gradient * xhat, 1), 0) / H)
        if CENTERED:
            dx = dx - tl.sum(tl.sum(gradient, 1), 0) / H
        dx = dx * tl.load(rstd_ptr + row)
        if HAS_RESIDUAL:
            dx = dx + dresidual
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + start + h, dx, mask=inside)
        largest = tl.where(inside, dx, 0.0).to(tl.float32)
        top = larger(top, max_magnitude(tl.reshape(largest, (NGP, GP // LANE, LANE)), 2))
    mine = partial_ptr + tl.program_id(0) * H + h
    tl.store(mine, dweight, mask=inside)
    if HAS_BIAS:
        tl.store(mine + tl.num_programs(0) * H, dbias, mask=inside)
    tl.store(top_ptr + tl.program_id(0), max_magnitude(max_magnitude(top, 1), 0))


def norm_backward(
    dy: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    rstd: Tensor,
    weight: Optional[Tensor],
    dresidual: Optional[Tensor],
    centered: bool,
    has_bias: bool,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (T, H) with dresidual added, dweight (H,) of the weight's dtype, dbias (H,) or (0,) FP32, max |dx|."""
    dy, codes, group_amax, rstd, weight, dresidual = dense(dy, codes, group_amax, rstd, weight, dresidual)
    tokens, hidden = dy.shape
    n, gp = group_amax.shape[1], power_of_2(group_size)
    width = power_of_2(n) * gp
    programs, sums = min(tokens, max(BACKWARD_RESIDENT // width, 132)), 2 if has_bias else 1
    dx = torch.empty_like(dy)
    partial = torch.empty((sums, programs, hidden), dtype=torch.float32, device=dy.device)
    top = torch.empty(programs, dtype=torch.float32, device=dy.device)
    dweight = torch.empty(hidden, dtype=torch.float32 if weight is None else weight.dtype, device=dy.device)
    dbias = torch.empty(hidden if has_bias else 0, dtype=torch.float32, device=dy.device)
    amax = torch.empty((), dtype=torch.float32, device=dy.device)
    with on_device(dy):
        _norm_backward_kernel[(programs,)](
            dy, codes, group_amax, rstd, dy if weight is None else weight, dy if dresidual is None else dresidual,
            dx, partial, top, tokens, hidden, n, centered, has_bias, weight is not None, dresidual is not None,
            group_size, gp, power_of_2(n), CODES[code],
            num_warps=_row_warps(width, BACKWARD_ELEMENTS), maxnreg=BACKWARD_REGISTERS, **EXACT,
        )  # fmt: skip
    sum_partials_into(partial.unbind(0), (dweight, dbias)[:sums], top, amax)
    return dx, dweight, dbias, amax
