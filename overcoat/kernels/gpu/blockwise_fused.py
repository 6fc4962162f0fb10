"""Kernel of the forward in kernels/blockwise_fused.py: SwiGLU straight to FP8 blocks.

With V = T * I * 2 bytes, 2 V read, 1 V of codes and 1/2 V of h written. It equals the reference bit for bit.

Legend: that of blockwise.py; I intermediate width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels.blockwise import blocks, empty_rows
from overcoat.kernels.gpu.block_tiles import row_tile, store_rows
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    encode,
    inverse_max,
    max_magnitude,
    sigmoid,
)
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device

# ---- SwiGLU, forward ------------------------------------------------------------------------------------------------


@triton.jit
def _encode_half(values_ptr, codes_ptr, amax_ptr, offsets, inside, places, known, CODE: tl.constexpr):
    """Load (BT, NG, G) values of gate or up, write their codes and maxima, and return them in FP32."""
    x = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(x, 2).to(tl.bfloat16)
    tl.store(amax_ptr + places, amax, mask=known)
    tl.store(codes_ptr + offsets, encode(x, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    return x


@kernel
def _swiglu_kernel(
    gate_up_ptr,  # (T, 2I)
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # (ceil(I / 128), T) FP32
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    T,
    I,  # noqa: E741
    n,
    INVERSE_MAX: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    BT: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    NG: tl.constexpr = 128 // G
    t0, g0 = block * BT, tile * NG
    t, g = tl.arange(0, BT), tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]  # (NG, G), from column g0 * G on
    inside = (t < T - t0)[:, None, None] & (c < I - g0 * G)[None, :, :]
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    start = t0.to(tl.int64) * 2 * I + g0 * G
    gate_up_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    offsets, places = t[:, None, None] * (2 * I) + c[None, :, :], t[:, None] * (2 * n) + g[None, :]
    gate = _encode_half(gate_up_ptr, codes_ptr, amax_ptr, offsets, inside, places, known, CODE)
    up = _encode_half(gate_up_ptr + I, codes_ptr + I, amax_ptr + n, offsets, inside, places, known, CODE)
    h_ptr += t0.to(tl.int64) * I + g0 * G
    scale_ptr += tile.to(tl.int64) * T + t0
    offsets = t[:, None, None] * I + c[None, :, :]
    store_rows(gate * sigmoid(gate) * up, t, T - t0, h_ptr, scale_ptr, offsets, inside, INVERSE_MAX)


def swiglu_block_quantize(gate_up: Tensor, code: str, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale, codes (T, 2I) and maxima (T, 2, n); group_size divides 128."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    n = cdiv(width, group_size)
    h, scale = empty_rows(gate_up, (tokens, width), E4M3.dtype)
    codes = torch.empty(gate_up.shape, dtype=group_code(code).dtype, device=gate_up.device)
    group_amax = torch.empty((tokens, 2, n), dtype=torch.bfloat16, device=gate_up.device)
    rows = row_tile(tokens)
    with on_device(gate_up):
        _swiglu_kernel[(blocks(width), cdiv(tokens, rows))](
            gate_up, h, scale, codes, group_amax, tokens, width, n,
            inverse_max("e4m3"), group_size, CODES[code], rows, num_warps=4, **EXACT,
        )  # fmt: skip
    return h, scale, codes, group_amax
