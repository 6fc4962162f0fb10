"""Batch plans: how many rows one forward pass takes and whether blocks are checkpointed; `train.batch_size = "auto"`.

A step always takes `train.rows_per_step` rows, split over the processes, in equal micro-batches. A run that changes its
plan (`out_of_memory.py`) keeps the rows of a step and the weight of each label. Losses change by rounding only: FP8
scales belong to other batches, gradients are summed in another order, and block checkpoints store 8-bit inputs.

    planned = (1 - SAFETY) x min(free GPU memory, what PyTorch may take, train.memory_limit_gib)
    chosen  = the largest divisor of train.global_batch_size whose `Prediction.total_bytes` are at most that

The prediction (`overcoat.estimate`) already contains margins for the allocator and the CUDA context. A step that still
runs out of memory is repeated with a leaner plan (`out_of_memory.py`).
"""

from __future__ import annotations

import bisect
import gc
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import overcoat
from overcoat.estimate.dry_run import LossOf
from overcoat.estimate.predict import CONTEXT, Predictor
from overcoat.estimate.setup import Setup
from overcoat.estimate.times import ONE, Cluster
from overcoat.models.shapes import load_model_config
from overcoat.train import process
from overcoat.train.adapters import base_name
from overcoat.train.build import inline_config, loss_for_estimates, make_recipe
from overcoat.train.config import Config, require
from overcoat.train.parallel import num_shards
from overcoat.train.vocabulary import num_ids, padded

# Share of the memory kept in reserve: other processes, fragmentation, predictions that are too low.
SAFETY = 0.05
GIBI = 2**30


class BatchPlan(NamedTuple):
    """micro_batch: rows in one forward pass. block_checkpoints: override the recipe with `checkpoint="block"`."""

    micro_batch: int
    block_checkpoints: bool = False

    def __str__(self) -> str:
        rows = "1 row" if self.micro_batch == 1 else f"{self.micro_batch} rows"
        return f"{rows} in a forward pass" + (", block checkpoints" if self.block_checkpoints else "")


def rows_of_process(config: Config, cluster: Cluster = ONE) -> int:
    """Return how many rows of a step one process takes, alone or together with its context-parallel neighbors. cluster:
    the GPUs that an estimate is for, where the run is not started on them."""
    return config.train.rows_per_step * config.parallel.context // max(process.count(), cluster.gpus)


def divisors(count: int) -> list[int]:
    """Return the divisors of a number of rows, the largest first."""
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)}, reverse=True)


def recipe_of(config: Config, plan: BatchPlan) -> overcoat.Recipe:
    """Return the configured recipe, with block checkpoints where the plan asks for them."""
    recipe = make_recipe(config.recipe)
    return replace(recipe, checkpoint="block") if plan.block_checkpoints else recipe


def _checkpointed(config: Config, plan: BatchPlan) -> list[BatchPlan]:
    """Return `plan` with block checkpoints as a list of one; [] if it has them already, or the recipe has no FP8
    blocks."""
    recipe = recipe_of(config, plan)
    return [plan._replace(block_checkpoints=True)] if recipe.fp8 and recipe.checkpoint is None else []


def next_leaner(config: Config, plan: BatchPlan) -> BatchPlan | None:
    """Return the plan to try after `plan` ran out of memory, as `train.on_oom` says; None if nothing is left."""
    fewer = [plan._replace(micro_batch=size) for size in divisors(rows_of_process(config)) if size < plan.micro_batch]
    if config.releases_gradients:
        fewer = []  # they cannot accumulate
    lean = _checkpointed(config, plan)
    ways = {"smaller_batch": [*fewer, *lean], "leaner_recipe": [*lean, *fewer], "error": []}[config.train.on_oom]
    return ways[0] if ways else None


def leanest(plans: Iterable[BatchPlan]) -> BatchPlan:
    """Return the fewest rows of all plans, with block checkpoints if any plan has them."""
    rows, checkpoints = zip(*plans, strict=True)
    return BatchPlan(min(rows), any(checkpoints))


