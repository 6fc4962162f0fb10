"""The training loop: one optimizer step, an evaluation, and the loop that calls them.

One step with A accumulated batches, N labels in all of them and gradient g (summed over the batches):

    loss = sum of -log p(label) / N                 every token counts the same, in whichever batch it is
    g    = g * min(1, clip / |g|)                   inside overcoat.AdamW, |g| over all parameters in FP32
    AdamW with lr(step)                             which leaves the weights alone where |g| is not finite

A step that runs out of memory is taken again, with the same rows, as `train.on_oom` says (`out_of_memory.py`).

Nothing here makes the host wait for the GPU within a step: losses and norms stay on the device until the next log
interval, where they are read together, checked (a loss that is not finite ends the run before it can reach a
checkpoint) and written, one row per step. Logits exist only in a model whose head `convert` left alone; they become
FP32 once, inside log_softmax.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from overcoat import memory
from overcoat.extras import reason
from overcoat.models.compiled import begin_pass, eager, keep_gradients_outside
from overcoat.models.scores import record_scores
from overcoat.train.config import Config
from overcoat.train.data import make_batch
from overcoat.train.host_bound import HostWatch
from overcoat.train.loss import summed_loss
from overcoat.train.metrics import MetricsLog, ProgressReport, Row, peak_bytes
from overcoat.train.out_of_memory import (
    DoesNotFitError,
    Fitting,
    free_memory,
    is_out_of_memory,
    whatever_the_batch,
)
from overcoat.train.schedule import multiplier
from overcoat.train.state import TrainState, rng_state, set_rng_state

MOST_SKIPPED = 10  # steps in a row: one odd batch is survived, a model that is lost is not trained on


class RunStoppedError(Exception):
    """SIGTERM or Ctrl-C ended the run after a complete step; `checkpoint` continues it."""

    def __init__(self, signum: int, checkpoint: Path):
        super().__init__(f"{signal.Signals(signum).name}: stopped after writing {checkpoint}")
        self.signum, self.checkpoint = signum, checkpoint


class UnreadableDataError(Exception):
    """The data cannot be read on in the middle of a run."""


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a request the loop honours between two steps; a second Ctrl-C
    insists."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum


@dataclass
class StepRecord:
    """What one step leaves behind; the tensors are on the device, unread."""

    step: int
    lr: float
    num_tokens: int
    loss: torch.Tensor  # () fp32
    gradient_norm: torch.Tensor  # () fp32, before clipping


def train_step(state: TrainState, config: Config) -> StepRecord:
    """One optimizer step over `train.rows_per_step` rows, in micro-batches of `state.fit`.

    Running out of memory in a forward or backward pass leaves everything but the gradients and the generators as it
    was; the rows stay in `state.drawn` and are taken again.

    Raises:
        DoesNotFitError: the optimizer itself ran out of memory.
        UnreadableDataError: there are no more rows.
    """
    lr = config.optimizer.lr * multiplier(config.schedule, state.step, config.train.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if state.drawn is None:
        state.drawn = _next_rows(state, config)
    batches = [
        make_batch(state.drawn[start : start + state.fit.micro_batch], state.eos, config.data.document_mask)
        for start in range(0, len(state.drawn), state.fit.micro_batch)
    ]
    num_labels = sum(batch.num_labels for batch in batches)
    total = torch.zeros((), device=state.device)
    for number, batch in enumerate(batches):
        if config.train.compile == "graphs":
            if number == 1:
                keep_gradients_outside(state.model)
            begin_pass()
        with naming_config(config) if state.kept_bytes == 0 else contextlib.nullcontext():
            with _measured(state):
                loss = summed_loss(state.model, batch.to(state.device)) / num_labels
            loss.backward()
        total += loss.detach()
    with whatever_the_batch("the optimizer's step"):
        state.optimizer.step(clip_grad_norm=config.optimizer.clip or None)
    norm = state.optimizer.grad_norm
    assert norm is not None
    state.optimizer.zero_grad(set_to_none=True)
    state.drawn = None
    state.step += 1
    num_tokens = sum(batch.input_ids.numel() for batch in batches)
    state.num_tokens += num_tokens
    return StepRecord(state.step, lr, num_tokens, total, norm)


def _next_rows(state: TrainState, config: Config) -> np.ndarray:
    try:
        return state.rows.next_rows(config.train.rows_per_step)
    except ValueError as error:
        if state.step == 0:
            raise
        raise UnreadableDataError(
            f"step {state.step + 1}: {error}. Checkpoints are as they were, the same command goes on from the newest"
        ) from error


@contextlib.contextmanager
def naming_config(config: Config) -> Iterator[None]:
    """What the code of an inline model raises inside, as a ValueError: transformers checks the types of [model.config],
    and few of its values."""
    try:
        yield
    except Exception as error:
        if not config.model.config or is_out_of_memory(error):
            raise
        kind = type(error).__name__
        raise ValueError(f"the first step of the model of [model.config] fails ({kind}: {reason(error)})") from error


@contextlib.contextmanager
def _measured(state: TrainState) -> Any:
    """Count what the very first forward pass keeps for its backward, layer by layer and so not compiled; every later
    one keeps the same."""
    if state.kept_bytes:
        yield
        return
    with eager(), memory.record_kept(state.model) as kept:
        yield
    state.kept_bytes, state.kept_table = kept.total_bytes, str(kept)


def evaluate(state: TrainState, config: Config, rows: np.ndarray) -> float:
    """Mean loss per label over held-out rows (rows, T + 1), in eval mode and not compiled; fewer rows at once if memory
    runs out."""
    size = state.fit.micro_batch
    while True:
        try:
            return _mean_loss(state, config, rows, size)
        except RuntimeError as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        free_memory(state.device, config)
        size = size // 2


def _mean_loss(state: TrainState, config: Config, rows: np.ndarray, size: int) -> float:
    total = torch.zeros((), device=state.device, dtype=torch.float64)
    num_labels = 0
    state.model.eval()
    try:
        with torch.no_grad(), eager():
            for start in range(0, len(rows), size):
                batch = make_batch(rows[start : start + size], state.eos, config.data.document_mask)
                total += summed_loss(state.model, batch.to(state.device))
                num_labels += batch.num_labels
    finally:
        state.model.train()
    return float(total) / num_labels


# A log-sum-exp from which on the log names the layer: BF16's rounding of q and k moves such scores by more than one.
LARGE_SCORE = 500.0


def largest_score(state: TrainState, config: Config, rows: np.ndarray) -> tuple[str, float]:
    """The largest log-sum-exp of attention in one held-out row, and its layer; ("", -inf) without converted layers."""
    batch = make_batch(rows[:1], state.eos, config.data.document_mask)
    generators = rng_state()  # a dropout outside the layers would draw
    with torch.no_grad(), eager(), record_scores(state.model) as scores:
        if scores.names:
            summed_loss(state.model, batch.to(state.device))
    set_rng_state(generators)
    return scores.largest


def check_finite(rows: list[Row], skipped: int = 0) -> int:
    """Steps with an infinite gradient were skipped and are only marked; MOST_SKIPPED of them in a row, or a loss that
    is lost, end the run.

    `skipped` steps in a row came before `rows`; returns how many end with them.
    """
    remedy = "lower optimizer.lr or lengthen schedule.warmup_steps"
    for row in rows:
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(
                f"step {row['step']}: the loss is {row['loss']}, and this reached no checkpoint; {remedy}"
            )
        skipped = 0 if math.isfinite(row["gradient_norm"]) else skipped + 1
        if skipped:
            row["gradient_norm"] = None
        if skipped == MOST_SKIPPED:
            raise FloatingPointError(
                f"step {row['step']}: the gradients of {skipped} steps in a row were not finite, and all of them were "
                f"skipped; {remedy}"
            )
    return skipped


class IntervalLog:
    """Collects step records and turns them into rows at each log interval, with the rate since the last
    one."""

    def __init__(self, log: MetricsLog, report: ProgressReport, device: torch.device, host: HostWatch):
        self._log, self._report, self._device, self._host = log, report, device, host
        self._records: list[StepRecord] = []
        self._skipped = 0
        self._mark = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Read the pending losses from the device and write their rows."""
        if not self._records:
            return
        pairs = torch.stack([torch.stack((record.loss, record.gradient_norm)) for record in self._records])
        asked = time.perf_counter()
        values = pairs.tolist()
        waited, seconds = time.perf_counter() - asked, time.perf_counter() - self._mark
        advice = self._host.saw(len(self._records), seconds, waited)
        common = {
            "tokens_per_second": round(sum(record.num_tokens for record in self._records) / seconds, 1),
            "peak_bytes": peak_bytes(self._device),
        }
        rows = [
            {"kind": "train", "step": record.step, "loss": loss, "lr": record.lr, "gradient_norm": norm, **common}
            for record, (loss, norm) in zip(self._records, values, strict=True)
        ]
        self._records.clear()
        self._skipped = check_finite(rows, self._skipped)
        self._log.write(*rows)
        self._report.update(rows[-1]["step"], rows[-1])
        if advice is not None:
            self._report.say(advice)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last flush (an evaluation, a checkpoint) out of the rate."""
        self._mark = time.perf_counter()


def _reporting_step(report: ProgressReport) -> Callable[[TrainState, Config], StepRecord]:
    from overcoat.train.memory_report import ReportingStep

    return ReportingStep(train_step, report.say)


def train_steps(
    state: TrainState,
    config: Config,
    held_out: np.ndarray,
    log: MetricsLog,
    report: ProgressReport,
    save: Callable[[], Path],
    is_evaluated: bool = False,
) -> None:
    """Train until `train.steps`, evaluate and save when due; a stop request saves and raises
    RunStoppedError.

    Args:
        is_evaluated: the metrics have the evaluation of the step to begin with. A stop request leaves it to whoever
            resumes: a process that is told to end may have seconds.
    """

    def due(every: int) -> bool:
        return state.step == config.train.steps or bool(every and state.step % every == 0)

    def evaluate_and_log() -> None:
        interval.flush()
        loss, (layer, score) = evaluate(state, config, held_out), largest_score(state, config, held_out)
        row = {"kind": "eval", "step": state.step, "loss": loss}
        log.write(row if not math.isfinite(score) else {**row, "attention_score": score})
        report.say(f"step {state.step}  held-out loss {loss:.4f}")
        if layer and not score <= LARGE_SCORE:
            report.say(f"step {state.step}  attention scores reach {score:.0f} in {layer}: BF16 is inexact there")
        interval.restart_clock()

    state.model.train()
    interval = IntervalLog(log, report, state.device, HostWatch(config, state.device))

    def changed(text: str, row: Row | None) -> None:
        interval.flush()  # what came before stays, whatever becomes of this step
        report.say(text)
        if row is not None:
            log.write(row)
        interval.restart_clock()  # the failed attempt is no part of the rate

    take_step = _reporting_step(report) if config.memory.report else train_step
    fitting, first_step = Fitting(take_step, config, state, changed), state.step
    if state.step and due(config.eval.every) and not is_evaluated:
        evaluate_and_log()
    with StopRequest() as stop:
        while state.step < config.train.steps:
            try:
                interval.add(fitting(state, config))
            except DoesNotFitError as error:
                if error.is_whole and state.step > first_step:
                    interval.flush()
                    report.say(f"step {state.step + 1} does not fit; {save()} has the {state.step} before it")
                raise
            if due(config.train.log_every) or state.step == 1:
                interval.flush()
            if due(config.eval.every) and stop.signum is None:
                evaluate_and_log()
            if due(config.checkpoint.every) or stop.signum is not None:
                interval.flush()
                path = save()
                if stop.signum is not None:  # after the last step too: a twin would start next
                    raise RunStoppedError(stop.signum, path)
                interval.restart_clock()
