"""train.epochs: as many steps as pass over the data so often, in a run, a stopped one, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from overcoat import cli
from overcoat.train.checks import with_steps
from overcoat.train.config import Config
from overcoat.train.configfile import build_config, load_config
from overcoat.train.data import ChatRows, PackedRows
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run_once
from overcoat.train.summary import summarize
from tests.train.conftest import TINY
from tests.train.runs import assert_same_run, losses, stop_at

WITHOUT_STEPS = {**TINY, "train": {key: value for key, value in TINY["train"].items() if key != "steps"}}


def configured(*words: str) -> Config:
    return build_config(WITHOUT_STEPS, ["data.files=x", *words])


@pytest.mark.parametrize(
    ("words", "rows", "steps"),
    [
        ("train.epochs=3 train.batch_size=4", 8, 6),
        ("train.epochs=3 train.batch_size=4 train.accumulation=2", 9, 4),  # the last step is whole
        ("train.epochs=1.1 train.batch_size=1", 10, 11),  # in binary 1.1 x 10 is above 11
        ("train.epochs=0.5 train.batch_size=2 schedule.warmup_steps=0.5", 3, 1),
        ("train.epochs=2 train.batch_size=auto train.global_batch_size=6 train.memory_limit_gib=1", 9, 3),
        ("train.steps=5", 9, 5),
        ("train.epochs=2 train.steps=5", 9, 5),  # the last argument
    ],
)
def test_steps_of_epochs(words: str, rows: int, steps: int) -> None:
    """Whatever the rows of a forward pass are: batch plans and processes share the rows of a step."""
    assert with_steps(configured(*words.split()), rows).train.num_steps == steps


@pytest.mark.parametrize("words", ["schedule.warmup_steps=6", "schedule.kind=wsd schedule.decay_steps=5"])
def test_a_schedule_that_is_longer_is_refused(words: str) -> None:
    config = configured("train.epochs=3", "train.batch_size=4", *words.split())
    with pytest.raises(ValueError, match=r"schedule\..*_steps = .*train\.epochs = 3 \(6 steps\)"):
        with_steps(config, 8)


@pytest.mark.parametrize("kind", [PackedRows, ChatRows])
def test_every_epoch_has_the_same_rows(kind: Any) -> None:
    """Which the number of steps stands on; and every token is read `passes` times."""
    lengths = np.random.default_rng(0).integers(3, 16, 30)
    ends = np.cumsum(lengths)
    table = np.stack([ends - lengths, ends, np.arange(30)], axis=1)
    tokens = np.arange(ends[-1])
    rows = kind(tokens, table, 16, 0, 0) if kind is ChatRows else kind(tokens, table[:, :2], 16, 0)
    first = rows.num_rows
    rows.next_rows(3 * first)
    assert (rows.num_rows, rows.passes) == (first, 3.0)


def test_a_run_of_epochs_is_one_of_steps(corpus_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, width=120)
    shared = [f"data.files={corpus_files}", f"data.cache_dir={tmp_path / 'data'}", "train.batch_size=12"]

    def train(name: str, *words: str) -> Any:
        config = build_config(WITHOUT_STEPS, [*shared, f"train.run_dir={tmp_path / name}", *words])
        result = run_once(config, console, name)
        summarize([result], tmp_path / name, console)
        return result

    whole = train("epochs", "train.epochs=1.5")
    assert whole.passes == pytest.approx(1.5, abs=12 / 2 / whole.steps)
    assert f"{whole.steps} steps are 1." in (text := console.export_text())
    assert "1.5 passes\n" in text
    train("steps", f"train.steps={whole.steps}")
    assert losses(tmp_path / "epochs") == losses(tmp_path / "steps")
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(RunStoppedError):
            train("stopped", "train.epochs=1.5")
    recorded = load_config(tmp_path / "stopped/config.toml").train
    assert (recorded.epochs, recorded.steps) == (1.5, None)
    train("stopped", "train.epochs=1.5")
    assert_same_run(tmp_path / "stopped", tmp_path / "epochs")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "epochs"), str(tmp_path / "steps"), "-o", str(page)]) == 0
    assert f"{whole.steps} of 1.5 epochs" in page.read_text()
    assert "<td>passes over the data</td><td>1.5</td><td>1.5</td>" in page.read_text()
