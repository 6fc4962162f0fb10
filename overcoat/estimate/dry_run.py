"""One training step on the meta device: the real model's forward and backward, shapes without data, under a `Meter`.

What a step holds follows from the order in which the ops of the forward and backward allocate and free. Instead of
repeating that order in formulas, the predictor runs it: the model of the configuration, at its full depth, converted by
`overcoat.convert`, with autograd's own engine. A block that keeps a tensor more, or frees one earlier, changes the
prediction by itself.

Not run, since nothing of theirs is alive at a peak but what can be counted from shapes: the optimizer's step (states of
`overcoat.optim.state`). FSDP2's hooks are stood in for by those of fsdp.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block import offload
from overcoat.estimate.fsdp import FullyShard
from overcoat.estimate.meter import GATHERED, GRADIENTS, Account, LibraryAttention, Meter
from overcoat.estimate.phases import LOSS, OPTIMIZER, watch
from overcoat.extras import load_extra
from overcoat.memory import KeptReport, record_kept
from overcoat.models.convert import Report, convert
from overcoat.recipe import Recipe

KEPT, FLOWING, LOSS_PART, WORKSPACE = "kept activations", "residual stream", "loss", "workspace"

META = torch.device("meta")
# model, batch, sequence -> scalar loss
LossOf = Callable[[Any, int, int], Tensor]


@dataclass(frozen=True)
class Work:
    """What the dry run depends on.

    Attributes:
        recipe: of `overcoat.convert`.
        batch, sequence: rows in one forward pass, and their tokens.
        dtype: of the parameters.
        accumulation: forward passes in an optimizer step; from the second on, gradients are there from the start.
        release_bytes: batch of `overcoat.release_gradients`, or None: gradients are kept until the step.
        gpus: processes of FSDP2.
        document_mask: rows hold several documents, so attention has a mask.
    """

    recipe: Recipe = field(default_factory=Recipe)
    batch: int = 1
    sequence: int = 2048
    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 1
    release_bytes: Optional[int] = None
    gpus: int = 1
    document_mask: bool = False


class DryRun(NamedTuple):
    """What the run saw.

    account: living bytes by category, without parameters, and without gradients that were there before.
    host: bytes of host memory that kept activations wait in (`Recipe.offload_blocks`).
    handles: of cuBLAS, one for each thread that asks PyTorch for products: the main one's forward, autograd's backward.
    """

    account: Account
    report: Report
    host: int
    handles: int


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """The transformers causal model of a configuration without its weights, in training mode.

    Raises:
        ValueError: it is the configuration of something else.
    """
    transformers = load_extra("transformers", "hf", "overcoat estimate")
    with META:
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    return model.train()


def own_loss(model: Any, batch: int, sequence: int) -> Tensor:
    """The model's loss on token ids without values, as plain Hugging Face code computes it."""
    ids = torch.empty((batch, sequence), dtype=torch.int64, device=META)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def dry_run(config: Any, work: Work, loss_of: LossOf = own_loss) -> DryRun:
    """Forward and backward of one micro-batch, the last of its step."""
    model = meta_model(config, work.dtype)
    report = convert(model, work.recipe)
    meter = Meter(answer=not work.document_mask)
    meter.leave_out([*model.parameters(), *model.buffers()])
    if work.accumulation > 1 and work.gpus == 1:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        meter.leave_out(parameter.grad for parameter in model.parameters())
    with (
        _refusing_values(config),
        _gradient_hooks(model, work, meter),
        watch(model, meter.mark, lambda tensor: meter.tag(tensor, FLOWING)),
        meter,
        LibraryAttention(),
        offload.separate(META) as transfers,
    ):
        transfers.on_fetch = lambda tensor: meter.tag(tensor, KEPT)
        loss = loss_of(model, work.batch, work.sequence)
        kept, handles = meter.alive(), int(meter.multiplies)
        meter.multiplies = False
        loss.backward()
        handles += meter.multiplies
        del loss
        meter.mark(OPTIMIZER)
        model.zero_grad()
    meter.stop()
    account = meter.account(_categories(meter, kept))
    return DryRun(account, report, transfers.pool.total_bytes, handles)


def kept_tensors(config: Any, work: Work, loss_of: LossOf = own_loss) -> KeptReport:
    """What `overcoat.memory.record_kept` will report of one forward pass, by op and tensor."""
    model = meta_model(config, work.dtype)
    convert(model, work.recipe)
    meter = Meter(answer=not work.document_mask)
    with _refusing_values(config), meter, LibraryAttention(), offload.separate(META), record_kept(model) as kept:
        loss_of(model, work.batch, work.sequence)
    return kept


@contextlib.contextmanager
def _refusing_values(config: Any) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise ValueError(
            f"a {config.model_type} model computes shapes from its data, so what it holds cannot be told without "
            f"running it: {error}"
        ) from error


def _categories(meter: Meter, kept: set[int]) -> list[str]:
    """One name for each allocation; `kept`: numbers of those that waited for the backward."""

    def name(number: int) -> str:
        if (tag := meter.tags.get(number)) in (GRADIENTS, GATHERED):
            return tag
        if meter.place(number) == LOSS:
            return LOSS_PART
        return KEPT if number in kept else meter.tags.get(number, WORKSPACE)

    return [name(number) for number in range(meter.count)]


# ---- what becomes of a gradient -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _gradient_hooks(model: nn.Module, work: Work, meter: Meter) -> Iterator[None]:
    """Inside, gradients are kept, or released in batches; of several processes, parts of them."""
    gradients = _Gradients(meter, work.release_bytes)
    if work.gpus > 1:
        # What accumulates is added to the gradients that are there, and freed.
        take = gradients.keep if work.accumulation == 1 else lambda _: None
        with FullyShard(model, meter, work.gpus, take).installed():
            yield
        return
    handles = [parameter.register_post_accumulate_grad_hook(gradients) for parameter in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Gradients:
    """Gradients wait for `optimizer.step()`, or, released (`overcoat.release_gradients`), until they hold `batch_bytes`
    or the backward ends."""

    def __init__(self, meter: Meter, batch_bytes: Optional[int]) -> None:
        self.meter, self.batch_bytes = meter, batch_bytes
        self.waiting: list[Tensor] = []

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.meter.tag(gradient, GRADIENTS)
        if self.batch_bytes is not None:
            parameter.grad = None
            self.keep(gradient)

    def keep(self, gradient: Tensor) -> None:
        """Of a gradient that is no parameter's `grad`."""
        if self.batch_bytes is not None and not self.waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.waiting.clear)
        self.waiting.append(gradient)
        if self.batch_bytes is not None and sum(each.nbytes for each in self.waiting) >= self.batch_bytes:
            self.waiting.clear()
