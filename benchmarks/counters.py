"""Why each kernel is as fast as it is: the GPU's own counters over the calls of `overcoat bench kernels`.

    python -m benchmarks.counters                                           every case
    python -m benchmarks.counters --shape 1b-s2048 --only gelu =amax        some of them

Runs NVIDIA Nsight Compute (`ncu`, which comes with the CUDA toolkit; the GPU's counters must be open to the user) over
one call of each case, at the clocks as they are, with cold caches. One row of results/counters.jsonl for each kernel
launched, PyTorch's own too:

    us, read_MB, written_MB      time, and what DRAM read and wrote; what is written at the end stays in L2
    instructions                 of warps; with grid, block, registers of a thread, shared_bytes of a block
    dram, l2, l1_data, issue,    what each unit did of what it can do in the whole of the kernel's time: DRAM, L2's
    alu, fma, xu, lsu, adu,      busiest part, L1 and shared memory's data, slots to issue instructions in, and the
    uniform                      pipes that instructions go to (counter_rows.py: UNITS)
    occupancy                    warps on an SM while it has any, of the most it can hold
    stalls                       what most warps waited for: mean warps that wait, at each instruction issued
    bound, bound_share           the unit with the highest share, "latency" where no share is above 60%

A unit near its peak yields only to less work for it. With "latency" no unit holds the kernel up: it waits, for memory
with too few loads in flight (`long_scoreboard` among the stalls), for shared memory (`short_scoreboard`), at barriers,
or its grid does not fill the GPU. What mostly copies keeps L2 busier than DRAM: where both are above 60% the bound is
called memory. "L2" is traffic that is not DRAM's: parts of lines, what is read again, what is written and stays there.
A time is that of one launch, profiled; `overcoat bench kernels` has those that count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import torch

from benchmarks.common import RESULTS, append_row, environment
from benchmarks.counter_rows import CASE, FAILED, METRICS, parse
from overcoat.bench.kernel_cases import FAMILIES, KernelCase
from overcoat.bench.session import matches, say
from overcoat.bench.shapes import BLOCKS, BlockShape
from overcoat.bench.table import Column, decimals, heading, line, percent
from overcoat.bench.worker import Figures, attempt

ROOT = Path(__file__).parents[1]
WARMUPS = 2  # the first one compiles
GRACE = 60.0  # seconds beyond --timeout, for the case that was begun last and for ncu to write its report
COLUMNS = (
    Column("us", "us", decimals(1)),
    *(Column(title, key, percent) for title, key in (("DRAM", "dram"), ("L2", "l2"), ("L1 data", "l1_data"))),
    *(Column(title, key, percent) for title, key in (("issue", "issue"), ("ALU", "alu"), ("XU", "xu"))),
    Column("warps", "occupancy", percent),
    Column("regs", "registers", str),
)


def call_cases(shape: BlockShape, only: Sequence[str] | None, seconds: float) -> None:
    """In the process that ncu looks at: names each case, calls it once to be seen; begins none after `seconds`."""
    end = time.monotonic() + seconds
    with torch.no_grad():
        for family, make in FAMILIES.items():
            torch.manual_seed(0)
            _tell(family, attempt(_call_family, make, shape, only, end))


def _call_family(
    make: Callable[[BlockShape, str], Iterator[KernelCase]], shape: BlockShape, only: Sequence[str] | None, end: float
) -> Figures:
    for case in make(shape, "cuda"):
        if matches(case.name, only):
            in_time = time.monotonic() < end
            _tell(case.name, attempt(_call, case) if in_time else {"error": "not begun within --timeout"})
    return {}


def _call(case: KernelCase) -> Figures:
    for _ in range(WARMUPS):
        case.call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # ncu keeps what a kernel overwrites in the memory that is free
    print(f"{CASE}{case.name}", flush=True)
    with torch.cuda.profiler.profile():
        case.call()
        torch.cuda.synchronize()
    return {}


def _tell(name: str, found: Figures) -> None:
    if "error" in found:
        print(f"{FAILED}{name}: {found['error']}", flush=True)


def profile(shape: str, only: Sequence[str] | None, timeout: float) -> tuple[str, str]:
    """What was said while ncu looked at all cases, and its table as CSV. RuntimeError if there is none."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: it comes with the CUDA toolkit, as Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
        command += ["-o", str(report), sys.executable, "-m", "benchmarks.counters", "--child"]
        command += ["--shape", shape, "--timeout", str(timeout), *(["--only", *only] if only else [])]
        log, ended = watch(command, timeout + GRACE)
        errors = [text for text in log.splitlines() if text.startswith(("==ERROR==", FAILED))]
        if report.exists():
            page = ["ncu", "-i", str(report), "--csv", "--page", "raw"]
            return log, subprocess.run(page, stdout=subprocess.PIPE, text=True, check=True).stdout
    if not ended:
        errors.append(f"it had not ended after {timeout + GRACE:.0f} s")
    elif only and not errors and CASE not in log and "No kernels were profiled" in log:
        raise RuntimeError(f"no case has one of these words in its name: {' '.join(only)}")
    raise RuntimeError(f"ncu could not read the GPU's counters: {' | '.join(errors or log.splitlines()[-3:])}")


def watch(command: list[str], timeout: float) -> tuple[str, bool]:
    """Run a command, naming the cases on stderr as they begin: what it said, and whether it ended by itself."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    late, said = threading.Event(), []

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)  # ncu and the process it looks at

    timer = threading.Timer(timeout, end)
    timer.start()
    try:
        assert process.stdout is not None
        for text in process.stdout:
            said.append(text)
            if text.startswith(CASE):
                print(f"{text.removeprefix(CASE).strip()} ...", file=sys.stderr, flush=True)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end()
    return "".join(said), not late.is_set()


def written(row: dict[str, Any]) -> str:
    """A row as a line of the table; behind its numbers what bounds it, what its warps wait for, the kernel's name."""
    numbers = line({**row, "name": row["case"]}, COLUMNS)
    if "error" in row:
        return numbers
    stall, ratio = next(iter(row["stalls"].items()))
    return f"{numbers}  {row['bound']:12s} {row['bound_share']:4.0%}  {stall:18s} {ratio:4.1f}  {row['kernel']}"


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, append the rows; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b-s2048", choices=BLOCKS, help="default 7b-s2048")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with such a word in the name; =WORD: so named")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="begin no case after this long")
    parser.add_argument("--out", type=Path, default=RESULTS / "counters.jsonl")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    if parsed.child:
        call_cases(BLOCKS[parsed.shape], parsed.only, parsed.timeout)
        return 0
    try:
        rows = parse(*profile(parsed.shape, parsed.only, parsed.timeout))
    except RuntimeError as error:
        parser.exit(1, f"benchmarks.counters: {error}\n")
    where = {"benchmark": "counters", **environment()}
    say(f"{heading(parsed.shape, COLUMNS)}  {'bound':17s}  {'most wait for':23s}  kernel")
    for row in rows:
        say(written(row))
        append_row(parsed.out, {"shape": parsed.shape, **row}, where)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
