"""8-bit formats and the granularities at which they are scaled.

Two families, for two uses (COAT, arXiv 2410.19313, section 5: "mixed granularity"):

* **GEMM operands** are FP8 with ONE scale per tensor (or per block), because that is what the tensor cores take.
  E4M3 (max 448, 3 mantissa bits) for activations and weights, E5M2 (max 57344, 2 mantissa bits) for gradients.

      scale = amax / fmt.max            (1 for an all-zero tensor)
      data  = cast(x * (1 / scale))     round to nearest even, saturate
      x'    = data * scale

* **Kept tensors** enter no GEMM as they are: they wait for the backward of a non-linear layer or of attention.
  They use an 8-bit code per group of 1xG neighbours on the last axis, normalised by the group's maximum M:

      e4m3   c = cast(x * 448/M)                            x' = c * M/448            the paper's choice
      int8   c = rint(x * 127/M)                            x' = c * M/127            uniform grid
      sqrt8  c = sign(x) * rint(sqrt(|x| * 127^2/M))        x' = c*|c| * M/127^2      grid bent towards zero

  In a group the values lie within a few octaves, so resolution is worth more than range: an integer grid has 10 dB
  less error than E4M3 at the same bytes, and the square root keeps that with outliers 30 sigma high.

M is stored in BF16 and the *stored* value is what encodes, so encoder and decoder always agree. Non-finite values
stay non-finite: an inf or NaN makes its scale non-finite, hence every value that the scale decodes, hence the loss.

These functions are the specification; the Triton kernels equal them bit for bit.

Legend: R rows (all leading axes flattened), C columns (last axis), G group size, n = ceil(C / G) groups in a row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat import hardware

# Below this a group's maximum counts as zero: 1/M would leave FP32's range, and no activation is that small.
AMAX_FLOOR = 2.0**-100
# The smallest normal FP32 number: a smaller scale would have no finite reciprocal.
SCALE_FLOOR = 2.0**-126


class Quantized(NamedTuple):
    """8-bit data and what decodes it: a dequantization scale (FP8 GEMM operands) or the groups' maxima (kept codes)."""

    data: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Float8:
    """An FP8 format: its torch dtype, largest finite value and smallest positive (subnormal) value."""

    name: str
    dtype: torch.dtype
    max: float
    tiny: float


