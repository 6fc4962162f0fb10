"""The code of AdamW's second moment that needs no logarithm: equal steps in the bits of FP32.

The bits of a positive FP32 number, read as an integer, are its logarithm: 2^23 per octave, linear within one. So a
grid with a constant step S in bits is a logarithmic grid, and needs neither log2 nor exp2:

    c  = rint( 255 - (bits(M) - bits(v)) / S )          v = 0 -> c = 0
    v' = float( bits(M) - (255 - c) S )                 c = 0 -> 0

S spreads 254 steps over the group's range bits(M) - bits(mu), mu its smallest positive value; it is rounded up to a
one-byte float. Against an exactly logarithmic grid the mean square error of v is 18% higher, a fifth of that of
e4m3x, for a tenth of the instructions; it decodes to the same bits on CPU and GPU. A group with M below 2^-131 is
stored as zero.

In a step v is rounded stochastically: M is moved by up to half of S, for every second element the other way. With
beta2 = 0.999 v moves by 0.1% of itself or less, and beside an outlier S is up to 11%: rounded to nearest v would stay
where it is. By how much M is moved follows the golden ratio from step to step (`masters.phase_bits`), so that the
errors cancel out within a few steps.

Legend: R rows, n groups of a row, G group size; groups are (R, n, G), their statistics (R, n, 1).
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from overcoat.kernels.hardware import fma, reciprocal

STEPS = 254
ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which then is in the low bits
FLOOR = 1 << 18  # as bits: a group with M < 2^-131 is stored as zero


def encode(groups: Tensor, bits: Tensor, smallest: Tensor, phase: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and the shape byte, int32, of v >= 0.

    v = 0 needs no case: its bits, 0, are 255 steps or more below M's; larger distances count as 255.

    Args:
        groups: FP32. bits: of M as stored, int32, 0 or at least FLOOR. smallest: mu, FP32.
        phase: int32, whose highest byte says by how much M is moved; None rounds to nearest.
    """
    span = bits - torch.where(bits > 0, smallest, 0.0).view(torch.int32)
    needed = ((span.clamp(min=0) + (STEPS - 1)) // STEPS).float()
    # An FP32 number rounded up to 4 bits of mantissa, as a byte: S = 2^9 (the exponent field 136) is 0.
    shape = (((needed.view(torch.int32) + 0x7FFFF) >> 19) - (136 << 4)).clamp(min=1)
    step = torch.where(bits > 0, step_bits(bits, shape), 1)
    origin = torch.where(bits > 0, bits, 1 << 30)  # of an all-zero group: far away, so that its codes are 0 too
    if phase is not None:
        is_odd = torch.arange(groups.shape[-1], device=groups.device) % 2 == 1
        moved = _offset(step, phase)
        origin = origin + torch.where(is_odd, -moved, moved)
    distance = torch.minimum(origin - groups.view(torch.int32), 255 * step).float()
    codes = fma(distance, -reciprocal(step.float()), distance.new_full((), ROUND + 255.0))
    return codes.view(torch.uint8)[..., ::4].contiguous(), shape


def _offset(step: Tensor, phase: Tensor) -> Tensor:
    """By how much M is moved, int32: evenly within 255/256 of +- (S / 2 - 256), so that with M's own rounding it is
    less than S / 2. M then keeps the largest code, zero keeps 0 and nothing else gets it."""
    return ((((phase >> 24) & 0xFF) * 2 - 255) * (step - 512).clamp(min=0)) >> 9


def decode(codes: Tensor, bits: Tensor, shape: Tensor) -> Tensor:
    """v, FP32."""
    return torch.where(codes > 0, level_value(codes, bits, shape), 0.0)


def level_value(codes: Tensor, bits: Tensor, shape: Tensor) -> Tensor:
    """v, FP32, but for code 0, which stands for 255 steps below M: at least 0."""
    return (bits - (255 - codes.int()) * step_bits(bits, shape)).view(torch.float32)


def step_bits(bits: Tensor, shape: Tensor) -> Tensor:
    """S, int32, from its byte: a small float, (16 + low nibble) 2^(5 + high nibble).

    It is at least 544 = 17 2^5, so that M's rounding, 255, is less than half a step, and at most bits / 255, so that
    zero lies 255 steps below M.
    """
    return torch.minimum((16 + (shape & 15)) << ((shape >> 4) + 5), bits // 255)
