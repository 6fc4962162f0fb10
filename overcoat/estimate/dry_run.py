"""Run one training step on the meta device (shapes without data) under a `Meter`, which counts its memory.

The real model runs at its full depth, converted by `overcoat.convert`, with autograd's own engine: if a block saves one
more tensor, or frees one earlier, the prediction changes too. The optimizer's step is not run, as its states are
counted from shapes. Of several GPUs the first runs, with FSDP2 (fsdp.py).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overcoat.block import offload
from overcoat.block.linear import stack_weights_of
from overcoat.estimate.delta_rule import library_delta_rule
from overcoat.estimate.fsdp import Stream, shard
from overcoat.estimate.meter import GATHERED, GRADIENTS, META, Living, Meter, own
from overcoat.estimate.phases import LOSS, OPTIMIZER, watch
from overcoat.estimate.replay import alike_blocks
from overcoat.estimate.setup import Setup
from overcoat.estimate.streaming import check_shares, stand_in
from overcoat.estimate.times import Work
from overcoat.estimate.workspaces import LibraryAttention
from overcoat.extras import reason
from overcoat.memory import SavedReport, record_kept
from overcoat.models.convert import Report, convert
from overcoat.models.decoder import Fp8DecoderLayer, block_of, checked_now
from overcoat.models.dummy_batch import SIDE, freeze_tower, images, model_class, tokens
from overcoat.models.experts import Fp8Experts, weights_of
from overcoat.models.family import decoder_layers
from overcoat.models.frozen import weights_to_hold
from overcoat.models.lora import add_lora
from overcoat.optim.muon import hidden_matrices
from overcoat.optim.release import BATCH_BYTES, PART_BYTES, Parts
from overcoat.streaming.choice import streamed_layers
from overcoat.streaming.layers import Layer

KEPT, FLOWING, LOSS_PART, WORKSPACE = "kept activations", "residual stream", "loss", "workspace"

# model, batch, sequence -> scalar loss
LossOf = Callable[[Any, int, int], Tensor]


class DryRun(NamedTuple):
    """Results of a dry run.

    phases: live bytes by category, without parameters and earlier gradients; key: True if gradients are released,
        which changes only when they are freed.
    host: bytes of saved activations in host memory (`Recipe.offload_blocks`).
    work: operations and bytes of its ops.
    """

    phases: dict[bool, list[Living]]
    host: int
    work: Work


def meta_model(config: Any, dtype: torch.dtype, frozen: bool = False) -> Any:
    """Return the transformers model of a configuration on the meta device, in training mode.

    frozen: freeze its vision tower. ValueError: another kind of configuration, or no tower to freeze.
    """
    made = model_class(config)
    # Gemma 2 and gpt-oss have no other.
    attention = "sdpa" if made._supports_sdpa else "eager"
    with META, _refusing_values(config, kinds=Exception):
        model = made._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
    if frozen:
        freeze_tower(model)
    return model.train()


def own_loss(model: Any, batch: int, sequence: int, side: int = SIDE) -> Tensor:
    """Return the model's loss on token ids on the meta device; for vision models with one image per row.

    side: pixels per side of an image, if the model takes images of any size.
    """
    given = images(model, batch, sequence, side)
    return model(**given, **tokens(model, batch, sequence, given), use_cache=False).loss


class Trained(NamedTuple):
    """A model on the meta device, prepared as a setup trains it.

    parameters: before they are sharded; matrices: those of hidden layers; report: of `convert`; parts: for gradient
        release. gathered: bytes of all parameters, as FSDP2 gathers them. held: ids of weights that are held as FP8
        codes. streamed: layers with weights in host memory, in the model as `overcoat.stream` runs them. left: why
        other weights cannot be, by their names.
    """

    model: Any
    parameters: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    report: Report
    parts: Parts
    gathered: int
    held: frozenset[int]
    streamed: tuple[Layer, ...] = ()
    left: dict[str, str] = {}  # noqa: RUF012


def trained_model(config: Any, setup: Setup, gpus: int = 1) -> Trained:
    """Return the model of a configuration, for any number of dry runs."""
    model = meta_model(config, setup.torch_dtype, setup.freeze_tower)
    if setup.lora_rank:
        with META:
            model = add_lora(model, setup.lora_rank, targets=setup.lora_targets, use_dora=setup.dora)
    parameters, matrices = tuple(model.parameters()), hidden_matrices(model)
    report = convert(model, setup.recipe)
    _order_rows(model)
    held = frozenset(map(id, weights_to_hold(model, setup.recipe)))
    layers, left = streamed_layers(model, setup.resident) if setup.stream else ([], {})
    gathered = 0
    if setup.is_sharded(gpus):
        check_shares(layers, gpus)
        gathered = shard(model, setup, gpus, frozenset(param for layer in layers for param in layer.params))
    parts = Parts(model)
    stand_in(layers, parts)
    return Trained(model, parameters, matrices, report, parts, gathered, held, tuple(layers), left)


@torch.no_grad()
def _order_rows(model: Any) -> None:
    """Make the row orders of stacked weights, which the first step of a process makes for all later ones."""
    for layer in decoder_layers(model).values():
        if isinstance(layer, Fp8DecoderLayer) and (branches := checked_now(layer).branches) is not None:
            for branch in block_of(branches, layer.overcoat_family, layer).branches:
                stack_weights_of(branch.in_proj)


def dry_run(of: Trained, batch: int, sequence: int, setup: Setup, loss_of: LossOf = own_loss) -> DryRun:
    """Run forward and backward of one micro-batch, the last of its step."""
    meter = Meter(not setup.document_mask, work := Work())
    parameters = list(of.model.parameters())
    meter.leave_out([*parameters, *of.model.buffers()])
    if setup.accumulation > 1:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        meter.leave_out(parameter.grad for parameter in trained)
    with (
        _refusing_values(of.model.config, of.model),
        _gradient_hooks(of, parameters, meter, setup) as held,
        watch(of.model, meter.mark, lambda tensor: meter.tag(tensor, FLOWING)),
        meter.watch_resizes(),
        meter,
        alike_blocks(meter),
        library_delta_rule(of.model),
        offload.separate(META) as transfers,
        torch.cpu.stream(Stream()),
    ):
        transfers.on_fetch = lambda tensor: meter.tag(tensor, KEPT)
        with LibraryAttention():
            loss = loss_of(of.model, batch, sequence)
        kept = meter.alive()
        loss.backward()
        del loss
        meter.mark(OPTIMIZER)
        for parameter in parameters:
            parameter.grad = None
    meter.stop()
    categories = [
        _category(meter.tags.get(number, WORKSPACE), place, number in kept)
        for number, place in enumerate(meter.places())
    ]
    phases = {False: meter.account(categories, held), True: meter.account(categories)}
    return DryRun(phases, transfers.pool.total_bytes, work)


def kept_tensors(config: Any, batch: int, sequence: int, setup: Setup, loss_of: LossOf = own_loss) -> SavedReport:
    """Predict `overcoat.memory.record_kept`'s report of one forward pass, by op and tensor."""
    setup = replace(setup, replicated=False)
    model, meter = trained_model(config, setup).model, Meter(not setup.document_mask, Work())
    with (
        _refusing_values(config, model),
        meter,
        LibraryAttention(),
        library_delta_rule(model),
        offload.separate(META),
        record_kept(model) as kept,
    ):
        loss_of(model, batch, sequence)
    return kept


