"""Backward of the norms of norm.py, with the residual branch's gradient added in the same pass.

    g = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g), LayerNorm]) + dresidual
    dweight = sum_T dy * xhat,   dbias = sum_T dy

Bytes moved, with U = T * H * 2: 3.5 U (reads dy, codes and dresidual, writes dx). Means over a row are taken in another
order than PyTorch's, so dx may differ from the reference's by one BF16 step. The parameter gradients are deterministic:
each program adds up its own rows, and partials.py adds the programs' sums in order.

Legend: T tokens, H hidden, G group size, GP = G rounded up to a power of 2, n = ceil(H / G), Q programs.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import Quantized, decode_groups
from overcoat.kernels.codes import CODES, decode
from overcoat.kernels.device import EXACT, larger, max_magnitude, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import dense, kernel
from overcoat.kernels.norm import row_warps
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials_into

# Elements of a row that one thread holds.
BACKWARD_ELEMENTS = 8
# The backward is bound by the loads in flight: with 64 registers a thread two programs of 4096 columns fit on each of
# an H200's 132 multiprocessors, left to itself the compiler takes 81 and one fits (122 us instead of 85).
BACKWARD_REGISTERS = 64
LANE = tl.constexpr(8)
BACKWARD_RESIDENT = 132 * 65536 // BACKWARD_REGISTERS * BACKWARD_ELEMENTS


@op
def norm_backward(
    dy: Tensor, codes: Tensor, group_amax: Tensor, rstd: Tensor, weight: Optional[Tensor], dresidual: Optional[Tensor],
    centered: bool, has_bias: bool, code: str, group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of the norm, with the residual branch's gradient added in the same pass.

    Args:
        dy: (T, H), gradient of y; codes, group_amax: kept xhat; rstd: (T,) FP32; weight: (H,) or None.
        dresidual: (T, H), gradient of x from its other use, or None. centered: LayerNorm.

    Returns:
        dx (T, H) of dy's dtype; dweight (H,), summed in FP32, of the weight's dtype; dbias (H,) FP32, empty without a
        bias; max |dx|, 0-d FP32, for the product that reads dx next.
    """
    xhat = decode_groups(Quantized(codes, group_amax), code, group_size)
    wide = dy.contiguous().float()
    g = wide if weight is None else wide * weight.float()
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if centered:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if dresidual is not None:
        dx = dx + dresidual.float()
    dx = dx.to(dy.dtype)
    dweight = (wide * xhat).sum(0).to(torch.float32 if weight is None else weight.dtype)
    return dx, dweight, wide.sum(0) if has_bias else wide.new_empty(0), dx.abs().amax().float()


@norm_backward.fake
def _empty(dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size):
    dweight = dy.new_empty(dy.shape[1], dtype=torch.float32 if weight is None else weight.dtype)
    dbias = dy.new_empty(dy.shape[1] if has_bias else 0, dtype=torch.float32)
    return dy.new_empty(*dy.shape), dweight, dbias, dy.new_empty((), dtype=torch.float32)


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
    T, H, n, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
    NGP: tl.constexpr,  # n rounded up to a power of 2
    CODE: tl.constexpr,
):  # fmt: skip
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


@norm_backward.cuda
def _(dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size):
    dy, codes, group_amax, rstd, weight, dresidual = dense(dy, codes, group_amax, rstd, weight, dresidual)
    tokens, hidden = dy.shape
    n, gp = group_amax.shape[1], power_of_2(group_size)
    width = power_of_2(n) * gp
    programs, sums = min(tokens, max(BACKWARD_RESIDENT // width, 132)), 2 if has_bias else 1
    results = dx, dweight, dbias, amax = _empty(
        dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size
    )
    partial = dy.new_empty(sums, programs, hidden, dtype=torch.float32)
    top = dy.new_empty(programs, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        dy, codes, group_amax, rstd, dy if weight is None else weight, dy if dresidual is None else dresidual,
        dx, partial, top, tokens, hidden, n, centered, has_bias, weight is not None, dresidual is not None,
        group_size, gp, power_of_2(n), CODES[code],
        num_warps=row_warps(width, BACKWARD_ELEMENTS), maxnreg=BACKWARD_REGISTERS, **EXACT,
    )  # fmt: skip
    sum_partials_into(partial.unbind(0), (dweight, dbias)[:sums], top, amax)
    return results
