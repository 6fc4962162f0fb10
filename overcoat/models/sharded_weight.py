"""A sharded weight that travels in FP8, and what all those of a model share: used by `fp8_all_gather` (gather.py).

What is gathered for a layer that trains in FP8 is made once a step, from the shards:

    maxima     of the shards, as AdamW found them when it wrote them (weight_amax.py), else by a pass of their own; one
               small all-reduce makes them those of the stacks (q, k, v; gate, up), on the device
    codes      E4M3, 1 byte a weight, kept until the next step; with block scales also these, and nothing is reduced
    gathered   into the buffer that FSDP2 frees and restores: `GatheredWeight`, the operand of the products

All processes must make the maxima again at the same time. They do when an optimizer that holds one of the weights has
stepped, or a DTensor was written to, which all processes do together. A shard that was written to by itself is seen in
one process alone, so it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat import weight_amax
from overcoat.block.gathered import GatheredWeight
from overcoat.formats import E4M3, scale_from_amax
from overcoat.kernels.block_weights import block_stack_weights
from overcoat.kernels.quantize import amax
from overcoat.kernels.stack import stack_weights


class ShardedWeight:
    """A sharded weight that travels in FP8; FSDP2 calls its two methods for every all-gather.

    Args:
        name: the parameter's.
        param: FSDP2's `FSDPParam`.
        layer: whose mode says how it travels.
        place: of its stack among the maxima; None with block scales.
        gather: what all weights of the model share.
    """

    def __init__(self, name: str, param: Any, layer: nn.Module, place: Optional[int], gather: Gather) -> None:
        self.name, self.param, self.layer, self.place, self.gather = name, param, layer, place, gather
        self.is_fp8 = False  # how it travelled last
        self.others: tuple[list[Tensor], Optional[nn.Parameter]] = ([], None)  # FSDP2's buffers for the other way
        self._give_buffers([], None)
        self.made = -1  # at which count of the maxima the codes were made
        self.codes: Optional[Tensor] = None
        self.scale: Optional[Tensor] = None  # of blocks
        self.seen = (-1, -1)  # `versions` when the maxima were made
        self.stepped = -1  # the DTensor's version after the last step: a write to it leaves the local tensor's

    @property
    def local(self) -> Tensor:
        """The shard (n, K), n different in the last processes."""
        own: Tensor = self.param.sharded_param._local_tensor
        return own

    def attach(self) -> None:
        """Make FSDP2 ask this object."""
        self.local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
        self.local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
        self.param._init_extensions()
        self.entry, self.stepped = weight_amax.track(self.local), -1

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

    def values(self) -> Tensor:
        """The shard in the dtype that it would travel in."""
        dtype = self.param.param_dtype
        return self.local if dtype is None else self.local.to(dtype)

    def own_amax(self) -> Tensor:
        """max |w| of the shard, 0-d FP32."""
        known = None
        if self.local.numel() and self.param.sharded_param._version == self.stepped:
            known = self.entry.known(self.local)
        return amax(self.values().contiguous()) if known is None else known

    # ---- FSDP2's extension points -------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What this process sends."""
        self._travel_in(self.layer.training)
        if not self.is_fp8:
            whole = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
            return (whole if self.param.param_dtype is None else whole.to(self.param.param_dtype),), None
        self.gather.check(self)
        self.gather.make_if_stale()
        if self.made != self.gather.count:
            self._quantize()
        assert self.codes is not None
        if self.scale is None or mesh.size() == 1:  # of one process FSDP2 takes the first tensor alone
            return (self.codes,), None
        return (self.codes, self.scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Optional[Tensor] = None
    ) -> Any:
        """The weight of what all have sent; `out`, if given, is in the same memory as it was."""
        if out is not None:
            if self.is_fp8 and self.place is not None:
                out.scale, out.w_amax = self.gather.scale_and_amax(self.place)  # type: ignore[attr-defined]
            return None
        rows = outputs[0][: self.param._orig_size[0]]
        if not self.is_fp8:
            return rows, ()
        codes = rows.view(E4M3.dtype)
        if self.place is not None:
            return GatheredWeight(codes, *self.gather.scale_and_amax(self.place), param_dtype), ()
        scale = outputs[1] if len(outputs) > 1 else self.scale
        assert scale is not None
        return GatheredWeight(codes, scale, None, param_dtype), ()

    # ---- inside -------------------------------------------------------------------------------------------

    def _travel_in(self, fp8: bool) -> None:
        """FSDP2 keeps a buffer and an unsharded parameter, of one dtype: give it those of this way."""
        if fp8 == self.is_fp8:
            return
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

    def _quantize(self) -> None:
        values, size = self.values().contiguous(), self.param.padded_sharded_param_size
        if self.place is None:
            codes, scale = block_stack_weights([values], False)
            self.scale = scale if self.scale is None else self.scale.copy_(scale)
        elif values.numel():
            codes, _ = stack_weights([values], self.gather.scale_and_amax(self.place)[1], False)
        else:
            codes = values.new_zeros(size, dtype=E4M3.dtype)
        as_bytes = codes.view(torch.uint8)
        if as_bytes.shape != size:
            as_bytes = nn.functional.pad(as_bytes, (0, 0, 0, size[0] - len(as_bytes)))
        self.codes, self.made = as_bytes, self.gather.count


