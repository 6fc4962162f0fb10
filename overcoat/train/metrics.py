"""What a run reports while it trains: one JSON line per step, TensorBoard events, a progress bar.

`metrics.jsonl` is only ever appended to. A row is {"kind": "train", "step", "loss", "lr", "gradient_norm",
...} or {"kind": "eval", "step", "loss", "attention_score"}, the last the largest log-sum-exp of a held-out
row's attention where layers are converted; a step skipped for its gradient has "gradient_norm": null;
{"kind": "fit", "step", ...} says how many rows pass at once from that step on (`out_of_memory.py`). A resumed
run first writes {"kind": "resume", "step"}, which tells `read_metrics` to forget rows after that step, but
for fits: they were logged by a process that died before its next checkpoint. The steps are then repeated
with the same numbers. A line cut off by such a death is skipped; a row of another kind is an error.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from overcoat.extras import load_extra
from overcoat.train.config import Config

Row = dict[str, Any]
METRICS = "metrics.jsonl"
# What is read of a row beside its step.
KINDS = {
    "train": ("loss", "tokens_per_second", "peak_bytes"),
    "eval": ("loss",),
    "fit": ("micro_batch", "block_checkpoints"),
    "resume": (),
}


class MetricsLog:
    """Appends rows to metrics.jsonl and mirrors their numbers to TensorBoard."""

    def __init__(self, config: Config, first_step: int):
        run_dir = Path(config.train.run_dir)
        self._file = (run_dir / METRICS).open("a+", encoding="ascii")
        is_new = self._file.seek(0, 2) == 0
        if not is_new and self._ends_within_a_line():
            self._file.write("\n")
        self._writer = None
        if config.train.tensorboard:
            board = load_extra("torch.utils.tensorboard", "hf", "train.tensorboard = true")
            self._writer = board.SummaryWriter(run_dir / "tensorboard", purge_step=first_step)
        if not is_new:
            self.write({"kind": "resume", "step": first_step})

    def _ends_within_a_line(self) -> bool:
        self._file.seek(self._file.tell() - 1)
        return self._file.read(1) != "\n"

    def write(self, *rows: Row) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()
        if self._writer is not None:
            for row in rows:
                for key, value in row.items():
                    if key not in ("kind", "step") and value is not None:
                        self._writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> dict[str, dict[int, Row]]:
    """{"train": {step: row}, "eval": {step: row}, "fit": {step: row}} in the order of steps, as if the run had
    never been interrupted; of a file that is not there, none."""
    found: dict[str, dict[int, Row]] = {"train": {}, "eval": {}, "fit": {}}
    text = path.read_text(encoding="ascii", errors="backslashreplace") if path.exists() else ""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not _is_row(row):
            raise ValueError(f"{path}, line {number}: not a row that overcoat wrote: {line[:60]!r}; remove that line")
        if row["kind"] == "resume":
            for kind in ("train", "eval"):
                found[kind] = {s: r for s, r in found[kind].items() if s <= row["step"]}
        else:
            found[row["kind"]][row["step"]] = row
    return found


def _is_row(row: Any) -> bool:
    """Whether a line's value has a kind, and the numbers of that kind."""
    keys = KINDS.get(str(row.get("kind"))) if isinstance(row, dict) else None
    return keys is not None and all(isinstance(row.get(key), (int, float)) for key in ("step", *keys))


# Peaks of GPUs from before `restart_peak`.
_earlier_peaks: dict[torch.device, int] = {}


def forget_peak(device: torch.device) -> None:
    """A run begins: `peak_bytes` counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _earlier_peaks.pop(device, None)


def restart_peak(device: torch.device) -> int:
    """Most bytes allocated on a GPU since the last call; `peak_bytes` goes on from the most of all calls."""
    peak = torch.cuda.max_memory_allocated(device)
    _earlier_peaks[device] = max(peak, _earlier_peaks.get(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _earlier_peaks.get(device, 0))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 1000 else f"{count:.0f} GB"


class ProgressReport:
    """A live bar on a terminal, one plain line per log interval elsewhere (a file, CI)."""

    def __init__(self, console: Console, title: str, num_steps: int, first_step: int):
        self._console, self._title, self._num_steps = console, title, num_steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=num_steps, completed=first_step, status="")
        self._bar.start()

    def update(self, step: int, row: Row) -> None:
        rate, peak = row["tokens_per_second"], format_bytes(row["peak_bytes"])
        status = f"loss {row['loss']:.4f}  {rate:,.0f} tok/s  peak {peak}"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal:
            self.say(f"{self._title}  step {step}/{self._num_steps}  {status}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()
