"""Codes of AdamW's moments: error bounds, exact cases, and what must never happen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overcoat.formats import to_groups
from overcoat.formats.moments import (
    MOMENT_CODES,
    decay,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    resolve_moments,
)

FIRST = [name for name in MOMENT_CODES if name != "log8"]
SECOND = list(MOMENT_CODES)
GROUPED_SECOND = [name for name in SECOND if MOMENT_CODES[name].grouped]


def first(x: torch.Tensor, name: str) -> torch.Tensor:
    code = MOMENT_CODES[name]
    return decode_first(encode_first(x, code), code)


def second(x: torch.Tensor, name: str) -> torch.Tensor:
    code = MOMENT_CODES[name]
    return decode_second(encode_second(x, code), code)


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


def moments_like(seed: int = 0, shape: tuple[int, ...] = (64, 512)) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v as training makes them: Gaussian, with log-normal scales per row and per element."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(shape[0], 1, generator=generator) - 8)
    m = torch.randn(shape, generator=generator) * scale
    v = (torch.randn(shape, generator=generator) * 1.5).exp() * scale**2
    return to_groups(m, 128), to_groups(v, 128)


# Relative RMS error of each code on such moments: twice what the format's spacing predicts.
FIRST_LIMIT = {
    "e4m3": 0.03, "e5m2": 0.06, "de8": 0.02, "sqrt8": 0.012, "bf16": 0.002, "fp32": 0.0,
    "e4m3x": 0.02, "e5m2x": 0.02, "de8x": 0.012,
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_first_moment_error(name):
    m, _ = moments_like()
    assert relative_error(m, first(m, name)) <= FIRST_LIMIT[name]


@pytest.mark.parametrize("name", SECOND)
def test_second_moment_error_of_the_root(name):
    """Adam divides by sqrt(v), so that is where the error counts."""
    _, v = moments_like()
    limit = {"sqrt8": 0.02, "bf16": 0.002, "fp32": 0.0}.get(name, 0.03)
    assert relative_error(v.sqrt(), second(v, name).sqrt()) <= limit


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("low", [-8.0, -60.0, -140.0])
def test_positive_v_is_never_stored_as_zero_and_zero_always_is(name, low):
    exponents = torch.linspace(low, 0, 120)
    v = torch.cat([torch.exp2(exponents), torch.zeros(8)]).view(1, 1, 128)
    decoded = second(v, name)
    codes = encode_second(v, MOMENT_CODES[name]).codes
    zero = codes.view(torch.uint8) == 0 if codes.element_size() == 1 else codes == 0
    assert zero[v == 0].all()
    assert not zero[v >= 2.0**-126].any()
    assert not zero[v > 0].any() or name == "log8"  # where denormals, |g| < 1e-19, count as zero
    assert (decoded[v == 0] == 0).all()
    assert decoded.isfinite().all()


@pytest.mark.parametrize("name", GROUPED_SECOND)
def test_a_maximum_decays_when_gradients_vanish(name):
    """beta2 = 0.999 moves M by 2^-10: with M in BF16 it would be rounded back to itself for ever."""
    start = torch.rand(1, 1, 128) + 0.5
    v = start
    for _ in range(500):
        v = second(v * 0.999, name)
    assert abs(v.max() / (start.max() * 0.999**500) - 1) < 1e-3
    stalled = start.max().bfloat16()
    assert (stalled.float() * 0.999).bfloat16() == stalled


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=128), st.sampled_from(FIRST))
@settings(max_examples=300, deadline=None)
def test_m_stays_within_its_group(values, name):
    """Signs are kept, zeros stay zero, nothing grows past the stored maximum, the maximum itself survives."""
    m = torch.tensor(values, dtype=torch.float32).view(1, 1, -1)
    decoded = first(m, name)
    assert decoded.isfinite().all()
    assert (decoded * m >= 0).all()
    assert (decoded[m == 0] == 0).all()
    assert decoded.abs().max() <= m.abs().max() * (1 + 2**-7)
    if not (name.startswith("de8") and -m.min() == m.abs().max()):  # DE8 has no -1
        assert decoded.abs().max() >= m.abs().max() * 0.99 or m.abs().max() < 2.0**-130


def test_names():
    assert resolve_moments("8bit") == ("sqrt8", "log8")
    assert resolve_moments("fp8") == ("e4m3x", "e4m3x")
    assert resolve_moments(("de8", "e5m2x")) == ("de8", "e5m2x")
    for wrong in ("fp16", ("sqrt8",), ("sqrt8", "nope")):
        with pytest.raises(ValueError, match="sqrt8"):
            resolve_moments(wrong)
    with pytest.raises(ValueError, match="no sign"):
        resolve_moments(("log8", "log8"))


@pytest.mark.parametrize("word", [0, -1, 0x7FFFFFFF, 0x00FF0000, 0xFFFF])
@pytest.mark.parametrize("pair", [("sqrt8", "log8"), ("e4m3x", "e4m3x"), ("e5m2", "sqrt8"), ("de8", "de8x")])
def test_however_a_maximum_is_rounded_its_code_is_the_largest(pair, word):
    """Maxima over the whole range, next to where codes, formats and metadata end."""
    edges = torch.tensor([2.0**-126, 2.0**-100, 1.0, 1.0 + 2.0**-7 - 2.0**-20, 2.0 - 2.0**-20, 2.0**120, 3.3895e38])
    groups = torch.cat([edges, torch.exp2(200 * torch.rand(2000) - 100)]).view(1, -1, 1).repeat(1, 1, 16)
    groups[..., 1:] *= torch.rand(groups.shape)[..., 1:]
    random = torch.full(groups.shape[:2], word, dtype=torch.int32)
    m_code, v_code = (MOMENT_CODES[name] for name in pair)
    first_moment, second_moment = encode_first(groups, m_code, random), encode_second(groups, v_code, random)
    largest = {"sqrt8": 127, "log8": 255, "de8": encode_first(torch.ones(1, 1, 1), MOMENT_CODES["de8"]).codes.item()}
    for moment, code in ((first_moment, m_code), (second_moment, v_code)):
        codes = moment.codes.float()
        top = largest.get(code.base, codes.max().item())
        if code.base in ("sqrt8", "log8"):
            assert (codes[..., 0] == top).all()
        assert codes.isfinite().all()
    for x, decoded in ((groups, decode_first(first_moment, m_code)), (groups, decode_second(second_moment, v_code))):
        assert decoded.isfinite().all()
        ratio = decoded[..., 0] / x[..., 0]
        assert ratio.min() > 1 - 2**-7 - 1e-4
        assert ratio.max() < 1 + 2**-7 + 1e-4


def random_bytes() -> torch.Tensor:
    """Random numbers of 256 groups that round their maxima down, with every highest byte: (256, 1)."""
    return (torch.arange(256) << 24).to(torch.int32)[:, None]


def test_small_codes_of_sqrt8_are_right_in_the_mean():
    """Below 16 for every element, over all random numbers; from 16 on nearest, as they are without random numbers."""
    roots = torch.tensor([127.0, 1.0, 1.1, -1.5, 2.9, -4.25, 8.54, -15.98, 16.3, -40.4, 100.6, 2.9])
    groups = (roots.sign() * (roots / 127) ** 2).repeat(256, 1, 1)
    code = MOMENT_CODES["sqrt8"]
    codes = encode_first(groups, code, random_bytes()).codes[:, 0].float()
    small = roots.abs() < 16
    torch.testing.assert_close(codes.mean(0)[small], roots[small], rtol=0, atol=1 / 256 + 1e-4)
    assert torch.equal(codes[:, ~small], roots[~small].round().expand(256, -1))
    assert ((codes - roots).abs() < 1 + 1 / 256).all()
    # One number rounds neighbours in opposite directions: all of a group would be pushed one way otherwise.
    assert torch.equal(codes[:, 4], codes[:, 11].flip(0))
    nearest = encode_first(groups[:1], code).codes[0, 0].float()
    assert torch.equal(nearest[roots.abs() != 1.5], roots.round()[roots.abs() != 1.5])


def test_a_mean_decays_beside_one_that_stays():
    """Its root from code 15 as 0.9^(n / 2), and to zero; rounded to nearest it would stop at code 9.

    The 256 groups have a random number each, and a step's rounding has a variance of 1/6: of a mean after 20 steps a
    standard error of 0.06.
    """
    m = torch.full((64, 4, 128), (15 / 127) ** 2)
    m[..., 0] = 1.0
    generator, code = torch.Generator().manual_seed(0), MOMENT_CODES["sqrt8"]
    roots = []
    for _ in range(150):
        m[..., 1:] *= 0.9
        random = torch.randint(-(2**31), 2**31, m.shape[:2], generator=generator).to(torch.int32)
        m = decode_first(encode_first(m, code, random), code)
        roots.append(127 * float(m[..., 1:].sqrt().mean()))
    assert roots[19] == pytest.approx(15 * 0.9**10, abs=0.3)
    assert roots[-1] == 0


def test_nan_does_not_take_its_group_with_it():
    """Gradients with NaN are skipped; unless nobody looks (check_finite=False)."""
    m, v = moments_like()
    for x, encode, decode, name in (
        (m, encode_first, decode_first, "sqrt8"),
        (v, encode_second, decode_second, "log8"),
    ):
        broken = x.clone()
        broken[0, 0, 5] = torch.nan
        code = MOMENT_CODES[name]
        decoded, expected = (decode(encode(each, code), code) for each in (broken, torch.where(broken.isnan(), 0.0, x)))
        others = torch.arange(128) != 5
        assert torch.equal(decoded[0, 0, others], expected[0, 0, others])


@pytest.mark.parametrize(("name", "signed"), [(n, True) for n in FIRST] + [(n, False) for n in SECOND])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_decay_is_beta_times_what_is_decoded(name, signed, beta):
    code = MOMENT_CODES[name]
    x, addend = torch.randn(2, 3, 4, 128, generator=torch.Generator().manual_seed(0)) * 1e-3
    stored = encode_first(x, code) if signed else encode_second(x.square(), code)
    decoded = decode_first(stored, code) if signed else decode_second(stored, code)
    found = decay(stored, code, beta, addend, signed)
    torch.testing.assert_close(found.double(), beta * decoded.double() + addend, rtol=1e-6, atol=1e-9)
