"""Sharded parameters (DTensors of FSDP2's `fully_shard`): which part each process steps, and its state.

    matrix     Every process steps its own rows: groups never cross a row. Codes, metadata and remainders are
               DTensors with the parameter's placements, which `torch.distributed.checkpoint` gathers and reshards.
               Random numbers depend on a group's number in the unsharded parameter, so the codes are the same for any
               number of processes. So with more dimensions: of stacked experts every process steps its own.
    vector     A 1-d parameter (bias, norm) is one row. Every process gathers parameter and gradient, does the whole
               step and keeps its own part of the parameter; the state is whole on every process, plain tensors like
               `step`. Vectors are under 0.1% of a model.

Shards along other dimensions (tensor parallelism) would split the rows of matrices and are refused. So is sharding in
which each process would clip and skip by its own gradients only: FSDP1, and optimizers that give ours a part of the
parameters (ZeroRedundancyOptimizer, DeepSpeed's ZeRO).

`full_state_dict=True` does not work for "bf16+16", whose int16 no backend sends, nor with 8-bit floats under gloo.
Norms are summed in one all-reduce per process group; the order of that sum depends on the number of processes, so with
clipping the last bits of a run may too.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Optional, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # PyTorch 2.13's name, or before

# Optimizers that step another with a part of the parameters: where they are defined, and their names or bases'.
DIVIDERS = ("torch.distributed.optim.", "deepspeed."), ("ZeroRedundancyOptimizer", "ZeROOptimizer", "BF16_Optimizer")


def check_sharding(params: Iterable[Tensor]) -> None:
    """Raise ValueError if the parameters are divided between processes other than by FSDP2.

    Called in the constructor and at the first step, since they may be divided in between.
    """
    flat = any(getattr(param, "_fsdp_flattened", False) for param in params)
    divider = "FullyShardedDataParallel (FSDP1)" if flat else _divider()
    if divider is not None:
        raise ValueError(
            f"overcoat.AdamW cannot work under {divider}: each process would clip, and skip a step that is not finite, "
            "by the gradients of its own part, and its checkpoints do not keep 8-bit states; use "
            "torch.distributed.fsdp.fully_shard with overcoat.AdamW(model.parameters())"
        )


def _divider() -> Optional[str]:
    """Return the calling optimizer's name if it divides parameters, found in the call stack."""
    frame, (modules, names) = sys._getframe(1).f_back, DIVIDERS
    while frame is not None:
        # Read f_locals of these frames only: a frame keeps the locals it has shown alive.
        if frame.f_globals.get("__name__", "").startswith(modules):
            owner = type(frame.f_locals.get("self"))
            if any(cls.__name__ in names for cls in owner.__mro__):
                return owner.__name__
        frame = frame.f_back
    return None


