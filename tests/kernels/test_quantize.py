"""Quantizing ops against the formats, and their kernels against them, bit for bit.

The formats have their error bounds in tests/formats; here layouts, padding, maxima and scales are held.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.kernels import quantize as ops
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, DTYPES, assert_equal, awkward
from tests.kernels.samples import amax, normal

TOKENS = [1, 7, 16, 61]
formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def decoded(data, scale):
    return data.double() * scale.double()


def test_amax_sees_every_element_and_nan(device):
    for place in ((0, 0), (6, 129), (3, 64)):
        x = normal(7, 130).to(device, torch.bfloat16)
        x[place] = -9.0
        found = ops.amax(x)
        assert (found.dtype, found.shape, found.item()) == (torch.float32, (), 9.0)
        x[place] = torch.nan
        assert ops.amax(x).isnan()
        x[place] = -torch.inf
        assert ops.amax(x).item() == torch.inf


@pytest.mark.parametrize("tokens", TOKENS)
@formats
def test_both_layouts_hold_the_same_bytes_and_zeros(tokens, fmt, device):
    x = normal(tokens, 40, dtype=torch.bfloat16).to(device)
    plain, plain_scale = ops.quantize(x, amax(x), fmt)
    data, data_t, scale = ops.quantize_both(x, amax(x), fmt)
    expected = quantize_tensor(x, FLOAT8[fmt])
    assert torch.equal(plain.float(), expected.data.float())
    assert torch.equal(data.float(), expected.data.float())
    assert expected.scale == scale == plain_scale
    padded = ops.padded_tokens(tokens)
    assert padded % 16 == 0 and tokens <= padded < tokens + 16  # noqa: PT018
    assert data_t.shape == (40, padded)
    assert data_t.is_contiguous()
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    assert torch.equal(ops.quantize_t(x, scale, fmt).float(), data_t.float())


def test_quantize_uses_the_given_amax(device):
    """Group Scaling finds it in the producer; a larger one must not be replaced by the tensor's own."""
    x = normal(7, 40).to(device)
    for amount in (2.0, 0.5):
        data, scale = ops.quantize(x, amax(x) * amount, "e4m3")
        assert scale == (amax(x) * amount) * (1 / 448)
        assert data.float().abs().max() == (448.0 if amount < 1 else 224.0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_the_decoded_operand(bad, device):
    x = normal(7, 40).to(device)
    x[3, 5] = bad
    data, data_t, scale = ops.quantize_both(x, ops.amax(x), "e5m2")
    assert not decoded(data, scale).isfinite().any()
    assert not decoded(data_t[:, :7], scale).isfinite().any()


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(), (1,), (7, 100), (300, 1000)])  # one program, and many that share a maximum
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, -torch.inf, torch.nan])
def test_amax_kernel(shape, dtype, value):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    x.view(-1)[x.numel() // 3] = value
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(("fmt", "dtype"), [("e4m3", torch.bfloat16), ("e5m2", torch.float32), ("e4m3", torch.float16)])
def test_quantize_kernels(shape, fmt, dtype):
    x = awkward(*shape, dtype)
    top = ops.amax.reference(x)
    for op in (ops.quantize, ops.quantize_both, ops.quantize_t):
        assert_equal(op.kernel(x, top, fmt), op.reference(x, top, fmt))


@pytest.mark.kernel
@pytest.mark.parametrize("top", [0.0, 1e-38, 1e-44, torch.inf, torch.nan, 2.5])
@formats
def test_extreme_scales_in_the_kernel(top, fmt):
    """Scales at the ends of the range, and values that saturate; padding stays zero even so."""
    x = torch.tensor([[0.0, 1e-38, -3.0, 1e30, torch.inf, -torch.inf, torch.nan]], device=DEVICE)
    arguments = (x, torch.tensor(top, device=DEVICE), fmt)
    assert_equal(ops.quantize_both.kernel(*arguments), ops.quantize_both.reference(*arguments))
