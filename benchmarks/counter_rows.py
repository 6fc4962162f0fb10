"""From what Nsight Compute says to the rows of `benchmarks.counters`: which counters, in which units, what bounds."""

from __future__ import annotations

import csv
import re
from typing import Any

BUSY = 0.6
STALLS_TOLD = 3

_OF_TIME = "avg.pct_of_peak_sustained_elapsed"
# By key of a row: the unit's name as a bound, and its counter.
UNITS = {
    "dram": ("memory", f"dram__cycles_active.{_OF_TIME}"),
    "l2": ("L2", f"lts__throughput.{_OF_TIME}"),
    "l1_data": ("L1 data pipe", f"l1tex__data_pipe_lsu_wavefronts.{_OF_TIME}"),
    "issue": ("issue slots", f"sm__inst_issued.{_OF_TIME}"),
    "alu": ("ALU pipe", f"sm__inst_executed_pipe_alu.{_OF_TIME}"),
    "fma": ("FMA pipe", f"sm__inst_executed_pipe_fma.{_OF_TIME}"),
    "xu": ("XU pipe", f"sm__inst_executed_pipe_xu.{_OF_TIME}"),
    "lsu": ("LSU pipe", f"sm__inst_executed_pipe_lsu.{_OF_TIME}"),
    "adu": ("ADU pipe", f"sm__inst_executed_pipe_adu.{_OF_TIME}"),
    "uniform": ("uniform pipe", f"sm__inst_executed_pipe_uniform.{_OF_TIME}"),
}
TIME = "gpu__time_duration.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS, SHARED = "launch__registers_per_thread", "launch__shared_mem_per_block"
# Not "selected", the warp that issues, nor waits for tensor cores and textures, which nothing here uses.
STALLS = {
    name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for name in (
        *("barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard"),
        *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected"),
        *("short_scoreboard", "sleeping", "wait"),
    )
}
# By name instead of ncu's sections: for each group of counters that the GPU has at once, the kernel runs once more.
METRICS = (
    *(TIME, READ, WRITTEN, INSTRUCTIONS, OCCUPANCY, REGISTERS, SHARED),
    *(metric for _, metric in UNITS.values()),
    *STALLS.values(),
)
# To microseconds, bytes and shares: ncu chooses a unit for each column.
SCALES = {
    **{f"{prefix}{unit}": 1e6 * 1e-3**n for n, prefix in enumerate(("", "m", "u", "n")) for unit in ("s", "second")},
    **{f"{prefix}byte": 1e3**n for n, prefix in enumerate(("", "K", "M", "G"))},
    "%": 1e-2,
}

# What the process that ncu looks at says of its cases, between ncu's own lines.
CASE, FAILED = "CASE ", "FAILED "
_LAUNCH = re.compile(r'==PROF== Profiling "[^"]*" - (\d+)')


def parse(log: str, table: str) -> list[dict[str, Any]]:
    """Rows of a run, one for each kernel in the order of the launches; then what failed, with its reason.

    Args:
        log: what ncu and the process said; ncu numbers the launches there.
        table: ncu's page "raw" as CSV: titles, units, a line for each launch.
    """
    cases, launches, failed = [], {}, []
    for text in log.splitlines():
        if text.startswith(CASE):
            cases.append(text.removeprefix(CASE))
        elif text.startswith(FAILED):
            name, _, reason = text.removeprefix(FAILED).partition(": ")
            failed.append({"case": name, "error": reason})
        elif (launch := _LAUNCH.match(text)) and cases:
            launches[launch[1]] = cases[-1]
    units, *kernels = csv.DictReader(text for text in table.splitlines() if not text.startswith("=="))
    rows = [{"case": launches.get(kernel["ID"], "unknown"), **figures(kernel, units)} for kernel in kernels]
    told = {row["case"] for row in rows + failed}
    silent = [{"case": case, "error": "no kernel of it was measured"} for case in cases if case not in told]
    return rows + failed + silent


def figures(kernel: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    """A row's figures from one line of ncu's table, with None for those that it lacks."""

    def number(metric: str, digits: int = 4, scale: float = 1.0) -> Any:
        try:
            value = float(kernel[metric].replace(",", "")) * SCALES.get(units[metric].split("/")[0], 1.0) * scale
        except (KeyError, ValueError):  # a counter that this GPU has not, or "n/a"
            return None
        return None if value != value else round(value, digits or None)

    name = _function(kernel["Kernel Name"])
    shares = {key: number(metric) for key, (_, metric) in UNITS.items()}
    microseconds = number(TIME, 2)
    if microseconds is None or not any(shares.values()):
        return {"kernel": name, "error": "ncu could not read the GPU's counters"}
    waits = {stall: number(metric, 2) or 0.0 for stall, metric in STALLS.items()}
    most = sorted(waits, key=lambda stall: -waits[stall])[:STALLS_TOLD]
    unit, share = bound(shares)
    return {
        "kernel": name,
        "us": microseconds,
        "read_MB": number(READ, 3, 1e-6),
        "written_MB": number(WRITTEN, 3, 1e-6),
        "instructions": number(INSTRUCTIONS, 0),
        "grid": [int(size) for size in re.findall(r"\d+", kernel["Grid Size"])],
        "block": [int(size) for size in re.findall(r"\d+", kernel["Block Size"])],
        "registers": number(REGISTERS, 0),
        "shared_bytes": number(SHARED, 0),
        **shares,
        "occupancy": number(OCCUPANCY),
        "stalls": {stall: waits[stall] for stall in most},
        "bound": unit,
        "bound_share": share,
    }


def bound(shares: dict[str, float | None]) -> tuple[str, float]:
    """The name of the unit with the highest share, and that share; "latency" if it is not above `BUSY`.

    What DRAM reads and writes passes L2: with both above `BUSY`, L2's higher share is memory's.
    """
    known = {key: share for key, share in shares.items() if share is not None}
    top = max(known, key=lambda key: known[key])
    share = known[top]
    if share <= BUSY:
        return "latency", share
    if top == "l2" and known.get("dram", 0.0) > BUSY:
        top = "dram"
    return UNITS[top][0], share


def _function(name: str) -> str:
    """A kernel's name without namespaces, types and arguments."""
    plain = name.replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    found = re.match(r"(?:void )?(?:\w+::)*(\w+)", plain)
    return found[1] if found else name
