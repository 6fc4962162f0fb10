"""Arguments of a step that are kept from step to step: options checked, parts picked, the op called as it wants it."""

import math
from types import SimpleNamespace

import pytest
import torch

from overcoat.formats.moments import MOMENT_CODES
from overcoat.kernels.adamw import adamw_step_
from overcoat.optim import arguments as module
from overcoat.optim.arguments import STATE_LISTS, Arguments, Hyper, check_hyperparameters
from overcoat.optim.state import init_state, state_fields
from tests.optim.harness import assert_same_bits, make_params

GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "moments": ("sqrt8", "log8"),
    "master": "auto",
    "group_size": 128,
    "seed": 0,
}


def make(shapes=((4, 200), (300,), (2, 3)), dtype=torch.bfloat16, master="bf16+8", moments=("sqrt8", "log8")):
    """Arguments of fresh states, and gradients."""
    params = [p.detach() for p in make_params(dtype, shapes)]
    group = {**GROUP, "moments": moments}
    states = [init_state(param, group) for param in params]
    lists = {name: [state[key] for state in states if key in state] for name, key in STATE_LISTS.items()}
    keys, first_groups = [11 + i for i in range(len(params))], [5 * i for i in range(len(params))]
    grads = [torch.randn_like(p) for p in make_params(dtype, shapes, seed=1)]
    return Arguments(params, lists, keys, first_groups, master, 128, {}), grads


def copied(of):
    return of._replace(
        params=[param.clone() for param in of.params],
        states={name: [value.clone() for value in values] for name, values in of.states.items()},
        weight_amax={place: amax.clone() for place, amax in of.weight_amax.items()},
    )


def tensors(of, i):
    """Parameter i and its state."""
    return [of.params[i], *(values[i] for values in of.states.values() if values)]


def scalars(skip=False):
    return torch.tensor(1e-2), torch.tensor(0.5), torch.tensor(skip)


# ---- options --------------------------------------------------------------------------------------------


def test_hyperparameters_of_a_group():
    assert Hyper.of(GROUP) == (0.9, 0.99, 1e-8, 0.1, "sqrt8", "log8")
    assert Hyper.of(GROUP)._asdict()["m_code"] == "sqrt8"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "seed": -1},
        {"lr": torch.tensor(-1.0), "group_size": 16},
        {"lr": torch.tensor([1e-3]), "betas": [0.9, 0.999999]},
        {"lr": 1, "seed": 2**40},
    ],
)
def test_options_within_their_ranges_are_taken(options):
    check_hyperparameters({**GROUP, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1e-9}, "lr -1e-09 must be a number >= 0"),
        ({"lr": math.inf}, "lr inf"),
        ({"lr": math.nan}, "lr nan"),
        ({"lr": torch.ones(2, 3)}, r"lr is a tensor of shape \(2, 3\); it must have one element"),
        ({"lr": torch.ones(0)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\) must be two numbers in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (math.nan, 0.9)}, "betas"),
        ({"betas": (0.9, 0.99, 0.999)}, "two numbers"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"eps": -1e-8}, "eps -1e-08"),
        ({"eps": math.inf}, "eps inf"),
        ({"eps": math.nan}, "eps nan"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"weight_decay": math.inf}, "weight_decay inf"),
        ({"weight_decay": math.nan}, "weight_decay nan"),
        ({"group_size": 0}, "group_size 0 must be one of 16, 32, 64, 128"),
        ({"group_size": "128"}, "group_size '128'"),
        ({"seed": 0.5}, "seed 0.5 must be an integer"),
        ({"seed": None}, "seed None"),
    ],
)
def test_options_out_of_their_ranges_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        check_hyperparameters({**GROUP, **options})


def test_lists_name_every_tensor_that_a_state_can_have():
    kept = set()
    for name, code in MOMENT_CODES.items():
        moments = ("sqrt8" if name == "log8" else code.name, name)
        kept |= set(state_fields(torch.zeros(2, 3).bfloat16(), {**GROUP, "moments": moments}))
    assert kept == set(STATE_LISTS.values())


# ---- parts ----------------------------------------------------------------------------------------------


def test_a_part_has_what_belongs_to_its_parameters():
    whole, _ = make()
    whole = whole._replace(weight_amax={0: torch.tensor(1.0), 2: torch.tensor(2.0)})
    part = whole.part([2, 1])
    assert [id(param) for param in part.params] == [id(whole.params[2]), id(whole.params[1])]
    for name, values in whole.states.items():
        assert [id(value) for value in part.states[name]] == ([id(values[2]), id(values[1])] if values else [])
    assert (part.keys, part.first_groups) == ([13, 12], [10, 5])
    assert part.weight_amax == {0: whole.weight_amax[2]}
    assert (part.master, part.group_size) == (whole.master, whole.group_size)
    assert whole.states["exponent"] == []
    assert part.device == whole.device


# ---- calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [("sqrt8", "log8"), ("e4m3x", "de8x"), ("bf16", "fp32")])
def test_a_call_is_one_of_the_op(moments):
    ours, grads = make(moments=moments)
    theirs, hyper = copied(ours), Hyper.of({**GROUP, "moments": moments})
    ours.call(grads, *scalars(), hyper)
    of = theirs.states
    adamw_step_(
        theirs.params, grads, of["exp_avg"], of["amax"], of["exponent"], of["exp_avg_sq"], of["scale"],
        of["remainder"], of["step"], *scalars(), 0.9, 0.99, 1e-8, 0.1, *moments, "bf16+8", 128, [11, 12, 13],
        [0, 5, 10],
    )  # fmt: skip
    for i in range(3):
        assert_same_bits(tensors(ours, i), tensors(theirs, i))
    assert all(step == 1 for step in ours.states["step"])


def test_flags_for_each_parameter_skip_some():
    """Those skipped keep every byte, the others step as they do together."""
    start, grads = make()
    start = start._replace(weight_amax={place: torch.tensor(-1.0) for place in (0, 1)})
    together, single, hyper = copied(start), copied(start), Hyper.of(GROUP)
    together.call(grads, *scalars(), hyper)
    single.call(grads, *scalars([True, False, False]), hyper)
    assert_same_bits(tensors(single, 0), tensors(start, 0))
    for i in (1, 2):
        assert_same_bits(tensors(single, i), tensors(together, i))
    assert single.weight_amax[0] == -1.0
    assert single.weight_amax[1] == single.params[1].abs().max()


def test_a_call_finds_the_maxima_that_are_wanted():
    of, grads = make()
    of = of._replace(weight_amax={0: torch.tensor(0.0), 2: torch.tensor(0.0)})
    of.call(grads, *scalars(), Hyper.of(GROUP))
    assert {place: amax.item() for place, amax in of.weight_amax.items()} == {
        place: of.params[place].abs().max().item() for place in (0, 2)
    }
    before = {place: amax.clone() for place, amax in of.weight_amax.items()}
    of.params[0].fill_(99.0)
    of.call(grads, *scalars(True), Hyper.of(GROUP))
    assert of.weight_amax == before


def test_the_kernel_runs_on_contiguous_parameters_where_there_is_one(monkeypatch):
    plain, _ = make(shapes=((4, 200), (2, 3)))
    strided = plain._replace(params=[plain.params[0], plain.params[1].t()])
    for launcher, expected in (
        (None, False),
        (SimpleNamespace(INTERPRETED=False), False),
        (SimpleNamespace(INTERPRETED=True), True),
    ):
        monkeypatch.setattr(module, "adamw_launch", launcher)
        assert plain.kernel_runs() == expected
        assert not strided.kernel_runs()
