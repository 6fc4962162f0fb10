"""The benchmarks from the command line; the measurements themselves are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels, layer, model, muon, optimizer
from benchmarks import session as sessions
from benchmarks.__main__ import TOOLS, main
from benchmarks.contestants import WAYS
from benchmarks.session import OUT_OF_MEMORY
from overcoat.models.shapes import MODELS


def figures(function: Any, *arguments: Any, timeout: float) -> dict[str, Any]:
    """What a measurement could have returned."""
    if function is sessions.describe:
        where = dict.fromkeys(("date", "commit", "gpu", "torch", "triton"), "some")
        return {**where, "peers": {}, "command": "some", "copy_TB_per_s": 4.0}
    if function is layer.accuracy:
        return {"draws": arguments[2], **{column.key: 25.0 for column in layer.SQNR_COLUMNS}}
    if function is kernels.measure_subject:
        assert arguments[2] == ["stack"]
        assert len(arguments[4]) == list(kernels.SUBJECTS).index(arguments[0])
        return {f"{arguments[0]}()": {"name": "stack", **{column.key: 0.75 for column in kernels.COLUMNS}}}
    if function is muon.measure_product:
        return {"ms": 1.0, "flops_per_second": 6e14}
    module = {muon.measure: muon, optimizer.measure: optimizer, layer.measure: layer, model.measure: model}[function]
    found: dict[str, Any] = {column.key: 2.0 for column in module.COLUMNS}
    if function is not model.measure:
        return found
    batch = arguments[1].batch
    return {"error": OUT_OF_MEMORY} if batch > 8 else {**found, "batch": batch, "tokens_per_second": 100.0 * batch}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sessions, "call_alone", figures)


def bench(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark and return the rows it wrote."""
    path = tmp_path / "rows.jsonl"
    assert main([*arguments, "--json", str(path)]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("made_up")
def test_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(tmp_path, "layer", "--shapes", "all", "--only", "eager", "engine", "--accuracy")
    assert [row["shape"] for row in rows] == [*MODELS, "accuracy"]
    assert rows[-1]["dx"] == 25.0
    assert capsys.readouterr().out.count("not installed: transformer_engine") == 3 * len(rows)
    (tmp_path / "rows.jsonl").unlink()
    rows = bench(tmp_path, "layer", "--shapes", "--only", "eager", "--accuracy", "--draws", "64")
    assert [(row["shape"], row["draws"]) for row in rows] == [("accuracy", 64)]
    assert "64 draws" in capsys.readouterr().out


@pytest.mark.usefixtures("made_up")
def test_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--models", "124m", "olmo-1b", "--batch", "4", "--best")
    rows = bench(tmp_path, "model", *arguments, "--only", "eager", "flash")
    assert [row["batch"] for row in rows] == 2 * [4, 8, 16, 12, 10, 9]
    assert [row["layers"] for row in rows] == 6 * [12] + 6 * [16]
    assert [row.get("error") for row in rows[:3]] == [None, None, OUT_OF_MEMORY]
    best = capsys.readouterr().out.split("each one's best batch")[1].splitlines()[2]
    assert best.split()[:6] == ["bf16", "eager,", "torch", "AdamW", "8", "800"]
    (tmp_path / "rows.jsonl").unlink()
    recipe = ("--recipe", "default", "offload_blocks=2", "--resident", "6", "--only", "=overcoat", "offload")
    rows = bench(tmp_path, "model", "--models", "llava-1.5-7b", "124m", "--batch", "4", "--freeze-tower", *recipe)
    added = "overcoat recipe default offload_blocks=2"
    leanest = "overcoat leanest, offload, released"
    assert [row["name"] for row in rows] == 2 * [
        "overcoat",
        leanest,
        *(added + way for way in (*WAYS, ", streamed, 6 resident")),
    ]
    assert [row.get("tower") for row in rows] == 10 * ["frozen"] + 10 * [None]


ON_CPU = ("paper", "turns", "scores", "pretrained")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(([name], "needs an NVIDIA GPU, and PyTorch ") for name in TOOLS if name not in ON_CPU),
        (["layer", "--shapes", "8b"], "unknown shape '8b'; choose MODEL[.KIND][-sTOKENS] of 124m"),
        (["kernels", "--shape", "8b"], "unknown shape '8b'"),
    ],
)
def test_without_a_gpu_or_a_shape_it_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"benchmarks {words[0]}: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.gpu
def test_a_run_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything for real, child process and all, on tensors small enough for seconds."""
    monkeypatch.setitem(optimizer.SIZES, "tiny", (4, (1024, 1024)))
    rows = bench(tmp_path, "optimizer", "--sizes", "tiny", "--only", "8bit, bf16+8", "torch")
    measured = {row["name"]: row for row in rows}
    assert "NVIDIA" in rows[0]["gpu"]
    assert rows[0]["copy_TB_per_s"] > 0.05
    for name in ("overcoat 8bit, bf16+8", "torch fused BF16"):
        assert measured[name]["ms"] > 0, measured[name]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_says_what_it_measures(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([tool, *(["table7"] if tool == "paper" else []), "--help"])
    assert stop.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["layer", "7b"], ["layer", "--draws", "0"], ["kernels", "--plot", "x.png"], ["model", "--nope"]]
)
def test_what_it_does_not_know_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


@pytest.mark.usefixtures("made_up")
def test_optimizer(tmp_path: Path) -> None:
    sizes = ("64x16M", "1x1G")
    rows = bench(tmp_path, "optimizer", "--sizes", *sizes, "--only", "fused", "8bit, bf16,")
    names = ["overcoat 8bit, bf16, unchecked", "torch fused BF16", "torch fused FP32"]
    assert [(row["size"], row["name"]) for row in rows] == [(size, name) for size in sizes for name in names]


@pytest.mark.usefixtures("made_up")
def test_muon(tmp_path: Path) -> None:
    rows = bench(tmp_path, "muon", "--layers", "2", "--only", "G^2", "torch muon")
    assert [row["name"] for row in rows][:2] == ["G^2", "G^2, cuBLAS, all tiles"]
    assert [row["size"] for row in rows[2:]] == 2 * ["2 layers of Llama-2-7B"] + 2 * ["1,000 of 1024 x 1024"]


@pytest.mark.usefixtures("made_up")
def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(tmp_path, "kernels", "--shape", "13b", "--only", "stack")
    assert [(row["name"], row["shape"]) for row in rows] == [("stack", "13b")] * len(kernels.SUBJECTS)
    assert "75%" in capsys.readouterr().out
