"""The FP8 product against FP64 on the decoded values: `pytest tests/kernels/test_gemm.py`.

An FP8 product is exact in FP32, so on the CPU only the K additions round: each by 2^-24 of the running sum of |a b|.
The tensor cores keep 14 bits of a sum ("fast accumulation") and promote to FP32 now and then: K * 2^-14 of the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from overcoat.formats import E4M3, FLOAT8, quantize_tensor
from overcoat.kernels import cublaslt
from overcoat.kernels.blockwise import block_quantize, blocks
from overcoat.kernels.gemm import block_gemm, gemm, why_no_block_gemm
from overcoat.kernels.weights import block_stack_weights
from tests.emulation import sqnr
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded, decoded_weights

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
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
    residual = normal(rows, columns, dtype=dtype, seed=3).to(device) if fmt == "e4m3" else None
    for added in (bias, residual):
        if added is not None:
            exact, size = exact + added.double(), size + added.double().abs()
    got = gemm(a.data, b.data, a.scale, b.scale, bias, dtype, fmt == "e4m3", residual)
    assert got.dtype == dtype
    assert got.shape == (rows, columns)
    bits = 14 if device.type == "cuda" else 24
    bound = (inner + 5) * 2.0**-bits * size  # + 5: the product of the scales, its application, bias, residual
    if dtype == torch.bfloat16:
        # The result's rounding; on CUDA a bias and a residual may be added to a rounded product.
        bound += (3 if device.type == "cuda" else 1) * 2.0**-8 * size
    assert ((got.double() - exact).abs() <= bound).all()


# ---- scales per block ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (130, 272, 144)])
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_block_product(shape, square, dtype, fmt, with_bias, device):
    rows, inner, columns = shape
    # Rows and columns of very different size: a scale taken from a neighbour shows.
    x = (10.0 ** (torch.arange(rows) % 5 - 2)[:, None] * normal(rows, inner)).to(device)
    w = (10.0 ** (torch.arange(inner) // 128 % 3)[None, :] * normal(columns, inner, seed=1)).to(device)
    bias = normal(columns, dtype=dtype, seed=2).to(device) if with_bias else None
    a, scale_a = block_quantize(x, fmt)
    b, scale_b = block_stack_weights([w], False) if square else block_quantize(w, "e4m3")
    got = block_gemm(a, b, scale_a, scale_b, square, bias, dtype)
    exact_a, exact_b = decoded(a, scale_a), (decoded_weights if square else decoded)(b, scale_b)
    exact, size = exact_a @ exact_b.t(), exact_a.abs() @ exact_b.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert (got.dtype, got.shape) == (dtype, (rows, columns))
    bits = 14 if device.type == "cuda" else 24
    bound = (inner + 4) * 2.0**-bits * size  # + 4: the operands' scales, the bias, the result
    if dtype == torch.bfloat16:
        bound += 2 * 2.0**-8 * size
    assert ((got.double() - exact).abs() <= bound).all()


def test_non_finite_blocks_reach_their_rows_of_the_result(device):
    x = normal(4, 300).to(device)
    x[2, 200] = torch.nan
    a, scale_a = block_quantize(x, "e4m3")
    b, scale_b = block_stack_weights([normal(8, 300, seed=1).to(device)], False)
    finite = block_gemm(a, b, scale_a, scale_b, True, None, torch.bfloat16).isfinite()
    assert finite.all(1).tolist() == [True, True, False, True]
    assert not finite[2].any()


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((9, 0), "12.9", ""), ((9, 0), "12.8", "CUDA 12.9"), ((10, 0), "13.0", "sm_100"), ((8, 9), "13.0", "sm_89")],
)
def test_where_the_library_multiplies_blocks(capability, cuda, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Example")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    answer = why_no_block_gemm(torch.device("cuda", 0))
    assert reason in answer if reason else answer is None


# ---- on a GPU: the library's product ---------------------------------------------------------------------------------


def uneven(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values whose 128 x 128 blocks differ by powers of ten: a scale read from the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-2, 3, (blocks(rows), blocks(columns)), generator=generator)
    size = size.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (torch.randn(rows, columns, generator=generator) * size).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("size", [(256, 384, 640), (1, 16, 16), (61, 200, 400), (100, 128, 272), (4096, 1024, 2688)])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_block_product_by_the_library(square, size, fmt, dtype, biased):
    rows, columns, inner = size
    if why_no_block_gemm(torch.device("cuda", 0)):
        pytest.skip(why_no_block_gemm(torch.device("cuda", 0)))
    a, a_scale = block_quantize(uneven(rows, inner, 1), fmt)
    b = uneven(columns, inner, 2)
    b, b_scale = block_stack_weights([b], False) if square else block_quantize(b, "e4m3")
    bias = torch.randn(columns, device="cuda", dtype=dtype) * 100 if biased else None
    got = block_gemm(a, b, a_scale, b_scale, square, bias, dtype)
    wide = [decoded(a, a_scale), (decoded_weights if square else decoded)(b, b_scale)]
    exact = wide[0] @ wide[1].t() + (0 if bias is None else bias.double())
    assert got.shape == exact.shape
    assert got.dtype == dtype
    # Row by row, so that a row of small values counts like a large one. FP32: 128 products in 14 bits, then FP32.
    worst = min(sqnr(exact[i], got[i]) for i in range(0, rows, max(rows // 64, 1)))
    assert worst > (42 if dtype == torch.bfloat16 else 50), f"{worst:.1f} dB"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(48, 64, 32), (7, 48, 130), (4096, 1024, 2688)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_product_of_operands_that_lie_apart_and_in_a_graph(size, dtype):
    rows, columns, inner = size
    a, b = quantize_tensor(torch.randn(rows, 2 * inner, device="cuda")), quantize_tensor(uneven(columns, inner, 2))
    bias = torch.randn(columns, device="cuda", dtype=dtype)
    exact = a.data[:, :inner].double() @ b.data.double().t() * a.scale.double() * b.scale.double() + bias.double()
    gemm(a.data[:, :inner], b.data, a.scale, b.scale, bias, dtype, False)  # the library allocates outside the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(a.data[:, :inner], b.data, a.scale, b.scale, bias, dtype, False)
    graph.replay()
    assert sqnr(exact, out) > (42 if dtype == torch.bfloat16 else 50)


# ---- the choice among cuBLASLt's kernels -----------------------------------------------------------------------------

LARGE, TALL, NARROW, ODD = (24, 5), (29, 3), (197, 5), (201, 5)
UNKNOWN = (209, 3)  # 192 x 192 with clusters of 2 x 1, not in the table


@pytest.mark.parametrize(
    ("size", "fastest"),
    [
        # The products of Llama-2-7B at 4 x 2048 tokens, as measured on a hot H200.
        ((8192, 12288, 4096), {ODD}),
        ((8192, 22016, 4096), {ODD, NARROW}),
        ((8192, 11008, 4096), {ODD, NARROW}),
        ((8192, 4096, 11008), {LARGE}),
        ((8192, 4096, 22016), {LARGE}),
        # At 4 x 4096 a round of 256 x 128 tiles would be half empty.
        ((16384, 4096, 4096), {TALL}),
        # The library's where nothing is known: few tiles, short K.
        ((64, 12288, 4096), {UNKNOWN}),
        ((22016, 4096, 2032), {UNKNOWN}),
    ],
)
def test_the_measured_choice(size, fastest):
    offered = [UNKNOWN, LARGE, TALL, NARROW, ODD]
    assert offered[cublaslt.choose(offered, *size, 132)] in fastest
    assert cublaslt.choose(offered[:1], *size, 132) == cublaslt.choose([], *size, 132) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="the kernels were measured on Hopper")
@pytest.mark.parametrize("size", [(8192, 12288, 4096), (4096, 4096, 11008), (1000, 3584, 4608)])
def test_every_kernel_that_is_offered_gives_the_same_bits(size):
    """So the choice is a matter of time alone; and threads that share a plan keep their scales apart."""
    rows, columns, inner = size
    b = quantize_tensor(torch.randn(columns, inner, device="cuda"))
    inputs = [quantize_tensor(torch.randn(rows, inner, device="cuda") * 4.0**i) for i in range(4)]
    expected = [
        torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        for a in inputs
    ]
    plan = cublaslt.Plan(0, rows, columns, inner, E4M3.dtype, E4M3.dtype, True, False)
    assert len(plan.offers) > 1
    for place in range(len(plan.offers)):
        plan.take(place)
        assert torch.equal(plan.run(inputs[0].data, b.data, inputs[0].scale, b.scale, 0), expected[0])
    residual = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 100
    arguments = (inputs[0].data, b.data, inputs[0].scale, b.scale)
    exact = torch._scaled_mm(arguments[0], arguments[1].t(), *arguments[2:], out_dtype=torch.float32) + residual.float()
    assert sqnr(exact, gemm(*arguments, None, torch.bfloat16, True, residual)) > 45  # fast accumulation: 50 and more
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16) * 1000
    biased = cublaslt.Plan(0, rows, columns, inner, E4M3.dtype, E4M3.dtype, True, True)
    for place in range(len(biased.offers)):
        biased.take(place)
        assert sqnr(exact + bias.float(), biased.run(*arguments, 0, bias, residual)) > 45
    assert sqnr(exact - residual.float() + bias.float(), gemm(*arguments, bias, torch.bfloat16, True)) > 45

    def mistakes(place: int) -> int:
        a = inputs[place]
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [gemm(a.data, b.data, a.scale, b.scale, None, torch.bfloat16, True) for _ in range(20)]
            return sum(not torch.equal(result, expected[place]) for result in results)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(mistakes, range(4))) == [0] * 4
