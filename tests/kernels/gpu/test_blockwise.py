"""The kernels of kernels/gpu/blockwise.py equal their references, and the library's product reads what they write."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import block_weights
from overcoat.kernels import blockwise as ops
from overcoat.kernels.gemm import block_gemm, why_no_block_gemm
from tests.emulation import sqnr
from tests.kernels.gpu.blockwise_cases import parameters
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

SHAPES = [(1, 16), (7, 100), (130, 400), (144, 256)]
SHAPES += [(61, 688)] if INTERPRETED else [(61, 688), (1000, 5120), (513, 4096)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
QUANTIZERS = [ops.block_quantize, ops.block_quantize_both, ops.block_quantize_t]


@pytest.mark.parametrize("op", QUANTIZERS, ids=lambda op: op.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(op, shape, fmt, dtype):
    x = awkward(*shape, dtype)
    assert_equal(op.kernel(x, fmt), op.reference(x, fmt))


@pytest.mark.parametrize("op", QUANTIZERS, ids=lambda op: op.name)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_extremes(op, fmt):
    """Blocks that are zero, tiny, huge or not finite: each keeps its trouble to itself, and padding stays zero."""
    x = torch.randn(150, 300, device=DEVICE)
    x[:, :128] *= 1e-38
    x[3, 140], x[140, 150] = torch.nan, torch.inf
    x[5, 256:] = 0.0
    x[6, 256:] *= 1e36
    x[:, 299] = 0.0
    ours, theirs = op.kernel(x, fmt), op.reference(x, fmt)
    assert_equal(ours, theirs)
    assert (ours[1] == 1).any()
    assert not ours[1].isfinite().all()
    if op is ops.block_quantize_t:
        assert ours[0][:, 150:].view(torch.uint8).count_nonzero() == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16), ("int8", 80), ("sqrt8", 48)])
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
def test_requantize_t(shape, code, group_size, affine):
    arguments = (*kept(shape, code, group_size), *parameters(shape[1], affine), code, group_size)
    assert_equal(ops.block_requantize_t.kernel(*arguments), ops.block_requantize_t.reference(*arguments))


def test_requantize_t_of_wide_heads():
    arguments = (*kept((200, 512), "sqrt8", 256), None, torch.randn(512, device=DEVICE), "sqrt8", 256)
    assert_equal(ops.block_requantize_t.kernel(*arguments), ops.block_requantize_t.reference(*arguments))


def kept(shape, code, group_size):
    from overcoat.kernels.groups import group_encode

    return group_encode.reference(awkward(*shape), None, code, group_size)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [16, 336, 768])
@pytest.mark.parametrize("sizes", [[16], [256, 128, 128], [128, 128, 100], [48, 16, 16], [100, 61], [130]])
def test_stack_weights(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    ours = block_weights.block_stack_weights.kernel(weights, transposed)
    assert_equal(ours, block_weights.block_stack_weights.reference(weights, transposed))


# ---- the library's product --------------------------------------------------------------------------------------


def uneven(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values whose 128 x 128 blocks differ by powers of ten: a scale read from the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-2, 3, (ops.blocks(rows), ops.blocks(columns)), generator=generator)
    size = size.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (torch.randn(rows, columns, generator=generator) * size).to(DEVICE)


@pytest.mark.skipif(INTERPRETED, reason="the library's product is a GPU's")
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("size", [(256, 384, 640), (1, 16, 16), (61, 200, 400), (100, 128, 272), (4096, 1024, 2688)])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_product(square, size, fmt, dtype, biased):
    rows, columns, inner = size
    if why_no_block_gemm(torch.device("cuda", 0)):
        pytest.skip(why_no_block_gemm(torch.device("cuda", 0)))
    a, a_scale = ops.block_quantize(uneven(rows, inner, 1), fmt)
    b = uneven(columns, inner, 2)
    b, b_scale = block_weights.block_stack_weights([b], False) if square else ops.block_quantize(b, "e4m3")
    bias = torch.randn(columns, device=DEVICE, dtype=dtype) * 100 if biased else None
    got = block_gemm(a, b, a_scale, b_scale, square, bias, dtype)
    wide = [decoded(a, a_scale, False), decoded(b, b_scale, square)]
    exact = wide[0] @ wide[1].t() + (0 if bias is None else bias.double())
    assert got.shape == exact.shape
    assert got.dtype == dtype
    # Row by row, so that a row of small values counts like a large one. FP32: 128 products in 14 bits, then FP32.
    worst = min(sqnr(exact[i], got[i]) for i in range(0, rows, max(rows // 64, 1)))
    assert worst > (42 if dtype == torch.bfloat16 else 50), f"{worst:.1f} dB"


def decoded(data, scale, square):
    """FP64 values, by indexing: element (i, k) has scale [k / 128, i], or [i / 128, k / 128] if `square`."""
    i, k = torch.arange(data.shape[0], device=DEVICE), torch.arange(data.shape[1], device=DEVICE)
    scales = scale[i[:, None] // 128, k[None, :] // 128] if square else scale[k[None, :] // 128, i[:, None]]
    return data.double() * scales.double()
