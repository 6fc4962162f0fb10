"""Device functions of kernels/adamw_codes.py whose results are integers equal their plain twins everywhere.

The codes that take roots and reciprocals are tested with the step that they are part of: test_adamw_step.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from overcoat.formats import log8, masters, moments
from overcoat.kernels import adamw_codes as codes
from tests.kernels.compare import DEVICE, INTERPRETED, NEEDS_GPU

pytestmark = NEEDS_GPU

GROUPS, G = 16, 128


@triton.jit
def random_kernel(key, step, group, of_group, out, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    row, lane = tl.arange(0, GROUPS), tl.arange(0, G)
    bits = codes.group_bits(tl.load(key), tl.load(step), tl.load(group + row))
    tl.store(of_group + row, bits)
    tl.store(out + row[:, None] * G + lane[None, :], codes.random_bits(bits, lane, BITS))


@triton.jit
def encode_kernel(value, random, param, remainder, GROUPS: tl.constexpr, G: tl.constexpr, MASTER: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * G + tl.arange(0, G)[None, :]
    first, rest = codes.encode_master(tl.load(value + at), tl.load(random + at), MASTER)
    tl.store(param + at, first)
    tl.store(remainder + at, rest)


@triton.jit
def decode_kernel(param, remainder, value, GROUPS: tl.constexpr, G: tl.constexpr, MASTER: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * G + tl.arange(0, G)[None, :]
    tl.store(value + at, codes.decode_master(tl.load(param + at), tl.load(remainder + at), MASTER))


@triton.jit
def maximum_kernel(amax, random, packed, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(packed + at, codes.packed_maximum(tl.load(amax + at), tl.load(random + at)))


@triton.jit
def log8_kernel(levels, packed, value, GROUPS: tl.constexpr, G: tl.constexpr):
    row = tl.arange(0, GROUPS)
    at = row[:, None] * G + tl.arange(0, G)[None, :]
    of_group, nothing = tl.load(packed + row), tl.zeros((GROUPS, G), tl.float32)
    tl.store(value + at, codes.decay_second(tl.load(levels + at), of_group, 1.0, nothing, value, "log8", False))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Signs of zeros and NaNs included."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    return torch.equal(ours.cpu().contiguous().view(torch.uint8), theirs.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("key", [0, 7, 2**31 - 1, -(2**31), -987654321])
@pytest.mark.parametrize("step", [1, 2, 1000, 2**24 - 1])
def test_random_bits(bits, key, step):
    group = torch.arange(GROUPS, dtype=torch.int32, device=DEVICE)
    group[GROUPS // 2 :] += 2**31 - GROUPS  # the last numbers that an int32 holds
    expected_of_group = masters.group_bits(key, torch.tensor(float(step)), group.cpu())
    expected = masters.random_bits(expected_of_group, G, bits)
    of_group = torch.empty_like(group)
    out = torch.empty(GROUPS, G, dtype=torch.int32, device=DEVICE)
    key = torch.tensor(key, dtype=torch.int32, device=DEVICE)
    random_kernel[(1,)](key, torch.tensor(float(step), device=DEVICE), group, of_group, out, GROUPS, G, bits)
    assert same_bits(of_group, expected_of_group)
    assert same_bits(out, expected)


def awkward_values() -> torch.Tensor:
    """FP32 of every size, half way between BF16 and around it, denormal, not finite; NaN as GPUs make it too."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (GROUPS, G), generator=generator, dtype=torch.int64)
    bits[:4] = bits[:4] & ~0xFFFF | torch.tensor([0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF]).repeat(G // 8)
    bits[4, :10] = torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F7F8000, 0xFFFF, 0x8000, 255])
    bits = bits.to(torch.int32)
    bits[5, :10] = bits[4, :10] | -(2**31)
    value = bits.view(torch.float32)
    # Signalling and negative NaNs are none that a step makes.
    value[value.isnan() & (bits != 0x7FFFFFFF)] = torch.nan
    return value


