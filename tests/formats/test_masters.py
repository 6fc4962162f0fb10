"""Master weights: exactness, bounds, unbiased and reproducible rounding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overcoat.formats.masters import (
    decode_master,
    encode_master,
    group_bits,
    parameter_key,
    random_bits,
    resolve_master,
)

STEP = torch.tensor(1.0)


def bits(count: int, places: int, seed: int = 0, step: float = 1.0) -> torch.Tensor:
    groups = torch.arange(-(-count // 128), dtype=torch.int32)
    of_group = group_bits(parameter_key(seed, 0), torch.tensor(step), groups)
    return random_bits(of_group, 128, places).view(-1)[:count]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_bf16_16_is_exact_fp32(values):
    x = torch.tensor(values, dtype=torch.float32)
    x = x[x.abs() < 3.38e38]  # beyond, the nearest BF16 is inf
    param, remainder = encode_master(x, "bf16+16")
    assert param.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    assert torch.equal(decode_master(param, remainder).view(torch.int32), x.view(torch.int32))
    assert ((param.float() - x).abs() <= (x.bfloat16().float() - x).abs()).all()  # the nearest BF16


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=50), st.integers(0, 2**30))
def test_bf16_8_is_within_one_unit_of_24_bits(values, seed):
    """Powers of two, zero and denormals included: the unit is the spacing of FP32 patterns with 8 clear low bits."""
    x = torch.tensor(values, dtype=torch.float32)
    param, remainder = encode_master(x, "bf16+8", bits(len(x), 8, seed))
    back = decode_master(param, remainder)
    assert (back.view(torch.int32) - x.view(torch.int32)).abs().max() < 256
    assert (back.view(torch.int32) & 0xFF == 0).all()
    assert ((param.float() - back).abs() <= (back.bfloat16().float() - back).abs()).all()


@pytest.mark.parametrize("master", ["bf16+16", "bf16+8", "bf16"])
def test_non_finite_values_stay_so(master):
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    x = torch.cat([x, torch.tensor([0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)])
    random = torch.full((5,), 255, dtype=torch.int32)
    back = decode_master(*encode_master(x, master, random))
    assert back[0] == math.inf
    assert back[1] == -math.inf
    assert back[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_a_stale_remainder_cannot_flip_a_weight_set_to_zero(dtype):
    remainder = torch.tensor([-5, 5, -5], dtype=dtype)
    value = decode_master(torch.tensor([0.0, 0.0, -0.0], dtype=torch.bfloat16), remainder)
    assert value.isfinite().all()
    assert (value.abs() < 1e-38).all()


@pytest.mark.parametrize(("master", "places"), [("bf16+8", 8), ("bf16", 16)])
def test_stochastic_rounding_is_unbiased(master, places):
    """Mean over a million draws of one value, between two neighbours: within 5 standard errors."""
    count = 1 << 20
    for value in (1.0 + 2**-9 + 2**-17 + 2**-20, -0.3, 1e-20):
        x = torch.full((count,), value)
        back = decode_master(*encode_master(x, master, bits(count, places))).double()
        low, high = back.min(), back.max()
        assert low < x[0] < high
        p = (x[0].double() - low) / (high - low)
        error = (back.mean() - x[0].double()) / (high - low)
        assert abs(error) < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("places", [8, 16])
def test_random_bits_are_uniform_and_independent(places):
    """Moments within 5 sigma, over elements, over steps, and for products of neighbours in all three directions."""
    key = parameter_key(3, 7)
    groups = torch.arange(64, dtype=torch.int32)
    draws = torch.stack(
        [random_bits(group_bits(key, torch.tensor(float(step)), groups), 128, places) for step in range(1, 65)]
    ).double()
    u = (draws + 0.5) / 2**places - 0.5  # (64 steps, 64 groups, 128 lanes), mean 0, variance 1/12
    count = u.numel()
    assert abs(u.mean()) < 5 * math.sqrt(1 / 12 / count)
    assert abs(u.square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / count) + 2.0 ** (-2 * places)
    for dim in range(3):
        assert u.mean(dim).abs().max() < 6 * math.sqrt(1 / 12 / u.shape[dim])
        for lag in (1, 2, 3, 8):
            product = (u.narrow(dim, lag, u.shape[dim] - lag) * u.narrow(dim, 0, u.shape[dim] - lag)).mean()
            assert abs(product) < 5 / 12 / math.sqrt(count)


def test_random_bits_depend_on_seed_parameter_step_and_place_only():
    base = bits(1024, 8)
    assert torch.equal(base, bits(1024, 8))
    assert not torch.equal(base, bits(1024, 8, seed=1))
    assert not torch.equal(base, bits(1024, 8, step=2.0))
    groups = torch.arange(4, 8, dtype=torch.int32)
    second_half = random_bits(group_bits(parameter_key(0, 0), STEP, groups), 128, 8)
    assert torch.equal(second_half.view(-1), base[512:])
    assert parameter_key(0, 1) != parameter_key(0, 0)


@pytest.mark.parametrize(("remainder", "is_finite"), [(0, None), (-1, True), (-128, True), (1, False), (127, False)])
def test_inf_set_from_outside_over_a_stale_remainder(remainder, is_finite):
    """Alone it stays inf; a remainder of before makes it NaN or the largest finite values, never another weight."""
    param = torch.tensor([torch.inf, -torch.inf], dtype=torch.bfloat16)
    value = decode_master(param, torch.full((2,), remainder, dtype=torch.int8))
    if is_finite is None:
        assert torch.equal(value, param.float())
    elif is_finite:
        assert (value.sign() == torch.tensor([1.0, -1.0])).all()
        assert (value.abs() > 3.38e38).all()
    else:
        assert value.isnan().all()


def test_resolve_master():
    assert resolve_master("auto", torch.bfloat16) == "bf16+8"
    assert resolve_master("bf16", torch.float32) == "fp32"
    with pytest.raises(ValueError, match="float16"):
        resolve_master("auto", torch.float16)
    with pytest.raises(ValueError, match="bf16\\+24"):
        resolve_master("bf16+24", torch.bfloat16)
