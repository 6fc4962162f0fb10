"""`train.batch_size = "auto"`: the largest micro-batch that is predicted to fit the GPU's memory.

    planned  = (1 - SAFETY) x what is free, or what PyTorch may take, or train.memory_limit_gib, the least of them
    chosen   = the largest divisor of train.global_batch_size whose `Prediction.total_bytes` are at most that

The prediction (`overcoat.estimate`) has margins of its own, for the allocator and the CUDA context. It is not the last
word: a step that runs out of memory all the same is taken again with less (`out_of_memory.py`).
"""

from __future__ import annotations

import bisect
import gc
from typing import Any, NamedTuple

import torch

from overcoat.estimate.predict import CONTEXT, Predictor, Setup
from overcoat.train.config import Config
from overcoat.train.fit import Fit, divisors, with_block_checkpoints
from overcoat.train.loss import loss_for_estimates
from overcoat.train.memory_setup import model_config, training_setup

# Share of the memory that is not planned with: other processes, fragmentation, predictions that are too low.
SAFETY = 0.05
GIBI = 2**30


class Training(NamedTuple):
    """A training configuration as far as memory is concerned."""

    model: Any  # transformers configuration
    sequence: int
    setup: Setup
    fit: Fit
    fits: bool  # False: chosen by "auto", and not even this fits

    @property
    def batch(self) -> int:
        """Rows in one forward pass."""
        return self.fit.micro_batch


def training(config: Config, memory: int | None = None) -> Training:
    """Model, batch and setup of a training configuration, for an estimate; of one row if `train.batch_size = "auto"`
    finds nothing that fits.

    Args:
        memory: bytes of the GPU that "auto" plans with, at most `train.memory_limit_gib`; None: that, or this
            machine's GPU.
    """
    model = model_config(config)
    fit: Fit | None
    if config.train.batch_size == "auto":
        limit = int(GIBI * config.train.memory_limit_gib)
        if memory is None:
            memory = memory_to_plan_with(config, torch.device("cuda") if torch.cuda.is_available() else None)
        fit = choose_fit(config, model, min(memory, limit or memory))
    else:
        fit = Fit(config.train.batch_size)
    fits = fit is not None
    fit = fit or Fit(1)
    return Training(model, config.data.sequence_length, training_setup(config, fit), fit, fits)


def to_estimate(config: Config, memory: int | None) -> tuple[Predictor, int, int, Setup, str]:
    """Predictor, batch, sequence and setup of a training configuration, and what "auto" chose; memory: as above."""
    asked, note = training(config, memory), ""
    if config.train.batch_size == "auto":
        no = "" if asked.fits else ", which does not fit either"
        note = f"train.batch_size = auto: {asked.fit}, {config.train.rows_per_step} in a step{no}"
    predictor = Predictor(asked.model, loss_for_estimates(config.data.document_mask))
    return predictor, asked.batch, asked.sequence, asked.setup, note


def first_fit(config: Config, device: torch.device, tokenizer: Any | None) -> Fit:
    """The fit a run on `device` begins with, before its model is there.

    Raises:
        ValueError: `train.batch_size = "auto"`, and not a single row fits, or the memory is not known.
    """
    if config.train.batch_size != "auto":
        return Fit(config.train.batch_size)
    memory = memory_to_plan_with(config, device)
    fit = choose_fit(config, model_config(config, tokenizer), memory)
    if fit is None:
        raise ValueError(
            f"train.batch_size = 'auto': not even one row fits {memory / GIBI:.2f} GiB; overcoat estimate --config "
            f"CONFIG.toml --gpu-memory {memory / GIBI:.1f}GiB says what would make it fit, train.batch_size=1 with "
            "train.accumulation tries all the same"
        )
    return fit


def choose_fit(config: Config, model: Any, memory: int) -> Fit | None:
    """The largest micro-batch of a step's rows that fits, with the recipe as configured; with block checkpoints where
    not a single row fits without them and `train.on_oom` allows them; None if that does not fit either.

    Args:
        model: transformers configuration.
        memory: bytes of the GPU, the CUDA context's included. SAFETY comes off, but for the leanest of all.
    """
    predictor = Predictor(model, loss_for_estimates(config.data.document_mask))

    def needed(fit: Fit) -> int:
        setup = training_setup(config, fit)
        return predictor.predict(fit.micro_batch, config.data.sequence_length, setup).total_bytes

    fits = [Fit(rows) for rows in divisors(config.train.rows_per_step)]
    leaner = [] if config.train.on_oom == "error" else [with_block_checkpoints(config, fit) for fit in fits]
    last = fits[-1]
    for known in (fits, [fit for fit in leaner if fit is not None]):
        # Fewer rows need less: a handful of predictions finds the place, where a large step has hundreds of divisors.
        place = bisect.bisect_left(known, True, key=lambda fit: needed(fit) <= (1 - SAFETY) * memory)
        if place < len(known):
            return known[place]
        last = known[-1] if known else last
    return last if needed(last) <= memory else None


def memory_to_plan_with(config: Config, device: torch.device | None) -> int:
    """Bytes that a run may take on `device` (None: there is none), the CUDA context's included.

    Raises:
        ValueError: there is no GPU, and no `train.memory_limit_gib`.
    """
    known = [int(config.train.memory_limit_gib * GIBI)] if config.train.memory_limit_gib else []
    if device is not None and device.type == "cuda":
        gc.collect()  # an earlier run's model
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)  # by what else lives in this process
        known.append(free + torch.cuda.memory_reserved(device) - used)
        index = torch.cuda.current_device() if device.index is None else device.index
        # What `set_per_process_memory_fraction` leaves to tensors; the context comes on top.
        known.append(int(torch.cuda.get_per_process_memory_fraction(index) * total) - used + CONTEXT)
    if not known:
        raise ValueError(
            "train.batch_size = 'auto' asks a GPU how much memory is free, and there is none: set train.batch_size to "
            "a number, or train.memory_limit_gib to what it may plan with"
        )
    return min(known)
