"""Norm ops against FP64 autograd through torch's own norms, and their kernels against them.

The backward reads the normalised input from 8-bit codes. To see its own arithmetic alone, it is fed inputs whose
normalised values are 2 and 1/2 with both signs (mean 0, mean square 1): E4M3 codes hold those exactly, so what remains
is FP32 rounding. With Gaussian inputs the code's noise is added, at its known size.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import Quantized, decode_groups, encode_groups
from overcoat.kernels.norm import (
    add_norm_encode,
    norm_backward,
    norm_block_quantize,
    norm_from_statistics,
    norm_quantize,
    norm_stats,
    statistics,
)
from tests import exact
from tests.exact import E4M3_DB, KEPT_DB, assert_close, assert_close_float32, leaf
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded

tokens_ = pytest.mark.parametrize("tokens", [1, 7, 61])
HIDDEN = 200
EPS = 1e-5
affines = pytest.mark.parametrize("affine", ["none", "weight", "weight+bias"])
centered = pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])


def parameters(affine, centered, device):
    """Weights that span 0, 1e-4, 1 and 10, with both signs."""
    weight = normal(HIDDEN, seed=5).sign() * torch.tensor([0.0, 1e-4, 1.0, 10.0]).repeat(HIDDEN // 4)
    bias = normal(HIDDEN, seed=6)
    return (
        weight.to(device) if "weight" in affine else None,
        bias.to(device) if "bias" in affine and centered else None,
    )


def exactly_kept(tokens):
    """Rows that are a permutation of 10 % 2, 10 % -2, 40 % 1/2, 40 % -1/2."""
    row = torch.tensor([2.0, -2.0, 0.5, -0.5]).repeat_interleave(torch.tensor([20, 20, 80, 80]))
    generator = torch.Generator().manual_seed(0)
    return torch.stack([row[torch.randperm(HIDDEN, generator=generator)] for _ in range(tokens)])


def quantized(x, weight, bias, centered, code):
    """The two passes: max |y|, and the results of `norm_quantize`."""
    rstd, top, *mean = norm_stats(x, None, weight, bias, EPS, centered)
    return rstd, top, *norm_quantize(x, mean[0] if centered else None, rstd, weight, bias, top, code, 128)


@tokens_
@centered
@affines
@pytest.mark.parametrize("added", [False, True], ids=["", "sum"])
def test_forward(tokens, centered, affine, added, device):
    """Statistics, operands with one scale and in blocks, and kept codes, which are the same for both."""
    x = (3 * normal(tokens, HIDDEN) + 1).to(device, torch.bfloat16)
    residual = normal(tokens, HIDDEN, seed=7).to(device, torch.bfloat16) if added else None
    weight, bias = parameters(affine, centered, device)
    norm = (weight, bias, EPS, centered)
    rstd, amax, *rest = norm_stats(x, residual, *norm)
    y8, scale, codes, group_amax, block_rstd, *total = norm_block_quantize(x, residual, *norm, "sqrt8", 128)
    if added:
        x = x + residual
        assert torch.equal(rest.pop(), x)
        assert torch.equal(total.pop(), x)
    wide = x.double()
    mean = wide.mean(1) if centered else torch.zeros(tokens, dtype=torch.float64, device=device)
    xhat = exact.norm(wide, None, None, EPS, centered)
    y = exact.norm(wide, *(p if p is None else p.double() for p in (weight, bias)), EPS, centered)
    true_rstd = ((wide - mean[:, None]).square().mean(1) + EPS).rsqrt()
    assert_close_float32("rstd", true_rstd, rstd, HIDDEN)
    assert_close_float32("rstd in blocks", true_rstd, block_rstd, HIDDEN)  # its sums are taken in another order
    assert_close_float32("max |y|", y.abs().amax(), amax, HIDDEN)
    if centered:
        assert_close_float32("mean", mean, rest[0], HIDDEN)
    assert_close("y in blocks", y, decoded(y8, scale), E4M3_DB)
    if not centered:
        _, _, *kept = norm_quantize(x, None, block_rstd, weight, bias, amax, "sqrt8", 128)
        assert all(torch.equal(a, b) for a, b in zip(kept, (codes, group_amax), strict=True))
    for code in KEPT_DB:
        y8, scale, *kept = norm_quantize(x, rest[0] if centered else None, rstd, weight, bias, amax, code, 128)
        assert y8.float().abs().max() == 448, "both passes must agree on the maximum"
        assert_close("y", y, y8.double() * scale.double(), E4M3_DB)
        assert_close("xhat", xhat, decode_groups(Quantized(*kept), code, 128), KEPT_DB[code])


@tokens_
@centered
@affines
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_backward_arithmetic(tokens, centered, affine, with_residual, device):
    size, place = (0.1 + normal(tokens, 1).abs()), normal(tokens, 1, seed=1) if centered else 0.0
    x = leaf((exactly_kept(tokens) * size + place).to(device))
    weight, bias = (p if p is None else leaf(p) for p in parameters(affine, centered, device))
    dy, dresidual = (normal(tokens, HIDDEN, seed=seed).to(device) for seed in (2, 3))
    exact.norm(x, weight, bias, 0.0, centered).backward(dy.double())

    rstd = (1 / size[:, 0]).to(device)
    kept = encode_groups(exactly_kept(tokens).to(device), "e4m3", 128)
    dx, dweight, dbias, dx_amax = norm_backward(
        dy, *kept, rstd, None if weight is None else weight.detach().float(), dresidual if with_residual else None,
        centered, bias is not None, "e4m3", 128,
    )  # fmt: skip
    assert dx_amax == dx.abs().amax()
    # x itself is rounded to FP32 before FP64 sees it, which moves xhat by (|place| / size) * 2^-24: up to 40 more.
    assert_close_float32("dx", x.grad + (dresidual.double() if with_residual else 0), dx, HIDDEN + 40)
    if weight is not None:
        assert_close_float32("dweight", weight.grad, dweight, tokens + 40)
    if bias is not None:
        assert_close_float32("dbias", bias.grad, dbias, tokens)


@centered
def test_a_constant_row_stays_finite(centered, device):
    x = torch.full((2, HIDDEN), 3.0, device=device)
    _, _, y8, scale, *_ = quantized(x, None, None, centered, "sqrt8")
    y = y8.double() * scale.double()
    assert_close_float32("y", torch.full_like(y, 0.0 if centered else 1 / (1 + EPS / 9) ** 0.5), y, 8)
    _, _, y8, *_ = quantized(torch.zeros_like(x), None, None, centered, "sqrt8")
    assert y8.float().count_nonzero() == 0


@centered
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_the_operand(centered, bad, device):
    x = normal(4, HIDDEN).to(device)
    x[2, 3] = bad
    _, top, y8, scale, *_ = quantized(x, None, None, centered, "sqrt8")
    assert not top.isfinite()
    assert not (y8.float() * scale).isfinite().any()


def test_eps_is_the_models(device):
    """A fixed eps (the original's 1e-5) would be invisible on large values: use tiny ones."""
    x = (1e-3 * normal(7, HIDDEN)).to(device)
    for eps in (1e-6, 1e-5, 1e-3):
        expected = (x.double().square().mean(1) + eps).rsqrt()
        assert_close_float32("rstd", expected, norm_stats(x, None, None, None, eps, False)[0], HIDDEN)
        block_rstd = norm_block_quantize(x, None, None, None, eps, False, "sqrt8", 128)[4]
        assert_close_float32("rstd in blocks", expected, block_rstd, HIDDEN)


# ---- kernels -----------------------------------------------------------------------------------------------------

# The kernels sum a row in another order: statistics and dx agree to rounding, dx then within one BF16 step. Given the
# same statistics, codes and FP8 equal their references bit for bit.

awkward_shapes = pytest.mark.parametrize("shape", AWKWARD_SHAPES)
BLOCK_SHAPES = [*AWKWARD_SHAPES[:3], (9, 1024)]
BLOCK_SHAPES += [] if INTERPRETED else [(1000, 4096), (300, 6656), (40, 16384)]


def affine_of(width, affine):
    weight = None if affine == "none" else torch.randn(width, device=DEVICE).bfloat16()
    if weight is not None:
        weight[0], weight[1] = 0.0, 1e-4
    return weight, torch.randn(width, device=DEVICE).bfloat16() if affine == "weight+bias" else None


@pytest.mark.kernel
@pytest.mark.alternate
@awkward_shapes
@pytest.mark.parametrize(
    ("affine", "dtype"), [("none", torch.bfloat16), ("weight", torch.float32), ("weight+bias", torch.bfloat16)]
)
@centered
def test_statistics_kernel(shape, affine, dtype, centered):
    y, residual, norm = awkward(*shape, dtype), awkward(*shape, dtype, seed=1), (*affine_of(shape[1], affine), EPS)
    ours = norm_stats.kernel(y, None, *norm, centered)
    assert_equal(ours, norm_stats.reference(y, None, *norm, centered), False)
    *ours, x = norm_stats.kernel(y, residual, *norm, centered)
    assert_equal(x, residual + y)
    assert_equal(ours, norm_stats.reference(x, None, *norm, centered), False)


def balanced(rows, columns):
    """Rows of +-2 and +-1/2 that sum to exactly 0, in whatever order."""
    generator = torch.Generator().manual_seed(rows + columns)
    half = 2.0 * 4.0 ** -torch.randint(0, 2, (rows, columns // 2), generator=generator)
    row = torch.cat((half, -half, torch.zeros(rows, columns % 2)), 1)
    return row[:, torch.randperm(columns, generator=generator)].to(DEVICE, torch.bfloat16)


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
@pytest.mark.parametrize(
    ("affine", "code", "group_size"), [("none", "sqrt8", 128), ("weight", "e4m3", 16), ("weight+bias", "int8", 64)]
)
@centered
def test_block_kernel(shape, affine, code, group_size, centered):
    x, (weight, bias) = balanced(*shape) if centered else awkward(*shape), affine_of(shape[1], affine)
    arguments = (x, None, weight, bias, EPS, centered, code, group_size)
    *ours, rstd = norm_block_quantize.kernel(*arguments)
    torch.testing.assert_close(rstd, norm_block_quantize.reference(*arguments)[4], rtol=2e-6, atol=0)
    mean = torch.zeros_like(rstd) if centered else None
    assert_equal(ours, norm_from_statistics(x, mean, rstd, weight, bias, code, group_size))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_kernel_of_a_sum(shape, dtype):
    y, residual, (weight, _) = awkward(*shape, dtype), awkward(*shape, dtype, seed=1), affine_of(shape[1], "weight")
    *ours, rstd, x = norm_block_quantize.kernel(y, residual, weight, None, EPS, False, "sqrt8", 128)
    assert_equal(x, residual + y)
    assert_equal(ours, norm_from_statistics(x, None, rstd, weight, None, "sqrt8", 128))


@pytest.mark.kernel
@pytest.mark.alternate
@awkward_shapes
@pytest.mark.parametrize(("affine", "centered"), [("none", False), ("weight", False), ("weight+bias", True)])
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16), ("int8", 80)])
def test_kernel_after_a_branch(shape, affine, centered, code, group_size):
    """The reference against FP64: tests/block/test_norm.py."""
    norm = (*affine_of(shape[1], affine), EPS, centered, code, group_size)
    arguments = (awkward(*shape), awkward(*shape, seed=1), *norm)
    assert_equal(add_norm_encode.kernel(*arguments), add_norm_encode.reference(*arguments), False)


