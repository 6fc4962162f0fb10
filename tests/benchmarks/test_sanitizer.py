"""The sanitizer's benchmark with a program in its place."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sanitizer

SCRIPT = """#!/bin/sh
echo "cache off: $PYTORCH_NO_CUDA_MEMORY_CACHING; $*"
case "$*" in *slow*) sleep 60;; esac
case "$*" in *bad*) echo "========= Invalid __global__ write of size 4 bytes"; echo "1 failed, 2 passed in 3.0s";; *)
echo "3 passed in 2.0s";; esac
case "$*" in
*racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
*bad*) echo "========= ERROR SUMMARY: 7 errors";;
*broken*) exit 3;;
*) echo "========= ERROR SUMMARY: 0 errors";; esac
"""


# A kernel of the package that is told of more rows than there are, beside PyTorch's own, which nobody looks at.
OUT_OF_BOUNDS = """
import torch
from overcoat.kernels import quantize

def test_reads_beyond_the_end():
    x = torch.randn(2**20, device="cuda")
    out = torch.empty((), dtype=torch.int32, device="cuda")
    quantize._amax_kernel[(64,)](x, out, x.numel() + {beyond}, True, quantize.AMAX_BLOCK, num_warps=8)
    torch.cuda.synchronize()
"""


# A tensor that the function launching a kernel had a name for.
LET_GO = """
import weakref
import torch

def launch(x):
    kept = x
    return weakref.ref(kept.add_(1))

def test_it_is_freed():
    freed = launch(torch.ones(8, device="cuda"))  # alone: pytest holds on to what an assertion is made of
    assert freed() is None
"""


needs_sanitizer = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    path = tmp_path / "compute-sanitizer"
    path.write_text(SCRIPT)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_errors_and_results_are_read() -> None:
    assert sanitizer.check("memcheck", ["good"], 30) == {"errors": 0, "result": "3 passed in 2.0s", "said": []}
    assert sanitizer.check("racecheck", ["good"], 30)["errors"] == 0
    bad = sanitizer.check("memcheck", ["bad"], 30)
    assert bad["errors"] == 7
    assert "failed" in bad["result"]
    assert "Invalid __global__" in bad["said"][0]


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("beyond", [0, 2**18])
def test_the_programs_own_names_are_looked_at(tmp_path: Path, beyond: int) -> None:
    path = tmp_path / "test_beyond.py"
    path.write_text(OUT_OF_BOUNDS.format(beyond=beyond))
    found = sanitizer.check("memcheck", [str(path), f"--rootdir={tmp_path}"], 120)
    assert found["errors"] is not None, found
    assert (found["errors"] > 0) == (beyond > 0), found


@pytest.mark.gpu
@needs_sanitizer
def test_tensors_are_freed_under_it(tmp_path: Path) -> None:
    """For backtraces of the host it keeps Python's frames."""
    path = tmp_path / "test_let_go.py"
    path.write_text(LET_GO)
    found = sanitizer.check("memcheck", [str(path), f"--rootdir={tmp_path}"], 120)
    assert found["errors"] == 0
    assert "1 passed" in found["result"], found


def test_the_caller_of_a_kernel_is_told_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "compute-sanitizer"
    program.write_text(SCRIPT.replace("#!/bin/sh", f'#!/bin/sh\necho "$*" >> {seen}'))
    for options in ([], ["--backtrace", "yes"]):
        arguments = ["--tools", "memcheck", "--files", "good", "--out", str(tmp_path / "rows.jsonl"), *options]
        monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path, keyword: [f"{path}::1"])
        monkeypatch.setattr(sys, "argv", ["sanitizer", *arguments])
        sanitizer.main()
    device, host = seen.read_text().splitlines()
    assert "--show-backtrace device " in device
    assert "--show-backtrace yes " in host


