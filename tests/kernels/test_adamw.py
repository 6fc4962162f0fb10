"""AdamW's maths: steps by hand, rows and chunks. The kernel against it: test_adamw_step.py."""

import math

import pytest
import torch

from overcoat.kernels import adamw
from overcoat.kernels.adamw import rows_of, step_coefficients
from tests.kernels.adamw_cases import SHAPES, SKIP, arguments, differing_bytes, reference

# ---- by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), (1, 1, 1)),
        ((300,), (1, 300, 3)),
        ((128,), (1, 128, 1)),
        ((0,), (1, 0, 0)),
        ((4, 200), (4, 200, 2)),
        ((6, 3, 3, 5), (6, 45, 1)),  # a convolution's
        ((4, 96, 80), (384, 80, 1)),  # experts
        ((3, 64, 2880), (192, 2880, 23)),
        ((3, 64, 63), (3, 64 * 63, 32)),  # shorter than half a group
        ((3, 0, 200), (0, 200, 2)),
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


@pytest.mark.parametrize("moments", [("ratio8", "log8"), ("e4m3x", "e4m3x"), ("bf16", "fp32")])
def test_parameters_step_together_as_they_do_alone(moments):
    """Of rows of many lengths and in steps of their own; one of them skipped."""

    together, alone = arguments(moments), arguments(moments)
    count = len(SHAPES)
    for args in (together, alone):
        for number, step in enumerate(args[2][:count]):
            step.fill_(number % 3)
    skipped = 2
    together[SKIP] = torch.arange(count) == skipped
    for _ in range(2):
        reference(*together)
        for i in set(range(count)) - {skipped}:
            one = list(alone)
            one[0], one[1], one[14], one[15] = ([alone[place][i]] for place in (0, 1, 14, 15))
            one[2] = alone[2][i::count]
            reference(*one)
    assert differing_bytes(together[0] + together[2], alone[0] + alone[2]) == 0


def test_padding_counts_as_elements():
    """Rows of one element, as of depthwise convolutions, take a group each: temporaries would grow with them."""
    layouts = [rows_of(shape, 128) for shape in ((5000, 1), (4096, 1, 4), (300,), ())]
    bundles = list(adamw._bundles(layouts, 128))
    assert max(sum(piece.groups for piece in pieces) for pieces in bundles) * 128 <= adamw.CHUNK
    assert sum(piece.groups for pieces in bundles for piece in pieces) == 5000 + 4096 + 3 + 1


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
