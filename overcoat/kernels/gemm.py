"""The FP8 GEMMs: D = A @ B^T, both operands K-major, with one scale per tensor (`gemm`) or per block (`block_gemm`).

On GPUs with FP8 tensor cores they run in cuBLASLt, through PyTorch or, where another kernel is faster, cublaslt.py:
`gemm` on sm_89 and newer; `block_gemm`, A with 1x128 scales and B with 1x128 or 128x128 (blockwise.py), on Hopper only.
Elsewhere the decoded values are multiplied in FP32. The product of two FP8 numbers is exact in FP32, so only the order
of summation differs.

`block_gemm` sums 128 products at a time in the tensor cores and adds the scaled sums in FP32: its accumulation is
always in full precision.

Legend: M rows of A, N rows of B, K the contraction axis.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import Quantized, decode_float8, dequantize_blocks
from overcoat.kernels import cublaslt
from overcoat.kernels.blockwise import BLOCK, blocks
from overcoat.kernels.op import op


@op
def gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor], dtype: torch.dtype, fast: bool,
    residual: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """Return D = (A @ B^T) * scale_a * scale_b + bias + residual, (M, N) of `dtype`.

    Args:
        a: (M, K) FP8; b: (N, K) FP8; not both E5M2.
        scale_a, scale_b: 0-d FP32 dequantization scales.
        bias: (N,) or None; on a GPU it is added after rounding if `dtype` is FP32 or N is no multiple of 16.
        fast: True lets the tensor cores use their 14-bit accumulators for the whole K (forward GEMMs); False promotes
            to FP32 every few instructions.
        residual: (M, N) or None; on a GPU it is added after rounding unless cublaslt.py runs the GEMM.
    """
    result = (decode_float8(a) @ decode_float8(b).t()) * (scale_a * scale_b)
    result = result if bias is None else result + bias.float()
    return (result if residual is None else result + residual.float()).to(dtype)


@functools.cache
def has_float8_tensor_cores(device: torch.device) -> bool:
    """True if FP8 GEMMs run in hardware: NVIDIA Ada (sm_89), Hopper (sm_90) and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@gemm.cuda
def _(a, b, scale_a, scale_b, bias, dtype, fast, residual=None):
    if not has_float8_tensor_cores(a.device):
        return gemm.reference(a, b, scale_a, scale_b, bias, dtype, fast, residual)
    columns, device, added = b.shape[0], a.get_device(), a if residual is None else residual
    inside = None if bias is None else _inside(bias, dtype, columns % 16 == 0)
    addresses = a.data_ptr() | b.data_ptr() | added.data_ptr() | (0 if inside is None else inside.data_ptr())
    if dtype == torch.bfloat16 and addresses % cublaslt.ALIGNMENT == 0:
        plan = cublaslt.plan(device, a.shape[0], columns, a.shape[1], a.dtype, b.dtype, fast, bias is not None)
        # PyTorch's own call respects a carve-out of multiprocessors; a plan does not.
        is_free = device == torch._C._cuda_getDevice() and torch._C._get_sm_carveout_experimental() is None
        is_dense = a.is_contiguous() and b.is_contiguous() and added.is_contiguous()
        if plan is not None and is_free and is_dense:
            return plan.run(a, b, scale_a, scale_b, device, inside, residual)
    if (columns | a.shape[1]) % 16:
        a, b = _pad(a, 0), _pad(b, -columns % 16)
    out = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a, scale_b, inside, out_dtype=dtype, use_fast_accum=fast
    )
    out = out if b.shape[0] == columns else out[:, :columns].contiguous()
    out = out if bias is None or inside is not None else out.add_(bias)
    return out if residual is None else out.add_(residual)


def _inside(bias: Tensor, dtype: torch.dtype, is_whole: bool) -> Optional[Tensor]:
    """Return the bias in `dtype` if cuBLASLt can add it: the result is 16-bit and not padded; else None."""
    return bias.to(dtype).contiguous() if is_whole and dtype != torch.float32 else None


def _pad(x: Tensor, rows: int) -> Tensor:
    """Pad x with `rows` rows of zeros, and its columns to a multiple of 16."""
    return F.pad(x.view(torch.uint8), (0, -x.shape[1] % 16, 0, rows)).view(x.dtype)


@op
def block_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, bias: Optional[Tensor], dtype: torch.dtype
) -> Tensor:
    """Return D = A @ B^T + bias, (M, N) of `dtype`, of operands with block scales; in tensor cores only if both E4M3.

    Args:
        a: (M, K) FP8; scale_a: (ceil(K / 128), M) FP32.
        b: (N, K) FP8; scale_b: (ceil(K / 128), N), or if `square` (ceil(N / 128), L4).
        bias: (N,) or None.
    """
    wide_a = dequantize_blocks(Quantized(a, scale_a.t()), (1, BLOCK))
    if square:
        wide_b = dequantize_blocks(Quantized(b, scale_b[:, : blocks(b.shape[1])]), (BLOCK, BLOCK))
    else:
        wide_b = dequantize_blocks(Quantized(b, scale_b.t()), (1, BLOCK))
    result = wide_a @ wide_b.t()
    return (result if bias is None else result + bias.float()).to(dtype)


@block_gemm.fake
def _(a, b, scale_a, scale_b, square, bias, dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def why_no_block_gemm(device: torch.device) -> Optional[str]:
    """Return the reason why GEMMs with block scales do not run in a device's tensor cores, or None if they do."""
    if device.type != "cuda":
        return f"{device} has no FP8 tensor cores"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        name = torch.cuda.get_device_name(device)
        return f"cuBLAS multiplies with 1x128 and 128x128 scales on Hopper (sm_90) alone, {name} is sm_{major}{minor}"
    version = torch.version.cuda or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < (12, 9):
        return f"cuBLAS multiplies with 1x128 and 128x128 scales since CUDA 12.9, this PyTorch was built with {version}"
    return None


@functools.cache
def _has_block_gemm(device: torch.device) -> bool:
    return why_no_block_gemm(device) is None


@block_gemm.cuda
def _(a, b, scale_a, scale_b, square, bias, dtype):
    # PyTorch takes no E5M2 operand with block scales.
    if not _has_block_gemm(a.device) or torch.float8_e5m2 in (a.dtype, b.dtype):
        return block_gemm.reference(a, b, scale_a, scale_b, square, bias, dtype)
    a, b, scale_a, scale_b = (x.contiguous() for x in (a, b, scale_a, scale_b))
    rows, columns = a.shape[0], b.shape[0]
    if (rows | columns | a.shape[1]) % 16:
        a, b = _pad(a, -rows % 16), _pad(b, -columns % 16)
        scale_a = F.pad(scale_a, (0, a.shape[0] - rows))
        # 128x128 scales already cover the added rows.
        scale_b = scale_b if square else F.pad(scale_b, (0, b.shape[0] - columns))
    inside = None if bias is None else _inside(bias, dtype, b.shape[0] == columns)
    recipe_b = F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128
    out = F.scaled_mm(
        a, b.t(), scale_a.t(), F.ScalingType.BlockWise1x128, scale_b.t(), recipe_b, bias=inside, output_dtype=dtype
    )
    out = out if out.shape == (rows, columns) else out[:rows, :columns].clone(memory_format=torch.contiguous_format)
    return out if bias is None or inside is not None else out.add_(bias)
