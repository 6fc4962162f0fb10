"""The Dockerfile, linted: by hadolint where it is installed, and for what it must not do anywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from overcoat.train.configfile import load_config

ROOT = Path(__file__).parents[1]
FILE = ROOT / "Dockerfile"
TEXT = FILE.read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and arguments of each, lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def findings(text: str) -> Iterator[str]:
    """What is wrong with a Dockerfile of this repository, one word each."""
    found = instructions(text)
    for word, rest in found:
        if word == "FROM" and not re.fullmatch(r"[\w./-]+:\d[\w.-]+", rest):
            yield "unpinned"
        if word == "COPY" and not all((ROOT / name).exists() for name in rest.split()[:-1]):
            yield "missing"
        is_lean = "--no-install-recommends" in rest and rest.endswith("rm -rf /var/lib/apt/lists/*")
        if word == "RUN" and "apt-get install" in rest and not is_lean:
            yield "apt"
        if word == "RUN" and "pip install" in rest and "--no-cache-dir" not in rest:
            yield "pip"
        if re.search(r"/root\b|~|\bsudo\b", rest):
            yield "root-only"
    users = [rest for word, rest in found if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        yield "root"
    if found[-1][0] != "CMD" or not found[-1][1].startswith("["):
        yield "command"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("cuda:13.0.1-base-ubuntu24.04", "cuda:latest", ["unpinned"]),
        ("cuda:13.0.1-base-ubuntu24.04", "cuda", ["unpinned"]),
        ("COPY overcoat", "COPY overcoats", ["missing"]),
        ("--no-install-recommends ", "", ["apt"]),
        ("    && rm -rf /var/lib/apt/lists/*", "    && true", ["apt"]),
        ("--no-cache-dir ", "", ["pip"]),
        ("HOME=/app", "HOME=/root", ["root-only"]),
        ("USER 1000\n", "", ["root"]),
        ("USER 1000", "USER root", ["root"]),
        ('["overcoat", "train", "configs/demo.toml"]', "overcoat train configs/demo.toml", ["command"]),
    ],
)
def test_the_dockerfile_is_clean_and_the_linter_sees_what_is_not(old: str, new: str, expected: list[str]) -> None:
    assert old in TEXT
    assert [*findings(TEXT.replace(old, new, 1))] == expected


def test_it_trains_the_demo_with_the_makefiles_pytorch() -> None:
    *_, (_, command) = instructions(TEXT)
    program, *words = json.loads(command)
    assert (program, words[0]) == ("overcoat", "train")
    assert load_config(str(ROOT / words[1]), []).train.steps > 0
    assert f"TORCH ?= {re.search(r'torch==[0-9.]+', TEXT)[0]}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    ignored = [f"--ignore={rule}" for rule in ("DL3008", "DL3013")]  # Ubuntu's versions; pyproject.toml has Python's
    done = subprocess.run(["hadolint", *ignored, str(FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
