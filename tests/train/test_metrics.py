"""metrics.jsonl as a killed process leaves it, TensorBoard, peaks of memory, and what is said meanwhile."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat.train import metrics
from overcoat.train.config import Config
from overcoat.train.metrics import peak_bytes, read_metrics
from tests.train.test_loop import row

MakeConfig = Callable[..., Config]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Config:
    """A run whose directory is there, as `MetricsLog` demands."""
    (tmp_path / "run").mkdir()
    return make_config()


def written(path: Path, *lines: object) -> dict[str, Any]:
    """What `read_metrics` makes of these lines, rows or raw text."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return read_metrics(path)


def test_metrics_forget_what_a_dead_process_logged_after_its_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    config = make_config()
    path = tmp_path / "run/metrics.jsonl"
    log = MetricsLog(config, 0)
    log.write(row(1), row(2), {"kind": "eval", "step": 2, "loss": 5.0}, row(3, loss=9.0))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log = MetricsLog(config, 2)
    log.write(row(3, loss=3.0))
    log.close()
    found = read_metrics(path)
    assert {step: r["loss"] for step, r in found["train"].items()} == {1: 1.0, 2: 1.0, 3: 3.0}
    assert found["eval"][2]["loss"] == 5.0
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines() if "resume" in line] == ["resume"]


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (1234, "1.23 KB"), (5_678_000, "5.68 MB"), (123.4e9, "123 GB")]
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_peak_of_a_run_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report starts PyTorch's counter anew; the run's own figure must not fall."""
    device = torch.device("cuda", 0)
    counter = {"peak": 70}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: counter["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: counter.update(peak=10))
    monkeypatch.setattr(metrics, "_earlier_peaks", {})
    assert metrics.restart_peak(device) == 70
    assert metrics.peak_bytes(device) == 70
    counter["peak"] = 50
    assert metrics.restart_peak(device) == 50
    assert metrics.peak_bytes(device) == 70
    counter["peak"] = 90
    assert metrics.peak_bytes(device) == 90
    metrics.forget_peak(device)
    assert metrics.peak_bytes(device) == 10


def test_a_file_in_which_nothing_was_written_is_a_run_of_no_steps(tmp_path: Path) -> None:
    assert written(tmp_path / "m.jsonl", "") == {"train": {}, "eval": {}, "fit": {}}


@pytest.mark.parametrize(
    "torn", ['{"kind": "train", "st', '{"kind": "train", "step": 2, "loss": 1.', "\x00\x00\x00", ""]
)
def test_a_line_cut_off_is_skipped_wherever_it_is(tmp_path: Path, torn: str) -> None:
    resume = {"kind": "resume", "step": 1}
    found = written(tmp_path / "m.jsonl", row(1), f"{torn}\n", resume, row(2, loss=3.0), torn)
    assert {step: r["loss"] for step, r in found["train"].items()} == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize(
    "line",
    ['{"kind": "lost", "step": 2}', '{"step": 2}', '{"kind": "eval", "step": 2}', '{"kind": "resume"}', "[1]", "5"],
)
def test_a_row_of_another_kind_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        ValueError, match=rf"m\.jsonl, line 2: not a row that overcoat wrote: '{re.escape(line)}'; remove"
    ):
        written(tmp_path / "m.jsonl", row(1), f"{line}\n")


def test_bytes_that_are_no_text_are_a_line_cut_off(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(json.dumps(row(1)).encode() + b'\n{"kind": "\xff\n')
    assert list(read_metrics(tmp_path / "m.jsonl")["train"]) == [1]


def test_resuming_forgets_later_rows_but_not_fits(tmp_path: Path) -> None:
    evaluation, fit = (
        {"kind": "eval", "step": 3, "loss": 5.0},
        {"kind": "fit", "step": 3, "micro_batch": 1, "block_checkpoints": False},
    )
    rows = [row(step) for step in (1, 2, 3, 4)]
    found = written(tmp_path / "m.jsonl", *rows, evaluation, fit, {"kind": "resume", "step": 2})
    assert list(found["train"]) == [1, 2]  # the step of the checkpoint itself has been taken
    assert found["eval"] == {}
    assert found["fit"] == {3: fit}
    again = written(tmp_path / "m.jsonl", *rows, {"kind": "resume", "step": 3}, {"kind": "resume", "step": 0})
    assert again["train"] == {}  # back to the beginning


def test_a_log_is_appended_to_and_says_where_it_goes_on(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run/metrics.jsonl"
    log = MetricsLog(config, 0)
    assert path.read_text() == ""  # a first start is no resumption
    log.write(row(1))
    before = path.read_text()
    assert json.loads(before) == row(1)  # on the disk at once: whoever is killed now has logged it
    log.close()
    MetricsLog(config, 1).close()
    assert path.read_text() == before + '{"kind": "resume", "step": 1}\n'  # no empty line where none was cut off


def test_tensorboard_gets_the_numbers_and_no_skipped_norm(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    opened: list[tuple[Path, int]] = []
    scalars: list[tuple[str, float, int]] = []

    def writer(folder: Path, purge_step: int) -> SimpleNamespace:
        opened.append((folder, purge_step))
        return SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar), close=lambda: None)

    monkeypatch.setattr(metrics, "load_extra", lambda *_: SimpleNamespace(SummaryWriter=writer))
    log = MetricsLog(make_config("train.tensorboard=true"), 6)
    log.write({**row(7), "gradient_norm": None}, {"kind": "eval", "step": 7, "loss": 2.0})
    log.close()
    assert opened == [(tmp_path / "run/tensorboard", 6)]  # events after step 6 are of a process that died
    figures = [("train/tokens_per_second", 9.5, 7), ("train/peak_bytes", 7, 7)]
    assert scalars == [("train/loss", 1.0, 7), *figures, ("eval/loss", 2.0, 7)]


@pytest.mark.parametrize(("platform", "expected"), [("linux", 3 * 1024), ("darwin", 3)])
def test_the_peak_of_a_process_is_in_bytes_everywhere(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: int
) -> None:
    monkeypatch.setattr(metrics.sys, "platform", platform)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=3))
    assert peak_bytes(torch.device("cpu")) == expected


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_line_per_report_where_no_bar_can_be(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=is_terminal)
    report = ProgressReport(console, "[bold] run", 12, 0)
    report.update(6, {"loss": 1.25, "tokens_per_second": 12345.6, "peak_bytes": 2.5e9})
    report.close()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    line = "[bold] run  step 6/12  loss 1.2500  12,346 tok/s  peak 2.5 GB\n"  # neither wrapped nor read as markup
    assert printed == line if not is_terminal else line not in printed
