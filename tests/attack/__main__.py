"""python -m tests.attack [KIND ...] --count N --seed S     attack; exit status 1 if anything is found

Kinds: truth, weapons, chats, configs, kills, damage, disk, two, library, processes (default: all, each with its own
count). A case is known by its kind, the seed and its number: `python -m tests.attack kills --seed S --only N` repeats
one. Equal findings are told once.
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
from pathlib import Path
from typing import Any

# Module; cases of the long attack, of a minute's and of CI's.
KINDS = {
    "truth": ("truth", 400, 34, 14), "weapons": ("weapons", 600, 28, 5), "chats": ("chats", 300, 20, 3),
    "configs": ("configs", 2000, 36, 6), "kills": ("interruptions", 1000, 10, 2), "damage": ("damage", 300, 10, 2),
    "disk": ("interruptions", 100, 6, 1), "two": ("interruptions", 60, 3, 1), "library": ("library", 700, 40, 10),
    "processes": ("processes", 200, 6, 3),
}  # fmt: skip
SIZES = ("long", "minute", "short")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND")
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--size", choices=SIZES, default="long", help="an hour, a minute, or what fits CI")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--first", action="store_true", help="end at the first finding")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    options = parser.parse_args()
    # What the children inherit: one thread, no network.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    from tests.attack.harness import Ground

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        ground, found = Ground(Path(folder).resolve() / "ground"), 0
        for kind in options.kinds or KINDS:
            count = options.count or KINDS[kind][1 + SIZES.index(options.size)]
            numbers = range(count) if options.only is None else [options.only]
            found += run(kind, numbers, options.seed, ground, options.first)
            if found and options.first:
                break
    return min(found, 1)


def run(kind: str, numbers: Any, seed: int, ground: Any, ends_at_first: bool) -> int:
    """Attack; prints each kind of finding once, and returns how many cases found something."""
    attack = getattr(importlib.import_module(f"tests.attack.{KINDS[kind][0]}"), kind)
    found: Counter[str] = Counter()
    begun = time.perf_counter()
    for number in numbers:
        with tempfile.TemporaryDirectory(dir=ground.folder, ignore_cleanup_errors=True) as name:
            try:
                case, fault = attack(ground, number, random.Random(f"{kind} {seed} {number}"), Path(name))
            except Exception as error:  # what a run left cannot even be read
                case, fault = "not judged", repr(error)
        found[signature := re.sub(r"/[^ ']*|\d+", "", fault)] += 1
        if fault and found[signature] == 1:
            line = f"FOUND {kind} {number}: {case}: {fault}"
            print(line.replace(name, "CASE").replace(str(ground.folder), "GROUND"), flush=True)
        if fault and ends_at_first:
            break
    del found[""]
    counts = f"{len(numbers)} cases in {time.perf_counter() - begun:.0f} s, {found.total()} with a finding"
    print(f"{kind}, seed {seed}: {counts}, {len(found)} different", flush=True)
    return found.total()


if __name__ == "__main__":
    sys.exit(main())
