"""`fp8_all_gather`: under FSDP2 the weights of converted layers travel in FP8 instead of BF16.

    overcoat.convert(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    overcoat.fp8_all_gather(model)        # this line

Shards stay as they are, in the optimizer's and checkpoints' eyes. While a layer trains in FP8, the codes of its weights
are gathered, half the bytes, and the products read them as they are (sharded_weight.py). The codes and scales are
those that one GPU would make. In `eval()` the same weights travel in their own dtype, as do all others.

FSDP2 asks a shard's local tensor for `fsdp_pre_all_gather` and `fsdp_post_all_gather`, here those of `ShardedWeight`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from overcoat.kernels.blockwise import BLOCK
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.family import Modules
from overcoat.models.refusals import why_replaced
from overcoat.models.sharded_weight import Gather, ShardedWeight


@dataclass
class GatherReport:
    """The result of `fp8_all_gather`: names of the weights that travel in FP8, and why others of the layers do not."""

    fp8: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name} travels in its own dtype: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join([*lines, f"{len(self.fp8)} weights travel in FP8"])


def fp8_all_gather(model: nn.Module) -> GatherReport:
    """Let the weights of converted layers travel in FP8; to be called in every process, after `fully_shard`.

    On CPUs the results are bit for bit those without it; on GPUs that is not shown. Costs 1 byte a weight, divided by
    the number of processes. Called again, it looks at the model anew: after other conversions, and after writes to
    shards that nobody can see (`weight.data`, `to_local()`).

    Args:
        model: converted, and sharded by `fully_shard`.

    Returns:
        which weights travel in FP8, and why others of the converted layers travel in their own dtype.

    Raises:
        ValueError: nothing was sharded, or no weight can travel in FP8.
    """
    params = _fsdp_params(model)
    if not params:
        raise ValueError(f"{type(model).__name__} is not sharded: call fully_shard before overcoat.fp8_all_gather")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    _forget(model)
    gather, report, stacks = Gather(), GatherReport(), 0
    for path, layer in model.named_modules():
        if not isinstance(layer, Fp8DecoderLayer):
            continue
        names = {module: f"{path}.{name}.weight".removeprefix(".") for name, module in layer.named_modules()}
        is_blocks = layer.overcoat_recipe.linear_scaling == "block"
        for stack, reason in _stacks(layer, params):
            if reason is not None:
                report.left_alone.update({names[module]: reason for module in stack})
                continue
            for module in stack:
                param = params[id(module), "weight"]
                place = None if is_blocks else stacks
                gather.weights.append(ShardedWeight(names[module], param, layer, place, gather))
            stacks += not is_blocks
    if not gather.weights:
        reasons = "; ".join(dict.fromkeys(report.left_alone.values())) or "no layer trains in FP8: overcoat.convert it"
        raise ValueError(f"no weight of {type(model).__name__} can travel in FP8: {reasons}")
    for weight in gather.weights:
        weight.attach()
        report.fp8.append(weight.name)
    _gathers[model] = gather, model.register_forward_pre_hook(gather.before_forward, prepend=True)
    return report


def _forget(model: nn.Module) -> None:
    """What an earlier call did."""
    gather, handle = _gathers.pop(model, (None, None))
    if gather is not None and handle is not None:
        handle.remove()
        for weight in gather.weights:
            weight.detach()


_gathers: weakref.WeakKeyDictionary[nn.Module, tuple[Gather, RemovableHandle]] = weakref.WeakKeyDictionary()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for gather, _handle in list(_gathers.values()):
        gather.after_step(optimizer)


register_optimizer_step_post_hook(_after_step)


def _fsdp_params(model: nn.Module) -> dict[tuple[int, str], Any]:
    """FSDP2's `FSDPParam`s, by the module's id and the parameter's name."""
    found = {}
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        # PyTorch 2.11 has one group of parameters for each call of `fully_shard`, or None.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups if group is not None for param in group.fsdp_params):
            info = param._module_info
            found[id(info.module), info.param_name] = param
    return found


def _stacks(layer: Fp8DecoderLayer, params: dict[tuple[int, str], Any]) -> Iterator[tuple[Any, Optional[str]]]:
    """Modules of a layer whose weights are stacked, and why these cannot travel in FP8."""
    reason = why_replaced(layer, layer.overcoat_family)
    for branch in layer.overcoat_family.branches(layer, 1):
        for stack in (branch.into, (branch.out,)) if branch.core is not None else ():
            yield stack, reason or _why_not(stack, branch, layer.overcoat_recipe.linear_scaling, params)


def _why_not(
    stack: tuple[nn.Module, ...], branch: Modules, scaling: str, params: dict[tuple[int, str], Any]
) -> Optional[str]:
    if branch.layer_scale is not None and branch.out in stack:
        return "LayerScale multiplies it before it is quantized"
    for module in stack:
        param = params.get((id(module), "weight"))
        if param is None:
            return "fully_shard has not sharded it"
        if param.is_dtensor or param.fsdp_placement.dim != 0:
            return f"its shards are {list(param.sharded_param.placements)}, not rows of the whole weight"
        if param.offload_to_cpu:
            return "CPUOffloadPolicy keeps its shards in host memory"
        if param.post_forward_mesh_info not in (None, param.mesh_info):
            return "reshard_after_forward is a number of processes: use True or False"
        if param._module_info.shared_modules:
            return "another module has the same weight"
        rows, processes = param._orig_size[0], param.mesh_info.shard_mesh_size
        if scaling == "block" and (any(branch.orders) or type(module) is not nn.Linear):
            return "its rows are taken in another order, which mixes blocks of 128x128"
        if scaling == "block" and rows % (BLOCK * processes):
            return f"of {rows} rows {processes} shards cut blocks of 128x128"
    return None
