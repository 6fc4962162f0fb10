"""Sharded weights that are gathered in FP8, and the maxima that a model's weights share: used by `fp8_all_gather`.

    maxima     once a step: one pass over the shards, one small all-reduce that makes them those of the stacks (q, k,
               v; gate, up), on the device
    codes      E4M3, 1 byte a weight, made from the shard for each all-gather with the stack's scale, then freed
    experts    each has its own scale, found with the codes and sent with them
    blocks     scales of 128x128 blocks are found with the codes and sent with them; maxima of blocks that span two
               shards are found once a step, as above
    gathered   into the buffer that FSDP2 frees and restores: `GatheredWeight`, the operand of the GEMMs

A process that holds all rows sends nothing: its GEMMs read the shard like an ordinary weight. If it trains alone, FSDP2
also copies no other parameter and no gradient (`UnshardedParam`).

All processes must find the maxima at the same time. They do after an optimizer that holds one of the weights has
stepped, or after a write to a DTensor, which all processes do together. A write to a local shard is visible in one
process only, so it is an error.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Optional
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from overcoat.block.context import share_largest
from overcoat.block.linear import GatheredWeight
from overcoat.formats import E4M3, scale_from_amax
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.experts import expert_amax, quantize_experts
from overcoat.kernels.weights import block_stack_weights, stack_weights


def holds_all(param: Any) -> bool:
    """True if a process has all rows of FSDP2's `FSDPParam`, as the GEMMs read them."""
    return param.mesh_info.shard_mesh_size == 1 and param.param_dtype is None


class UnshardedParam:
    """FSDP2's hooks for a parameter of a process that trains alone: the shard itself is used, without copies.

    FSDP2 would copy the parameter for each use, and its gradient twice. param: `FSDPParam`; group: `FSDPParamGroup`.
    """

    def __init__(self, param: Any, group: Any) -> None:
        self.param, self.group = param, group
        self.others: tuple[list[Tensor], Optional[nn.Parameter]] = ([], None)  # FSDP2's buffers for the other dtype
        info, policy = param.mesh_info, param.mp_policy
        processes = info.shard_mesh_size * getattr(info, "replicate_mesh_size", 1)
        is_cast = policy.param_dtype is not None or policy.reduce_dtype is not None
        self.is_alone = processes == 1 and not (is_cast or param.offload_to_cpu)

    @property
    def local(self) -> Tensor:
        """Return the shard (n, K); n may be smaller in the last processes."""
        own: Tensor = self.param.sharded_param._local_tensor
        return own

    def attach(self) -> None:
        """Make FSDP2 call this object's methods."""

        def ask(*arguments: Any) -> Any:
            return self.fsdp_pre_all_gather(*arguments)

        ask.__signature__ = SIGNATURE  # type: ignore[attr-defined]
        self._give_buffers([], None)
        self.local.fsdp_pre_all_gather = ask  # type: ignore[attr-defined]
        self.local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
        self.param._init_extensions()

    def detach(self) -> None:
        """Let FSDP2 gather the weight by itself again."""
        self._give_buffers([], None)
        if self.is_attached():
            del self.local.fsdp_pre_all_gather, self.local.fsdp_post_all_gather  # type: ignore[attr-defined]

    def is_attached(self) -> bool:
        """True if the shard is still the same tensor: `to_empty` and loading with `assign` make another."""
        return hasattr(self.local, "fsdp_pre_all_gather")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this process sends: nothing."""
        return (self._nothing(),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the parameter: the shard itself."""
        self._watch(out)
        return (self.local, ()) if out is None else None

    def _nothing(self) -> Tensor:
        return self.param._sharded_param_data[:0]

    def _watch(self, whole: Optional[Tensor]) -> None:
        """Register a hook that hands the unsharded parameter's gradient to the shard, without a copy."""
        # The parameter may have been replaced and come back. Weakly: the garbage collector does not see hooks.
        if self.is_alone and whole is not None and whole.requires_grad and not whole._post_accumulate_grad_hooks:
            whole.register_post_accumulate_grad_hook(partial(_hand_over, proxy(self.param), proxy(self.group)))

    def _give_buffers(
        self, outputs: list[Tensor], unsharded: Optional[nn.Parameter]
    ) -> tuple[list[Tensor], Optional[nn.Parameter]]:
        """Exchange FSDP2's buffers and the parameter in them; FSDP2 makes new ones if they are empty."""
        param = self.param
        before: Optional[nn.Parameter] = param.__dict__.pop("_unsharded_param", None)
        if unsharded is not None:
            param._unsharded_param = unsharded
        if before is not None and before.grad is not None:  # not reduced yet: FSDP2 will add to it
            gradient, before.grad = before.grad, None
            _keep_gradient(param, gradient)
        param.all_gather_outputs, outputs = outputs, param.all_gather_outputs
        return outputs, before