def check_placements(param: Tensor) -> None:
    """Raise ValueError if `param` is a DTensor with placements that the step cannot work on."""
    if not isinstance(param, DTensor):
        return
    sharded = [placement for placement in param.placements if placement != Replicate()]
    if len(sharded) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in sharded):
        raise ValueError(
            f"overcoat.AdamW cannot step a parameter of shape {tuple(param.shape)} with placements "
            f"{list(param.placements)}: it works on whole rows, one shard along dimension 0; use fully_shard without "
            "tensor parallelism, and without shard_placement_fn"
        )


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """Raise ValueError if a gradient is sparse, or not sharded like its parameter."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"overcoat.AdamW got a {grad.layout} gradient for a parameter of shape {tuple(param.shape)}; "
            f"build the embedding with sparse=False"
        )
    if is_cut(param):
        placements = grad.placements if isinstance(grad, DTensor) else None
        if placements != param.placements:
            raise ValueError(
                f"overcoat.AdamW got a gradient with placements {placements} for a parameter with placements "
                f"{param.placements}; redistribute it to those of the parameter"
            )


def is_whole(param: Tensor) -> bool:
    """True if every process does the whole step of this sharded parameter: it is a vector."""
    return isinstance(param, DTensor) and param.dim() < 2


def is_cut(param: Tensor) -> TypeGuard[DTensor]:
    """True if every process steps its own rows, and holds their state."""
    return isinstance(param, DTensor) and param.dim() > 1


def layout_of(param: Tensor) -> Hashable:
    """Equal for parameters that can be stepped together."""
    return (param.device_mesh, param.placements, is_whole(param)) if isinstance(param, DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return this process' part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_bytes(tensor: Tensor) -> int:
    """Return the bytes of an average shard: the same on every process, though shards may differ by a row."""
    total = tensor.numel() * tensor.element_size()
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        total //= math.prod(size for placement, size in sizes if isinstance(placement, Shard))
    return total


def first_row(param: Tensor) -> int:
    """Return the number of this process' first row, or slice along dim 0, in the unsharded parameter."""
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            if placement == Shard(0):
                mesh, rows = param.device_mesh, param.shape[0]
                return min(-(-rows // mesh.size(dim)) * mesh.get_local_rank(dim), rows)
    return 0


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, on every process."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device.type != tensor.device_mesh.device_type:  # an offloaded state
        tensor = _from_local(tensor, tensor.to_local().to(tensor.device_mesh.device_type), tensor.shape)
    own = tensor.to_local()
    if tensor.device_mesh.size() == 1:
        return own
    if tensor.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return _from_local(tensor, own.int(), tensor.shape).full_tensor().to(torch.int16)
    if tensor.dtype.itemsize == 1:  # gloo does not send 8-bit floats
        return _from_local(tensor, own.view(torch.uint8), tensor.shape).full_tensor().view(tensor.dtype)
    return tensor.full_tensor()


def stepped_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that this process steps: sharded vectors whole, gathered at once; its own part of all others.

    tensors: of one layout and dtype.
    """
    if not tensors or not is_whole(tensors[0]):
        return [local(tensor) for tensor in tensors]
    own, first = [local(tensor) for tensor in tensors], tensors[0]
    assert isinstance(first, DTensor)
    mesh, dims = first.device_mesh, [dim for dim, placement in enumerate(first.placements) if placement == Shard(0)]
    if len(dims) != 1 or own[0].device.type != mesh.device_type or not all(map(Tensor.dim, tensors)):
        return [gather(tensor) for tensor in tensors]
    if (processes := mesh.size(dims[0])) == 1:
        return own
    sizes = [-(-len(tensor) // processes) for tensor in tensors]  # of all shards but the last ones
    sent = torch.cat([F.pad(part, (0, size - len(part))) for part, size in zip(own, sizes, strict=True)])
    found = sent.new_empty(processes * len(sent))
    _all_gather(found, sent, group=mesh.get_group(dims[0]))
    columns = found.view(processes, -1).split(sizes, dim=1)
    return [part.reshape(-1)[: len(tensor)] for part, tensor in zip(columns, tensors, strict=True)]


def buffer_for(param: Tensor) -> Tensor:
    """Allocate contiguous memory for what `stepped_parts` returns of a parameter."""
    if is_whole(param):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return torch.empty_like(local(param), memory_format=torch.contiguous_format)


def write_back(param: Tensor, stepped: Tensor) -> None:
    """Write one of `stepped_parts`, after the step, back into the parameter."""
    own = local(param)
    if is_whole(param) and stepped.dim():
        start = first_row(param)
        stepped = stepped[start : start + len(own)]
    own.copy_(stepped)


def sums_over_shards(parts: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Add up sums over shards across processes, one all-reduce per process group; sums of vectors are whole already.

    parts: sums over this process' shards, on one device.
    """
    result, places = list(parts), defaultdict[dist.ProcessGroup, list[int]](list)
    for place, param in enumerate(params):
        if is_cut(param):
            for dim, placement in enumerate(param.placements):
                if placement == Shard(0):
                    places[param.device_mesh.get_group(dim)].append(place)
    for group, of in places.items():
        together = result[of[0]] if len(of) == 1 else torch.stack([result[place] for place in of])
        dist.all_reduce(together, group=group)
        for place, total in zip(of, [together] if len(of) == 1 else together.unbind(), strict=True):
            result[place] = total
    return result


# ---- state tensors ---------------------------------------------------------------------------------------


def state_shape(param: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of this process' part of a state tensor, given its unsharded shape."""
    return (len(local(param)), *shape[1:]) if shape and is_cut(param) else shape


def wrap_state(param: Tensor, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Wrap this process' part of a state tensor as a DTensor if the parameter is one."""
    return _from_local(param, value, torch.Size(shape)) if shape and is_cut(param) else value


def place_state(param: Tensor, saved: Tensor, device: torch.device) -> Tensor:
    """Copy a saved state tensor of any layout to `device`, laid out for `param`."""
    shape = tuple(saved.shape)
    if isinstance(saved, DTensor) and layout_of(saved) == layout_of(param):
        return wrap_state(param, _copy(saved.to_local(), device), shape)
    whole = gather(saved.detach())
    start = first_row(param) if shape and is_cut(param) else 0
    part = whole[start : start + state_shape(param, shape)[0]] if shape else whole
    return wrap_state(param, _copy(part, device), shape)


def rewrap(like: Tensor, value: Tensor) -> Tensor:
    """Wrap this process' part `value` as the same kind of tensor as the state tensor `like`."""
    return _from_local(like, value, like.shape) if isinstance(like, DTensor) else value


def _from_local(like: DTensor, value: Tensor, shape: torch.Size) -> DTensor:
    """Return a contiguous DTensor with local part `value`, laid out as `like`; no communication, no copy."""
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    if value.device.type == mesh.device_type:
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
    # `from_local` would move an offloaded state to the mesh's device. FSDP2 builds its own offloaded parameters so.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, value.dtype))
    return DTensor(value, spec, requires_grad=False)


def _copy(value: Tensor, device: torch.device) -> Tensor:
    return value.detach().to(device, copy=True).contiguous()
