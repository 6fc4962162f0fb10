"""Kernels of kernels/loss.py: cross-entropy in place on a chunk of logits, and a scalar factor in place.

One program per token reads its row twice, first for maximum and sum (in one sweep, each lane its own), then to turn it
into the gradient. With N = C * V * 2 bytes of logits it moves 2N or 3N, as the L2 cache still has the row or not.

Sums run over V in another order than PyTorch's, so kernel and reference agree to FP32 rounding (and a gradient to one
step of its dtype), not bit for bit; the kernel itself repeats its bits. `scale_` equals its reference bit for bit.

Legend: C tokens of the chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.kernels.gpu.common import LOG2E, power_of_2
from overcoat.kernels.gpu.hardware import exp2
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device

# Columns that a program takes at a time, and its warps.
TILE, WARPS = 2048, 8
# Elements of one program of `scale_`.
SCALE_BLOCK = 2048

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # finite, so that -inf - LOWEST is no NaN


@triton.jit
def _add(top, total, x):
    """Take x into each lane's maximum and its sum of 2^(x - maximum).

    Of the old and the new maximum one is x or `top` itself, so one power per element serves both cases. A NaN ends up
    in the sum; +inf makes it NaN or inf.
    """
    smaller = exp2(-tl.abs(x - top))
    return tl.where(x > top, x, top), tl.where(x > top, total * smaller + 1.0, total + smaller)


@triton.jit
def _log2_sum_exp2(logits_ptr, V, full, TILE: tl.constexpr):
    """log2 of the sum of 2^(x log2 e) over a row; `full`: columns in whole tiles, read without a mask."""
    lane = tl.arange(0, TILE)
    top = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, full, TILE):
        top, total = _add(top, total, tl.load(logits_ptr + start + lane).to(tl.float32) * LOG2E)
    x = tl.load(logits_ptr + full + lane, mask=lane < V - full, other=float("-inf"))
    top, total = _add(top, total, x.to(tl.float32) * LOG2E)
    highest = tl.max(top, 0)
    return highest + tl.log2(tl.sum(total * exp2(top - highest), 0))


@triton.jit
def _gradient(x, column, label, lse2, slope):
    """p (1 + 2 z lse) - onehot(label) of logits x, in their dtype."""
    dx = exp2(x.to(tl.float32) * LOG2E - lse2) * slope
    return tl.where(column == label, dx - 1.0, dx).to(x.dtype)


@kernel
def _cross_entropy_kernel(
    logits_ptr,  # (C, V), rows `stride` apart; becomes the gradient if GRADIENT
    labels_ptr,  # (C,) int64
    losses_ptr,  # (C,) FP32
    stride,
    V,
    ignore_index,
    z_loss,
    GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    lane = tl.arange(0, TILE)
    # A mask at an odd V would forbid vector loads and stores: only the last tile has one.
    full = V // TILE * TILE
    tail = lane < V - full
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            zero = tl.zeros((TILE,), logits_ptr.dtype.element_ty)
            for start in range(0, full, TILE):
                tl.store(logits_ptr + start + lane, zero)
            tl.store(logits_ptr + full + lane, zero, mask=tail)
    else:
        # Read before the sums, whose barriers keep it ahead of every thread's stores.
        known = (label >= 0) & (label < V)
        target = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
        lse2 = _log2_sum_exp2(logits_ptr, V, full, TILE)
        lse = lse2 * LN2
        tl.store(losses_ptr + row, lse - target + z_loss * lse * lse)
        if GRADIENT:
            slope = tl.where(known, 1.0 + 2.0 * z_loss * lse, float("nan"))
            for start in range(0, full, TILE):
                x = tl.load(logits_ptr + start + lane)
                tl.store(logits_ptr + start + lane, _gradient(x, start + lane, label, lse2, slope))
            x = tl.load(logits_ptr + full + lane, mask=tail, other=0.0)
            tl.store(logits_ptr + full + lane, _gradient(x, full + lane, label, lse2, slope), mask=tail)


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float, gradient: bool) -> Tensor:
    """Losses (C,) of logits (C, V), which become their gradient in place."""
    tokens, vocabulary = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    if tokens:
        with on_device(logits):
            _cross_entropy_kernel[(tokens,)](
                rows, labels.contiguous(), losses, rows.stride(0), vocabulary, ignore_index, float(z_loss),
                gradient, min(TILE, max(power_of_2(vocabulary), 128)), num_warps=WARPS,
            )  # fmt: skip
    if gradient and rows is not logits:
        logits.copy_(rows)
    return losses


@kernel
def _scale_kernel(
    x_ptr,  # N elements
    factor_ptr,  # 0-d FP32
    N,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N).to(tl.float32) * tl.load(factor_ptr)
    tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=offsets < N)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in FP32."""
    dense = x if x.is_contiguous() else x.contiguous()
    if x.numel():
        with on_device(x):
            _scale_kernel[(cdiv(x.numel(), SCALE_BLOCK),)](dense, factor, x.numel(), SCALE_BLOCK)
    if dense is not x:
        x.copy_(dense)