@pytest.mark.parametrize("master", ["bf16", "bf16+8", "bf16+16"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_encode_master(master, seed):
    """`seed` of the random bits; None: all of them set, which carries as far as can be."""
    value, ends = awkward_values(), 2 ** masters.RANDOM_BITS[master]
    generator = torch.Generator().manual_seed(seed or 0)
    random = torch.randint(0, ends, (GROUPS, G), generator=generator, dtype=torch.int32)
    if seed is None:
        random.fill_(ends - 1)
    expected, rest = masters.encode_master(value, master, random)
    param = torch.empty(GROUPS, G, dtype=torch.bfloat16, device=DEVICE)
    remainder = torch.empty(GROUPS, G, dtype=torch.int32 if rest is None else rest.dtype, device=DEVICE)
    encode_kernel[(1,)](value.to(DEVICE), random.to(DEVICE), param, remainder, GROUPS, G, master)
    assert same_bits(param, expected)
    assert rest is None or same_bits(remainder, rest)


@pytest.mark.parametrize("master", ["bf16+8", "bf16+16"])
@pytest.mark.parametrize("stale", [False, True])
def test_decode_master(master, stale):
    """A remainder that was encoded with the parameter, and any other: none takes a weight through zero."""
    value = awkward_values()
    value[~value.isfinite()] = 0.0
    if INTERPRETED:  # it converts BF16's denormals wrongly
        value[value.abs() < 2.0**-125] = 0.0
    param, remainder = masters.encode_master(value, master, torch.zeros(GROUPS, G, dtype=torch.int32))
    if stale:
        ends = torch.iinfo(remainder.dtype)
        generator = torch.Generator().manual_seed(1)
        remainder.random_(ends.min, ends.max + 1, generator=generator)
        remainder[6] = ends.min
        param[6, :2] = torch.tensor([0.0, -0.0])
    out = torch.empty(GROUPS, G, device=DEVICE)
    decode_kernel[(1,)](param.to(DEVICE), remainder.to(DEVICE), out, GROUPS, G, master)
    assert same_bits(out, masters.decode_master(param, remainder))
    assert not stale or out[6, :2].tolist() == [0.0, 0.0]


def test_packed_maximum():
    """A positive maximum stays positive, a finite range finite, whatever the random bits; only 8 of them count."""
    bits = [0, 1, 255, 256, 257, 0x800000, 0x3F800000, 0x3F8000FF, 0x3F800100, 0x7F7FFE01, 0x7F7FFF00, 0x7F7FFFFF]
    bits = torch.tensor([*bits, 0x7F800000, 0x7FC00000, 0x12345678, 0x42000001], dtype=torch.int32)
    amax = bits.repeat_interleave(32).view(torch.float32)
    random = torch.randint(-(2**15), 2**15, (512,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    random[::4] |= 255
    random[1::4] &= ~255
    packed = torch.empty(512, dtype=torch.int32, device=DEVICE)
    maximum_kernel[(1,)](amax.to(DEVICE), random.to(DEVICE), packed, 512)
    assert same_bits(packed, moments.packed_maximum(amax, random))
    assert not (packed & 255).any()


def test_every_level_of_log8_decodes():
    """For every shape byte, at the ends of the range of maxima too, where the step is bounded."""
    levels = torch.arange(256).to(torch.uint8).repeat(256, 1)
    shape = torch.arange(256, dtype=torch.int32)
    for maximum in (log8.FLOOR, 0x00800000, 0x3F800000, 0x7F7FFF00):
        packed = shape | maximum
        ours = torch.empty(256, 256, device=DEVICE)
        for first in range(0, 256, GROUPS):
            rows = slice(first, first + GROUPS)
            log8_kernel[(1,)](levels[rows].to(DEVICE), packed[rows].to(DEVICE), ours[rows], GROUPS, 256)
        assert same_bits(ours, log8.decode(levels, torch.tensor(maximum, dtype=torch.int32), shape.unsqueeze(-1)))
