"""Codes of saved tensors: 8 bits per element and one maximum per 1xG group of consecutive elements of the last axis.

No GEMM reads these codes directly: they are decoded in the backward of a non-linear layer or of attention. A group is
normalised by its maximum M, stored in BF16; the *stored* M normalizes, so encoder and decoder always agree:

    e4m3   c = cast(x * 448/M)                            x' = c * M/448            the paper's choice
    int8   c = rint(x * 127/M)                            x' = c * M/127            uniform grid
    sqrt8  c = sign(x) * rint(sqrt(|x| * 127^2/M))        x' = c*|c| * M/127^2      grid bent towards zero

Values of a group span a few octaves, so resolution matters more than range: an integer grid has 10 dB less error than
E4M3 with the same bytes, and with the square root this holds even with outliers of 30 sigma. A non-finite value makes
its M non-finite, and so its whole group.

A `GroupCode` holds a code's bits, dtype, encode and decode. These functions are the specification; the Triton kernels
equal them bit for bit.

Legend: R rows (all leading axes flattened), C columns (last axis), G group size, n = ceil(C / G) groups in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats.float8 import E4M3, Quantized, cast_float8, decode_float8
from overcoat.kernels import hardware

# A group's maximum below this counts as zero: 1/M would leave FP32's range, and no activation is that small.
AMAX_FLOOR = 2.0**-100


def to_groups(x: Tensor, group_size: int) -> Tensor:
    """View rows as groups: (..., C) -> (R, n, G), the last group of a row padded with zeros. 0-d counts as (1,)."""
    columns = x.shape[-1] if x.dim() else 1
    rows = math.prod(x.shape[:-1])
    padded = F.pad(x.reshape(rows, columns), (0, -columns % group_size))
    return padded.view(rows, padded.shape[1] // group_size, group_size)


def from_groups(groups: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Undo `to_groups`: drop the padding and give back `shape`, contiguous (a view would keep the padding's bytes)."""
    columns = shape[-1] if len(shape) else 1
    return groups.flatten(1)[:, :columns].contiguous().view(shape)


def _encode_e4m3(groups: Tensor, amax: Tensor) -> Tensor:
    return cast_float8(groups * _ratio(448.0, amax), E4M3)


def _decode_e4m3(codes: Tensor, amax: Tensor) -> Tensor:
    return decode_float8(codes) * (amax * (1.0 / 448.0))


def _encode_int8(groups: Tensor, amax: Tensor) -> Tensor:
    return _to_int8(torch.round(groups * _ratio(127.0, amax)))


def _decode_int8(codes: Tensor, amax: Tensor) -> Tensor:
    return codes.float() * (amax * (1.0 / 127.0))


def _encode_sqrt8(groups: Tensor, amax: Tensor) -> Tensor:
    root = torch.round(hardware.sqrt(groups.abs() * _ratio(16129.0, amax)))
    return _to_int8(torch.copysign(root, groups))


def _decode_sqrt8(codes: Tensor, amax: Tensor) -> Tensor:
    c = codes.float()
    return c * c.abs() * (amax * (1.0 / 16129.0))


def _ratio(top: float, amax: Tensor) -> Tensor:
    """Return top / amax, or 0 where amax is (nearly) zero or NaN: all codes of such a group are 0."""
    # amax is divided by top first: 1 / amax alone may leave FP32's range.
    return torch.where(amax >= AMAX_FLOOR, hardware.reciprocal(amax * (1.0 / top)), torch.zeros_like(amax))


def _to_int8(x: Tensor) -> Tensor:
    # NaN has no integer code; the group's maximum carries it. Rounding M down in BF16 can push |x| * 127/M past 127.
    return x.nan_to_num(0.0).clamp(-127, 127).to(torch.int8)


@dataclass(frozen=True)
class GroupCode:
    """A code of a group: `encode(groups, amax)` and `decode(codes, amax)` with amax (R, n, 1) in FP32.

    bits: of one element's code; only `columns` and `empty_groups` depend on it.
    """

    name: str
    bits: int
    dtype: torch.dtype
    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]

    def columns(self, codes: Tensor) -> int:
        """Return how many elements a row of codes (..., C) encodes."""
        return codes.shape[-1] * 8 * self.dtype.itemsize // self.bits


GROUP_CODES = {
    code.name: code
    for code in (
        GroupCode("sqrt8", 8, torch.int8, _encode_sqrt8, _decode_sqrt8),
        GroupCode("e4m3", 8, torch.float8_e4m3fn, _encode_e4m3, _decode_e4m3),
        GroupCode("int8", 8, torch.int8, _encode_int8, _decode_int8),
    )
}


def encode_groups(x: Tensor, code: str = "sqrt8", group_size: int = 128) -> Quantized:
    """Encode a tensor (..., C) with one maximum for each 1xG group of the last axis.

    Groups never span rows; the last of a row may be shorter. code: "sqrt8", "e4m3" or "int8".

    Returns:
        data, 8-bit in the shape of x; scale = maxima, BF16 (R, n).
    """
    chosen = group_code(code)
    groups = to_groups(x.float(), group_size)
    amax = groups.abs().amax(-1).to(torch.bfloat16)
    data = chosen.encode(groups, amax.float().unsqueeze(-1))
    return Quantized(from_groups(data, x.shape), amax)


def decode_groups(
    q: Quantized, code: str = "sqrt8", group_size: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Undo `encode_groups`, in FP32, then round to `dtype`."""
    groups = to_groups(q.data.view(torch.uint8), group_size).view(q.data.dtype)
    values = group_code(code).decode(groups, q.scale.float().unsqueeze(-1))
    return from_groups(values, q.data.shape).to(dtype)


def empty_groups(x: Tensor, code: str, group_size: int) -> Quantized:
    """Allocate codes and maxima of x (R, C), on its device."""
    chosen, (rows, columns) = group_code(code), x.shape
    data = x.new_empty((rows, -(-columns * chosen.bits // (8 * chosen.dtype.itemsize))), dtype=chosen.dtype)
    return Quantized(data, x.new_empty((rows, -(-columns // group_size)), dtype=torch.bfloat16))


def group_code(name: str) -> GroupCode:
    """Return a code by name. ValueError: an unknown one."""
    if name not in GROUP_CODES:
        raise ValueError(f"unknown code of saved tensors {name!r}; choose one of {', '.join(GROUP_CODES)}")
    return GROUP_CODES[name]
