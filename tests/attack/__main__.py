"""python -m tests.attack [KIND ...] --count N --seed S     attack; exit status 1 if anything is found

Kinds: configs, kills, damage, disk, two, library (default: all, each with its own count). A case is known by its kind,
the seed and its number: `python -m tests.attack kills --seed S --only N` repeats one. Equal findings are told once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.attack.harness import Ground

# Cases of a night and of a minute.
COUNTS = {"configs": (2000, 40), "kills": (1000, 12), "damage": (300, 12), "disk": (100, 6), "two": (60, 3),
          "library": (700, 40)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(COUNTS))
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--short", action="store_true", help="as many cases as fit CI")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    options = parser.parse_args()
    kinds = options.kinds or list(COUNTS)
    if unknown := set(kinds) - set(COUNTS):
        parser.error(f"unknown kind {', '.join(unknown)}; choose from {', '.join(COUNTS)}")
    prepare_process()
    from tests.attack.harness import Ground

    failed = 0
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        ground = Ground(Path(folder).resolve() / "ground")
        for kind in kinds:
            count = options.count or COUNTS[kind][options.short]
            numbers = range(count) if options.only is None else [options.only]
            failed += run(kind, numbers, options.seed, ground)
    return 1 if failed else 0


def prepare_process() -> None:
    """What the children inherit: one thread, no network."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.pop("COLUMNS", None)
    import torch

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def run(kind: str, numbers: Sequence[int], seed: int, ground: Ground) -> int:
    """Attack; prints each kind of finding once, and returns how many cases found something."""
    from tests.attack.harness import fresh

    attack = importlib.import_module(f"tests.attack.{kind}").attack
    found: Counter[str] = Counter()
    start = time.perf_counter()
    for number in numbers:
        with fresh(ground.folder / kind, str(number)) as folder:
            try:
                case, fault = attack(ground, number, random.Random(f"{kind} {seed} {number}"), folder)
            except Exception as error:  # what a run left cannot even be read
                case, fault = "not judged", repr(error)
        if fault:
            signature = re.sub(r"/[^ ']*|\d+", "", fault)
            found[signature] += 1
            if found[signature] == 1:
                line = f"FOUND {kind} {number}: {case}: {fault}"
                print(line.replace(str(folder), "CASE").replace(str(ground.folder), "GROUND"), flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{kind}, seed {seed}: {len(numbers)} cases in {seconds:.0f} s, {found.total()} with a finding, "
        f"{len(found)} different", flush=True,
    )  # fmt: skip
    return found.total()


if __name__ == "__main__":
    sys.exit(main())
