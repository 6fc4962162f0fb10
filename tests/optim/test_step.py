"""Step groups: when they still hold, their gradients and sums, one step by hand; and that no change is overlooked."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overcoat import AdamW
from overcoat.formats.moments import MOMENT_CODES
from overcoat.optim.state import init_state
from overcoat.optim.step import StepGroup
from tests.optim.harness import assert_same_bits, make_params, set_grads, snapshot, train

GROUP = {
    "lr": 0.1,
    "betas": (0.5, 0.75),
    "eps": 0.0,
    "weight_decay": 0.5,
    "moments": ("fp32", "fp32"),
    "master": "auto",
    "group_size": 128,
    "seed": 0,
}


SHAPES = [(4, 200), (300,), ()]


def make(shapes=SHAPES, dtype=torch.float32, **options):
    """A step group, its parameters and their states."""
    options = {**GROUP, **options}
    params = make_params(dtype, shapes)
    states = [init_state(param, options) for param in params]
    optimizer = SimpleNamespace(state=dict(zip(params, states)))
    return StepGroup(optimizer, options, params, list(range(len(params)))), params, states


@torch.no_grad()
def stepped(group, grads, factor=1.0, skip=False, **options):
    group.take_gradients(grads)
    group.step({**GROUP, **options}, torch.tensor(factor), torch.tensor(skip))


# ---- whether a step group holds -------------------------------------------------------------------------


def move(tensor):
    tensor.data = tensor.data.clone()


def test_a_group_notices_every_state_tensor_that_moves():
    """The kernel knows tensors by their addresses only."""
    options = {"moments": ("e4m3x", "log8")}
    names = make(dtype=torch.bfloat16, **options)[2][0]
    assert len(names) == 7
    for name in names:
        for i in range(len(SHAPES)):
            group, _, states = make(dtype=torch.bfloat16, **options)
            assert group.holds()
            move(states[i][name])
            assert not group.holds()


# ---- what is kept from step to step -----------------------------------------------------------------------


MANY = [(300,), (4, 200), (3, 128), (8, 256), *[(7,)] * 20, (2, 130)]


def step_groups(optimizer):
    return [group for groups in optimizer._step_groups.values() for group, _ in groups.parts]


def replace_data(params, optimizer):
    params[1].data = params[1].data.clone() + 1.0


def replace_a_moment(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()


def another_dictionary(params, optimizer):
    state = dict(optimizer.state[params[2]])
    state["remainder"] = state["remainder"] * 0
    optimizer.state[params[2]] = state


def forget_a_state(params, optimizer):
    del optimizer.state[params[1]]


def move_all_there_and_back(params, optimizer):
    """As trainers do that free the GPU for a while: same tensors, new memory."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.to("cpu", copy=True)
    blocker = torch.empty(1000, device=params[0].device)
    for state in optimizer.state.values():
        for value in reversed(state.values()):
            value.data = value.data.to(params[0].device, copy=True)
    del blocker


def another_dictionary_of_states(params, optimizer):
    optimizer.state = collections.defaultdict(dict)


def swap_two_states(params, optimizer):
    """The same dictionaries in the same order, under other parameters."""
    owners = list(optimizer.state)
    owners[6], owners[7] = owners[7], owners[6]
    optimizer.state = collections.defaultdict(dict, zip(owners, optimizer.state.values()))


def load_its_own_state(params, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def new_group_options(params, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    optimizer.param_groups[0]["weight_decay"] = 0.3


def group_size_as_a_float(params, optimizer):
    """As JSON and YAML may have it."""
    optimizer.param_groups[0]["group_size"] = 128.0


def another_order(params, optimizer):
    """Another index means other random numbers."""
    optimizer.param_groups[0]["params"] = [params[3], *params[:3], *params[4:]]


def another_seed(params, optimizer):
    optimizer.param_groups[0]["seed"] = 5


@pytest.mark.parametrize(
    "disturb",
    [
        replace_data, replace_a_moment, another_dictionary, forget_a_state, move_all_there_and_back,
        another_dictionary_of_states, swap_two_states, load_its_own_state,
        new_group_options, group_size_as_a_float, another_order, another_seed,
    ],
)  # fmt: skip
def test_the_next_step_sees_what_was_done(disturb, device):
    """A copy of the optimizer starts with nothing kept; both must go on alike."""
    params = make_params(torch.bfloat16, MANY, device=device)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 2)
    undisturbed = copy.deepcopy((params, optimizer))
    disturb(params, optimizer)
    twins, twin = copy.deepcopy((params, optimizer))
    for run in ((params, optimizer), (twins, twin), undisturbed):
        train(*run, 2, first=2)
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))
    if disturb not in (replace_a_moment, move_all_there_and_back, load_its_own_state, group_size_as_a_float):
        with pytest.raises(AssertionError):
            assert_same_bits(snapshot(params, optimizer), snapshot(*undisturbed))


