"""The activation's kernels equal their references; sums over tokens, added otherwise, nearly."""

from __future__ import annotations

import itertools

import pytest
import torch

from overcoat.kernels.activation import (
    activation_backward,
    activation_block_quantize,
    activation_decode,
    activation_encode,
    activation_gradient_bound,
    activation_quantize,
)
from overcoat.kernels.activation_functions import ACTIVATIONS
from overcoat.kernels.op import Op
from tests.kernels.compare import DEVICE, FORMATS, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

# (tokens, intermediate width): padded tokens, more of them than a block, or interpreted than two tiles; of 144, a
# multiple of 16, none are padded (interpreted: `test_tokens_that_need_no_padding`).
BLOCK_SHAPES = [(7, 100), (134, 200)]
BLOCK_SHAPES += [] if INTERPRETED else [(144, 128), (1, 16), (144, 256), (1000, 11008), (300, 17920)]
SHAPES = [(7, 100), (70, 200)] if INTERPRETED else BLOCK_SHAPES
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]
BLOCK_GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]
KINDS = [("silu", True), ("gelu", False), ("gelu_tanh", True), ("quick_gelu", False), ("relu2", False), ("relu", False)]
# The gradients' format, and whether they are summed for a bias; in 16 bits.
OUTPUTS = list(zip(FORMATS, (True, False))) if INTERPRETED else list(itertools.product(FORMATS, (True, False)))
OUTPUTS = [*OUTPUTS, (None, False)]
# Of 6 groups each: many programs at once on a GPU, one after another where they are interpreted.
MANY_ROWS = 10 if INTERPRETED else 300


def combined(groups: list[tuple[str, int]]) -> list[tuple[str, bool, str, int]]:
    """Activation, gated, code, group size: interpreted each kind once, compiled all with all."""
    if INTERPRETED:
        return [(*kind, *groups[i % 3]) for i, kind in enumerate(KINDS)]
    return [(*kind, *group) for kind in itertools.product(ACTIVATIONS, (True, False)) for group in groups]


shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
block_shapes = pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
cases = pytest.mark.parametrize(("activation", "gated", "code", "group_size"), combined(GROUPS))
block_cases = pytest.mark.parametrize(("activation", "gated", "code", "group_size"), combined(BLOCK_GROUPS))


def dtypes(shape: tuple[int, int]) -> list[torch.dtype]:
    """FP32 where it does not take long."""
    return [torch.bfloat16, torch.float32] if shape[0] < 10 or not INTERPRETED else [torch.bfloat16]


