"""cuBLASLt by its C interface against `torch._scaled_mm`: `pytest -m gpu tests/kernels/test_cublaslt.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from overcoat.formats import E4M3, E5M2, quantize_tensor
from overcoat.kernels import cublaslt
from overcoat.kernels.gemm import gemm

# A wide, a long and a small product, and sizes that fit no tile.
SHAPES = [(8192, 12288, 4096), (4096, 4096, 11008), (48, 64, 32), (1000, 3584, 4608), (1, 16, 16)]


def operands(rows: int, columns: int, inner: int, fmt: object = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = quantize_tensor(torch.randn(rows, inner, device="cuda"), fmt)
    b = quantize_tensor(torch.randn(columns, inner, device="cuda"), E4M3)
    return a.data, b.data, a.scale, b.scale


def by_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


@pytest.fixture(autouse=True)
def hopper(request):
    has_hopper = torch.cuda.is_available() and cublaslt.is_available(0)
    if "gpu" in request.keywords and not has_hopper:
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_bits_are_those_of_pytorch(shape, fast, with_bias):
    product = operands(*shape, E4M3 if fast else E5M2)
    bias = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16) if with_bias else None
    got = cublaslt.gemm(*product, bias, torch.bfloat16, fast)
    assert got is not None
    assert torch.equal(got, by_torch(*product, bias, fast))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("fast", [True, False])
def test_every_kernel_that_is_offered_gives_the_same_bits(shape, fast):
    """So the choice is a matter of time alone."""
    product = operands(*shape)
    expected = by_torch(*product, None, fast)
    rows, columns, inner = shape
    plan = cublaslt.Plan(0, rows, columns, inner, E4M3.dtype, E4M3.dtype, torch.bfloat16, fast, False, False, 256)
    assert len(plan.offers) > 1
    for offer in plan.offers:
        plan.algorithm, plan.workspace = cublaslt.byref(offer.algorithm), offer.workspace
        out = torch.zeros_like(expected)
        plan.run(0, *product, None, out, out)
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (7, 130, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_residual_is_added_before_the_result_is_rounded(shape, dtype, with_bias):
    rows, columns, _ = shape
    product = operands(*shape)
    bias = torch.randn(columns, device="cuda", dtype=dtype) if with_bias else None
    residual = 50 * torch.randn(rows, columns, device="cuda", dtype=dtype)
    got = gemm(*product, bias, dtype, True, residual)
    parts = [gemm(*product, None, torch.float32, True), residual, *([] if bias is None else [bias])]
    exact = sum(part.double() for part in parts)
    size = sum(part.double().abs() for part in parts)
    # One rounding to the result's format, and a few of FP32. Where N is padded or a bias is added outside, one of the
    # product and of each sum.
    outside = columns % 16 != 0 or (with_bias and dtype == torch.float32)
    bound = torch.finfo(dtype).eps / 2 * (3 * size if outside else exact.abs()) + 2.0**-20 * size
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.gpu
def test_a_residual_that_is_not_contiguous():
    product = operands(64, 32, 48)
    residual = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16).t()
    expected = gemm(*product, None, torch.bfloat16, True, residual.contiguous())
    assert torch.equal(gemm(*product, None, torch.bfloat16, True, residual), expected)


@pytest.mark.gpu
def test_threads_that_share_a_plan_keep_their_scales_apart():
    products = [operands(256, 256, 256) for _ in range(4)]
    expected = [by_torch(*product, None, True) for product in products]
    cublaslt.gemm(*products[0], None, torch.bfloat16, True)  # makes the plan

    def mistakes(place: int) -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [cublaslt.gemm(*products[place], None, torch.bfloat16, True) for _ in range(200)]
            return sum(not torch.equal(result, expected[place]) for result in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(mistakes, range(4))) == [0] * 4


@pytest.mark.gpu
def test_in_a_graph():
    """Of a shape that was never seen before: its plan is made during the capture."""
    product = operands(528, 272, 144)
    residual = torch.randn(528, 272, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(*product, None, torch.bfloat16, True, residual)
    residual.copy_(torch.randn_like(residual))
    product[2].mul_(2.0)
    graph.replay()
    assert torch.equal(out, gemm(*product, None, torch.bfloat16, True, residual))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one():
    product = operands(512, 256, 128)
    there = [part.to("cuda:1") for part in product]
    assert torch.cuda.current_device() == 0
    got = gemm(*there, None, torch.bfloat16, True)
    assert got.device.index == 1
    assert torch.equal(got.cpu(), gemm(*product, None, torch.bfloat16, True).cpu())


@pytest.mark.gpu
def test_operands_inside_other_tensors():
    """Rows of larger buffers are aligned to fewer bytes than a kernel may ask for."""
    a, b, scale_a, scale_b = operands(100, 64, 48)
    shifted = torch.empty(101 * 48, dtype=torch.uint8, device="cuda")[48:].view(a.dtype).view(100, 48)
    shifted.view(torch.uint8).copy_(a.view(torch.uint8))
    expected = by_torch(a, b, scale_a, scale_b, None, True)
    assert torch.equal(cublaslt.gemm(shifted, b, scale_a, scale_b, None, torch.bfloat16, True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_a_residual_and_a_bias_at_any_address_are_added_inside(offset):
    product = operands(64, 48, 32)
    residual = torch.randn(64 * 48 + offset, device="cuda", dtype=torch.bfloat16)[offset:].view(64, 48)
    bias = torch.randn(48 + offset, device="cuda", dtype=torch.bfloat16)[offset:]
    expected = gemm(*product, bias.clone(), torch.bfloat16, True, residual.clone())
    assert torch.equal(gemm(*product, bias, torch.bfloat16, True, residual), expected)


@pytest.mark.gpu
def test_rows_that_lie_apart():
    a, b, scale_a, scale_b = operands(64, 48, 64)
    expected = gemm(a[:, :32].contiguous(), b[:, 32:].contiguous(), scale_a, scale_b, None, torch.bfloat16, True)
    assert torch.equal(gemm(a[:, :32], b[:, 32:], scale_a, scale_b, None, torch.bfloat16, True), expected)


@pytest.mark.gpu
def test_scales_of_another_kind_are_refused():
    a, b, scale_a, scale_b = operands(64, 48, 32)
    with pytest.raises(ValueError, match=r"FP32 scale.*float64"):
        gemm(a, b, scale_a.double(), scale_b, None, torch.bfloat16, True)


@pytest.mark.gpu
def test_plans_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(cublaslt, "MAX_PLANS", 2)
    for rows in (16, 32, 48, 64):
        product = operands(rows, 32, 32)
        assert torch.equal(cublaslt.gemm(*product, None, torch.bfloat16, True), by_torch(*product, None, True))
        assert len(cublaslt._PLANS) <= 2


@pytest.mark.gpu
def test_no_tokens():
    product = operands(32, 64, 48)
    assert gemm(product[0][:0], *product[1:], None, torch.bfloat16, True).shape == (0, 64)


def test_not_on_a_cpu():
    assert not cublaslt.is_available(torch.empty(0).get_device())
