"""Parameters that one optimizer step handles together, and their state tensors as the op and the kernel want
them.
"""

from __future__ import annotations

import importlib.util
import operator
from typing import Any, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overcoat.kernels.adamw import adamw_step_, gradients_sum_squares, rows_of
from overcoat.masters import parameter_key, resolve_master
from overcoat.optim.shards import first_row, gather, is_whole, keep_own_part, local, sum_over_shards, whole_buffer

if importlib.util.find_spec("triton") is not None:
    from overcoat.kernels.gpu.adamw_launch import Options, Plan
else:  # the reference runs everywhere
    Plan = Options = None  # type: ignore[assignment,misc]


class Bucket:
    """Parameters of one group that are stepped together, and the lists of their state tensors.

    It is kept from step to step: with a thousand parameters, collecting those lists costs the host more time than the
    step costs the GPU. `serves` says whether it still describes the optimizer.
    """

    def __init__(self, group: dict[str, Any], params: list[Tensor], indices: list[int], states: list[Any]) -> None:
        def collect(name: str) -> list[Tensor]:
            return [local(state[name]) for state in states] if name in states[0] else []

        self.owners, self.states = params, states
        self.sharded = any(isinstance(param, DTensor) for param in params)
        self.first_moments = [state["exp_avg"] for state in states]
        self.addresses = self._addresses(params)
        self.whole = is_whole(params[0])
        # What is stepped: this process' rows, or buffers for whole vectors, filled before every step and not here:
        # processes need not build their buckets at the same time, but gathering takes all of them.
        self.params = params = [whole_buffer(param) if self.whole else local(param) for param in params]
        self.master = resolve_master(group["master"], params[0].dtype)
        self.group_size = group["group_size"]
        self.tensors = {
            "param": params,
            "exp_avg": collect("exp_avg"),
            "amax": collect("exp_avg_amax"),
            "exponent": collect("exp_avg_exponent"),
            "exp_avg_sq": collect("exp_avg_sq"),
            "scale": collect("exp_avg_sq_scale"),
            "remainder": collect("remainder"),
            "step": collect("step"),
        }
        self.keys = [parameter_key(group["seed"], index) for index in indices]
        self.first_groups = [self._first_group(owner) for owner in self.owners]
        self.grads: list[Tensor] = []
        self.plan: Any = None
        if Plan is not None and params[0].is_cuda and all(param.is_contiguous() for param in params):
            self.plan = Plan(self.tensors, self.group_size, self.keys, self.first_groups)

    def _first_group(self, owner: Tensor) -> int:
        return 0 if self.whole else first_row(owner) * rows_of(owner.shape, self.group_size).groups

    def serves(self, params: list[Tensor], states: list[Any]) -> bool:
        """Whether these are the same parameters in the same memory with the same states."""
        return (
            len(params) == len(self.owners)
            and all(map(operator.is_, params, self.owners))
            and all(map(operator.is_, states, self.states))
            and all(state["exp_avg"] is kept for state, kept in zip(states, self.first_moments, strict=True))
            and self._addresses(params) == self.addresses
        )

    def _addresses(self, params: list[Tensor]) -> list[int]:
        if self.sharded:
            return [local(param).data_ptr() for param in params]
        return [param.data_ptr() for param in params]

    def take_gradients(self, grads: list[Tensor]) -> None:
        """The gradients of the coming step, one per parameter; whole vectors are gathered from all processes."""
        if self.sharded:
            grads = [gather(grad) if self.whole else local(grad) for grad in grads]
        self.grads = grads
        if self.whole:
            for buffer, owner in zip(self.params, self.owners, strict=True):
                buffer.copy_(gather(owner))
        if self.fused():
            self.plan.set_gradients(grads)

    def fused(self) -> bool:
        """Whether the kernel is launched from here; torch.compile sees the op instead."""
        return self.plan is not None and not torch.compiler.is_compiling()

    def sum_squares(self) -> Tensor:
        """Of all gradients, 0-d FP32, over all processes."""
        part = self.plan.sum_squares() if self.fused() else gradients_sum_squares(self.grads)
        return sum_over_shards(part, self.owners[0])

    def step(self, group: dict[str, Any], factor: Tensor, skip: Tensor) -> None:
        """One step by the gradients taken; they are let go."""
        self._step(group, factor, skip)
        if self.whole:
            for buffer, owner in zip(self.params, self.owners, strict=True):
                keep_own_part(owner, buffer)

    def _step(self, group: dict[str, Any], factor: Tensor, skip: Tensor) -> None:
        grads, self.grads = self.grads, []
        device = self.params[0].device
        lr, factor, skip = _scalar_on(group["lr"], device), factor.to(device), skip.to(device)
        beta1, beta2 = group["betas"]
        m_code, v_code = group["moments"]
        options = (beta1, beta2, group["eps"], group["weight_decay"], m_code, v_code, self.master, self.group_size)
        if self.fused():
            self.plan.step(lr, factor, skip, Options(*options))
            return
        of = self.tensors
        adamw_step_(
            self.params, grads, of["exp_avg"], of["amax"], of["exponent"], of["exp_avg_sq"], of["scale"],
            of["remainder"], of["step"], lr, factor, skip, *options, self.keys, self.first_groups,
        )  # fmt: skip


def _scalar_on(value: Union[float, Tensor], device: torch.device) -> Tensor:
    """A 0-d FP32 tensor on `device`; a Python float travels as a kernel argument, without a copy to wait for."""
    if isinstance(value, Tensor) and value.device == device:
        return value.float()
    return torch.full((), float(value), device=device)
