"""RMSNorm and LayerNorm fused with the quantization of their output (COAT section 5.2, "Group Scaling").

    RMSNorm     xhat = x * rstd,            rstd = (mean(x^2) + eps)^(-1/2)
    LayerNorm   xhat = (x - mean) * rstd,   rstd = (mean((x - mean)^2) + eps)^(-1/2)
    y = xhat * weight + bias                (weight and bias may be absent: OLMo 1)

Forward. xhat is saved in 8-bit groups for the backward. Saving xhat instead of y costs the same bytes and needs no
division by a weight that may be tiny or zero: y^T is rebuilt as xhat * weight + bias. A norm before linear layers
writes y as their FP8 operand; x may be a residual plus a branch's output. With one scale per tensor, max |y| must be
known before the first element is written: one pass computes the statistics and max |y|, a second pass writes. With
block scales one pass does both. A norm after a branch (OLMo 2, Gemma 2) adds its output to the residual in one pass.

Backward, with the gradient of the residual branch added in the same pass:

    g = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g), LayerNorm]) + dresidual
    dweight = sum_T dy * xhat,   dbias = sum_T dy

Bytes moved, with U = T * H * 2:

    norm_stats             1 U, 3 U with a residual
    norm_quantize          2 U
    norm_block_quantize    2 U, 4 U with a residual
    add_norm_encode        3.5 U
    norm_backward          3.5 U (reads dy, codes and dresidual, writes dx)

`rms_norm` is RMSNorm in the model's own dtype, read by no FP8 GEMM: a model's last norm, and OLMo 2's norms of q and
k. On a GPU these are the kernels of `F.rms_norm`; that function itself would save x in FP32 on a CPU and on the meta
device, where memory is estimated.

A kernel sums a row in another order than PyTorch, so rstd and dx may differ from the reference's in their last bits.
Given the statistics, codes and FP8 equal the reference's bit for bit. Parameter gradients are deterministic: each
program sums its own rows, and partials.py adds the programs' sums in order.

Legend: T tokens, H hidden, G group size, GP = G rounded up to a power of 2, n = ceil(H / G), Q programs. Layouts of
operands in blocks: blockwise.py.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, Quantized, decode_groups, encode_groups, quantize_tensor
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, row_blocks
from overcoat.kernels.codes import CODES, decode, empty_codes, store_codes
from overcoat.kernels.device import (
    EXACT,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.instructions import reciprocal, to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel, registers
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials_into
from overcoat.kernels.tiles import listed_groups, load_inside, raise_amax


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tuple[Tensor, Tensor]:
    """Return the RMSNorm of x (T, H) with weight (H,) of x's dtype: y in that dtype, rstd (T,) FP32."""
    _, rstd = statistics(x, eps, False)
    return affine(normalize(x.contiguous(), None, rstd), weight, None).to(x.dtype), rstd


@rms_norm.cuda
def _(x, weight, eps):
    y, rstd = torch.ops.aten._fused_rms_norm(x.contiguous(), [x.shape[1]], weight, eps)
    return y, rstd.view(-1)


