"""GELU ops against PyTorch's own in FP64: `pytest tests/kernels/test_gelu.py`.

The backward's arithmetic is compared with the truth at the decoded u, where nothing but FP32 rounding is left; the
code's own noise has its place in a second test.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overcoat.formats import FLOAT8, Quantized, decode_groups, encode_groups
from overcoat.kernels import gelu as ops
from tests.exact import E4M3_DB, E5M2_DB, KEPT_DB, assert_close, assert_close_float32, combined_db, leaf
from tests.kernels.samples import normal

WIDTH = 200
tokens_ = pytest.mark.parametrize("tokens", [1, 7, 61])
codes_ = pytest.mark.parametrize("code", list(KEPT_DB))
forms = pytest.mark.parametrize("approximate", ["none", "tanh"])
# Operations in a row: a polynomial of 5 terms or a product, exp2, a reciprocal, three products and a sum.
TERMS = 24


def exact(u, dh, approximate):
    """h and du, FP64."""
    u = leaf(u)
    h = F.gelu(u, approximate=approximate)
    h.backward(dh.double())
    return h.detach(), u.grad


def kept(u, code, group_size=128):
    """codes, maxima; and u as those decode."""
    encoded = encode_groups(u, code, group_size)
    return *encoded, decode_groups(encoded, code, group_size)


def backward_case(tokens, approximate, device):
    """(dh, codes, maxima) and the options of a backward; h and du at the decoded u, FP64."""
    u, dh = normal(tokens, WIDTH).to(device), normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, decoded = kept(u, "sqrt8")
    return (dh, codes, group_amax), (approximate, "sqrt8", 128), *exact(decoded, dh, approximate)


# ---- the function -------------------------------------------------------------------------------------------------


@forms
def test_the_function_and_its_derivative_on_the_whole_line(approximate, device):
    """|error| <= 0.67e-7 |u| from the polynomial (0 in the tanh form) and a few roundings of h."""
    u = torch.linspace(-30, 30, 400_001, device=device)
    h, slope = ops.gelu(u, approximate)
    expected, expected_slope = exact(u, torch.ones_like(u), approximate)
    polynomial = 0.67e-7 if approximate == "none" else 0.0
    allowed = polynomial * u.abs().double() + 4 * 2.0**-24 * u.abs().double().clamp(min=1.0)
    assert ((h.double() - expected).abs() <= allowed).all()
    # 1 - phi where phi is nearly 1, to a unit of the last place, times u (1.6 + 0.2 u^2): up to 40 before phi is 1.
    assert (slope.double() - expected_slope).abs().max() < 80 * 2.0**-24


@forms
def test_the_derivative_stays_below_the_bound_that_kernels_use(approximate, device):
    """`SLOPE_BOUND` of kernels/gpu/gelu_backward.py: exact maxima 1.12890 at sqrt(2), and 1.12899."""
    _, slope = ops.gelu(torch.linspace(-20, 20, 1_000_001, device=device), approximate)
    assert 1.1289 < slope.abs().max() < 1.1291


@forms
def test_the_function_over_all_sizes(approximate, device):
    """Right from the smallest to the largest of FP32, where squares overflow; what is not a number stays none."""
    sizes = torch.logspace(-37, 38, 100_001, device=device)
    u = torch.cat([sizes, -sizes])
    h, slope = ops.gelu(u, approximate)
    expected, expected_slope = exact(u, torch.ones_like(u), approximate)
    expected, expected_slope = expected.nan_to_num(0.0), expected_slope.nan_to_num(0.0)  # PyTorch's own, far left
    assert ((h.double() - expected).abs() <= 3e-7 * u.abs().double().clamp(min=1.0)).all()
    assert (slope.double() - expected_slope).abs().max() < 5e-6
    assert all(each.isnan().all() for each in ops.gelu(torch.full((3,), torch.nan, device=device), approximate))


@forms
def test_finite_values_stay_finite(approximate, device):
    """Squares and cubes that overflow, zeros, and the smallest numbers."""
    u = torch.tensor([3e38, 1e30, 2e19, 90.0, -90.0, -2e19, -3e38, 0.0, -0.0, 1e-38], device=device)
    h, slope = ops.gelu(u, approximate)
    assert h.tolist()[:4] == u.tolist()[:4]
    assert slope.tolist() == [1.0] * 4 + [0.0] * 3 + [0.5] * 3
    assert h[4:].abs().max() < 1e-37


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose 'none'"):
        ops.gelu_encode(torch.zeros(2, 16), "sigmoid", "sqrt8", 16)


# ---- forward ------------------------------------------------------------------------------------------------------


@tokens_
@codes_
@forms
def test_encode(tokens, code, approximate, device):
    u = normal(tokens, WIDTH, dtype=torch.bfloat16).to(device)
    codes, group_amax, row_amax = ops.gelu_encode(u, approximate, code, 128)
    expected = encode_groups(u, code, 128)
    assert torch.equal(codes.float(), expected.data.float())
    assert torch.equal(group_amax, expected.scale)
    assert_close_float32("row maxima", exact(u, u, approximate)[0].abs().amax(1), row_amax, TERMS)


@forms
def test_row_maxima_of_awkward_rows(approximate, device):
    """Exact where h's maximum is that of max u or of the lowest u; else the depth of the valley, an upper bound."""
    rows = {
        "all of the left slope": [-0.7, -0.1, -0.01],
        "lowest left, small right": [-0.5, 0.1, 0.2],
        "as far left as right": [-0.3, 0.3, 0.0],
        "tiny": [-1e-4, 3e-5, 0.0],
        "far left, but larger right": [-9.0, 0.4, 0.0],
        "zeros": [0.0, 0.0, 0.0],
        "in the valley": [-0.752, -6.0, 0.1],
    }
    u = torch.tensor(list(rows.values()), device=device)
    maxima = F.gelu(u.double(), approximate=approximate).abs().amax(1)
    torch.testing.assert_close(ops.row_maxima(u, approximate).double(), maxima, rtol=2e-6, atol=1e-12)
    beyond = torch.tensor([[-9.0, -3.0, 0.2]], device=device)
    largest = ops.row_maxima(beyond, approximate).item()
    assert F.gelu(beyond).abs().max().item() < largest < 0.1702


