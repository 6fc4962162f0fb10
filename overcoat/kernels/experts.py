"""Ops around the GEMMs of experts (grouped.py): operands of weights, rows gathered into slots and summed back.

    expert_amax, quantize_experts    weights (E, N, K) as E4M3 operands, one scale for each expert
    limit_, mask_                    bias and limits of z (gpt-oss), one bit for each value that was cut
    gather_t                         rows of tokens, in slots, transposed: an operand of wgrad
    combine                          out[t] = sum over a token's experts of weight * y[slot]
    expert_gradient                  dh = weight * g, and the gradient of the routing weight, g . h

y = h W^T is not saved for the gradient of the routing weight, dout . y: it is (dout W) . h, and g = dout W is what
dgrad computes anyway. (So does SonicMoE, arXiv 2512.14080.)

The kernels equal their references bit for bit, but for the sums of `expert_gradient`, added in another order.

Legend: T tokens, k experts per token, E experts, S slots, I intermediate width, N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, decode_float8, quantize_tensor
from overcoat.formats.bits import from_bits, to_bits
from overcoat.kernels.activation import decoded, load_operands
from overcoat.kernels.activation_functions import activation_of
from overcoat.kernels.codes import CODES, decode
from overcoat.kernels.device import (
    EXACT,
    as_words,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import PLAIN_TILE, TRANSPOSED_TILE, alignment, promise
from overcoat.kernels.tiles import group_columns

# ---- weights ---------------------------------------------------------------------------------------------------------


@op
def expert_amax(w: Tensor) -> Tensor:
    """Return max |w| of each expert, (E,) FP32, of weights (E, N, K)."""
    return w.abs().amax((1, 2)).float()


@expert_amax.fake
def _(w):
    return w.new_empty(w.shape[0], dtype=torch.float32)


@kernel
def _expert_amax_kernel(w_ptr, out_ptr, SIZE, BLOCK: tl.constexpr):
    w_ptr += tl.program_id(1).to(tl.int64) * SIZE
    top = tl.zeros((1, BLOCK), tl.float32)
    offsets = tl.arange(0, BLOCK)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(SIZE, BLOCK), tl.num_programs(0)):
        start = block * BLOCK
        w = tl.load(w_ptr + start + offsets, mask=offsets < SIZE - start, other=0.0)
        top = larger(top, tl.abs(w.to(tl.float32)))
    atomic_amax(out_ptr + tl.program_id(1), max_magnitude(max_magnitude(top, 1), 0))


AMAX_BLOCK, AMAX_PROGRAMS = 8192, 32


@expert_amax.cuda
def _(w):
    w, out = w.contiguous(), w.new_zeros(w.shape[0], dtype=torch.float32)
    size = w.shape[1] * w.shape[2]
    _expert_amax_kernel[(min(cdiv(size, AMAX_BLOCK), AMAX_PROGRAMS), w.shape[0])](w, out, size, AMAX_BLOCK, num_warps=8)
    return out


@op
def quantize_experts(w: Tensor, amax: Tensor, transposed: bool, interleaved: bool = False) -> Tuple[Tensor, Tensor]:
    """Quantize weights (E, N, K) with one scale for each expert, from its maximum in amax (E,) FP32.

    interleaved: columns 2 i of w become columns i, and columns 2 i + 1 columns K / 2 + i.

    Returns:
        E4M3 data (E, N, K), or (E, K, N) if `transposed`; scales (E,) FP32.
    """
    w = w.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2) if interleaved else w
    data, scales = zip(*[quantize_tensor(each, E4M3, top) for each, top in zip(w, amax, strict=True)], strict=True)
    whole = torch.stack([each.view(torch.uint8) for each in data])
    whole = whole.transpose(1, 2).contiguous() if transposed else whole
    return whole.view(E4M3.dtype), torch.stack(list(scales))


@quantize_experts.fake
def _(w, amax, transposed, interleaved=False):
    e, n, k = w.shape
    return w.new_empty((e, k, n) if transposed else (e, n, k), dtype=E4M3.dtype), torch.empty_like(amax)


@triton.jit
def _quantized(w_ptr, n, k, rows, known, K, inverse, ALIGN: tl.constexpr):
    """Return w * inverse at rows n and columns k, of which `rows` and `known` exist."""
    inside = (n < rows)[:, None] & known[None, :]
    w = tl.load(promise(w_ptr + (n[:, None] * K + k[None, :]), ALIGN), mask=inside, other=0.0)
    return tl.where(inside, w.to(tl.float32) * inverse, 0.0)


@triton.jit
def _store_words(out_ptr, even, odd, k, end, pair, pairs, stride):
    """Store rows 2 `pair` and 2 `pair` + 1 transposed: column k is a row of `stride` words, of which `pairs` exist."""
    words = tl.trans(pack_rows(even, odd, tl.float8e4nv))
    inside = (k < end)[:, None] & (pair < pairs)[None, :]
    tl.store(out_ptr + (k.to(tl.int64)[:, None] * stride + pair[None, :]), words, mask=inside)


@kernel
def _quantize_experts_kernel(
    w_ptr,  # (E, N, K)
    amax_ptr,  # (E,) FP32
    out_ptr,  # (E, N, K) E4M3; (E, K, N) if TRANSPOSED
    scale_ptr,  # (E,) FP32
    N, K, INVERSE_MAX: tl.constexpr, ALIGN: tl.constexpr, TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, across = tl.program_id(1), tl.cdiv(K, BK)
    n0, k0 = tl.program_id(0) // across * BN, tl.program_id(0) % across * BK
    scale = scale_of(tl.load(amax_ptr + expert), INVERSE_MAX)
    tl.store(scale_ptr + expert, scale, mask=tl.program_id(0) == 0)
    inverse, first = inverse_of(scale), expert.to(tl.int64) * N * K
    n, k, row = tl.arange(0, BN), k0 + tl.arange(0, BK), first + n0.to(tl.int64) * K
    # Of interleaved columns one lies in the first half of the result, and one in the second.
    low, middle = k0 // 2 + tl.arange(0, BK // 2), K // 2
    w_ptr += row
    if TRANSPOSED:
        pair = tl.arange(0, BN // 2)
        even = _quantized(w_ptr, 2 * pair, k, N - n0, k < K, K, inverse, ALIGN)
        odd = _quantized(w_ptr, 2 * pair + 1, k, N - n0, k < K, K, inverse, ALIGN)
        target, pairs = as_words(out_ptr, 16) + (first + n0) // 2, (N - n0) // 2
        if INTERLEAVED:
            even, even_up = tl.split(tl.reshape(even, (BN // 2, BK // 2, 2)))
            odd, odd_up = tl.split(tl.reshape(odd, (BN // 2, BK // 2, 2)))
            _store_words(target, even, odd, low, middle, pair, pairs, N // 2)
            _store_words(target, even_up, odd_up, middle + low, K, pair, pairs, N // 2)
        else:
            _store_words(target, even, odd, k, K, pair, pairs, N // 2)
    else:
        x = _quantized(w_ptr, n, k, N - n0, k < K, K, inverse, ALIGN)
        out_ptr += row
        if INTERLEAVED:
            x, up = tl.split(tl.reshape(x, (BN, BK // 2, 2)))
            target, inside = out_ptr + (n[:, None] * K + low[None, :]), (n < N - n0)[:, None] & (low < middle)[None, :]
            tl.store(target, to_float8(x, tl.float8e4nv), mask=inside)
            tl.store(target + middle, to_float8(up, tl.float8e4nv), mask=inside)
        else:
            target = promise(out_ptr + (n[:, None] * K + k[None, :]), ALIGN)
            tl.store(target, to_float8(x, tl.float8e4nv), mask=(n < N - n0)[:, None] & (k < K)[None, :])


@quantize_experts.cuda
def _(w, amax, transposed, interleaved=False):
    if not interleaved and not w.is_contiguous() and w.transpose(1, 2).is_contiguous():
        return quantize_experts.kernel(w.transpose(1, 2), amax, not transposed)
    w, (experts, rows, columns) = w.contiguous(), w.shape
    if transposed and rows % 2:  # two rows are one word
        return quantize_experts.reference(w, amax, transposed, interleaved)
    out = w.new_empty((experts, columns, rows) if transposed else w.shape, dtype=E4M3.dtype)
    scale, tile = torch.empty_like(amax), TRANSPOSED_TILE if transposed else PLAIN_TILE
    _quantize_experts_kernel[(cdiv(rows, tile[0]) * cdiv(columns, tile[1]), experts)](
        w, amax.contiguous(), out, scale, rows, columns, inverse_max("e4m3"), alignment([w], columns), transposed,
        interleaved, *tile, num_warps=4, **EXACT,
    )  # fmt: skip
    return out, scale


def transpose_experts(codes: Tensor) -> Tensor:
    """Return E4M3 codes (E, N, K) as (E, K, N)."""
    unit = torch.full((codes.shape[0],), E4M3.max, device=codes.device)  # a scale of 1 leaves codes as they are
    return quantize_experts(codes, unit, True)[0]


# ---- bias and limits -------------------------------------------------------------------------------------------------


@op(mutates=("z",))
def limit_(
    z: Tensor, bias: Optional[Tensor], experts: Tensor, tokens: Tensor, gated: bool, limit: float, shift: float
) -> Tensor:
    """Add its expert's bias to each row of z (S, F I), in place; then limit it, and shift up; 0 where no token is.

    bias: (E, F I) or None. experts, tokens: of `Routing`. limit: gate is at most this, and up within it; 0: none.

    Returns:
        uint8 (S, F I / 8), a bit for each value that was cut; (0,) without a limit.
    """
    x, half = z.float(), z.shape[1] // 2 if gated else z.shape[1]
    if bias is not None:
        rows = z.shape[0] // max(experts.shape[0], 1)
        x = x + bias.float()[experts.clamp(max=bias.shape[0] - 1).long()].repeat_interleave(rows, 0)
    known, bits = (tokens >= 0)[:, None], z.new_empty(0, dtype=torch.uint8)
    if limit:
        cut = (x > limit) | (torch.arange(z.shape[1], device=z.device) >= half) & (x < -limit)
        bits = to_bits(cut & known)
        x = torch.cat((x[:, :half].clamp(max=limit), x[:, half:].clamp(-limit, limit)), 1)
    x = torch.cat((x[:, :half], x[:, half:] + shift), 1)
    z.copy_(torch.where(known, x, 0.0))
    return bits


@limit_.fake
def _(z, bias, experts, tokens, gated, limit, shift):
    return z.new_empty((z.shape[0], z.shape[1] // 8) if limit else (0,), dtype=torch.uint8)


@triton.jit
def _bytes(width, BT: tl.constexpr, BB: tl.constexpr):
    """Return rows (BT, 1, 1) and columns (1, BB, 8) of a program's tile, bytes (BB,), and which of them exist."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    byte = tl.program_id(1) * BB + tl.arange(0, BB)
    c = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return t, byte, c[None, :, :], byte < width


