"""What is kept from step to step is used again, and noticed to be stale whatever somebody did between two steps."""

import collections
import copy

import pytest
import torch

from overcoat import AdamW
from tests.optim.harness import assert_same_bits, make_params, set_grads, snapshot, train

SHAPES = [(300,), (4, 200), (3, 128), (8, 256), *[(7,)] * 20, (2, 130)]


def buckets(optimizer):
    return [bucket for roster in optimizer._rosters.values() for bucket, _ in roster.parts]


def replace_data(params, optimizer):
    params[1].data = params[1].data.clone() + 1.0


def replace_a_moment(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()


def reset_a_second_moment(params, optimizer):
    old = optimizer.state[params[3]]["exp_avg_sq"]
    optimizer.state[params[3]].update(exp_avg_sq=torch.full_like(old, 9))


def reset_a_step_count(params, optimizer):
    optimizer.state[params[0]]["step"] = torch.zeros_like(optimizer.state[params[0]]["step"])


def another_dictionary(params, optimizer):
    state = dict(optimizer.state[params[2]])
    state["remainder"] = state["remainder"] * 0
    optimizer.state[params[2]] = state


def forget_a_state(params, optimizer):
    del optimizer.state[params[1]]


def clear_a_state(params, optimizer):
    optimizer.state[params[1]].clear()


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


def move_one_tensor_of_the_last_state(params, optimizer):
    value = optimizer.state[params[-1]]["exp_avg_sq"]
    value.data = torch.full_like(value, 9)


def move_the_last_metadata(params, optimizer):
    value = optimizer.state[params[-1]]["exp_avg_sq_scale"]
    value.data = value.data + (1 << 24)


def clear_all_states(params, optimizer):
    optimizer.state.clear()


def another_dictionary_of_states(params, optimizer):
    optimizer.state = collections.defaultdict(dict)


def load_its_own_state(params, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def new_group_options(params, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    optimizer.param_groups[0]["weight_decay"] = 0.3


def another_order(params, optimizer):
    """Another index means other random numbers."""
    optimizer.param_groups[0]["params"] = [params[3], *params[:3], *params[4:]]


@pytest.mark.parametrize(
    "disturb",
    [
        replace_data, replace_a_moment, reset_a_second_moment, reset_a_step_count, another_dictionary, forget_a_state,
        clear_a_state, move_all_there_and_back, move_one_tensor_of_the_last_state, move_the_last_metadata,
        clear_all_states, another_dictionary_of_states, load_its_own_state, new_group_options, another_order,
    ],
)  # fmt: skip
def test_the_next_step_sees_what_was_done(disturb, device):
    """A copy of the optimizer starts with nothing kept; both must go on alike."""
    params = make_params(torch.bfloat16, SHAPES, device=device)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 2)
    undisturbed = copy.deepcopy((params, optimizer))
    disturb(params, optimizer)
    twins, twin = copy.deepcopy((params, optimizer))
    for run in ((params, optimizer), (twins, twin), undisturbed):
        train(*run, 2, first=2)
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))
    if disturb not in (replace_a_moment, move_all_there_and_back, load_its_own_state):
        with pytest.raises(AssertionError):
            assert_same_bits(snapshot(params, optimizer), snapshot(*undisturbed))


def test_buckets_are_kept_while_nothing_changes(device):
    params = make_params(torch.bfloat16, SHAPES, device=device)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)
    first = buckets(optimizer)
    train(params, optimizer, 3, first=1, clip_grad_norm=1.0)
    assert all(map(lambda a, b: a is b, first, buckets(optimizer)))
    replace_a_moment(params, optimizer)
    train(params, optimizer, 1)
    second = buckets(optimizer)
    assert second[0] is not first[0]
    train(params, optimizer, 1)
    assert buckets(optimizer)[0] is second[0]


def test_a_bucket_notices_every_tensor_that_moves(device):
    """The kernel knows tensors by their addresses only."""
    params = make_params(torch.bfloat16, SHAPES, device=device)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    states = (value for state in optimizer.state.values() for value in state.values())
    for tensor in [*params, *states]:
        (bucket,) = buckets(optimizer)
        assert bucket.serves()
        tensor.data = tensor.data.clone()
        assert not bucket.serves()
        train(params, optimizer, 1)


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
                optimizer._forget()
            optimizer.step()
        assert len(buckets(optimizer)) == 2
        return snapshot(params, optimizer)

    assert_same_bits(run(False), run(True))


@pytest.mark.gpu
def test_a_cuda_graph_replays_after_steps_of_other_kinds():
    """The tables whose addresses it has captured stay, though later steps make others."""
    params = make_params(torch.bfloat16, SHAPES, device="cuda")
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
