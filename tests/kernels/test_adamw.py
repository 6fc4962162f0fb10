"""`overcoat::adamw_step_` and what it is made of: one step by hand, rows and chunks, sums of squares, maxima.

The optimizer around it: tests/optim; the Triton kernel against it: tests/kernels/gpu.
"""

import copy
import math

import pytest
import torch

from overcoat.formats.masters import group_bits
from overcoat.kernels import adamw
from overcoat.kernels.adamw import Draw, adamw_step_, gradients_sum_squares, rows_of, step_coefficients
from overcoat.optim.adamw import AdamW
from overcoat.optim.state import init_state
from tests.optim.harness import assert_same_bits, make_params


def op_arguments(dtype=torch.bfloat16, moments=("sqrt8", "log8"), master="bf16+8", shapes=((3, 130), (200,))):
    params = [p.detach() for p in make_params(dtype, shapes)]
    group = {"moments": moments, "group_size": 128, "master": "auto"}
    states = [init_state(p, group) for p in params]

    def collect(name):
        return [state[name] for state in states if name in state]

    return (
        params, [torch.randn_like(p) for p in params], collect("exp_avg"), collect("exp_avg_amax"),
        collect("exp_avg_exponent"), collect("exp_avg_sq"), collect("exp_avg_sq_scale"), collect("remainder"),
        collect("step"), torch.tensor(1e-3), torch.tensor(1.0), torch.tensor(False), 0.9, 0.999, 1e-8, 0.01, *moments,
        master, 128, [1, 2], [0, 0],
    )  # fmt: skip


def test_opcheck():
    torch.library.opcheck(adamw_step_.overload, op_arguments())
    torch.library.opcheck(adamw_step_.overload, op_arguments(torch.float32, ("de8x", "de8x"), "fp32"))
    torch.library.opcheck(gradients_sum_squares.overload, ([torch.randn(3), torch.randn(2, 2).bfloat16()],))


def test_the_op_traces_in_one_graph():
    arguments = op_arguments()

    def step(*args):
        adamw_step_(*args)
        return args[0][0] + 0

    expected = step(*copy.deepcopy(arguments))
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(*arguments), expected)


def test_rows_shard_like_the_whole():
    """Stepping two halves along dim 0 gives the bits of stepping the whole: FSDP's layout, weights rounded too."""
    whole = make_params(torch.bfloat16, shapes=[(8, 200)])[0]
    grad = torch.randn(8, 200).bfloat16()
    group = AdamW([whole]).param_groups[0]

    def step(param, grad, first_group):
        state = init_state(param, group)
        for _ in range(3):
            adamw_step_(
                [param], [grad], [state["exp_avg"]], [state["exp_avg_amax"]], [], [state["exp_avg_sq"]],
                [state["exp_avg_sq_scale"]], [state["remainder"]], [state["step"]], torch.tensor(1e-3),
                torch.tensor(1.0), torch.tensor(False), 0.9, 0.999, 1e-8, 0.01, *group["moments"], "bf16+8", 128,
                [17], [first_group],
            )  # fmt: skip
        return [param, *state.values()]

    halves = [
        step(whole.detach()[rows].clone(), grad[rows], first) for rows, first in ((slice(3), 0), (slice(3, 8), 6))
    ]
    full = step(whole.detach().clone(), grad, 0)
    for entire, top, bottom in zip(full, *halves):
        if entire.dim():
            assert torch.equal(entire, torch.cat([top, bottom]))


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


def test_coefficients_by_hand():
    """t = 1, 2: 1 - 0.5^t = 0.5, 0.75; sqrt(1 - 0.75^t) = 0.5, sqrt(0.4375)."""
    found = step_coefficients(torch.tensor([1.0, 2.0]), torch.tensor(0.5), 0.5, 0.75, 1e-3, 0.25)
    root = math.sqrt(0.4375)
    expected = torch.tensor([[0.5, 5e-4, 0.875], [0.5 * root / 0.75, root * 1e-3, 0.875]])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)


def test_coefficients_are_computed_in_fp64():
    """1 - beta2 = 1e-7 is 20% off in FP32."""
    (found,) = step_coefficients(torch.tensor([1.0]), torch.tensor(1.0), 0.9, 1 - 1e-7, 1.0, 0.0)
    assert found[1] == pytest.approx(math.sqrt(1e-7), rel=1e-6)
    assert found[0] == pytest.approx(math.sqrt(1e-7) / 0.1, rel=1e-6)


def op_of_one(param, grad, lr=0.1, factor=1.0, skip=False, betas=(0.5, 0.75), eps=0.0, decay=0.0):
    """The arguments for one FP32 parameter with FP32 moments, and its state."""
    state = init_state(param, {"moments": ("fp32", "fp32"), "group_size": 128, "master": "auto"})
    scalars = torch.tensor(lr), torch.tensor(factor), torch.tensor(skip)
    lists = [[state["exp_avg"]], [], [], [state["exp_avg_sq"]], [], [], [state["step"]]]
    options = (*betas, eps, decay, "fp32", "fp32", "fp32", 128, [1], [0])
    return ([param], [grad], *lists, *scalars, *options), state


