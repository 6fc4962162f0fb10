"""Rows from Nsight Compute's counters: its output of an H200, cut to four kernels, and a program in its place."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import counter_rows, counters
from overcoat.bench.kernel_cases import KernelCase

LOG = """\
==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 2032 (/usr/bin/python3.12)
CASE amax
==PROF== Profiling "vectorized_elementwise_kernel" - 0: 0%....50%....100% - 33 passes
==PROF== Profiling "_amax_kernel" - 1: 0%....50%....100% - 33 passes
CASE requantize_t
==PROF== Profiling "_requantize_t_kernel" - 17: 0%....50%....100% - 33 passes
CASE gelu_quantize erf
==PROF== Profiling "_gelu_quantize_kernel" - 52: 0%....50%....100% - 33 passes
==PROF== Disconnected from process 2032
==PROF== Report: report.ncu-rep
"""

# A column in each line: its title, its unit, what it says of each launch.
TABLE = """\
ID |  | 0 | 1 | 17 | 52
Kernel Name |  | void at::elementwise_kernel<4>(int, T2) | _amax_kernel | _requantize_t_kernel | _gelu_quantize_kernel
Block Size |  | (128, 1, 1) | (256, 1, 1) | (128, 1, 1) | (128, 1, 1)
Grid Size |  | (1, 1, 1) | (2112, 1, 1) | (128, 32, 1) | (8192, 6, 1)
gpu__time_duration.sum | us | 1.92 | 19.136 | 21.984 | 85.76
dram__bytes_read.sum | Mbyte | 0.004 | 67.118 | 34.106 | 180.376
dram__bytes_write.sum | Mbyte | 0 | 2.413 | 13.998 | 77.091
smsp__inst_executed.sum | inst | 120 | 6303360 | 12206080 | 78020608
sm__warps_active.avg.pct_of_peak_sustained_active | % | 5.82 | 46.463 | 33.814 | 89.13
launch__registers_per_thread | register/thread | 16 | 61 | 80 | 32
launch__shared_mem_per_block | Kbyte/block | 1.024 | 1.056 | 9.216 | 1.024
dram__cycles_active.avg.pct_of_peak_sustained_elapsed | % | 0.043 | 75.678 | 45.496 | 62.431
lts__throughput.avg.pct_of_peak_sustained_elapsed | % | 0.538 | 74.816 | 70.907 | 74.261
l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed | % | 0.001 | 16.728 | 40.687 | 20.361
sm__inst_issued.avg.pct_of_peak_sustained_elapsed | % | 0.006 | 34.397 | 56.781 | 89.42
sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed | % | 0.003 | 41.373 | 46.703 | 27.036
sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed | % | 0.001 | 7.782 | 26.166 | 62.633
sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed | % | 0 | 0 | 1.217 | 61.282
sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed | % | 0.001 | 7.766 | 12.17 | 5.332
sm__inst_executed_pipe_adu.avg.pct_of_peak_sustained_elapsed | % | 0.008 | 4.046 | 4.998 | 10.865
sm__inst_executed_pipe_uniform.avg.pct_of_peak_sustained_elapsed | % | 0 | 4.711 | 4.716 | 2.704
smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio | inst | 0 | 1.883 | 1.724 | 0
smsp__average_warps_issue_stalled_branch_resolving_per_issue_active.ratio | inst | 1.129 | 0.038 | 0.015 | 0.029
smsp__average_warps_issue_stalled_dispatch_stall_per_issue_active.ratio | inst | 0.016 | 0.027 | 0.06 | 0.467
smsp__average_warps_issue_stalled_drain_per_issue_active.ratio | inst | 0.185 | 0.025 | 0.224 | 0.086
smsp__average_warps_issue_stalled_imc_miss_per_issue_active.ratio | inst | 1.435 | 0.101 | 0.097 | 0.006
smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio | inst | 0 | 0 | 0 | 0.005
smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio | inst | 0 | 12.951 | 1.922 | 3.537
smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio | inst | 0 | 0.63 | 0.824 | 0.741
smsp__average_warps_issue_stalled_membar_per_issue_active.ratio | inst | 0 | 0 | 0 | 0
smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio | inst | 0 | 0.01 | 0.002 | 0.945
smsp__average_warps_issue_stalled_misc_per_issue_active.ratio | inst | 0.032 | 0 | 0 | 0
smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio | inst | 6.266 | 0.188 | 0.134 | 0.041
smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio | inst | 0 | 0.855 | 1.864 | 7.652
smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio | inst | 1.427 | 0.615 | 0.11 | 0.339
smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio | inst | 0 | 0 | 0 | 0
smsp__average_warps_issue_stalled_wait_per_issue_active.ratio | inst | 4 | 0.895 | 0.417 | 0.761
"""

# In the place of ncu: what it says while it looks, the report it leaves, how it reads it.
NCU = """#!/bin/sh
if [ "$1" = -i ]; then cat "$(dirname "$0")/table.csv"; exit; fi
echo "$*" > "$(dirname "$0")/arguments"
cat "$(dirname "$0")/log"
while [ "$1" != -o ]; do shift; done
touch "$2"
"""
REFUSED = """#!/bin/sh
echo "CASE amax"
echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
echo "==WARNING== No kernels were profiled."
exit 1
"""
NOTHING = """#!/bin/sh
echo "==WARNING== No kernels were profiled."
"""
ENDLESS = """#!/bin/sh
echo "CASE amax"
sleep 60
"""


def table(text: str = TABLE) -> str:
    """The CSV page of these columns."""
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows(zip(*(line.split(" | ") for line in text.splitlines())))
    return written.getvalue()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ncu's place on the PATH, with nothing there yet."""
    (tmp_path / "log").write_text(LOG)
    (tmp_path / "table.csv").write_text(table())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "ncu"


