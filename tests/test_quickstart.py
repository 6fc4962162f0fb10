"""The quickstart and the tasks as a new user has them: a page's shell and Python blocks, in order, in one empty folder,
offline.

Left out are lines that begin with `pip`: the tree of the tests takes the place of the installation. A block that stands
there twice is given Ctrl-C the first time, once it has logged a step.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "docs" / "tasks"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER, LIMIT = Path("runs/chat"), 240  # of the page's run; seconds for a block


def start(language: str, text: str, folder: Path) -> subprocess.Popen[str]:
    """One block in a process group of its own, as a terminal starts it; a failed command ends it."""
    words = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
    home = folder.parent
    paths = {"PATH": f"{home}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HOME": str(home)}
    environment = {**os.environ, **paths, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*words, text], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, beside one with the command `overcoat`."""
    folder, command = tmp_path / "empty", tmp_path / "bin" / "overcoat"
    folder.mkdir()
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m overcoat "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.nightly  # a process for each command, most of whose time is imports: minutes
def test_every_block_of_the_page_runs(folder: Path) -> None:
    said: list[str] = []
    blocks = BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text())
    for number, (language, text) in enumerate(blocks):
        lines = [line for line in text.splitlines() if not line.startswith("pip ")]
        process = start(language, "\n".join(lines), folder)
        metrics, deadline = folder / FOLDER / "metrics.jsonl", time.monotonic() + LIMIT
        if interrupted := (language, text) in blocks[number + 1 :]:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
        try:
            said.append(process.communicate(timeout=LIMIT)[0])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == (130 if interrupted else 0), f"{text}\n{said[-1]}"
        assert "Traceback" not in said[-1], said[-1]
    _, convert, estimate, _, init, stopped, trained, looked, loaded = said
    assert "2 of 2 decoder layers train in FP8" in convert
    assert "peak" in estimate
    assert "rows fit" in init
    assert "the same command continues it" in stopped
    assert "resuming from runs/chat/checkpoints/step-" in trained
    assert "perplexity" in looked
    assert (folder / "report.html").stat().st_size > 10_000
    assert "Question: What is 7 plus 8?\nAnswer: It is" in loaded


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("chat", "It is"),
        ("pretrain", "held-out loss"),
        ("one-24gb-card", "14 frozen weights held in FP8"),
        ("many-gpus", "resuming from runs/other/checkpoints/step-00000010"),
        ("experts", '"expert_load"'),
    ],
)
def test_every_block_of_a_task_runs(page: str, expected: str, folder: Path) -> None:
    said = ""
    for language, text in BLOCK.findall((TASKS / f"{page}.md").read_text()):
        process = start(language, text, folder)
        try:
            said += process.communicate(timeout=LIMIT)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{text}\n{said}"
    assert expected in said
    assert "Traceback" not in said, said
