"""The codes that only the benchmark knows: FlashOptim's, and the search for k."""

import sys
import types

import pytest
import torch

from benchmarks.state_codes import (
    EXPONENTS,
    FLASH_GROUP_SIZE,
    all_codes,
    best_per_group,
    expanded,
    flash_first,
    flash_second,
    maximum_first,
    maximum_second,
    product_first,
    product_second,
    regrouped,
    rule_exponents,
    searched_exponent,
)
from tests.benchmarks.samples import moments


def test_flash_first_by_hand():
    m = torch.zeros(1, 1, 32)
    m[0, 0, :4] = torch.tensor([1.0, 0.5, -1.0, 1e-3])
    half = 85 / 127  # 127 * 2 * 0.5 / 1.5 = 84.67
    decoded = flash_first(m)[0, 0]
    torch.testing.assert_close(decoded[:4], torch.tensor([1.0, half / (2 - half), -1.0, 0.0]))
    assert not decoded[4:].any()


def test_flash_first_scale_is_fp16():
    m = torch.full((1, 2, 32), 1.0 + 2.0**-12)
    m[:, 1] = 1e-8  # below half of FP16's smallest number
    assert torch.equal(flash_first(m), torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(1, 2, 32))


def test_flash_second_by_hand_loses_small_v():
    v = torch.zeros(1, 1, 32)
    v[0, 0, :4] = torch.tensor([1.0, 0.25, (1.0 / 511) ** 2, (1.0 / 509) ** 2])
    expected = torch.tensor([1.0, (128 / 255) ** 2, 0.0, (1 / 255) ** 2])
    torch.testing.assert_close(flash_second(v)[0, 0, :4], expected)


def test_regrouped_cuts_groups_of_32():
    m, _ = moments()
    separate = torch.cat([flash_first(part.contiguous()) for part in m.split(FLASH_GROUP_SIZE, -1)], -1)
    assert torch.equal(regrouped(m, FLASH_GROUP_SIZE, flash_first), separate)
    assert not torch.equal(separate, flash_first(m))


def test_the_installed_package_gets_gpu_tensors_alone(monkeypatch):
    # Its Triton kernels cannot read host memory, whether there is a GPU or not.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("flashoptim", "flashoptim.optimizers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for device, used in (("cpu", False), ("cuda", True)):
        codes = all_codes(torch.device(device))
        assert ("flashoptim" in codes.first, "flashoptim" in codes.second) == (used, used)


@pytest.mark.gpu
def test_flash_codes_are_those_of_the_installed_package():
    pytest.importorskip("flashoptim")
    codes = all_codes(torch.device("cuda"))
    for ours, theirs, x in zip(
        (codes.first["flash32"], codes.second["flash32"]),
        (codes.first["flashoptim"], codes.second["flashoptim"]),
        moments(4096),
    ):
        x = x.cuda()
        # A quotient may round differently in a near tie.
        same = torch.isclose(ours(x), theirs(x), rtol=1e-5, atol=0.0)
        assert same.double().mean() > 0.9999


def test_product_codes_are_rounded_as_a_step_rounds_them():
    # 4096 equal groups but for one element, which counts for nothing, so each has random bits of its own.
    m = torch.full((1, 4096, 128), 0.1)
    m[..., 0] = 1.0 + 2.0**-9  # a quarter of the way to BF16's next
    m[..., 1] = (5.3 / 127) ** 2
    m[..., 2] = torch.linspace(1e-9, 1e-8, 4096)
    ups = (product_first(m, "sqrt8")[0, :, 0] > 1.0).double().mean()
    assert abs(ups - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    assert set((maximum_first(m)[0, :, 0]).tolist()) == {1.0, 1.0 + 2.0**-7}
    codes = (product_first(m, "sqrt8") / maximum_first(m)).sqrt()[0, :, 1] * 127
    # A larger maximum makes the root smaller by 0.2%, a quarter of the times.
    assert abs(codes.mean() - 5.3) < 0.02 + 5 * (0.3 * 0.7 / 4096) ** 0.5
    v = m.square()
    v[..., 0] = 1.0 + 2.0**-17  # a quarter of the way in 24 bits
    maxima = maximum_second(v)[0, :, 0]
    assert set(maxima.tolist()) == {1.0, 1.0 + 2.0**-15}
    assert abs((maxima > 1.0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5


def test_expanded_is_the_product_rule_where_k_is_its_own():
    m, v = moments()
    m_rule, v_rule = rule_exponents(m, v)
    assert torch.equal(expanded(m, maximum_first(m), m_rule, False), product_first(m, "e4m3x"))
    assert torch.equal(expanded(v, maximum_second(v), v_rule, True), product_second(v, "e4m3x"))


def test_searched_exponent_is_the_best_of_all():
    m, v = moments()
    rule = rule_exponents(m, v)[0]
    amax = maximum_first(m)
    decoded, chosen = searched_exponent(m, amax, rule, False, lambda x: x)
    every = torch.stack([expanded(m, amax, torch.full_like(rule, k16), False) for k16 in EXPONENTS])
    errors = (every - m).square().sum(-1)
    rule_error = (product_first(m, "e4m3x") - m).square().sum(-1)
    torch.testing.assert_close((decoded - m).square().sum(-1), torch.minimum(errors.amin(0), rule_error))
    assert (chosen != rule).float().mean() > 0.5


def test_searched_exponent_minimizes_what_is_seen():
    m, v = moments()
    rule = rule_exponents(m, v)[1]

    def ratio(x):
        return m / (x.sqrt() + 1e-8)

    def error(x):
        return float((ratio(x) - ratio(v)).square().sum())

    by_ratio = searched_exponent(v, maximum_second(v), rule, True, ratio)[0]
    by_root = searched_exponent(v, maximum_second(v), rule, True, torch.sqrt)[0]
    assert error(by_ratio) < error(product_second(v, "e4m3x"))
    assert error(by_ratio) < error(by_root)
    assert ((by_ratio > 0) == (v > 0)).all()


def test_best_per_group_takes_the_first_of_equals():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    marks = torch.arange(3).view(3, 1, 1, 1)
    worse = x + 1.0
    mixed = x + torch.tensor([[[0.0], [2.0]]])
    best, choice = best_per_group(x, ((marks[0], worse), (marks[1], mixed), (marks[2], mixed)), lambda y: y)
    assert torch.equal(best, torch.tensor([[[1.0, 2.0], [4.0, 5.0]]]))
    assert choice.flatten().tolist() == [1, 0]


def test_every_code_keeps_shape_zero_and_sign():
    m, v = moments()
    codes = all_codes(m.device)
    for name, code in codes.first.items():
        decoded = code(m)
        assert decoded.shape == m.shape, name
        assert not decoded[:, -1].any(), name
        assert (decoded * m >= 0).all(), name
    for name, code in codes.second.items():
        decoded = code(v)
        assert decoded.shape == v.shape, name
        assert not decoded[:, -1].any(), name
        assert (decoded >= 0).all(), name