E4M3 = Float8("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9)
E5M2 = Float8("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16)
FLOAT8 = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def cast_float8(x: Tensor, fmt: Float8) -> Tensor:
    """Round FP32 to nearest even in `fmt`, saturating at +-max; NaN stays NaN.

    PyTorch's own cast turns values beyond the range into NaN (E4M3) or inf (E5M2), hence the clamp.
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    """FP32 of all 256 codes of an FP8 dtype, on the CPU."""
    # Made in inference mode it could not be used outside.
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def decode_float8(codes: Tensor) -> Tensor:
    """FP8 codes as FP32. On a CPU out of a table: PyTorch's own conversion takes six times as long there."""
    if type(codes) is not Tensor or codes.device.type != "cpu" or torch.compiler.is_compiling():
        return codes.float()
    places = codes.view(torch.uint8).flatten().int()
    return _values(codes.dtype).index_select(0, places).view(codes.shape)


# ---- one scale per tensor ------------------------------------------------------------------------------------


def scale_from_amax(amax: Tensor, fmt: Float8) -> Tensor:
    """Dequantization scale (FP32) that maps `amax` to the format's maximum; 1 where amax is 0; NaN and inf pass."""
    # Times the reciprocal: what PyTorch makes of a division by a constant on CUDA, so that all devices agree.
    scale = (amax.float() * (1.0 / fmt.max)).clamp_min(SCALE_FLOOR)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize_tensor(x: Tensor, fmt: Float8 = E4M3, amax: Tensor | None = None) -> Quantized:
    """Quantize with one scale for the whole tensor.

    Args:
        x: any shape, floating point.
        fmt: E4M3 or E5M2.
        amax: 0-d, max |x| if already known (Group Scaling finds it in the producer); computed here otherwise.

    Returns:
        data of `fmt.dtype` in the shape of x; scale, 0-d FP32.
    """
    if amax is None:
        amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast_float8(x.float() * (1.0 / scale), fmt), scale)


def dequantize_tensor(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode `quantize_tensor`: data * scale, computed in FP32."""
    return (decode_float8(q.data) * q.scale).to(dtype)


# ---- one scale per block (DeepSeek's recipe: 128 x 128 weights, 1 x 128 activations) ---------------------------


def quantize_blocks(x: Tensor, block: tuple[int, int], fmt: Float8 = E4M3) -> Quantized:
    """Quantize a matrix with one scale for each block of `block` = (rows, columns); ragged edges allowed.

    Returns:
        data, (R, C); scale, FP32 (ceil(R / rows), ceil(C / columns)).
    """
    if x.dim() != 2:
        raise ValueError(f"quantize_blocks wants a matrix, got shape {tuple(x.shape)}; flatten the leading axes first")
    blocks = _to_blocks(x.float(), block)  # (R/r, r, C/c, c)
    scale = scale_from_amax(blocks.abs().amax((1, 3)), fmt)
    data = cast_float8(blocks * hardware.reciprocal(scale)[:, None, :, None], fmt)
    return Quantized(_from_blocks(data, x.shape), scale)


def dequantize_blocks(q: Quantized, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode `quantize_blocks`."""
    blocks = _to_blocks(decode_float8(q.data), block) * q.scale[:, None, :, None]
    return _from_blocks(blocks, q.data.shape).to(dtype)


def _to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    r, c = block
    x = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r))
    return x.view(x.shape[0] // r, r, x.shape[1] // c, c)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    flat = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return flat[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)  # not the padding's bytes


# ---- one maximum per group: kept tensors -----------------------------------------------------------------------


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
    """top / amax, or 0 where amax is (nearly) zero or NaN: such a group is all zero codes."""
    # Divided first: 1 / amax alone may leave FP32's range.
    return torch.where(amax >= AMAX_FLOOR, hardware.reciprocal(amax * (1.0 / top)), torch.zeros_like(amax))


def _to_int8(x: Tensor) -> Tensor:
    # NaN has no integer code; the group's maximum carries it. Rounding M down in BF16 can push |x| * 127/M past 127.
    return x.nan_to_num(0.0).clamp(-127, 127).to(torch.int8)


@dataclass(frozen=True)
class GroupCode:
    """An 8-bit code of a group: `encode(groups, amax)` and `decode(codes, amax)` with amax (R, n, 1) in FP32."""

    name: str
    dtype: torch.dtype
    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]


GROUP_CODES = {
    code.name: code
    for code in (
        GroupCode("sqrt8", torch.int8, _encode_sqrt8, _decode_sqrt8),
        GroupCode("e4m3", torch.float8_e4m3fn, _encode_e4m3, _decode_e4m3),
        GroupCode("int8", torch.int8, _encode_int8, _decode_int8),
    )
}


def encode_groups(x: Tensor, code: str = "sqrt8", group_size: int = 128) -> Quantized:
    """Encode a kept tensor, one maximum for each 1xG group of the last axis; groups never span rows.

    Args:
        x: (..., C), floating point.
        code: "sqrt8", "e4m3" or "int8".
        group_size: G; the last group of a row may be shorter.

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
    """Decode `encode_groups`, computed in FP32, then rounded to `dtype`."""
    groups = to_groups(q.data.view(torch.uint8), group_size).view(q.data.dtype)
    values = group_code(code).decode(groups, q.scale.float().unsqueeze(-1))
    return from_groups(values, q.data.shape).to(dtype)


def group_code(name: str) -> GroupCode:
    """Look up a kept-tensor code by name; ValueError lists the known ones."""
    if name not in GROUP_CODES:
        raise ValueError(f"unknown kept-tensor code {name!r}; choose one of {', '.join(GROUP_CODES)}")
    return GROUP_CODES[name]