@contextlib.contextmanager
def _refusing_values(config: Any, model: Any = None, kinds: Any = (RuntimeError, ArithmeticError)) -> Iterator[None]:
    """Turn errors of transformers or PyTorch about a configuration's values into a ValueError.

    model: the one that runs, if it is made.
    """
    try:
        yield
    except NotImplementedError as error:
        if model is not None and _loops_over_experts(model):
            raise ValueError(
                'experts_implementation = "eager" loops over the experts that tokens chose, which a dry run cannot '
                'know: use "grouped_mm" for the estimate'
            ) from error
        raise ValueError(
            f"a {config.model_type} model does what PyTorch cannot do without data, as shapes that depend on it, or "
            f"has not implemented, so what it holds cannot be told without running it: {error}"
        ) from error
    except kinds as error:
        raise ValueError(
            f"the {config.model_type} model of this configuration cannot be made or run dry: {reason(error)}"
        ) from error


def _loops_over_experts(model: Any) -> bool:
    """True if transformers' eager implementation runs experts of a model, which `convert` left alone."""
    if model.config.get_text_config()._experts_implementation != "eager":
        return False
    return any(weights_of(each) is not None and not isinstance(each, Fp8Experts) for each in model.modules())


def _category(tag: str, place: str, kept: bool) -> str:
    """Return the category of an allocation made in the phase `place`; kept: True if saved for the backward."""
    if tag in (GRADIENTS, GATHERED):
        return tag
    if place == LOSS:
        return LOSS_PART
    return KEPT if kept else tag


@contextlib.contextmanager
def _gradient_hooks(of: Trained, parameters: list[Tensor], meter: Meter, setup: Setup) -> Iterator[AbstractSet[int]]:
    """Collect and release gradients (with several processes, shards of them) as `overcoat.optim.release` does.

    Not while they accumulate. Yields the allocations that without release would live until `optimizer.step()`.
    """
    waiting: list[Tensor] = []
    held: set[int] = set()
    of.parts.restart()

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = own(parameter.grad)
        meter.tag(gradient, GRADIENTS)
        if setup.accumulation > 1:
            return
        parameter.grad = None
        if not waiting:
            torch.autograd.Variable._execution_engine.queue_callback(waiting.clear)
        waiting.append(gradient)
        if (number := meter.number(gradient)) >= 0:
            held.add(number)
        size, is_complete = sum(each.nbytes for each in waiting), of.parts.complete(parameter)
        if size >= (BATCH_BYTES if is_complete else PART_BYTES):
            waiting.clear()

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in trained]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()
