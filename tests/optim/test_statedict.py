"""State dicts go through torch's own hooks: they see whole states, before and after, and may change them."""

import copy

import pytest
import torch

from overcoat import AdamW
from tests.optim.harness import assert_same_bits, make_params, snapshot, train

SHAPES = [(300,), (4, 200)]
FIELDS = {"step", "exp_avg", "exp_avg_amax", "exp_avg_sq", "exp_avg_sq_scale", "remainder"}


def trained(steps=2, **options):
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params, lr=1e-2, **options)
    train(params, optimizer, steps)
    return params, optimizer


def test_a_loaded_state_stays_the_dictionary_that_it_is():
    params, optimizer = trained()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [optimizer.state[param] for param in params]
    train(params, optimizer, 1)
    assert all(optimizer.state[param] is state for param, state in zip(params, states))


@pytest.mark.parametrize("offload", [False, True])
def test_hooks_see_whole_states(offload):
    _, optimizer = trained(offload=offload)
    other = AdamW(make_params(torch.bfloat16, SHAPES), offload=offload)
    seen = {}

    def look(name):
        def hook(of, state_dict=None):
            states = of.state if state_dict is None else state_dict["state"]
            seen[name] = [set(state) for state in states.values()]

        return hook

    optimizer.register_state_dict_pre_hook(look("before saving"))
    optimizer.register_state_dict_post_hook(look("saved"))
    other.register_load_state_dict_pre_hook(look("to load"))
    other.register_load_state_dict_post_hook(look("loaded"))
    other.load_state_dict(optimizer.state_dict())
    assert seen == {name: [FIELDS, FIELDS] for name in ("before saving", "saved", "to load", "loaded")}


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


def test_hooks_of_ours_do_not_stay():
    _, optimizer = trained()
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(make_params()).state_dict())
    assert not any(getattr(optimizer, f"_optimizer_{name}_hooks") for name in hooks)


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


def test_a_state_that_was_only_asked_for_is_none():
    """`optimizer.state[param]` leaves an empty dictionary, as in torch."""
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = AdamW(params)
    assert optimizer.state[params[0]] == {}
    saved = optimizer.state_dict()
    assert saved["state"] == {0: {}}
    train(params, optimizer, 1)
    optimizer.load_state_dict(saved)
    assert not any(optimizer.state.values())
    train(params, optimizer, 1)
    assert optimizer.state[params[0]]["step"] == 1


def test_what_others_keep_in_the_state_is_kept():
    _, optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"]["averaged"] = {"since": 3}
    optimizer.load_state_dict(saved)
    assert optimizer.state["averaged"] == {"since": 3}
    assert optimizer.state_dict()["state"]["averaged"] == {"since": 3}


@pytest.mark.parametrize("stepped", [False, True])
def test_an_offloaded_state_dict_is_a_copy(stepped):
    params, optimizer = trained(offload=True)
    optimizer.load_state_dict(optimizer.state_dict())
    if stepped:
        train(params, optimizer, 1)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    train(params, optimizer, 1)
    for index, state in kept["state"].items():
        assert_same_bits(list(state.values()), list(saved["state"][index].values()))