@op
def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the gradients of x (T, H) and of weight (H,), in their dtypes, from dy (T, H), x and rstd (T,)."""
    xhat, wide = normalize(x.contiguous(), None, rstd), dy.contiguous().float()
    g = wide * weight.float()
    dx = rstd[:, None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * xhat).sum(0).to(weight.dtype)


@rms_norm_backward.fake
def _(dy, x, rstd, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@rms_norm_backward.cuda
def _(dy, x, rstd, weight):
    arguments = (dy.contiguous(), x.contiguous(), [x.shape[1]], rstd.contiguous().view(-1, 1), weight)
    return torch.ops.aten._fused_rms_norm_backward(*arguments, [True, True])


def statistics(x: Tensor, eps: float, centered: bool) -> Tuple[Optional[Tensor], Tensor]:
    """Return mean (None for RMSNorm) and rstd, each (T,) FP32."""
    x, mean = x.float(), None
    if centered:
        mean = x.mean(-1)
        x = x - mean[:, None]
    return mean, torch.rsqrt(x.square().mean(-1) + eps)


def normalize(x: Tensor, mean: Optional[Tensor], rstd: Tensor) -> Tensor:
    """Return xhat (T, H) FP32."""
    x = x.float()
    if mean is not None:
        x = x - mean[:, None]
    return x * rstd[:, None]


def affine(xhat: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """Return y (T, H) FP32."""
    y = xhat if weight is None else xhat * weight.float()
    return y if bias is None else y + bias.float()


def _sum(x: Tensor, residual: Optional[Tensor]) -> Tuple[Tensor, List[Tensor]]:
    """Return the tensor to normalize, x or residual + x; and a list, [the sum] or []."""
    if residual is None:
        return x.contiguous(), []
    total = (residual + x).contiguous()
    return total, [total]


def _empty_sum(x: Tensor, residual: Optional[Tensor]) -> List[Tensor]:
    return [] if residual is None else [x.new_empty(*x.shape, dtype=torch.result_type(x, residual))]


def row_warps(width: int, elements: int) -> int:
    """Return the warps, 4 to 32, of a program that holds a whole row, `elements` per thread."""
    return min(max(width // (32 * elements), 4), 32)


# ---- a pass over rows ------------------------------------------------------------------------------------------------


@op
def norm_stats(
    x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool
) -> List[Tensor]:
    """Return statistics of a norm of x (T, H), or of residual + x (T, H).

    rstd (T,) FP32; max |y|, 0-d FP32; if `centered` (LayerNorm) mean (T,) FP32; the sum if a residual is given.
    """
    x, total = _sum(x, residual)
    mean, rstd = statistics(x, eps, centered)
    amax = affine(normalize(x, mean, rstd), weight, bias).abs().amax()
    return [rstd, amax, *([] if mean is None else [mean]), *total]


@norm_stats.fake
def _empty_stats(x, residual, weight, bias, eps, centered):
    rstd, amax = x.new_empty(x.shape[0], dtype=torch.float32), x.new_zeros((), dtype=torch.float32)
    return [rstd, amax, *([torch.empty_like(rstd)] if centered else []), *_empty_sum(x, residual)]


def norm_from_statistics(
    x: Tensor, mean: Optional[Tensor], rstd: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the norm's output in 1x128 blocks and the codes of xhat, given mean (T,) or None and rstd (T,)."""
    xhat = normalize(x, mean, rstd)
    return *row_blocks(affine(xhat, weight, bias), E4M3), *encode_groups(xhat, code, group_size)


@op
def norm_block_quantize(
    x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool,
    code: str, group_size: int,
) -> List[Tensor]:  # fmt: skip
    """Norm x (T, H), or residual + x (T, H), into a GEMM operand in blocks, and codes to save.

    Returns:
        y in E4M3 (T, H) and its scale (ceil(H / 128), T); codes of xhat (T, H) and their BF16 group maxima (T, n);
        rstd (T,) FP32; the sum if a residual is given.
    """
    x, total = _sum(x, residual)
    mean, rstd = statistics(x, eps, centered)
    return [*norm_from_statistics(x, mean, rstd, weight, bias, code, group_size), rstd, *total]


@norm_block_quantize.fake
def _empty_blocks(x, residual, weight, bias, eps, centered, code, group_size):
    kept = empty_codes(x, (x.shape[0], cdiv(x.shape[1], group_size)), code)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return [*empty_rows(x, x.shape, E4M3.dtype), *kept, rstd, *_empty_sum(x, residual)]


