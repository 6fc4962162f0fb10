"""`[eval] tasks` of a run: a task made here, through the real lm-evaluation-harness, in one process and in two."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from overcoat import cli
from overcoat.train import evaluate
from overcoat.train.config import Config
from overcoat.train.metrics import read_metrics
from overcoat.train.run import load_tasks, run_once
from tests.eval.conftest import WORDS, write_task
from tests.processes import on_two
from tests.train.runs import MakeConfig, losses, text_of

CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices"
ROWS = [{"question": f"{a} {b}", "choices": [a, b, "import"], "label": 2} for a, b in itertools.pairwise(WORDS)]


def figures(folder: Path) -> dict[int, dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")["tasks"]


def test_tasks_are_evaluated_when_due_and_leave_the_training_as_it_is(
    make_config: MakeConfig, tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, "tiny", ROWS, CHOICE, "acc")
    words = ["train.steps=6", "checkpoint.every=2", f"data.cache_dir={tmp_path / 'data'}"]
    plain = make_config(*words, f"train.run_dir={tmp_path / 'plain'}")
    run_once(plain, console, "plain")
    config = make_config(*words, f"eval.tasks={task}", "eval.tasks_every=4", "train.fp8_every=3")
    result, run = run_once(config, console, "tasks"), Path(config.train.run_dir)
    found = figures(run)
    assert list(found) == [4, 6]
    for kind in ("train", "eval"):
        assert losses(run)[kind] == losses(tmp_path / "plain")[kind]
    samples = read_metrics(run / "metrics.jsonl")["fp8"]
    assert list(samples) == [3, 6]
    assert all(len(layer) == 4 for sample in samples.values() for layer in sample["ranges"].values())
    assert result.tasks == {key: found[6][key] for key in ("tiny/acc", "tiny/acc_stderr")}
    assert f"step 6  tiny/acc {found[6]['tiny/acc']:.4f}" in text_of(console)
    capsys.readouterr()  # what libraries said meanwhile
    assert cli.main(["eval", str(run), "--tasks", str(task), "--json", "--device", "cpu", "--batch", "2"]) == 0
    (evaluated,) = json.loads(capsys.readouterr().out)["results"]
    assert evaluated["tasks"]["tiny"]["acc"] == result.tasks["tiny/acc"]
    # Whoever was ended between the checkpoint and the evaluation makes up for it.
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("".join(line + "\n" for line in lines if not ('"tasks"' in line and '"step": 6' in line)))
    assert list(figures(run)) == [4]
    run_once(config, console, "again")
    assert figures(run) == found


def _run(_rank: int, config: Config) -> None:
    run_once(config, Console(quiet=True), "two")


def test_two_processes_find_what_one_finds(make_config: MakeConfig, tmp_path: Path, console: Console) -> None:
    task = write_task(tmp_path, "tiny", ROWS, CHOICE, "acc")
    words = ["train.steps=3", f"eval.tasks={task}", f"data.cache_dir={tmp_path / 'data'}", "optimizer.lr=1e-9"]
    one, two = (make_config(*words, f"train.run_dir={tmp_path / name}") for name in ("one", "two"))
    run_once(one, console, "one")
    on_two(_run, "cpu", two)
    assert figures(tmp_path / "two") == figures(tmp_path / "one")
    assert list(figures(tmp_path / "two")) == [3]


def test_fewer_rows_where_memory_runs_out(
    make_config: MakeConfig, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def evaluated(_self: Any, _model: Any, _tokenizer: Any, rows: int, _limit: Any) -> Any:
        sizes.append(rows)
        if rows > 1:
            raise evaluate.torch.OutOfMemoryError("CUDA out of memory.")
        return [("tiny", {"acc": 0.25})]

    monkeypatch.setattr(evaluate.Tasks, "evaluate", evaluated)
    task = write_task(tmp_path, "tiny", ROWS, CHOICE, "acc")
    config = make_config("train.steps=3", "train.batch_size=4", f"eval.tasks={task}")
    assert run_once(config, console, "short").tasks == {"tiny/acc": 0.25}
    assert sizes == [4, 2, 1]


def test_tasks_that_are_nowhere_are_named_by_their_key(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus: Any = SimpleNamespace(tokenizer=object())
    # The harness lists the thousands of tasks beside this file, for 6 seconds.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))
    with pytest.raises(ValueError, match=r"^eval\.tasks: task 'nothing': no task of lm-eval"):
        load_tasks(make_config("eval.tasks=nothing"), corpus)