@pytest.mark.kernel
def test_kernels_keep_what_is_not_finite():
    x, residual = (torch.randn(5, 300, device=DEVICE) for _ in range(2))
    x[1, 5], residual[3, 299] = torch.nan, torch.inf
    bad = [False, True, False, False, False]
    rstd, amax = norm_stats.kernel(x, None, None, None, EPS, False)
    assert rstd.isnan().tolist() == bad
    assert amax.isnan()
    _, scale, _, group_amax, rstd = norm_block_quantize.kernel(x, None, None, None, EPS, False, "sqrt8", 128)
    assert rstd.isnan().tolist() == group_amax.isnan().any(1).tolist() == bad
    assert scale.isnan().tolist() == [bad] * 3
    total, *_, rstd = add_norm_encode.kernel(x, residual, None, None, EPS, False, "sqrt8", 128)
    assert total.isfinite().all(1).tolist() == [True, False, True, False, True]
    assert rstd.isnan().tolist() == bad


@pytest.mark.kernel
@pytest.mark.alternate
@awkward_shapes
@affines
@pytest.mark.parametrize(("centered", "code", "group_size"), [(True, "sqrt8", 128), (False, "e4m3", 16)])
def test_quantize_kernel(shape, affine, centered, code, group_size):
    x, (weight, bias) = awkward(*shape), affine_of(shape[1], affine)
    rstd, amax, mean = norm_stats.reference(x, None, weight, bias, EPS, True)
    arguments = (x, mean if centered else None, rstd, weight, bias, amax, code, group_size)
    assert_equal(norm_quantize.kernel(*arguments), norm_quantize.reference(*arguments))


