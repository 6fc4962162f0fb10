"""AdamW's maths: steps by hand, rows and chunks. The kernel against it: test_adamw_step.py."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from overcoat.formats import log8, masters
from overcoat.kernels import adamw
from overcoat.kernels import adamw_codes as codes
from overcoat.kernels.adamw import rows_of, step_coefficients
from overcoat.optim.state import init_state
from tests.kernels.adamw_cases import arguments, differing_bytes, reference
from tests.kernels.compare import DEVICE, INTERPRETED, NEEDS_GPU

# ---- by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), (1, 1, 1)),
        ((300,), (1, 300, 3)),
        ((128,), (1, 128, 1)),
        ((0,), (1, 0, 0)),
        ((4, 200), (4, 200, 2)),
        ((6, 3, 3, 5), (6, 45, 1)),
        ((0, 7), (0, 7, 1)),
        ((2, 0), (2, 0, 0)),
    ],
)
def test_rows_of(shape, expected):
    assert rows_of(shape, 128) == expected


def test_coefficients_are_computed_in_fp64():
    """1 - beta2 = 1e-7 is 20% off in FP32."""
    (found,) = step_coefficients(torch.tensor([1.0]), torch.tensor(1.0), 0.9, 1 - 1e-7, 1.0, 0.0)
    assert found[1] == pytest.approx(math.sqrt(1e-7), rel=1e-6)
    assert found[0] == pytest.approx(math.sqrt(1e-7) / 0.1, rel=1e-6)


def op_of_one(param, grad, lr=0.1, factor=1.0, skip=False, betas=(0.5, 0.75), eps=0.0, decay=0.0):
    """The arguments for one FP32 parameter with FP32 moments, and its state."""
    state = init_state(param, {"moments": ("fp32", "fp32"), "group_size": 128, "master": "auto"})
    scalars = torch.tensor(lr), torch.tensor(factor), torch.tensor(skip)
    options = (*betas, eps, decay, "fp32", "fp32", "fp32", 128, [1], [0])
    return ([param], [grad], list(state.values()), *scalars, *options), state


def test_two_steps_by_hand():
    """Gradients 4 and -2, halved by the factor; decay 1 - lr weight_decay = 0.95.

    m = 1, then 0.5 - 0.5 = 0; v = 0.25 * 4 = 1, then 0.75 + 0.25 = 1. So the first step is lr * 2 / 2, the second 0.
    """
    param, grad = torch.full((3, 2), 2.0), torch.full((3, 2), 4.0)
    args, state = op_of_one(param, grad, factor=0.5, decay=0.5)
    reference(*args)
    torch.testing.assert_close(state["exp_avg"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(param, torch.full((3, 2), 2 * 0.95 - 0.1))
    grad.fill_(-2.0)
    reference(*args)
    torch.testing.assert_close(state["exp_avg"], torch.zeros(3, 2))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(param, torch.full((3, 2), (2 * 0.95 - 0.1) * 0.95))
    assert state["step"] == 2


@pytest.mark.parametrize("shape", [(0,), (0, 7), (2, 0)])
def test_an_empty_parameter_counts_its_steps(shape):
    args, state = op_of_one(torch.zeros(shape), torch.zeros(shape))
    reference(*args)
    assert state["step"] == 1


# ---- rows and chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["bf16+8", "bf16"])
def test_rows_step_like_those_of_the_whole(master):
    """Stepping two shards along dim 0 gives the bits of stepping the whole, random numbers too: FSDP's layout."""

    def step(rows):
        args = arguments(master=master, shapes=((8, 200),))
        args[0], args[1] = [args[0][0][rows]], [args[1][0][rows]]
        args[2] = [tensor[rows] if tensor.dim() else tensor for tensor in args[2]]
        args[15] = [3 + 2 * rows.start]
        for _ in range(3):
            reference(*args)
        return args[0] + [tensor for tensor in args[2] if tensor.dim()]

    joined = map(torch.cat, zip(step(slice(0, 3)), step(slice(3, 8))))
    assert differing_bytes(step(slice(0, 8)), joined) == 0


@pytest.mark.parametrize("chunk", [1, 130, 400])
def test_chunks_of_any_size_give_the_same_bits(monkeypatch, chunk):
    """Also the random numbers by which weights, maxima and small codes are rounded."""
    whole, cut = (arguments(shapes=((7, 130), (5, 3, 43), (300,), ())) for _ in range(2))
    for _ in range(2):
        reference(*whole)
    monkeypatch.setattr(adamw, "CHUNK", chunk)
    for _ in range(2):
        reference(*cut)
    assert differing_bytes(whole[0] + whole[2], cut[0] + cut[2]) == 0


# ---- Device functions of kernels/adamw_codes.py whose results are integers equal their plain twins everywhere -------


pytest.importorskip("triton")


pytestmark = NEEDS_GPU

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
