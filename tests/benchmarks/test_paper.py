"""`benchmarks.paper`: the list, the small size of what a CPU can do, and what is said of the rest."""

from __future__ import annotations

import inspect
import json
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.paper import TABLES, memory, training
from benchmarks.paper.states import analyse, table1
from overcoat.train.loop import RunStoppedError, UnreadableDataError
from tests.eval.conftest import write_task

GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def _less_text() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products, and other work on the machine
    training.TINY["data"] = {**training.TINY["data"], "files": [str(Path(torch.__file__).parent / "nn" / "*.py")]}
    training.TINY["train"] = {**training.TINY["train"], "steps": 4, "batch_size": 2}
    training.TINY["schedule"] = {"warmup_steps": 1}
    yield
    torch.set_num_threads(before)


def test_the_list_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(TABLES)
    assert sum("full: " in line for line in lines) == len(TABLES) - 1


# The baseline, and one that differs from it most; other arms are other settings of the same training.
FEWER_ARMS = {"table3": ("--arms", "bf16", "default")}


@pytest.mark.parametrize("name", TABLES)
def test_the_small_size_runs_on_a_cpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    examples = [{"question": "def f(", "choices": ["x", ")"], "label": label} for label in (0, 1, 1)]
    how = "output_type: multiple_choice\ndoc_to_choice: choices"
    tasks = ["--tasks", str(write_task(tmp_path, "tiny", examples, how, "acc"))] if name == "table3" else []
    asked = [*tasks, *FEWER_ARMS.get(name, ())]
    assert main(["paper", name, *asked, "--json", str(rows)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    printed = capsys.readouterr().out
    assert found
    assert all(row["exhibit"] == name and row["name"] in printed for row in found)
    assert name != "table2" or [row["linear"] for row in found[-2:]] == [0, 0]  # scales alone
    assert not tasks or all(3 * row["tiny acc"] in (0, 1, 2, 3) and "tiny acc" in printed for row in found)


def test_the_full_tables_measure_what_bench_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, on a GPU: a call that does not fit would be a row's error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "kept_units", lambda *_: {"total": 1.0})
    predictor = SimpleNamespace(predict=lambda *_: SimpleNamespace(peak_bytes=1))
    monkeypatch.setattr(memory, "Predictor", lambda _: predictor)
    calls = []

    def call(function: Any, *arguments: Any, timeout: float) -> dict[str, float]:
        calls.append(inspect.signature(function).bind(*arguments))
        return {"total_ms": 1.0, "tokens_per_second": 2.0}

    monkeypatch.setattr(memory, "call_alone", call)
    options = Namespace(full=True)
    assert {row["ours ms"] for row in memory.table6(options)[1]} == {1.0}
    assert [row["ours tok/s"] for row in memory.table7(options)[1] if "ours tok/s" in row] == [2.0]
    assert len(calls) == len(memory.TABLE6) * len(memory.KEEP) + 1


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", ["table3", "table6"])
def test_what_the_full_size_needs_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", name, "--full"]) == 2
    assert capsys.readouterr().err.strip() == f"benchmarks paper: {name} --full needs {TABLES[name][1]}"


def test_what_would_not_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("table2 --seeds 1", "table1 --tasks sciq", "table3 --checkpoint runs/a", "table3 --arms none"):
        with pytest.raises(SystemExit) as stop:
            main(["paper", *words.split()])
        assert stop.value.code == 2
    assert main(["paper", "table3", "--config", "a.toml"]) == 2
    assert "--config a.toml: give --full" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RunStoppedError(signal.SIGTERM, Path("x")), UnreadableDataError("no rows")])
def test_what_ends_a_training_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(training, "train", train)
    assert main(["paper", "table3"]) == 2
    found = capsys.readouterr().err
    assert found == f"benchmarks paper: {error}\n"


# ---- Errors of moment codes: a checkpoint with known moments from file to table -------------------------------------


def moments(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v (rows, 200) FP32 with log-normal scales; 200 leaves a padded group."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(2 * torch.randn(rows, 1, generator=generator) - 9)
    root = scale * torch.exp(0.7 * torch.randn(rows, 200, generator=generator))
    return root * (0.25 * torch.randn(rows, 200, generator=generator)).clamp(-1, 1), root.square()


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    m, v = moments(16)
    state = {0: {"exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}, 1: {"exp_avg": m[0], "exp_avg_sq": v[0]}}
    torch.save({"optimizer": {"state": state}}, folder / "training.pt")
    return folder


def test_from_checkpoint_to_table(tmp_path: Path) -> None:
    found = analyse(save(tmp_path), 1e-8, "cpu")
    assert found["fp32 fp32"] < 1e-9
    assert 0 < found["ratio8 log8"] < found["sqrt8 log8"] < found["e4m3x e4m3x"] < found["e4m3 e4m3"]
    assert found["fp32 log8"] < found["ratio8 log8"]
    rows = {row["name"]: row for row in table1(Namespace(checkpoint=tmp_path))[1]}
    assert rows["m e4m3x, v e4m3x"]["ours"] == pytest.approx(found["e4m3x e4m3x"])
    assert rows["m e4m3x, v e4m3x"]["paper / E4M3"] == pytest.approx(12.31 / 20.10)


def test_what_is_no_run_with_fp32_moments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory or checkpoint"):
        table1(Namespace(checkpoint=tmp_path))
    with pytest.raises(ValueError, match=r"moments are torch\.bfloat16; train with optimizer\.moments=fp32"):
        analyse(save(tmp_path, torch.bfloat16), 1e-8, "cpu")
