"""Gradient release: parameters take their step inside the backward pass and their gradients are freed.

    handle = overcoat.release_gradients(model, optimizer)
    for batch in batches:
        model(**batch).loss.backward()    # the weights move here
        optimizer.step()                  # marks the end of the step; learning rate schedules go on as ever
        scheduler.step()

Gradients of a whole model cost 2 bytes per BF16 parameter; released, only those that are being worked on exist.
Completed gradients are taken from their parameters and collected until they hold `batch_bytes`, or until backward ends,
and then stepped by one launch: a step of its own for every small parameter would cost more time on the host than the
whole backward pass. A larger gradient is stepped at once. In a layer that `convert` made, all gradients of one decoder
block are born together, so there at least those of one block exist. What moves is bit for bit what the ordinary step
without clipping moves, with one difference:

    ordinary    a gradient that is not finite skips the whole step         skipped_steps counts steps
    released    it skips its own parameter's step: the others have moved   skipped_steps counts parameters' steps

`optimizer.grad_norm` is the norm over all parameters after `step()`, for logging.

What cannot work is refused with a ValueError:

    accumulation        the second micro-batch would find weights that have moved. Refused at the second forward pass of
                        the model, or, if only backward is repeated, at the first gradient that comes a second time;
                        a parameter is never stepped twice.
    global clipping     needs all gradients at once. `torch.nn.utils.clip_grad_norm_` cannot be refused: it would see no
                        gradients and do nothing.
    GradScaler          needs all gradients at once to decide. float16 autocast is refused at the forward pass, a scaler
                        at `optimizer.step()`.
    DistributedDataParallel   averages gradients after the hooks used here; FSDP2 (`fully_shard`) calls them at the
                        right time.

Gradient checkpointing works, tied weights work. One combination does not: reentrant checkpointing runs a backward pass
of its own per segment, so the gradient of a weight shared between segments arrives in parts; the second is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from overcoat.optim.adamw import AdamW
from overcoat.optim.released import Batch, Entry, ReleasedSteps, current_stream, raw_stream


def release_gradients(model: nn.Module, optimizer: AdamW, *, batch_bytes: int = 32 * 2**20) -> GradientRelease:
    """Step every parameter of `optimizer` inside the backward pass from now on; see the module's text.

    Args:
        model: owns all parameters of the optimizer; its forward pass is watched for gradient accumulation.
        optimizer: an `overcoat.AdamW` whose parameters have no gradients yet.
        batch_bytes: completed gradients are stepped when they hold so many bytes; 1 steps every parameter on its own.
            At most these bytes and the gradients that are completed last are alive beside autograd's own.

    Returns:
        A handle; `handle.remove()` goes back to ordinary steps.

    Raises:
        ValueError: what was passed cannot work; nothing has been changed.
    """
    return GradientRelease(model, optimizer, batch_bytes)


class GradientRelease:
    """The handle of `release_gradients`: the hooks, and what has happened since the last `optimizer.step()`."""

    def __init__(self, model: nn.Module, optimizer: AdamW, batch_bytes: int) -> None:
        _check(model, optimizer, batch_bytes)
        self.optimizer, self.batch_bytes = optimizer, batch_bytes
        self.taken: set[int] = set()  # indices of the parameters whose gradients have been taken in this step
        self.batches: dict[torch.device, Batch] = {}  # backward runs in a thread of its own on every device
        self.streams: dict[torch.device, Optional[torch.cuda.Stream]] = {}  # that stepped last
        self.steps = ReleasedSteps(optimizer)
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.handles = [model.register_forward_pre_hook(self._before_forward)]
        for number, index, param in optimizer.indexed_parameters():
            if param.requires_grad:
                self.handles.append(param.register_post_accumulate_grad_hook(self._hook(number, index)))
        optimizer.release = self

    def remove(self) -> None:
        """Take the hooks away: `optimizer.step()` does the whole step again."""
        if not self.handles:  # removed before, or a copy
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.finish_backward()
        if self.optimizer.release is self:
            self.optimizer.release = None

    def __reduce__(self) -> Any:
        """A copy of the model takes its hooks along, so also this: as a handle that is not in force."""
        return _removed, ()

    @property
    def has_stepped(self) -> bool:
        """Whether a parameter may have moved since the last `optimizer.step()` or `zero_grad()`."""
        return self.steps.moved

    # ---- called by the optimizer ----------------------------------------------------------------------

    def check_step(self, clip_grad_norm: Optional[float]) -> None:
        """Refuse what `optimizer.step` cannot do once gradients are released."""
        if clip_grad_norm is not None:
            raise ValueError(
                "step(clip_grad_norm=...) cannot work with release_gradients: clipping by the global norm needs all "
                "gradients at once, and each has been applied and freed in the backward pass; call step() without "
                "clip_grad_norm, or handle.remove()"
            )
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise ValueError(
                "GradScaler cannot work with release_gradients: it decides from all gradients whether to step, and "
                "each has been applied, scaled, in the backward pass; train in bfloat16, which needs no scaling, or "
                "call handle.remove()"
            )

    def finish_backward(self) -> None:
        """Step what has been collected: called when backward ends, and by `step`, should backward have failed."""
        for device in list(self.batches):
            self._step_batch(device)
        for device in self.streams:
            self._follow(device, current_stream(device))
        self.steps.count()

    def drop_pending(self) -> None:
        """Forget gradients that have been collected and not used: backward has failed."""
        self.batches.clear()

    def forget(self) -> None:
        """End the step, and keep nothing of the states: others take their place."""
        self.finish_backward()
        self.steps.end()
        self.steps.let_go()
        self.taken = set()

    def end_step(self) -> None:
        """The mark between two steps, set by `optimizer.step` and `zero_grad`."""
        self.finish_backward()
        self.steps.end()
        self.taken = set()

    # ---- hooks ----------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not self.handles:  # the hook of a copied model
            return
        # Not in inference, and not when checkpointing recomputes the model inside its backward pass.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self.taken:
            raise ValueError(
                "release_gradients: the model runs forward again before optimizer.step(). Gradient accumulation "
                "cannot work: the first backward pass has already moved the weights. Call optimizer.step() after every "
                "backward(), use larger batches, or call handle.remove(); evaluate under torch.no_grad()"
            )
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise ValueError(
                "release_gradients: float16 autocast needs GradScaler, which needs all gradients at once; autocast to "
                "bfloat16, which needs no scaling, or call handle.remove()"
            )

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        # PyTorch does not show Python's collector the hooks of a parameter: owned by them, model, optimizer and this
        # would never be freed. The model's own hook and the optimizer own it.
        reference = weakref.ref(self)

        def take(param: Tensor) -> None:
            release = reference()
            if release is not None:
                release._take(number, index, param)

        return take

    def _take(self, number: int, index: int, param: Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            raise ValueError(
                f"release_gradients: the gradient of {self.names[id(param)]!r} is gone: its steps are released for two "
                "optimizers, and the other has taken it; call remove() of one handle"
            )
        if index in self.taken:
            raise ValueError(
                f"release_gradients: a second gradient for {self.names[id(param)]!r} before optimizer.step(). Two "
                "backward passes cannot be accumulated: the first has already moved the weights. Call "
                "optimizer.step() after every backward(), or add the losses and call backward() once. (If there "
                "was one pass: segments under reentrant checkpointing share this weight; use_reentrant=False)"
            )
        self.taken.add(index)
        self._collect(number, index, param, grad)

    def _collect(self, number: int, index: int, param: Tensor, grad: Tensor) -> None:
        device = grad.device
        in_backward = torch._C._current_graph_task_id() != -1
        batch = self.batches.get(device)
        if batch is not None and batch.raw_stream != raw_stream(device):
            self._step_batch(device)
            batch = None
        if batch is None:
            batch = self.batches[device] = Batch(device)
            if in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)
        batch.add(Entry(number, index, param, grad))
        if batch.bytes >= self.batch_bytes or not in_backward:
            self._step_batch(device)

    def _step_batch(self, device: torch.device) -> None:
        batch = self.batches.pop(device)
        self._follow(device, batch.stream)
        elsewhere = batch.stream is not None and batch.raw_stream != raw_stream(device)
        with torch.cuda.stream(batch.stream) if elsewhere else contextlib.nullcontext():
            self.steps.step(batch)

    def _follow(self, device: torch.device, stream: Optional[torch.cuda.Stream]) -> None:
        """Let `stream` wait for the one that stepped last: FSDP2 completes gradients on a stream of its own."""
        last = self.streams.get(device)
        if stream is not None and last is not None and last != stream:
            stream.wait_stream(last)
        self.streams[device] = stream


def _removed() -> GradientRelease:
    handle = GradientRelease.__new__(GradientRelease)
    handle.handles = []
    return handle


def _check(model: nn.Module, optimizer: AdamW, batch_bytes: int) -> None:
    """ValueError for what can be told before the first backward pass."""
    if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, int) or batch_bytes < 1:
        raise ValueError(
            f"release_gradients: batch_bytes {batch_bytes!r} must be a number of bytes, for example {32 * 2**20}"
        )
    if not isinstance(optimizer, AdamW):
        raise ValueError(f"release_gradients steps an overcoat.AdamW, got {type(optimizer).__name__}")
    if optimizer.release is not None:
        raise ValueError("release_gradients: this optimizer's gradients are released already; remove() the old handle")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "release_gradients: DistributedDataParallel averages gradients only after each would have been applied; "
            "use torch.distributed.fsdp.fully_shard"
        )
    for hook in model._forward_pre_hooks.values():
        other = getattr(hook, "__self__", None)
        if isinstance(other, GradientRelease) and other.handles:
            raise ValueError(
                "release_gradients: this model's gradients are released already, for another optimizer, which would go "
                "on stepping; call remove() of its handle"
            )
    owned = {id(param) for param in model.parameters()}
    for _, index, param in optimizer.indexed_parameters():
        if id(param) not in owned:
            raise ValueError(
                f"release_gradients: parameter {index} of the optimizer, of shape {tuple(param.shape)}, is not in the "
                "model; pass the model that holds all of them"
            )
        if param.grad is not None:
            raise ValueError(
                "release_gradients: there are gradients already, to which the next would be added; call "
                "optimizer.step() or zero_grad() first"
            )
