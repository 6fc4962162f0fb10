"""The training loop: one optimizer step, an evaluation, and the loop that calls them.

One step with A accumulated batches, N labels in all of them and gradient g (summed over the batches):

    loss = sum of -log p(label) / N                 every label has the same weight
    g    = g * min(1, clip / |g|)                   inside overcoat.AdamW, |g| over all parameters in FP32
    AdamW with lr(step)                             skips the step if |g| is not finite

A step that runs out of memory is repeated with the same rows (`train.on_oom`, `out_of_memory.py`).

A step never syncs with the GPU: losses and norms stay on the device until the next log interval (`RunLog.flush`).
Logits exist only if `convert` did not convert the model's head; log_softmax makes them FP32.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from overcoat import memory
from overcoat.extras import reason
from overcoat.models.compiled import begin_pass, eager, keep_gradients_outside
from overcoat.models.recording import record_ranges, record_scores
from overcoat.train import process
from overcoat.train.build import base_model, summed_loss
from overcoat.train.config import Config, ScheduleConfig
from overcoat.train.data import conversations, count_labels
from overcoat.train.evaluate import Tasks
from overcoat.train.memory_report import reporting
from overcoat.train.metrics import RunLog, StepRecord
from overcoat.train.out_of_memory import DoesNotFitError, OomRetry, fatal_oom, free_memory, is_out_of_memory
from overcoat.train.parallel import reached_parameters, with_gradients
from overcoat.train.process import StopRequest
from overcoat.train.routing import Routing
from overcoat.train.state import TrainState, rng_state, set_rng_state

T = TypeVar("T")
# A log-sum-exp from which on the log names the layer: BF16's rounding of q and k moves such scores by more than one.
LARGE_SCORE = 500.0
MOST_DRAWS = 1000  # of a step's rows until one has a label


class RunStoppedError(Exception):
    """A signal or Ctrl-C ended the run after a complete step; the checkpoint continues it."""

    def __init__(self, signum: int, checkpoint: Path):
        super().__init__(f"{signal.Signals(signum).name}: stopped after writing {checkpoint}")
        self.signum = signum


class UnreadableDataError(Exception):
    """The data cannot be read on in the middle of a run."""


def multiplier(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the factor on the peak learning rate at step s of S, with W warm-up steps and final ratio f.

        warm-up   s < W:  (s + 1) / W                                    the first step already moves
        cosine    f + (1 - f) * (1 + cos(pi * t)) / 2,                   t = (s - W) / (S - W), from 0 towards 1
        linear    1 - (1 - f) * t
        wsd       1 until S - D, then 1 - (1 - f) * (s - (S - D)) / D    stable, then decay over the last D steps
        constant  1

    D is schedule.decay_steps, by default S / 5, and at most S - W.
    """
    warmup, final = schedule.warmup(num_steps), schedule.final_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / (num_steps - warmup))
    if schedule.kind == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        decay = schedule.decay(num_steps)
        progress = min(1.0, max(0, step - (num_steps - decay)) / decay)
    return 1 - (1 - final) * progress


