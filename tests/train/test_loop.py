"""The schedule against its closed forms, one optimizer step and one evaluation against plain PyTorch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from overcoat.train import loop
from overcoat.train.config import Config, ScheduleConfig
from overcoat.train.data import make_batch
from overcoat.train.loop import evaluate, multiplier, train_step
from overcoat.train.metrics import read_metrics
from overcoat.train.run import run_once
from overcoat.train.state import TrainState, rng_state, set_rng_state
from tests.train.runs import EXACT, OLMOE, MakeConfig, make_state


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warmup_rises_linearly_to_the_peak(kind: Any) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=4, final_ratio=0.1)
    assert [multiplier(schedule, step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "warmup", "decay", "final", "steps", "expected"),
    [
        ("cosine", 10, 0, 0.2, 110, {60: 0.6, 35: 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, 110: 0.2, 500: 0.2}),
        ("linear", 0, 0, 0.0, 4, {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25, 4: 0.0, 9: 0.0}),
        ("wsd", 2, 4, 0.5, 10, {0: 0.5, 1: 1.0, 2: 1.0, 6: 1.0, 7: 0.875, 8: 0.75, 9: 0.625}),
        ("wsd", 0, 0, 0.0, 10, {7: 1.0, 8: 1.0, 9: 0.5, 10: 0.0}),  # a fifth by default
        ("wsd", 9, 0, 0.0, 10, {8: 1.0, 9: 1.0, 10: 0.0}),  # but never within the warm-up
        ("constant", 2, 0, 0.0, 10, {1: 1.0, 9: 1.0}),
        ("wsd", 0.2, 0.4, 0.5, 10, {0: 0.5, 1: 1.0, 2: 1.0, 6: 1.0, 7: 0.875}),  # shares of all steps
        ("linear", 0.1, 0, 0.0, 9, {0: 1.0}),
    ],
)
def test_schedules(
    kind: Any, warmup: float, decay: float, final: float, steps: int, expected: dict[int, float]
) -> None:
    """A run may have been lengthened: the ratio stays at its end."""
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=decay, final_ratio=final)
    assert {step: multiplier(schedule, step, steps) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("words", [(), OLMOE], ids=["llama", "olmoe"])
def test_one_step_is_adamw_on_the_mean_gradient_with_clipping(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    config = make_config(*EXACT, *words, "optimizer.clip=0.01", "optimizer.eps=1e-3", "train.accumulation=2")
    state, other = make_state(config), make_state(config)
    record = train_step(state, config)
    batch = make_batch(other.rows.next_rows(4), 0, document_mask=False)  # both batches of two at once
    loss = F.cross_entropy(other.model(batch.input_ids).logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.01)
    decayed = [p for p in other.model.parameters() if p.ndim > 1]
    plain = [p for p in other.model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    # The first of two warm-up steps has half the peak learning rate.
    torch.optim.AdamW(groups, lr=3e-3 / 2, betas=(0.9, 0.95), eps=1e-3).step()
    torch.testing.assert_close(record.loss, loss.detach())
    torch.testing.assert_close(record.gradient_norm, norm)
    assert norm > 0.02  # clipping had something to do
    for mine, theirs in zip(state.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert record.num_tokens == 4 * 32


def test_accumulation_weighs_every_label_the_same(make_config: MakeConfig) -> None:
    """Under document_mask batches differ in the number of labels; two small ones still equal one large one."""
    small = make_config(*EXACT, "data.document_mask=true", "train.accumulation=2", "train.batch_size=1")
    large = make_config(*EXACT, "data.document_mask=true", "train.batch_size=2")
    records = [train_step(make_state(config), config) for config in (small, large)]
    torch.testing.assert_close(records[0].loss, records[1].loss)
    torch.testing.assert_close(records[0].gradient_norm, records[1].gradient_norm)


def test_evaluate_is_the_mean_over_labels_and_leaves_training_alone(make_config: MakeConfig) -> None:
    config = make_config(*EXACT, "data.document_mask=true")
    state = make_state(config)
    rows = state.rows.next_rows(5)  # batches of 2, 2 and 1
    before = rng_state()["torch"]
    loss = evaluate(state, config, rows)
    batch = make_batch(rows, 0, document_mask=True)
    with torch.no_grad():
        logits = state.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert state.model.training
    assert before == rng_state()["torch"]
    assert all(parameter.grad is None for parameter in state.model.parameters())


@pytest.mark.parametrize("word", ["num_key_value_heads=5", "attention_dropout=-1", "attention_dropout=inf"])
def test_a_first_step_that_fails_names_the_models_configuration(make_config: MakeConfig, word: str) -> None:
    config = make_config(*EXACT, f"model.config.{word}")
    with pytest.raises(ValueError, match=r"the first step of the model of \[model\.config\] fails \(RuntimeError: \w+"):
        train_step(make_state(config), config)


def test_data_that_end_in_the_middle_are_no_mistake_of_the_command(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(*EXACT)
    state = make_state(config)

    def unreadable(_: int) -> np.ndarray:
        raise ValueError("a.jsonl:7: no text")

    good = state.rows.next_rows
    monkeypatch.setattr(state.rows, "next_rows", unreadable)
    with pytest.raises(ValueError, match=r"^a\.jsonl:7: no text$"):
        train_step(state, config)
    monkeypatch.setattr(state.rows, "next_rows", good)
    train_step(state, config)
    monkeypatch.setattr(state.rows, "next_rows", unreadable)
    with pytest.raises(loop.UnreadableDataError, match=r"step 2: a\.jsonl:7: no text\. Checkpoints are as they were"):
        train_step(state, config)


@pytest.mark.parametrize("num_bad", [1, 10])
def test_a_skipped_step_alone_in_its_interval_is_survived(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch, num_bad: int
) -> None:
    real = loop.train_step

    def step(state: TrainState, config: Config) -> loop.StepRecord:
        record = real(state, config)
        if 2 <= record.step < 2 + num_bad:
            record.gradient_norm = torch.tensor(float("inf"))
        return record

    monkeypatch.setattr(loop, "train_step", step)
    config = make_config("train.log_every=1", "checkpoint.every=1")
    if num_bad == 1:
        metrics = read_metrics(Path(run_once(config, console, "run").metrics))["train"]
        assert [s for s, r in metrics.items() if r["gradient_norm"] is None] == [2]
    else:
        with pytest.raises(FloatingPointError, match="step 11: the gradients of 10 steps in a row"):
            run_once(config, console, "run")


# ---- Everything that changes while training, saved and put back -----------------------------------------------------


def test_generators_go_on_in_the_middle_of_a_draw() -> None:
    """NumPy's and Python's Gaussian draws come in pairs, of which one may be waiting; all of it is in a file."""
    import random

    random.gauss(0, 1), np.random.randn()
    saved = json.dumps(rng_state())
    drawn = [random.gauss(0, 1), np.random.randn(), np.random.rand()]
    random.seed(5), np.random.seed(5)
    set_rng_state(json.loads(saved))
    assert [random.gauss(0, 1), np.random.randn(), np.random.rand()] == drawn


def saved_and_loaded(state: TrainState, other: TrainState, path: Path) -> TrainState:
    """`other` with the weights of `state` and what a checkpoint holds of it."""
    record, tensors = state.snapshot()
    path.write_text(json.dumps(record))
    generator = torch.get_rng_state()
    torch.rand(3)  # somebody else draws
    other.model.load_state_dict(state.model.state_dict())
    other.load(json.loads(path.read_text()), tensors)
    assert torch.equal(torch.get_rng_state(), generator)
    return other


def test_a_loaded_state_takes_the_very_next_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*EXACT, "model.config.attention_dropout=0.5")
    state = make_state(config)
    for _ in range(3):
        train_step(state, config)
    other = saved_and_loaded(state, make_state(config), tmp_path / "training.json")
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
    other = saved_and_loaded(state, make_state(make_config(*EXACT, *changed)), tmp_path / "training.json")
    groups = other.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # each group its own: norms do not decay
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-3)}


def test_rows_of_an_unfinished_step_are_saved_with_it(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    state.drawn = state.rows.next_rows(2)
    other = saved_and_loaded(state, make_state(config), tmp_path / "training.json")
    assert other.drawn is not None
    assert np.array_equal(other.drawn, state.drawn)
    for change, size in (("data.sequence_length=16", 2 * 16), ("train.batch_size=1", 32)):  # so that the step fits
        changed = make_config(*EXACT, change)
        assert (
            train_step(saved_and_loaded(state, make_state(changed), tmp_path / "training.json"), changed).num_tokens
            == size
        )


@pytest.mark.parametrize("empty", [2, 10**9])
def test_rows_without_labels_are_passed_over(make_config: MakeConfig, monkeypatch: Any, empty: int) -> None:
    """Rows that hold end-of-text tokens alone have no label under data.document_mask."""
    config = make_config(*EXACT, "data.document_mask=true")
    state, other = make_state(config), make_state(config)
    draw, drawn = state.rows.next_rows, []

    def next_rows(count: int) -> np.ndarray:
        drawn.append(count)
        return np.zeros((count, 33), dtype=np.int64) if len(drawn) <= empty else draw(count)

    monkeypatch.setattr(state.rows, "next_rows", next_rows)
    monkeypatch.setattr(loop, "MOST_DRAWS", 5)
    if empty > 5:
        with pytest.raises(
            ValueError, match=r"end-of-text tokens alone, .*data\.document_mask leaves no label: remove"
        ):
            train_step(state, config)
        return
    assert float(train_step(state, config).loss) == float(train_step(other, config).loss)
    assert len(drawn) == 3
