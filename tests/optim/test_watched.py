"""States are the user's, as with any torch optimizer: what is taken out or replaced is freed at once."""

import collections
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from overcoat import AdamW, release_gradients
from overcoat.optim.watched import State, States
from tests.optim.harness import make_params, train

SHAPES = [(300,), (4, 200), (3, 128)]


def clear_all(optimizer):
    optimizer.state.clear()


def clear_each(optimizer):
    for state in optimizer.state.values():
        state.clear()


def delete_each(optimizer):
    for param in list(optimizer.state):
        del optimizer.state[param]


def copy_each(optimizer):
    """As trainers do that take the states to the host while something else needs the GPU."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def take_out(optimizer):
    while optimizer.state:
        optimizer.state.popitem()


def tensors_of(optimizer):
    return [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]


def released_model(device, **options):
    model = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 8)).to(device, torch.bfloat16)
    optimizer = AdamW(model.parameters(), **options)
    release_gradients(model, optimizer, batch_bytes=500)
    return model, optimizer


def released_step(model, optimizer):
    model(torch.ones(2, 16, device=next(model.parameters()).device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("disturb", [clear_all, clear_each, delete_each, copy_each, take_out])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_taken_out_is_freed_at_once(disturb, offload, device):
    params = make_params(torch.bfloat16, SHAPES, device=device)
    optimizer = AdamW(params, offload=offload)
    train(params, optimizer, 2)
    optimizer.state_dict()
    old = tensors_of(optimizer)
    assert len(old) == 18
    gc.disable()  # not only when cycles are collected
    try:
        disturb(optimizer)
        assert not any(tensor() is not None for tensor in old)
    finally:
        gc.enable()
    train(params, optimizer, 1)
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [3 if disturb is copy_each else 1] * 3


@pytest.mark.parametrize("disturb", [clear_all, clear_each, delete_each, copy_each, take_out])
def test_released_gradients_let_go_as_well(disturb, device):
    model, optimizer = released_model(device)
    for _ in range(3):
        released_step(model, optimizer)
    old = tensors_of(optimizer)
    disturb(optimizer)
    assert not any(tensor() is not None for tensor in old)
    released_step(model, optimizer)
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [4 if disturb is copy_each else 1] * 4


def test_a_write_between_backward_and_step_loses_no_count(device):
    model, optimizer = released_model(device)
    for _ in range(2):
        released_step(model, optimizer)
    model(torch.ones(2, 16, device=device, dtype=torch.bfloat16)).sum().backward()
    copy_each(optimizer)
    optimizer.step()
    assert optimizer.grad_norm > 0
    released_step(model, optimizer)
    assert [state["step"].item() for state in optimizer.state.values()] == [4] * 4


def test_cleared_states_begin_as_those_of_a_new_optimizer(device):
    params, fresh = (make_params(torch.bfloat16, SHAPES, device=device) for _ in range(2))
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 2)
    optimizer.state.clear()
    for p, q in zip(params, fresh):
        q.data.copy_(p)
    other = AdamW(fresh, lr=1e-2)
    train(params, optimizer, 2, first=2)
    train(fresh, other, 2, first=2)
    for p, q in zip(params, fresh):
        assert torch.equal(p, q)
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in other.state[q].items())


def test_every_write_is_told_and_reading_is_not():
    writes = [
        lambda state: state.__setitem__("a", 2),
        lambda state: state.update(a=3),
        lambda state: state.setdefault("b", 4),
        lambda state: state.pop("b"),
        lambda state: state.__ior__({"c": 5}),
        lambda state: state.popitem(),
        lambda state: state.__delitem__("a"),
        lambda state: state.clear(),
    ]
    for kind in (State, States):
        told = []
        state = kind({"a": 1}, lambda: lambda: told.append(True))  # noqa: B023
        expected = {"a": 1}
        for count, write in enumerate(writes):
            assert len(told) == count
            write(state)
            write(expected)
            assert state == expected
        before = len(told)
        assert state.get("a") is None
        assert list(state.values()) == []
        assert len(told) == before


def test_copies_are_plain_dictionaries():
    state = State({"step": torch.ones(())}, lambda: None)
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert type(twin) is dict
        assert twin["step"] == 1
    states = States({1: {"a": 2}}, lambda: None)
    for twin in (copy.copy(states), copy.deepcopy(states), pickle.loads(pickle.dumps(states)), states.copy()):
        assert type(twin) is collections.defaultdict
        assert twin == {1: {"a": 2}}
        assert twin["new"] == {}


def test_states_given_to_another_optimizer_are_watched_by_that_one():
    params = make_params(torch.bfloat16, SHAPES)
    first, second = AdamW(params), AdamW(params)
    train(params, first, 1)
    second.state = first.state
    train(params, second, 1)
    old = second.state[params[1]]["exp_avg_sq"]
    second.state[params[1]]["exp_avg_sq"] = torch.full_like(old, 9)
    twins, twin = copy.deepcopy((params, second))
    train(params, second, 1, first=5)
    train(twins, twin, 1, first=5)
    assert all(map(torch.equal, params, twins))


def test_the_dictionary_stays_the_same_object():
    """Wrappers around an optimizer hold on to its `state`."""
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params)
    state = optimizer.state
    train(params, optimizer, 2)
    assert optimizer.state is state
    state.clear()
    train(params, optimizer, 1)
    assert optimizer.state is state
    assert all(state[p]["step"] == 1 for p in params)


def test_an_optimizer_is_freed_without_the_cycle_collector():
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params)
    train(params, optimizer, 2)
    old, state = tensors_of(optimizer), optimizer.state
    gc.disable()
    try:
        del optimizer
        del state
        assert not any(tensor() is not None for tensor in old)
    finally:
        gc.enable()


def test_a_step_that_fails_holds_no_gradients(monkeypatch):
    """Out of memory, say: whoever catches it and frees the gradients has them freed."""
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "_gradient_factor", fail)
        for param in params:
            param.grad = torch.ones_like(param)
        gradients = [weakref.ref(param.grad.untyped_storage()) for param in params]
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert not any(gradient() for gradient in gradients)
    train(params, optimizer, 1)


def test_a_parameter_cut_where_it_lies_is_noticed():
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)
    params[1].data = params[1].data[:2]
    params[1].grad = None  # of the old shape
    with pytest.raises((ValueError, RuntimeError)):
        train(params, optimizer, 1)