def put(program: Path, script: str) -> None:
    program.write_text(script)
    program.chmod(0o755)


def test_rows_of_a_run() -> None:
    fill, amax, requantize, gelu = counter_rows.parse(LOG, table())
    assert [row["case"] for row in (fill, amax, requantize, gelu)] == [
        "amax",
        "amax",
        "requantize_t",
        "gelu_quantize erf",
    ]
    assert amax == {
        "case": "amax",
        "kernel": "_amax_kernel",
        "us": 19.14,
        "read_MB": 67.118,
        "written_MB": 2.413,
        "instructions": 6303360,
        "grid": [2112, 1, 1],
        "block": [256, 1, 1],
        "registers": 61,
        "shared_bytes": 1056,
        "dram": 0.7568,
        "l2": 0.7482,
        "l1_data": 0.1673,
        "issue": 0.344,
        "alu": 0.4137,
        "fma": 0.0778,
        "xu": 0.0,
        "lsu": 0.0777,
        "adu": 0.0405,
        "uniform": 0.0471,
        "occupancy": 0.4646,
        "stalls": {"long_scoreboard": 12.95, "barrier": 1.88, "wait": 0.9},
        "bound": "memory",
        "bound_share": 0.7568,
    }
    assert list(amax["stalls"]) == ["long_scoreboard", "barrier", "wait"]
    assert (fill["kernel"], fill["bound"], fill["us"]) == ("elementwise_kernel", "latency", 1.92)
    assert (requantize["bound"], requantize["bound_share"]) == ("L2", 0.7091)
    assert (gelu["bound"], gelu["bound_share"]) == ("issue slots", 0.8942)
    assert next(iter(gelu["stalls"])) == "not_selected"


def test_units_are_read() -> None:
    """ncu chooses them by what it has measured."""
    text = TABLE.replace("time_duration.sum | us | 1.92 |", "time_duration.sum | ms | 0.00192 |")
    text = text.replace(
        "launch__shared_mem_per_block | Kbyte/block | 1.024", "launch__shared_mem_per_block | byte/block | 9"
    )
    first = counter_rows.parse(LOG, table(text))[0]
    assert (first["us"], first["shared_bytes"]) == (1.92, 9)
    assert counter_rows.SCALES["nsecond"] == pytest.approx(1e-3)
    assert counter_rows.SCALES["Gbyte"] == 1e9


