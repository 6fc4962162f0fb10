"""The ways to write an activation or a gradient in 8 bits that are compared on real tensors.

Each is a function x (T, C) FP32 -> what its code decodes to, of the same shape. G is 128, or the width of a head for
what attention keeps; "centered" takes out what all tokens have in common before coding (`token_center`), "sequence
means" the mean of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from overcoat.formats import (
    E4M3,
    E5M2,
    Float8,
    decode_groups,
    dequantize_blocks,
    dequantize_tensor,
    encode_groups,
    quantize_blocks,
    quantize_tensor,
)
from overcoat.kernels.groups import token_center

Code = Callable[[Tensor], Tensor]

PAPER, OURS = "E4M3 1x16", "sqrt8 1xG"
OURS_CENTERED = OURS + ", centered"


def per_tensor(x: Tensor, fmt: Float8 = E4M3) -> Tensor:
    """One scale for all of x."""
    return dequantize_tensor(quantize_tensor(x, fmt))


def per_block(x: Tensor, block: tuple[int, int], fmt: Float8 = E4M3) -> Tensor:
    """One FP32 scale for each block of rows x columns."""
    return dequantize_blocks(quantize_blocks(x, block, fmt), block)


def per_group(x: Tensor, code: str, group_size: int) -> Tensor:
    """One BF16 maximum for each 1xG group."""
    return decode_groups(encode_groups(x, code, group_size), code, group_size)


def centered(x: Tensor, code: str, group_size: int) -> Tensor:
    """`per_group` of x minus a vector that all tokens share."""
    center = token_center(x)
    return per_group(x - center, code, group_size) + center


def sequence_means(x: Tensor, code: str, group_size: int, length: int) -> Tensor:
    """`per_group` of x minus the mean over the tokens of each sequence, T = sequences x length."""
    sequences = x.unflatten(0, (-1, length))
    means = sequences.mean(1, keepdim=True)
    return (per_group((sequences - means).flatten(0, 1), code, group_size).view_as(sequences) + means).flatten(0, 1)


def activation_codes(group_size: int = 128) -> dict[str, Code]:
    """What a kept tensor may be written in: per tensor, Jetfire's blocks, the paper's groups, wider ones, integers."""
    return {
        "E4M3 per tensor": per_tensor,
        "E4M3 4x4": partial(per_block, block=(4, 4)),
        PAPER: partial(per_group, code="e4m3", group_size=16),
        "E4M3 1xG": partial(per_group, code="e4m3", group_size=group_size),
        "INT8 1xG": partial(per_group, code="int8", group_size=group_size),
        OURS: partial(per_group, code="sqrt8", group_size=group_size),
    }


def attention_codes(width: int, length: int) -> dict[str, Code]:
    """What q, k, v or o may be written in: one group per token and head, with and without the common vector."""
    return {
        **activation_codes(width),
        "INT8 1xG, centered": partial(centered, code="int8", group_size=width),
        OURS_CENTERED: partial(centered, code="sqrt8", group_size=width),
        "sqrt8 1xG, sequence means": partial(sequence_means, code="sqrt8", group_size=width, length=length),
    }


def gradient_codes() -> dict[str, Code]:
    """What an output gradient may be written in as operand of a product."""
    return {
        "E5M2 per tensor": partial(per_tensor, fmt=E5M2),
        "E4M3 per tensor": per_tensor,
        "E5M2 1x128": partial(per_block, block=(1, 128), fmt=E5M2),
        "E4M3 1x128": partial(per_block, block=(1, 128)),
    }


def sqnr(exact: Tensor, decoded: Tensor) -> float:
    """Signal to quantization noise in dB; inf where there is no noise."""
    signal, noise = (float(x.double().square().sum()) for x in (exact, decoded - exact))
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def relative_error(decibels: float) -> float:
    """|noise| / |signal| of an SQNR."""
    return float(10 ** (-decibels / 20))
