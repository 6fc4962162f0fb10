"""Softmax attention by every kernel that takes the case, and whether the rule takes the fastest.

    python -m benchmarks.attention                    every case of CASES
    python -m benchmarks.attention --only packed      those with all these words in their name

    cudnn, flash, memory-efficient   what `overcoat.kernels.attention` chooses among, called as it calls them
    flash, packed                    packed rows as documents of their own lengths, without a mask

Inputs fresh in BF16, one fused buffer of q, k and v. One row of results/attention.jsonl for each case. For each kernel:
ms and peak bytes above the inputs, forward and backward, all that comes before and after the library's call counted
(mask made additive, k and v repeated, gradients laid out by token), and the worst SQNR in dB of o, dq, dk and dv
against what the rule's kernel gives, to see that both compute the same; or why it refused. The rule holds where its
choice takes at most 3% longer than the fastest, forward and backward together.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import RESULTS, append_row, time_ms
from overcoat.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    PACKED,
    Kernel,
    backward_by,
    chosen,
    forward_by,
)
from overcoat.kernels.packed import dense_mask

TOLERANCE = 0.03
REPEATS = 20
DOCUMENT = (100, 500)  # shortest and longest, in tokens


class Case(NamedTuple):
    """Shape and mask: "causal", "padding" (boolean, causal, the end of each row hidden) or "packed" (documents)."""

    name: str
    batch: int
    sequence: int
    num_q: int
    num_kv: int
    width: int
    kind: str = "causal"


CASES = (
    Case("32 heads", 4, 2048, 32, 32, 128),
    Case("32 heads, long", 4, 4096, 32, 32, 128),
    Case("16 heads", 4, 2048, 16, 16, 128),
    Case("32 on 8 heads", 4, 2048, 32, 8, 128),
    Case("28 on 4 heads", 4, 2048, 28, 4, 128),
    Case("12 narrow heads", 32, 1024, 12, 12, 64),
    Case("short", 16, 512, 32, 32, 128),
    Case("one long row", 1, 8192, 32, 32, 128),
    Case("padding", 4, 2048, 32, 32, 128, "padding"),
    Case("padding, 32 on 8 heads", 4, 2048, 32, 8, 128, "padding"),
    Case("packed", 4, 2048, 32, 32, 128, "packed"),
    Case("packed, 32 on 8 heads", 4, 2048, 32, 8, 128, "packed"),
)


# ---- masks ---------------------------------------------------------------------------------------------------------


def padding_mask(batch: int, sequence: int) -> Tensor:
    """(B, 1, S, S) bool on the CPU: causal, and of each row between nothing and half hidden at its end."""
    real = torch.randint(sequence // 2, sequence + 1, (batch, 1, 1, 1))
    places = torch.arange(sequence)
    return (places <= places[:, None]) & (places < real)


def documents(batch: int, sequence: int) -> Tensor:
    """Where documents begin among the B * S tokens, and the end: (N + 1,) int32 on the CPU; rows cut documents."""
    starts: list[int] = []
    for row in range(batch):
        place = 0
        while place < sequence:
            starts.append(row * sequence + place)
            place += int(torch.randint(DOCUMENT[0], DOCUMENT[1] + 1, ()))
    return torch.tensor([*starts, batch * sequence], dtype=torch.int32)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """qkv (T, (num_q + 2 num_kv) * D), do (T, num_q * D), mask (B, 1, S, S) bool or None, `documents` or None."""

    qkv: Tensor
    do: Tensor
    mask: Tensor | None
    starts: Tensor | None


def inputs(case: Case, device: str = "cuda") -> Inputs:
    """Normal numbers in BF16 and the mask."""
    torch.manual_seed(0)
    tokens, columns = case.batch * case.sequence, (case.num_q + 2 * case.num_kv) * case.width
    starts = documents(case.batch, case.sequence) if case.kind == "packed" else None
    mask = None
    if starts is not None:
        mask = dense_mask(starts, case.batch, case.sequence)
    elif case.kind == "padding":
        mask = padding_mask(case.batch, case.sequence)
    qkv = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    do = torch.randn(tokens, case.num_q * case.width, device=device, dtype=torch.bfloat16)
    return Inputs(qkv, do, *(None if x is None else x.to(device) for x in (mask, starts)))


def contestants(given: Inputs) -> dict[str, Kernel]:
    """Who takes part, by name."""
    if given.mask is None:
        return {"cudnn": CUDNN, "flash": FLASH, "memory-efficient": EFFICIENT}
    found = {"memory-efficient": EFFICIENT, "cudnn": CUDNN}
    return found if given.starts is None else {"flash, packed": PACKED, **found}


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most that `function` holds on the GPU besides what was there, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def measure(
    kernel: Kernel, case: Case, given: Inputs, repeats: int = REPEATS
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Figures of both directions, and o, dq, dk, dv."""
    mask = given.starts if kernel is PACKED else given.mask
    shape = (mask, case.batch, case.num_q, case.num_kv, case.width**-0.5)
    o, lse = forward_by(kernel, given.qkv, *shape)
    directions: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "forward": lambda: forward_by(kernel, given.qkv, *shape),
        "backward": lambda: backward_by(kernel, given.do, given.qkv, o, lse, *shape),
    }
    results = (o, *directions["backward"]())
    row = {
        name: {**time_ms(function, repeats=repeats), "peak_bytes": peak_bytes(function)}
        for name, function in directions.items()
    }
    return row, results


