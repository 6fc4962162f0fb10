"""Streaming over several GPUs: each process keeps its own rows of FSDP2's shards in its host memory.

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)
    overcoat.stream(model, optimizer)

The stream takes streamed weights over from FSDP2, which gathers and reduces all others as ever. They remain DTensors,
whose local part is in host memory, so checkpoints are FSDP2's.

    codes      own rows come from the host into their place in the slot, and are all-gathered there, 1 byte a weight
    update     gradients are reduce-scattered in FSDP2's dtype, own rows are stepped, and encoded with the maximum of
               all processes, found by one small all-reduce a stack

All processes must run the same forwards and backwards. Numbers are those of FSDP2 with `fp8_all_gather`, whose sums of
gradients may be rounded otherwise between more than two processes.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from overcoat.block.context import share_largest
from overcoat.distributed.fp8_all_gather import GATHER, _groups, _reshard, _shards, fp8_all_gather, fsdp_params
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.weights import block_stack_weights, stack_weights
from overcoat.optim.sharding import _all_gather
from overcoat.streaming.layers import PlainStack, Shapes, Stack, copy_bytes

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # PyTorch 2.13's, before

# FSDP2's `FSDPParam`s and their groups, by the module's id and the parameter's name.
FsdpParams = dict[tuple[int, str], tuple[Any, Any]]


def rows_of(held: FsdpParams, module: nn.Module, name: str = "weight", unit: int = 1) -> tuple[int, int] | str:
    """Return the rows of a weight that each process has and 1, or why it cannot be streamed (`fp8_stacks`).

    unit: rows that must not be divided.
    """
    shards = _shards(held, module, name)
    if isinstance(shards, str):
        return shards
    (rows, count), (param, _) = shards, held[id(module), name]
    if rows % (count * unit):
        return f"{count} processes cannot share its {rows} rows evenly" + f", in blocks of {unit}" * (unit > 1)
    if getattr(param.mesh_info, "replicate_mesh_size", 1) > 1:
        return "its gradients are averaged between replicas, too: use a mesh of one dimension"
    if param.mp_policy.param_dtype not in (None, param.sharded_param.dtype):
        return f"MixedPrecisionPolicy(param_dtype={param.mp_policy.param_dtype}) is not its dtype: leave it out"
    return rows // count, 1


class Sharded(Stack):
    """A stack of which this process has some rows; held: of its weights."""

    seen_parts: Any = None  # versions of this process' rows

    def __init__(self, held: FsdpParams, modules: Sequence[nn.Module], names: Sequence[str], scaling: str) -> None:
        super().__init__(modules, names, scaling)
        places = zip(self.modules, self.attributes, strict=True)
        self.held = [held[id(module), name] for module, name in places]
        self.whole = Shapes([torch.empty(param.shape, dtype=param.dtype, device="meta") for param in self.params])
        self.group: dist.ProcessGroup = self.held[0][0].shard_mesh.get_group()
        self.count, self.rank = self.group.size(), self.group.rank()

    def send(self, target: Tensor, wide: bool) -> None:
        wide = wide or not self.code_bytes
        own, whole = (
            (self.own.weights_in(self.host), self.whole.weights_in(target))
            if wide
            else (self.own.codes_in(self.sent), self.whole.codes_in(target))
        )
        for rows, weight in zip(own, whole, strict=True):
            memory = weight.view(torch.uint8).view(-1)
            place = memory.chunk(self.count)[self.rank]
            copy_bytes(place, rows.view(torch.uint8).view(-1))
            _all_gather(memory, place, group=self.group)

    def reduced(self, entries: list[Any]) -> list[Any]:
        """Reduce gradients of all rows as FSDP2 would, to this process' rows."""
        return [
            (*of, param, self._reduce(self.held[self.place_of(param)], param, grad)) for *of, param, grad in entries
        ]

    def _reduce(self, held: tuple[Any, Any], param: Tensor, grad: Tensor) -> Tensor:
        group = held[1]
        if not group.reduce_grads or group._all_reduce_hook is not None:
            raise ValueError(
                "overcoat.stream reduces gradients in each backward, and set_requires_gradient_sync(False) or "
                "set_all_reduce_hook asks for something else: use `with handle.accumulate():`, without a hook"
            )
        sent = grad.to(held[0].mp_policy.reduce_dtype or grad.dtype).contiguous()
        factor, is_sum = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        if factor is not None and not is_sum:
            raise ValueError(
                f"overcoat.stream cannot divide gradients by {factor:g} in the reduction: call "
                "set_force_sum_reduction_for_comms(True) of the layers, too"
            )
        if self.count > 1:
            own = sent.new_empty(len(sent) // self.count, *sent.shape[1:])
            _reduce_scatter(own, sent, op=dist.ReduceOp.SUM if is_sum else dist.ReduceOp.AVG, group=self.group)
        else:
            own = sent
        if is_sum and (factor := self.count if factor is None else factor) != 1:
            own = own / factor
        return own.to(param.dtype)

    def versions(self) -> Any:
        """Return what all processes see alike. RuntimeError: a local part was written to by itself."""
        found = super().versions()
        parts: list[Any] = [param._local_tensor._version for param in self.params]  # type: ignore[attr-defined]
        if found == self.seen and parts != self.seen_parts:
            raise RuntimeError(
                f"overcoat.stream: the local tensor of {self.names[0]}, or of its stack, was written to, which other "
                "processes cannot see: write to the DTensor (`with torch.no_grad(): weight.mul_(...)`), or call "
                "weights_changed() of the handle in every process"
            )
        self.seen_parts = parts
        return found


class ShardedStack(Sharded):
    """Weights that are quantized to one FP8 operand."""

    def encode(self, weights: list[Tensor]) -> Optional[Tensor]:
        """Return the codes of this process' rows; the leaves' scales are those of all."""
        scales: list[Any]
        if self.scaling == "tensor":
            amax = share_largest(torch.stack(torch._foreach_norm(weights, math.inf)).amax().float().abs(), self.group)
            data, scale = stack_weights(weights, amax, False)
            scales = [scale] * len(weights)
        else:
            data, scale = block_stack_weights(weights, False)
            amax, scales = None, [self._of_all(own) for own in scale.split([len(rows) // BLOCK for rows in weights])]
        self.set_scales(scales, amax)
        return data.view(torch.uint8).view(-1)

    def _of_all(self, own: Tensor) -> Tensor:
        found = own.new_empty(self.count * len(own), *own.shape[1:])
        _all_gather(found, own.contiguous(), group=self.group)
        return found


class ShardedPlainStack(Sharded, PlainStack):
    """Large weights that are used, and gathered, in 16 bits."""


class TakenOver:
    """Streamed weights, out of FSDP2's groups until `give_back`; `fp8_all_gather` goes on with those that stay."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            _reshard(module)
        gathers = [(module, vars(module).pop(GATHER)) for module in model.modules() if GATHER in vars(module)]
        for _, gather in gathers:
            gather.remove()
        self.held = [held for stack in stacks if isinstance(stack, Sharded) for held in stack.held]
        self.before = [(group, [*group.fsdp_params]) for module in modules for group in _groups(module)]
        for param, group in self.held:
            group.fsdp_params.remove(param)
            param._sharded_param_data = param._sharded_param_data.new_empty(0)
        self._refresh()
        self.states = [(state, _groups(module)) for module in modules if (state := module._get_fsdp_state())]
        for state, groups in self.states:
            _set_groups(state, [group for group in groups if group.fsdp_params])
        for module, _ in gathers:
            with contextlib.suppress(ValueError):  # none is left
                fp8_all_gather(module)

    def give_back(self) -> None:
        """Let FSDP2 gather and reduce the weights, which are on the device again."""
        for group, params in self.before:
            group.fsdp_params[:] = params
        for state, groups in self.states:
            _set_groups(state, groups)
        for param, _ in self.held:
            param.reset_sharded_param()
            param.init_dtype_attrs(param.mp_policy)
            param._init_extensions()
        self._refresh()

    def _refresh(self) -> None:
        """Make anew what FSDP2 of PyTorch 2.15 remembers of a group's parameters."""
        for group, _ in self.before:
            if hasattr(group, "_init_reduce_scatter_param_order"):
                group._init_mp_dtypes()
                group._init_reduce_scatter_param_order()


def _set_groups(state: Any, groups: list[Any]) -> None:
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups[:] = groups
    else:  # PyTorch 2.11
        state._fsdp_param_group = groups[0] if groups else None


def tightest_host(stack: Stack, free: int) -> tuple[int, int]:
    """Return the processes of the host with the least free memory for each, and its free bytes: alike on all.

    free: of this process' host; 0: unknown.
    """
    if not isinstance(stack, Sharded):
        return 1, free
    found: list[Any] = [None] * stack.count
    dist.all_gather_object(found, (socket.gethostname(), free), group=stack.group)
    hosts: dict[str, list[int]] = {}
    for name, of in found:
        hosts.setdefault(name, []).append(of)
    known = [(len(of), min(of)) for of in hosts.values() if min(of)]
    return min(known, key=lambda of: of[1] / of[0], default=(1, 0))


def sharded_over(model: nn.Module) -> Optional[str]:
    """Return the kind of device that a model is sharded over; None: it is not."""
    return next((param.device_mesh.device_type for param in model.parameters() if isinstance(param, DTensor)), None)


def check_sharded(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError if a model is sharded otherwise than by FSDP2, or not on the device that computes."""
    known = {id(param.sharded_param) for param, _ in fsdp_params(model).values()}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and id(param) not in known:
            raise ValueError(
                f"overcoat.stream: {name} is a DTensor, but not fully_shard's: shard the model by fully_shard alone"
            )
        if isinstance(param, DTensor) and not param.is_meta and param.device != device:
            raise ValueError(
                f"overcoat.stream: device={str(device)!r}, and fully_shard has put {name} on {param.device}: leave "
                "device out"
            )
