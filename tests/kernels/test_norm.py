"""Norm ops against FP64 autograd through torch's own norms, and their kernels against them.

The backward reads the normalised input from 8-bit codes. To see its own arithmetic alone, it is fed inputs whose
normalised values are 2 and 1/2 with both signs (mean 0, mean square 1): E4M3 codes hold those exactly, so what remains
is FP32 rounding. With Gaussian inputs the code's noise is added, at its known size.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import Quantized, decode_groups, encode_groups
from overcoat.kernels.norm import add_layernorm_stats, add_rmsnorm_stats, layernorm_stats, norm_quantize, rmsnorm_stats
from overcoat.kernels.norm_backward import norm_backward
from tests import exact
from tests.exact import E4M3_DB, KEPT_DB, assert_close, assert_close_float32, leaf
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal

TOKENS = [1, 7, 61]
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


def stats(x, weight, bias, eps, centered):
    if centered:
        return layernorm_stats(x, weight, bias, eps)
    return None, *rmsnorm_stats(x, weight, eps)


@pytest.mark.parametrize("tokens", TOKENS)
@centered
@affines
def test_statistics_and_operand(tokens, centered, affine, device):
    x = (3 * normal(tokens, HIDDEN) + 1).to(device, torch.bfloat16)
    weight, bias = parameters(affine, centered, device)
    mean, rstd, row_amax = stats(x, weight, bias, EPS, centered)
    wide = x.double()
    exact_mean = wide.mean(1) if centered else torch.zeros(tokens, dtype=torch.float64, device=device)
    exact_rstd = ((wide - exact_mean[:, None]).square().mean(1) + EPS).rsqrt()
    y = exact.norm(wide, *(p if p is None else p.double() for p in (weight, bias)), EPS, centered)
    if centered:
        assert_close_float32("mean", exact_mean, mean, HIDDEN)
    assert_close_float32("rstd", exact_rstd, rstd, HIDDEN)
    assert_close_float32("row maxima", y.abs().amax(1), row_amax, HIDDEN)

    for code in KEPT_DB:
        y8, scale, codes, group_amax = norm_quantize(x, mean, rstd, weight, bias, row_amax.amax(), code, 128)
        assert y8.float().abs().max() == 448, "both passes must agree on the maximum"
        assert_close("y", y, y8.double() * scale.double(), E4M3_DB)
        kept = decode_groups(Quantized(codes, group_amax), code, 128)
        assert_close("xhat", (wide - exact_mean[:, None]) * exact_rstd[:, None], kept, KEPT_DB[code])


@pytest.mark.parametrize("tokens", TOKENS)
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


@pytest.mark.parametrize("code", list(KEPT_DB))
@centered
def test_backward_from_kept_codes(code, centered, device):
    """Every term on Gaussian data; dweight also where the weight is 0, 1e-4, 1 and 10 (NUMERICS.md section 4)."""
    x = leaf(normal(61, HIDDEN).to(device))
    weight, bias = (p if p is None else leaf(p) for p in parameters("weight+bias", centered, device))
    dy, dresidual = (normal(61, HIDDEN, seed=seed).to(device) for seed in (2, 3))
    exact.norm(x, weight, bias, EPS, centered).backward(dy.double())
    w, b = weight.detach().float(), None if bias is None else bias.detach().float()
    mean, rstd, row_amax = stats(x.detach().float(), w, b, EPS, centered)
    _, _, codes, group_amax = norm_quantize(x.detach().float(), mean, rstd, w, b, row_amax.amax(), code, 128)
    dx, dweight, dbias, _ = norm_backward(dy, codes, group_amax, rstd, w, dresidual, centered, b is not None, code, 128)
    # xhat enters dx once as a factor and once inside a mean over H: its noise counts at most once for each.
    assert_close("dx", x.grad, dx.double() - dresidual.double(), KEPT_DB[code] - 3.0)
    for size in (0.0, 1e-4, 1.0, 10.0):
        part = (weight.abs() - size).abs() < size * 1e-6 + 1e-12
        assert part.sum() == HIDDEN // 4
        assert_close(f"dweight where |weight| = {size}", weight.grad[part], dweight[part], KEPT_DB[code])
    if bias is not None:
        assert_close_float32("dbias", bias.grad, dbias, 61)


@centered
def test_a_constant_row_stays_finite(centered, device):
    x = torch.full((2, HIDDEN), 3.0, device=device)
    mean, rstd, row_amax = stats(x, None, None, EPS, centered)
    y8, scale, *_ = norm_quantize(x, mean, rstd, None, None, row_amax.amax(), "sqrt8", 128)
    y = y8.double() * scale.double()
    assert_close_float32("y", torch.full_like(y, 0.0 if centered else 1 / (1 + EPS / 9) ** 0.5), y, 8)
    zero = torch.zeros_like(x)
    mean, rstd, row_amax = stats(zero, None, None, EPS, centered)
    y8, *_ = norm_quantize(zero, mean, rstd, None, None, row_amax.amax(), "sqrt8", 128)
    assert y8.float().count_nonzero() == 0


@centered
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_the_operand(centered, bad, device):
    x = normal(4, HIDDEN).to(device)
    x[2, 3] = bad
    mean, rstd, row_amax = stats(x, None, None, EPS, centered)
    assert not row_amax.amax().isfinite()
    y8, scale, *_ = norm_quantize(x, mean, rstd, None, None, row_amax.amax(), "sqrt8", 128)
    assert not (y8.float() * scale).isfinite().any()


def test_eps_is_the_models(device):
    """A fixed eps (the original's 1e-5) would be invisible on large values: use tiny ones."""
    x = (1e-3 * normal(7, HIDDEN)).to(device)
    for eps in (1e-6, 1e-5, 1e-3):
        rstd, _ = rmsnorm_stats(x, None, eps)
        assert_close_float32("rstd", (x.double().square().mean(1) + eps).rsqrt(), rstd, HIDDEN)


# ---- kernels -----------------------------------------------------------------------------------------------------

# The kernels sum a row in another order: statistics and dx agree to rounding, dx then within one BF16 step. Given the
# same statistics, `norm_quantize` equals its reference bit for bit.


def affine_of(width, affine):
    weight = None if affine == "none" else torch.randn(width, device=DEVICE).bfloat16()
    if weight is not None:
        weight[0], weight[1] = 0.0, 1e-4
    return weight, torch.randn(width, device=DEVICE).bfloat16() if affine == "weight+bias" else None


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(
    ("affine", "dtype"), [("none", torch.bfloat16), ("weight", torch.float32), ("weight+bias", torch.bfloat16)]
)
def test_statistics_kernels(shape, affine, dtype):
    y, residual, (weight, bias) = awkward(*shape, dtype), awkward(*shape, dtype, seed=1), affine_of(shape[1], affine)
    for plain, of_sum, parameters in (
        (rmsnorm_stats, add_rmsnorm_stats, (weight, EPS)),
        (layernorm_stats, add_layernorm_stats, (weight, bias, EPS)),
    ):
        assert_equal(plain.kernel(y, *parameters), plain.reference(y, *parameters), False)
        x, *ours = of_sum.kernel(y, residual, *parameters)
        assert_equal(x, residual + y)
        assert_equal(ours, plain.reference(x, *parameters), False)


@pytest.mark.kernel
def test_statistics_kernel_passes_nan_on():
    x = torch.randn(3, 100, device=DEVICE)
    x[1, 5] = torch.nan
    _, row_amax = rmsnorm_stats.kernel(x, None, EPS)
    assert row_amax.isnan().tolist() == [False, True, False]


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@affines
@pytest.mark.parametrize(("centered", "code", "group_size"), [(True, "sqrt8", 128), (False, "e4m3", 16)])
def test_quantize_kernel(shape, affine, centered, code, group_size):
    x, (weight, bias) = awkward(*shape), affine_of(shape[1], affine)
    mean, rstd, row_amax = layernorm_stats.reference(x, weight, bias, EPS)
    arguments = (x, mean if centered else None, rstd, weight, bias, row_amax.amax(), code, group_size)
    assert_equal(norm_quantize.kernel(*arguments), norm_quantize.reference(*arguments))


def kept_of(x, weight, code, group_size):
    """xhat in codes, its maxima, rstd."""
    mean, rstd, row_amax = layernorm_stats.reference(x, weight, None, EPS)
    return *norm_quantize.reference(x, mean, rstd, weight, None, row_amax.amax(), code, group_size)[2:], rstd


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(
    ("affine", "centered", "with_residual", "has_bias"),
    [("weight", False, True, False), ("weight", True, True, True), ("none", True, False, False)],
)
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16)])
def test_backward_kernel(shape, affine, centered, with_residual, has_bias, code, group_size):
    x, (weight, _) = awkward(*shape), affine_of(shape[1], affine)
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    dresidual = torch.randn(shape, device=DEVICE).bfloat16() if with_residual else None
    arguments = (dy, *kept_of(x, weight, code, group_size), weight, dresidual, centered, has_bias, code, group_size)
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
    kept = kept_of(x, None, "sqrt8", group_size)
    arguments = (torch.randn_like(x), *kept, None, dresidual, False, False, "sqrt8", group_size)
    assert not norm_backward.kernel(*arguments)[3].isfinite()


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_parameter_gradients_are_deterministic():
    dy, x = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    kept = kept_of(x, None, "sqrt8", 128)
    runs = [norm_backward(dy, *kept, None, None, False, True, "sqrt8", 128) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