class Gather:
    """What all weights of a model share that travel in FP8.

    Attributes:
        weights: all of them, stack by stack.
        count: how often the maxima were made.
        is_stale: whether they have to be made again.
        made: scale and maximum of each stack, 0-d FP32, by its place.
    """

    def __init__(self) -> None:
        self.weights: list[ShardedWeight] = []
        self.count, self.is_stale = 0, True
        self.made: dict[int, tuple[Tensor, Tensor]] = {}
        self.kinds: list[Kind] = []

    def scale_and_amax(self, place: int) -> tuple[Tensor, Tensor]:
        """Of a stack, each 0-d."""
        return self.made[place]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: torch's own write to shards unseen."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for weight in self.weights:
            if id(weight.param.sharded_param) in held:
                weight.stepped, self.is_stale = weight.param.sharded_param._version, True

    def check(self, weight: ShardedWeight) -> None:
        """Whether a weight has changed: then the maxima are stale, in all processes or in none.

        Raises:
            RuntimeError: the shard was written to by itself.
        """
        outer, inner = versions = weight.versions()
        if self.is_stale or versions == weight.seen:
            return
        if outer == weight.seen[0] and weight.entry.version != inner:
            raise RuntimeError(
                f"{weight.name}: its local tensor was written to since the last step, which other processes cannot "
                "see. Write to the DTensor (`with torch.no_grad(): weight.mul_(...)`), or call "
                "overcoat.fp8_all_gather(model) again in every process"
            )
        self.is_stale = True

    def before_forward(self, *_: Any) -> None:
        """Attach shards that have become other tensors, and look for changes before anything is sent."""
        for weight in self.weights:
            if not weight.is_attached():
                weight.attach()
                self.is_stale = True
            self.check(weight)

    def make_if_stale(self) -> None:
        """The maxima and scales of all stacks; nothing waits for the device."""
        if not self.is_stale:
            return
        for weight in self.weights:
            weight.seen = weight.versions()
        self.kinds = self.kinds or _kinds(self.weights)
        for kind in self.kinds:
            found = _common_amax(kind)
            # In new memory: a backward may wait for what it read before. 16 bytes apart, as cuBLASLt wants its scales.
            scales = F.pad(scale_from_amax(found, E4M3).unsqueeze(1), (0, 3))[:, 0]
            self.made.update(zip(kind.places, zip(scales, found, strict=True), strict=True))
        self.count, self.is_stale = self.count + 1, False


class Kind(NamedTuple):
    """Stacks of one process group and dtype, and their places."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    places: list[int]
    stacks: list[list[ShardedWeight]]


def _kinds(weights: Sequence[ShardedWeight]) -> list[Kind]:
    found: dict[Any, dict[int, list[ShardedWeight]]] = {}
    for weight in weights:
        if weight.place is not None:
            key = (weight.param.shard_mesh.get_group(), weight.param.param_dtype or weight.local.dtype)
            found.setdefault(key, {}).setdefault(weight.place, []).append(weight)
    return [Kind(group, dtype, list(of), list(of.values())) for (group, dtype), of in found.items()]


def _common_amax(kind: Kind) -> Tensor:
    """max |w| of each stack over all processes, (number of stacks,) FP32; NaN if there is one."""
    width = max(map(len, kind.stacks))
    own = [[weight.own_amax() for weight in stack] for stack in kind.stacks]
    filled = [found for of in own for found in (*of, *of[:1] * (width - len(of)))]
    # AdamW finds the maxima of weights in their own dtype; rounding keeps the order.
    found = torch.stack(filled).view(len(own), width).amax(1).to(kind.dtype).float()
    if kind.group.size() > 1:
        # As integers their bits order like the values, NaN on top.
        dist.all_reduce(found.view(torch.int32), dist.ReduceOp.MAX, group=kind.group)
    return found
