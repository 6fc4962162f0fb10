"""FSDP2 in the dry run: allocate at the same hooks what `fully_shard` on every decoder layer and the model allocates.

A block's parameters are one group; those outside the blocks (embedding, final norm, head) are the root's group:

    gather      one flat buffer of the group (the all-gather's result), then a copy of it as whole parameters. In the
                forward the buffer lives on until the next group's has been copied; in the backward it goes at once, but
                the next block's is gathered while a block is at work.
    reshard     a block's copy goes when its forward ends, and again when its backward does. The root's stays to the end
                of the backward.
    reduce      when a block's backward ends, its gradients are copied into one flat buffer and freed, in the dtype that
                they are summed in. The buffer lives until the next block's backward ends; this process' part of the sum
                is new memory, cast to the gradients' dtype, which the optimizer sees. The root's gradients, the head's
                from the loss on, stay whole until the backward ends.

    replicas    FSDP2 sums between them in the same dtype, and holds these sums, if they are cast, to the end of the
                backward. One process that holds all rows gathers by a copy alone, and divides into another.

With `fp8_all_gather` codes are gathered, made of this process' part before; what is gathered are then single bytes.

Read in torch 2.13's `torch/distributed/fsdp/_fully_shard`, in which `tests/estimate/test_fsdp.py` counts every phase.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from overcoat.block.linear import GatheredWeight
from overcoat.distributed.fp8_all_gather import fp8_stacks
from overcoat.estimate.meter import GATHERED, GRADIENTS, Meter
from overcoat.formats import E4M3
from overcoat.kernels.weights import block_stack_weights
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.family import decoder_layers, find_causal_model


def part_bytes(tensor: Tensor, gpus: int) -> int:
    """Return the bytes of the largest part that FSDP2 gives a process; smaller parts are padded to it."""
    return -(-tensor.shape[0] // gpus) * tensor[:1].nbytes if gpus > 1 and tensor.dim() else tensor.nbytes


def travelling(parameter: Any) -> Tensor:
    """Return the tensor that is gathered for a parameter: itself, or its codes."""
    return getattr(parameter, "held", parameter)


def travel_in_fp8(model: nn.Module, gpus: int) -> None:
    """Replace a converted meta model's weights by the codes that `fp8_all_gather` sends."""
    owners: Counter[int] = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )

    def shards_of(module: Any) -> tuple[int, int] | str:
        return "shared" if owners[id(module.weight)] > 1 else (len(module.weight), gpus)

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, Fp8DecoderLayer)]
    for layer in layers:
        stacks = [stack for stack, reason in fp8_stacks(layer, shards_of) if reason is None]
        for linear in (linear for stack in stacks for linear in stack):
            weight: Any = linear.weight
            codes, scale = torch.empty_like(weight.detach(), dtype=E4M3.dtype), torch.empty((), device="meta")
            amax: Tensor | None = scale
            if layer.overcoat_recipe.linear_scaling == "block":
                (codes, scale), amax = block_stack_weights([weight.detach()], False), None
            if gpus == 1:  # nothing travels
                codes = weight.detach()
            linear.weight = nn.Parameter(GatheredWeight(codes, scale, amax, weight.dtype), weight.requires_grad)


@dataclass(eq=False)
class Group:
    """Parameters that are gathered and reduced together.

    sizes: bytes of this process' part of each gradient, filled up to that of others; sent: of what is gathered of it;
    coded: of these, what is made for it. buffer: the all-gather's result, on its way
    or waiting to be freed; whole: its copy. at_work: from the beginning of its backward to the end of the model's.
    """

    parameters: list[Tensor]
    sizes: list[int]
    sent: list[int]
    coded: int
    buffer: Tensor | None = None
    whole: list[Tensor] = field(default_factory=list)
    at_work: bool = False


