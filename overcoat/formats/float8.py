"""FP8 operands of GEMMs: the formats, and one scale per tensor or per block.

Tensor cores take FP8 operands with ONE scale per tensor (or per block): E4M3 (max 448, 3 mantissa bits) for activations
and weights, E5M2 (max 57344, 2 mantissa bits) for gradients.

    scale = amax / fmt.max            (1 for an all-zero tensor)
    data  = cast(x * (1 / scale))     round to nearest even, saturate
    x'    = data * scale

Non-finite values stay non-finite: an inf or NaN makes its scale non-finite, hence every value that the scale decodes,
hence the loss. These functions are the specification; the Triton kernels equal them bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.kernels import hardware

# The smallest normal FP32 number: a smaller scale would have no finite reciprocal.
SCALE_FLOOR = 2.0**-126


class Quantized(NamedTuple):
    """8-bit data, with its dequantization scale (FP8 GEMM operands) or its groups' maxima (codes of saved tensors)."""

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
    """Return the FP32 values of all 256 codes of an FP8 dtype, on the CPU."""
    # A tensor created in inference mode cannot be used outside.
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def decode_float8(codes: Tensor) -> Tensor:
    """Decode FP8 to FP32; on a CPU with a table, since PyTorch's own conversion takes six times as long."""
    if type(codes) is not Tensor or codes.device.type != "cpu" or torch.compiler.is_compiling():
        return codes.float()
    places = codes.view(torch.uint8).flatten().int()
    return _values(codes.dtype).index_select(0, places).view(codes.shape)


def scale_from_amax(amax: Tensor, fmt: Float8) -> Tensor:
    """Return the dequantization scale (FP32) that maps amax to the format's maximum; 1 for 0; NaN and inf stay."""
    # Multiplied by the reciprocal, as PyTorch does on CUDA for a division by a constant, so that all devices agree.
    scale = (amax.float() * (1.0 / fmt.max)).clamp_min(SCALE_FLOOR)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize_tensor(x: Tensor, fmt: Float8 = E4M3, amax: Tensor | None = None) -> Quantized:
    """Quantize x with one scale for the whole tensor: data of `fmt.dtype`; scale, 0-d FP32.

    amax: max |x|, 0-d, if already found (with Group Scaling by the kernel that computes x).
    """
    if amax is None:
        amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast_float8(x.float() * (1.0 / scale), fmt), scale)


def quantize_blocks(x: Tensor, block: tuple[int, int], fmt: Float8 = E4M3) -> Quantized:
    """Quantize a matrix (R, C) with one scale for each block of `block` = (rows, columns); ragged edges are allowed.

    Returns data, (R, C), and scale, FP32 (ceil(R / rows), ceil(C / columns)). ValueError: x is no matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"quantize_blocks needs a matrix, got shape {tuple(x.shape)}; flatten the leading axes first")
    blocks = _to_blocks(x.float(), block)  # (R/r, r, C/c, c)
    scale = scale_from_amax(blocks.abs().amax((1, 3)), fmt)
    data = cast_float8(blocks * hardware.reciprocal(scale)[:, None, :, None], fmt)
    return Quantized(_from_blocks(data, x.shape), scale)


def dequantize_blocks(q: Quantized, block: tuple[int, int]) -> Tensor:
    """Decode `quantize_blocks`, FP32."""
    return scale_blocks(decode_float8(q.data), q.scale, block)


def scale_blocks(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of matrices (..., R, C) by its scale, (..., ceil(R / rows), ceil(C / columns))."""
    return _from_blocks(_to_blocks(x, block) * scale[..., :, None, :, None], x.shape)


def _to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    r, c = block
    padding = (0, -x.shape[-1] % c, 0, -x.shape[-2] % r)
    x = F.pad(x, padding) if any(padding) else x.contiguous()  # F.pad always copies
    return x.view(*x.shape[:-2], x.shape[-2] // r, r, x.shape[-1] // c, c)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    flat = blocks.flatten(-2).flatten(-3, -2)
    if flat.shape == shape:
        return flat
    # A copy of its own: without rows of padding alone the cut is contiguous, and would keep their bytes.
    return flat[..., : shape[-2], : shape[-1]].clone(memory_format=torch.contiguous_format)