def test_gradients_of_other_kinds(device):
    """Missing, non-contiguous and unaligned gradients, and parameters of two dtypes in one group."""
    shapes = [(300,), (256, 256), (4, 200)]

    def run(forget):
        params = [*make_params(torch.bfloat16, shapes, device=device), *make_params(shapes=shapes, device=device)]
        optimizer = AdamW(params, lr=1e-2)
        for step in range(5):
            set_grads(params, step)
            if step == 1:
                params[0].grad = params[4].grad = None
            if step == 2:
                params[1].grad = params[1].grad.t()
                params[4].grad = torch.cat([params[4].grad.view(-1), torch.zeros(1, device=device)])[1:].view(256, 256)
            if forget:
                optimizer._start_fresh()
            optimizer.step()
        assert len(step_groups(optimizer)) == 2
        return snapshot(params, optimizer)

    assert_same_bits(run(False), run(True))


@pytest.mark.parametrize("offload", [False, True])
def test_only_what_is_not_contiguous_is_copied(offload, device):
    params, twins = (make_params(torch.bfloat16, [(4, 200), (64, 32), (300,)], device=device) for _ in range(2))
    params[1].data = params[1].data.t().contiguous().t()
    optimizer, twin = AdamW(params, offload=offload), AdamW(twins, offload=offload)
    train(params, optimizer, 2)
    train(twins, twin, 2)
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))
    (group,) = step_groups(optimizer)
    stepped = [tensor.data_ptr() == param.data_ptr() for tensor, param in zip(group.tensors.params, params)]
    assert stepped == [True, False, True]
    assert list(group.buffers) == [1]


def test_a_square_parameter_that_is_transposed_where_it_lies_is_noticed(device):
    params = make_params(torch.bfloat16, [(64, 64), (300,)], device=device)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)
    params[0].data = params[0].data.t()
    twins, twin = copy.deepcopy((params, optimizer))
    for run in ((params, optimizer), (twins, twin)):
        train(*run, 1, first=1)
    (group,) = step_groups(optimizer)
    assert list(group.buffers) == [0]  # the kernel gets a copy of its rows
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))


@pytest.mark.parametrize(("shape", "other"), [((4, 200), (8, 100)), ((300,), (3, 100)), ((64, 64), (4096,))])
def test_a_parameter_that_is_seen_in_another_shape_where_it_lies_is_refused(shape, other, device):
    """Its groups would be others than those of its states."""
    params = make_params(torch.bfloat16, [shape, (5,)], device=device)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)
    before = snapshot(params, optimizer)
    params[0].data = params[0].data.view(other)
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 .*expected .*set back what has changed"):
        train(params, optimizer, 1, first=1)
    params[0].data = params[0].data.view(shape)
    assert_same_bits(before, snapshot(params, optimizer))
    train(params, optimizer, 1, first=1)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", ["meta", "fake", "fake cuda"])
@pytest.mark.parametrize("options", [{}, {"check_finite": False}, {"offload": True}])
def test_a_step_without_memory_makes_the_states(kind, options):
    """As estimators of memory take it, of a GPU that is not there too."""
    if (kind, options) == ("fake cuda", {"offload": True}):
        pytest.skip("streams are real")
    with contextlib.nullcontext() if kind == "meta" else FakeTensorMode():
        device = {"meta": "meta", "fake": "cpu", "fake cuda": "cuda"}[kind]
        params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in ((4, 200), (300,))]
        optimizer = AdamW(params, **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step(clip_grad_norm=None if "check_finite" in options else 1.0)
    assert optimizer.state[params[0]]["exp_avg"].shape == (4, 200)
    assert optimizer.skipped_steps.device.type == device


def test_compiled_code_around_a_step_steps_the_same():
    params, twins = (make_params(torch.bfloat16, SHAPES) for _ in range(2))
    optimizer, twin = AdamW(params, lr=1e-2), AdamW(twins, lr=1e-2)

    @torch.compile(backend="eager")
    def step():
        optimizer.step(clip_grad_norm=1.0)
        return params[0] * 2

    for seed in range(2):
        set_grads(params, seed)
        set_grads(twins, seed)
        twin.step(clip_grad_norm=1.0)
        assert torch.equal(step(), twins[0] * 2)
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))


