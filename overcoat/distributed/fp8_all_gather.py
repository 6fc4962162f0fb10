"""`fp8_all_gather`: FSDP2 all-gathers the weights of converted layers in FP8 instead of BF16.

    overcoat.convert(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    overcoat.fp8_all_gather(model)        # this line

Shards do not change for the optimizer and for checkpoints. While a layer trains in FP8, the codes of its weights are
gathered, half the bytes, and the GEMMs read them directly (sharded_weight.py). Codes and scales are the same as on one
GPU. In `eval()` mode these weights are gathered in their own dtype, as all others always are.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a shard's local tensor: here those of `ShardedWeight`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from overcoat.distributed.sharded_weight import (
    CutBlocks,
    Maxima,
    ShardedExperts,
    ShardedWeight,
    Stacks,
    UnshardedParam,
)
from overcoat.kernels.blockwise import BLOCK
from overcoat.models.decoder import Fp8DecoderLayer, checked_now
from overcoat.models.experts import Fp8Experts
from overcoat.models.family import Modules
from overcoat.models.frozen import frozen_of
from overcoat.models.lora import base_of, has_dora


@dataclass
class GatherReport:
    """The result of `fp8_all_gather`: names of the weights gathered in FP8, and why others of the layers are not."""

    fp8: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name} travels in its own dtype: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join([*lines, f"{len(self.fp8)} weights travel in FP8"])


def fp8_all_gather(model: nn.Module) -> GatherReport:
    """All-gather the weights of converted layers in FP8. Call it in every process, after `fully_shard`.

    On CPUs results equal those without it bit for bit; on GPUs this has not been shown. Call it again after another
    conversion, and after writes to shards that PyTorch does not track (`weight.data`, `to_local()`). With one process a
    weight is its shard, and `reshard_after_forward` counts as False.

    Args:
        model: converted, and sharded by `fully_shard`.

    Returns:
        which weights are gathered in FP8, and why others of the converted layers are gathered in their own dtype.

    Raises:
        ValueError: the model is not sharded, or no weight can be gathered in FP8.
    """
    params = fsdp_params(model)
    if not params:
        raise ValueError(f"{type(model).__name__} is not sharded: call fully_shard before overcoat.fp8_all_gather")
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        _reshard(module)
    if (before := vars(model).pop(GATHER, None)) is not None:
        before.remove()
    report, stacks = GatherReport(), dict[tuple[str, Any, Any], list[list[ShardedWeight]]]()
    experts: list[ShardedExperts] = []
    for path, layer in model.named_modules():
        if isinstance(layer, Fp8Experts):
            for part in layer.weight_names:
                name, why = f"{path}.{part}", _why_not_experts(layer, _shards(params, layer, part))
                if why is not None:
                    report.left_alone[name] = why
                    continue
                experts.append(ShardedExperts(name, *params[id(layer), part], layer, layer))
                report.fp8.append(name)
        if not isinstance(layer, Fp8DecoderLayer):
            continue
        names = {module: f"{path}.{name}.weight".removeprefix(".") for name, module in layer.named_modules()}
        scaling = layer.overcoat_recipe.linear_scaling
        for stack, reason in fp8_stacks(layer, functools.partial(_shards, params)):
            if all(frozen_of(base_of(module)._parameters["weight"]) is not None for module in stack):
                report.fp8 += [names[base_of(module)] for module in stack]  # by methods of their own
                continue
            if reason is not None:
                report.left_alone.update({names[base_of(module)]: reason for module in stack})
                continue
            weights = [
                ShardedWeight(names[base_of(module)], *params[id(base_of(module)), "weight"], layer, module)
                for module in stack
            ]
            report.fp8 += [weight.name for weight in weights]
            param = weights[0].param
            key = scaling, param.shard_mesh.get_group(), param.mp_policy.param_dtype or weights[0].local.dtype
            stacks.setdefault(key, []).append(weights)
    if not report.fp8:
        reasons = "; ".join(dict.fromkeys(report.left_alone.values())) or "no layer trains in FP8: overcoat.convert it"
        raise ValueError(f"no weight of {type(model).__name__} can be gathered in FP8: {reasons}")
    in_fp8 = {id(weight.param) for weight in experts}
    in_fp8 |= {id(weight.param) for of in stacks.values() for stack in of for weight in stack}
    others = [
        held
        for param, group in params.values()
        if id(param) not in in_fp8
        and frozen_of(param.sharded_param) is None
        and (held := UnshardedParam(param, group)).is_alone
    ]
    vars(model)[GATHER] = gather = Gather(stacks, experts, others, modules)
    gather.handles += [
        model.register_forward_pre_hook(gather.before_forward, prepend=True),
        _watch_steps(gather),
    ]
    return report


class Gather:
    """All weights of a model that are gathered in FP8, and the maxima that they need, by scaling, group and dtype.

    others: weights that are not sent at all (`UnshardedParam`).
    """

    def __init__(
        self,
        stacks: dict[tuple[str, Any, Any], list[list[ShardedWeight]]],
        experts: list[ShardedExperts],
        others: list[UnshardedParam],
        modules: list[Any],
    ) -> None:
        self.maxima, self.weights = list[Maxima](), list[ShardedWeight](experts)
        for (scaling, *_), of in stacks.items():
            weights = [weight for stack in of for weight in stack]
            self.weights += weights
            if scaling == "tensor":
                self.maxima.append(Stacks(of))
            elif cut := [weight for weight in weights if weight.param.padded_sharded_param_size[0] % BLOCK]:
                self.maxima.append(CutBlocks(cut))
        self.held = [*self.weights, *others]
        # A process that trains alone gathers nothing: resharding would only cost host time.
        stay = all(held.is_alone for held in self.held)
        self.reshards = {held.group: held.group.post_forward_mesh_info for held in self.held if stay}
        for group in self.reshards:
            group.post_forward_mesh_info = None
        self.handles = list[RemovableHandle]()
        self.modules = modules if stay else []
        for module in self.modules:  # not only the model: trainers also call modules inside it
            self.handles.append(module.register_forward_pre_hook(_reshard_idle, prepend=True))
            self.handles.append(module.register_forward_hook(_reshard_without_backward))
        for module in modules:
            groups = _groups(module)
            if own := [weight for weight in self.weights if weight.group in groups]:
                self.handles += Reader(module, own).attach()
        for held in self.held:
            held.attach()

    def before_forward(self, *_: Any) -> None:
        """Attach to shards that were replaced by new tensors, and find the maxima before anything is sent."""
        for held in self.held:
            if not held.is_attached():
                held.attach()
                if isinstance(held, ShardedWeight) and held.maxima is not None:
                    held.maxima.is_stale = True
        for maxima in self.maxima:
            maxima.check(maxima.weights)
            maxima.find_if_stale()

    def remove(self) -> None:
        """Let FSDP2 gather as before."""
        for handle in self.handles:
            handle.remove()
        for module in self.modules:
            _reshard(module)
        for group, mesh_info in self.reshards.items():
            group.post_forward_mesh_info = mesh_info
        for held in self.held:
            held.detach()


@torch._disable_dynamo  # as what FSDP2 does around it
def _reshard_idle(module: Any, *_: Any) -> None:
    """Reshard weights that an earlier forward without backward left gathered: weights or mode may have changed.

    Not in a recomputation.
    """
    if module._get_fsdp_state()._training_state is TrainingState.IDLE:
        _reshard(module)


@torch._disable_dynamo  # as what FSDP2 does around it
def _reshard_without_backward(module: Any, *_: Any) -> None:
    """Reshard a layer after a forward that will have no backward, which otherwise would."""
    if not torch.is_grad_enabled():
        _reshard_idle(module)


class Reader:
    """An FSDP2 module whose backwards gather weights as their forwards have read them, in FP8 or 16 bits, whatever mode
    or forward comes in between."""

    def __init__(self, module: Any, weights: list[ShardedWeight]) -> None:
        self.module, self.weights = module, weights

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks, in front of FSDP2's."""
        return [
            self.module.register_forward_pre_hook(self.before_forward, prepend=True),
            self.module.register_forward_hook(self.after_forward, prepend=True),
        ]

    @torch._disable_dynamo  # as what FSDP2 does around it
    def before_forward(self, *_: Any) -> None:
        """Reshard weights that a forward in the other mode has left gathered."""
        if any(weight.is_fp8 != weight.layer.training for weight in self.weights):
            _reshard_idle(self.module)

    @torch._disable_dynamo  # as what FSDP2 does around it
    def after_forward(self, module: Any, args: Any, result: Any) -> None:
        """Register a hook that comes before FSDP2's gathering for the backward."""
        before_backward = functools.partial(self.before_backward, [weight.is_fp8 for weight in self.weights])
        for tensor in tree_leaves(result) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(before_backward)

    def before_backward(self, in_fp8: list[bool], _gradient: Tensor) -> None:
        """Gather weights anew if they are, or would be, gathered otherwise than the forward has read them."""
        if in_fp8 == [weight.is_fp8 for weight in self.weights]:
            return
        groups = _groups(self.module)
        for group in groups:
            group.wait_for_unshard()  # of a prefetch
        _reshard(self.module)
        for weight, is_fp8 in zip(self.weights, in_fp8, strict=True):
            weight.gather_in(is_fp8)
        for group in groups:  # FSDP2 does not where a backward of another forward is not over
            with group.use_training_state(TrainingState.PRE_BACKWARD):
                group.unshard()
                group.wait_for_unshard()


