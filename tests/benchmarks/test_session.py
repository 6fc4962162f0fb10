"""A run: what goes wrong in a measurement's process is reported and the next one runs; rows come as they are made."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import rows
from benchmarks import session as sessions
from benchmarks.rows import NAME_WIDTH, Column, decimals, heading, line, percent
from benchmarks.session import OUT_OF_MEMORY, Session, attempt, call_alone, matches
from overcoat.version import VERSION

WHERE = {
    "date": "2026-01-01T00:00:00Z",
    "commit": "abc",
    "gpu": "a GPU",
    "torch": "2",
    "triton": "3",
    "peers": {"torchao": "1"},
    "command": "some",
    "copy_TB_per_s": 4.0,
}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    """Options of a session whose measurements run in this process, on a GPU that is made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sessions, "describe", lambda: WHERE)
    monkeypatch.setattr(sessions, "call_alone", lambda function, *arguments, timeout: attempt(function, *arguments))
    rows = tmp_path / "rows.jsonl"
    return argparse.Namespace(tool="x", json=rows, only=None, timeout=1.0)


def fail() -> dict[str, Any]:
    raise RuntimeError("first\n  second " + "x" * 1000)


def test_every_result_is_printed_and_written(
    parsed: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(parsed, (Column("ms", "ms", decimals(1)),))
    session.table("first")
    session.run("overcoat", dict, [[("ms", 1.25)]], (), shape="7b")
    session.run("broken peer", fail, (), (), shape="7b")
    session.run("absent peer", fail, (), ("json", "no_such_package"), shape="7b")
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written[0] == {"benchmark": "x", **WHERE, "shape": "7b", "name": "overcoat", "ms": 1.25}
    assert written[1]["error"].startswith("RuntimeError: first second x")
    assert len(written) == 2
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[1] == "first"
    assert [line.split(maxsplit=1)[0] for line in lines[3:]] == ["overcoat", "broken", "absent"]
    assert lines[5].endswith("not installed: no_such_package")


def test_a_gpu_that_cannot_be_used_is_one_sentence(parsed: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "describe", lambda: {"error": "RuntimeError: busy"})
    with pytest.raises(ValueError, match="cannot use this GPU: RuntimeError: busy"):
        Session(parsed, ())


def test_only_picks_by_words() -> None:
    assert matches("torchao tensorwise", None)
    assert matches("torchao tensorwise", ["bf16", "TORCHAO"])
    assert not matches("torchao tensorwise", ["overcoat"])
    assert matches("overcoat", ["=overcoat"])
    assert not matches("overcoat leanest", ["=overcoat"])


def test_a_crash_and_a_hang_are_reported() -> None:
    assert call_alone(dict, [("ms", 1.5)], timeout=120) == {"ms": 1.5}
    assert call_alone(signal.raise_signal, signal.SIGKILL, timeout=120) == {"error": "the process died: SIGKILL"}
    started = time.monotonic()
    assert call_alone(time.sleep, 60, timeout=1) == {"error": "no result within 1 s"}
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("cuDNN: Out of memory, 3 GiB")])
def test_running_out_of_memory_has_one_name(error: Exception) -> None:
    def run_out() -> dict[str, Any]:
        raise error

    assert attempt(run_out) == {"error": OUT_OF_MEMORY}


# ---- Results for people: numbers under their titles, what is missing is said, every row with figures has a bar ------


COLUMNS = (
    Column("ms", "ms", decimals(2)),
    Column("kept MiB", "bytes", decimals(1, 2.0**-20)),
    Column("of", "s", percent),
)


def test_numbers_stand_under_their_titles() -> None:
    title = heading("7b", COLUMNS).splitlines()
    row = line({"name": "x", "ms": 1234.567, "bytes": 3 * 2**20, "s": 0.816}, COLUMNS)
    assert title[1] == "7b"
    assert len(title[2]) == len(row)
    assert row[:NAME_WIDTH].strip() == "x"
    assert row.split()[1:] == ["1,234.57", "3.0", "82%"]
    for word in ("ms", "kept MiB", "of"):
        assert row[title[2].index(word) + len(word) - 1] != " "


# ---- Result rows: what they say about where they come from, and that they can be read back --------------------------


def test_a_row_says_when_where_and_with_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERCOAT_COMMIT", "abc1234")
    row = rows.environment()
    assert list(row) == ["date", "commit", "gpu", "torch", "triton", "peers", "command"]
    assert (row["commit"], row["torch"]) == ("abc1234", torch.__version__)
    assert row["peers"]["transformers"]
    assert len(row["date"]) == len("2026-01-01T00:00:00Z")
    path = tmp_path / "new" / "rows.jsonl"
    rows.append_row(path, {"ms": 1.5}, {"gpu": "some"})
    rows.append_row(path, {"name": "x", "error": "none"})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"gpu": "some", "ms": 1.5}
    assert second == {**row, "name": "x", "error": "none"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["layer", "--json", "results/layer.jsonl"], "layer --json results/layer.jsonl"),
        (["layer", "--json=/home/me/layer.jsonl"], "layer --json=layer.jsonl"),
        (["paper", "table3", "--dir", "/home/me/a b"], "paper table3 --dir 'a b'"),
        (["paper", "--checkpoint", "runs/124m/step-100"], "paper --checkpoint runs/124m/step-100"),
        (["paper", "--set", "data.dir=/home/me/data"], "paper --set data.dir=data"),
    ],
)
def test_the_command_is_told_without_this_machines_directories(arguments: list[str], expected: str) -> None:
    assert rows.command_line(arguments) == f"python -m benchmarks {expected}"


def test_outside_a_checkout_the_version_stands_for_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also inside a repository that is not this one, as an environment in somebody's project is, and without git."""
    monkeypatch.delenv("OVERCOAT_COMMIT", raising=False)
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", "")
        assert rows.commit() == f"overcoat {VERSION}"
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path.parent)], check=True)
    assert rows.commit() == f"overcoat {VERSION}"
    identity = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert re.fullmatch("[0-9a-f]{7,}", rows.commit())
