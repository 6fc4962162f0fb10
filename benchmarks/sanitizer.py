"""compute-sanitizer over the GPU tests: accesses out of bounds (memcheck), hazards in shared memory (racecheck).

    python -m benchmarks.sanitizer                               every file with both tools, all at once
    python -m benchmarks.sanitizer --tools memcheck --files tests/optim/test_edges.py
    python -m benchmarks.sanitizer --tools racecheck --every 4 --deadline 400   a quarter of the tests, in time
    python -m benchmarks.sanitizer --tools racecheck --keyword "not shape3 and not shape4"   by name, as pytest -k

memcheck runs everything that launches kernels, from single ops over whole blocks and models to the optimizer, but no
trainings and no measurements. The kernels' own tests and the optimizer's took 4 to 9 minutes; there are 1.9 times as
many with the rest. It runs without PyTorch's caching allocator: each tensor is an allocation of its own, so that an
access beyond its end is one outside of any. What needs the cache (graphs, peaks of memory) has it, in processes of its
own. Backtraces are the device's alone: for the host's the tool keeps Python's frames, and with them every tensor that a
function launching a kernel had a name for, so that tests of what is freed fail (`--backtrace yes` to look for the
caller of a kernel that errs). Errors averaged over seeds are left out, and by racecheck, which looks at the kernels
alone, tensors beyond 2^31 elements: too slow. Neither looks into PyTorch's own kernels, of which the references are
made, nor into cuBLAS', where racecheck reports hazards that are not ours to mend. One row of results/sanitizer.jsonl
for each tool: by file and process, the errors that the tool counted and pytest's last line.
Kernels that have been compiled before, by the GPU tests themselves, are not compiled again.
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

from benchmarks.common import RESULTS, append_row

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
# Folders of tests whose kernels each tool looks at.
FOLDERS = {
    "memcheck": (".", "kernels", "kernels/gpu", "ops", "models", "optim"),
    "racecheck": ("kernels", "kernels/gpu"),
}
# Parts of the names of tests or of their files, long enough to be in no other's (tests/benchmarks/test_sanitizer.py).
SLOW = {"memcheck": ("test_numerics",), "racecheck": ("test_numerics", "2_to_31")}
# Of the library's kernels alone. Under racecheck those of block scales fail, though it leaves their kernels out.
THE_LIBRARYS = ("test_product", "test_block_product", "cublaslt")
GRAPHS = ("captur", "cuda_graph", "in_a_graph")
NEEDS_THE_CACHE = (*GRAPHS, "memory", "graph_is_freed", "what_is_taken_out", "let_go", "backward_allocates")
# Parts of the names, plain or mangled, of kernels that are PyTorch's and cuBLAS'. Not "cutlass": of its types are the
# names of attention kernels made, to which this package gives the sizes.
NOT_OURS = ("at::native", "2at6native", "nvjet")
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def test_files(tool: str) -> list[str]:
    """The files to run, from the folders of `tool`."""
    found = [path for folder in FOLDERS[tool] for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    # pytest leaves files out that hold no such test, at the price of a process: not these.
    return [str(path.relative_to(ROOT)) for path in found if "interpreted" not in path.name]


def tests_of(tool: str, path: str, keyword: str) -> list[str]:
    """The GPU tests of a file that `tool` is to see, by their pytest names."""
    left_out = SLOW[tool] + (() if tool == "memcheck" else THE_LIBRARYS)
    wanted = [f"({keyword})"] if keyword else []
    options = ["-m", "gpu", "-k", " and ".join([*wanted, *(f"not {word}" for word in left_out)])]
    listed = subprocess.run([*PYTEST, "--collect-only", path, *options], cwd=ROOT, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def needs_the_cache(test: str) -> bool:
    """Whether a test, by its pytest name, means nothing without PyTorch's caching allocator."""
    return any(word in test.lower() for word in NEEDS_THE_CACHE)


