"""Tries a wheel in empty environments, for `make dist`: python -m tests.wheel dist/*.whl [--full TORCH [PYTHON ...]]

Every Python of this machine that the wheel is for gets it alone: the command answers, all modules compile, and what
needs a package says so in one line. With --full, this Python and those named get it with all that [all] brings, and
train two steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MINORS = range(10, 15)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

ESTIMATE = ["-m", "overcoat", "estimate", "--model", "124m"]
# A command's arguments for Python, its status, and what it prints, first in an environment with the wheel alone.
ALONE: list[tuple[list[str], int, str]] = [
    (["-m", "compileall", "-q", "-f", "{package}"], 0, ""),
    (["-m", "overcoat", "--version"], 0, "overcoat "),
    (["-m", "overcoat", "--help"], 0, "train, resume or fine-tune"),
    (["-c", "import overcoat; print(overcoat.__version__, 'AdamW' in dir(overcoat))"], 0, "True"),
    (
        ESTIMATE,
        2,
        "overcoat: overcoat estimate needs the package 'torch', which is missing: pip install 'overcoat[hf]'",
    ),
    (["-m", "overcoat", "train", "a.toml"], 2, "needs the package 'rich': pip install 'overcoat[hf]'"),
]
FULL: list[tuple[list[str], int, str]] = [
    *ALONE[:4],
    (ESTIMATE, 0, "GiB"),
    (["train.py"], 0, "2 of 2 decoder layers train in FP8"),
]
TRAIN = """
import torch, overcoat
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16().train()
print(overcoat.convert(model))
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)
ids = torch.randint(256, (2, 64))
losses = []
for _ in range(2):
    losses.append(model(input_ids=ids, labels=ids).loss)
    losses[-1].backward()
    optimizer.step(clip_grad_norm=1.0)
    optimizer.zero_grad()
assert losses[1] < losses[0], losses
"""


def pythons() -> Iterator[str]:
    """One of each version that the wheel is for, of those on the path and pyenv's."""
    for minor in MINORS:
        homes = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        for name in (f"python3.{minor}", *map(str, homes)):
            code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
            if _answers([name, "-c", code]):
                yield name
                break


def _answers(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def try_one(python: str, wheel: str, torch: str | None) -> None:
    """Raises RuntimeError for a command that does not do what it should."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = str(Path(folder, "bin", "python"))
        what = ["--no-deps", wheel] if torch is None else [torch, f"{wheel}[all]"]
        subprocess.run(
            [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", *what], check=True, env=ENVIRONMENT
        )
        Path(folder, "train.py").write_text(TRAIN)
        (package,) = map(str, Path(folder).glob("lib/python3.*/site-packages/overcoat"))
        for words, status, text in ALONE if torch is None else FULL:
            command = [inside, *(word.format(package=package) for word in words)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
            said = done.stdout + done.stderr
            if done.returncode != status or text not in said or (status and len(said.splitlines()) != 1):
                raise RuntimeError(f"{python}: {' '.join(words)} ended with {done.returncode} and said:\n{said}")
        version = subprocess.run([inside, "--version"], capture_output=True, text=True).stdout.strip()
    with_what = "alone" if torch is None else f"with {torch} and [all]"
    print(f"{version}: the wheel {with_what} does what it should, {time.time() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    parser.add_argument(
        "--full", nargs="+", metavar="TORCH", help="a requirement for torch, then Pythons besides this one"
    )
    parsed = parser.parse_args()
    wheel = str(Path(parsed.wheel).resolve())
    for python in pythons():
        try_one(python, wheel, None)
    torch, *others = parsed.full or [None]
    for python in (sys.executable, *others) if torch else ():
        try_one(python, wheel, torch)


if __name__ == "__main__":
    main()
