"""Quantize GEMM operands and kept tensors; turn kept codes back into a transposed GEMM operand.

FP8 tensor cores on Hopper take both operands with the contraction axis contiguous ("NT": D = A @ B^T). The three
products of a linear layer y = x W^T (T tokens, K in, N out) therefore want:

    forward   y  = x   (T, K) . W   (N, K)^T            x, W as they lie
    dgrad     dx = dy  (T, N) . W^T (K, N)^T            W transposed
    wgrad     dW = dy^T(N, T) . x^T (K, T)^T            dy and x transposed

so a quantizing op can write the plain layout, the transposed one, or both from one read. The contraction axis must be
a multiple of 16: transposed activations are padded with zero tokens, which add nothing to the product.

Legend: T tokens, C columns, P = T rounded up to a multiple of 16, G group size.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat import weight_amax
from overcoat.catalogue import op
from overcoat.formats import (
    E4M3,
    FLOAT8,
    Quantized,
    cast_float8,
    decode_groups,
    encode_groups,
    group_code,
    quantize_tensor,
    scale_from_amax,
)
from overcoat.kernels import gpu

TOKEN_MULTIPLE = 16


def padded_tokens(tokens: int) -> int:
    """P: `tokens` rounded up to what the tensor cores' contraction axis needs."""
    return (tokens + TOKEN_MULTIPLE - 1) // TOKEN_MULTIPLE * TOKEN_MULTIPLE


def transpose_padded(data: Tensor) -> Tensor:
    """(T, C) FP8 -> (C, P) contiguous, padded with zeros."""
    as_bytes = F.pad(data.view(torch.uint8), (0, 0, 0, padded_tokens(data.shape[0]) - data.shape[0]))
    return as_bytes.t().contiguous().view(data.dtype)


@op
def amax(x: Tensor) -> Tensor:
    """max |x| as 0-d FP32; 0 for an empty tensor; NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


@amax.fake
def _(x):
    return x.new_empty((), dtype=torch.float32)


@amax.cuda
def _(x):
    return gpu.quantize.amax_of(x)


@op
def quantize(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Per-tensor FP8 of x (T, C): data (T, C) and the 0-d FP32 dequantization scale for `amax`."""
    data, scale = quantize_tensor(x.contiguous(), FLOAT8[fmt], amax)
    return data, scale


@quantize.fake
def _(x, amax, fmt):
    return x.new_empty(x.shape, dtype=FLOAT8[fmt].dtype), x.new_empty((), dtype=torch.float32)


@quantize.cuda
def _(x, amax, fmt):
    return gpu.quantize.quantize(x, amax, fmt)


