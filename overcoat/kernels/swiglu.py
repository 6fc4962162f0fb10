"""SwiGLU fused with the quantization of its input (kept) and of its output (the down projection's operand).

    h = silu(g) * u,  silu(g) = g * sigmoid(g)              g, u = the halves of gate_up
    dg = dh * u * (sigmoid(g) + silu(g) * (1 - sigmoid(g)))
    du = dh * silu(g)

One pass over gate_up writes its 8-bit groups and each row's max |h|; a second writes h in FP8 (Group Scaling, as in
norm.py). h itself is never kept: the backward rebuilds it from the codes, as the transposed operand of the down
projection's weight gradient, with the scale of the forward.

Legend: T tokens, I intermediate width, P = T padded to a multiple of 16, G group size, n = ceil(I / G).
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat import hardware
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
)
from overcoat.kernels import gpu
from overcoat.kernels.quantize import amax, padded_tokens, transpose_padded

LOG2E = 1.4426950408889634


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + 2^(-x log2 e)) in FP32, by the GPU's own instructions where there is one; right to about 2e-6."""
    return hardware.reciprocal(1.0 + hardware.exp2(x * -LOG2E))


def gated_product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return gate * sigmoid(gate) * up


def _decode(codes: Tensor, group_amax: Tensor, code: str, group_size: int) -> Tensor:
    halves = codes.unflatten(-1, (2, -1))
    return decode_groups(Quantized(halves, group_amax.flatten(0, 1)), code, group_size).flatten(1)


@op
def swiglu_encode(gate_up: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor, Tensor]:
    """First pass over gate_up (T, 2I): codes (T, 2I), BF16 group maxima (T, 2, n), max |h| as 0-d FP32.

    Groups never span gate and up.
    """
    codes, group_amax = encode_groups(gate_up.unflatten(-1, (2, -1)), code, group_size)
    return codes.flatten(1), group_amax.view(gate_up.shape[0], 2, -1), amax.reference(gated_product(gate_up))


@swiglu_encode.fake
def _(gate_up, code, group_size):
    tokens, columns = gate_up.shape
    groups = (columns // 2 + group_size - 1) // group_size
    return (
        gate_up.new_empty(gate_up.shape, dtype=group_code(code).dtype),
        gate_up.new_empty((tokens, 2, groups), dtype=torch.bfloat16),
        gate_up.new_empty((), dtype=torch.float32),
    )


@swiglu_encode.cuda
def _(gate_up, code, group_size):
    return gpu.swiglu.swiglu_encode(gate_up, code, group_size)


@op
def swiglu_quantize(gate_up: Tensor, amax: Tensor) -> Tuple[Tensor, Tensor]:
    """Second pass: h in E4M3 (T, I), per tensor, and its 0-d FP32 scale for `amax` = max |h|."""
    data, scale = quantize_tensor(gated_product(gate_up.contiguous()), E4M3, amax)
    return data, scale


@swiglu_quantize.fake
def _(gate_up, amax):
    tokens, columns = gate_up.shape
    return gate_up.new_empty((tokens, columns // 2), dtype=E4M3.dtype), gate_up.new_empty((), dtype=torch.float32)


@swiglu_quantize.cuda
def _(gate_up, amax):
    return gpu.swiglu.swiglu_quantize(gate_up, amax)


def gated_gradient(dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Gradient of gate_up (T, 2I) and h (T, I), both FP32, from the kept codes."""
    gate, up = _decode(codes, group_amax, code, group_size).chunk(2, -1)
    s, wide = sigmoid(gate), dh.float()
    silu = gate * s
    dgate = wide * up * hardware.fma(silu, 1.0 - s, s)
    return torch.cat((dgate, wide * silu), -1), silu * up


@op
def swiglu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """Backward from the kept codes.

    Args:
        dh: (T, I), gradient of h.
        codes, group_amax: from `swiglu_encode`; scale: from `swiglu_quantize`.

    Returns:
        gradient of gate_up (T, 2I) of dh's dtype; h rebuilt as transposed E4M3 operand (I, P).
    """
    gradient, product = gated_gradient(dh, codes, group_amax, code, group_size)
    return gradient.to(dh.dtype), transpose_padded(cast_float8(product * (1.0 / scale), E4M3))


@swiglu_backward.fake
def _(dh, codes, group_amax, scale, code, group_size):
    tokens, columns = dh.shape
    transposed = dh.new_empty((columns, padded_tokens(tokens)), dtype=E4M3.dtype)
    return dh.new_empty(codes.shape), transposed


@swiglu_backward.cuda
def _(dh, codes, group_amax, scale, code, group_size):
    padded = padded_tokens(dh.shape[0])
    return gpu.swiglu_backward.swiglu_backward(dh, codes, group_amax, scale, code, group_size, padded)


@op
def swiglu_backward_amax(dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int) -> Tensor:
    """First of two passes that write the gradient of gate_up straight in FP8: its largest magnitude, 0-d FP32.

    Arguments as `swiglu_backward`.
    """
    return gated_gradient(dh, codes, group_amax, code, group_size)[0].abs().amax()


@swiglu_backward_amax.fake
def _(dh, codes, group_amax, code, group_size):
    return dh.new_empty((), dtype=torch.float32)


@swiglu_backward_amax.cuda
def _(dh, codes, group_amax, code, group_size):
    return gpu.swiglu_backward.swiglu_backward_amax(dh, codes, group_amax, code, group_size)


@op
def swiglu_backward_quantize(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, amax: Tensor, fmt: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Second pass: the gradient of gate_up in FP8, and h.

    Args:
        dh, codes, group_amax, scale: as `swiglu_backward`.
        amax: max |gradient|, from `swiglu_backward_amax`; fmt: "e4m3" or "e5m2".

    Returns:
        gradient (T, 2I) and its transpose (2I, P), their 0-d scale; h rebuilt as transposed E4M3 operand (I, P).
    """
    gradient, h = gated_gradient(dh, codes, group_amax, code, group_size)
    data, d_scale = quantize_tensor(gradient, FLOAT8[fmt], amax)
    return data, transpose_padded(data), d_scale, transpose_padded(cast_float8(h * (1.0 / scale), E4M3))


@swiglu_backward_quantize.fake
def _(dh, codes, group_amax, scale, amax, fmt, code, group_size):
    tokens, columns = codes.shape
    dtype, padded = FLOAT8[fmt].dtype, padded_tokens(tokens)
    return (
        dh.new_empty(codes.shape, dtype=dtype),
        dh.new_empty((columns, padded), dtype=dtype),
        dh.new_empty((), dtype=torch.float32),
        dh.new_empty((columns // 2, padded), dtype=E4M3.dtype),
    )


@swiglu_backward_quantize.cuda
def _(dh, codes, group_amax, scale, amax, fmt, code, group_size):
    padded = padded_tokens(dh.shape[0])
    return gpu.swiglu_backward.swiglu_backward_quantize(
        dh, codes, group_amax, scale, amax, fmt, code, group_size, padded
    )
