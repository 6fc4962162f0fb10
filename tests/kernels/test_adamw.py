"""AdamW's maths: steps by hand, rows and chunks. The kernel against it: test_adamw_step.py."""

import math

import pytest
import torch

from overcoat.kernels import adamw
from overcoat.kernels.adamw import rows_of, step_coefficients
from overcoat.optim.state import init_state
from tests.kernels.adamw_cases import arguments, differing_bytes, reference

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