def sqnr(truth: Tensor, value: Tensor) -> float:
    """Decibels; -inf where `value` is not finite."""
    if not value.isfinite().all():
        return -math.inf
    noise = (value.float() - truth.float()).square().sum()
    return math.inf if noise == 0 else 10 * float(torch.log10(truth.float().square().sum() / noise))


def attempt(kernel: Kernel, case: Case, given: Inputs, repeats: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """`measure`, or why there is nothing to measure."""
    try:
        return measure(kernel, case, given, repeats)
    except RuntimeError as error:
        return {"error": str(error).strip().splitlines()[0][:120]}, ()


def total(row: dict[str, Any]) -> float:
    """ms of forward and backward; infinite for who refused."""
    return math.inf if "error" in row else row["forward"]["ms"] + row["backward"]["ms"]


def verdict(kernels: dict[str, dict[str, Any]], choice: str) -> dict[str, Any]:
    """Which is the fastest, and whether `choice` is as fast; None where all refused."""
    fastest = min(kernels, key=lambda name: total(kernels[name]))
    if "error" in kernels[choice]:
        nobody = "error" in kernels[fastest]
        return {"chosen": choice, "fastest": None if nobody else fastest, "slower_by": None, "rule_holds": False}
    slower = total(kernels[choice]) / total(kernels[fastest]) - 1
    return {"chosen": choice, "fastest": fastest, "slower_by": slower, "rule_holds": slower <= TOLERANCE}


def run(case: Case, given: Inputs, repeats: int = REPEATS) -> dict[str, Any]:
    """The row of a case."""
    heads = given.qkv.view(case.batch, case.sequence, -1, case.width).transpose(1, 2)
    rule = chosen(heads[:, : case.num_q], given.mask if given.starts is None else given.starts)
    # The rule's own first: the others' results are compared with its.
    names = sorted(takes_part := contestants(given), key=lambda name: takes_part[name] is not rule)
    row, expected = attempt(takes_part[names[0]], case, given, repeats)
    kernels = {names[0]: row}
    for name in names[1:]:
        kernels[name], results = attempt(takes_part[name], case, given, repeats)
        if expected and results:
            kernels[name]["sqnr_db"] = min(map(sqnr, expected, results))
    figures = case._asdict()
    return {"case": figures.pop("name"), **figures, "kernels": kernels, **verdict(kernels, names[0])}


def text(row: dict[str, Any]) -> str:
    """A row as a table."""
    heads = f"{row['num_q']}/{row['num_kv']} x {row['width']}"
    lines = [f"\n{row['case']}: B{row['batch']} S{row['sequence']} {heads}, {row['kind']}"]
    lines.append(f"{'':22s} {'forward ms':>10s} {'MiB':>7s} {'backward ms':>11s} {'MiB':>7s} {'dB':>6s}")
    for name, it in row["kernels"].items():
        if "error" in it:
            lines.append(f"{name:22s} {it['error']}")
            continue
        forward, backward = it["forward"], it["backward"]
        lines.append(
            f"{name:22s} {forward['ms']:10.3f} {forward['peak_bytes'] / 2**20:7.0f} {backward['ms']:11.3f} "
            f"{backward['peak_bytes'] / 2**20:7.0f} {it.get('sqnr_db', math.nan):6.1f}"
        )
    by = "it refused" if row["slower_by"] is None else f"{row['slower_by']:.0%} slower"
    holds = "holds" if row["rule_holds"] else f"does not hold, {by}"
    return "\n".join([*lines, f"rule {row['chosen']}, fastest {row['fastest']}: {holds}"])


def main() -> None:
    """Measure the cases, print them, append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose names hold all these words")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.jsonl")
    arguments = parser.parse_args()
    for case in CASES:
        if not all(word in case.name for word in arguments.only):
            continue
        row = run(case, inputs(case), arguments.repeats)
        print(text(row), flush=True)
        append_row(arguments.out, {"benchmark": "attention", "cudnn": torch.backends.cudnn.version(), **row})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