def train_step(state: TrainState, config: Config) -> StepRecord:
    """Take one optimizer step over `train.rows_per_step` rows, in micro-batches of the plan; every process draws all
    rows and trains on its share.

    If a forward or backward pass runs out of memory, only gradients and generators have changed; `state.drawn` keeps
    the rows, and the step can be taken again.

    Raises:
        DoesNotFitError: the optimizer itself ran out of memory.
        UnreadableDataError: no more rows can be read.
    """
    factor = multiplier(config.schedule, state.step, config.train.num_steps)
    lr = config.optimizer.lr * factor
    for group in state.optimizer.param_groups:
        group["lr"] = config.optimizer.peak_lr(group.get("algorithm", "")) * factor
    # New rows if the drawn ones have another shape: resumed with another sequence length or batch.
    if state.drawn is None or state.drawn.shape != (config.train.rows_per_step, config.data.sequence_length + 1):
        state.drawn = _next_rows(state, config)
    own = process.share_of(state.drawn, config.parallel.context)
    starts = range(0, len(own), state.plan.micro_batch)
    num_labels = count_labels(state.drawn, state.eos, config.data.document_mask)
    total = torch.zeros((), device=state.device)
    every = config.train.fp8_every
    is_sampled = bool(every) and (state.step + 1) % every == 0 and process.is_first()
    ranges, routing = None, Routing()
    for number, start in enumerate(starts):
        # Built while the GPU works on the previous one.
        batch = state.batch(own[start : start + state.plan.micro_batch], config.data.document_mask)
        if config.train.compile == "graphs":
            if number == 1:
                keep_gradients_outside(state.model)
            begin_pass()
        if config.parallel.accumulate == "whole" and process.count() > 1:
            base_model(state.model).set_requires_gradient_sync(number == len(starts) - 1)
        with contextlib.ExitStack() as around:
            if state.kept_bytes == 0:
                around.enter_context(naming_config(config))
            release = state.optimizer.release
            if release is not None and release.keeps_on_host and number < len(starts) - 1:
                around.enter_context(release.accumulate())
            if is_sampled and number == 0:
                ranges = around.enter_context(record_ranges(state.model))
            with _measured(state):
                # All processes of a context compute the same loss.
                loss = summed_loss(state.model, batch.to(state.device), routing)
                loss = loss / (num_labels * config.parallel.context)
            if process.count() > 1 and state.images is not None:
                rows = state.drawn.reshape(process.count(), len(own), -1)[:, start : start + state.plan.micro_batch]
                loss = _with_same_gradients(state, rows, loss)
            loss.backward()
        total += loss.detach()
    with fatal_oom("the optimizer's step"):
        state.optimizer.step(clip_grad_norm=config.optimizer.clip or None)
    norm = state.optimizer.grad_norm
    assert norm is not None
    state.optimizer.zero_grad(set_to_none=True)
    num_tokens = len(state.drawn) * config.data.sequence_length
    state.drawn = None
    state.step += 1
    state.num_tokens += num_tokens
    total, routed = process.sum_of(total), routing.figures()
    return StepRecord(state.step, lr, num_tokens, state.num_tokens, total, norm, ranges, routed)


