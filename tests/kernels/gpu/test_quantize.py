"""The kernels of kernels/gpu/quantize.py equal their references (see compare.py for how)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import quantize as ops
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

SHAPES = [(1, 16), (7, 100), (61, 688), (9, 5120)] if INTERPRETED else [(1, 16), (7, 100), (61, 688), (1000, 5120)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("shape", [(), (1,), (7, 100), (300, 1000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(shape, dtype):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_amax_not_finite(size, value):
    x = torch.randn(size, device=DEVICE)
    x[size // 3], x[size // 2] = value, torch.inf
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(shape, fmt, dtype):
    x = awkward(*shape, dtype)
    amax = ops.amax.reference(x)
    assert_equal(ops.quantize.kernel(x, amax, fmt), ops.quantize.reference(x, amax, fmt))
    assert_equal(ops.quantize_both.kernel(x, amax, fmt), ops.quantize_both.reference(x, amax, fmt))
    assert_equal(ops.quantize_t.kernel(x, amax, fmt), ops.quantize_t.reference(x, amax, fmt))


@pytest.mark.parametrize("amax", [0.0, 1e-38, 1e-44, torch.inf, torch.nan, 2.5])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_quantize_extreme_scales(amax, fmt):
    """Scales at the ends of the range, and values that saturate; padding stays zero even so."""
    x = torch.tensor([[0.0, 1e-38, -3.0, 1e30, torch.inf, -torch.inf, torch.nan]], device=DEVICE)
    amax = torch.tensor(amax, device=DEVICE)
    assert_equal(ops.quantize_both.kernel(x, amax, fmt), ops.quantize_both.reference(x, amax, fmt))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [336, 1040, 77])
@pytest.mark.parametrize("sizes", [[16], [48, 16, 16], [100, 61], [130, 2, 4, 64, 18]])
def test_stack_weights(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    amax = ops.stack_amax.kernel(weights)
    assert_equal(amax, ops.stack_amax.reference(weights))
    ours = ops.stack_weights.kernel(weights, amax, transposed)
    assert_equal(ours, ops.stack_weights.reference(weights, amax, transposed))


# What the maxima found by AdamW, taken as guesses, are multiplied by.
GUESSES = {"right": 1.0, "too small": 0.25, "too large": 3.0, "zero": 0.0, "inf": torch.inf, "nan": torch.nan}


@pytest.mark.parametrize("factor", GUESSES.values(), ids=GUESSES.keys())
@pytest.mark.parametrize("columns", [336, 1040, 77])
@pytest.mark.parametrize("sizes", [[16], [48, 16], [16, 48, 16], [100, 61], [130, 2, 4, 64, 18]])
def test_stack_weights_guessed(sizes, columns, factor):
    """The guess changes nothing, be it right, wrong or no number."""
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    guesses = [ops.amax.reference(w) * factor for w in weights]
    ours = ops.stack_weights_guessed.kernel(weights, guesses)
    assert_equal(ours, ops.stack_weights_guessed.reference(weights, guesses))
    assert_equal(ours, (*ops.stack_weights.kernel(weights, ours[2], False), ops.stack_amax.kernel(weights)))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_stack_weights_guessed_not_finite(value):
    weights = [torch.randn(rows, 144, device=DEVICE) for rows in (32, 16)]
    weights[1][3, 5] = value
    for guesses in ([ops.amax.reference(w) for w in weights], [torch.ones((), device=DEVICE)] * 2):
        ours = ops.stack_weights_guessed.kernel(weights, guesses)
        assert_equal(ours, ops.stack_weights_guessed.reference(weights, guesses))


def test_a_right_guess_needs_no_second_copy(monkeypatch):
    from overcoat.kernels.gpu import stack_guessed

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    weights = [awkward(rows, 1040, seed=rows).clamp(-3, 3) for rows in (64, 40)]
    right = [ops.amax.reference(w) for w in weights]
    expected = ops.stack_weights_guessed.kernel(weights, right)
    monkeypatch.setattr(stack_guessed, "_copy_again_kernel", Nothing())
    data, _, amax = ops.stack_weights_guessed.kernel(weights, right)
    assert_equal((data, amax), (expected[0], expected[2]))
    data, _, amax = ops.stack_weights_guessed.kernel(weights, [top / 2 for top in right])
    assert torch.equal(amax, expected[2])
    assert not torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
@pytest.mark.parametrize("group_size", [16, 80, 128])
@pytest.mark.parametrize("centered", [False, True])
def test_group_codes(shape, code, group_size, centered):
    x = awkward(*shape)
    center = torch.randn(shape[1], device=DEVICE) if centered else None
    codes, amax = ops.group_encode.reference(x, center, code, group_size)
    assert_equal(ops.group_encode.kernel(x, center, code, group_size), (codes, amax))
    with_amax = (codes, amax, ops.amax.reference(x))
    assert_equal(ops.group_encode_amax.kernel(x, center, code, group_size), with_amax)
    for dtype in DTYPES:
        arguments = (codes, amax, center, code, group_size, dtype)
        assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.parametrize("code", ["sqrt8", "int8"])
@pytest.mark.parametrize("columns", [128, 3])
def test_every_byte_decodes(code, columns):
    """Four at a time where a thread holds four, by itself where it does not."""
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8).repeat(3).view(-1, columns)
    amax = torch.rand(len(codes), 1, device=DEVICE).bfloat16()
    arguments = (codes, amax, None, code, 128, torch.float32)
    assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (300, 688), (1000, 4096)])
def test_token_center(shape):
    """A mean, summed in another order than the reference's."""
    x = awkward(*shape).clamp(-10, 10)
    torch.testing.assert_close(ops.token_center.kernel(x), ops.token_center.reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
def test_group_codes_of_extremes(code):
    """Groups with NaN, infinities, values near FP32's ends, and the roots' ties."""
    if INTERPRETED and code == "e4m3":
        pytest.skip("the interpreter's FP8 conversion knows no NaN")
    x = torch.randn(8, 128, device=DEVICE)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] *= 1e-38
    x[4] *= 1e-30
    x[5] *= 1e37
    x[6] = (torch.arange(128, device=DEVICE) + 0.5) ** 2
    x[7] = torch.arange(128, device=DEVICE) - 64
    codes, amax = ops.group_encode.reference(x, None, code, 128)
    assert_equal(ops.group_encode.kernel(x, None, code, 128), (codes, amax))
    arguments = (codes, amax, None, code, 128, torch.float32)
    assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16), ("int8", 80)])
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
def test_requantize_t(shape, code, group_size, affine):
    codes, amax = ops.group_encode.reference(awkward(*shape), None, code, group_size)
    weight = None if affine == "none" else torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine == "both" else None
    arguments = (codes, amax, weight, bias, torch.tensor(0.37, device=DEVICE), code, group_size)
    assert_equal(ops.requantize_t.kernel(*arguments), ops.requantize_t.reference(*arguments))
