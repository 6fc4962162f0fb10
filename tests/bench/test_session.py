"""A run: rows printed and written as they come, absent peers named, failed ones too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from overcoat.bench import session as sessions
from overcoat.bench.output import Column, Metric, decimals
from overcoat.bench.session import Case, Session, is_installed, matches
from overcoat.bench.worker import Worker, attempt

WHERE = {
    "date": "2026-01-01T00:00:00Z",
    "commit": "abc",
    "gpu": "a GPU",
    "torch": "2",
    "triton": "3",
    "peers": {"torchao": "1"},
    "command": "overcoat bench x",
    "copy_TB_per_s": 4.0,
}
COLUMNS = (Column("ms", "ms", decimals(1)),)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    """A session whose child is this process and whose GPU is made up."""
    monkeypatch.setattr(sessions, "require_gpu", lambda _benchmark: None)
    monkeypatch.setattr(sessions, "describe", lambda command: {**WHERE, "command": command})
    monkeypatch.setattr(Worker, "call", lambda _self, function, *arguments, timeout: attempt(function, *arguments))
    parsed = argparse.Namespace(
        argv=["bench", "x", "--json", str(tmp_path / "rows.jsonl")],
        json=tmp_path / "rows.jsonl",
        plot=tmp_path / "bars.png",
        only=None,
        timeout=1.0,
    )
    return Session("x", parsed, COLUMNS)


def test_every_result_is_printed_and_written(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no kernel")

    session.table("first")
    rows = [
        session.run(Case("overcoat", dict, ([("ms", 1.25)],)), shape="7b"),
        session.run(Case("broken peer", fail, ()), shape="7b"),
        session.run(Case("absent peer", fail, (), ("json", "no_such_package")), shape="7b"),
    ]
    session.draw(rows, group="7b")
    session.plot([Metric("ms", ("ms",))])
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    command = {"benchmark": "x", **WHERE, "command": "overcoat bench x --json rows.jsonl"}
    assert written[0] == {**command, "shape": "7b", "name": "overcoat", "ms": 1.25}
    assert written[1]["error"] == "ValueError: no kernel"
    assert len(written) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "first"
    assert [line.split(maxsplit=1)[0] for line in lines[3:]] == ["overcoat", "broken", "absent"]
    assert lines[5].endswith("not installed: no_such_package")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_a_gpu_that_cannot_be_used_is_one_sentence(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "describe", lambda _command: {"error": "RuntimeError: busy"})
    with pytest.raises(ValueError, match="overcoat bench cannot use this GPU: RuntimeError: busy"):
        Session("x", session.parsed, COLUMNS)


def test_only_picks_by_words() -> None:
    assert matches("torchao tensorwise", None)
    assert matches("torchao tensorwise", ["bf16", "TORCHAO"])
    assert not matches("torchao tensorwise", ["overcoat"])
    assert matches("overcoat", ["=overcoat"])
    assert not matches("overcoat paper", ["=overcoat"])


def test_installed_or_not_also_inside_a_package_that_is_not_there() -> None:
    assert is_installed("json.decoder")
    assert not is_installed("no_such_package")
    assert not is_installed("no_such_package.part")
    assert not is_installed("json.no_such_part")
