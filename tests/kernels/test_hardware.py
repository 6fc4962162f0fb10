"""The functions that a GPU has as one instruction: what is exact, one rounding where one is promised, shapes."""

from __future__ import annotations

import math

import pytest
import torch

from overcoat.kernels import hardware

UNARY = ("log2", "exp2", "sqrt", "reciprocal")


@pytest.mark.parametrize("name", UNARY)
def test_powers_of_two_are_exact(name):
    exponents = torch.arange(-126.0, 127.0, 2)
    powers = torch.exp2(exponents)
    arguments, expected = {
        "log2": (powers, exponents),
        "exp2": (exponents, powers),
        "sqrt": (powers, torch.exp2(exponents / 2)),
        "reciprocal": (powers, torch.exp2(-exponents)),
    }[name]
    assert torch.equal(getattr(hardware, name)(arguments), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("log2", [0.0, 1.0, math.inf, math.nan, -1.0], [-math.inf, 0.0, math.inf, math.nan, math.nan]),
        ("exp2", [-math.inf, 0.0, math.inf, math.nan, 128.0], [0.0, 1.0, math.inf, math.nan, math.inf]),
        ("sqrt", [0.0, 1.0, math.inf, math.nan, -1.0], [0.0, 1.0, math.inf, math.nan, math.nan]),
        ("reciprocal", [0.0, 1.0, math.inf, math.nan, -0.0], [math.inf, 1.0, 0.0, math.nan, -math.inf]),
    ],
)
def test_ends_of_the_range(name, arguments, expected):
    found = getattr(hardware, name)(torch.tensor(arguments))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", UNARY)
def test_results_are_within_two_units_of_the_last_place(name):
    """Of PyTorch's functions on a CPU; of log2 near 1 the error is absolute."""
    x = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 20 + 0.01
    exact = {"log2": torch.log2, "exp2": torch.exp2, "sqrt": torch.sqrt, "reciprocal": torch.reciprocal}[name]
    found = getattr(hardware, name)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact(x.double()), rtol=2**-22, atol=2**-24 if name == "log2" else 0)


def test_fma_keeps_what_a_rounded_product_would_lose():
    """(1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last bit FP32 does not hold."""
    x, z = torch.tensor([1 + 2.0**-12]), torch.tensor([-(1 + 2.0**-11)])
    assert x * x + z == 0
    assert hardware.fma(x, x, z) == 2.0**-24
    large = torch.tensor([2.0**127])
    assert (large * 2 - large).isinf()
    assert hardware.fma(large, torch.tensor([2.0]), -large) == 2.0**127


def test_fma_rounds_the_exact_result_once():
    """The error of x y is x y - rounded(x y), which is a FP32 number: fma gives it exactly, for any x and y."""
    x, y = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    product = x * y
    error = x.double() * y.double() - product.double()
    assert (error != 0).any()
    assert torch.equal(hardware.fma(x, y, -product).double(), error)


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        (2.0, 3.0, 4.0, 10.0),
        (0.0, math.inf, 1.0, math.nan),
        (math.inf, 2.0, -math.inf, math.nan),
        (3e38, 2.0, 0.0, math.inf),
        (2.0**-140, 2.0**-9, 2.0**-149, 2.0**-148),
        (2.0**-100, 2.0**-50, 0.0, 0.0),
    ],
)
def test_fma_by_hand(x, y, z, expected):
    """Denormals, which count on a CPU; half of the smallest is a tie, and rounds to zero."""
    found = hardware.fma(*(torch.tensor([value]) for value in (x, y, z)))
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "shapes", [((), (), ()), ((3, 1), (4,), ()), ((2, 1, 5), (3, 1), (1,)), ((0, 1), (7,), (1, 1))]
)
def test_fma_broadcasts_all_three(shapes):
    x, y, z = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))
    found = hardware.fma(x, y, z)
    assert found.shape == torch.broadcast_shapes(*shapes)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x * y + z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", UNARY)
def test_opcheck(name):
    for x in (torch.rand(3, 4), torch.rand(()), torch.rand(0, 2), torch.rand(4, 3).t()):
        torch.library.opcheck(getattr(hardware, name).overload, (x,))


def test_opcheck_of_fma():
    torch.library.opcheck(hardware.fma.overload, (torch.rand(3, 1), torch.rand(4), torch.rand(())))
    torch.library.opcheck(hardware.fma.overload, (torch.rand(2, 3), torch.rand(1), torch.rand(4, 1, 1)))