@kernel
def _limit_kernel(
    z_ptr,  # (S, F I), in place
    bias_ptr,  # (E, F I), if BIASED
    experts_ptr,  # (tiles,) int32
    tokens_ptr,  # (S,) int32
    bits_ptr,  # (S, F I / 8) uint8, if LIMIT
    N, half, E, rows, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BIASED: tl.constexpr, BT: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    t, byte, c, exists = _bytes(N // 8, BT, BB)
    known, inside = tl.load(tokens_ptr + t) >= 0, exists[None, :, None]
    offsets = t[:, None, None] * N + c
    x = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        expert = tl.minimum(tl.load(experts_ptr + tl.program_id(0) * BT // rows), E - 1)
        x += tl.load(bias_ptr + expert.to(tl.int64) * N + c, mask=inside, other=0.0).to(tl.float32)
    up = c >= half
    if LIMIT > 0:
        above, below = x > LIMIT, up & (x < -LIMIT)
        cut = (above | below) & known[:, None, None]
        bits = tl.sum(cut.to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)
        tl.store(bits_ptr + (t[:, None] * (N // 8) + byte[None, :]), bits.to(tl.uint8), mask=exists[None, :])
        x = tl.where(above, LIMIT, tl.where(below, -LIMIT, x))
    x = tl.where(known[:, None, None], tl.where(up, x + SHIFT, x), 0.0)
    tl.store(z_ptr + offsets, x.to(z_ptr.dtype.element_ty), mask=inside)


LIMIT_TILE = (16, 32)  # slots and bytes of a program


@limit_.cuda
def _(z, bias, experts, tokens, gated, limit, shift):
    bias, experts, tokens = dense(bias, experts, tokens)
    (slots, columns), tiles = z.shape, experts.shape[0]
    if not z.is_contiguous() or columns % 8 or slots % LIMIT_TILE[0] or (tiles and slots // tiles % LIMIT_TILE[0]):
        return limit_.reference(z, bias, experts, tokens, gated, limit, shift)
    bits = z.new_empty((slots, columns // 8) if limit else (0,), dtype=torch.uint8)
    if z.numel():
        _limit_kernel[(slots // LIMIT_TILE[0], cdiv(columns // 8, LIMIT_TILE[1]))](
            z, z if bias is None else bias, experts, tokens, bits, columns, columns // 2 if gated else columns,
            1 if bias is None else bias.shape[0], slots // tiles, limit, shift, bias is not None, *LIMIT_TILE,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return bits


@op(mutates=("dz",))
def mask_(dz: Tensor, bits: Tensor) -> None:
    """Set dz (S, N) to zero, in place, where `limit_` has cut; bits: (S, N / 8) uint8."""
    dz.masked_fill_(from_bits(bits), 0.0)


@mask_.fake
def _(dz, bits):
    return None


@kernel
def _mask_kernel(
    dz_ptr,  # (S, N), in place
    bits_ptr,  # (S, N / 8) uint8
    N, BT: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    t, byte, c, exists = _bytes(N // 8, BT, BB)
    bits = tl.load(bits_ptr + (t[:, None] * (N // 8) + byte[None, :]), mask=exists[None, :], other=0).to(tl.int32)
    cut = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    offsets = t[:, None, None] * N + c
    tl.store(dz_ptr + offsets, tl.zeros(cut.shape, dz_ptr.dtype.element_ty), mask=(cut != 0) & exists[None, :, None])


@mask_.cuda
def _(dz, bits):
    if not dz.is_contiguous() or dz.shape[0] % LIMIT_TILE[0] or not dz.numel():
        return mask_.reference(dz, bits)
    grid = dz.shape[0] // LIMIT_TILE[0], cdiv(bits.shape[1], LIMIT_TILE[1])
    _mask_kernel[grid](dz, bits.contiguous(), dz.shape[1], *LIMIT_TILE, num_warps=4, **EXACT)


# ---- rows of tokens in slots -----------------------------------------------------------------------------------------


@op
def gather_t(x: Tensor, tokens: Tensor, weights: Optional[Tensor], amax: Optional[Tensor], fmt: str) -> Tuple[
    Tensor, Tensor
]:  # fmt: skip
    """Return the rows of x (T, C) in slots, transposed: (C, S) FP8 and its 0-d FP32 scale; 0 in slots without a token.

    Args:
        x: FP8 of format `fmt`, whose codes are moved (the scale is 1); or values to quantize.
        tokens: (S,) int32, -1: none.
        weights: (S,) FP32, factors of the rows, or None. amax: of what is quantized, or more, 0-d FP32; None for FP8.
    """
    rows = decode_float8(x) if amax is None else x.float()
    rows = rows[tokens.clamp(min=0).long()]
    rows = rows if weights is None else rows * weights[:, None]
    data, scale = quantize_tensor(rows, FLOAT8[fmt], rows.new_full((), FLOAT8[fmt].max) if amax is None else amax)
    codes = torch.where(tokens[:, None] >= 0, data.view(torch.uint8), 0)
    return codes.t().contiguous().view(data.dtype), scale


@gather_t.fake
def _(x, tokens, weights, amax, fmt):
    return x.new_empty(x.shape[1], tokens.shape[0], dtype=FLOAT8[fmt].dtype), x.new_empty((), dtype=torch.float32)


@triton.jit
def _gathered(x_ptr, tokens_ptr, weights_ptr, slot, c, columns, C, inverse, WEIGHTED: tl.constexpr):
    """Return rows of tokens in slots `slot`, times weight and `inverse`, FP32; 0 where there are none."""
    token = tl.load(tokens_ptr + slot)
    inside = (token >= 0)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + (tl.maximum(token, 0).to(tl.int64)[:, None] * C + c[None, :]), mask=inside, other=0.0)
    x = x.to(tl.float32)
    if WEIGHTED:
        x = x * tl.load(weights_ptr + slot)[:, None]
    return tl.where(inside, x * inverse, 0.0)


@kernel
def _gather_t_kernel(
    x_ptr,  # (T, C)
    tokens_ptr,  # (S,) int32
    weights_ptr,  # (S,) FP32, if WEIGHTED
    amax_ptr,  # 0-d FP32, if QUANTIZE
    out_ptr,  # (C, S) FP8, of which two are stored together
    scale_ptr,  # 0-d FP32
    C, S, INVERSE_MAX: tl.constexpr, QUANTIZE: tl.constexpr, WEIGHTED: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX) if QUANTIZE else 1.0
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale) if QUANTIZE else 1.0
    s0, c0 = tl.program_id(1) * BS, tl.program_id(0) * BC
    pair, c = tl.arange(0, BS // 2), tl.arange(0, BC)
    x_ptr += c0
    even = _gathered(x_ptr, tokens_ptr, weights_ptr, s0 + 2 * pair, c, C - c0, C, inverse, WEIGHTED)
    odd = _gathered(x_ptr, tokens_ptr, weights_ptr, s0 + 2 * pair + 1, c, C - c0, C, inverse, WEIGHTED)
    words = tl.trans(pack_rows(even, odd, out_ptr.dtype.element_ty))
    target = as_words(out_ptr, 16) + (c0.to(tl.int64) * (S // 2) + s0 // 2)
    tl.store(target + (c[:, None] * (S // 2) + pair[None, :]), words, mask=(c < C - c0)[:, None])


@gather_t.cuda
def _(x, tokens, weights, amax, fmt):
    x, tokens, weights = dense(x, tokens, weights)
    columns, slots = x.shape[1], tokens.shape[0]
    if slots % 64:  # a tile is 64 slots
        return gather_t.reference(x, tokens, weights, amax, fmt)
    out, scale = x.new_empty(columns, slots, dtype=FLOAT8[fmt].dtype), x.new_empty((), dtype=torch.float32)
    if slots:
        _gather_t_kernel[(cdiv(columns, 128), slots // 64)](
            x, tokens, scale if weights is None else weights, scale if amax is None else amax, out, scale, columns,
            slots, inverse_max(fmt), amax is not None, weights is not None, 64, 128, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, scale


@op
def combine(y: Tensor, slots: Tensor, weights: Optional[Tensor]) -> Tensor:
    """Return (T, C) of y's dtype: the sum of y's rows (S, C) at slots (T, k), times weights (T, k) FP32 if given.

    Added in FP32, in the order of k."""
    total = torch.zeros(slots.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(slots.shape[1]):
        row = y[slots[:, j].long()].float()
        total = total + (row if weights is None else row * weights[:, j, None])
    return total.to(y.dtype)


@combine.fake
def _(y, slots, weights):
    return y.new_empty(slots.shape[0], y.shape[1])


@kernel
def _combine_kernel(
    y_ptr,  # (S, C)
    slots_ptr,  # (T, k) int32
    weights_ptr,  # (T, k) FP32, if WEIGHTED
    out_ptr,  # (T, C)
    C, COUNT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(COUNT):
        slot = tl.load(slots_ptr + token * COUNT + j).to(tl.int64)
        row = tl.load(y_ptr + slot * C + c, mask=c < C, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weights_ptr + token * COUNT + j)
        total = total + row
    tl.store(out_ptr + token.to(tl.int64) * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)


@combine.cuda
def _(y, slots, weights):
    y, slots, weights = dense(y, slots, weights)
    (tokens, count), columns = slots.shape, y.shape[1]
    out, block = y.new_empty(tokens, columns), min(power_of_2(columns), 2048)
    if out.numel():
        _combine_kernel[(tokens, cdiv(columns, block))](
            y, slots, slots if weights is None else weights, out, columns, count, weights is not None, block,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return out


# ---- gradients of a token's expert -----------------------------------------------------------------------------------


@op
def expert_gradient(
    g: Tensor, codes: Tensor, group_amax: Tensor, weights: Tensor, activation: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """Return dh = weight * g, (S, I) of g's dtype, and the gradient of the weights, g . h, (S,) FP32.

    Args:
        g: (S, I), gradient of h before the weight. codes (S, F I) and group_amax (S, F, n): z as saved.
        weights: (S,) FP32.
    """
    gate, *up = decoded(codes, group_amax, code, group_size)
    h, _ = activation_of(activation).reference(gate)
    wide = g.contiguous().float()
    return (wide * weights[:, None]).to(g.dtype), (wide * (h * up[0] if up else h)).sum(1)


@expert_gradient.fake
def _(g, codes, group_amax, weights, activation, code, group_size):
    return g.new_empty(g.shape), weights.new_empty(weights.shape)


@kernel
def _expert_gradient_kernel(
    g_ptr,  # (S, I)
    codes_ptr,  # (S, F I) 8-bit
    amax_ptr,  # (S, F, n) BF16
    weights_ptr,  # (S,) FP32
    out_ptr,  # (S, I)
    sums_ptr,  # (S,) FP32
    S, I, n, FUNCTION: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,  # noqa: E741
    CODE: tl.constexpr, BT: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    t0, t = tl.program_id(0) * BT, tl.arange(0, BT)
    F: tl.constexpr = 2 if GATED else 1
    start = t0.to(tl.int64)
    weight = tl.load(weights_ptr + start + t, mask=t < S - t0, other=0.0)
    total = tl.zeros((BT,), tl.float32)
    for g0 in range(0, n, NG):
        group, c, real = group_columns(g0, I, G, GP, NG)
        first = start * I + g0 * G
        g, gate, up, gate_amax, up_amax, inside = load_operands(
            g_ptr + first, codes_ptr + (start * F * I + g0 * G), amax_ptr + (start * F * n + g0), t, c, group,
            real, S - t0, n - g0, I, n, GATED,
        )  # fmt: skip
        h = FUNCTION(decode(gate, gate_amax, CODE))[0]
        if GATED:
            h = h * decode(up, up_amax, CODE)
        g = g.to(tl.float32)
        total += tl.sum(tl.sum(g * h, 2), 1)
        dh = (g * weight[:, None, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + first + (t[:, None, None] * I + c[None, :, :]), dh, mask=inside)
    tl.store(sums_ptr + start + t, total, mask=t < S - t0)


GRADIENT_TILE, GRADIENT_ROWS = 4096, 8


@expert_gradient.cuda
def _(g, codes, group_amax, weights, activation, code, group_size):
    g, codes, group_amax, weights = dense(g, codes, group_amax, weights)
    (slots, parts, n), width, gp = group_amax.shape, g.shape[1], power_of_2(group_size)
    out, sums = torch.empty_like(g), torch.empty_like(weights)
    groups = min(max(GRADIENT_TILE // GRADIENT_ROWS // gp, 1), power_of_2(n))
    if slots:
        _expert_gradient_kernel[(cdiv(slots, GRADIENT_ROWS),)](
            g, codes, group_amax, weights, out, sums, slots, width, n, activation_of(activation).device, parts == 2,
            group_size, gp, CODES[code], GRADIENT_ROWS, groups, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, sums
