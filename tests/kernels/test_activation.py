"""Activation ops against block/reference.py in FP64: `pytest tests/kernels/test_activation.py`.

The backward's arithmetic is compared with the truth at the decoded z, where nothing but FP32 rounding is left; the
code's own noise has its place in a second test. Products of Gaussians have heavy tails: 1 dB extra.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.block import reference
from overcoat.formats import FLOAT8, decode_groups, encode_groups
from overcoat.kernels import activation as ops
from overcoat.kernels.activation import activation_backward, activation_gradient_bound
from overcoat.kernels.activation_functions import ACTIVATIONS
from tests.exact import E4M3_DB, E5M2_DB, KEPT_DB, assert_close, assert_close_float32, leaf
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded

WIDTH = 200
tokens_ = pytest.mark.parametrize("tokens", [1, 7, 61])
codes_ = pytest.mark.parametrize("code", list(KEPT_DB))
functions = pytest.mark.parametrize("activation", list(ACTIVATIONS))
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Operations in a row: a polynomial of 5 terms, exp2, a reciprocal, four products and a sum.
TERMS = 24


def exact(z, activation, gated, dh=None):
    """h and, if dh is given, dz, FP64."""
    z = leaf(z)
    gate, *up = z.chunk(1 + gated, -1)
    h = reference.ACTIVATIONS[activation](gate)
    h = h * up[0] if gated else h
    if dh is None:
        return h.detach()
    return h.detach(), torch.autograd.grad(h, z, dh.double())[0]


def kept(z, gated, code="sqrt8", group_size=128):
    """codes, maxima; and z as those decode."""
    halves = z.reshape(z.shape[0] * (1 + gated), -1)
    encoded = encode_groups(halves, code, group_size)
    values = decode_groups(encoded, code, group_size).view(z.shape)
    return encoded.data.view(z.shape), encoded.scale.view(z.shape[0], 1 + gated, -1), values


def plain_backward(dh, codes, group_amax, scale, *how):
    """dz as it is, and h."""
    return activation_backward(dh, codes, group_amax, scale, None, None, False, *how)


def backward_case(tokens, activation, gated, device, code="sqrt8"):
    """(dh, codes, maxima) and the options of a backward; h and dz at the decoded z, FP64."""
    z = normal(tokens, (1 + gated) * WIDTH).to(device)
    dh = normal(tokens, WIDTH, seed=1).to(device)
    codes, group_amax, values = kept(z, gated, code)
    return (dh, codes, group_amax), (activation, code, 128), *exact(values, activation, gated, dh)


# ---- the functions ------------------------------------------------------------------------------------------------


@functions
def test_value_and_slope_on_the_whole_line(activation, device):
    """To a few roundings, but for the polynomial's error in GELU's value. Values far left of zero have sizes of less
    than a unit of the last place of 1."""
    x = torch.linspace(-30, 30, 400_001, device=device)
    value, slope = ACTIVATIONS[activation].reference(x)
    h, expected = exact(x, activation, False, torch.ones_like(x))
    size = x.abs().double().clamp(min=1.0)
    size = size.square() if activation == "relu2" else size
    assert ((value.double() - h).abs() <= 3e-7 * size).all()
    # Of GELU 1 - phi where phi is nearly 1, to a unit of the last place, times x (1.6 + 0.2 x^2): up to 40.
    assert (slope.double() - expected).abs().max() < 80 * 2.0**-24


@functions
def test_value_and_slope_over_all_sizes(activation, device):
    """Right from the smallest to the largest of FP32, where squares overflow; what is not a number stays none."""
    most = 19 if activation == "relu2" else 38
    sizes = torch.logspace(-37, most, 100_001, device=device)
    x = torch.cat([sizes, -sizes])
    value, slope = ACTIVATIONS[activation].reference(x)
    h, expected = (part.nan_to_num(0.0) for part in exact(x, activation, False, torch.ones_like(x)))  # PyTorch's own
    assert ((value.double() - h).abs() <= 3e-7 * torch.maximum(h.abs(), torch.ones_like(h))).all()
    assert ((slope.double() - expected).abs() <= 5e-6 * expected.abs().clamp(min=1.0)).all()
    for result in ACTIVATIONS[activation].reference(torch.full((3,), torch.nan, device=device)):
        assert result.isnan().all()


@functions
def test_what_bounds_rely_on(activation, device):
    """Where |x| <= a: |f(x)| <= f(a), and |f'(x)| <= f'(min(a, peak)), up to roundings."""
    entry = ACTIVATIONS[activation]
    a = torch.cat((torch.logspace(-6, 2, 4001, device=device), torch.linspace(0.5, 5, 4001, device=device))).sort()[0]
    (value, _), (mirrored, _) = entry.reference(a), entry.reference(-a)
    largest = torch.maximum(value.abs(), mirrored.abs()).cummax(0)[0]
    assert (largest <= value * (1 + 1e-6)).all()
    slopes = torch.maximum(*(entry.reference(x)[1].abs() for x in (a, -a))).cummax(0)[0]
    bound = entry.reference(a.clamp(max=entry.peak))[1]
    assert (slopes <= bound * (1 + 1e-6)).all()
    assert (bound <= slopes * (1 + 1e-3)).all(), "no larger than it must be"


def test_unknown_activations_are_refused():
    with pytest.raises(
        ValueError, match="activation 'sigmoid' is not known; choose one of silu, gelu, gelu_tanh, quick_gelu, relu"
    ):
        ops.activation_encode(torch.zeros(2, 16), "sigmoid", False, "sqrt8", 16)


# ---- forward ------------------------------------------------------------------------------------------------------


@tokens_
@codes_
@functions
@gates
def test_encode_and_quantize(tokens, code, activation, gated, device):
    z = normal(tokens, (1 + gated) * WIDTH, dtype=torch.bfloat16).to(device)
    z[:, WIDTH - 1] = 100.0  # the last of gate: groups that spanned into up would show it there
    codes, group_amax, top = ops.activation_encode(z, activation, gated, code, 128)
    for half, part in enumerate(z.chunk(1 + gated, 1)):
        expected = encode_groups(part, code, 128)
        assert torch.equal(codes[:, half * WIDTH :][:, :WIDTH].float(), expected.data.float())
        assert torch.equal(group_amax[:, half], expected.scale)
    h = exact(z, activation, gated)
    assert_close_float32("max |h|", h.abs().amax(), top, TERMS)
    data, scale = ops.activation_quantize(z, top, activation, gated)
    assert data.float().abs().max() == 448, "both passes must agree on the maximum"
    h = h[:, : WIDTH - 1]  # without the large ones
    assert (data[:, : WIDTH - 1].double() * scale.double() - h).abs().max() <= h.abs().max() / 16 + scale * 2**-9


@tokens_
@pytest.mark.parametrize("width", [130, 256])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("relu2", False)])
def test_block_quantize(tokens, width, activation, gated, device):
    z = normal(tokens, (1 + gated) * width, dtype=torch.bfloat16).to(device)
    h8, scale, codes, group_amax = ops.activation_block_quantize(z, activation, gated, "sqrt8", 64)
    expected = ops.activation_encode(z, activation, gated, "sqrt8", 64)
    assert torch.equal(codes, expected[0])
    assert torch.equal(group_amax, expected[1])
    assert_close("h", exact(z, activation, gated), decoded(h8, scale), E4M3_DB, extra=1.0)


# ---- backward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 61])
@codes_
@functions
@gates
def test_backward_arithmetic(tokens, code, activation, gated, device):
    arguments, how, h, expected = backward_case(tokens, activation, gated, device, code)
    scale = h.abs().max().float() / 448
    dz, h_t = plain_backward(*arguments, scale, *how)
    for truth, half in zip(expected.chunk(1 + gated, 1), dz.chunk(1 + gated, 1), strict=True):
        assert_close_float32("dz", truth, half, TERMS)
    assert h_t.shape == (WIDTH, -(-tokens // 16) * 16)
    assert h_t[:, tokens:].float().count_nonzero() == 0
    assert_close("h^T", h, h_t[:, :tokens].t().double() * scale.double(), E4M3_DB, extra=1.0)


@tokens_
@functions
@gates
def test_backward_straight_to_fp8(tokens, activation, gated, device):
    arguments, how, h, expected = backward_case(tokens, activation, gated, device)
    scale, top = h.abs().max().float() / 448, expected.abs().max().float()
    data, data_t, d_scale, sums, h_t = activation_backward(*arguments, scale, top, "e5m2", True, *how)
    assert torch.equal(h_t.float(), plain_backward(*arguments, scale, *how)[1].float())
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    # Few elements are most of a product of three Gaussians.
    sharing = 8 if activation == "relu2" else 1
    assert_close("dz", expected, data.double() * d_scale.double(), E5M2_DB, extra=1.0, sharing=sharing)
    assert_close_float32("sums over tokens", expected.sum(0), sums, TERMS + tokens)
    without = activation_backward(*arguments, scale, top, "e5m2", False, *how)
    assert without[3].shape == (0,)
    assert torch.equal(without[0].float(), data.float())


@pytest.mark.parametrize("tokens", [7, 150])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("relu2", True), ("relu", False)])
def test_block_backward(tokens, activation, gated, device):
    arguments, how, h, expected = backward_case(tokens, activation, gated, device)
    dz, h_t, h_scale = plain_backward(*arguments, None, *how)
    assert_close_float32("dz", expected, dz, TERMS)
    assert h_t[:, tokens:].float().count_nonzero() == 0
    assert_close("h^T", h.t(), decoded(h_t, h_scale)[:, :tokens], E4M3_DB, extra=1.0)


# ---- the bound of the gradient --------------------------------------------------------------------------------------

HEAVY = {
    "normal": lambda z, dh: (z, dh),
    "small": lambda z, dh: (z * 0.05, dh * 1e-6),
    "wide": lambda z, dh: (z * 4, dh),
    "tokens differ": lambda z, dh: (z, dh * torch.exp(2 * normal(dh.shape[0], 1, seed=2)).to(dh)),
    "both differ": lambda z, dh: (z, dh * torch.exp(2 * normal(256, 1, seed=2) + 1.5 * normal(1, 640, seed=3))),
    "few are large": lambda z, dh: (
        z * 2,
        dh / torch.rand(dh.shape, generator=torch.Generator().manual_seed(4)).sqrt(),
    ),
}


@pytest.mark.parametrize("data", list(HEAVY))
@functions
@gates
def test_the_bound_is_one_and_not_far_off(data, activation, gated):
    """Never below the largest gradient; on these data at most 8 times as large, which costs FP8 three exponents."""
    z, dh = HEAVY[data](normal(256, (1 + gated) * 640), normal(256, 640, seed=1))
    for code, group_size in (("sqrt8", 128), ("e4m3", 16), ("int8", 80)):
        codes, group_amax, _ = kept(z, gated, code, group_size)
        largest = plain_backward(dh, codes, group_amax, torch.ones(()), activation, code, group_size)[0].abs().max()
        bound = activation_gradient_bound(dh, group_amax, activation, group_size)
        assert largest <= bound <= 8 * largest


@functions
@gates
def test_the_bound_holds_where_it_is_reached(activation, gated):
    """Groups of one value: the largest gradient is what the bound says, but for roundings; negative ones too."""
    for value in (-30.0, -2.3994, -1.2784645, -0.01, 0.0, 0.3, 1.41421, 2.3994, 40.0):
        z = torch.full((1, (1 + gated) * 16), value)
        codes, group_amax, _ = kept(z, gated, "int8", 16)
        dh = torch.ones(1, 16)
        largest = plain_backward(dh, codes, group_amax, torch.ones(()), activation, "int8", 16)[0].abs().max()
        bound = activation_gradient_bound(dh, group_amax, activation, 16)
        assert largest <= bound
        if 0 < value < ACTIVATIONS[activation].peak and not gated:
            assert bound <= largest * 1.001


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["dh", "gate", "up"])
@functions
def test_what_is_not_finite_reaches_the_bound(bad, where, activation):
    """Also where its partner is zero."""
    z, dh = normal(4, 2 * WIDTH), normal(4, WIDTH, seed=1)
    z[2], dh[2] = 0.0, 0.0
    if where == "dh":
        dh[2, 5] = bad
    else:
        z[2, 5 if where == "gate" else WIDTH + 5] = bad
    _, group_amax, _ = kept(z, True)
    assert not activation_gradient_bound(dh, group_amax, activation, 128).isfinite()
    if where != "up":
        assert not activation_gradient_bound(dh, group_amax[:, :1], activation, 128).isfinite()


# ---- what is zero, large or not finite ------------------------------------------------------------------------------


@functions
@gates
def test_zeros_stay_zeros(activation, gated):
    z, dh = torch.zeros(3, (1 + gated) * 32), torch.zeros(3, 32)
    codes, group_amax, top = ops.activation_encode(z, activation, gated, "sqrt8", 16)
    data, scale = ops.activation_quantize(z, top, activation, gated)
    bound = activation_gradient_bound(dh, group_amax, activation, 16)
    results = activation_backward(dh, codes, group_amax, scale, bound, "e5m2", True, activation, "sqrt8", 16)
    assert (top, bound, scale, results[2]) == (0, 0, 1, 1)
    assert all(x.float().count_nonzero() == 0 for x in (data, results[0], results[3], results[4]))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@functions
@gates
def test_non_finite_reaches_forward_and_backward(bad, activation, gated, device):
    for place in (3, WIDTH + 3)[: 1 + gated]:
        z = normal(4, (1 + gated) * WIDTH).to(device)
        z[2, place] = bad
        if gated and place == WIDTH + 3:
            z[2, 3] = 1.0
        codes, group_amax, top = ops.activation_encode(z, activation, gated, "sqrt8", 128)
        data, scale = ops.activation_quantize(z, top, activation, gated)
        # At -inf GELU has a limit, but its product of inf and 0 is NaN; squared ReLU is zero there.
        vanishes = activation in ("relu", "relu2") and bad == -torch.inf and place == 3
        assert vanishes or not (data.float() * scale)[2].isfinite().all()
        dh = torch.ones(4, WIDTH, device=device)
        dz, h_t = plain_backward(dh, codes, group_amax, scale, activation, "sqrt8", 128)
        assert not dz[2, :128].isfinite().all()
        assert not h_t[:, 2].float().isfinite().all()


@functions
@gates
def test_decode_is_the_function_of_what_is_kept(activation, gated, device):
    """To FP32's rounding, and the padding of the last group is no column."""
    (_, *both), how, h, _ = backward_case(61, activation, gated, device)
    decoded = ops.activation_decode(*both, *how, torch.float32)
    assert decoded.shape == (61, WIDTH)
    assert_close_float32("h", h, decoded, TERMS)
    assert torch.equal(ops.activation_decode(*both, *how, torch.bfloat16), decoded.bfloat16())
