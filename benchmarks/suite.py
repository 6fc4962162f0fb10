"""The GPU test-suite as a measurement: what passed, on which commit and GPU, which CI, without one, cannot say.

    python -m benchmarks.suite                                   all of `pytest -m gpu`, 16 processes
    python -m benchmarks.suite --processes 4 tests/kernels       some of it

One row of results/suite.jsonl: how many tests passed, the names of those that failed, how many were skipped and why
(pytest's own reasons), and seconds. The exit status is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, append_row

ROOT = Path(__file__).parents[1]


def summary(report: Path) -> dict[str, Any]:
    """Figures of a row from pytest's JUnit report."""
    passed, failed, reasons = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            reasons[skipped.get("message") or "no reason"] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(reasons)}


def run(tests: list[str], processes: int, root: Path = ROOT) -> tuple[dict[str, Any], int]:
    """Run the GPU tests of these files or folders: the row's figures, and pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", str(processes), "--dist", "worksteal", "-q"]
        start = time.perf_counter()
        status = subprocess.run(
            [*command, "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}", *tests], cwd=root
        ).returncode
        seconds = round(time.perf_counter() - start, 1)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} and wrote no report")
        return {**summary(report), "seconds": seconds, "processes": processes, "status": status}, status


def main(argv: list[str] | None = None) -> int:
    """Run, append the row, say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS / "suite.jsonl")
    arguments = parser.parse_args(argv)
    figures, status = run(arguments.tests, arguments.processes)
    append_row(arguments.out, {"benchmark": "suite", "tests": arguments.tests, **figures})
    print(f"{figures['passed']} passed, {len(figures['failed'])} failed, {sum(figures['skipped'].values())} skipped")
    return status


if __name__ == "__main__":
    sys.exit(main())