def inputs(shape: tuple[int, int], gated: bool, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """z of (T, I), or of (T, 2I) with a gate."""
    return awkward(shape[0], (1 + gated) * shape[1], dtype).clamp(-200, 200)


def gradient(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dh, with a column of ones, whose sum is that of the derivatives, and a row of zeros."""
    dh = awkward(*shape, dtype, seed=1).clamp(-50, 50)
    dh[:, 0] = 1.0
    return dh


def assert_same(op: Op, *arguments: object, sums: int | None = None) -> list[torch.Tensor]:
    """Kernel and reference agree in all results, but for result number `sums` nearly; the reference's."""
    ours, theirs = list(op.kernel(*arguments)), list(op.reference(*arguments))
    if sums is not None:
        assert_equal(ours.pop(sums), theirs[sums], exact=False, steps=8)
    assert_equal(ours, [x for i, x in enumerate(theirs) if i != sums])
    return theirs


# ---- forward ------------------------------------------------------------------------------------------------------


@shapes
@cases
def test_forward(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        z = inputs(shape, gated, dtype)
        *_, top = assert_same(activation_encode, z, activation, gated, code, group_size)
        assert_same(activation_quantize, z, top, activation, gated)


@block_shapes
@block_cases
def test_block_forward(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        assert_same(activation_block_quantize, inputs(shape, gated, dtype), activation, gated, code, group_size)


@pytest.mark.parametrize(("activation", "gated"), KINDS)
def test_strided_inputs_and_tiles_that_are_not_full(activation, gated):
    wide = awkward(9, 2000)
    for z in (wide, wide[:, :666], wide.t()[:30, :8]):
        assert_same(activation_quantize, z, z.abs().amax().float(), activation, gated)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [5, 700 + 5], ids=["gate", "up"])
def test_no_bad_value_is_passed_over(value, column):
    """Small, in the last row, behind larger values: the maximum is what the reference says, NaN or infinite."""
    z = torch.full((MANY_ROWS, 1400), 1e-3, device=DEVICE)
    z[0] = 50.0
    z[-1, column] = value
    for activation, gated in (("silu", True), ("gelu", False)):
        *_, top = assert_same(activation_encode, z, activation, gated, "sqrt8", 128)
        assert (gated is False and value == -torch.inf) or not top.isfinite()


@pytest.mark.parametrize("gate", [-1.2784645, 4.0] if INTERPRETED else [-1.2784645, -1e30, 0.0, 1e-30, 4.0, 300.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "relu"])
def test_the_largest_product_is_found_wherever_it_is(gate, activation):
    """Also where it is barely larger than all others, and where the function is far below its group's bound."""
    for row in (0, MANY_ROWS - 1):
        z = torch.full((MANY_ROWS, 2 * 700), gate, device=DEVICE)
        z[:, 700:] = 1.0
        z[row, 700 + 69] = 1.0 + 2.0**-22
        assert_same(activation_encode, z, activation, True, "sqrt8", 128)


# ---- the gradient's bound -------------------------------------------------------------------------------------------


def assert_same_bound(dh: torch.Tensor, z: torch.Tensor, activation: str, gated: bool, *how: object) -> torch.Tensor:
    arguments = (dh, activation_encode.reference(z, activation, gated, *how)[1], activation, how[1])
    bound = activation_gradient_bound.reference(*arguments)
    assert_equal(activation_gradient_bound.kernel(*arguments), bound)
    return bound


@shapes
@cases
def test_bound(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        assert_same_bound(gradient(shape, dtype), inputs(shape, gated), activation, gated, code, group_size)


@pytest.mark.alternate
@pytest.mark.parametrize("value", [3e4, torch.nan, -torch.inf])
@pytest.mark.parametrize("where", ["dh", "gate", "up"])
@pytest.mark.parametrize(("activation", "gated", "first"), [("silu", True, 0), ("gelu", False, 0), ("relu2", True, 1)])
def test_the_last_group_counts(value, where, activation, gated, first):
    """Groups that lie in one piece, BF16 in pairs, either of which may hold the largest; not from an odd element on."""
    shape = (37, 512)
    z = torch.full((37, 512 * (1 + gated)), 0.5, device=DEVICE)
    dh = torch.zeros(first + 37 * 512, dtype=torch.bfloat16, device=DEVICE)[first:].view(shape)
    for column in (-1, -2):
        dh.copy_(gradient(shape))
        dh[-1, -2:] = 1.0
        if where == "dh":
            dh[-1, column] = value
        else:
            z[-1, column if where == "up" else 512 + column - z.shape[1]] = value
        bound = assert_same_bound(dh, z, activation, gated, "sqrt8", 128)
        assert value == 3e4 or not bound.isfinite()


# ---- backward -----------------------------------------------------------------------------------------------------


def kept(shape, activation, gated, code, group_size):
    """(dh, codes, maxima), and h's scale."""
    codes, group_amax, top = activation_encode.reference(inputs(shape, gated), activation, gated, code, group_size)
    return (gradient(shape), codes, group_amax), top / 448


@shapes
@cases
def test_backward(shape, code, group_size, activation, gated):
    arguments, scale = kept(shape, activation, gated, code, group_size)
    for fmt, has_bias in OUTPUTS[:1] + OUTPUTS[-1:] if INTERPRETED and shape[0] > 16 else OUTPUTS:
        top = torch.full((), 3e4, device=DEVICE) if fmt else None
        how = (scale, top, fmt, has_bias, activation, code, group_size)
        assert_same(activation_backward, *arguments, *how, sums=3 if fmt else None)


@shapes
@cases
def test_decode(shape, code, group_size, activation, gated):
    (dh, *arguments), _ = kept(shape, activation, gated, code, group_size)
    for dtype in (dh.dtype, torch.float32):
        assert_same(activation_decode, *arguments, activation, code, group_size, dtype)


@block_shapes
@block_cases
def test_block_backward(shape, code, group_size, activation, gated):
    arguments, _ = kept(shape, activation, gated, code, group_size)
    assert_same(activation_backward, *arguments, None, None, None, False, activation, code, group_size)


@pytest.mark.parametrize(("tokens", "activation", "gated"), [(16, "silu", True), (48, "gelu", False)])
def test_tokens_that_need_no_padding(tokens, activation, gated):
    """Part of a tile, and one and a half: rows that do not exist are stored nowhere."""
    arguments, scale = kept((tokens, 200), activation, gated, "sqrt8", 128)
    for top, fmt in ((None, None), (torch.full((), 100.0, device=DEVICE), "e5m2")):
        assert_same(activation_backward, *arguments, scale, top, fmt, False, activation, "sqrt8", 128)
    assert_same(activation_backward, *arguments, None, None, None, False, activation, "sqrt8", 128)


@pytest.mark.parametrize("bad", ["h", "dz"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("gated", [False, True])
def test_padding_is_zero_even_where_a_scale_is_not_finite(bad, value, gated):
    arguments, _ = kept((7, 100), "silu", gated, "sqrt8", 128)
    one, other = torch.ones((), device=DEVICE), torch.full((), value, device=DEVICE)
    scale, top = (other, one) if bad == "h" else (one, other)
    _, data_t, _, _, h_t = activation_backward.kernel(*arguments, scale, top, "e5m2", True, "silu", "sqrt8", 128)
    assert data_t[:, 7:].float().count_nonzero() == 0
    assert h_t[:, 7:].float().count_nonzero() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_where_a_block_s_scale_is_not_finite(value):
    """134 tokens are padded to 144; the scales of the last block, and of row 133, are those of its bad value."""
    z, dh = awkward(134, 512), torch.randn(134, 256, device=DEVICE).bfloat16()
    z[133, 7] = value
    codes, group_amax, _ = activation_encode.reference(z, "silu", True, "sqrt8", 128)
    _, h_t, scale = activation_backward.kernel(dh, codes, group_amax, None, None, None, False, "silu", "sqrt8", 128)
    assert not scale[1].isfinite().all()
    assert h_t.shape[1] == 144
    assert not h_t.view(torch.uint8)[:, 134:].any()
    assert h_t.view(torch.uint8)[:, :133].any()
