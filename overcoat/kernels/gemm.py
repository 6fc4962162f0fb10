"""The FP8 matrix product: D = A @ B^T with per-tensor scales, both operands K-major.

On GPUs with FP8 tensor cores (sm_89 and newer) this is cuBLASLt through `torch._scaled_mm`; elsewhere the decoded
values are multiplied in FP32, which is the same product: an FP8 product is exact in FP32, only the summation order
differs.

Legend: M rows of A, N rows of B, K the contraction axis.
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.catalogue import op


@op
def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Optional[Tensor],
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """D = (A @ B^T) * scale_a * scale_b + bias.

    Args:
        a: (M, K) FP8; b: (N, K) FP8; not both E5M2.
        scale_a, scale_b: 0-d FP32 dequantization scales.
        bias: (N,) or None.
        dtype: of the result.
        fast_accumulation: let the tensor cores keep their 14-bit accumulators for the whole K (forward products);
            False promotes to FP32 every few instructions (gradients).

    Returns:
        (M, N) of `dtype`.
    """
    product = (a.float() @ b.float().t()) * (scale_a * scale_b)
    if bias is not None:
        product = product + bias.float()
    return product.to(dtype)


@gemm.fake
def _(a, b, scale_a, scale_b, bias, dtype, fast_accumulation):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def has_float8_tensor_cores(device: torch.device) -> bool:
    """Whether FP8 GEMMs run in hardware: NVIDIA Ada (sm_89), Hopper (sm_90) and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@gemm.cuda
def _(a, b, scale_a, scale_b, bias, dtype, fast_accumulation):
    if not has_float8_tensor_cores(a.device):
        return gemm.reference(a, b, scale_a, scale_b, bias, dtype, fast_accumulation)
    columns = b.shape[0]
    a, b = _pad_last(a), _pad_first(_pad_last(b))
    # cuBLASLt adds a 16-bit bias to a 16-bit result; in the other cases it is added outside.
    fused = bias is not None and dtype != torch.float32 and b.shape[0] == columns
    inner_bias = bias.to(dtype) if fused else None
    out = torch._scaled_mm(
        a, b.t(), scale_a, scale_b, bias=inner_bias, out_dtype=dtype, use_fast_accum=fast_accumulation
    )
    out = out if out.shape[1] == columns else out[:, :columns].contiguous()
    return out if fused or bias is None else out.add_(bias)


def _pad_last(x: Tensor) -> Tensor:
    missing = -x.shape[1] % 16
    return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x


def _pad_first(x: Tensor) -> Tensor:
    missing = -x.shape[0] % 16
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype) if missing else x