@pytest.mark.gpu
def test_a_cuda_graph_replays_after_steps_of_other_kinds():
    """The tables whose addresses it has captured stay, though later steps make others."""
    params = make_params(torch.bfloat16, MANY, device="cuda")
    set_grads(params, 0)
    grads = [p.grad for p in params]
    optimizer = AdamW(params, lr=1e-2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    twins, twin = copy.deepcopy((params, optimizer))
    set_grads(params, 1)  # elsewhere in memory
    optimizer.step()
    params[1].grad = None
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device="cuda"))]})
    blockers = [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in (4, 4, 52, 52, 208) for _ in range(50)]
    graph.replay()
    torch.cuda.synchronize()
    del blockers
    set_grads(twins, 1)
    twin.step()
    twins[1].grad = None
    twin.step()
    for p, grad in zip(twins, grads):
        p.grad = grad
    twin.step()
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))


# Corner cases of AdamW's step, on a CPU and on a GPU: gradients that are not finite or huge, first steps, layouts


# Every code of m and every code of v.
PAIRS = [("ratio8", "log8"), *((name, name) for name in MOMENT_CODES if name not in ("ratio8", "log8"))]


@pytest.mark.parametrize("moments", PAIRS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_non_finite_gradient_is_counted_and_leaves_no_trace(moments, bad, device):
    params = make_params(torch.bfloat16, device=device)
    optimizer = AdamW(params, moments=moments)
    train(params, optimizer, 2)
    before = snapshot(params, optimizer)
    set_grads(params, 2)
    params[4].grad[1, 77] = bad
    optimizer.step(clip_grad_norm=1.0)
    assert_same_bits(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps.item() == 1
    train(params, optimizer, 1, first=3)
    assert optimizer.skipped_steps.item() == 1
    assert optimizer.state[params[4]]["step"].item() == 3
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("moments", ["8bit", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_whose_sum_of_squares_overflows_are_stepped(dtype, moments, clip, device):
    """1e18 in 10,000 elements: each square fits into FP32, their sum, 1e40, does not."""
    grads = [torch.full((50, 100), 1e18), torch.full((5000,), -1e18)]
    params = [torch.nn.Parameter(torch.ones_like(g, device=device, dtype=dtype)) for g in grads]
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.0, moments=moments)
    for _ in range(2):
        for p, g in zip(params, grads):
            p.grad = g.to(device, dtype)
        optimizer.step(clip_grad_norm=clip)
    assert optimizer.skipped_steps.item() == 0
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(1e20), rtol=2**-8, atol=0)
    for p, sign in zip(params, (-1, 1)):
        torch.testing.assert_close(p.float(), torch.full_like(p, 1 + sign * 2e-2).float(), rtol=2**-7, atol=0)
        if moments == "fp32":
            m, v, g = *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")), 1e18 if clip is None else 1e-2
            torch.testing.assert_close(m, torch.full_like(m, -sign * 0.19 * g), rtol=2e-2, atol=0)
            torch.testing.assert_close(v, torch.full_like(v, 0.001999 * g * g), rtol=2e-2, atol=0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_own_square_overflows_is_skipped(clip, device):
    """v could not hold it: it would be inf ever after, and the weight stand still."""
    (param,) = params = make_params(shapes=[(4, 200)], device=device)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    before = snapshot(params, optimizer)
    param.grad[2, 3] = 2.0**64
    optimizer.step(clip_grad_norm=clip)
    assert_same_bits(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("moments", PAIRS)
def test_first_steps_are_those_of_fp32_moments_whatever_codes_shapes_and_layouts(moments, device):
    """From zero states all take the same step, bit for bit: only what is stored is quantized. Every element is stepped,
    none twice: against plain vectors of the same numbers."""
    params = [*make_params(device=device), torch.nn.Parameter(make_params(shapes=[(200, 72)], device=device)[0].t())]
    assert not params[-1].is_contiguous()
    rows = [torch.nn.Parameter(p.detach().reshape(-1).clone()) for p in params]
    set_grads(params, 0)
    for p, row in zip(params, rows):
        row.grad = p.grad.reshape(-1)
    AdamW(params, lr=1e-2, moments=moments).step()
    AdamW(rows, lr=1e-2, moments="fp32").step()
    assert_same_bits([p.detach().reshape(-1) for p in params], [row.detach() for row in rows])


@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_the_default_dtype_changes_no_bit(moments):
    """Scripts set it to BF16 to build their models: the learning rate, for one, is no number of the model's."""

    def stepped(default):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.float32).view(3, 100))
        torch.set_default_dtype(default)
        try:
            optimizer = AdamW([weight], lr=3e-4, moments=moments, clip_grad_norm=1.0)
            for power in (1, 2, 3):
                weight.grad = weight.detach() ** power
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        return weight.detach()

    assert torch.equal(stepped(torch.bfloat16), stepped(torch.float32))