class Training(NamedTuple):
    """A training configuration in the form that `overcoat estimate --config` needs."""

    predictor: Predictor  # of its model
    batch: int  # rows in one forward pass
    sequence: int
    setup: Setup
    note: str  # what "auto" chose


def training(config: Config, memory: int | None = None, cluster: Cluster = ONE) -> Training:
    """Return model, batch and setup of a training configuration for an estimate, on each GPU of `cluster`.

    memory: bytes that train.batch_size = "auto" plans with (None: train.memory_limit_gib, or this machine's GPU). If
    nothing fits, the estimate is of one row. ValueError: the estimate does not cover an option, or `cluster` cannot run
    it.
    """
    sees_images = "; overcoat estimate --model NAME sees images" if config.data.images else ""
    require(not config.not_estimated, f"{config.not_estimated}: leave it out{sees_images}")
    rows = config.train.rows_per_step
    if cluster.gpus > 1:
        _check_shared(config, cluster)
    model, note = model_config(config), ""
    if config.train.batch_size == "auto":
        limit = int(GIBI * config.train.memory_limit_gib)
        if memory is None:
            memory = memory_to_plan_with(config, torch.device("cuda") if torch.cuda.is_available() else None)
        memory = min(memory, limit or memory)
        plan, no = choose_plan(config, model, memory, cluster), ""
        if plan is None:
            plan, no = BatchPlan(1), ", which does not fit either"
        note = f"train.batch_size = auto: {plan}, {rows} in a step{no}"
    else:
        plan = configured_plan(config, cluster)
        if cluster.gpus > 1:
            note = f"{rows} rows in a step, of which each GPU takes {rows_of_process(config, cluster)}, {plan}"
    predictor = Predictor(model, loss_for_estimates(config.data.masks_documents))
    return Training(
        predictor, plan.micro_batch, config.data.sequence_length, training_setup(config, plan, cluster), note
    )


def _check_shared(config: Config, cluster: Cluster) -> None:
    """Refuse a configuration whose [parallel] or rows do not match `cluster`."""
    shard, nodes, rows = config.parallel.shard, config.parallel.nodes, config.train.rows_per_step
    require(
        shard == ("hybrid" if cluster.hybrid else "full"),
        f"parallel.shard = {shard!r}: --gpus {cluster.gpus} estimates 'full', with --hybrid 'hybrid'; 'none' is not "
        "estimated",
    )
    require(nodes in (0, cluster.nodes) or shard == "full", f"parallel.nodes = {nodes}: add --nodes {nodes}")
    require(
        rows % cluster.gpus == 0,
        f"--gpus {cluster.gpus} cannot share {rows} rows in a step: change train.batch_size, train.accumulation or "
        "train.global_batch_size",
    )


def training_setup(config: Config, plan: BatchPlan, cluster: Cluster = ONE) -> Setup:
    """Return the memory setup of a training configuration with the micro-batch and recipe of `plan`; cluster: as in
    `rows_of_process`."""
    optimizer = config.optimizer
    return Setup(
        recipe=recipe_of(config, plan),
        optimizer=optimizer.name,
        moments=optimizer.codes,
        master=optimizer.master,
        group_size=optimizer.group_size,
        release_gradients=optimizer.release_gradients,
        offload=optimizer.offload,
        stream=config.train.stream,
        resident=config.train.resident,
        accumulation=rows_of_process(config, cluster) // plan.micro_batch,
        dtype=config.model.dtype,
        document_mask=config.data.masks_documents,
        lora_rank=config.lora.rank,
        lora_targets=tuple(config.lora.targets),
        dora=config.lora.dora,
        reduce_dtype=config.parallel.reduce_dtype,
        all_gather=config.parallel.all_gather,
        replicated=cluster.sharding < cluster.gpus or num_shards(config.parallel) < process.count(),
    )


