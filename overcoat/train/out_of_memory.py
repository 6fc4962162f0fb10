"""Running out of memory costs a run one step's time, not the run.

    forward, backward   no weight has changed: drop the gradients, restore the generators, and take the same rows again
                        with the next leaner plan (`batch_plan.py`, `train.on_oom`)
    released gradients  `optimizer.release_gradients` and `train.stream` change weights inside the backward; after that
                        the step cannot be repeated: LostStepError, and the run continues from its newest checkpoint
                        (`run.py`)
    several processes   the others wait inside the step for the failed one: RestartError, and the launcher restarts all
                        of them from the newest checkpoint
    the optimizer       needs the same memory for any batch, and may have changed some weights: DoesNotFitError

Each change of plan is a row of kind "fit" in metrics.jsonl. Plans only get leaner, so the plan of a step is the leanest
of the rows up to it. A resumed run follows the recorded plans: it repeats the numbers of the run before, and does not
run out of memory again.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from overcoat.models.compiled import forget
from overcoat.train import process
from overcoat.train.batch_plan import BatchPlan, leanest, next_leaner, rows_of_process
from overcoat.train.config import Config
from overcoat.train.metrics import METRICS, Row, read_metrics
from overcoat.train.state import TrainState, rng_state, set_rng_state

# Messages of libraries that allocate without PyTorch's allocator, whose exception is OutOfMemoryError.
OF_LIBRARIES = (
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
RESTART = 75  # exit status of a process that can go on if all are started again (EX_TEMPFAIL)
REMEDY = (
    "overcoat estimate --config CONFIG.toml --gpu-memory SIZE lists what needs less: recipe.checkpoint=block, "
    "optimizer.master=bf16, optimizer.offload=true, shorter rows. With such changes train.resume=CHECKPOINT continues"
)


class DoesNotFitError(Exception):
    """Memory ran out and no leaner plan is left. is_whole: weights and states are as before the step."""

    def __init__(self, message: str, is_whole: bool):
        super().__init__(f"{message}. {REMEDY}")
        self.is_whole = is_whole


class LostStepError(Exception):
    """Memory ran out after some weights had changed: only a checkpoint can be continued from."""


class RestartError(Exception):
    """Memory ran out in one of several processes: all must restart, with the leaner plan that the metrics record."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error says that memory ran out on the GPU, or on the host in a tensor's allocation."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OF_LIBRARIES)


@contextlib.contextmanager
def fatal_oom(what: str) -> Iterator[None]:
    """Re-raise out-of-memory errors inside as DoesNotFitError: `what` needs the same memory for any batch."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = f"{what} ran out of memory, whatever the batch ({_first_line(error)})"
        raise DoesNotFitError(message, is_whole=False) from error


def free_memory(device: torch.device, config: Config) -> None:
    """Return unused memory to the GPU, including buffers that compiled layers keep for the last batch size."""
    if config.train.compile != "none":
        forget()
    gc.collect()  # frames of a failed step may hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


class OomRetry:
    """Takes steps and repeats one that ran out of memory with a leaner plan.

    take_step: takes one step, or raises and leaves `TrainState.drawn` to be taken again. Plans recorded in the run
    directory are followed. changed: called with a line to print, and a row for the metrics if the plan is new.
    """

    def __init__(
        self,
        take_step: Callable[[TrainState, Config], Any],
        config: Config,
        state: TrainState,
        changed: Callable[[str, Row | None], None],
    ) -> None:
        self.take_step, self.changed = take_step, changed
        self.recorded = process.share(lambda: recorded_plans(config))
        if config.train.batch_size == "auto" and plan_at(self.recorded, state.step + 1) is None:
            text = f"train.batch_size = auto: {state.plan}, {config.train.rows_per_step} in a step"
            changed(text, plan_row(state.step + 1, state.plan, out_of_memory=False))

    def __call__(self, state: TrainState, config: Config) -> Any:
        """Take one step. DoesNotFitError: no leaner plan is left. LostStepError: weights have already changed.
        RestartError: with several processes; the next attempt has the leaner plan."""
        recorded = plan_at(self.recorded, state.step + 1)
        if recorded is not None and (plan := leanest([state.plan, recorded])) != state.plan:
            free_memory(state.device, config)
            state.change_plan(config, plan)
            self.changed(f"step {state.step + 1}: {plan}, as recorded", None)
        generators = rng_state()
        while True:
            try:
                return self.take_step(state, config)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = _first_line(error)
            # Outside of the except clause: the traceback would keep the step's tensors alive.
            release = state.optimizer.release
            is_whole = release is None or not release.has_stepped
            if is_whole and process.count() == 1:
                state.optimizer.zero_grad(set_to_none=True)
                free_memory(state.device, config)
                set_rng_state(generators)
            self._fall_back(state, config, is_whole, reason)

    def _fall_back(self, state: TrainState, config: Config, is_whole: bool, reason: str) -> None:
        step = state.step + 1
        plan = next_leaner(config, state.plan)
        if plan is None:
            left = "train.on_oom = 'error'" if config.train.on_oom == "error" else "nothing leaner is left to try"
            raise DoesNotFitError(f"step {step} ran out of memory with {state.plan}, and {left} ({reason})", is_whole)
        if process.count() > 1:
            with (Path(config.train.run_dir) / METRICS).open("a", encoding="ascii") as file:
                file.write(json.dumps(plan_row(step, plan, out_of_memory=True)) + "\n")
            raise RestartError(f"step {step} ran out of memory; from the newest checkpoint on with {plan} ({reason})")
        how = "taking it again with" if is_whole else "back to the newest checkpoint, then"
        self.changed(
            f"step {step} ran out of memory; {how} {plan} ({reason})", plan_row(step, plan, out_of_memory=True)
        )
        if not is_whole:
            raise LostStepError(f"step {step}: some weights have changed")
        state.change_plan(config, plan)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def plan_row(step: int, plan: BatchPlan, out_of_memory: bool) -> Row:
    """Return the metrics row that records a plan from `step` on."""
    return {"kind": "fit", "step": step, **plan._asdict(), "out_of_memory": out_of_memory}


def recorded_plans(config: Config) -> dict[int, BatchPlan]:
    """Return the recorded plans by their first step; {} if the configured one was never changed. With released
    gradients, which cannot accumulate, a plan takes all rows at once."""
    rows = read_metrics(Path(config.train.run_dir) / METRICS)["fit"]
    whole = rows_of_process(config) if config.releases_gradients else None
    return {step: BatchPlan(whole or row["micro_batch"], row["block_checkpoints"]) for step, row in rows.items()}


def plan_at(plans: dict[int, BatchPlan], step: int) -> BatchPlan | None:
    """Return the recorded plan of a step, None if none was recorded before it."""
    before = [plan for first, plan in plans.items() if first <= step]
    return leanest(before) if before else None