def test_two_steps_by_hand():
    """Gradients 4 and -2, halved by the factor; decay 1 - lr weight_decay = 0.95.

    m = 1, then 0.5 - 0.5 = 0; v = 0.25 * 4 = 1, then 0.75 + 0.25 = 1. So the first step is lr * 2 / 2, the second 0.
    """
    param, grad = torch.full((3, 2), 2.0), torch.full((3, 2), 4.0)
    args, state = op_of_one(param, grad, factor=0.5, decay=0.5)
    adamw_step_(*args)
    torch.testing.assert_close(state["exp_avg"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(param, torch.full((3, 2), 2 * 0.95 - 0.1))
    grad.fill_(-2.0)
    adamw_step_(*args)
    torch.testing.assert_close(state["exp_avg"], torch.zeros(3, 2))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((3, 2), 1.0))
    torch.testing.assert_close(param, torch.full((3, 2), (2 * 0.95 - 0.1) * 0.95))
    assert state["step"] == 2


def test_eps_is_beside_the_corrected_root():
    """At t = 1 the corrected moments are the gradient and its square: w - lr g / (|g| + eps)."""
    param = torch.zeros(4)
    args, _ = op_of_one(param, torch.tensor([3.0, -1.0, 0.5, 0.0]), eps=0.5)
    adamw_step_(*args)
    torch.testing.assert_close(param, -0.1 * torch.tensor([3 / 3.5, -1 / 1.5, 0.5, 0.0]))


def test_a_skipped_step_changes_nothing():
    for gradient in (1.0, math.nan):
        args, state = op_of_one(torch.ones(5), torch.full((5,), gradient), skip=True, decay=0.5)
        before = copy.deepcopy([args[0][0], *state.values()])
        adamw_step_(*args)
        assert_same_bits(before, [args[0][0], *state.values()])


@pytest.mark.parametrize("shape", [(0,), (0, 7), (2, 0)])
def test_an_empty_parameter_counts_its_steps(shape):
    args, state = op_of_one(torch.zeros(shape), torch.zeros(shape))
    adamw_step_(*args)
    assert state["step"] == 1


# ---- rows, chunks, random numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 130, 400])
@pytest.mark.parametrize("shapes", [((7, 130), (5, 3, 43)), ((300,), ())])
def test_chunks_of_any_size_give_the_same_bits(monkeypatch, chunk, shapes):
    """Also the random numbers by which BF16 weights, maxima and small codes are rounded."""
    whole, cut = (op_arguments(shapes=shapes) for _ in range(2))
    cut[1][:] = [grad.clone() for grad in whole[1]]
    for _ in range(2):
        adamw_step_(*whole)
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "CHUNK", chunk)
        for _ in range(2):
            adamw_step_(*cut)
    for left, right in zip(whole[:9], cut[:9]):
        assert_same_bits(left, right)


@pytest.mark.parametrize("bits", [8, 16])
def test_random_numbers_count_groups_from_the_first_of_the_shard(bits):
    step = torch.tensor(3.0)
    whole = Draw(17, step, 0, bits).of_rows(slice(0, 6), 3, 32)
    shard = Draw(17, step, 2 * 3, bits).of_rows(slice(1, 4), 3, 32)  # rows 3 to 5 of a shard that begins at row 2
    assert_same_bits([values[3:6] for values in whole], shard)
    assert [values.shape for values in whole] == [(6, 3), (6, 3, 32)]
    assert torch.equal(whole[0].flatten(), group_bits(17, step, torch.arange(18, dtype=torch.int32)))
    assert Draw(17, step, 0, 0).of_rows(slice(0, 6), 3, 32)[1] is None


def test_weights_laid_out_otherwise_are_written_where_they_are():
    """A transposed parameter, and gradients of other layouts and dtypes."""
    grad = torch.randn(3, 130, generator=torch.Generator().manual_seed(0)).half()
    plain, strided = torch.ones(3, 130), torch.ones(130, 3).t()
    for param, g in ((plain, grad.float()), (strided, grad.t().contiguous().t())):
        args, _ = op_of_one(param, g)
        adamw_step_(*args)
    assert not strided.is_contiguous()
    assert torch.equal(plain, strided)
    assert not (plain == 1).any()


# ---- norms and maxima -----------------------------------------------------------------------------------


def test_sum_of_squares_by_hand():
    found = gradients_sum_squares([torch.tensor(3.0), torch.full((2, 2), -2.0).bfloat16(), torch.zeros(0, 5)])
    assert (found.dtype, found.shape, found.item()) == (torch.float64, (), 25.0)


def test_sums_beyond_fp32_are_finite_and_squares_beyond_it_are_not():
    """Each of 2^126 fits, four of them, 2^128, do not."""
    large = torch.full((4,), 2.0**63)
    assert gradients_sum_squares([large]) == 2.0**128
    assert gradients_sum_squares([large, torch.tensor([-(2.0**64)])]) == math.inf
    assert gradients_sum_squares([large.double().bfloat16()]) == 2.0**128


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_shows_every_element_that_is_not_finite(bad):
    for place in (0, 299):
        grad = torch.ones(300)
        grad[place] = bad
        assert not gradients_sum_squares([torch.ones(7), grad]).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_maximum_of_a_weight(dtype):
    amax, no, yes = torch.tensor(7.0), torch.tensor(False), torch.tensor(True)
    param = torch.nn.Parameter(torch.tensor([[0.5, -3.0], [1.0, 0.0]], dtype=dtype))
    adamw.find_weight_amax_(amax, param, yes)
    assert amax == 7.0
    adamw.find_weight_amax_(amax, param, no)
    assert amax == 3.0
    adamw.find_weight_amax_(amax, torch.zeros(0, 4, dtype=dtype), no)
    assert amax == 3.0
    adamw.find_weight_amax_(amax, torch.tensor([1.0, math.nan], dtype=dtype), no)
    assert amax.isnan()