def _reshard(module: Any) -> None:
    """Call FSDP2's reshard, but keep changes of requires_grad made while gathered (peft's `disable_adapter`)."""
    for group in _groups(module):
        for param in group.fsdp_params:
            if param.sharded_state is ShardedState.UNSHARDED:
                param.sharded_param.requires_grad_(param._unsharded_param.requires_grad)
    module.reshard()


# The model's attribute that owns its `Gather`, since FSDP2's parameters refer back to the model.
GATHER = "_overcoat_gather"


def _watch_steps(gather: Gather) -> RemovableHandle:
    """Mark maxima as stale after each step of an optimizer that holds their weights, as long as `gather` lives."""
    watched = weakref.ref(gather, lambda _: handle.remove())

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = watched()
        for maxima in found.maxima if found is not None else ():
            maxima.after_step(optimizer)

    handle = register_optimizer_step_post_hook(after_step)
    return handle


def fsdp_params(model: nn.Module) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return FSDP2's `FSDPParam`s and their groups, by the module's id and the parameter's name."""
    found = {}
    for module in model.modules():
        for group in _groups(module) if isinstance(module, FSDPModule) else ():
            for param in group.fsdp_params:
                found[id(param._module_info.module), param._module_info.param_name] = param, group
    return found


def _groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of one call of `fully_shard`; PyTorch 2.11 has one, or None."""
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [*filter(None, [getattr(state, "_fsdp_param_group", None)])]


def fp8_stacks(
    layer: Fp8DecoderLayer, shards_of: Callable[[nn.Module], tuple[int, int] | str]
) -> Iterator[tuple[Any, Optional[str]]]:
    """Return the modules of a layer whose weights are stacked, and why these cannot be gathered in FP8 (or None).

    shards_of: returns for a module the rows of its weight and the number of processes that share them, or why the
    weight is not sharded as needed.
    """
    reason = checked_now(layer).reason
    for branch in layer.overcoat_family.branches(layer, 1):
        for linears in (branch.in_proj, (branch.out_proj,)) if branch.mixer is not None else ():
            scaling = layer.overcoat_recipe.linear_scaling
            dora = "DoRA reads it in 16 bits for the norms of its rows" if any(map(has_dora, linears)) else None
            yield linears, reason or dora or _why_not(tuple(map(base_of, linears)), branch, scaling, shards_of)


def _shards(
    params: dict[tuple[int, str], tuple[Any, Any]], module: nn.Module, name: str = "weight"
) -> tuple[int, int] | str:
    param, _ = params.get((id(module), name), (None, None))
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
    return param._orig_size[0], param.mesh_info.shard_mesh_size


def _why_not_experts(module: Fp8Experts, shards: tuple[int, int] | str) -> Optional[str]:
    if isinstance(shards, str):
        return shards
    if module.overcoat_recipe is None:
        return "its experts run their own forward"
    if module.overcoat_how.transposed:
        return "its experts' weights lie transposed"
    experts, processes = shards
    return f"{processes} processes cannot share {experts} experts evenly" if experts % processes else None


def _why_not(stack: tuple[nn.Module, ...], branch: Modules, scaling: str, shards_of: Any) -> Optional[str]:
    if branch.layer_scale is not None and base_of(branch.out_proj) in stack:
        return "LayerScale multiplies it before it is quantized"
    for module in stack:
        shards = shards_of(module)
        if isinstance(shards, str):
            return shards
        rows, processes = shards
        if scaling == "block" and (any(branch.orders) or type(module) is not nn.Linear):
            return "its rows are taken in another order, which mixes blocks of 128x128"
        if scaling == "block" and (rows % BLOCK or rows % processes):
            return f"its {rows} rows are no multiple of 128 and of {processes} processes"
    return None