def test_what_does_not_end_is_not_clean() -> None:
    assert sanitizer.check("memcheck", ["slow"], 0.5)["errors"] is None
    broken = sanitizer.check("memcheck", ["broken"], 30)
    assert broken["errors"] is None


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path, keyword: [f"{path}::{i}" for i in range(3)])
    arguments = ["--files", "good", "bad", "--out", str(out), "--timeout", "30", "--tests", "2"]
    monkeypatch.setattr(sys, "argv", ["sanitizer", *arguments])
    sanitizer.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tool"] for row in rows] == ["memcheck", "racecheck"]
    assert {path: [f["errors"] for f in found] for path, found in rows[0]["files"].items()} == {
        "good": [0, 0],
        "bad": [7, 7],
    }


def test_a_deadline_ends_with_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran, what was cut off and what never began: each is said, and nothing of it counts as clean."""
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path, keyword: [f"{path}::{i}" for i in range(4)])
    arguments = ["--tools", "memcheck", "--files", "good", "slow", "good2", "--out", str(out), "--every", "2"]
    monkeypatch.setattr(sys, "argv", ["sanitizer", *arguments, "--deadline", "3", "--processes", "1"])
    sanitizer.main()
    files = json.loads(out.read_text())["files"]
    assert [(f["errors"], f["result"][:9]) for path in files for f in files[path]] == [
        (0, "3 passed "),
        (None, "not ended"),
        (None, "not start"),
    ]


def test_what_needs_the_cache_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others, in the same file, not; under racecheck all have it."""
    seen = tmp_path / "seen"
    program = tmp_path / "compute-sanitizer"
    program.write_text(SCRIPT.replace("#!/bin/sh", f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING; $*" >> {seen}'))
    tests = ["test_sum", "test_a_cuda_graph_replays", "test_step", "test_peak_memory"]
    monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path, keyword: tests)
    arguments = ["--files", "any", "--out", str(tmp_path / "rows.jsonl"), "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["sanitizer", *arguments])
    sanitizer.main()
    ran = [re.search(r"^(1?);.*--tool (\w+) .*ignore (.*)$", line).groups() for line in seen.read_text().splitlines()]  # type: ignore[union-attr]
    assert ran == [
        ("1", "memcheck", "test_sum test_step"),
        ("", "memcheck", "test_a_cuda_graph_replays test_peak_memory"),
        ("", "racecheck", "test_sum test_a_cuda_graph_replays test_step test_peak_memory"),
    ]


def test_every_test_goes_to_one_process() -> None:
    assert sanitizer.parts_of(["a", "b", "c", "d", "e"], 2) == [["a", "d"], ["b", "e"], ["c"]]
    assert sanitizer.parts_of([], 2) == []


def test_gpu_tests_are_found_and_slow_ones_left_out() -> None:
    path = "tests/kernels/test_rope.py"
    found = sanitizer.tests_of("racecheck", path, "")
    assert len(found) > 100
    assert all(name.startswith(path) for name in found)
    assert not any("2_to_31" in name for name in found)


def test_nothing_else_is_left_out_or_has_the_cache() -> None:
    """A part of a name may be in more names than it was meant for."""
    files = [
        "tests/kernels/gpu",
        "tests/kernels",
        "tests/ops",
        "tests/models",
        "tests/optim",
        "tests/test_memory.py",
        "tests/test_weight_amax.py",
    ]
    command = [*sanitizer.PYTEST, "--collect-only", "-m", "gpu", "-o", "addopts=-q", *files]
    listed = subprocess.run(command, cwd=sanitizer.ROOT, capture_output=True, text=True)
    everything = {re.sub(r"\[.*", "", line) for line in listed.stdout.splitlines() if "::" in line}
    assert any(name.startswith("tests/models/test_llama.py") for name in everything)  # whole blocks
    assert sanitizer.SLOW["racecheck"] == (*sanitizer.SLOW["memcheck"], "2_to_31")
    # As `pytest -k` compares: parts of names of tests and of their files, in any case.
    left_out = {name for name in everything if any(word in name.lower() for word in sanitizer.SLOW["racecheck"])}
    assert {name.split("::")[-1] for name in left_out if "2_to_31" not in name} == {
        "test_converted_model_is_as_good_as_fp8_gemms_alone"
    }
    assert {name.split("::")[-1] for name in left_out if "2_to_31" in name} == {
        "test_a_tensor_of_more_than_2_to_31_elements"
    }
    assert {name.split("::")[-1] for name in everything if sanitizer.needs_the_cache(name)} == {
        # Of graphs.
        "test_a_cuda_graph_captures_the_step",
        "test_a_cuda_graph_replays_after_steps_of_other_kinds",
        "test_addresses_uploaded_in_a_capture_are_there_at_a_replay_only",
        "test_captured_steps_follow_the_weights",
        "test_cuda_graphs_read_what_adamw_writes",
        "test_forgotten_cuda_graphs_give_their_memory_back",
        "test_gradients_add_up_over_passes_of_cuda_graphs",
        "test_in_a_graph",
        "test_layers_replayed_as_cuda_graphs_give_the_eager_gradients",
        # Of how much memory is allocated when.
        "test_gpu_memory_of_a_step_is_the_buffers",
        "test_gradient_memory_of_a_backward_pass",
        "test_memory_on_a_gpu_is_less_by_what_is_offloaded",
        "test_peak_memory_is_one_chunk_and_the_gradients",
        "test_released_gradients_let_go_as_well",
        "test_segments_that_grow_also_after_the_import",
        "test_states_are_in_host_memory_and_buffers_are_bounded",
        "test_the_graph_is_freed_after_the_backward",
        "test_what_is_taken_out_is_freed_at_once",
        "test_what_the_backward_allocates_is_what_an_estimate_says",
    }


def test_every_kernel_test_is_looked_at() -> None:
    """memcheck: all files with tests for a GPU, but for those that train and measure."""
    files = sanitizer.test_files("memcheck")
    assert len(set(files)) == len(files)
    tests = sanitizer.ROOT / "tests"
    left_out = [tests / name for name in ("train", "bench", "benchmarks", "estimate")]
    for path in tests.rglob("test_*.py"):
        if re.search(r"mark\.gpu|def test_.*\bdevice\b", path.read_text()) and path.parent not in left_out:
            assert str(path.relative_to(sanitizer.ROOT)) in files
    assert {"tests/ops/test_block.py", "tests/models/test_llama.py", "tests/kernels/test_attention.py"} < set(files)
    kernels = sanitizer.test_files("racecheck")
    assert "tests/kernels/test_norm.py" in kernels
    assert all(path.startswith("tests/kernels/") for path in kernels)


SMALL = """
import pytest
pytestmark = pytest.mark.gpu
def test_waits(): pass
def test_batches(): pass
def test_others(): pass
def test_2_to_31(): pass
def test_captures(): pass
"""


def test_tests_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a project whose tests import nothing: real ones take seconds to be listed."""
    for name in ("test_small.py", "test_numerics.py"):
        (tmp_path / name).write_text(SMALL)
    (tmp_path / "pyproject.toml").write_text((sanitizer.ROOT / "pyproject.toml").read_text())
    assert (sanitizer.ROOT / "tests/models/test_numerics.py").exists()  # averages over seeds: left out by this name
    monkeypatch.setattr(sanitizer, "ROOT", tmp_path)

    def listed(tool: str, path: str, keyword: str = "") -> list[str]:
        return [name.removeprefix(f"{path}::test_") for name in sanitizer.tests_of(tool, path, keyword)]

    assert listed("memcheck", "test_small.py") == ["waits", "batches", "others", "2_to_31", "captures"]
    assert listed("racecheck", "test_small.py") == ["waits", "batches", "others", "captures"]
    assert listed("racecheck", "test_small.py", "waits or batches or 2_to") == ["waits", "batches"]
    assert listed("memcheck", "test_numerics.py") == []
