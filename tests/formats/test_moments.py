"""Codes of AdamW's moments: error bounds, exact cases, and what must never happen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overcoat.formats import masters, to_groups
from overcoat.formats.moments import (
    MOMENT_CODES,
    decay,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    resolve_moments,
)

# Of these any is combined with any. "ratio8" is of log8's v: its own tests are below.
FIRST = [name for name in MOMENT_CODES if name not in ("ratio8", "log8")]
SECOND = [name for name in MOMENT_CODES if name != "ratio8"]
LOG8, RATIO8 = MOMENT_CODES["log8"], MOMENT_CODES["ratio8"]
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
    for _ in range(200):
        v = second(v * 0.999, name)
    assert abs(v.max() / (start.max() * 0.999**200) - 1) < 1e-3
    stalled = start.max().bfloat16()
    assert (stalled.float() * 0.999).bfloat16() == stalled


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=128), st.sampled_from(FIRST))
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
    assert resolve_moments("8bit") == ("ratio8", "log8")
    assert resolve_moments(("sqrt8", "log8")) == ("sqrt8", "log8")
    assert resolve_moments("fp8") == ("e4m3x", "e4m3x")
    assert resolve_moments(("de8", "e5m2x")) == ("de8", "e5m2x")
    for wrong in ("fp16", ("sqrt8",), ("sqrt8", "nope")):
        with pytest.raises(ValueError, match="sqrt8"):
            resolve_moments(wrong)
    with pytest.raises(ValueError, match="no sign"):
        resolve_moments(("log8", "log8"))
    for wrong in (("ratio8", "fp32"), ("ratio8", "ratio8"), ("sqrt8", "ratio8")):
        with pytest.raises(ValueError, match=r'in units of sqrt\(v\).*use \("ratio8", "log8"\)'):
            resolve_moments(wrong)


@pytest.mark.parametrize("word", [0, -1, 0x7FFFFFFF, 0x00FF0000, 0xFFFF])
@pytest.mark.parametrize(
    "pair", [("sqrt8", "log8"), ("ratio8", "log8"), ("e4m3x", "e4m3x"), ("e5m2", "sqrt8"), ("de8", "de8x")]
)
def test_however_a_maximum_is_rounded_its_code_is_the_largest(pair, word):
    """Maxima over the whole range, next to where codes, formats and metadata end."""
    edges = torch.tensor([2.0**-126, 2.0**-100, 1.0, 1.0 + 2.0**-7 - 2.0**-20, 2.0 - 2.0**-20, 2.0**120, 3.3895e38])
    groups = torch.cat([edges, torch.exp2(200 * torch.rand(2000) - 100)]).view(1, -1, 1).repeat(1, 1, 16)
    groups[..., 1:] *= torch.rand(groups.shape)[..., 1:]
    random = torch.full(groups.shape[:2], word, dtype=torch.int32)
    m_code, v_code = (MOMENT_CODES[name] for name in pair)
    second_moment = encode_second(groups, v_code, random, random)
    units = encode_second(torch.ones_like(groups), v_code)  # of ratio8: sqrt(1)
    first_moment = encode_first(groups, m_code, random, units)
    largest = {
        "sqrt8": 127,
        "ratio8": 127,
        "log8": 255,
        "de8": encode_first(torch.ones(1, 1, 1), MOMENT_CODES["de8"]).codes.item(),
    }
    for moment, code in ((first_moment, m_code), (second_moment, v_code)):
        codes = moment.codes.float()
        top = largest.get(code.base, codes.max().item())
        if code.base in ("sqrt8", "ratio8", "log8"):
            assert (codes[..., 0] == top).all()
        assert codes.isfinite().all()
    decoded_first, decoded_second = decode_first(first_moment, m_code, units), decode_second(second_moment, v_code)
    for x, decoded in ((groups, decoded_first), (groups, decoded_second)):
        assert decoded.isfinite().all()
        ratio = decoded[..., 0] / x[..., 0]
        assert ratio.min() > 1 - 2**-7 - 1e-4
        assert ratio.max() < 1 + 2**-7 + 1e-4


def random_bytes() -> torch.Tensor:
    """Random numbers of 256 groups that round their maxima down, with every highest byte: (256, 1)."""
    return (torch.arange(256) << 24).to(torch.int32)[:, None]


@pytest.mark.parametrize(("name", "beta", "limit"), [("sqrt8", 0.9, 16), ("ratio8", 0.72, 10), ("ratio8", 0.99, 125)])
def test_small_codes_are_right_in_the_mean(name, beta, limit):
    """Below a limit for every element, over all random numbers; from there on nearest, as without random numbers."""
    roots = torch.tensor([127.0, 1.0, 1.1, -1.5, 2.9, -4.25, 8.54, -15.98, 16.3, -40.4, 100.6, 2.9])
    groups = (roots.sign() * (roots / 127) ** 2).repeat(256, 1, 1)
    code, units = MOMENT_CODES[name], encode_second(torch.ones_like(groups), LOG8)
    codes = encode_first(groups, code, random_bytes(), units, beta).codes[:, 0].float()
    small = roots.abs() < limit
    torch.testing.assert_close(codes.mean(0)[small], roots[small], rtol=0, atol=1 / 256 + 1e-4)
    assert torch.equal(codes[:, ~small], roots[~small].round().expand(256, -1))
    assert ((codes - roots).abs() < 1 + 1 / 256).all()
    # One number rounds neighbours in opposite directions: all of a group would be pushed one way otherwise.
    assert torch.equal(codes[:, 4], codes[:, 11].flip(0))
    nearest = encode_first(groups[:1], code, None, units).codes[0, 0].float()
    assert torch.equal(nearest[roots.abs() != 1.5], roots.round()[roots.abs() != 1.5])


@pytest.mark.parametrize(("name", "beta"), [("sqrt8", 0.9), ("ratio8", 0.9), ("ratio8", 0.95), ("ratio8", 0.99)])
def test_a_mean_decays_beside_one_that_stays(name, beta):
    """Its root from code 15 as beta^(n / 2), and to zero; rounded to nearest it would stop: with 0.9 at code 9, with
    0.95 and 0.99 at once.

    The 256 groups have a random number each, and a step's rounding has a variance of 1/6: of a mean after 20 steps a
    standard error of 0.06.
    """
    m = torch.full((64, 4, 16), (15 / 127) ** 2)
    m[..., 0] = 1.0
    generator, code = torch.Generator().manual_seed(0), MOMENT_CODES[name]
    units, roots = encode_second(torch.ones_like(m), LOG8), []
    for _ in range(round(15 / (1 - beta))):
        m[..., 1:] *= beta
        random = torch.randint(-(2**31), 2**31, m.shape[:2], generator=generator).to(torch.int32)
        m = decode_first(encode_first(m, code, random, units, beta), code, units)
        roots.append(127 * float(m[..., 1:].sqrt().mean()))
    after = round(2 / (1 - beta))
    assert roots[after - 1] == pytest.approx(15 * beta ** (after / 2), abs=0.3)
    assert roots[-1] < 0.1


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


# ---- ratio8: m in units of sqrt(v) ------------------------------------------------------------------------


def ratio8(m, v, random=None, beta=0.9):
    """(m, v) as they are decoded."""
    stored = encode_second(v, LOG8)
    return decode_first(encode_first(m, RATIO8, random, stored, beta), RATIO8, stored), decode_second(stored, LOG8)


def test_ratio8_errs_less_than_the_other_8_bit_codes():
    """Where it counts, in m / sqrt(v); v from the same gradients as m."""
    generator = torch.Generator().manual_seed(0)
    m, v = torch.zeros(64, 512), torch.zeros(64, 512)
    scale = torch.exp(torch.randn(64, 512, generator=generator) - 8)
    for _ in range(60):
        g = torch.randn(64, 512, generator=generator) * scale
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    m, v = to_groups(m, 128), to_groups(v, 128)
    expected = m / v.sqrt()
    mine = relative_error(expected, ratio8(m, v)[0] / v.sqrt())
    others = [name for name in FIRST if MOMENT_CODES[name].dtype.itemsize == 1]
    assert mine < 0.008
    assert mine < 0.7 * min(relative_error(expected, first(m, name) / v.sqrt()) for name in others)


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e12])
def test_ratio8_keeps_the_neighbours_of_an_outlier(ratio):
    m = torch.full((1, 1, 128), -1.0 / ratio)
    m[..., 0] = 1.0
    decoded, _ = ratio8(m, m * m)
    assert ((decoded / m - 1).abs() < 2**-6).all()
    assert ((first(m, "sqrt8") / m)[..., 1:] == 0).all() or ratio <= 1e4


def test_ratio8_of_what_v_cannot_hold():
    """Gradients whose squares underflow, beside ordinary ones: nothing but their own m may be lost."""
    m = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    m[..., 5:9] = torch.tensor([1e-19, -1e-21, 1e-23, 0.0])
    m[:, 1], m[:, 2], m[:, 3, 16:] = 0.0, 1e-22, 0.0
    decoded, stored = ratio8(m, m * m)
    assert decoded.isfinite().all()
    assert (decoded[stored == 0].abs() <= m[stored == 0].abs() * 1.01).all()
    ordinary = m.abs() > 1e-3
    assert ((decoded / m)[ordinary] - 1).abs().max() < 0.05
    assert (decoded[m == 0] == 0).all()


# ---- log8 rounds by chance -----------------------------------------------------------------------------------


def all_phases() -> torch.Tensor:
    """As `random_bytes`, but the low bits differ as well."""
    return random_bytes() | 0xABCDEF


def test_log8_is_right_in_the_mean_and_errs_by_less_than_a_step():
    v = torch.exp2(torch.linspace(-20, 0, 128)).view(1, 1, 128).repeat(256, 1, 1)
    decoded = decode_second(encode_second(v, LOG8, None, all_phases()), LOG8)
    step = 20 / 254 * 1.07  # of the logarithm, and S is rounded up to 4 bits
    assert (decoded / v).log2().abs().max() < step * 1.5  # bits are no exact logarithm
    errors = (decoded.mean(0) / v[0] - 1).abs()
    nearest = (decode_second(encode_second(v[:1], LOG8), LOG8) / v[:1] - 1).abs()
    assert errors.median() < 1e-4
    assert errors.mean() < 0.1 * nearest.mean()
    assert (decoded[..., -1] == 1).all()


@pytest.mark.parametrize("low", [0.0, -1e-3, -10.0, -100.0, -126.0, -149.0])
def test_however_log8_is_rounded_zero_is_zero_and_the_largest_code_the_maximums(low):
    """Over all phases, with M rounded by each of its random numbers: no code wraps around."""
    v = torch.cat([torch.exp2(torch.linspace(low, 0, 120)), torch.zeros(8)]).repeat(256, 1, 1)
    for word in (0, 255 << 16):
        for phase in (all_phases(), all_phases().flip(0)):
            codes = encode_second(v, LOG8, torch.full((256, 1), word, dtype=torch.int32), phase).codes
            assert (codes[..., 119] == 255).all()
            assert (codes[..., 120:] == 0).all()
            assert (codes[v >= 2.0**-125] > 0).all()
            assert (codes.int()[..., 1:120] >= codes.int()[..., :119] - 1).all()


def test_v_follows_a_gradient_that_changes_beside_an_outlier():
    """beta2 = 0.999 moves it by less than half a step of log8; to nearest it would not move at all."""
    key, groups = 12345, torch.arange(32, dtype=torch.int32).view(1, 32)
    v = torch.full((1, 32, 128), 1e-10)
    v[..., 0] = 1.0
    for step in range(1500):
        phase = masters.phase_bits(key, torch.tensor(float(step)), groups)
        v[..., 1:] = 0.999 * v[..., 1:] + 0.001 * 4e-10
        v = decode_second(encode_second(v, LOG8, None, phase), LOG8)
    expected = 1e-10 * (4 - 3 * 0.999**1500)
    assert ((v[..., 1:] / expected).log().abs()).max() < 0.12  # a step of log8 there is 0.09


@pytest.mark.parametrize(
    ("name", "signed"), [("ratio8", True)] + [(n, True) for n in FIRST] + [(n, False) for n in SECOND]
)
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_decay_is_beta_times_what_is_decoded(name, signed, beta):
    code = MOMENT_CODES[name]
    x, addend = torch.randn(2, 3, 4, 128, generator=torch.Generator().manual_seed(0)) * 1e-3
    second = encode_second(x.square() + 1e-7, LOG8)
    stored = encode_first(x, code, None, second) if signed else encode_second(x.square(), code)
    decoded = decode_first(stored, code, second) if signed else decode_second(stored, code)
    found = decay(stored, code, beta, addend, signed, second)
    torch.testing.assert_close(found.double(), beta * decoded.double() + addend, rtol=1e-6, atol=1e-9)
