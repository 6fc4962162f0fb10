"""Metrics of a run: one JSON line per step, TensorBoard events, a progress bar or lines.

`metrics.jsonl` is only ever appended to:

    {"kind": "train", "step", "loss", "lr", "gradient_norm", ...}    the norm is null if it was not finite, and the step
                                                                     skipped; "total_tokens": of all steps so far;
                                                                     "aux_loss", "expert_load": routers' (routing.py)
    {"kind": "eval", "step", "loss", "attention_score"}              held-out loss; the largest log-sum-exp of attention
                                                                     in one row, if layers are converted
    {"kind": "tasks", "step", "sciq/acc", ...}                       figures of eval.tasks
    {"kind": "fp8", "step", "ranges": {layer: {product: {operand: [saturated, zero, limit]}}}}   (models/recording.py)
    {"kind": "fit", "step", "micro_batch", ...}                      the batch plan from that step on (batch_plan.py)
    {"kind": "resume", "step"}                                       a run resumed from this step

`read_metrics` drops the rows after a resumed step, except of kind "fit": a process wrote them that died before its next
checkpoint, and the resumed run repeats those steps with the same numbers. A truncated line is skipped; any other line
that is not a row is an error.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from overcoat.extras import reason
from overcoat.memory import peak_bytes
from overcoat.models.recording import Ranges
from overcoat.train import process
from overcoat.train.config import Config
from overcoat.train.configfile import LARGEST
from overcoat.train.loggers import Logger, open_loggers, scalars
from overcoat.train.routing import FIGURES as ROUTING

Row = dict[str, Any]
METRICS = "metrics.jsonl"
PLAIN: Any = {"highlight": False, "markup": False, "soft_wrap": True}  # for Console.print: a line as it is
# Keys of rows beside the step: numbers that may be missing, counts, and the keys that each kind requires.
FIGURES = ("loss", "lr", "gradient_norm", "attention_score", *ROUTING)
COUNTS = ("tokens_per_second", "peak_bytes", "total_tokens", "micro_batch")
KINDS = {
    "train": ("loss", "tokens_per_second", "peak_bytes"),
    "eval": ("loss",),
    "tasks": (),
    "fp8": ("ranges",),
    "fit": ("micro_batch", "block_checkpoints"),
    "resume": (),
}
LARGEST_FIGURE = 1e100
MOST_SKIPPED = 10  # steps in a row with infinite gradients: more than an odd batch, the model has diverged


@dataclass
class StepRecord:
    """Record of one step; the tensors are on the device, unread."""

    step: int
    lr: float
    num_tokens: int
    total_tokens: int  # of all steps so far
    loss: torch.Tensor  # () fp32
    gradient_norm: torch.Tensor  # () fp32, before clipping
    ranges: Ranges | None = None  # of the FP8 operands, where this step was sampled
    routing: torch.Tensor | None = None  # (2,) fp32, of models that return router logits

    def figures(self) -> torch.Tensor:
        """Return loss, gradient norm and the routers' figures in one tensor, which is read once."""
        pair = torch.stack((self.loss, self.gradient_norm))
        return pair if self.routing is None else torch.cat((pair, self.routing))


