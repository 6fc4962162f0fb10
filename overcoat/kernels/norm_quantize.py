"""The second pass of a norm with one scale per tensor (norm.py): its output in FP8 and its kept codes, from statistics.

Legend: T tokens, H hidden, G group size, GP = G rounded up to a power of 2, n = ceil(H / G).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, encode_groups, quantize_tensor
from overcoat.kernels.codes import CODES, empty_codes, store_codes
from overcoat.kernels.device import EXACT, inverse_max, inverse_of, power_of_2, scale_of, to_float8
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.norm import affine, affine_of, normalize
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_groups


@op
def norm_quantize(
    x: Tensor, mean: Optional[Tensor], rstd: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], amax: Tensor,
    code: str, group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm's output as GEMM operand, and kept codes, from `norm_stats` of x (T, H) and amax = max |y|: y in E4M3
    (T, H); its 0-d FP32 scale; codes of xhat (T, H); their BF16 group maxima (T, n)."""
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


# Values of a program, of two warps: 38 us for 8192 x 4096, with twice of both 41.
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
