"""h = f(z), or f(gate) up, in 16 bits from the kept codes of z: what adapters of an output layer read.

Bound by memory: F T I bytes read, F = 2 if gated, 2 T I written. The kernel equals its reference bit for bit.

Legend: T tokens, I intermediate width, G group size, GP = G rounded up to a power of 2, n = ceil(I / G) groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overcoat.formats import Quantized, decode_groups
from overcoat.kernels.activation_functions import activation_of
from overcoat.kernels.codes import CODES, decode
from overcoat.kernels.device import EXACT, power_of_2
from overcoat.kernels.groups import GROUP_TILE
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_groups


@op
def activation_decode(
    codes: Tensor, group_amax: Tensor, activation: str, code: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """h (T, I) of codes (T, F I) and BF16 maxima (T, F, n), rounded to `dtype`."""
    tokens, parts, _ = group_amax.shape
    kept = Quantized(codes.reshape(tokens * parts, -1), group_amax.flatten(0, 1))
    gate, *up = decode_groups(kept, code, group_size).view(tokens, parts, -1).unbind(1)
    h, _ = activation_of(activation).reference(gate)
    return (h * up[0] if up else h).to(dtype)


@activation_decode.fake
def _(codes, group_amax, activation, code, group_size, dtype):
    return codes.new_empty((codes.shape[0], codes.shape[1] // group_amax.shape[1]), dtype=dtype)


@kernel
def _activation_decode_kernel(
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    h_ptr,  # (T, I)
    groups,  # T * n
    n,
    I,  # noqa: E741
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    F: tl.constexpr = 2 if GATED else 1
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    start = row.to(tl.int64)
    codes_ptr += start[:, None] * (F * I) + column
    amax_ptr += group + start * ((F - 1) * n)
    gate = tl.load(codes_ptr, mask=inside, other=0.0)
    h = FUNCTION(decode(gate, tl.load(amax_ptr, mask=known, other=0.0).to(tl.float32)[:, None], CODE))[0]
    if GATED:
        up = tl.load(codes_ptr + I, mask=inside, other=0.0)
        h = h * decode(up, tl.load(amax_ptr + n, mask=known, other=0.0).to(tl.float32)[:, None], CODE)
    tl.store(h_ptr + (start[:, None] * I + column), h.to(h_ptr.dtype.element_ty), mask=inside)


@activation_decode.cuda
def _(codes, group_amax, activation, code, group_size, dtype):
    codes, group_amax = dense(codes, group_amax)
    (tokens, parts, n), padded = group_amax.shape, power_of_2(group_size)
    h = torch.empty((tokens, codes.shape[1] // parts), dtype=dtype, device=codes.device)
    count = max(GROUP_TILE // 2 // padded, 1)
    _activation_decode_kernel[(cdiv(tokens * n, count),)](
        codes, group_amax, h, tokens * n, n, h.shape[1], activation_of(activation).device, parts == 2, group_size,
        padded, CODES[code], count, num_warps=4, **EXACT,
    )  # fmt: skip
    return h
