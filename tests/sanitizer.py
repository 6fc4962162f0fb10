"""Run the GPU tests under compute-sanitizer: memcheck for accesses out of bounds, racecheck for shared-memory hazards.

    python -m tests.sanitizer                                                 all files, both tools
    python -m tests.sanitizer --tools memcheck --files tests/optim/test_step.py
    python -m tests.sanitizer --tools racecheck --every 4 --deadline 400      every fourth test, within 400 s

memcheck runs without PyTorch's caching allocator, so that each tensor is an allocation of its own and an access beyond
its end is found; tests of CUDA graphs and of memory need the cache and run with it, in processes of their own.
racecheck runs the kernels' own tests. Kernels of PyTorch and cuBLAS are not checked. Run `pytest -m gpu` first: it
compiles the kernels. One row of benchmarks/results/sanitizer.jsonl per tool: errors and pytest's result
by file and process.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, append_row

# Tests that each tool runs: files that train or measure are left out, and what takes minutes under a tool.
LEFT_OUT = ("tests/benchmarks", "tests/estimate", "tests/train")
KERNELS = "tests/kernels"
# Tests of kernels that are PyTorch's and cuBLAS' alone.
THE_LIBRARYS = ("test_product", "test_block_product", "test_attention")
SLOW = {"memcheck": ("test_numerics",), "racecheck": ("test_numerics", "2_to_31", *THE_LIBRARYS)}
NEEDS_THE_CACHE = ("graph", "captur", "memory", "freed", "taken_out", "let_go", "allocates")
# Parts of kernel names, plain or mangled, of PyTorch and cuBLAS.
NOT_OURS = ("at::native", "2at6native", "nvjet")
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]


def test_files(tool: str) -> list[str]:
    """The test files that `tool` runs."""
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    if tool == "racecheck":
        return [path for path in found if path.startswith(KERNELS)]
    return [path for path in found if not path.startswith(LEFT_OUT)]


def tests_of(tool: str, path: str) -> list[str]:
    """The names of the GPU tests of a file that `tool` runs."""
    options = ["-m", "gpu", "-k", " and ".join(f"not {word}" for word in SLOW[tool])]
    listed = subprocess.run([*PYTEST, "--collect-only", path, *options], cwd=ROOT, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def check(tool: str, tests: list[str], cached: bool, timeout: float) -> dict[str, Any]:
    """Errors that `tool` counts in some tests (None: it did not finish), pytest's last line, the first complaints."""
    environment = {**os.environ, "COLUMNS": "250"}
    if tool == "memcheck" and not cached:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # Host backtraces would keep Python's frames alive, and with them tensors that tests expect to be freed.
    options = ["--show-backtrace", "device", "--launch-timeout", "600"]
    options += ["--kernel-name-exclude", ",".join(f"kns={name}" for name in NOT_OURS)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *options, *PYTEST, *tests]
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"errors": None, "result": f"not ended after {timeout:.0f} s", "said": []}
    lines = (ended.stdout + ended.stderr).splitlines()
    counted = [match[1] for line in lines if (match := re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ", line))]
    results = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error).* in ", line)]
    said = [line[:250] for line in lines if line.startswith(("FAILED", "========= ")) and "SUMMARY" not in line]
    return {
        "errors": int(counted[-1]) if counted else None,
        "result": results[-1].strip("= ") if results else f"exit status {ended.returncode}",
        "said": [line for line in said if "COMPUTE-SANITIZER" not in line][:8],
    }


def parts_of(tests: list[str], most: int) -> list[list[str]]:
    """The tests dealt out to as few processes as possible; neighbours, which take equally long, to different ones."""
    count = -(-len(tests) // most)
    return [tests[i::count] for i in range(count)]


def main(argv: list[str] | None = None) -> int:
    """Check all files, print each result, append the rows; 1 if anything has errors or did not finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=tuple(SLOW), default=tuple(SLOW))
    parser.add_argument("--files", nargs="+", help="test files; default: all that launch kernels")
    parser.add_argument("--tests", type=int, default=60, help="most tests in one process")
    parser.add_argument("--every", type=int, default=1, help="take every Nth test of a file")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds for everything")
    parser.add_argument("--processes", type=int, default=min(24, os.cpu_count() or 1), help="at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sanitizer.jsonl")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + arguments.deadline

    def check_in_time(tool: str, tests: list[str], cached: bool) -> dict[str, Any]:
        left = end - time.monotonic()
        if left <= 0:
            return {"errors": None, "result": "not started", "said": []}
        return check(tool, tests, cached, min(left, 3600.0))

    rows: dict[str, dict[str, list[dict[str, Any]]]] = {tool: {} for tool in arguments.tools}
    with ThreadPoolExecutor(arguments.processes) as pool:
        files = [(tool, path) for tool in arguments.tools for path in arguments.files or test_files(tool)]
        jobs = []
        for (tool, path), tests in zip(files, pool.map(lambda file: tests_of(*file), files), strict=True):
            for cached in (False, True):
                chosen = [t for t in tests[:: arguments.every] if any(w in t for w in NEEDS_THE_CACHE) == cached]
                parts = parts_of(chosen, arguments.tests)
                jobs += [(tool, path, pool.submit(check_in_time, tool, part, cached)) for part in parts]
        for tool, path, job in jobs:
            found = job.result()
            rows[tool].setdefault(path, []).append(found)
            print(f"{tool:10s} {path:45s} errors {found['errors']}, {found['result']}", flush=True)
            for line in found["said"]:
                print(f"    {line}", flush=True)
    for tool, by_file in rows.items():
        append_row(arguments.out, {"benchmark": "sanitizer", "tool": tool, "files": by_file})
    return int(any(part["errors"] != 0 for files in rows.values() for found in files.values() for part in found))


if __name__ == "__main__":
    sys.exit(main())