@op
def add_norm_encode(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool,
    code: str, group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return residual + norm(y) (T, H), rounded once; codes of the normalised y; BF16 maxima (T, n); rstd (T,) FP32."""
    y = y.contiguous()
    mean, rstd = statistics(y, eps, centered)
    xhat = normalize(y, mean, rstd)
    total = residual.contiguous().float() + affine(xhat, weight, bias)
    return total.to(torch.result_type(y, residual)), *encode_groups(xhat, code, group_size), rstd


@add_norm_encode.fake
def _empty_after(y, residual, weight, bias, eps, centered, code, group_size):
    kept = empty_codes(y, (y.shape[0], cdiv(y.shape[1], group_size)), code)
    return *_empty_sum(y, residual), *kept, y.new_empty(y.shape[0], dtype=torch.float32)


@triton.jit
def _row_sum(x):
    if len(x.shape) == 1:
        return tl.sum(x, 0)
    else:
        return tl.sum(tl.sum(tl.sum(x, 2), 1), 0)


@triton.jit
def affine_of(xhat, weight_ptr, bias_ptr, h, inside, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    y = xhat
    if HAS_WEIGHT:
        y = y * to_float32(load_inside(weight_ptr + h, inside))
    if HAS_BIAS:
        y = y + to_float32(load_inside(bias_ptr + h, inside))
    return y


@kernel
def _row_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H), if ADD or after
    weight_ptr,  # (H,), if HAS_WEIGHT
    bias_ptr,  # (H,), if HAS_BIAS
    sum_ptr,  # (T, H): residual + x, which is then normalised, if ADD; after: residual + y
    rstd_ptr,  # (T,) FP32
    mean_ptr,  # stats, if CENTERED: (T,) FP32
    top_ptr,  # stats: 0-d FP32, max |y|; blocks: (ceil(H / 128), T) FP32 scales
    y_ptr,  # blocks: (T, H) E4M3
    codes_ptr,  # blocks, after: (T, H) 8-bit
    group_amax_ptr,  # blocks, after: (T, n) BF16
    T, n, eps, H: tl.constexpr,
    PASS: tl.constexpr,  # "stats", "blocks", "after"
    ADD: tl.constexpr, CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    INVERSE_MAX: tl.constexpr, CODE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    SUB: tl.constexpr,  # groups of a block
    NB: tl.constexpr,  # what is left of H, rounded up to a power of 2
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, NB)
    start = row * H
    if PASS == "stats":
        h = block
        inside = None if H == NB else h < H  # None: every element exists, and no mask is needed
    else:
        group = block[:, None] * SUB + tl.arange(0, SUB)[None, :]
        h = group[:, :, None] * G + tl.arange(0, GP)[None, None, :]  # (NB, SUB, GP)
        inside = h < H
        if G < GP:
            inside = inside & (tl.arange(0, GP) < G)[None, None, :]
    if PASS == "stats":
        seen = tl.load(top_ptr, cache_modifier=".cg")
    x = to_float32(load_inside(x_ptr + start + h, inside))
    if ADD:
        x += to_float32(load_inside(residual_ptr + start + h, inside))
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + start + h, rounded, mask=inside)
        x = to_float32(rounded)
    if CENTERED:
        mean = _row_sum(x) / H
        if PASS == "stats":
            tl.store(mean_ptr + row, mean)
        x = x - mean
        if inside is not None:
            x = tl.where(inside, x, 0.0)
    rstd = tl.rsqrt(_row_sum(x * x) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    xhat = x * rstd
    if PASS != "stats":
        store_codes(xhat, codes_ptr + start + h, group_amax_ptr + row * n + group, inside, group < n, CODE, 2)
    y = affine_of(xhat, weight_ptr, bias_ptr, h, inside, HAS_WEIGHT, HAS_BIAS)
    if PASS == "stats":
        raise_amax(top_ptr, seen, max_magnitude(y, 0))
    elif PASS == "blocks":
        scale = scale_of(max_magnitude(max_magnitude(y, 2), 1), INVERSE_MAX)
        tl.store(top_ptr + block.to(tl.int64) * T + row, scale, mask=block * 128 < H)
        tl.store(y_ptr + start + h, to_float8(y * reciprocal(scale)[:, None, None], tl.float8e4nv), mask=inside)
    else:
        total = to_float32(load_inside(residual_ptr + start + h, inside)) + y
        tl.store(sum_ptr + start + h, total.to(sum_ptr.dtype.element_ty), mask=inside)


# Elements of a row that a thread holds.
ELEMENTS = {"stats": 32, "blocks": 16, "after": 8}


def _launch_rows(
    purpose: str,
    inputs: Sequence[Optional[Tensor]],  # x, residual, weight, bias
    outputs: Sequence[Optional[Tensor]],  # from sum_ptr on
    eps: float, centered: bool, code: str = "sqrt8", group_size: int = BLOCK,
) -> None:  # fmt: skip
    x, residual, weight, bias = dense(*inputs)
    (tokens, hidden), n = x.shape, cdiv(x.shape[1], group_size)
    if purpose == "stats":
        tile = (1, 1, power_of_2(hidden))
    elif purpose == "blocks":
        tile = (group_size, BLOCK // group_size, power_of_2(blocks(hidden)))
    else:
        tile = (power_of_2(group_size), 1, power_of_2(n))
    pointers = [x if each is None else each for each in (residual, weight, bias, *outputs)]
    _row_kernel[(tokens,)](
        x, *pointers, tokens, n, eps, hidden, purpose, purpose != "after" and residual is not None, centered,
        weight is not None, bias is not None, inverse_max("e4m3"), CODES[code], group_size, *tile,
        num_warps=row_warps(tile[0] * tile[1] * tile[2], ELEMENTS[purpose]),
        # Without a limit ptxas takes up to 40, and one program fewer fits on a multiprocessor.
        maxnreg=registers(32, x, group_size) if purpose == "blocks" and not centered else None, **EXACT,
    )  # fmt: skip


def _fits(x: Tensor, residual: Optional[Tensor]) -> bool:
    return residual is None or x.dtype == residual.dtype


@norm_stats.cuda
def _(x, residual, weight, bias, eps, centered):
    if not _fits(x, residual):
        return norm_stats.reference(x, residual, weight, bias, eps, centered)
    results = _empty_stats(x, residual, weight, bias, eps, centered)
    (rstd, amax), total = results[:2], None if residual is None else results[-1]
    outputs = (total, rstd, results[2] if centered else None, amax, None, None, None)
    _launch_rows("stats", (x, residual, weight, bias), outputs, eps, centered)
    return results


@norm_block_quantize.cuda
def _(x, residual, weight, bias, eps, centered, code, group_size):
    if BLOCK % group_size or not _fits(x, residual):
        return norm_block_quantize.reference(x, residual, weight, bias, eps, centered, code, group_size)
    results = _empty_blocks(x, residual, weight, bias, eps, centered, code, group_size)
    y, scale, codes, group_amax, rstd, *total = results
    outputs = (total[0] if total else None, rstd, None, scale, y, codes, group_amax)
    _launch_rows("blocks", (x, residual, weight, bias), outputs, eps, centered, code, group_size)
    return results


@add_norm_encode.cuda
def _(y, residual, weight, bias, eps, centered, code, group_size):
    if not _fits(y, residual):
        return add_norm_encode.reference(y, residual, weight, bias, eps, centered, code, group_size)
    results = _empty_after(y, residual, weight, bias, eps, centered, code, group_size)
    total, codes, group_amax, rstd = results
    outputs = (total, rstd, None, None, None, codes, group_amax)
    _launch_rows("after", (y, residual, weight, bias), outputs, eps, centered, code, group_size)
    return results


@op
def norm_quantize(
    x: Tensor, mean: Optional[Tensor], rstd: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], amax: Tensor,
    code: str, group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Write the norm's output as GEMM operand, and codes to save, from the results of `norm_stats`; amax = max |y|.

    Returns:
        y in E4M3 (T, H); its 0-d FP32 scale; codes of xhat (T, H); their BF16 group maxima (T, n).
    """
    xhat = normalize(x.contiguous(), mean, rstd)
    data, scale = quantize_tensor(affine(xhat, weight, bias), E4M3, amax)
    return data, scale, *encode_groups(xhat, code, group_size)


@norm_quantize.fake
def _empty_quantized(x, mean, rstd, weight, bias, amax, code, group_size):
    kept = empty_codes(x, (x.shape[0], cdiv(x.shape[1], group_size)), code)
    return x.new_empty(*x.shape, dtype=E4M3.dtype), x.new_empty((), dtype=torch.float32), *kept


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
    n, H, INVERSE_MAX: tl.constexpr, CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CODE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)
    group, row, known, h, inside = listed_groups(groups, n, H, G, GP, NG)
    offsets = row.to(tl.int64)[:, None] * H + h
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.load(mean_ptr + row, mask=known, other=0.0)[:, None], 0.0)
    xhat = x * tl.load(rstd_ptr + row, mask=known, other=0.0)[:, None]
    store_codes(xhat, codes_ptr + offsets, group_amax_ptr + group, inside, known, CODE, 1)
    y = affine_of(xhat, weight_ptr, bias_ptr, h, inside, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + offsets, to_float8(y * inverse_of(scale), tl.float8e4nv), mask=inside)