def check(tool: str, tests: list[str], timeout: float, backtrace: str = "device") -> dict[str, Any]:
    """Errors that `tool` counts in some tests (None: it did not get to its end), and pytest's result."""
    no_cache = tool == "memcheck" and not any(map(needs_the_cache, tests))
    # In a wide terminal pytest says behind each test that failed why.
    environment = {**os.environ, "COLUMNS": "250", **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if no_cache else {})}
    # Calls of the runtime that fail are not accesses: PyTorch asks for what a device may not have, and raises the rest.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += ["--kernel-name-exclude", ",".join(f"kns={name}" for name in NOT_OURS)]
    # What has not reached the GPU when this runs out is not looked at; it does only after the imports.
    options += ["--launch-timeout", "600", "--show-backtrace", backtrace]
    command = ["compute-sanitizer", "--tool", tool, *options, *PYTEST, *tests]
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        output = ended.stdout + ended.stderr
    except subprocess.TimeoutExpired as error:
        parts = (error.stdout or b"", error.stderr or b"")
        output = "".join(part if isinstance(part, str) else part.decode(errors="replace") for part in parts)
        return {"errors": None, "result": f"not ended after {timeout:.0f} s", "said": _complaints(output)}
    counted = _SUMMARY.findall(output)
    lines = [
        line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|deselected|error).* in ", line)
    ]
    return {
        "errors": int(counted[-1]) if counted else None,
        "result": lines[-1].strip("= ") if lines else f"exit status {ended.returncode}",
        "said": _complaints(output),
    }


def _complaints(output: str) -> list[str]:
    """The first lines that tell what is wrong: the tool's own, and tests that failed."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "========= "))]
    told = [line for line in lines if not re.search(r"COMPUTE-SANITIZER|SUMMARY|={9} *$", line)]
    return [line[:250] for line in told][:8]


def main() -> None:
    """Run all at once, print each as it ends, append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument(
        "--files", nargs="+", help="test files; default: all with kernels, for racecheck those of single kernels"
    )
    parser.add_argument("--tests", type=int, default=60, help="most tests in one process; a file may take several")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for each process")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="seconds for all; what has not ended is said so"
    )
    parser.add_argument("--keyword", default="", metavar="EXPRESSION", help="which tests, as pytest -k")
    parser.add_argument("--every", type=int, default=1, help="take every Nth test of a file")
    parser.add_argument("--processes", type=int, default=min(24, os.cpu_count() or 1), help="at the same time")
    parser.add_argument(
        "--backtrace", choices=("yes", "host", "device", "no"), default="device", help="whose calls an error shows"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer.jsonl")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {tool: {} for tool in arguments.tools}
    end = time.monotonic() + arguments.deadline

    def check_in_time(tool: str, tests: list[str]) -> dict[str, Any]:
        left = min(arguments.timeout, end - time.monotonic())
        if left <= 0:
            return {"errors": None, "result": "not started", "said": []}
        return check(tool, tests, left, arguments.backtrace)

    with ThreadPoolExecutor(arguments.processes) as pool:
        files = [(tool, path) for tool in arguments.tools for path in arguments.files or test_files(tool)]
        listed = pool.map(lambda file: tests_of(file[0], file[1], arguments.keyword), files)
        jobs = [
            (tool, path, pool.submit(check_in_time, tool, part))
            for (tool, path), tests in zip(files, listed, strict=True)
            for kind in apart(tool, tests[:: arguments.every])
            for part in parts_of(kind, arguments.tests)
        ]
        for tool, path, job in jobs:
            found = job.result()
            rows[tool].setdefault(path, []).append(found)
            print(f"{tool:10s} {path:45s} errors {found['errors']}, {found['result']}", flush=True)
            print(*(f"    {line}" for line in found["said"]), sep="\n", end="\n" if found["said"] else "", flush=True)
    for tool, by_file in rows.items():
        append_row(arguments.out, {"benchmark": "sanitizer", "tool": tool, "files": by_file})


def apart(tool: str, tests: list[str]) -> list[list[str]]:
    """memcheck's tests without PyTorch's caching allocator, and those that need it: not in one process."""
    if tool == "racecheck":
        return [tests]
    return [[test for test in tests if needs_the_cache(test) == cached] for cached in (False, True)]


def parts_of(tests: list[str], most: int) -> list[list[str]]:
    """The tests dealt out to as few processes as may be, neighbours to different ones: theirs take equally long."""
    count = -(-len(tests) // most)
    return [tests[i::count] for i in range(count)]


if __name__ == "__main__":
    main()
