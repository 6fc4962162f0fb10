"""RMSNorm and LayerNorm fused with the quantization of their output (COAT section 5.2, "Group Scaling").

    RMSNorm     xhat = x * rstd,            rstd = (mean(x^2) + eps)^(-1/2)
    LayerNorm   xhat = (x - mean) * rstd,   rstd = (mean((x - mean)^2) + eps)^(-1/2)
    y = xhat * weight + bias                (weight and bias may be absent: OLMo 1)

The output goes straight into an FP8 GEMM, so it needs max |y| before the first element can be written. Group Scaling
finds it in two stages: one pass computes the statistics AND each row's max |y|; the maximum of those T numbers is the
tensor's. A second pass writes y in FP8; y in BF16 never reaches memory.

For the backward (norm_backward.py) the second pass also writes xhat in 8-bit groups. Keeping xhat, not y, costs the
same bytes and no division by a weight that may be tiny or zero: y^T is rebuilt as xhat * weight + bias.

Bytes moved, with U = T * H * 2: statistics 1 U, 3 U with the residual's addition; norm_quantize 2 U (reads x, writes
one byte each of y and codes). The kernels sum a row in another order than PyTorch, so rstd may differ from the
reference's in its last bits. Given the statistics, norm_quantize equals the reference bit for bit.

Legend: T tokens, H hidden, HP = H rounded up to a power of 2, G group size, n = ceil(H / G).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, encode_groups, group_code, quantize_tensor
from overcoat.kernels.codes import CODES, encode
from overcoat.kernels.device import EXACT, inverse_max, inverse_of, max_magnitude, power_of_2, scale_of, to_float8
from overcoat.kernels.groups import GROUP_TILE
from overcoat.kernels.instructions import to_float32
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_groups, load_inside

# Elements of a row that one thread holds.
STATS_ELEMENTS = 32


def normalize(x: Tensor, mean: Optional[Tensor], rstd: Tensor) -> Tensor:
    x = x.float()
    if mean is not None:
        x = x - mean[:, None]
    return x * rstd[:, None]


def affine(xhat: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    y = xhat if weight is None else xhat * weight.float()
    return y if bias is None else y + bias.float()


def sum_like(y: Tensor, residual: Tensor) -> Tensor:
    """An empty tensor for residual + y."""
    return y.new_empty(y.shape, dtype=torch.result_type(y, residual))


def row_warps(width: int, elements: int) -> int:
    """Warps for a program that holds a whole row: between 4 and 32."""
    return min(max(width // (32 * elements), 4), 32)


# ---- statistics ------------------------------------------------------------------------------------------------------


@op
def rmsnorm_stats(x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    """Statistics of RMSNorm: rstd (T,) FP32 and each row's max |y| (T,) FP32 of x (T, H)."""
    x = x.contiguous()
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return rstd, affine(normalize(x, None, rstd), weight, None).abs().amax(-1)


@op
def add_rmsnorm_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `rmsnorm_stats` of x: the residual stream is written and read in one pass."""
    x = (residual + y).contiguous()
    return x, *rmsnorm_stats.reference(x, weight, eps)


@add_rmsnorm_stats.fake
def _(y, residual, weight, eps):
    return sum_like(y, residual), *(y.new_empty(y.shape[:1], dtype=torch.float32) for _ in range(2))


@op
def layernorm_stats(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """Statistics of LayerNorm: mean, rstd and each row's max |y|, each (T,) FP32, of x (T, H)."""
    wide = x.contiguous().float()
    mean = wide.mean(-1)
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    return mean, rstd, affine(normalize(wide, mean, rstd), weight, bias).abs().amax(-1)


@layernorm_stats.fake
def _(x, weight, bias, eps):
    return tuple(x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(3))


@op
def add_layernorm_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `layernorm_stats` of x: the residual stream is written and read in one pass."""
    x = (residual + y).contiguous()
    return x, *layernorm_stats.reference(x, weight, bias, eps)


@add_layernorm_stats.fake
def _(y, residual, weight, bias, eps):
    return sum_like(y, residual), *(y.new_empty(y.shape[:1], dtype=torch.float32) for _ in range(3))


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
            num_warps=row_warps(padded, STATS_ELEMENTS), **EXACT,
        )  # fmt: skip
    return mean, rstd, row_amax


def _launch_add_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and the statistics of x."""
    y, residual = dense(y, residual)
    x = torch.empty_like(y)
    return x, *_launch_stats(y, (residual, x), weight, bias, eps, centered)


@rmsnorm_stats.cuda
def _(x, weight, eps):
    return _launch_stats(x.contiguous(), None, weight, None, eps, False)[1:]


@add_rmsnorm_stats.cuda
def _(y, residual, weight, eps):
    if y.dtype != residual.dtype:
        return add_rmsnorm_stats.reference(y, residual, weight, eps)
    x, _, rstd, row_amax = _launch_add_stats(y, residual, weight, None, eps, False)
    return x, rstd, row_amax


@layernorm_stats.cuda
def _(x, weight, bias, eps):
    return _launch_stats(x.contiguous(), None, weight, bias, eps, True)


@add_layernorm_stats.cuda
def _(y, residual, weight, bias, eps):
    if y.dtype != residual.dtype:
        return add_layernorm_stats.reference(y, residual, weight, bias, eps)
    return _launch_add_stats(y, residual, weight, bias, eps, True)


# ---- output in FP8, kept codes ---------------------------------------------------------------------------------------


@op
def norm_quantize(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    amax: Tensor,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the norm's output as GEMM operand, and its normalised input as kept codes.

    Args:
        x: (T, H); mean: (T,) or None (RMSNorm); rstd: (T,); weight, bias: (H,) or None.
        amax: 0-d FP32, max |y| over the tensor.

    Returns:
        y in E4M3 (T, H); its 0-d FP32 scale; codes of xhat (T, H); their BF16 group maxima (T, n).
    """
    xhat = normalize(x.contiguous(), mean, rstd)
    data, scale = quantize_tensor(affine(xhat, weight, bias), E4M3, amax)
    codes, group_amax = encode_groups(xhat, code, group_size)
    return data, scale, codes, group_amax


@norm_quantize.fake
def _(x, mean, rstd, weight, bias, amax, code, group_size):
    groups = (x.shape[1] + group_size - 1) // group_size
    return (
        x.new_empty(x.shape, dtype=E4M3.dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
    )


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


@norm_quantize.cuda
def _(x, mean, rstd, weight, bias, amax, code, group_size):
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
