"""`overcoat bench kernels`: bytes, time and share of the copy bandwidth of every kernel, on a model's shape.

Bytes are those that the call must move: every tensor given is read once, every one returned or mutated written once.
Times are of the device alone, with cold caches.

    of copy        share of the rate at which 4 GiB are read and written by a copy
    of same size   share of the rate of a copy that moves as many bytes as the kernel: a launch takes a few microseconds
                   before its first byte, which is a lot of a small tensor's time

Below 80% of the latter is a regression, or has its reason in docs/research/kernels.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from overcoat.bench.kernel_cases import FAMILIES, Inputs, KernelCase
from overcoat.bench.output import Column, decimals, percent
from overcoat.bench.rows import Row
from overcoat.bench.session import Session, add_common_arguments, attempt, matches
from overcoat.bench.shapes import BlockShape, block_shape
from overcoat.bench.timing import copy_ms, time_ms
from overcoat.estimate.command import positive

COLUMNS = (
    Column("MB", "bytes", decimals(1, 1e-6)),
    Column("ms", "ms", decimals(4)),
    Column("TB/s", "TB_per_s", decimals(2)),
    Column("of copy", "share", percent),
    Column("of same size", "share_of_same_size", percent),
)


def measure_family(family: str, shape: BlockShape, only: Sequence[str] | None, repeats: int, copy_rate: float) -> Row:
    """{kernel: figures} of one family's kernels that `only` leaves in; their inputs come from each other."""
    torch.manual_seed(0)
    with torch.no_grad():
        cases = (case for case in FAMILIES[family](Inputs(shape, "cuda")) if matches(case.name, only))
        return {case.name: attempt(measure, case, repeats, copy_rate) for case in cases}


def measure(case: KernelCase, repeats: int, copy_rate: float) -> Row:
    """Bytes, ms and shares of `copy_rate`, in bytes per second, and of a copy of the same size, of one kernel."""
    moved = case.moved_bytes(case.call())
    timing = time_ms(case.call, repeats)
    rate = moved / timing["ms"] * 1e3
    return {
        "bytes": moved,
        **timing,
        "TB_per_s": rate / 1e12,
        "share": rate / copy_rate,
        "share_of_same_size": copy_ms(moved, repeats) / timing["ms"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="MODEL[-sTOKENS]", default="7b-s2048", help="as of bench layer")
    parser.add_argument("--repeats", type=positive, default=20, help="timed calls (default 20)")
    add_common_arguments(parser, plot=False)


def run(parsed: argparse.Namespace) -> int:
    """Measure every family; of a family that fails, say so and go on."""
    shape = block_shape(parsed.shape)
    session = Session("kernels", parsed, COLUMNS)
    session.table(f"{parsed.shape}: batch {shape.batch}, sequence {shape.sequence}, {shape.model}")
    for family in FAMILIES:
        found = session.call(measure_family, family, shape, parsed.only, parsed.repeats, session.copy_rate)
        for name, figures in ({family: found} if "error" in found else found).items():
            session.add({"shape": parsed.shape, "name": name, **figures})
    return 0