def test_counters_that_a_gpu_lacks_are_left_out() -> None:
    lines = [line for line in TABLE.splitlines() if not line.startswith("lts__throughput")]
    text = "\n".join(lines).replace("| 75.678 |", "| n/a |").replace("| 41.373 |", "| nan |")
    amax = counter_rows.parse(LOG, table(text))[1]
    assert (amax["dram"], amax["l2"], amax["alu"]) == (None, None, None)
    assert (amax["bound"], amax["bound_share"]) == ("latency", 0.344)
    assert " - " in counters.written(amax)


def test_without_a_time_there_is_no_row() -> None:
    text = TABLE.replace("| 19.136 |", "| n/a |")
    row = counter_rows.parse(LOG, table(text))[1]
    assert row == {"case": "amax", "kernel": "_amax_kernel", "error": "ncu could not read the GPU's counters"}


def test_failures_are_rows() -> None:
    log = LOG + "FAILED adamw_step_: RuntimeError: reason: why\nCASE silent\n"
    rows = counter_rows.parse(log, table())
    assert rows[4:] == [
        {"case": "adamw_step_", "error": "RuntimeError: reason: why"},
        {"case": "silent", "error": "no kernel of it was measured"},
    ]
    assert counters.written(rows[4]).endswith("  RuntimeError: reason: why")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"dram": 0.8, "l2": 0.7, "issue": 0.3}, ("memory", 0.8)),
        ({"dram": 0.8, "l2": 0.9, "issue": 0.3}, ("memory", 0.9)),
        ({"dram": 0.5, "l2": 0.7, "issue": 0.3}, ("L2", 0.7)),
        ({"dram": 0.7, "l2": 0.8, "issue": 0.81}, ("issue slots", 0.81)),
        ({"dram": 0.5, "l2": 0.6, "l1_data": 0.9}, ("L1 data pipe", 0.9)),
        ({"dram": 0.5, "alu": 0.61, "xu": None}, ("ALU pipe", 0.61)),
        ({"dram": 0.6, "l2": 0.6}, ("latency", 0.6)),
        ({"issue": 0.1}, ("latency", 0.1)),
    ],
)
def test_bound(shares: dict[str, float | None], expected: tuple[str, float]) -> None:
    assert counter_rows.bound(shares) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::vectorized_elementwise_kernel<4, at::FillFunctor<int>>(int, T2)", "vectorized_elementwise_kernel"),
        ("void at::<unnamed>::vectorized_layer_norm_kernel<c10::BFloat16>(int, T1)", "vectorized_layer_norm_kernel"),
        ("void at::native::(anonymous namespace)::Gamma<float>(T1)", "Gamma"),
    ],
)
def test_names_of_kernels(name: str, expected: str) -> None:
    row = counter_rows.parse(LOG, table(TABLE.replace("| _amax_kernel |", f"| {name} |")))[1]
    assert row["kernel"] == expected