def _keep_gradient(param: Any, gradient: Tensor) -> None:
    """Give a gradient to the unsharded parameter, now or as soon as FSDP2 has made it."""
    if "_unsharded_param" in param.__dict__:
        param._unsharded_param.grad = gradient
        return

    def make() -> None:
        del param.init_unsharded_param
        param.init_unsharded_param()
        param._unsharded_param.grad = gradient

    param.init_unsharded_param = make


@torch.no_grad()
def _hand_over(param: Any, group: Any, unsharded: Tensor) -> None:
    is_plain = group.reduce_grads and group.gradient_divide_factor is None and group._all_reduce_hook is None
    if not is_plain:
        return  # FSDP2 must add or divide it
    sharded, gradient, unsharded.grad = param.sharded_param, unsharded.grad, None
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(gradient)
    else:
        sharded.grad._local_tensor += gradient
    for hook in list((sharded._post_accumulate_grad_hooks or {}).values()):
        hook(sharded)


# Which FSDP2 looks up for each parameter each time, and which takes the host longer to make than all else here.
SIGNATURE = inspect.signature(UnshardedParam.fsdp_pre_all_gather.__get__(UnshardedParam))


class ShardedWeight(UnshardedParam):
    """Sharded weight that is gathered in FP8; FSDP2 calls its two methods for every all-gather.

    Args:
        name: the parameter's.
        param, group: as of `UnshardedParam`.
        layer: its mode decides the dtype that is sent. linear: the module that owns the weight (with LoRA, the base
            layer).

    Attributes:
        maxima: the `Maxima` that include this weight's; None if not needed.
        scale: its stack's, 0-d FP32; with block scales one per block of this process' rows.
        amax: its stack's, 0-d FP32; None with block scales.
    """

    maxima: Optional[Maxima] = None
    scale: Optional[Tensor] = None
    amax: Optional[Tensor] = None

    def __init__(self, name: str, param: Any, group: Any, layer: nn.Module, linear: Any) -> None:
        super().__init__(param, group)
        self.name, self.layer, self.linear = name, layer, linear
        self.is_fp8 = False  # True if last gathered in FP8

    def rows(self) -> Tensor:
        """Return the shard as sent in 16 bits: padded to the first process' rows, in `param_dtype`."""
        whole: Tensor = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
        return whole if self.param.param_dtype is None else whole.to(self.param.param_dtype)

    def versions(self) -> tuple[Any, int]:
        """Return version counters of the DTensor (with peft's merged adapters, untracked by it) and its local part."""
        return (self.param.sharded_param._version, (*getattr(self.linear, "merged_adapters", ()),)), self.local._version

    def gather_in(self, is_fp8: bool) -> None:
        """Choose FP8 or 16 bits. FSDP2 has buffers of one dtype: exchange them."""
        if is_fp8 != self.is_fp8:
            self.others, self.is_fp8 = self._give_buffers(*self.others), is_fp8

    # ---- FSDP2's extension points -------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this process sends."""
        if self.group._training_state is not TrainingState.PRE_BACKWARD:  # which reads what its forward has read
            self.gather_in(self.layer.training)
        if not self.is_fp8:
            return (self._nothing() if holds_all(self.param) else self.rows(),), None
        if self.maxima is not None:
            self.maxima.check([self])
            self.maxima.find_if_stale()
        if holds_all(self.param):
            return (self._nothing(),), None
        if self.amax is not None:
            return (stack_weights([self.rows()], self.amax, False)[0].view(torch.uint8),), None
        codes, self.scale = self._codes()
        return (codes.view(torch.uint8), self.scale)[: mesh.size()], None  # with one process FSDP2 accepts one tensor

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the weight from what all processes have sent, or update `out` with it."""
        self._watch(out)
        if not self.is_fp8:
            whole = self.local if holds_all(self.param) else outputs[0][: self.param._orig_size[0]]
            return (whole, ()) if out is None else None
        held = self.rows() if holds_all(self.param) else outputs[0][: self.param._orig_size[0]].view(E4M3.dtype)
        scale = outputs[1] if len(outputs) > 1 else self.scale
        if isinstance(self.maxima, CutBlocks) and scale is not None:
            scale = self.maxima.whole_scale(self, scale)
        made = held, scale, self.amax
        if out is None:
            return GatheredWeight(*made, param_dtype), ()
        out.held, out.scale, out.w_amax = made
        return None

    # ---- inside -------------------------------------------------------------------------------------------

    def _codes(self) -> tuple[Tensor, Tensor]:
        """Return codes and scales of this process' rows in 128x128 blocks of the weight."""
        rows = self.rows()
        if not isinstance(self.maxima, CutBlocks):
            return block_stack_weights([rows], False)
        # The missing rows of a split block are zeros, except one that holds the block's maxima.
        first, count = self.maxima.span(self)
        above, below = self.maxima.found(self, first), self.maxima.found(self, first + count)
        top, bottom = first % BLOCK, -(first + count) % BLOCK
        filled = F.pad(rows, (0, 0, top, bottom))
        if above is not None:
            filled[0] = above.repeat_interleave(BLOCK)[: rows.shape[1]]
        if below is not None:
            filled[-1] = below.repeat_interleave(BLOCK)[: rows.shape[1]]
        codes, scale = block_stack_weights([filled], False)
        return codes[top : top + count], F.pad(scale, (0, 0, 0, count // BLOCK + 2 - len(scale)))


class ShardedExperts(ShardedWeight):
    """Stacked weights of experts, (E, N, K), of which each process has whole ones: each expert has its own scale."""

    def _codes(self) -> tuple[Tensor, Tensor]:
        rows = self.rows()
        return quantize_experts(rows, expert_amax(rows), False)


class Maxima(abc.ABC):
    """Maxima of weights of one dtype, sharded over one process group, which all its processes find together.

    is_stale: True if they must be found again.
    """

    def __init__(self, weights: Sequence[ShardedWeight]) -> None:
        self.weights, self.is_stale, self.seen = weights, True, dict[ShardedWeight, tuple[Any, int]]()
        for weight in weights:
            weight.maxima = self

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the maxima as stale after an optimizer's step: torch's own optimizers write to shards untracked."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.is_stale = self.is_stale or any(id(weight.param.sharded_param) in held for weight in self.weights)

    def check(self, weights: Sequence[ShardedWeight]) -> None:
        """Mark the maxima as stale if weights have changed, in all processes or in none.

        RuntimeError: a local shard was written to by itself.
        """
        for weight in weights:
            if self.is_stale or (versions := weight.versions()) == self.seen[weight]:
                continue
            if versions[0] == self.seen[weight][0]:
                raise RuntimeError(
                    f"{weight.name}: its local tensor was written to since the last step, which other processes "
                    "cannot see. Write to the DTensor (`with torch.no_grad(): weight.mul_(...)`), or call "
                    "overcoat.fp8_all_gather(model) again in every process"
                )
            self.is_stale = True

    @torch.no_grad()
    def find_if_stale(self) -> None:
        """Find the maxima if they are stale; the host does not wait for the device."""
        if self.is_stale:
            self.seen = {weight: weight.versions() for weight in self.weights}
            self.find()
            self.is_stale = False

    @abc.abstractmethod
    def find(self) -> None:
        """Find the maxima from the shards."""

    def over_all(self, found: Tensor) -> Tensor:
        """Take the maximum over all processes of FP32 numbers >= 0, in place."""
        group = self.weights[0].param.shard_mesh.get_group()
        return share_largest(found, group) if group.size() > 1 else found


class Stacks(Maxima):
    """max |w| of each stack: of the weights that form one operand."""

    def __init__(self, stacks: Sequence[Sequence[ShardedWeight]]) -> None:
        super().__init__([weight for stack in stacks for weight in stack])
        self.stacks = stacks
        width, place = max(map(len, stacks)), {weight: place for place, weight in enumerate(self.weights)}
        rows = [[place[weight] for weight in stack] for stack in stacks]
        device = self.weights[0].param.device
        self.places = torch.tensor([row + row[:1] * (width - len(row)) for row in rows], device=device)

    def find(self) -> None:
        shards = [weight.param._sharded_param_data for weight in self.weights]
        dtype = self.weights[0].param.mp_policy.param_dtype or shards[0].dtype  # rounding keeps the order
        own = torch.stack(torch._foreach_norm(shards, math.inf)).to(dtype).float()
        found = self.over_all(own[self.places].amax(1).abs())
        # In new memory: a pending backward may still read the old values. 16 bytes apart, as cuBLASLt needs its scales.
        scales = F.pad(scale_from_amax(found, E4M3).unsqueeze(1), (0, 3))[:, 0]
        for stack, scale, amax in zip(self.stacks, scales.unbind(), found.unbind(), strict=True):
            for weight in stack:
                weight.scale, weight.amax = scale, amax


class CutBlocks(Maxima):
    """max |w| of the 128x128 blocks that span several shards. All shards of a weight have equally many rows."""

    def __init__(self, weights: Sequence[ShardedWeight]) -> None:
        super().__init__(weights)
        self.tops: dict[tuple[ShardedWeight, int], Tensor] = {}  # (K / 128,) by the number of a row of blocks
        self.places: dict[ShardedWeight, Tensor] = {}

    @staticmethod
    def span(weight: ShardedWeight) -> tuple[int, int]:
        """Return the first row of this process' shard in the weight, and its number of rows."""
        rows: int = weight.param.padded_sharded_param_size[0]
        return weight.param.mesh_info.shard_mesh_rank * rows, rows

    def find(self) -> None:
        keys, own = [], []
        for weight in self.weights:
            (first, rows), (total, columns) = self.span(weight), weight.param._orig_size
            shard = weight.param._sharded_param_data.view(rows, columns)
            for block in sorted({edge // BLOCK for edge in range(rows, total, rows) if edge % BLOCK}):
                start, end = max(block * BLOCK, first), min((block + 1) * BLOCK, first + rows)
                part = shard[start - first : end - first] if start < end else shard.new_zeros(1, columns)
                top = F.pad(part.abs().amax(0), (0, -columns % BLOCK)).view(-1, BLOCK).amax(1)
                keys.append((weight, block))
                own.append(top if (dtype := weight.param.mp_policy.param_dtype) is None else top.to(dtype))
        found = self.over_all(torch.cat(own).float()).to(own[0].dtype)
        self.tops = dict(zip(keys, found.split([len(top) for top in own]), strict=True))

    def found(self, weight: ShardedWeight, row: int) -> Optional[Tensor]:
        """Return the maxima of the blocks that an edge between shards splits, (K / 128,); None if it splits none."""
        return self.tops[weight, row // BLOCK] if row % BLOCK else None

    def whole_scale(self, weight: ShardedWeight, scale: Tensor) -> Tensor:
        """Return the weight's scales (N / 128, L4) from those that all processes have sent."""
        if weight not in self.places:
            rows, total = self.span(weight)[1], weight.param._orig_size[0]
            owner = [(block * BLOCK) // rows for block in range(total // BLOCK)]
            places = [at * (rows // BLOCK + 2) + block - at * rows // BLOCK for block, at in enumerate(owner)]
            self.places[weight] = torch.tensor(places, device=scale.device)
        return scale.index_select(0, self.places[weight])