def kept_of(x, code, group_size):
    """xhat in codes, its maxima, rstd."""
    mean, rstd = statistics(x, EPS, True)
    return *norm_from_statistics(x, mean, rstd, None, None, code, group_size)[2:], rstd


@pytest.mark.kernel
@pytest.mark.alternate
@awkward_shapes
@pytest.mark.parametrize(
    ("affine", "centered", "with_residual", "has_bias"),
    [("weight", False, True, False), ("weight", True, True, True), ("none", True, False, False)],
)
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16)])
def test_backward_kernel(shape, affine, centered, with_residual, has_bias, code, group_size):
    x, (weight, _) = awkward(*shape), affine_of(shape[1], affine)
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    dresidual = torch.randn(shape, device=DEVICE).bfloat16() if with_residual else None
    arguments = (dy, *kept_of(x, code, group_size), weight, dresidual, centered, has_bias, code, group_size)
    ours, theirs = norm_backward.kernel(*arguments), norm_backward.reference(*arguments)
    assert_equal(ours[0], theirs[0], False)
    for a, b in zip(ours[1:3], theirs[1:3]):
        rounding = 2**-7 if a.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(a, b, rtol=1e-4 + rounding, atol=1e-4 * shape[0] ** 0.5)
    assert ours[3] == ours[0].abs().amax()


@pytest.mark.kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("group_size", [16, 80, 128])
def test_backward_kernel_tells_of_a_maximum_that_is_not_finite(value, group_size):
    """From the last column, of a width that fills no group: what the next quantization takes for max |dx|."""
    x = torch.randn(5, 201, device=DEVICE).bfloat16()
    dresidual = torch.zeros_like(x)
    dresidual[3, 200] = value
    kept = kept_of(x, "sqrt8", group_size)
    arguments = (torch.randn_like(x), *kept, None, dresidual, False, False, "sqrt8", group_size)
    assert not norm_backward.kernel(*arguments)[3].isfinite()


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_parameter_gradients_are_deterministic():
    dy, x = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    kept = kept_of(x, "sqrt8", 128)
    runs = [norm_backward(dy, *kept, None, None, False, True, "sqrt8", 128) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