class RunLog:
    """Log of a run: rows and lines.

    Step records are collected unread; `flush` reads them from the device together, at each log interval. Of several
    processes each has one, and the first one's alone writes and says anything.
    """

    def __init__(self, config: Config, console: Console, title: str, first_step: int, device: torch.device):
        run_dir = Path(config.train.run_dir)
        if not process.is_first():
            console = Console(quiet=True)
        self._console, self._title, self._device, self._num_steps = console, title, device, config.train.num_steps
        path = run_dir / METRICS if process.is_first() else Path(os.devnull)
        self._file = path.open("a+", encoding="ascii", errors="backslashreplace")  # damaged bytes must not raise
        self._loggers = open_loggers(config, title, first_step) if process.is_first() else {}
        self._last_step = first_step
        if (size := self._file.seek(0, 2)) > 0:
            self._file.seek(size - 1)
            if self._file.read(1) != "\n":  # the last line is truncated
                self._file.write("\n")
            self.write({"kind": "resume", "step": first_step})
        time_columns = (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), *time_columns)
        self._bar = Progress(
            TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(title, total=config.train.num_steps, completed=first_step, status="")
        self._bar.start()
        self._records: list[StepRecord] = []
        self._skipped = 0
        self._mark = time.perf_counter()

    def write(self, *rows: Row) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()

        def write(logger: Logger) -> None:
            for row in rows:
                if figures := scalars(row):
                    logger.write(figures, row["step"])

        self._tell(write)

    def _tell(self, act: Callable[[Logger], None]) -> None:
        """Call `act` with every logger; drop a logger that fails."""
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:  # of any kind: a server may be down, training goes on
                del self._loggers[name]
                self.say(f"{name} gets no more figures of this run ({reason(error)}); {METRICS} has all of them")

    def say(self, text: str) -> None:
        self._console.print(text, **PLAIN)

    def tell_change(self, text: str, row: Row | None) -> None:
        """Log a new batch plan from the next step on; the failed attempt does not count into the rate."""
        self.flush()
        self.say(text)
        if row is not None:
            self.write(row)
        self.restart_clock()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Read the collected losses from the device, check them and write their rows, with the rate since the last
        flush."""
        if not self._records:
            return
        figures = torch.stack([each.figures() for each in self._records])
        values, seconds = figures.tolist(), time.perf_counter() - self._mark
        common = {
            "tokens_per_second": round(sum(record.num_tokens for record in self._records) / seconds, 1),
            "peak_bytes": process.largest(peak_bytes(self._device))[0],
        }
        rows = [
            {
                "kind": "train", "step": each.step, "loss": loss, "lr": each.lr, "gradient_norm": norm,
                "total_tokens": each.total_tokens, **common, **dict(zip(ROUTING, routing, strict=False)),
            }
            for each, (loss, norm, *routing) in zip(self._records, values, strict=True)
        ]  # fmt: skip
        ranges = [(record.step, record.ranges.by_layer) for record in self._records if record.ranges is not None]
        self._records.clear()
        self._skipped = check_finite(rows, self._skipped)
        self.write(*rows, *({"kind": "fp8", "step": step, "ranges": found} for step, found in ranges if found))
        self._show(rows[-1])
        self.restart_clock()

    def _show(self, row: Row) -> None:
        status = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tok/s"
        if self._device.type != "cpu":  # there it is the whole process's
            status += f"  peak {shown_bytes(row['peak_bytes'])}"
        self._last_step = row["step"]
        self._bar.update(self._task, completed=row["step"], status=status)
        if not self._console.is_terminal:
            self.say(f"{self._title}  step {row['step']}/{self._num_steps}  {status}")

    def restart_clock(self) -> None:
        """Exclude the time since the last flush (an evaluation, a checkpoint) from the rate."""
        self._mark = time.perf_counter()

    def close(self) -> None:
        self._bar.stop()
        self._file.close()
        self._tell(lambda logger: logger.close(self._last_step == self._num_steps))


def shown_bytes(count: float) -> str:
    """Return a number of bytes as text: "1.50 GB"."""
    return decimal(int(count), precision=2)


def shown_passes(passes: float) -> str:
    """Return a number of passes over the data as text: "2.4", "12"; of streamed data, 0, "unknown"."""
    return f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}" if passes else "unknown"


def running_mean(values: list[float], width: int) -> list[float]:
    """Return for each value the mean of the last `width` values."""
    # Not by differences of cumulative sums: one NaN or spike would spread to all later values.
    return [sum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]


def check_finite(rows: list[Row], skipped: int = 0) -> int:
    """Return how many steps in a row were skipped at the end of `rows`; their norm becomes None. FloatingPointError: a
    loss is not finite, or MOST_SKIPPED steps in a row were skipped. skipped: steps in a row before `rows`."""
    remedy = "lower optimizer.lr or lengthen schedule.warmup_steps"
    for row in rows:
        start = f"step {row['step']}: the"
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"{start} loss is {row['loss']}, and this reached no checkpoint; {remedy}")
        skipped = 0 if math.isfinite(row["gradient_norm"]) else skipped + 1
        if skipped:
            row["gradient_norm"] = None
        if skipped == MOST_SKIPPED:
            many = f"{start} gradients of {skipped} steps in a row were not finite, and all of them were skipped"
            raise FloatingPointError(f"{many}; {remedy}")
    return skipped


def is_row(row: Any) -> bool:
    """True if a run writes such rows: a known kind, its required keys, and values of the right types."""
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or row["kind"] not in KINDS:
        return False
    kind, step = row["kind"], row.get("step")
    if type(step) is not int or not (kind == "train") <= step <= LARGEST or not all(key in row for key in KINDS[kind]):
        return False
    figures = row.keys() - {"kind", "step"} if kind == "tasks" else row.keys() & set(FIGURES)
    may_lack = {"gradient_norm"}  # of a step that was skipped
    if not all(is_figure(row[key]) or (row[key] is None and key in may_lack) for key in figures):
        return False
    if not all(is_count(row[key]) for key in row.keys() & set(COUNTS)):
        return False
    if kind == "fit":
        return type(row["micro_batch"]) is int and row["micro_batch"] > 0 and type(row["block_checkpoints"]) is bool
    return kind != "fp8" or _are_ranges(row["ranges"])


def is_figure(value: Any) -> bool:
    """True for a number; it may be infinite or NaN, as a loss may be."""
    return type(value) in (int, float) and not LARGEST_FIGURE < abs(value) < math.inf


def is_count(value: Any) -> bool:
    """True for a finite number that is not negative."""
    return type(value) in (int, float) and 0 <= value <= LARGEST_FIGURE


def _are_ranges(ranges: Any) -> bool:
    """True for {layer: {product: {operand: [saturated, zero, limit]}}}, the first two shares."""
    layers = ranges.values() if isinstance(ranges, dict) else [None]
    products = [product for layer in layers for product in (layer.values() if isinstance(layer, dict) else [None])]
    found = [triple for each in products for triple in (each.values() if isinstance(each, dict) else [None])]
    return all(
        isinstance(triple, list) and len(triple) == 3 and all(map(is_figure, triple)) and min(triple[:2]) >= 0
        and max(triple[:2]) <= 1
        for triple in found
    )  # fmt: skip


def read_metrics(path: Path) -> dict[str, dict[int, Row]]:
    """Return {"train": {step: row}, "eval": {step: row}, ...} for each of KINDS, by step, as if the run had never been
    interrupted; empty tables if there is no file. ValueError: a line is not a row."""
    found: dict[str, dict[int, Row]] = {kind: {} for kind in KINDS if kind != "resume"}
    text = path.read_text(encoding="ascii", errors="backslashreplace") if path.exists() else ""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        except RecursionError:
            row = None
        if not is_row(row):
            raise ValueError(f"{path}, line {number}: not a row that overcoat wrote: {line[:60]!r}; remove that line")
        if row["kind"] == "resume":
            for kind in found.keys() - {"fit"}:
                found[kind] = {s: r for s, r in found[kind].items() if s <= row["step"]}
        else:
            found[row["kind"]][row["step"]] = row
    return found
