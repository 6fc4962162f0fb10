"""What is kept for a parameter: its tensors, first values, checks; state dicts; and states that others write to."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from overcoat import AdamW, release_gradients
from overcoat.formats.moments import MOMENT_CODES
from overcoat.optim.state import (
    Home,
    check_state,
    init_state,
    restore_state,
    state_fields,
)
from tests.optim.harness import assert_same_bits, make_params, snapshot, train


def options(moments=("ratio8", "log8"), group_size=128, master="auto"):
    return {"moments": moments, "group_size": group_size, "master": master}


@pytest.mark.parametrize(
    "moments", [("ratio8", "log8"), *((name, name) for name in MOMENT_CODES if name not in ("ratio8", "log8"))]
)
@pytest.mark.parametrize("shape", [(), (300,), (4, 200), (0, 7)])
def test_a_new_state_has_the_fields_and_their_first_values(moments, shape):
    param = torch.randn(shape).bfloat16()
    group = options(moments)
    state, fields = init_state(param, group), state_fields(param, group)
    assert list(state) == list(fields)
    for name, value in state.items():
        assert (tuple(value.shape), value.dtype) == (fields[name].shape, fields[name].dtype)
        assert (value.float() == fields[name].fill).all()
    check_state(state, param, group, 0, "")


def test_offload_keeps_all_but_the_step_count_in_host_memory():
    param, saved = torch.zeros(4, 200, device="meta"), init_state(torch.zeros(4, 200), options())
    for offload, elsewhere in ((False, "meta"), (True, "cpu")):
        home = Home(param.device, offload)
        for state in (init_state(param, options(), home), restore_state(saved, param, home)):
            assert state["step"].device.type == "meta"
            assert {value.device.type for name, value in state.items() if name != "step"} == {elsewhere}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_exp_avg_sq": torch.zeros(3)}, r"parameter 5 has \[.*moments=\('ratio8', 'log8'\) and master='auto' has"),
        ({"remainder": None}, r"parameter 5 has \[.*do this"),
        ({"exp_avg": torch.zeros(4, 201, dtype=torch.int8)}, r"'exp_avg' of parameter 5 is torch.int8 \(4, 201\)"),
        ({"exp_avg": torch.zeros(4, 200, dtype=torch.uint8)}, r"expected torch.int8 \(4, 200\); do this"),
        ({"exp_avg_sq_scale": torch.zeros(4, 13, dtype=torch.int32)}, r"expected torch.int32 \(4, 2\)"),
        ({"step": torch.zeros(1)}, r"'step' of parameter 5 is torch.float32 \(1,\), expected torch.float32 \(\)"),
        ({"step": 3}, "'step' of parameter 5 is a int, expected a tensor"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    param = torch.zeros(4, 200, dtype=torch.bfloat16)
    state = {**init_state(param, options()), **change}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        check_state(state, param, options(), 5, "do this")


# ---- state dicts: torch's hooks see whole states, before and after, and may change them -----------------------


SHAPES = [(300,), (4, 200), (3, 128)]


FIELDS = {"step", "exp_avg", "exp_avg_amax", "exp_avg_sq", "exp_avg_sq_scale", "remainder"}


def trained(steps=2, **options):
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params, lr=1e-2, **options)
    train(params, optimizer, steps)
    return params, optimizer


@pytest.mark.parametrize("offload", [False, True])
def test_hooks_may_change_what_is_saved_and_loaded(offload):
    _, optimizer = trained(offload=offload)
    plain = optimizer.state_dict()
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "state": {}, "packed": saved["state"]})
    packed = optimizer.state_dict()
    assert packed["state"] == {}
    others = make_params(torch.bfloat16, SHAPES)
    other = AdamW(others, offload=offload)
    other.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "state": saved["packed"]})
    other.register_load_state_dict_post_hook(lambda of: of.state[others[0]]["step"].add_(5))
    other.load_state_dict(packed)
    for (index, state), loaded in zip(plain["state"].items(), other.state.values()):
        assert_same_bits([state["step"] + (5 if index == 0 else 0)], [loaded["step"]])
        names = FIELDS - {"step"}
        assert_same_bits([state[name] for name in names], [loaded[name] for name in names])
    train(others, other, 1)
    assert other.state[others[0]]["step"] == 8


def test_a_refused_state_dict_changes_nothing():
    params, optimizer = trained()
    before, saved = snapshot(params, optimizer), optimizer.state_dict()
    for spoil in (
        lambda spoilt: spoilt["state"][1].pop("remainder"),
        lambda spoilt: spoilt["param_groups"].append(spoilt["param_groups"][0]),
        lambda spoilt: spoilt["param_groups"][0]["params"].pop(),
    ):
        spoilt = copy.deepcopy(saved)
        spoil(spoilt)
        with pytest.raises(ValueError, match=r"remainder|parameter group"):
            optimizer.load_state_dict(spoilt)
        assert_same_bits(before, snapshot(params, optimizer))


# ---- states are the user's ----------------------------------------------------------------------------------


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


def move_each(optimizer):
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: value.clone() for name, value in state.items()}


def take_out(optimizer):
    while optimizer.state:
        optimizer.state.popitem()


def storages_of(optimizer):
    return [weakref.ref(value.untyped_storage()) for state in optimizer.state.values() for value in state.values()]


def released_model(device, **options):
    model = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 8)).to(device, torch.bfloat16)
    optimizer = AdamW(model.parameters(), **options)
    release_gradients(model, optimizer, batch_bytes=500)
    return model, optimizer


def released_step(model, optimizer):
    model(torch.ones(2, 16, device=next(model.parameters()).device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("disturb", [clear_all, clear_each, delete_each, copy_each, move_each, take_out])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_what_is_taken_out_is_freed_at_once_or_offloaded_at_the_next_step(
    disturb, offload, released, device, monkeypatch
):
    if released:
        model, optimizer = released_model(device, offload=offload)
    else:
        params = make_params(torch.bfloat16, SHAPES, device=device)
        optimizer = AdamW(params, offload=offload)

    def take_steps(count):
        for _ in range(count):
            released_step(model, optimizer) if released else train(params, optimizer, 1)

    take_steps(2)
    optimizer.state_dict()
    old = storages_of(optimizer)
    assert len(old) == (24 if released else 18)
    gc.disable()  # not only when cycles are collected
    try:
        disturb(optimizer)
        if not offload:
            assert not any(storage() is not None for storage in old)
        alive, place = [], optimizer._place_state

        def spy(*args):
            alive.append(any(storage() is not None for storage in old))
            place(*args)

        monkeypatch.setattr(optimizer, "_place_state", spy)
        take_steps(1)
        assert alive == [False] * len(optimizer.state)
    finally:
        gc.enable()
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [3 if disturb in (copy_each, move_each) else 1] * len(steps)


def test_what_is_no_tensor_is_named():
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params)
    for name, value in (("exp_avg", None), ("other", 1)):
        train(params, optimizer, 1)
        kept = dict(optimizer.state[params[1]])
        optimizer.state[params[1]][name] = value
        with pytest.raises(ValueError, match=name):
            train(params, optimizer, 1)
        optimizer.state[params[1]] = kept
    train(params, optimizer, 1)
    assert optimizer.state[params[1]]["step"] == 3


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


def test_a_step_that_fails_holds_no_gradients(monkeypatch):
    """Out of memory, say: whoever catches it and frees the gradients has them freed."""
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params, lr=1e-2)
    train(params, optimizer, 1)

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("overcoat.optim.adamw.norm_of", fail)
        for param in params:
            param.grad = torch.ones_like(param)
        gradients = [weakref.ref(param.grad.untyped_storage()) for param in params]
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert not any(gradient() for gradient in gradients)
    train(params, optimizer, 1)
