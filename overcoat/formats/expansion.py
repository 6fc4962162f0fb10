"""Dynamic range expansion: raise a group of values to a power so that it fills an FP8 format's range (COAT, section 4).

In a group of 128 consecutive elements, Adam's moments span a few octaves; E4M3 spans 18. COAT stores sign(x) |x|^k,
with k chosen so that the group's dynamic range R = M / mu (M its maximum, mu its smallest positive value) becomes the
format's:

    R^k = R_format    =>    k = log2(R_format) / log2(R)          k about 2 for m, about 10 for v

On values normalized by M, y = x / M, that is one power each way:

    q  = cast( F_max * sign(y) |y|^k )                            F_max = 448 (E4M3), 57344 (E5M2)
    x' = M * sign(q) (|q| / F_max)^(1/k)

k is stored in one byte, in sixteenths, rounded down so that the range never overflows: k16 = floor(16 k) in 1..255.

    all-zero group          k = 1, codes 0                        R is undefined
    constant group, 1 value k = 255/16, decoded to M exactly      R = 1, log2(R) = 0
    zeros in a group        excluded from mu; they stay exactly 0
    denormal M              counts as 0 (such a v needs gradients below 1e-19)
    v > 0                   never stored as 0 (m / (sqrt(v) + eps) would explode): see `overcoat.formats.moments`

Legend: R rows, n groups of a row, G group size; groups are (R, n, G), their statistics (R, n, 1), both FP32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overcoat.formats.float8 import E4M3, E5M2
from overcoat.kernels.hardware import exp2, log2, reciprocal

# Exponents k are stored in sixteenths in one byte.
EXPONENT_STEPS = 16
# log2 of a format's dynamic range: its maximum over its smallest positive value.
FORMAT_RANGE_LOG2 = {fmt.name: math.log2(fmt.max / fmt.tiny) for fmt in (E4M3, E5M2)}
SMALLEST_NORMAL = 2.0**-126


def smallest_positive(groups: Tensor) -> Tensor:
    """Return mu, the smallest |x| > 0 of each group, (R, n, 1); +inf where a group has none."""
    magnitude = groups.abs()
    return torch.where(magnitude > 0, magnitude, torch.inf).amin(-1, keepdim=True)


def normalize(x: Tensor, amax: Tensor) -> Tensor:
    """Return x / amax, for any positive FP32 amax including denormals; 0 where amax is 0.

    One division per group, one or two multiplications per element: (x * s) * (1 / (amax * s)), where s is 1 unless
    1 / amax could overflow or be denormal.
    """
    scale = torch.where(amax < 2.0**-62, 2.0**64, torch.where(amax > 2.0**62, 2.0**-64, 1.0))
    return (x * scale) * torch.where(amax > 0, reciprocal(amax * scale), 0.0)


def exponent_of_range(amax: Tensor, smallest: Tensor, format_range_log2: float) -> Tensor:
    """Return k16 = floor(16 * log2(R_format) / log2(amax / smallest)), clamped to 1..255, as uint8 (R, n, 1).

    Args:
        amax: the maximum that normalizes, (R, n, 1): exact for m, as stored (rounded) for v.
        smallest: `smallest_positive` of the group.
        format_range_log2: log2 of the format's dynamic range; 17.8 for E4M3.
    """
    # v's amax may have been rounded below the smallest value: then R counts as 1.
    octaves = (reference_log2(amax) - log2(smallest)).clamp(min=0.0)
    steps = torch.floor(reciprocal(octaves) * (EXPONENT_STEPS * format_range_log2))  # 1 / 0 = inf: k = 255/16
    return torch.where(amax > 0, steps.clamp(1, 255), float(EXPONENT_STEPS)).to(torch.uint8)


def reference_log2(amax: Tensor) -> Tensor:
    """Return log2(amax), which is subtracted from a group's logarithms; 0 if amax < 2^-126: then all codes are 0."""
    return torch.where(amax >= SMALLEST_NORMAL, log2(amax), 0.0)


def expand(x: Tensor, amax: Tensor, k16: Tensor) -> Tensor:
    """Return sign(x) |x / amax|^k, in [-1, 1]: 0 stays 0 and amax becomes exactly 1."""
    return torch.copysign(exp2((log2(x.abs()) - reference_log2(amax)) * (k16.float() * (1.0 / EXPONENT_STEPS))), x)


def contract(z: Tensor, k16: Tensor) -> Tensor:
    """Return sign(z) |z|^(1/k): undo `expand`, except for the factor amax."""
    return torch.copysign(exp2(log2(z.abs()) * (reciprocal(k16.float()) * float(EXPONENT_STEPS))), z)
