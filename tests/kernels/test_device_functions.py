"""Device functions alone: how tokens are divided among programs, sums of their partial sums, codes of AdamW."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overcoat.formats import log8, masters
from overcoat.kernels import activation, blockwise, partials
from overcoat.kernels import adamw_codes as codes
from overcoat.kernels.blockwise import MOST_BLOCKS, ROW_TILE, row_tile, token_blocks
from tests.kernels.compare import DEVICE, INTERPRETED, NEEDS_GPU

pytest.importorskip("triton")


MOST = MOST_BLOCKS * 128


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 1_000_000, 1_048_577, 5_000_000, MOST])
def test_a_grid_has_room_for_all_tokens(tokens):
    assert token_blocks(tokens) == -(-tokens // 128) <= 65535
    rows = row_tile(tokens)
    assert rows >= ROW_TILE
    assert rows & (rows - 1) == 0
    assert -(-tokens // rows) <= 65535


def _by_rows():
    """What the kernels make whose programs have `row_tile` tokens, of a number that no tile divides."""
    torch.manual_seed(0)
    x = torch.randn(130, 384, device=DEVICE).bfloat16()
    quantize = activation.activation_block_quantize.kernel
    return (
        *blockwise.block_quantize.kernel(x, "e4m3"),
        *quantize(x, "gelu_tanh", False, "sqrt8", 128),
        *quantize(x, "silu", True, "sqrt8", 64),
    )


@pytest.mark.parametrize("rows", [pytest.param(64, marks=NEEDS_GPU)])
def test_taller_tiles_write_the_same(rows, monkeypatch):
    """Tiles as tall as more than a million tokens want them."""
    expected = _by_rows()
    monkeypatch.setattr(blockwise, "ROW_TILE", rows)
    for ours, theirs in zip(_by_rows(), expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("count", [token_blocks, row_tile])
def test_too_many_tokens_are_told(count):
    with pytest.raises(ValueError, match=f"{MOST + 1} tokens at once are more than {MOST}"):
        count(MOST + 1)


# ---- The kernel of kernels/partials.py: sums of whole numbers, which are exact in any order, and maxima -------------


# One row, ragged columns, rows of several tiles and no multiple of one.
SHAPES = [(1, 1), (3, 100), (64, 688), (528, 128), (1100, 20)]
SHAPES += [] if INTERPRETED else [(264, 4096), (1056, 4096), (256, 11008)]


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, shape, device=DEVICE).float()


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2])
def test_sums_and_the_largest_of_the_programs_maxima(shape, count):
    """In FP32, and written to other types; a column with NaN is told."""
    buffers, tops = [whole_numbers(*shape) for _ in range(count)], torch.rand(shape[0], device=DEVICE)
    buffers[-1][-1, 0] = torch.nan
    expected = [buffer.sum(0) for buffer in buffers]
    sums = [torch.empty(shape[1], dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.float32)][:count]
    amax = torch.empty((), device=DEVICE)
    partials.sum_partials_into(buffers, sums, tops, amax)
    for ours, plain, truth in zip(sums, partials.sum_partials(*buffers), expected, strict=True):
        torch.testing.assert_close(plain, truth, rtol=0, atol=0, equal_nan=True)
        tolerance = 2**-7 if INTERPRETED else 0
        torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=tolerance, atol=0, equal_nan=True)
    assert amax == tops.amax()
    tops[shape[0] // 2] = torch.nan
    partials.sum_partials_into(buffers, sums, tops, amax)
    assert amax.isnan()


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_the_same_sums_every_time():
    buffer = torch.randn(1056, 4096, device=DEVICE)
    (first,) = partials.sum_partials(buffer)
    torch.testing.assert_close(first, buffer.double().sum(0).float(), rtol=1e-4, atol=1e-3)
    assert all(torch.equal(partials.sum_partials(buffer)[0], first) for _ in range(3))


# ---- Device functions of kernels/adamw_codes.py whose results are integers equal their plain twins everywhere -------


pytest.importorskip("triton")


GROUPS, G = 16, 128


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


@pytest.mark.kernel
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


@pytest.mark.kernel
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


@pytest.mark.kernel
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