class FullyShard:
    """The hooks of `fully_shard` on a meta model, cut over so many processes (gpus), whose allocations `meter` sees.

    Args:
        replicated: others hold the same parts; one GPU only if so.
        reduce_dtype: what gradients are summed in (`MixedPrecisionPolicy`); None: their own.
        take: called with each parameter and this process' part of its gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        gpus: int,
        replicated: bool,
        reduce_dtype: torch.dtype | None,
        take: Callable[[Tensor, Tensor], None],
    ) -> None:
        found = find_causal_model(model)
        assert found is not None  # a dry run's model is one
        self.root_module: Any = found[1]
        self.meter, self.gpus, self.reduce_dtype, self.take = meter, gpus, reduce_dtype, take
        self.replicated = replicated
        layers = decoder_layers(self.root_module).values()
        self.blocks = {layer: self._group(layer.parameters()) for layer in layers}
        inside = {id(parameter) for block in self.blocks.values() for parameter in block.parameters}
        self.root = self._group(each for each in self.root_module.parameters() if id(each) not in inside)
        self.order: list[Group] = []  # of the forward
        self.copied: Tensor | None = None  # the buffer of the group gathered last in the forward
        self.reducing: Tensor | None = None  # the copy of the gradients reduced last
        self.summed: list[Tensor] = []  # sums over the replicas

    def _group(self, parameters: Iterable[Tensor]) -> Group:
        parameters = list(parameters)
        sent = [part_bytes(travelling(parameter), self.gpus) for parameter in parameters]
        if self.gpus == 1:
            sizes = [parameter.nbytes for parameter in parameters]
            return Group(parameters, sizes, [0 if hasattr(each, "held") else each.nbytes for each in parameters], 0)
        wider = [parameter.dtype.itemsize // travelling(parameter).dtype.itemsize for parameter in parameters]
        coded = sum(size for size, times in zip(sent, wider, strict=True) if times > 1)
        return Group(parameters, [size * times for size, times in zip(sent, wider, strict=True)], sent, coded)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Gather and reduce during forward and backward passes. Enter it before hooks that observe them."""
        handles = []
        for module in (self.root_module, *self.blocks):
            handles += [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]
        for parameter in self.root_module.parameters():
            name = lambda of: self.meter.tag(of.grad, GRADIENTS)  # noqa: E731
            handles.append(parameter.register_post_accumulate_grad_hook(name))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ---- forward ------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        group = self.blocks.get(module, self.root)
        self._start(group)
        self.copied = self._finish(group)  # the last group's buffer goes when this one's has been copied
        if group is self.root:
            return None
        return (_Backward.apply(lambda: self._reduce(group), args[0]), *args[1:])

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        group = self.blocks.get(module, self.root)
        if group is self.root:
            self.copied = None
        else:
            group.whole.clear()
        self.order.append(group)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(group))

    # ---- backward -----------------------------------------------------------------------------------------------

    def _before_backward(self, group: Group) -> None:
        if group.at_work:
            return
        if not any(each.at_work for each in (self.root, *self.blocks.values())):
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        group.at_work = True
        self._start(group)
        self._finish(group)
        if place := self.order.index(group):
            self._start(self.order[place - 1])

    def _reduce(self, group: Group) -> None:
        """Reduce a group's gradients at the end of its backward."""
        pairs = zip(group.parameters, group.sizes, strict=True)
        reduced = [(parameter, size) for parameter, size in pairs if parameter.grad is not None]
        gradients = [parameter.grad for parameter, _ in reduced]
        for parameter in group.parameters:
            parameter.grad = None
        group.whole.clear()
        self.reducing = None
        if sizes := [size for _, size in reduced]:
            own, dtype = sum(sizes), reduced[0][0].dtype
            summed = own * (self.reduce_dtype or dtype).itemsize // dtype.itemsize
            self.reducing = self._empty(self.gpus * summed, GRADIENTS)
            # Where there is something to cut FSDP2's loop variable holds the last one until all is done.
            del gradients[: -1 if self.gpus > 1 else None]
            whole = self._empty(summed, GRADIENTS)
            if self.gpus == 1:
                self._empty(summed, GRADIENTS)  # the quotients, which are copied
            if self.reduce_dtype not in (None, dtype):
                if self.replicated:
                    self.summed.append(whole)
                whole = self._empty(own, GRADIENTS)
            for (parameter, _), part in zip(reduced, whole.split(sizes), strict=True):  # views of one buffer
                self.take(parameter, part)

    def _after_backward(self) -> None:
        self._reduce(self.root)
        self.reducing = None
        self.summed.clear()
        self.order.clear()
        for group in (self.root, *self.blocks.values()):
            group.at_work = False

    # ---- memory -------------------------------------------------------------------------------------------------

    def _start(self, group: Group) -> None:
        if group.buffer is None and not group.whole:
            codes = self._empty(group.coded, GATHERED)  # until the buffer has them
            group.buffer = self._empty(self.gpus * sum(group.sent) if self.gpus > 1 else 0, GATHERED)
            del codes

    def _finish(self, group: Group) -> Tensor | None:
        """Copy the gathered parameters out; return the buffer, which is freed unless the caller holds it."""
        buffer, group.buffer = group.buffer, None
        if buffer is not None:
            group.whole = [self._empty(self.gpus * size, GATHERED) for size in group.sent]
        return buffer

    def _empty(self, size: int, name: str) -> Tensor:
        tensor = torch.empty(size, dtype=torch.uint8, device="meta")
        self.meter.tag(tensor, name)
        return tensor


class _Backward(torch.autograd.Function):
    """The identity, which calls back when the gradient has come through."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], x: Tensor) -> Tensor:
        ctx.done = done
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.done()
        return None, gradient
