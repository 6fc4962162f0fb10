"""bf12: BF16 in 12 bits, the code in which attention saves q and k for its backward.

It has a sign, 4 bits of exponent relative to the largest |x| of a token's head, and BF16's 7 bits of mantissa. A BF16
number decodes exactly unless it is 2^14 times smaller than its head's largest; then the error is below 2^-22 of the
largest. So the backward uses the forward's exact scores (why: docs/architecture.md). FP32 and FP16 numbers are rounded
to 7 bits of mantissa; models in those types with scores of hundreds need `kept_attention="bf16"`. A head with |x| of
2^127 or more is lost, but the forward overflows there too.

With M = 2^e, e the exponent of the largest |x|, rounded to BF16, the code is that of a small float:

    z = x / M * 2^-112      an FP32 number of exponent field 0 to 15, or subnormal: its sign, and bits 16 to 26

It is stored as two tensors: sign, exponent and 3 bits of mantissa, in one byte per element; and the other 4 bits, two
to a byte, of elements j and j + D/2 of a head, which a rotation reads together.

Legend: T tokens, N heads, D head width.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

SHIFT = 2.0**112


def _power(amax: Tensor, sign: int) -> Tensor:
    """Return M, or if sign < 0 1 / M, FP32 (T, N, 1), from maxima BF16 (T, N); M is inf if a maximum is not finite."""
    field = (amax.float().view(torch.int32) >> 23).unsqueeze(-1)
    return ((field if sign > 0 else (254 - field).clamp(min=0)) << 23).view(torch.float32)


def encode_bf12(x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Encode x (T, N, D) FP32: upper bits int8 (T, N, D), lower bits uint8 (T, N, D/2), maxima BF16 (T, N)."""
    amax = x.abs().amax(-1).to(torch.bfloat16)
    z = x * _power(amax, -1) * (1.0 / SHIFT)
    bits = z.view(torch.int32) + 0x8000  # rounds values that are not BF16
    codes = ((bits >> 16) & 0x7FF) | ((bits >> 20) & 0x800)
    first, second = (codes & 15).to(torch.uint8).chunk(2, -1)
    return (codes >> 4).to(torch.uint8).view(torch.int8), first | (second << 4), amax


def decode_bf12(upper: Tensor, lower: Tensor, amax: Tensor) -> Tensor:
    """Undo `encode_bf12`; returns FP32 (T, N, D)."""
    nibbles = torch.cat((lower & 15, lower >> 4), -1)
    codes = (upper.to(torch.int32) << 4) | nibbles
    z = ((codes & 0x7FF) << 16) | (codes & -0x80000000)
    return z.view(torch.float32) * SHIFT * _power(amax, 1)
