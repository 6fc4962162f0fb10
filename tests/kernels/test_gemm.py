"""The FP8 product against FP64 on the decoded values: `pytest tests/kernels/test_gemm.py`.

An FP8 product is exact in FP32, so on the CPU only the K additions round: each by 2^-24 of the running sum of |a b|.
The tensor cores keep 14 bits of a sum ("fast accumulation") and promote to FP32 now and then: K * 2^-14 of the same.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, FLOAT8, quantize_tensor
from overcoat.kernels.gemm import gemm
from tests.kernels.samples import normal

SHAPES = [(1, 1, 1), (1, 24, 5), (7, 130, 48), (61, 200, 33), (16, 512, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(shape, dtype, fmt, with_bias, device):
    rows, inner, columns = shape
    a = quantize_tensor(3 * normal(rows, inner).to(device), FLOAT8[fmt])
    b = quantize_tensor(0.01 * normal(columns, inner, seed=1).to(device), E4M3)
    bias = normal(columns, dtype=dtype, seed=2).to(device) if with_bias else None
    exact_a, exact_b = a.data.double() * a.scale.double(), b.data.double() * b.scale.double()
    exact = exact_a @ exact_b.t()
    size = exact_a.abs() @ exact_b.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    got = gemm(a.data, b.data, a.scale, b.scale, bias, dtype, fmt == "e4m3")
    assert got.dtype == dtype
    assert got.shape == (rows, columns)
    bits = 14 if device.type == "cuda" else 24
    bound = (inner + 3) * 2.0**-bits * size  # + 3: the product of the scales, its application, the bias
    if dtype == torch.bfloat16:
        bound += 2 * 2.0**-8 * size  # the result's rounding; on CUDA a bias may be added to a rounded product
    assert ((got.double() - exact).abs() <= bound).all()


def test_non_finite_operands_reach_the_result(device):
    x = normal(4, 32).to(device)
    x[2, 3] = torch.inf
    a, b = quantize_tensor(x), quantize_tensor(normal(8, 32, seed=1).to(device))
    assert not gemm(a.data, b.data, a.scale, b.scale, None, torch.bfloat16, True).isfinite().any()


def test_zero_operand_gives_zero(device):
    a, b = quantize_tensor(torch.zeros(4, 32, device=device)), quantize_tensor(normal(8, 32).to(device))
    assert gemm(a.data, b.data, a.scale, b.scale, None, torch.float32, False).count_nonzero() == 0
