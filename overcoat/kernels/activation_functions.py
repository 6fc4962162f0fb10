"""Activation functions and their derivatives, in PyTorch and in Triton: `ACTIVATIONS`, which activation.py's ops take.

The two agree bit for bit on a GPU: both use the GPU's exp2 and reciprocal (hardware.py), and an fma for each product
that is added to something.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Tuple

import torch
from torch import Tensor

from overcoat.kernels import hardware
from overcoat.kernels.device import LOG2E as _LOG2E
from overcoat.kernels.device import larger
from overcoat.kernels.hardware import LOG2E
from overcoat.kernels.instructions import exp2, fma, reciprocal
from overcoat.kernels.language import tl, triton


def silu(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return x sigmoid(x) and its derivative."""
    s = hardware.reciprocal(1.0 + hardware.exp2(x * -LOG2E))
    value = x * s
    return value, hardware.fma(value, 1.0 - s, s)


@triton.jit
def _silu(x):
    s = reciprocal(1.0 + exp2(x * -_LOG2E))
    value = x * s
    return value, fma(value, 1.0 - s, s)


# GELU is x phi(x), phi = 1 / (1 + 2^(x Q(x^2))). With erf, phi is the normal distribution function: Q was fitted to
# log2((1 - phi) / phi), an odd function, so that x phi has, before FP32 rounds it, an error below 2.3e-8 * max(|x|, 1).
# The fit ends at |x| = 6, where |x Q| > 35; beyond, its last term dominates.
# phi' = DENSITY exp(-x^2 / 2) = DENSITY 2^(EXPONENT x^2).
ERF = (-2.30221035, -0.10483218, 9.15865433e-5, 1.60439087e-4, -1.15779184e-5, 3.91635193e-7, -5.32833737e-9)
EXPONENT = -LOG2E / 2
DENSITY = 1 / math.sqrt(2 * math.pi)
_ERF_0, _ERF_1, _ERF_2, _ERF_3, _ERF_4, _ERF_5, _ERF_6 = (tl.constexpr(x) for x in ERF)
_EXPONENT, _DENSITY = tl.constexpr(EXPONENT), tl.constexpr(DENSITY)
# With tanh, phi = sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): Q = TANH_1 + TANH_3 x^2, and
# phi' = phi (1 - phi) (SLOPE_1 + SLOPE_3 x^2).
SLOPE_1 = 2 * math.sqrt(2 / math.pi)
SLOPE_3 = 3 * 0.044715 * SLOPE_1
TANH_1 = -SLOPE_1 * LOG2E
TANH_3 = 0.044715 * TANH_1
# From |x| = 16 on phi is exactly 0 or 1; without this limit a large square would make phi' 0 * inf = NaN.
SQUARE_MAX = 256.0
_SLOPE_1, _SLOPE_3, _TANH_1, _TANH_3 = (tl.constexpr(x) for x in (SLOPE_1, SLOPE_3, TANH_1, TANH_3))
_SQUARE_MAX = tl.constexpr(SQUARE_MAX)


def _fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    y, z = (each if isinstance(each, Tensor) else x.new_full((), each) for each in (y, z))
    return hardware.fma(x, y, z)


def gelu(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return x phi(x) by erf, with an error below 2e-7 * max(|x|, 1), and its derivative, below 5e-6."""
    square = x * x
    odds = _fma(square, ERF[6], ERF[5])
    for coefficient in ERF[4::-1]:
        odds = _fma(odds, square, coefficient)
    phi = hardware.reciprocal(1.0 + hardware.exp2(x * odds))
    return x * phi, _fma(x * hardware.exp2(square * EXPONENT), DENSITY, phi)


@triton.jit
def _gelu(x):
    square = x * x
    odds = fma(fma(fma(square, _ERF_6, _ERF_5), square, _ERF_4), square, _ERF_3)
    odds = fma(fma(fma(odds, square, _ERF_2), square, _ERF_1), square, _ERF_0)
    phi = reciprocal(1.0 + exp2(x * odds))
    return x * phi, fma(x * exp2(square * _EXPONENT), _DENSITY, phi)


def gelu_tanh(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return x phi(x) by tanh and its derivative, as exact as `gelu`."""
    square = x * x
    phi = hardware.reciprocal(1.0 + hardware.exp2(x * _fma(square, TANH_3, TANH_1)))
    value = x * phi
    return value, _fma(_fma(-value, phi, value), _fma(square.clamp(max=SQUARE_MAX), SLOPE_3, SLOPE_1), phi)


@triton.jit
def _gelu_tanh(x):
    square = x * x
    phi = reciprocal(1.0 + exp2(x * fma(square, _TANH_3, _TANH_1)))
    value = x * phi
    return value, fma(fma(-value, phi, value), fma(tl.minimum(square, _SQUARE_MAX), _SLOPE_3, _SLOPE_1), phi)


def relu2(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return max(x, 0)^2 and its derivative."""
    positive = x.clamp(min=0.0)
    return positive * positive, positive + positive


@triton.jit
def _relu2(x):
    positive = larger(x, 0.0)
    return positive * positive, positive + positive


def relu(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return max(x, 0) and its derivative; NaN stays NaN in both."""
    return x.clamp(min=0.0), torch.where(x.isnan(), x, (x > 0).to(x.dtype))


@triton.jit
def _relu(x):
    return larger(x, 0.0), tl.where(x > 0.0, 1.0, tl.where(x != x, x, 0.0))


# CLIP's GELU: x sigmoid(QUICK x).
QUICK = 1.702
_QUICK = tl.constexpr(QUICK)


def quick_gelu(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return x sigmoid(1.702 x) and its derivative."""
    s = hardware.reciprocal(1.0 + hardware.exp2(x * -(QUICK * LOG2E)))
    value = x * s
    return value, _fma(value * QUICK, 1.0 - s, s)


@triton.jit
def _quick_gelu(x):
    s = reciprocal(1.0 + exp2(x * -(_QUICK * _LOG2E)))
    value = x * s
    return value, fma(value * _QUICK, 1.0 - s, s)


class Activation(NamedTuple):
    """An entry of `ACTIVATIONS`. For |x| <= a, |f(x)| must be at most f(a), and |f'(x)| at most f'(min(a, peak)).

    Without a gate f(0) must be 0, since tiles are filled up with zeros.

    reference: value and derivative in PyTorch; device: the same in Triton; peak: x of the largest derivative, inf if it
    never falls.
    """

    reference: Callable[[Tensor], Tuple[Tensor, Tensor]]
    device: Any
    peak: float


ACTIVATIONS = {
    "silu": Activation(silu, _silu, 2.39936),  # slope 1.09984
    "gelu": Activation(gelu, _gelu, math.sqrt(2.0)),  # 1.12890
    "gelu_tanh": Activation(gelu_tanh, _gelu_tanh, 1.41850),  # 1.12899
    "quick_gelu": Activation(quick_gelu, _quick_gelu, 2.39936 / QUICK),  # 1.09984
    "relu2": Activation(relu2, _relu2, math.inf),
    "relu": Activation(relu, _relu, math.inf),
}
# A factor larger than any rounding error of the hardware's approximate instructions, for bounds.
ROUNDING = 1.0 + 2.0**-12


def activation_of(name: str) -> Activation:
    """Look up an activation by name; ValueError lists the known ones."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