def _with_same_gradients(state: TrainState, rows: np.ndarray, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, with zero gradients for parameters that only other processes reach (a tower without images):
    FSDP2 must reduce the same parameters in all processes. rows: (processes, rows, T + 1) of this forward pass."""
    if not any(state.images.paths[number] for number in conversations(rows)):  # type: ignore[union-attr]
        return loss
    if state.with_images is None:
        state.with_images = reached_parameters(state.model, loss)
    return with_gradients(state.model, loss, state.with_images)


def _next_rows(state: TrainState, config: Config) -> np.ndarray:
    """Return the rows of a step, (rows, T + 1); rows without a single label are skipped."""

    def draw() -> np.ndarray:
        if config.data.streaming:  # tokenized by the first process
            return process.share(lambda: state.rows.next_rows(config.train.rows_per_step))
        return state.rows.next_rows(config.train.rows_per_step)

    try:
        for _ in range(MOST_DRAWS):
            rows = draw()
            if count_labels(rows, state.eos, config.data.document_mask):
                return rows
        raise ValueError(
            f"{MOST_DRAWS} steps' rows held end-of-text tokens alone, of which data.document_mask leaves no label: "
            "remove these from the data"
        )
    except ValueError as error:
        if state.step == 0:
            raise
        raise UnreadableDataError(
            f"step {state.step + 1}: {error}. Checkpoints are as they were, the same command goes on from the newest"
        ) from error


@contextlib.contextmanager
def naming_config(config: Config) -> Iterator[None]:
    """Re-raise errors of the model's first forward as a ValueError that names [model.config]: transformers checks few
    of its values."""
    try:
        yield
    except Exception as error:
        if not config.model.config or is_out_of_memory(error) or process.follows_from_another(error):
            raise
        why = reason(error) if isinstance(error, KeyError) else f"{type(error).__name__}: {reason(error)}"
        raise ValueError(f"the first step of the model of [model.config] fails ({why})") from error


@contextlib.contextmanager
def _measured(state: TrainState) -> Iterator[None]:
    """Measure, in the first forward pass only, the bytes saved for the backward (layer by layer, so not compiled)."""
    if state.kept_bytes:
        yield
        return
    with eager(), memory.record_kept(state.model) as kept:
        yield
    state.kept_bytes, state.kept_table = kept.total_bytes, str(kept)


def evaluate(state: TrainState, config: Config, rows: np.ndarray) -> float:
    """Return the mean loss per label over held-out rows (rows, T + 1), in eval mode and not compiled; with fewer rows
    at once if memory runs out."""
    return _in_memory(state, config, lambda size: _mean_loss(state, config, rows, size))


def evaluate_tasks(state: TrainState, config: Config, tasks: Tasks, tokenizer: Any) -> dict[str, float]:
    """Return the figures of all tasks, {"sciq/acc": 0.5}, computed in eval mode (BF16) by every process in step. The
    global generators are restored."""
    generators = rng_state()

    def figures(size: int) -> dict[str, float]:
        found = tasks.evaluate(state.model, tokenizer, size, config.eval.tasks_limit or None)
        return {f"{task}/{key}": value for task, values in found for key, value in values.items()}

    try:
        with eager():
            return _in_memory(state, config, figures)
    finally:
        state.model.train()
        set_rng_state(generators)


def _in_memory(state: TrainState, config: Config, compute: Callable[[int], T]) -> T:
    """Return `compute(rows)`, with half the rows again each time it runs out of memory."""
    size = state.plan.micro_batch
    # Not with several processes: their passes are collective, and fewer rows in one would deadlock.
    while size > 1 and process.count() == 1:
        try:
            return compute(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_memory(state.device, config)
        size = size // 2
    with fatal_oom("an evaluation"):
        return compute(size)


def _mean_loss(state: TrainState, config: Config, rows: np.ndarray, size: int) -> float:
    """Return the mean loss per label over `rows`, `size` rows at once, each process its share."""
    total = torch.zeros((), device=state.device, dtype=torch.float64)
    most = -(-len(rows) // process.count())
    own = rows[process.rank() * most : (process.rank() + 1) * most]
    state.model.eval()
    try:
        with torch.no_grad(), eager():
            for start in range(0, most, size):
                part = own[start : start + size]
                # A process without rows left still runs one: the others need its shard of the weights.
                batch = state.batch(part if len(part) else rows[:1], config.data.document_mask)
                loss = summed_loss(state.model, batch.to(state.device))
                if len(part):
                    total += loss
    finally:
        state.model.train()
    return float(process.sum_of(total)) / count_labels(rows, state.eos, config.data.document_mask)


def largest_score(state: TrainState, config: Config, rows: np.ndarray) -> tuple[str, float]:
    """Return the layer with the largest log-sum-exp of attention in one held-out row, and the value; ("", -inf) without
    converted layers."""
    batch = state.batch(rows[:1], config.data.document_mask)
    generators = rng_state()  # a dropout outside the layers would draw
    with torch.no_grad(), eager(), record_scores(state.model) as scores:
        if scores.names:
            summed_loss(state.model, batch.to(state.device))
    set_rng_state(generators)
    found = process.gather(scores.largest)  # of the parts of the row
    return max(found, key=lambda of: math.inf if math.isnan(of[1]) else of[1]) if process.is_first() else scores.largest


def _log_loss(state: TrainState, config: Config, held_out: np.ndarray, log: RunLog) -> None:
    log.flush()
    loss, (layer, score) = evaluate(state, config, held_out), largest_score(state, config, held_out)
    row = {"kind": "eval", "step": state.step, "loss": loss}
    log.write(row if not math.isfinite(score) else {**row, "attention_score": score})
    log.say(f"step {state.step}  held-out loss {loss:.4f}")
    if layer and not score <= LARGE_SCORE:
        log.say(f"step {state.step}  attention scores reach {score:.0f} in {layer}: BF16 is inexact there")
    log.restart_clock()


def _log_tasks(state: TrainState, tasks: Callable[[], dict[str, float]], log: RunLog) -> None:
    log.flush()
    figures = tasks()
    log.write({"kind": "tasks", "step": state.step, **figures})
    shown = (f"{name} {value:.4f}" for name, value in figures.items() if "_stderr" not in name)
    log.say(f"step {state.step}  {'  '.join(shown)}")
    log.restart_clock()


def _print_time_left(log: RunLog, config: Config, step: int, seconds: float) -> None:
    """Print the time that the remaining steps take at `seconds` each, if it is above half a minute."""
    minutes = seconds * (config.train.num_steps - step) / 60
    if minutes >= 0.5:
        twin = "; then follows the run of [compare]" if config.compare.overrides else ""
        log.say(f"at this speed the last step is done in about {math.ceil(minutes):,} min{twin}")


def train_steps(
    state: TrainState,
    config: Config,
    held_out: np.ndarray,
    log: RunLog,
    save: Callable[[], Path],
    check_saved: Callable[[], None] = lambda: None,
    evaluated: Collection[str] = (),
    tasks: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Train until `train.num_steps`, evaluate and save when due; a stop request saves and raises RunStoppedError.

    Args:
        check_saved: called at each log interval; raises if a checkpoint could not be written.
        evaluated: evaluations ("eval", "tasks") that the metrics already have of the first step. A stop request skips
            them, since a process told to end may have seconds; the resumed run makes up for them.
        tasks: returns the figures of eval.tasks; None without tasks.
    """

    def due(every: int) -> bool:
        """True at the last step, and at every `every`-th."""
        return state.step == config.train.num_steps or bool(every and state.step % every == 0)

    # An evaluation that was due at the step of a checkpoint is made up for on resuming.
    evaluations = [("eval", config.eval.every, functools.partial(_log_loss, state, config, held_out, log))]
    if tasks is not None:
        evaluations.append(("tasks", config.eval.tasks_every, functools.partial(_log_tasks, state, tasks, log)))
    state.model.train()
    log.restart_clock()
    take_step: Any = reporting(train_step, log.say) if config.memory.report else train_step
    attempt, first_step = OomRetry(take_step, config, state, log.tell_change), state.step
    for kind, every, act in evaluations:
        if state.step and due(every) and kind not in evaluated:
            act()
    if state.device.type == "cpu" and state.step < config.train.num_steps:
        log.say(f"step {state.step + 1} begins")  # it may take minutes
    began, since, is_told = time.perf_counter(), state.step, False
    with StopRequest() as stop:
        while state.step < config.train.num_steps:
            try:
                log.add(attempt(state, config))
            except DoesNotFitError as error:
                if error.is_whole and state.step > first_step and process.count() == 1:
                    log.flush()
                    log.say(f"step {state.step + 1} does not fit; {save()} has the {state.step} before it")
                raise
            if due(config.train.log_every) or state.step == 1:
                log.flush()
                check_saved()
                if state.step == first_step + 1:  # which compiles kernels
                    began, since = time.perf_counter(), state.step
                elif not is_told:
                    is_told = True
                    _print_time_left(log, config, state.step, (time.perf_counter() - began) / (state.step - since))
            signum = stop.agreed()
            for _, every, act in evaluations:
                if due(every) and signum is None:
                    act()
                    signum = stop.agreed()
            if due(config.checkpoint.every) or signum is not None:
                log.flush()
                path = save()
                signum = stop.agreed()
                if signum is not None:  # after the last step too: a twin would start next
                    raise RunStoppedError(signum, path)
                log.restart_clock()
