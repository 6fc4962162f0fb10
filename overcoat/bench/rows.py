"""One format for every result: a JSON line that says when, where, with what and by which command it was measured.

    {"date": ..., "commit": ..., "gpu": ..., "torch": ..., "triton": ..., "peers": {...}, "command": ..., figures ...}

`date` is when the process began, so the rows of one run, whose ratios count, can be told from those of another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from overcoat.kernels.language import triton
from overcoat.version import VERSION

Row = dict[str, Any]

# Distributions whose version can change a result: the models' library and the peers.
PACKAGES = (
    "transformers",
    "torchao",
    "flashoptim",
    "bitsandbytes",
    "galore_torch",
    "transformer_engine",
    "liger_kernel",
)
# Options that name a file to write; where it lies says nothing about the result.
FILE_OPTIONS = ("--json", "--plot", "--out")
ROOT = Path(__file__).resolve().parents[2]
_STARTED = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment(command: str | None = None) -> Row:
    """Where and with what a row is measured; `command` is this process's own unless given."""
    return {
        "date": _STARTED,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "peers": installed_versions(),
        "command": command or command_line(*_own_command()),
    }


def append_row(path: Path, figures: Row, where: Row | None = None) -> None:
    """Append `figures`, after `where` or this process's `environment()`, to a JSON-lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**(environment() if where is None else where), **figures}) + "\n")


def commit() -> str:
    """OVERCOAT_COMMIT if set, else the checkout's commit ("-dirty" if changed), else the installed version."""
    if told := os.environ.get("OVERCOAT_COMMIT"):
        return told
    # Installed into an environment inside somebody's repository, that repository's commit would be the answer.
    if _git("rev-parse", "--show-toplevel") == str(ROOT):
        return _git("describe", "--always", "--dirty") or f"overcoat {VERSION}"
    return f"overcoat {VERSION}"


def installed_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command as a user types it, without this machine's directories."""
    words = [program]
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=")
        if previous in FILE_OPTIONS or Path(argument).is_absolute():
            argument = Path(argument).name
        elif equals and (option in FILE_OPTIONS or Path(value).is_absolute()):
            argument = f"{option}={Path(value).name}"
        words.append(shlex.quote(argument))
    return " ".join(words)


def _own_command() -> tuple[str, list[str]]:
    script = Path(sys.argv[0])
    is_module = script.suffix == ".py" and (script.parent / "__init__.py").is_file()
    return f"python -m {script.parent.name}.{script.stem}" if is_module else script.name, sys.argv[1:]


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
