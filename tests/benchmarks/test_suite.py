"""The suite's row, from a project of four tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import suite

TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
@pytest.mark.parametrize("size", [1, 2])
def test_bad(size): assert size < 2
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_four.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text((suite.ROOT / "pyproject.toml").read_text())
    return tmp_path


def test_a_row_says_what_passed_and_what_did_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = project / "rows.jsonl"
    real = suite.run
    monkeypatch.setattr(suite, "run", lambda tests, processes: real(tests, processes, project))
    assert suite.main(["test_four.py", "--processes", "1", "--out", str(out)]) == 1
    row = json.loads(out.read_text())
    assert row["passed"] == 2
    assert row["failed"] == ["test_four::test_bad[2]", "test_four::test_error"]
    assert row["skipped"] == {"needs two GPUs": 1}
    assert row["status"] == 1
    assert row["seconds"] > 0


def test_no_report_is_an_error(project: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest ended with status 4 and wrote no report"):
        suite.run(["--no-such-option"], 1, project)