def model_config(config: Config, tokenizer: Any | None = None) -> Any:
    """Return the transformers configuration of the model to train. ValueError: the vocabulary size depends on a
    tokenizer that is not given."""
    model, size = config.model, config.tokenizer.vocab_size
    if model.name:
        found = load_model_config(base_name(config))
        if config.tokenizer.add_tokens and tokenizer is not None and num_ids(tokenizer) > found.vocab_size:
            found.vocab_size = padded(num_ids(tokenizer))
        return found
    if tokenizer is None and "vocab_size" not in model.config:
        if not size:
            raise ValueError(
                "the size of the vocabulary is known only once the tokenizer is read: pass model.config.vocab_size=N"
            )
        model = replace(model, config={**model.config, "vocab_size": size})
    return inline_config(model, tokenizer, config.data.sequence_length)


def configured_plan(config: Config, cluster: Cluster = ONE) -> BatchPlan:
    """Return the plan of a configured train.batch_size: the largest divisor of the process' rows that is not above
    it."""
    assert config.train.batch_size != "auto"
    return BatchPlan(
        next(size for size in divisors(rows_of_process(config, cluster)) if size <= config.train.batch_size)
    )


def first_plan(config: Config, device: torch.device, tokenizer: Any | None) -> BatchPlan:
    """Return the plan that a run on `device` begins with; the model need not exist yet. ValueError: with
    train.batch_size = "auto", not even one row fits, or the free memory is unknown."""
    if config.train.batch_size != "auto":
        return configured_plan(config)
    memory = memory_to_plan_with(config, device)
    # The least of all processes' memory: they must agree on one plan.
    memory = -process.largest(-memory)[0]
    plan = choose_plan(config, model_config(config, tokenizer), memory)
    if plan is None:
        raise ValueError(
            f"train.batch_size = 'auto': not even one row fits {memory / GIBI:.2f} GiB; overcoat estimate --config "
            f"CONFIG.toml --gpu-memory {memory / GIBI:.1f}GiB says what would make it fit, train.batch_size=1 with "
            "train.accumulation tries all the same"
        )
    return plan


def choose_plan(
    config: Config, model: Any, memory: int, cluster: Cluster = ONE, loss_of: LossOf | None = None
) -> BatchPlan | None:
    """Return the plan with the largest micro-batch that fits into `memory` bytes minus the SAFETY share; None if
    nothing fits.

    Block checkpoints are tried if not even one row fits without them and train.on_oom allows them; the leanest plan of
    all may use the SAFETY share, too. cluster: as in `rows_of_process`; loss_of: the loss of a step (default: that of
    text).
    """
    predictor = Predictor(model, loss_of or loss_for_estimates(config.data.masks_documents))

    def needed(plan: BatchPlan) -> int:
        setup, shards = training_setup(config, plan, cluster), max(num_shards(config.parallel), cluster.sharding)
        return predictor.predict(plan.micro_batch, config.data.sequence_length, setup, shards).total_bytes

    plans = [BatchPlan(rows) for rows in divisors(rows_of_process(config, cluster))]
    leaner = [] if config.train.on_oom == "error" else [lean for plan in plans for lean in _checkpointed(config, plan)]
    for known in (plans, leaner):
        # Fewer rows need less: a handful of predictions finds the place, where a large step has hundreds of divisors.
        place = bisect.bisect_left(known, True, key=lambda plan: needed(plan) <= (1 - SAFETY) * memory)
        if place < len(known):
            return known[place]
    last = [*plans, *leaner][-1]
    return last if needed(last) <= memory else None


def memory_to_plan_with(config: Config, device: torch.device | None) -> int:
    """Return how many bytes a run may use on `device` (None: no GPU), including the CUDA context. ValueError: neither a
    GPU nor train.memory_limit_gib is given."""
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
            "train.batch_size = 'auto' asks a GPU how much memory is free, and this run has none: set train.batch_size "
            "to a number, or train.memory_limit_gib to what it may plan with"
        )
    return min(known)