# Values of a program, which has two warps: 38 us for 8192 x 4096; 41 us with twice as many of both.
TILE = 2048


@norm_quantize.cuda
def _(x, mean, rstd, weight, bias, amax, code, group_size):
    x, mean, rstd, weight, bias = dense(x, mean, rstd, weight, bias)
    results = y, scale, codes, group_amax = _empty_quantized(x, mean, rstd, weight, bias, amax, code, group_size)
    groups, gp = group_amax.numel(), power_of_2(group_size)
    count = max(TILE // gp, 1)
    _norm_quantize_kernel[(cdiv(groups, count),)](
        x, rstd if mean is None else mean, rstd, x if weight is None else weight, x if bias is None else bias,
        amax, y, scale, codes, group_amax, groups, group_amax.shape[1], x.shape[1],
        inverse_max("e4m3"), mean is not None, weight is not None, bias is not None, CODES[code], group_size, gp,
        count, num_warps=2, **EXACT,
    )  # fmt: skip
    return results


# Elements of a row that one thread holds.
BACKWARD_ELEMENTS = 8
# The backward is bound by the loads in flight. With 64 registers per thread two programs of 4096 columns fit on each of
# an H200's 132 multiprocessors. Without a limit the compiler takes 81 and one program fits (122 us instead of 85).
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
        dy: (T, H), gradient of y; codes, group_amax: saved xhat; rstd: (T,) FP32; weight: (H,) or None.
        dresidual: (T, H), gradient of x from its other use, or None. centered: True for LayerNorm.

    Returns:
        dx (T, H) of dy's dtype; dweight (H,), summed in FP32, of the weight's dtype; dbias (H,) FP32, empty without a
        bias; max |dx|, 0-d FP32, for the GEMM that reads dx next.
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
            # Read again for every row, from the L1 cache: held, it would take one register per element.
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
