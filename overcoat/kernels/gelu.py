"""GELU fused with the quantization of its input (kept) and of its output (the second projection's operand).

    h  = gelu(u) = u * phi        u (T, I), the first projection with its bias
    du = dh * (phi + u * phi')

`approximate`, named as in `torch.nn.functional.gelu`, says which phi:

    "none"   the normal distribution function, as 1 / (1 + 2^(u Q(u^2))): log2((1 - phi) / phi) is odd in u, and the
             polynomial Q of degree 6 was fitted to it so that u phi is right to 2.3e-8 * max(|u|, 1)
    "tanh"   (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) * (u + 0.044715 u^3): the same with a Q of degree 1

One exp2 and one reciprocal either way (and for the derivative of "none" a second exp2), by the GPU's own instructions
where there is one (hardware.py), and each product that feeds a sum as one fma, so that kernel and reference agree bit
for bit there.

Passes and what is kept are those of swiglu.py, but the first pass needs no gelu per element: the function rises from
u = -0.75 on and is at least -0.17, so a row's max |h| is gelu(max u), wherever that exceeds 0.17 (`row_maxima`). Nor
does the backward's first pass, which finds max |du|: |gelu'| is below 1.13, which leaves few values to compute. Layers
of this kind have biases: the pass that writes du in FP8 also sums it over the tokens; du in 16 bits never exists.

Legend: T tokens, I intermediate width, P = T padded to a multiple of 16, G group size, n = ceil(I / G).
"""

from __future__ import annotations

import math
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
from overcoat.kernels.quantize import padded_tokens, transpose_padded

LOG2E = math.log2(math.e)

# phi = 1 / (1 + 2^(u Q(u^2))). Of "tanh": Q = TANH_1 + TANH_3 u^2, phi' = phi (1 - phi) (SLOPE_1 + SLOPE_3 u^2).
SLOPE_1 = 2 * math.sqrt(2 / math.pi)
SLOPE_3 = 3 * 0.044715 * SLOPE_1
TANH_1 = -SLOPE_1 * LOG2E
TANH_3 = 0.044715 * TANH_1
# From |u| = 16 on phi is 0 or 1 to the last bit; a larger square would make phi' 0 * inf.
SQUARE_MAX = 256.0

# Of "none": Q's coefficients, the lowest first. Where the fit ends, at |u| = 6, u Q is beyond +-35 and its last term
# leads it on. 2^(EXPONENT u^2) = exp(-u^2 / 2), phi' = DENSITY exp(-u^2 / 2).
ERF = (-2.30221035, -0.10483218, 9.15865433e-5, 1.60439087e-4, -1.15779184e-5, 3.91635193e-7, -5.32833737e-9)
EXPONENT = -LOG2E / 2
DENSITY = 1 / math.sqrt(2 * math.pi)

# -u of the lowest h, in both forms to three digits.
VALLEY = 0.752


def _fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    y, z = (each if isinstance(each, Tensor) else x.new_full((), each) for each in (y, z))
    return hardware.fma(x, y, z)


def gelu(u: Tensor, approximate: str) -> Tuple[Tensor, Tensor]:
    """gelu(u), right to 2e-7 * max(|u|, 1), and its derivative, right to 5e-6; of FP32 u.

    Raises:
        ValueError: `approximate` is neither "none" nor "tanh".
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate = {approximate!r} is not known; choose 'none' (erf) or 'tanh'")
    square = u * u
    if approximate == "tanh":
        odds = _fma(square, TANH_3, TANH_1)
    else:
        odds = _fma(square, ERF[6], ERF[5])
        for coefficient in ERF[4::-1]:
            odds = _fma(odds, square, coefficient)
    phi = hardware.reciprocal(1.0 + hardware.exp2(u * odds))
    h = u * phi
    if approximate == "tanh":
        return h, _fma(_fma(-h, phi, h), _fma(square.clamp(max=SQUARE_MAX), SLOPE_3, SLOPE_1), phi)
    return h, _fma(u * hardware.exp2(square * EXPONENT), DENSITY, phi)


def row_maxima(u: Tensor, approximate: str) -> Tensor:
    """Each row's max |gelu(u)| (T,) FP32 of u (T, I), from its largest u and its largest |u|.

    0.17 instead where u spans the valley (min u < -0.75) without rising above 0.28: more than the maximum then, unless
    the row has a u in the valley.
    """
    wide = u.float()
    high, low = wide.amax(-1).clamp(min=0.0), wide.abs().amax(-1).clamp(max=VALLEY)
    return torch.maximum(gelu(high, approximate)[0], gelu(-low, approximate)[0].abs())


@op
def gelu_encode(u: Tensor, approximate: str, code: str, group_size: int) -> Tuple[Tensor, Tensor, Tensor]:
    """First pass over u (T, I): codes (T, I), BF16 group maxima (T, n), `row_maxima` of h (T,) FP32."""
    codes, group_amax = encode_groups(u, code, group_size)
    return codes, group_amax, row_maxima(u, approximate)


@gelu_encode.fake
def _(u, approximate, code, group_size):
    tokens, columns = u.shape
    return (
        u.new_empty(u.shape, dtype=group_code(code).dtype),
        u.new_empty((tokens, (columns + group_size - 1) // group_size), dtype=torch.bfloat16),
        u.new_empty((tokens,), dtype=torch.float32),
    )


@gelu_encode.cuda
def _(u, approximate, code, group_size):
    return gpu.gelu.gelu_encode(u, approximate, code, group_size)


@op
def gelu_quantize(u: Tensor, amax: Tensor, approximate: str) -> Tuple[Tensor, Tensor]:
    """Second pass: h in E4M3 (T, I), per tensor, and its 0-d FP32 scale for `amax` = max |h|."""
    data, scale = quantize_tensor(gelu(u.contiguous().float(), approximate)[0], E4M3, amax)
    return data, scale


@gelu_quantize.fake
def _(u, amax, approximate):
    return u.new_empty(u.shape, dtype=E4M3.dtype), u.new_empty((), dtype=torch.float32)


@gelu_quantize.cuda
def _(u, amax, approximate):
    return gpu.gelu.gelu_quantize(u, amax, approximate)


def gelu_gradient(
    dh: Tensor, codes: Tensor, group_amax: Tensor, approximate: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """du and h, both (T, I) FP32, from the kept codes."""
    h, slope = gelu(decode_groups(Quantized(codes, group_amax), code, group_size), approximate)
    return dh.contiguous().float() * slope, h


def token_sums(gradient: Tensor, has_bias: bool) -> Tensor:
    """Gradient of a bias (I,) FP32 from that of the layer's output (T, I) FP32; empty without a bias."""
    return gradient.sum(0) if has_bias else gradient.new_empty(0)


