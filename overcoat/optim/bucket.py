"""Parameters that one optimizer step handles together, and their state tensors as the op and the kernel want them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overcoat import weight_amax
from overcoat.formats.masters import parameter_key, resolve_master
from overcoat.kernels.adamw import gradients_sum_squares, rows_of
from overcoat.optim.arguments import STATE_LISTS, Arguments, Hyper
from overcoat.optim.offload import Staging, Streamed
from overcoat.optim.shards import (
    check_gradient_placements,
    first_row,
    gather,
    is_whole,
    keep_own_part,
    local,
    sum_over_shards,
    whole_buffer,
)
from overcoat.optim.watched import State


class Bucket:
    """Parameters of one group, device and pair of dtypes that are stepped together, and the lists of their tensors.

    It is kept from step to step: with a thousand parameters, collecting those lists costs the host more time than the
    step costs the GPU. The optimizer drops it when a state is written to (`overcoat.optim.watched`); `serves` says
    whether all tensors still lie where they did.

    Args:
        group: their parameter group.
        params: as the optimizer holds them, DTensors of one layout or plain tensors.
        indices: their numbers in the optimizer.
        states: their states.
        staging: where the states pass through the device, if they live in host memory.
    """

    def __init__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        indices: Sequence[int],
        states: Sequence[State],
        staging: Optional[Staging] = None,
    ) -> None:
        self.owners, self.indices, self.staging = params, indices, staging
        self.sharded = isinstance(params[0], DTensor)
        self.whole = is_whole(params[0])
        own = [local(param) for param in params]
        # What is stepped: this process' rows, or buffers for whole vectors, and for what chunks of rows cannot be cut
        # from. They are filled before every step and not here: processes need not build their buckets at the same time,
        # but gathering takes all of them.
        self.buffered = self.whole or (staging is not None and not all(map(Tensor.is_contiguous, own)))
        stepped = [_buffer(param) for param in params] if self.buffered else own
        self.asked_before, self.asked = weight_amax.count(), self._asked()
        names = states[0].keys()
        self.arguments = Arguments(
            params=stepped,
            states={
                name: [local(state[key]) for state in states] if key in names else []
                for name, key in STATE_LISTS.items()
            },
            keys=[parameter_key(group["seed"], index) for index in indices],
            first_groups=[self._first_group(param, group["group_size"]) for param in params],
            master=resolve_master(group["master"], params[0].dtype),
            group_size=group["group_size"],
            weight_amax=dict(zip(self.asked, weight_amax.memory([*self.asked.values()], own[0].device), strict=True)),
        )
        self.state_tensors = list(chain.from_iterable(self.arguments.states.values()))
        self.addresses = self._addresses()
        self.device = self.arguments.device
        self.on_kernel = self.arguments.kernel_runs()
        # The kernel's tables (`kernels.gpu`), where it runs: of the gradients, and of all else.
        self.gradients: Any = self.arguments.gradients() if self.on_kernel else None
        self.streamed = None if staging is None else Streamed(self.arguments, staging)
        self.plan: Any = self.arguments.plan() if self.on_kernel and self.streamed is None else None
        self.grads: list[Tensor] = []

    def _first_group(self, param: Tensor, group_size: int) -> int:
        return 0 if self.whole else first_row(param) * rows_of(param.shape, group_size).groups

    def serves(self) -> bool:
        """Whether parameters and state tensors lie where they did: assigning to a tensor's `data` moves it.

        Every one is asked. For a thousand parameters that is half of the host's time for a step, but a kernel that
        wrote where a tensor no longer is would change somebody else's memory.
        """
        return self._addresses() == self.addresses and self._still_asked()

    def _asked(self) -> dict[int, weight_amax.Tracked]:
        """Parameters whose maxima the forward asked for, by place; none of those that are not stepped in one piece."""
        if self.sharded or self.buffered or self.staging is not None:
            return {}
        found = enumerate(map(weight_amax.tracked, self.owners))
        return {place: asked for place, asked in found if asked is not None}

    def _still_asked(self) -> bool:
        if self.asked_before == weight_amax.count():
            return True
        self.asked_before = weight_amax.count()
        return self._asked() == self.asked

    def _addresses(self) -> list[int]:
        owners = map(local, self.owners) if self.sharded else self.owners
        owners = list(owners)  # their sizes as well: a parameter may be cut where it lies
        return [*map(Tensor.data_ptr, owners), *map(Tensor.numel, owners), *map(Tensor.data_ptr, self.state_tensors)]

    def take_gradients(self, grads: Sequence[Tensor]) -> None:
        """The gradients of the coming step, one per parameter; whole vectors are gathered from all processes."""
        if self.sharded or not all(map(Tensor.is_contiguous, grads)):
            for param, grad in zip(self.owners, grads, strict=True):
                check_gradient(param, grad)
            grads = [_whole(grad).contiguous() for grad in grads]
        self.grads = list(grads)
        if self.buffered:
            for buffer, owner in zip(self.arguments.params, self.owners, strict=True):
                buffer.copy_(_whole(owner))
        if self.fused():
            self.gradients.set(self.grads)

    def fused(self) -> bool:
        """Whether the kernel is launched from here; torch.compile sees the op instead."""
        return self.on_kernel and not torch.compiler.is_compiling()

    def sum_squares(self) -> Tensor:
        """Of all gradients, 0-d FP64, over all processes."""
        part = self.gradients.sum_squares() if self.fused() else gradients_sum_squares(self.grads)
        return sum_over_shards(part, self.owners[0])

    def sums_of_squares(self, sums: Any = None) -> tuple[Tensor, Tensor]:
        """Of each gradient, FP64 (T,), and which are not finite, bool (T,), over all processes.

        sums: where the kernel may write them, `gpu.sum_squares.Sums`.
        """
        if self.fused() and not self.sharded:
            return self.gradients.sums_of_squares(sums)
        if self.fused():
            squares = self.gradients.sums_of_squares().squares
        else:
            squares = torch.stack([gradients_sum_squares([grad]) for grad in self.grads])
        squares = sum_over_shards(squares, self.owners[0])
        return squares, ~(squares < math.inf)  # NaN is not below anything

    def step(self, group: dict[str, Any], factor: Tensor, skip: Tensor, upcoming: Any = None) -> None:
        """One step by the gradients taken; they are let go.

        Args:
            group: the parameter group, for its hyperparameters.
            factor: 0-d FP32, multiplies every gradient.
            skip: bool, 0-d or one per parameter (T,).
            upcoming: `gpu.adamw_launch.Upcoming` of these parameters, if whoever calls counts their steps.
        """
        grads, self.grads = self.grads, []
        factor, skip, hyper = factor.to(self.device), skip.to(self.device), Hyper.of(group)
        if upcoming is not None and self.plan is not None:
            gradients, options = self.gradients, self.arguments.options(hyper)
            self.plan.launch(gradients.addresses, gradients.dtype, upcoming, factor, skip, options)
        else:
            self._count_and_step(grads, scalar_on(group["lr"], self.device), factor, skip, hyper)
        if self.gradients is not None:
            self.gradients.forget_copies()
        if self.fused():
            # Kernels launched from here are not seen by PyTorch, which counts what is written.
            torch.autograd.graph.increment_version(self.arguments.params)
        if not torch.compiler.is_compiling():
            for place, asked in self.asked.items():
                asked.version = self.owners[place]._version
        if self.buffered:
            for buffer, owner in zip(self.arguments.params, self.owners, strict=True):
                _write_back(owner, buffer)

    def _count_and_step(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        if self.streamed is not None:
            self.streamed.step(grads, self.gradients if self.fused() else None, lr, factor, skip, hyper)
        elif self.fused():
            self.plan.step(self.gradients, lr, factor, skip, self.arguments.options(hyper))
        else:
            self.arguments.call(grads, lr, factor, skip, hyper)


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """ValueError if the gradient cannot be used."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"overcoat.AdamW got a {grad.layout} gradient for a parameter of shape {tuple(param.shape)}; "
            f"build the embedding with sparse=False"
        )
    check_gradient_placements(param, grad)


def _buffer(param: Tensor) -> Tensor:
    """Contiguous memory for what `_whole` returns."""
    if is_whole(param):
        return whole_buffer(param)
    return torch.empty_like(local(param), memory_format=torch.contiguous_format)


def _whole(tensor: Tensor) -> Tensor:
    """All of a sharded vector; of anything else this process' part."""
    return gather(tensor) if is_whole(tensor) else local(tensor)


def _write_back(param: Tensor, buffer: Tensor) -> None:
    if is_whole(param):
        keep_own_part(param, buffer)
    else:
        local(param).copy_(buffer)


def scalar_on(value: Union[float, Tensor], device: torch.device) -> Tensor:
    """A 0-d FP32 tensor on `device`; a Python float travels as a kernel argument, without a copy to wait for."""
    if isinstance(value, Tensor) and value.device == device:
        return value.float()
    return torch.full((), float(value), device=device)
