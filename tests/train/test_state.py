"""Everything that changes while training, saved and put back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from overcoat.train.loop import train_step
from overcoat.train.state import TrainState, rng_state, set_rng_state
from tests.train.runs import EXACT, MakeConfig, make_state


def test_generators_go_on_in_the_middle_of_a_draw(tmp_path: Path) -> None:
    """NumPy's and Python's Gaussian draws come in pairs, of which one may be waiting; all of it is in a file."""
    import random

    random.gauss(0, 1), np.random.randn()
    torch.save(rng_state(), tmp_path / "rng.pt")
    drawn = [random.gauss(0, 1), np.random.randn(), np.random.rand()]
    random.seed(5), np.random.seed(5)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [random.gauss(0, 1), np.random.randn(), np.random.rand()] == drawn


def saved_and_loaded(state: TrainState, other: TrainState, path: Path) -> TrainState:
    """`other` with the weights of `state` and what a checkpoint holds of it."""
    torch.save(state.training_dict(), path)
    generator = torch.get_rng_state()
    torch.rand(3)  # somebody else draws
    other.model.load_state_dict(state.model.state_dict())
    other.load_training_dict(torch.load(path, weights_only=True))
    assert torch.equal(torch.get_rng_state(), generator)
    return other


def test_a_loaded_state_takes_the_very_next_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*EXACT, "model.config.attention_dropout=0.5")
    state = make_state(config)
    for _ in range(3):
        train_step(state, config)
    other = saved_and_loaded(state, make_state(config), tmp_path / "training.pt")
    assert (other.step, other.num_tokens, other.kept_bytes) == (3, 3 * 2 * 32, state.kept_bytes)
    assert other.drawn is None
    generators = rng_state()
    expected = train_step(state, config)
    set_rng_state(generators)
    found = train_step(other, config)
    assert torch.equal(found.loss, expected.loss)
    for mine, theirs in zip(other.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_the_configuration_says_anew_wins_over_the_checkpoint(make_config: MakeConfig, tmp_path: Path) -> None:
    state = make_state(make_config(*EXACT))
    changed = ("optimizer.weight_decay=0.5", "optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-3")
    other = saved_and_loaded(state, make_state(make_config(*EXACT, *changed)), tmp_path / "training.pt")
    groups = other.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # each group its own: norms do not decay
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-3)}


def test_rows_of_an_unfinished_step_are_saved_with_it(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    state.drawn = state.rows.next_rows(2)
    other = saved_and_loaded(state, make_state(config), tmp_path / "training.pt")
    assert other.drawn is not None
    assert np.array_equal(other.drawn, state.drawn)
    saved = state.training_dict()
    del saved["drawn"]  # as earlier versions wrote it
    other.load_training_dict(saved)
    assert other.drawn is None