@op
def gelu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, approximate: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """Backward from the kept codes.

    Args:
        dh: (T, I), gradient of h.
        codes, group_amax: from `gelu_encode`; scale: from `gelu_quantize`.

    Returns:
        du (T, I) of dh's dtype; h rebuilt as transposed E4M3 operand (I, P).
    """
    gradient, h = gelu_gradient(dh, codes, group_amax, approximate, code, group_size)
    return gradient.to(dh.dtype), transpose_padded(cast_float8(h * (1.0 / scale), E4M3))


@gelu_backward.fake
def _(dh, codes, group_amax, scale, approximate, code, group_size):
    tokens, columns = dh.shape
    return dh.new_empty(dh.shape), dh.new_empty((columns, padded_tokens(tokens)), dtype=E4M3.dtype)


@gelu_backward.cuda
def _(dh, codes, group_amax, scale, approximate, code, group_size):
    return gpu.gelu_backward.gelu_backward(dh, codes, group_amax, scale, approximate, code, group_size)


@op
def gelu_backward_amax(
    dh: Tensor, codes: Tensor, group_amax: Tensor, approximate: str, code: str, group_size: int
) -> Tensor:
    """First of two passes that write du straight in FP8: max |du|, 0-d FP32; arguments as `gelu_backward`."""
    return gelu_gradient(dh, codes, group_amax, approximate, code, group_size)[0].abs().amax()


@gelu_backward_amax.fake
def _(dh, codes, group_amax, approximate, code, group_size):
    return dh.new_empty((), dtype=torch.float32)


@gelu_backward_amax.cuda
def _(dh, codes, group_amax, approximate, code, group_size):
    return gpu.gelu_backward.gelu_backward_amax(dh, codes, group_amax, approximate, code, group_size)


@op
def gelu_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    scale: Tensor,
    amax: Tensor,
    fmt: str,
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Second pass: du in FP8 in both layouts, the gradient of u's bias, and h as transposed operand.

    Args:
        scale: that of h, from `gelu_quantize`.
        amax: max |du|, from `gelu_backward_amax`; fmt: "e4m3" or "e5m2".
        has_bias: whether u's projection has a bias.

    Returns:
        du (T, I); du transposed (I, P); their 0-d FP32 scale; sum of du over the tokens (I,) FP32, before it is
        rounded, empty without a bias; h rebuilt as transposed E4M3 operand (I, P).
    """
    gradient, h = gelu_gradient(dh, codes, group_amax, approximate, code, group_size)
    data, d_scale = quantize_tensor(gradient, FLOAT8[fmt], amax)
    h_t = transpose_padded(cast_float8(h * (1.0 / scale), E4M3))
    return data, transpose_padded(data), d_scale, token_sums(gradient, has_bias), h_t


@gelu_backward_quantize.fake
def _(dh, codes, group_amax, scale, amax, fmt, has_bias, approximate, code, group_size):
    tokens, columns = dh.shape
    dtype, padded = FLOAT8[fmt].dtype, padded_tokens(tokens)
    return (
        dh.new_empty(dh.shape, dtype=dtype),
        dh.new_empty((columns, padded), dtype=dtype),
        dh.new_empty((), dtype=torch.float32),
        dh.new_empty(columns if has_bias else 0, dtype=torch.float32),
        dh.new_empty((columns, padded), dtype=E4M3.dtype),
    )


@gelu_backward_quantize.cuda
def _(dh, codes, group_amax, scale, amax, fmt, has_bias, approximate, code, group_size):
    return gpu.gelu_backward.gelu_backward_quantize(
        dh, codes, group_amax, scale, amax, fmt, has_bias, approximate, code, group_size
    )
