"""A sharded weight that travels in FP8, and the maxima that those of a model share: used by `fp8_all_gather`.

    maxima     once a step: one pass over the shards, one small all-reduce that makes them those of the stacks (q, k,
               v; gate, up), on the device
    codes      E4M3, 1 byte a weight, made of the shard for each all-gather with the scale of the stack, and not kept;
               with block scales these are found and sent with them
    gathered   into the buffer that FSDP2 frees and restores: `GatheredWeight`, the operand of the products

A process that holds all rows sends nothing: its products read the shard as they would read a plain weight.

All processes must find the maxima again at the same time. They do when an optimizer that holds one of the weights has
stepped, or a DTensor was written to, which all processes do together. A shard that was written to by itself is seen in
one process alone, so it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat.block.gathered import GatheredWeight
from overcoat.formats import E4M3, scale_from_amax
from overcoat.kernels.block_weights import block_stack_weights
from overcoat.kernels.stack import stack_weights


def holds_all(param: Any) -> bool:
    """Whether a process has all rows of FSDP2's `FSDPParam`, as the products read them."""
    return param.mesh_info.shard_mesh_size == 1 and param.param_dtype is None


class ShardedWeight:
    """A sharded weight that travels in FP8; FSDP2 calls its two methods for every all-gather.

    Args:
        name: the parameter's.
        param: FSDP2's `FSDPParam`.
        layer: whose mode says how it travels.

    Attributes:
        maxima: that of its stack is among them; None with block scales.
        scale: of its stack, 0-d FP32; of blocks those of this process' rows.
        amax: of its stack, 0-d FP32; None with block scales.
    """

    maxima: Optional[Maxima] = None
    scale: Optional[Tensor] = None
    amax: Optional[Tensor] = None

    def __init__(self, name: str, param: Any, layer: nn.Module) -> None:
        self.name, self.param, self.layer = name, param, layer
        self.is_fp8 = False  # how it travelled last
        self.others: tuple[list[Tensor], Optional[nn.Parameter]] = ([], None)  # FSDP2's buffers for the other way

    @property
    def local(self) -> Tensor:
        """The shard (n, K), n different in the last processes."""
        own: Tensor = self.param.sharded_param._local_tensor
        return own

    def rows(self) -> Tensor:
        """The shard as it travels in 16 bits: filled up to the rows of the first process, in `param_dtype`."""
        whole: Tensor = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
        return whole if self.param.param_dtype is None else whole.to(self.param.param_dtype)

    def attach(self) -> None:
        """Make FSDP2 ask this object."""
        self._give_buffers([], None)
        self.local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
        self.local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
        self.param._init_extensions()

    def detach(self) -> None:
        """Let FSDP2 gather the weight by itself again."""
        self._give_buffers([], None)
        if self.is_attached():
            del self.local.fsdp_pre_all_gather, self.local.fsdp_post_all_gather  # type: ignore[attr-defined]

    def is_attached(self) -> bool:
        """Whether the shard is still the tensor that it was: `to_empty` and loading with `assign` make another."""
        return hasattr(self.local, "fsdp_pre_all_gather")

    def versions(self) -> tuple[int, int]:
        """Version counters: of the DTensor and of its local tensor."""
        return self.param.sharded_param._version, self.local._version

    # ---- FSDP2's extension points -------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What this process sends."""
        self._travel_in(self.layer.training)
        if not self.is_fp8:
            return (self.rows(),), None
        if self.maxima is not None:
            self.maxima.check([self])
            self.maxima.find_if_stale()
        if holds_all(self.param):
            return (self.param._sharded_param_data[:0],), None
        if self.amax is not None:
            return (stack_weights([self.rows()], self.amax, False)[0].view(torch.uint8),), None
        codes, self.scale = block_stack_weights([self.rows()], False)
        return (codes.view(torch.uint8), self.scale)[: mesh.size()], None  # of one process FSDP2 takes one tensor

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight of what all have sent, or put into `out`."""
        if not self.is_fp8:
            return None if out is not None else (outputs[0][: self.param._orig_size[0]], ())
        inner = self.rows() if holds_all(self.param) else outputs[0][: self.param._orig_size[0]].view(E4M3.dtype)
        made = inner, (outputs[1] if len(outputs) > 1 else self.scale), self.amax
        if out is None:
            return GatheredWeight(*made, param_dtype), ()
        out.held, out.scale, out.w_amax = made
        return None

    # ---- inside -------------------------------------------------------------------------------------------

    def _travel_in(self, fp8: bool) -> None:
        """FSDP2 keeps a buffer and an unsharded parameter, of one dtype: give it those of this way."""
        if fp8 != self.is_fp8:
            self.others, self.is_fp8 = self._give_buffers(*self.others), fp8

    def _give_buffers(
        self, outputs: list[Tensor], unsharded: Optional[nn.Parameter]
    ) -> tuple[list[Tensor], Optional[nn.Parameter]]:
        """Exchange what FSDP2 gathers into, and the parameter that lies there; empty ones it makes itself."""
        param = self.param
        before: Optional[nn.Parameter] = param.__dict__.pop("_unsharded_param", None)
        if before is not None and before.grad is not None:  # not reduced yet: FSDP2 adds what is to come
            param.unsharded_accumulated_grad, before.grad = before.grad, None
        if unsharded is not None:
            param._unsharded_param = unsharded
        param.all_gather_outputs, outputs = outputs, param.all_gather_outputs
        return outputs, before


class Maxima:
    """max |w| of stacks of weights that one process group shares, all of one dtype.

    Attributes:
        stacks: weights whose operand is one.
        is_stale: whether the maxima have to be found again.
    """

    def __init__(self, stacks: Sequence[Sequence[ShardedWeight]]) -> None:
        self.stacks, self.weights = stacks, [weight for stack in stacks for weight in stack]
        self.is_stale, self.seen = True, dict[ShardedWeight, tuple[int, int]]()
        for weight in self.weights:
            weight.maxima = self
        width, place = max(map(len, stacks)), {weight: place for place, weight in enumerate(self.weights)}
        rows = [[place[weight] for weight in stack] for stack in stacks]
        self.places = torch.tensor([row + row[:1] * (width - len(row)) for row in rows], device=self._param.device)

    @property
    def _param(self) -> Any:
        return self.weights[0].param

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: torch's own write to shards unseen."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.is_stale = self.is_stale or any(id(weight.param.sharded_param) in held for weight in self.weights)

    def check(self, weights: Sequence[ShardedWeight]) -> None:
        """Whether weights have changed: then the maxima are stale, in all processes or in none.

        Raises:
            RuntimeError: a shard was written to by itself.
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
        """The maxima and scales of all stacks; nothing waits for the device."""
        if not self.is_stale:
            return
        self.seen = {weight: weight.versions() for weight in self.weights}
        shards = [weight.param._sharded_param_data for weight in self.weights]
        dtype = self._param.mp_policy.param_dtype or shards[0].dtype  # rounding keeps the order
        own = torch.stack(torch._foreach_norm(shards, math.inf)).to(dtype).float()
        found = own[self.places].amax(1).abs()
        group = self._param.shard_mesh.get_group()
        if group.size() > 1:
            # As integers their bits order like the values, NaN on top.
            dist.all_reduce(found.view(torch.int32), dist.ReduceOp.MAX, group=group)
        # In new memory: a backward may wait for what it read before. 16 bytes apart, as cuBLASLt wants its scales.
        scales = F.pad(scale_from_amax(found, E4M3).unsqueeze(1), (0, 3))[:, 0]
        for stack, scale, amax in zip(self.stacks, scales.unbind(), found.unbind(), strict=True):
            for weight in stack:
                weight.scale, weight.amax = scale, amax
        self.is_stale = False