def test_a_run(program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put(program, NCU)
    out = tmp_path / "rows.jsonl"
    assert counters.main(["--shape", "1b-s2048", "--only", "amax", "=b", "--timeout", "9", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["kernel"] for row in rows][1:] == ["_amax_kernel", "_requantize_t_kernel", "_gelu_quantize_kernel"]
    assert {(row["benchmark"], row["shape"]) for row in rows} == {("counters", "1b-s2048")}
    assert {"date", "commit", "gpu", "torch", "triton", "command"} <= set(rows[0])
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("--metrics") + 1].split(",") == list(counter_rows.METRICS)
    assert " ".join(arguments).endswith(" --child --shape 1b-s2048 --timeout 9.0 --only amax =b")
    printed = capfd.readouterr()
    assert printed.err.splitlines() == ["amax ...", "requantize_t ...", "gelu_quantize erf ..."]
    lines = printed.out.strip().splitlines()
    assert len(lines) == 2 + len(rows)
    assert "76%" in lines[3]
    assert lines[3].endswith("_amax_kernel")
    assert len({line.rindex(f"  {row['kernel']}") for line, row in zip(lines[2:], rows)}) == 1


def test_a_failed_case_fails_the_run(program: Path, tmp_path: Path) -> None:
    put(program, NCU)
    (tmp_path / "log").write_text(LOG + "FAILED loss: out of memory\n")
    out = tmp_path / "rows.jsonl"
    assert counters.main(["--out", str(out)]) == 1
    assert json.loads(out.read_text().splitlines()[-1])["error"] == "out of memory"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, "ncu is not on the PATH"),
        (REFUSED, "could not read the GPU's counters: ==ERROR== ERR_NVGPUCTRPERM"),
        (NOTHING, "no case has one of these words in its name: foo"),
        (ENDLESS, "had not ended after 1 s"),
    ],
)
def test_why_there_is_nothing(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, script: str | None, expected: str
) -> None:
    if script:
        put(program, script)
    elif shutil.which("ncu"):
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "GRACE", 0.5)
    out, begun = tmp_path / "rows.jsonl", time.monotonic()
    with pytest.raises(SystemExit) as left:
        counters.main(["--only", "foo", "--timeout", "0.5", "--out", str(out)])
    assert left.value.code == 1
    assert expected in capfd.readouterr().err
    assert not out.exists()
    assert time.monotonic() - begun < 30


class Calls:
    """Cases in the place of the kernels': what was called, and whether ncu was looking."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, bool]] = []
        self.watched = False
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: setattr(self, "watched", True))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: setattr(self, "watched", False))
        monkeypatch.setattr(counters, "FAMILIES", {"first": self.first, "second": self.second})

    def op(self, name: str) -> None:
        self.made.append((name, self.watched))
        if name == "bad" and self.watched:
            raise ValueError("this one")

    def first(self, shape: Any, device: str) -> Any:
        yield KernelCase("bad", self.op, ("bad",))  # type: ignore[arg-type]
        yield KernelCase("good", self.op, ("good",))  # type: ignore[arg-type]
        raise KeyError("of the family")

    def second(self, shape: Any, device: str) -> Any:
        yield KernelCase("other", self.op, ("other",))  # type: ignore[arg-type]


def test_the_process_that_is_looked_at(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    calls = Calls(monkeypatch)
    assert counters.main(["--child", "--shape", "1b-s2048", "--timeout", "60"]) == 0
    expected = [(name, watched) for name in ("bad", "good", "other") for watched in (False, False, True)]
    assert calls.made == expected
    assert capfd.readouterr().out.splitlines() == [
        "CASE bad",
        "FAILED bad: ValueError: this one",
        "CASE good",
        "FAILED first: KeyError: 'of the family'",
        "CASE other",
    ]


def test_some_cases_in_some_time(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    calls = Calls(monkeypatch)
    counters.main(["--child", "--only", "=other"])
    assert {name for name, _ in calls.made} == {"other"}
    capfd.readouterr()
    counters.main(["--child", "--only", "oth", "--timeout", "0"])
    assert "FAILED other: not begun within --timeout" in capfd.readouterr().out
    assert len(calls.made) == 3


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs ncu")
def test_all_counters_are_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On a GPU, unless its owner keeps the counters from this user; whatever else ends it is a failure."""
    out = tmp_path / "rows.jsonl"
    try:
        status = counters.main(["--shape", "1b-s2048", "--only", "=amax", "--timeout", "120", "--out", str(out)])
    except SystemExit:
        said = capfd.readouterr().err.strip()
        assert "ERR_NVGPUCTRPERM" in said, said
        pytest.skip("the GPU's counters are not for this user")
    row = json.loads(out.read_text().splitlines()[-1])
    assert status == 0
    assert (row["case"], row["kernel"]) == ("amax", "_amax_kernel")
    assert [key for key, value in row.items() if value is None] == []
    assert 32 < row["read_MB"] < 40  # 8192 x 2048 in BF16