@op
def quantize_both(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Per-tensor FP8 of x (T, C) in both layouts: data (T, C), data^T (C, P), scale."""
    data, scale = quantize_tensor(x.contiguous(), FLOAT8[fmt], amax)
    return data, transpose_padded(data), scale


@quantize_both.fake
def _(x, amax, fmt):
    dtype = FLOAT8[fmt].dtype
    tokens, columns = x.shape
    transposed = x.new_empty((columns, padded_tokens(tokens)), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, x.new_empty((), dtype=torch.float32)


@quantize_both.cuda
def _(x, amax, fmt):
    return gpu.quantize.quantize_both(x, amax, fmt, padded_tokens(x.shape[0]))


@op
def stack_amax(weights: List[Tensor]) -> Tensor:
    """max |w| over several weights, 0-d FP32: they share one scale, being one operand of one GEMM."""
    return torch.stack([w.abs().amax().float() for w in weights]).amax()


@stack_amax.fake
def _(weights):
    return weights[0].new_empty((), dtype=torch.float32)


@stack_amax.cuda
def _(weights):
    return gpu.stack.stack_amax(weights)


@op
def stack_weights(weights: List[Tensor], amax: Tensor, transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand: (sum N, K), or (K, sum N) if `transposed`, and their common scale."""
    scale = scale_from_amax(amax, E4M3)
    data = cast_float8(torch.cat([w.float() for w in weights]) * (1.0 / scale), E4M3)
    if transposed:
        data = data.view(torch.uint8).t().contiguous().view(E4M3.dtype)
    return data, scale


@stack_weights.fake
def _(weights, amax, transposed):
    rows = sum(w.shape[0] for w in weights)
    columns = weights[0].shape[1]
    shape = (columns, rows) if transposed else (rows, columns)
    return weights[0].new_empty(shape, dtype=E4M3.dtype), weights[0].new_empty((), dtype=torch.float32)


@stack_weights.cuda
def _(weights, amax, transposed):
    return gpu.stack.stack_weights(weights, amax, transposed)


@op
def stack_weights_guessed(weights: List[Tensor], guesses: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights` (sum N, K) with the scale for `stack_amax`, which is returned as well: data, scale, maximum.

    guesses: what each weight's maximum should be, 0-d FP32, as `AdamW` found it when it wrote the weight
    (weight_amax.py). The result does not depend on them, its time does: right ones save the kernel a pass.
    """
    top = stack_amax.reference(weights)
    return *stack_weights.reference(weights, top, False), top


@stack_weights_guessed.fake
def _(weights, guesses):
    return _stacked_shapes(weights)


def _stacked_shapes(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    rows = sum(w.shape[0] for w in weights)
    data = weights[0].new_empty((rows, weights[0].shape[1]), dtype=E4M3.dtype)
    return data, weights[0].new_empty((), dtype=torch.float32), weights[0].new_empty((), dtype=torch.float32)


@stack_weights_guessed.cuda
def _(weights, guesses):
    return gpu.stack_guessed.stack_weights_guessed(weights, guesses)


@op
def stack_weights_asking(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights_guessed` that asks for the guesses itself, each time it runs: compiled code cannot.

    Where nothing is known it looks for the maximum, and notes it nowhere: the memory may be a CUDA graph's.
    """
    top = stack_amax.reference(weights)
    return *stack_weights.reference(weights, top, False), top


@stack_weights_asking.fake
def _(weights):
    return _stacked_shapes(weights)


@stack_weights_asking.cuda
def _(weights):
    return gpu.stack_guessed.stack_weights_guessed(weights, weight_amax.guesses(weights))


class Encoded(NamedTuple):
    """A kept tensor (T, C): 8-bit codes (T, C), BF16 group maxima (T, n), and the FP32 (C,) taken out before."""

    codes: Tensor
    group_amax: Tensor
    center: Optional[Tensor]


CENTER_ROWS = 256


@op
def token_center(x: Tensor) -> Tensor:
    """What all tokens have in common: the mean over at most 256 evenly spaced rows of x (T, C), FP32 (C,).

    Biases and outlier channels add the same vector to every token's v. It cancels in attention's gradients (softmax
    does not see it), its quantization error would not. Any vector decodes exactly, so a sample will do.
    """
    step = max(1, -(-x.shape[0] // CENTER_ROWS))
    return x[::step].float().mean(0)


@token_center.fake
def _(x):
    return x.new_empty(x.shape[1:], dtype=torch.float32)


@token_center.cuda
def _(x):
    return gpu.groups.token_center(x, -(-x.shape[0] // CENTER_ROWS))


@op
def group_encode(x: Tensor, center: Optional[Tensor], code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Kept-tensor codes of x - center: codes (T, C) and BF16 group maxima (T, n) of x (T, C), center (C,) FP32."""
    values = x.contiguous() if center is None else x.float() - center
    data, scale = encode_groups(values, code, group_size)
    return data, scale


@group_encode.fake
def _(x, center, code, group_size):
    groups = (x.shape[-1] + group_size - 1) // group_size
    return (
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
    )


@group_encode.cuda
def _(x, center, code, group_size):
    return gpu.groups.group_encode(x, center, code, group_size, False)[:2]


@op
def group_encode_amax(x: Tensor, center: Optional[Tensor], code: str, group_size: int) -> Tuple[Tensor, Tensor, Tensor]:
    """`group_encode`, and max |x| as 0-d FP32 from the same pass: x is kept in groups and is a GEMM's operand."""
    codes, group_amax = group_encode.reference(x, center, code, group_size)
    return codes, group_amax, amax.reference(x)


@group_encode_amax.fake
def _(x, center, code, group_size):
    groups = (x.shape[-1] + group_size - 1) // group_size
    return (
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
        x.new_empty((), dtype=torch.float32),
    )


@group_encode_amax.cuda
def _(x, center, code, group_size):
    return gpu.groups.group_encode(x, center, code, group_size, True)


@op
def group_decode(
    codes: Tensor, group_amax: Tensor, center: Optional[Tensor], code: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Undo `group_encode`, rounded to `dtype`."""
    values = decode_groups(Quantized(codes, group_amax), code, group_size)
    return (values if center is None else values + center).to(dtype)


@group_decode.fake
def _(codes, group_amax, center, code, group_size, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)


@group_decode.cuda
def _(codes, group_amax, center, code, group_size, dtype):
    return gpu.groups.group_decode(codes, group_amax, center, code, group_size, dtype)


@op
def requantize_t(
    codes: Tensor,
    group_amax: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Tensor,
    code: str,
    group_size: int,
) -> Tensor:
    """Kept codes (T, C) -> (decoded * weight + bias) as transposed E4M3 operand (C, P) with the forward's scale.

    With a norm's weight and bias (C,) this rebuilds the norm's output from its kept normalised value, so the forward's
    FP8 operand need not be kept; without weight, and with the center as bias, it serves attention's output.
    """
    y = decode_groups(Quantized(codes, group_amax), code, group_size)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return transpose_padded(cast_float8(y * (1.0 / scale), E4M3))


@requantize_t.fake
def _(codes, group_amax, weight, bias, scale, code, group_size):
    return codes.new_empty((codes.shape[1], padded_tokens(codes.shape[0])), dtype=E4M3.dtype)


@requantize_t.cuda
def _(codes, group_amax, weight, bias, scale, code, group_size):
    padded = padded_tokens(codes.shape[0])
    return gpu.groups.requantize_t(codes, group_amax, weight, bias, scale, code, group_size, padded)


@op
def quantize_t(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """x (T, C) as transposed FP8 operand (C, P) with a scale that the forward found."""
    return transpose_padded(cast_float8(x.float() * (1.0 / scale), FLOAT8[fmt]))


@quantize_t.fake
def _(x, scale, fmt):
    return x.new_empty((x.shape[1], padded_tokens(x.shape[0])), dtype=FLOAT8[fmt].dtype)


@quantize_t.cuda
def _(x, scale, fmt):
    return gpu.quantize.quantize_t(x, scale, fmt, padded_tokens(x.shape[0]))
