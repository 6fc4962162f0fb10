"""Gradient release: step parameters during the backward pass and free their gradients at once.

    handle = overcoat.release_gradients(model, optimizer)
    for batch in batches:
        model(**batch).loss.backward()    # the weights move here
        optimizer.step()                  # marks the end of the step; learning rate schedules go on as ever
        scheduler.step()

Gradients are collected until all gradients of a part of the model, usually a decoder layer, are there, and are then
applied in one launch: one step per parameter would cost the host more time than the backward. In a converted layer all
gradients of a block are computed at once, so collecting them costs no memory. Results equal those of the ordinary step
without clipping bit for bit, except for gradients that are not finite: only that parameter's step is skipped, since
others have been taken, and `skipped_steps` counts steps of single parameters. After `step()` `optimizer.grad_norm` is
the norm over all gradients.

Whatever needs all gradients at once is refused with a ValueError: accumulation, global clipping, GradScaler,
DistributedDataParallel (FSDP2 works: it calls the hooks in time). `torch.nn.utils.clip_grad_norm_` cannot be refused:
it sees no gradients and does nothing. Gradient checkpointing and tied weights work; a weight shared between segments of
reentrant checkpointing, whose gradient arrives in parts, is refused.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections import Counter
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from overcoat.optim.adamw import AdamW
from overcoat.optim.release_checks import (
    check_clipping,
    check_release,
    check_replicas,
    numbered,
    trainers_clipping,
)
from overcoat.optim.sharding import shard_bytes
from overcoat.optim.step import StepGroup, kind_of, moved

# Bytes of gradients that are collected before a launch.
BATCH_BYTES = 32 * 2**20
# The most bytes of gradients of a part, and the largest share of all gradients, unless a part is one parameter.
PART_BYTES, PART_SHARE = 2**30, 1 / 8


def release_gradients(model: nn.Module, optimizer: AdamW, *, batch_bytes: int = BATCH_BYTES) -> GradientRelease:
    """Step every parameter of `optimizer` inside the backward pass, until `remove()` of the handle is called.

    Args:
        model: owns all parameters of the optimizer; its forward pass is watched for gradient accumulation.
        optimizer: an `overcoat.AdamW` whose parameters have no gradients yet.
        batch_bytes: step when, at the end of a part of the model, completed gradients take this many bytes; 1: step
            every part on its own.

    Raises:
        ValueError: the arguments cannot work together; nothing has been changed.
    """
    return GradientRelease(model, optimizer, batch_bytes)


class Parts:
    """The parts of a model whose gradients are stepped together: its largest modules that are small enough.

    A parameter of several modules belongs to the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.number: dict[int, int] = {}  # of the part, by the parameter's id
        trained = [param for param in model.parameters() if param.requires_grad]
        self._add(model, min(PART_BYTES, PART_SHARE * sum(map(shard_bytes, trained))))
        self.restart()

    def _add(self, module: nn.Module, most: float) -> None:
        params = [param for param in module.parameters() if param.requires_grad]
        if sum(map(shard_bytes, params)) <= most:
            number = len(self.number)
            for param in params:
                self.number.setdefault(id(param), number)
            return
        for child in module.children():
            self._add(child, most)
        for param in params:  # the module's own
            self.number.setdefault(id(param), len(self.number))

    def restart(self) -> None:
        """Expect all gradients anew."""
        self.missing = Counter(self.number.values())

    def complete(self, param: Tensor) -> bool:
        """Record a parameter's gradient; return True if it is the last of its part."""
        number = self.number.get(id(param), -1)  # -1: unfrozen since the parts were made, a part of its own
        self.missing[number] -= 1
        return self.missing[number] <= 0


class Batch:
    """Completed gradients on one device that wait for their step, and the stream that made them."""

    def __init__(self, device: torch.device) -> None:
        self.raw_stream, self.stream = _raw_stream(device), _current_stream(device)
        self.entries: list[tuple[int, int, Tensor, Tensor]] = []  # number of the group, index, parameter, gradient
        self.bytes = 0


