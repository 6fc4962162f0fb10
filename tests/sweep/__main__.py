"""python -m tests.sweep [--only KIND ...] [--mapping NAME ...] [--write] [--jobs N]

How `convert` takes every class in transformers' causal, image-text and encoder mappings: tiny, random, three batches
each (plain, padded, packed) and images, loss and every gradient against FP32 and against FP8 GEMMs alone. Prints a line
a kind; --write: the tables on docs/models.md (with --only these kinds' lines). What is wrong, silent or fails is
printed last, a line each, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator

from tests.sweep import page, tiny
from tests.sweep.compare import Row, safe_row


def rows(jobs: list[tuple[str, str]], processes: int) -> Iterator[Row]:
    """Yield the rows of (kind, mapping), in their order."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        yield from pool.imap(safe_row, jobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="KIND")
    parser.add_argument("--mapping", nargs="+", choices=list(tiny.MAPPINGS), default=list(tiny.MAPPINGS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    jobs = [(k, m) for m in options.mapping for k in tiny.kinds(m) if not options.only or k in options.only]
    if unknown := set(options.only or ()) - {kind for kind, _ in jobs}:
        parser.error(f"no kinds of {', '.join(options.mapping)}: {', '.join(sorted(unknown))}")
    found: dict[str, list[Row]] = {mapping: [] for mapping in options.mapping}
    for (_, mapping), each in zip(jobs, rows(jobs, options.jobs)):
        found[mapping].append(each)
        print(shown(each), flush=True)
    every = [each for of_mapping in found.values() for each in of_mapping]
    print(dict(Counter(each.trains.split(" ")[0] if each.ours is None else grade(each) for each in every)))
    faults = [f"{each.kind} ({each.model}): {fault}" for each in every for fault in each.faults]
    print("\n".join(faults))
    if options.write:
        page.write(found, whole=not options.only)
    return 1 if faults else 0


def grade(row: Row) -> str:
    return "whole" if row.trains.startswith("whole") else "in part" if "in blocks" in row.trains else "linear layers"


def shown(row: Row) -> str:
    """Return a row for the terminal."""
    decibels = "" if row.ours is None or row.alone is None else f"{row.ours:.1f}/{row.alone:.1f} dB"
    rest = "; ".join([*row.reasons, *row.notes])
    return f"{row.kind:24s} {row.trains:20s} {decibels:14s} loss without logits: {row.head or '-':.40s}  {rest:.160}"


if __name__ == "__main__":
    sys.exit(main())
