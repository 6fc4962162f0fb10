"""Cross-entropy of a linear head, a chunk of tokens at a time, so that the logits are never in memory as a whole.

    x = hidden W^T + b                               logits, a chunk of tokens at a time; b: a head's bias, or none
    x = c tanh(x / c)                                if they are capped (Gemma 2); dx is times 1 - tanh^2
    lse = log sum_v e^(x_v),  p = e^(x - lse)        FP32
    loss = lse - x_label + z lse^2                   z: weight of the z-loss (arXiv 2204.02311), usually 0
    dx = p (1 + 2 z lse) - onehot(label)             written over x, in x's dtype
    dhidden = dx W,  dW += dx^T hidden,  db += sum of dx over tokens, in FP32

A token with the label `ignore_index` has loss and gradient 0. The gradients are those of the SUM over the tokens. Any
factor (1 / number of labels, a loss scale) is applied in the backward by `scale_`, in FP32. PyTorch's multiplication
by a 0-d tensor on a GPU rounds the factor to BF16 first: an error of up to 0.2% in every gradient of the model.

The forward computes the gradients too, since the logits are there: three GEMMs. Computing them in the backward would
take a fourth and save no memory, since hidden, needed there, is as large as dhidden.

The kernel reads a token's row twice, first for maximum and sum, then to replace it by the gradient. That moves 2 or 3
times the logits' bytes, depending on whether the row is still in the L2 cache. It sums over V in another order than
PyTorch, so it agrees with the reference to FP32 rounding (a gradient to one step of its dtype). It is deterministic.

Legend: T tokens, H hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from overcoat.kernels.device import LOG2E, larger, max_magnitude, power_of_2
from overcoat.kernels.gemm import gemm
from overcoat.kernels.instructions import exp2
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import amax, quantize_both
from overcoat.kernels.weights import numbers_of, quantize_operands, stack_weights

# Bytes of one chunk's logits, unless MIN_CHUNK tokens take more. The GEMMs need one or two thousand tokens to be
# efficient; with fewer, dW += dx^T hidden reads and writes dW for too little arithmetic.
CHUNK_BYTES = 256 * 2**20
MIN_CHUNK = 2048
CHUNK_MULTIPLE = 256
# Rows of logits begin at multiples of 64 elements (128 bytes in BF16) for any vocabulary: the GEMMs need it.
ROW_MULTIPLE = 64
# Columns that a program handles at a time, and its warps.
TILE, WARPS = 2048, 8

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # finite, so that -inf - LOWEST is no NaN


def chunk_rows(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return C: as many tokens as CHUNK_BYTES of logits hold, at least MIN_CHUNK; chunks have nearly equal size."""
    most = max(CHUNK_BYTES // (vocabulary * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE, MIN_CHUNK)
    if tokens <= most:
        return tokens
    count = -(-tokens // most)
    return -(-tokens // (count * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


# ---- on a chunk of logits --------------------------------------------------------------------------------------------


@op(mutates=("logits",))
def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float, gradient: bool, softcap: float = 0.0
) -> Tuple[Tensor, Tensor]:
    """Return each token's loss, (C,) FP32, and max |gradient|, (C,) FP32 or empty; overwrite logits by the gradient.

    A loss is not finite if its logits are not.

    Args:
        logits: (C, V), rows contiguous, possibly further apart than V; overwritten if `gradient`.
        labels: (C,) int64. One that is neither `ignore_index` nor in [0, V) makes loss and gradient NaN.
        z_loss: weight of lse^2.
        softcap: cap of the logits, as softcap * tanh(logits / softcap); the gradient is the uncapped logits'. 0: none.
    """
    x = logits.float().contiguous()
    inside = x / softcap if softcap else None
    x = x if inside is None else softcap * torch.tanh(inside)
    vocabulary = x.shape[1]
    counted = labels != ignore_index
    valid = (labels >= 0) & (labels < vocabulary)
    column = torch.where(valid, labels, 0)[:, None]
    lse = torch.logsumexp(x, 1)
    losses = lse - x.gather(1, column)[:, 0] + z_loss * lse.square()
    losses, largest = torch.where(valid, losses, torch.nan), losses.new_empty(0)
    if gradient:
        slope = torch.where(valid, 1.0 + 2.0 * z_loss * lse, torch.nan)
        dx = torch.exp(x - lse[:, None]) * slope[:, None]
        dx.scatter_add_(1, column, torch.full_like(dx[:, :1], -1.0))
        dx = dx if inside is None else dx * torch.cosh(inside).pow(-2)  # 1 - tanh^2, without its cancellation
        logits.copy_(torch.where(counted[:, None], dx, 0.0))
        largest = logits.abs().amax(1).float()
    return torch.where(counted, losses, 0.0), largest


@cross_entropy_.fake
def _(logits, labels, ignore_index, z_loss, gradient, softcap=0.0):
    losses = logits.new_empty(labels.shape, dtype=torch.float32)
    return losses, losses.new_empty(labels.shape if gradient else 0)


@triton.jit
def _add(top, total, x):
    """Update each lane's maximum `top` and sum `total` of 2^(x - maximum) with x.

    2^-|x - top| serves both cases, x or top being the new maximum. A NaN ends up in the sum; +inf makes it NaN or inf.
    """
    smaller = exp2(-tl.abs(x - top))
    return tl.where(x > top, x, top), tl.where(x > top, total * smaller + 1.0, total + smaller)


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """Return logits x in FP32 and 1, or cap * tanh(x / cap) and its derivative."""
    x = x.to(tl.float32)
    if CAPPED:
        small = exp2(tl.abs(x) * (-2.0 * LOG2E / cap))
        size = cap * (1.0 - small) / (1.0 + small)
        return tl.where(x < 0.0, -size, size), 4.0 * small / ((1.0 + small) * (1.0 + small))
    else:
        return x, 1.0


@triton.jit
def _log2_sum_exp2(logits_ptr, V, full, cap, CAPPED: tl.constexpr, TILE: tl.constexpr):
    """Return log2 of the sum of 2^(x log2 e) over a row; `full`: columns in whole tiles, read without a mask."""
    lane = tl.arange(0, TILE)
    top = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, full, TILE):
        top, total = _add(top, total, _capped(tl.load(logits_ptr + start + lane), cap, CAPPED)[0] * LOG2E)
    x = tl.load(logits_ptr + full + lane, mask=lane < V - full, other=float("-inf"))
    x, _ = _capped(x, cap, CAPPED)
    if CAPPED:
        x = tl.where(lane < V - full, x, float("-inf"))
    top, total = _add(top, total, x * LOG2E)
    highest = tl.max(top, 0)
    return highest + tl.log2(tl.sum(total * exp2(top - highest), 0))


@triton.jit
def _gradient(logit, column, label, lse2, slope, cap, CAPPED: tl.constexpr):
    """Return p (1 + 2 z lse) - onehot(label), of logits before the cap, in their dtype; slope: 1 + 2 z lse."""
    x, derivative = _capped(logit, cap, CAPPED)
    dx = exp2(x * LOG2E - lse2) * slope
    dx = tl.where(column == label, dx - 1.0, dx)
    if CAPPED:
        dx *= derivative
    return dx.to(logit.dtype)


@kernel
def _cross_entropy_kernel(
    logits_ptr,  # (C, V), rows `stride` apart; becomes the gradient if GRADIENT
    labels_ptr,  # (C,) int64
    losses_ptr,  # (C,) FP32
    largest_ptr,  # (C,) FP32: max |gradient|, if GRADIENT
    stride, V, ignore_index, z_loss, cap, GRADIENT: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    lane = tl.arange(0, TILE)
    # Only the last tile has a mask: with an odd V a mask prevents vector loads and stores.
    full = V // TILE * TILE
    tail = lane < V - full
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            tl.store(largest_ptr + row, 0.0)
            zero = tl.zeros((TILE,), logits_ptr.dtype.element_ty)
            for start in range(0, full, TILE):
                tl.store(logits_ptr + start + lane, zero)
            tl.store(logits_ptr + full + lane, zero, mask=tail)
    else:
        # Load it before the sums: their barriers order it before any thread's stores to the row.
        known = (label >= 0) & (label < V)
        target, _ = _capped(tl.load(logits_ptr + label, mask=known, other=float("nan")), cap, CAPPED)
        lse2 = _log2_sum_exp2(logits_ptr, V, full, cap, CAPPED, TILE)
        lse = lse2 * LN2
        tl.store(losses_ptr + row, lse - target + z_loss * lse * lse)
        if GRADIENT:
            slope = tl.where(known, 1.0 + 2.0 * z_loss * lse, float("nan"))
            top = tl.zeros((TILE,), tl.float32)
            for start in range(0, full, TILE):
                x = tl.load(logits_ptr + start + lane)
                dx = _gradient(x, start + lane, label, lse2, slope, cap, CAPPED)
                tl.store(logits_ptr + start + lane, dx)
                top = larger(top, tl.abs(dx.to(tl.float32)))
            x = tl.load(logits_ptr + full + lane, mask=tail, other=0.0)
            dx = _gradient(x, full + lane, label, lse2, slope, cap, CAPPED)
            tl.store(logits_ptr + full + lane, dx, mask=tail)
            top = larger(top, tl.where(tail, tl.abs(dx.to(tl.float32)), 0.0))
            tl.store(largest_ptr + row, max_magnitude(top, 0))


@cross_entropy_.cuda
def _(logits, labels, ignore_index, z_loss, gradient, softcap=0.0):
    tokens, vocabulary = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    largest = losses.new_empty(tokens if gradient else 0)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    if tokens:
        _cross_entropy_kernel[(tokens,)](
            rows, labels.contiguous(), losses, largest if gradient else losses, rows.stride(0), vocabulary,
            ignore_index, float(z_loss), float(softcap), gradient, softcap != 0,
            min(TILE, max(power_of_2(vocabulary), 128)), num_warps=WARPS,
        )  # fmt: skip
    if gradient and rows is not logits:
        logits.copy_(rows)
    return losses, largest


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply x by factor (0-d) in place. In compiled code by `mul_`: Inductor would copy x for our own op."""
    if torch.compiler.is_compiling():
        x.mul_(factor.view(1))
    else:
        multiply_(x, factor)


@op(mutates=("x",))
def multiply_(x: Tensor, factor: Tensor) -> None:
    """Compute x *= factor in FP32, rounded once; factor: 0-d FP32 on x's device, never read by the host."""
    x.mul_(factor.view(1))  # as a 0-d tensor it would be rounded to x's dtype first


@kernel
def _multiply_kernel(
    x_ptr,  # N elements
    factor_ptr,  # 0-d FP32
    N, TILE: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr)
    if factor != 1.0:  # an unscaled loss: nothing to read or write
        start = tl.program_id(0).to(tl.int64) * TILE
        place, x_ptr = tl.arange(0, TILE), x_ptr + start
        x = tl.load(x_ptr + place, mask=place < N - start)
        tl.store(x_ptr + place, (x.to(tl.float32) * factor).to(x.dtype), mask=place < N - start)


@multiply_.cuda
def _(x, factor):
    if not x.is_contiguous():
        multiply_.reference(x, factor)
    elif x.numel():
        _multiply_kernel[(cdiv(x.numel(), TILE),)](x, factor, x.numel(), TILE, num_warps=8)


# ---- the head --------------------------------------------------------------------------------------------------------


class _Head:
    """The head's three GEMMs in the operands' own dtype; one buffer holds the logits of each chunk in turn."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], rows: int) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dweight: Optional[Tensor] = None
        vocabulary = weight.shape[0]
        padded = -(-vocabulary // ROW_MULTIPLE) * ROW_MULTIPLE
        buffer = hidden.new_empty((rows, padded))
        # On CPUs with AMX a GEMM reads past the ends of such rows and multiplies by zero: no NaN may be there.
        buffer[:, vocabulary:] = 0.0
        self.buffer = buffer[:, :vocabulary]

    def logits(self, rows: slice) -> Tensor:
        x = self.hidden[rows]
        out = self.buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_gradients(
        self, logits: List[Tensor], _largest: Tensor, rows: slice, dhidden: Optional[Tensor], want_weight: bool
    ) -> None:
        dx = logits.pop()
        if dhidden is not None:
            torch.mm(dx, self.weight, out=dhidden[rows])
        if want_weight:
            # Accumulated in the weight's dtype, rounded once a chunk: docs/research/log.md has the error.
            if self.dweight is None:
                self.dweight = torch.mm(dx.t(), self.hidden[rows])
            else:
                self.dweight.addmm_(dx.t(), self.hidden[rows])


class _Float8Head:
    """The head's three GEMMs in FP8, one scale per tensor: hidden and weight in E4M3, dx in `fmt`."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], fmt: str) -> None:
        self.hidden, self.bias, self.fmt, self.dtype = hidden, bias, fmt, hidden.dtype
        self.dweight: Optional[Tensor] = None
        self.amax = amax(hidden)
        self.w8, scales, amaxes = quantize_operands([weight], [1], [])
        (self.w_scale,), (w_amax,) = numbers_of(scales), numbers_of(amaxes)
        self.w8_t, _ = stack_weights([weight], w_amax, True)

    def logits(self, rows: slice) -> Tensor:
        x8, self.x8_t, self.x_scale = quantize_both(self.hidden[rows], self.amax, "e4m3")
        return gemm(x8, self.w8, self.x_scale, self.w_scale, self.bias, self.dtype, True)

    def add_gradients(
        self, logits: List[Tensor], largest: Tensor, rows: slice, dhidden: Optional[Tensor], want_weight: bool
    ) -> None:
        dx = logits.pop()
        if dhidden is None and not want_weight:
            return
        d8, d8_t, d_scale = quantize_both(dx, amax(largest), self.fmt)
        del dx  # as large as both copies; the GEMMs need room for dW twice
        if dhidden is not None:
            dhidden[rows] = gemm(d8, self.w8_t, d_scale, self.w_scale, None, self.dtype, True)
        if want_weight:
            self.dweight = gemm(d8_t, self.x8_t, d_scale, self.x_scale, None, self.dtype, False, self.dweight)


@op
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, fmt: Optional[str],
    chunk_tokens: Optional[int], want_hidden: bool, want_weight: bool, bias: Optional[Tensor] = None,
    want_bias: bool = False, softcap: float = 0.0,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of the tokens' losses, 0-d FP32, and its gradients (T, H), (V, H) and (V,), a chunk at a time.

    It is one op, so that torch.compile does not change the chunks and their buffer.

    Args:
        hidden: (T, H); weight: (V, H), of the same dtype; labels: (T,) int64.
        fmt: None for GEMMs in that dtype; "e5m2" or "e4m3" for FP8 GEMMs, with dx in that format.
        chunk_tokens: C, or None for `chunk_rows`.
        want_hidden, want_weight, want_bias: which gradients to compute; the others are empty, (0,).
        bias: (V,) of the same dtype, or None. softcap: of `cross_entropy_`.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    hidden, weight = hidden.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()  # cuBLAS adds a strided one in another order
    dhidden = torch.empty_like(hidden) if want_hidden else None
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    dbias = losses.new_zeros(vocabulary) if want_bias else None
    size = max(min(chunk_tokens or chunk_rows(tokens, vocabulary, hidden.element_size()), tokens), 1)
    head = _Head(hidden, weight, bias, size) if fmt is None else _Float8Head(hidden, weight, bias, fmt)
    for start in range(0, tokens, size):
        rows = slice(start, min(start + size, tokens))
        logits = [head.logits(rows)]  # in a list, so that `add_gradients` can pop and free it
        losses[rows], largest = cross_entropy_(
            logits[0], labels[rows], ignore_index, z_loss, want_hidden or want_weight or want_bias, softcap
        )
        if dbias is not None:
            dbias += logits[0].sum(0, dtype=torch.float32)
        head.add_gradients(logits, largest, rows, dhidden, want_weight)
    dweight = torch.zeros_like(weight) if want_weight and not tokens else head.dweight
    dbias = None if dbias is None or bias is None else dbias.to(bias.dtype)
    gradients = (hidden.new_empty(0) if grad is None else grad for grad in (dhidden, dweight, dbias))
    return losses.sum(), *gradients  # type: ignore[return-value]


@linear_cross_entropy.fake
def _(
    hidden, weight, labels, ignore_index, z_loss, fmt, chunk_tokens, want_hidden, want_weight,
    bias=None, want_bias=False, softcap=0.0,
):  # fmt: skip
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if want_hidden else (0,)),
        weight.new_empty(weight.shape if want_weight else (0,)),
        weight.new_empty(weight.shape[0] if want_bias else 0),
    )