def _current_stream(device: torch.device) -> Optional[torch.cuda.Stream]:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _raw_stream(device: torch.device) -> int:
    """Return the current stream's number, in a tenth of the time of `_current_stream`; called for every gradient."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class GradientRelease:
    """The handle of `release_gradients`: its hooks, and the state since the last `optimizer.step()`.

    keeps_on_host: True if it also keeps parameters in host memory (`overcoat.stream`). instead: of accumulation, for
        messages.
    """

    handles: list[Any]
    keeps_on_host, instead = False, "use larger batches"

    def __init__(self, model: nn.Module, optimizer: AdamW, batch_bytes: int) -> None:
        check_release(model, optimizer, batch_bytes)
        others = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        if any(isinstance(other, GradientRelease) and other.handles for other in others):
            raise ValueError(
                "release_gradients: this model's gradients are released already, for another optimizer, which would go "
                "on stepping; call remove() of its handle"
            )
        self.optimizer, self.batch_bytes = optimizer, batch_bytes
        self.batches: dict[torch.device, Batch] = {}  # backward has one thread per device
        self.streams: dict[torch.device, Optional[torch.cuda.Stream]] = {}  # that stepped last
        self.step_groups: dict[Any, StepGroup] = {}  # by kind and parameters, of the last step and of this one
        # Since the last `optimizer.step()`:
        self.taken: set[int] = set()  # indices of the parameters whose gradients have been taken
        self.used: dict[Any, StepGroup] = {}  # step groups, in their order
        self.sums: list[Tensor] = []  # of squares of gradients, (T,)
        self.has_begun = self.has_stepped = self.has_asked_trainer = False
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.parts = Parts(model)
        self.handles = [model.register_forward_pre_hook(self._before_forward)]
        for index, number, param in numbered(optimizer):
            if param.requires_grad:
                self.handles.append(
                    self.leaf_of(param).register_post_accumulate_grad_hook(self._hook(number, index, param))
                )
        optimizer.release = self

    # ---- what `overcoat.stream` does otherwise --------------------------------------------------------

    def leaf_of(self, param: Tensor) -> Tensor:
        """Return the tensor that autograd accumulates a parameter's gradient in."""
        return param

    def adds_up(self, param: Tensor, leaf: Tensor) -> bool:
        """True if a gradient is kept, to be stepped with others of a later backward."""
        return False

    def device_of(self, param: Tensor) -> Optional[torch.device]:
        """Return the device that steps a parameter of host memory; None for all others."""
        return None

    def stepped_on_device(self, params: list[Tensor]) -> Optional[list[Tensor]]:
        """Return the copies on the device that are stepped in place of parameters of host memory; None for others."""
        return None

    def remove(self) -> None:
        """Remove the hooks: `optimizer.step()` does the whole step again."""
        if not self.handles:  # removed before, or a copy
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._finish_backward()
        if self.optimizer.release is self:
            self.optimizer.release = None

    def __reduce__(self) -> Any:
        """Copy as an inactive handle: copying the model copies its hooks and so this object."""
        return object.__new__, (GradientRelease,), {"handles": []}

    # ---- called by the optimizer ----------------------------------------------------------------------

    def check_step(self, clip_grad_norm: Optional[float]) -> None:
        """Raise ValueError if `optimizer.step` is asked for what it cannot do with released gradients."""
        check_clipping(clip_grad_norm)
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise ValueError(
                "GradScaler cannot work with release_gradients: it decides from all gradients whether to step, and "
                "each has been applied, scaled, in the backward pass; train in bfloat16, which needs no scaling, or "
                "call handle.remove()"
            )
        if not self.has_asked_trainer:
            self.has_asked_trainer = True
            if option := trainers_clipping():
                warnings.warn(
                    f"release_gradients: {option} clips nothing: each gradient has been applied and freed in backward; "
                    "set it to 0, or call handle.remove()",
                    stacklevel=2,
                )

    def end_step(self, rest: Optional[Tensor] = None) -> None:
        """End a step, called by `optimizer.step` and `zero_grad`: set grad_norm and skipped_steps.

        rest: the norm of gradients that were not released, such as accumulated ones without one in the last pass.
        """
        self._finish_backward()
        self.taken = set()
        self.parts.restart()
        if not self.has_begun:
            return
        self.optimizer.grad_norm = None
        if self.sums:
            sums = torch.cat([part.to(self.sums[0].device) for part in self.sums])
            norm = sums.sum().sqrt().float()
            self.optimizer.grad_norm = norm if rest is None else torch.hypot(norm, moved(rest, norm.device))
            self.optimizer.count_skipped((~(sums < math.inf)).sum())
        self.step_groups, self.used, self.sums = self.used, {}, []
        self.has_begun = self.has_stepped = False

    def drop_pending(self) -> None:
        """Drop gradients that were collected but not applied, when a backward has failed."""
        self.batches.clear()

    def drop_states(self) -> None:
        """Drop references to state tensors, which are about to change."""
        self.step_groups, self.used = {}, {}

    # ---- hooks ----------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not self.handles:  # the hook of a copied model
            return
        # Not in inference, and not when checkpointing recomputes the model inside its backward pass.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        # The released model may be wrapped, by a trainer or later by the user.
        check_replicas(nn.parallel.DistributedDataParallel._active_ddp_module)
        if self.taken:
            raise ValueError(
                "release_gradients: the model runs forward again before optimizer.step(). Gradient accumulation "
                "cannot work: the first backward pass has already moved the weights. Call optimizer.step() after every "
                f"backward(), {self.instead}, or call handle.remove(); evaluate under torch.no_grad()"
            )
        device = next(model.parameters()).device.type
        has_autocast = torch.amp.is_autocast_available(device)  # meta has none
        if has_autocast and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise ValueError(
                "release_gradients: float16 autocast needs GradScaler, which needs all gradients at once; autocast to "
                "bfloat16, which needs no scaling, or call handle.remove()"
            )

    def _hook(self, number: int, index: int, param: Tensor) -> Callable[[Tensor], None]:
        # Weak references: Python's garbage collector does not see a parameter's hooks, so through them model, optimizer
        # and this object would never be freed. The model's forward hook and the optimizer own this object.
        reference, of = weakref.ref(self), weakref.ref(param)

        def take(leaf: Tensor) -> None:
            release, owner = reference(), of()
            if release is not None and owner is not None and not release.adds_up(owner, leaf):
                release._take(number, index, owner, release._taken(index, owner, leaf))

        return take

    def _taken(self, index: int, param: Tensor, leaf: Tensor) -> Tensor:
        """Return a parameter's gradient, and forget it where autograd has left it."""
        grad, leaf.grad = leaf.grad, None
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
        return grad

    def _take(self, number: int, index: int, param: Tensor, grad: Tensor) -> None:
        device = grad.device
        in_backward = torch._C._current_graph_task_id() != -1
        batch = self.batches.get(device)
        if batch is not None and batch.raw_stream != _raw_stream(device):
            self._step_batch(device)
            batch = None
        if batch is None:
            batch = self.batches[device] = Batch(device)
            if in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        batch.entries.append((number, index, param, grad))
        batch.bytes += shard_bytes(grad)
        enough = self.batch_bytes if self.parts.complete(param) else PART_BYTES
        if batch.bytes >= enough or not in_backward:
            self._step_batch(device)

    # ---- steps ----------------------------------------------------------------------------------------

    def _finish_backward(self) -> None:
        """Step the collected gradients: called when backward ends, and by `step` in case backward has failed."""
        for device in list(self.batches):
            self._step_batch(device)
        for device in self.streams:
            self._follow(device, _current_stream(device))

    def _step_batch(self, device: torch.device) -> None:
        batch = self.batches.pop(device)
        self._follow(device, batch.stream)
        elsewhere = batch.stream is not None and batch.raw_stream != _raw_stream(device)
        with torch.cuda.stream(batch.stream) if elsewhere else contextlib.nullcontext(), torch.no_grad():
            self._step(batch.entries)

    def _follow(self, device: torch.device, stream: Optional[torch.cuda.Stream]) -> None:
        """Make `stream` wait for the one that stepped last: FSDP2 completes gradients on a stream of its own."""
        last = self.streams.get(device)
        if stream is not None and last is not None and last != stream:
            stream.wait_stream(last)
        self.streams[device] = stream

    def _begin(self) -> None:
        if not self.has_begun:
            self.optimizer.begin_step()
            self.has_begun = True

    def _step(self, entries: list[tuple[int, int, Tensor, Tensor]]) -> None:
        """Step every parameter of a batch; skip only those whose gradient is not finite."""
        self._begin()
        kinds: dict[Any, list[tuple[int, Tensor, Tensor]]] = {}
        for number, index, param, grad in entries:
            kinds.setdefault((number, *kind_of(param, grad)), []).append((index, param, grad))
        for kind, of_kind in kinds.items():
            group = self.optimizer.param_groups[kind[0]]
            indices, params, grads = map(list, zip(*of_kind, strict=True))
            key = (*kind, *indices)
            step_group = self.step_groups.get(key)
            if step_group is not None and not step_group.holds():
                step_group = None
                self.drop_states()  # frees offloaded states before others are made
            if step_group is None:
                step_group = self.optimizer.step_group_of(group, params, indices)
            self.step_groups[key] = self.used[key] = step_group
            self.has_stepped = True
            step_group.take_gradients(grads)
            factor, skip = self.optimizer.constants(step_group.device)
            if self.optimizer.check_finite:
                squares, skip = step_group.sums_of_squares()
                self.sums.append(squares)
            step_group.step(group, factor, skip)
            self.optimizer.keep_if_captured([step_group])
