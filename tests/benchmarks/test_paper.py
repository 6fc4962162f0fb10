"""`benchmarks.paper`: the list, the small size of what a CPU can do, and what is said of the rest."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.paper import TABLES, memory
from benchmarks.paper.states import analyse, table1
from overcoat.train.checkpoint import write_tensors
from overcoat.train.files import RECORD


def test_the_list_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TABLES)


@pytest.mark.parametrize("name", ["table2", "table6", "table7"])
def test_dry_runs_need_no_gpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    assert main(["paper", name, "--json", str(rows)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    printed = capsys.readouterr().out
    assert found
    assert all(row["exhibit"] == name and row["name"] in printed for row in found)
    assert name != "table2" or [row["linear"] for row in found[-2:]] == [0, 0]  # scales alone


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_times_without_a_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table6", "--full"]) == 2
    assert capsys.readouterr().err == "benchmarks paper: table6 --full needs an NVIDIA GPU\n"


@pytest.mark.parametrize("words", ["table2 --full", "table6 --checkpoint runs/a", "table1", "table3"])
def test_what_would_not_be_read_is_refused(words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["paper", *words.split()])
    assert stop.value.code == 2


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
    tensors = {f"optimizer/{number}/{field}": value for number, of in state.items() for field, value in of.items()}
    write_tensors(folder, tensors)
    (folder / RECORD).touch()
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
