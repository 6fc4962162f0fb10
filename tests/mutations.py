"""python -m tests.mutations [WORD ...]     break the code in many ways; the tests must notice each

Every mutation replaces one piece of text, in a copy of the tree, and runs the tests beside it, which must fail. A
mutation whose text is gone is an error: write it anew. Without words all run, two at a time (some minutes); with words
those whose name holds one of them. Exit status 1 if one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """What is broken: the file under overcoat/, the text, once in it, and what takes its place; who must notice."""

    name: str
    path: str
    text: str
    replacement: str
    tests: str  # under tests/, with options of pytest


MUTATIONS: list[Mutation] = []


def survives(mutation: Mutation) -> str:
    """ "" if the tests notice, else what happened."""
    source = (ROOT / "overcoat" / mutation.path).read_text()
    if source.count(mutation.text) != 1:
        return f"its text is {source.count(mutation.text)} times in {mutation.path}"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("overcoat", "tests", "benchmarks", "configs"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        (Path(folder) / "overcoat" / mutation.path).write_text(source.replace(mutation.text, mutation.replacement))
        first, *options = mutation.tests.split(" ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{first}", *options]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (ended.stdout.strip() or ended.stderr.strip()).splitlines()[-1]
    return "" if ended.returncode == 1 else f"pytest ended with {ended.returncode}: {last}"


def main(words: list[str]) -> int:
    """Run, and print a line for each."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutation, fault in zip(chosen, pool.map(survives, chosen), strict=True):
            survivors += bool(fault)
            print(f"SURVIVED {mutation.name}: {fault}" if fault else f"caught   {mutation.name}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} not caught")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