@tokens_
@forms
def test_quantize(tokens, approximate, device):
    u = normal(tokens, WIDTH, dtype=torch.bfloat16).to(device)
    _, _, row_amax = ops.gelu_encode(u, approximate, "sqrt8", 128)
    data, scale = ops.gelu_quantize(u, row_amax.amax(), approximate)
    assert data.float().abs().max() == 448, "both passes must agree on the maximum"
    assert_close("h", exact(u, u, approximate)[0], data.double() * scale.double(), E4M3_DB, extra=1.0)


# ---- backward -----------------------------------------------------------------------------------------------------


@tokens_
@codes_
@forms
def test_backward_arithmetic(tokens, code, approximate, device):
    u, dh = (3 * normal(tokens, WIDTH)).to(device), normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, decoded = kept(u, code)
    h, expected = exact(decoded, dh, approximate)
    scale = h.abs().max().float() / 448
    du, h_t = ops.gelu_backward(dh, codes, group_amax, scale, approximate, code, 128)
    assert_close_float32("du", expected, du, TERMS)
    assert h_t.shape == (WIDTH, -(-tokens // 16) * 16)
    assert h_t[:, tokens:].float().count_nonzero() == 0
    assert_close("h^T", h, h_t[:, :tokens].t().double() * scale.double(), E4M3_DB, extra=1.0)


@codes_
@forms
def test_backward_from_kept_codes(code, approximate, device):
    u, dh = normal(61, WIDTH).to(device), normal(61, WIDTH, seed=1).to(device)
    h, expected = exact(u, dh, approximate)
    codes, group_amax, _ = kept(u, code)
    scale = h.abs().max().float() / 448
    du, h_t = ops.gelu_backward(dh, codes, group_amax, scale, approximate, code, 128)
    assert_close("du", expected, du, KEPT_DB[code], extra=1.0)
    assert_close("h^T", h, h_t[:, :61].t().double() * scale.double(), combined_db(E4M3_DB, KEPT_DB[code]), extra=1.0)


@tokens_
@forms
def test_backward_straight_to_fp8(tokens, approximate, device):
    arguments, how, h, expected = backward_case(tokens, approximate, device)
    scale = h.abs().max().float() / 448
    largest = ops.gelu_backward_amax(*arguments, *how)
    assert_close_float32("amax", expected.abs().max(), largest, TERMS)
    data, data_t, d_scale, sums, h_t = ops.gelu_backward_quantize(*arguments, scale, largest, "e5m2", True, *how)
    assert torch.equal(h_t.float(), ops.gelu_backward(*arguments, scale, *how)[1].float())
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    assert_close("du", expected, data.double() * d_scale.double(), E5M2_DB, extra=1.0)
    assert_close_float32("sums over tokens", expected.sum(0), sums, TERMS + tokens)
    without = ops.gelu_backward_quantize(*arguments, scale, largest, "e5m2", False, *how)
    assert without[3].shape == (0,)
    assert torch.equal(without[0].float(), data.float())


# ---- what is not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@forms
def test_non_finite_reaches_forward_and_backward(bad, approximate, device):
    u = normal(4, WIDTH).to(device)
    u[2, 3] = bad
    codes, group_amax, row_amax = ops.gelu_encode(u, approximate, "sqrt8", 128)
    data, scale = ops.gelu_quantize(u, row_amax.amax(), approximate)
    assert not (data.float() * scale)[2].isfinite().all()
    du, h_t = ops.gelu_backward(torch.ones_like(u), codes, group_amax, scale, approximate, "sqrt8", 128)
    assert not du[2, :128].isfinite().all()
    assert not h_t[:, 2].float().isfinite().all()


def test_a_decoded_row_of_nan_is_nan_everywhere():
    """An infinite u makes its group's maximum infinite: codes of that group decode to NaN, and so does du."""
    u = normal(2, WIDTH)
    u[1, 0] = torch.inf
    codes, group_amax, _ = ops.gelu_encode(u, "tanh", "sqrt8", 128)
    assert decode_groups(Quantized(codes, group_amax), "sqrt8", 128)[1, :128].isnan().all()
