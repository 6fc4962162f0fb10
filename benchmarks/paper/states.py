"""Tables 1 and 8: what AdamW's moments lose in 8-bit codes, and what expansion does to them.

AdamW moves a weight by r = m / (sqrt(v) + eps), so that is where an error counts. With r' from the decoded moments,
over all parameters of a run that kept its moments in FP32:

    error = 1e4 * sum (r' - r)^2 / sum r^2

The paper's errors are sums of squares on its own states, so what compares is the ratio to E4M3's for both moments.
Codes are rounded as a step rounds them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rows import Result, Row
from overcoat.formats import to_groups
from overcoat.formats.moments import MOMENT_CODES, decode_first, decode_second, encode_first, encode_second
from overcoat.train.checkpoint import list_checkpoints, read_states
from overcoat.train.files import RECORD

GROUP_SIZE = 128
CHUNK = 1 << 16  # groups encoded at once
EPS = 1e-8
FIRST = ("e4m3", "e4m3x", "e5m2", "e5m2x", "de8", "de8x", "sqrt8", "bf16", "fp32")
SECOND = ("e4m3", "e4m3x", "e5m2", "e5m2x", "de8", "de8x", "log8", "bf16", "fp32")
PAIRS = (*itertools.product(FIRST, SECOND), ("ratio8", "log8"))
# Rows: codes of m; columns: of v, in SECOND's order.
TABLE1 = {
    "e4m3": (20.10, 18.08, 25.65, 18.16),
    "e4m3x": (15.13, 12.31, 21.96, 12.43),
    "e5m2": (37.02, 35.96, 40.30, 36.00),
    "e5m2x": (17.79, 15.48, 23.84, 15.57),
}
TABLE8 = {
    "e4m3x": (15.13, 12.31, 21.96, 12.43, 14.01, 18.84),
    "de8": (12.11, 8.27, 20.02, 8.43, 10.54, 16.25),
    "de8x": (11.57, 7.47, 19.69, 7.65, 9.91, 15.81),
}
OURS = (("ratio8", "log8"), ("sqrt8", "log8"), ("bf16", "bf16"))


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run directory, or the path itself if it is one. ValueError: there is none."""
    found = list_checkpoints(run_dir / "checkpoints") or [run_dir]
    if not (found[-1] / RECORD).is_file():
        raise ValueError(f"--checkpoint {run_dir}: no run directory or checkpoint of `overcoat train`")
    return found[-1]


def groups_of(checkpoint: Path, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(m, v) of each parameter in a checkpoint of `overcoat train`, FP32 groups (1, N, 128) in chunks. ValueError: the
    moments of the checkpoint are already coded."""
    for state in read_states(checkpoint):
        moments = state["exp_avg"], state["exp_avg_sq"]
        if any(moment.dtype != torch.float32 for moment in moments):
            raise ValueError(f"{checkpoint}: moments are {moments[0].dtype}; train with optimizer.moments=fp32")
        m, v = (to_groups(x.to(device).reshape(x.shape[0], -1), GROUP_SIZE).view(1, -1, GROUP_SIZE) for x in moments)
        yield from zip(m.split(CHUNK, 1), v.split(CHUNK, 1), strict=True)


def errors(m: Tensor, v: Tensor, eps: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of r^2, and of (r' - r)^2 for each pair of codes, named "m v"; 0-d FP64."""
    generator = torch.Generator(m.device).manual_seed(0)
    bits, phases = torch.randint(-(2**31), 2**31, (2, *m.shape[:2]), generator=generator, device=m.device).int()
    encoded = {name: encode_second(v, MOMENT_CODES[name], bits, phases) for name in SECOND}
    second = {name: 1.0 / (decode_second(of, MOMENT_CODES[name]).float().sqrt() + eps) for name, of in encoded.items()}
    first = {}
    for name in (*FIRST, "ratio8"):
        code = MOMENT_CODES[name]
        first[name] = decode_first(encode_first(m, code, bits, encoded["log8"]), code, encoded["log8"]).float()
    ratio = m / (v.sqrt() + eps)
    found = {f"{a} {b}": (first[a] * second[b] - ratio).square().sum(dtype=torch.float64) for a, b in PAIRS}
    return ratio.square().sum(dtype=torch.float64), found


def analyse(checkpoint: Path, eps: float, device: str) -> dict[str, float]:
    """The relative error of each pair of codes over all parameters of a checkpoint."""
    reference, total = 0.0, {f"{a} {b}": 0.0 for a, b in PAIRS}
    for m, v in groups_of(checkpoint, device):
        part, found = errors(m, v, eps)
        reference += float(part)
        for pair, value in found.items():
            total[pair] += float(value)
    return {pair: 1e4 * value / reference for pair, value in total.items()}


def _table(title: str, of_paper: Mapping[str, tuple[float, ...]], options: argparse.Namespace) -> Result:
    checkpoint = newest_checkpoint(options.checkpoint)
    found = analyse(checkpoint, EPS, "cuda" if torch.cuda.is_available() else "cpu")
    pairs: list[tuple[str, str, float | None]]
    pairs = [(a, b, value) for a, values in of_paper.items() for b, value in zip(SECOND, values, strict=False)]
    pairs += [(a, b, None) for a, b in OURS]
    rows: list[Row] = []
    for a, b, value in pairs:
        row: Row = {"name": f"m {a}, v {b}", "paper": value, "ours": found[f"{a} {b}"]}
        row["paper / E4M3"] = None if value is None else value / TABLE1["e4m3"][0]
        rows.append({**row, "ours / E4M3": found[f"{a} {b}"] / found["e4m3 e4m3"]})
    notes = ("x: with dynamic range expansion. ours: 1e4 x relative mean square; compare the ratios.",)
    return title, rows, ("paper", "ours", "paper / E4M3", "ours / E4M3"), notes


def table1(options: argparse.Namespace) -> Result:
    """Errors of FP8 moments, with and without expansion."""
    return _table("Table 1: error of m / sqrt(v), FP8 codes", TABLE1, options)


def table8(options: argparse.Namespace) -> Result:
    """Errors of moments with dynamic exponents."""
    return _table("Table 8: error of m / sqrt(v), with dynamic exponents", TABLE8, options)
