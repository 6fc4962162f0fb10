"""`stream`: train a model whose layers do not fit on the GPU, with the bits of the resident run.

    overcoat.convert(model)                                   # in host memory: from_pretrained without .cuda()
    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)
    overcoat.stream(model, optimizer)                         # this line
    for batch in batches:
        model(**batch).loss.backward()                        # the weights move here
        optimizer.step()

The weights of converted layers, their moments and remainders live in page-locked host memory; all else (embedding,
head, norms, biases, adapters) on the GPU. A `Parameter` stays the same object, and its data are the host's. Experts and
other weights that are not FP8 operands travel in 16 bits where the codes do.

    codes      [layer 1][layer 2] ...                  [layer 1][layer 0]               1 byte a weight
    compute    [layer 0][layer 1][layer 2] ...  [layer 2 bwd][layer 1 bwd][layer 0 bwd]
    in                                       [weights, states of 2][of 1] ...           5 bytes a weight
    update                                                    [step of 2][of 1] ...
    out                                                            [weights, states, codes of 2] ...

Codes go to two slots, in turn, one layer ahead. When the gradients of a stack of weights are there, its step runs on a
stream of its own, as released gradients' (`GradientRelease`): weights to one of three buffers, states through the
optimizer's staging buffers, the step, new codes, all back. The backward goes on meanwhile; gradients of the last
`BACKLOG` layers wait for their step. Events order the streams, and memory that several of them use is allocated once or
freed after an event: the host waits for nothing.

Several backward passes of a step (`accumulate` of the handle) add gradients up in FP32 in host memory, as steps run:
sums come, and go back, and the last pass steps with them.

In `eval()` weights travel in 16 bits, for the original forward. Read weights through `state_dict()` or
`save_pretrained`, which wait for the last copies, or after `synchronize()` of the handle.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.kernels.gemm import has_float8_tensor_cores, why_no_block_gemm
from overcoat.models.decoder import checked_now
from overcoat.models.frozen import frozen_of
from overcoat.models.masks import cache_of
from overcoat.optim.adamw import AdamW
from overcoat.optim.release import BATCH_BYTES, GradientRelease
from overcoat.optim.release_checks import check_release, numbered
from overcoat.optim.sharding import local, rewrap
from overcoat.optim.state import MUON
from overcoat.pinned_memory import bytes_free
from overcoat.streaming.choice import check_host, streamed_layers
from overcoat.streaming.layers import Layer, PlainStack, Stack, copy_bytes
from overcoat.streaming.load import Source, set_data
from overcoat.streaming.sharded import TakenOver, check_sharded, sharded_over, tightest_host

# Slots of codes: one is filled while the other is read. Buffers of weights: one is filled, one stepped, one emptied.
SLOTS, BUFFERS = 2, 3
# Layers whose gradients may wait for their step while the backward goes on.
BACKLOG = 1


def stream(
    model: nn.Module,
    optimizer: AdamW,
    *,
    device: Optional[torch.device | str] = None,
    resident: int = 0,
    weights: Optional[str | Path] = None,
) -> Stream:
    """Keep the FP8 weights of converted layers, and their optimizer states, in host memory, and step them in the
    backward.

    Losses, weights and states are those of `overcoat.release_gradients`, bit for bit, which this includes: the same is
    refused (clipping by the norm of all gradients, GradScaler). `accumulate` of the handle adds gradients up.

    Args:
        model: converted; on the GPU, or better in host memory, from where what is not streamed moves to the GPU. Or
            sharded by `fully_shard`: each process then streams its own rows (sharded.py).
        optimizer: an `overcoat.AdamW` of its parameters, or of some (adapters, say).
        device: that computes; None: the model's, or if it is in host memory the current GPU, or else the CPU.
        resident: layers that stay on the device as a whole, spread over the model: 6 bytes of each of their weights
            cross the link less, each way, for 5 bytes of memory.
        weights: of a transformers model on the meta device, which then never exists twice, nor as a whole on the GPU:
            a folder with safetensors under the model's own names, or "random" for the model's own initialization,
            drawn on `device`. A sharded model's: a folder.

    Returns:
        the handle: `str` of it says what is streamed; `remove()` moves all to the device.

    Raises:
        ValueError: the arguments cannot work together, or the host has too little memory; nothing has been changed.
        RuntimeError: the system does not let this process lock so much memory.
    """
    return Stream(model, optimizer, _device_of(model, device), resident, weights)


def _device_of(model: nn.Module, device: Optional[torch.device | str]) -> torch.device:
    found: Any = next((param.device for param in model.parameters() if param.is_cuda), sharded_over(model))
    chosen = torch.device(device or found or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


class Buffer:
    """Device memory for the weights of a stack while it is stepped.

    freed: CUDA event after the last copy out of it; codes: of the last stack, which that copy may be reading.
    sums: of gradients, FP32; none until some are accumulated.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.sums = memory[:0].view(torch.float32)
        self.freed: Any = None
        self.codes: Optional[Tensor] = None


class Stream(GradientRelease):
    """The handle of `stream`: a `GradientRelease` that also holds the streamed layers, their slots and CUDA streams.

    left: why weights of converted layers stay on the device, by their names.
    """

    keeps_on_host, instead = True, "run all passes of a step but the last inside `with handle.accumulate():`"

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        device: torch.device,
        resident: int = 0,
        weights: Optional[str | Path] = None,
    ) -> None:
        check_release(model, optimizer, BATCH_BYTES)
        self.device = device
        self.layers, self.left = streamed_layers(model, resident)
        self.stacks = [stack for layer in self.layers for stack in layer.stacks]
        self._check(model, optimizer)
        source = Source(model, weights)
        self.owners = {id(param): stack for stack in self.stacks for param in stack.params}
        check_host(self.layers, optimizer)
        optimizer.forget_staging()
        self._allocate()
        self._move(model, source)
        super().__init__(model, optimizer, BATCH_BYTES)
        for _, _, param in numbered(optimizer):
            if (stack := self.owners.get(id(param))) is not None:
                stack.awaited += param.requires_grad
        for layer in self.layers:
            self._encode_changed(layer)
            module, number = layer.module, layer.number
            self.handles += [
                module.register_forward_pre_hook(self._of_layer(self._enter, number), with_kwargs=True),
                module.register_forward_hook(self._of_layer(self._leave, number), always_call=True),
                module.register_state_dict_pre_hook(self._before_reading),
                module.register_load_state_dict_pre_hook(self._before_reading),
            ]

    def __str__(self) -> str:
        size = sum(stack.bytes + stack.code_bytes for stack in self.stacks)
        lines = [f"{name} stays on {self.device}: {reason}" for name, reason in self.left.items()]
        if plain := [name for stack in self.stacks if isinstance(stack, PlainStack) for name in stack.names]:
            lines.append(f"{len(plain)} weights travel in 16 bits, the first is {plain[0]}")
        what = f"{len(self.owners)} weights of {len(self.layers)} layers, {size / 2**30:.2f} GiB with their codes"
        return "\n".join([*lines, f"{what}, are streamed from host memory"])

    @staticmethod
    def _of_layer(method: Callable[..., None], number: int) -> Callable[..., None]:
        """Return a hook of a layer, as a function of this module: `HARMLESS_HOOKS` are known by that."""
        return lambda *given: method(number, *given)

    # ---- setting up -----------------------------------------------------------------------------------

    def _check(self, model: nn.Module, optimizer: AdamW) -> None:
        if not self.layers:
            reasons = "; ".join(dict.fromkeys(self.left.values())) or "no layer trains in FP8: overcoat.convert it"
            raise ValueError(f"overcoat.stream: no weight of {type(model).__name__} can be streamed: {reasons}")
        check_sharded(model, self.device)
        if any(frozen_of(param) is not None for stack in self.stacks for param in stack.params):
            raise ValueError("overcoat.stream: frozen weights are held in FP8 (Recipe.frozen_weights): use one")
        if any(layer.module.overcoat_mode is not None for layer in self.layers):
            raise ValueError("overcoat.stream: compiled layers cannot wait for copies: set train.compile = 'none'")
        if self.device.type == "cuda" and not has_float8_tensor_cores(self.device):
            raise ValueError(f"overcoat.stream: {torch.cuda.get_device_name(self.device)} has no FP8 tensor cores")
        is_block = any(stack.scaling == "block" for stack in self.stacks)
        if self.device.type == "cuda" and is_block and (reason := why_no_block_gemm(self.device)) is not None:
            raise ValueError(f"overcoat.stream: Recipe.linear_scaling = 'block' cannot run on {self.device}: {reason}")
        groups = optimizer.param_groups
        algorithms = {id(param): group.get("algorithm") for group in groups for param in group["params"]}
        for stack in self.stacks:
            for param, name in zip(stack.params, stack.names, strict=True):
                if param.requires_grad and id(param) not in algorithms:
                    raise ValueError(f"overcoat.stream: {name} is trained, but not in the optimizer: freeze it")
                if param.requires_grad and algorithms[id(param)] == MUON:
                    raise ValueError(
                        f"overcoat.stream steps layers by AdamW alone, and {name} is a matrix of overcoat.Muon: use "
                        "overcoat.AdamW, or overcoat.release_gradients instead"
                    )

    def _move(self, model: nn.Module, source: Source) -> None:
        """Move the streamed weights to page-locked host memory, all else to the device."""
        page_locked = self.device.type == "cuda"
        self.taken_over = TakenOver(model, self.stacks)
        for layer in self.layers:
            for stack in layer.stacks:
                stack.move_to_host(page_locked)
                source.fill_stack(stack)
        source.draw(self.device, self.owners)
        for layer in self.layers:
            layer.put([None] * len(layer.params))  # hidden
        try:
            source.fill_rest(self.device)
            model.to(self.device)
        finally:
            for layer in self.layers:
                layer.put(layer.params)

    def _allocate(self) -> None:
        """Allocate the device memory that all layers use in turn, and make the stand-ins for the weights."""
        is_cuda = self.device.type == "cuda"
        self.lanes: dict[str, Any] = {
            name: torch.cuda.Stream(self.device) if is_cuda else None for name in ("codes", "in", "update", "out")
        }
        largest = max(stack.bytes for stack in self.stacks)
        self.buffers = [Buffer(self._device_memory(largest)) for _ in range(BUFFERS)]
        self.slots = [self._device_memory(max(layer.bytes for layer in self.layers)) for _ in range(SLOTS)]
        self.wide: list[Tensor] = []  # slots of 16-bit weights, for `eval()`
        self.holders: list[Any] = [None] * SLOTS  # the layer in each slot, and True if in 16 bits
        for place, stack in enumerate(self.stacks):
            stack.place = place % BUFFERS
        for layer in self.layers:
            for stack, sent in zip(layer.stacks, layer.sent_in(self.slots[layer.number % SLOTS]), strict=True):
                stack.stand_in(sent)
        self.accumulates = False
        # Since the last backward began:
        self.task = -1  # autograd's number of it
        self.held: list[Tensor] = []  # gradients of the layer that is being stepped
        self.pending: deque[tuple[Any, list[Tensor]]] = deque()  # of those before it, and the event after their step

    def _device_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        for lane in self.lanes.values():
            if lane is not None:
                lane.wait_stream(torch.cuda.current_stream(self.device))
                memory.record_stream(lane)
        return memory

    # ---- CUDA streams ---------------------------------------------------------------------------------

    def _now(self) -> Any:
        """Return an event of the current stream; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _wait(self, event: Any) -> None:
        """Make the current stream wait for an event, if any."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextlib.contextmanager
    def _on(self, lane: str, *events: Any) -> Iterator[None]:
        """Run on a stream, after events."""
        if self.lanes[lane] is None:
            yield
            return
        with torch.cuda.stream(self.lanes[lane]):
            for event in events:
                self._wait(event)
            yield

    def synchronize(self) -> None:
        """Wait until all weights and states are in host memory."""
        for lane in ("update", "out"):
            if self.lanes[lane] is not None:
                self.lanes[lane].synchronize()
        self.optimizer.wait_for_offload()

    def weights_changed(self) -> None:
        """Make all codes again. Call it in every process after writes to DTensors' local parts, as by `dcp.load`."""
        for stack in self.stacks:
            stack.seen = None

    # ---- codes come to the device ---------------------------------------------------------------------

    def _fetch(self, layer: Layer, wide: bool = False) -> None:
        """Begin to copy a layer's codes, or `wide` its weights, to its slot, unless they are there.

        The copy waits for all that has been launched so far, which may read the slot's last layer.
        """
        place = layer.number % SLOTS
        if not wide:
            self._encode_changed(layer)
        if self.holders[place] == (layer, wide):
            return
        self.holders[place] = (layer, wide)
        with self._on("codes", self._now(), *[stack.written for stack in layer.stacks]):
            targets = layer.wide_of(self.wide[place]) if wide else layer.sent_in(self.slots[place])
            for stack, target in zip(layer.stacks, targets, strict=True):
                stack.send(target, wide)
            layer.arrived = self._now()

    def _encode_changed(self, layer: Layer) -> None:
        """Make codes of weights that were loaded, merged or otherwise changed on the host."""
        for stack in layer.stacks:
            if (versions := stack.versions()) != stack.seen:
                stack.seen = versions
                with self._on("update", self._now()), torch.no_grad(), self._on_device(layer, stack, False):
                    pass

    @contextlib.contextmanager
    def _on_device(self, layer: Layer, stack: Stack, is_stepped: bool) -> Iterator[None]:
        """Provide a stack's weights on the device to the current stream; then encode them, and copy the codes and if
        `is_stepped` the weights to the host."""
        layer.changes += 1
        buffer = self.buffers[stack.place]
        whole = buffer.memory[: stack.bytes]
        with self._on("in", buffer.freed):  # so `stack.written` has come, too
            copy_bytes(whole, stack.host)
            arrived = self._now()
        self._wait(arrived)
        yield
        buffer.codes = None  # the copy of the last ones has ended, as `arrived` has
        buffer.codes = codes = stack.encode(stack.own.weights_in(whole))
        with self._on("out", self._now()):
            if codes is not None:
                copy_bytes(stack.sent, codes)
            if is_stepped:
                copy_bytes(stack.host, whole)
            buffer.freed = stack.written = self._now()
        if self.holders[layer.number % SLOTS] == (layer, False):
            self.holders[layer.number % SLOTS] = None

    # ---- the forward ----------------------------------------------------------------------------------

    def _enter(self, number: int, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Let a layer's modules read the device's copies of their weights, and begin to copy the next layer's."""
        if not self.handles:  # the hook of a copied model
            return
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "overcoat.stream: a streamed layer cannot run again inside the backward: turn gradient checkpointing "
                'off, and use Recipe(checkpoint="block")'
            )
        layer, wide = self.layers[number], not self._runs_in_fp8(module, args, kwargs)
        for stack in layer.stacks:
            stack.check()
        self._make_wide(wide)
        self._fetch(layer, wide)
        self._wait(layer.arrived)
        layer.put(layer.weights_in(self.wide[number % SLOTS]) if wide else layer.leaves())
        layer.is_wide = wide
        is_last = number == len(self.layers) - 1
        if not (is_last and torch.is_grad_enabled()):  # else its backward is next
            following = self.layers[0 if is_last else number + 1]
            if following.number % SLOTS != number % SLOTS:
                self._fetch(following, wide)

    def _runs_in_fp8(self, module: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """True if a layer will compute in FP8. ValueError: it would train in 16 bits."""
        given = {**dict(zip(module.overcoat_arguments, args[1:], strict=False)), **kwargs}
        reason = "compiled layers cannot wait for copies" if module.overcoat_mode is not None else None
        if module.training or module.overcoat_eval:
            cached = "a key/value cache was asked for" if cache_of(given) is not None else None
            if (reason := reason or cached or checked_now(module).reason) is None:
                return True
        if module.training and torch.is_grad_enabled():
            name = next(layer.name for layer in self.layers if layer.module is module)
            raise ValueError(f"overcoat.stream: {name} would train in its original precision: {reason}")
        return False

    def _make_wide(self, wide: bool) -> None:
        """Allocate slots of 16-bit weights while layers run their original forward, and free them afterwards."""
        if wide and not self.wide:
            size = max(layer.wide_bytes for layer in self.layers)
            self.wide = [self._device_memory(size) for _ in range(SLOTS)]
        elif self.wide and not wide:
            self.wide = []
        if bool(self.wide) != any(of_wide for _, of_wide in filter(None, self.holders)):
            self.holders = [None] * SLOTS

    def _leave(self, number: int, module: nn.Module, args: Any, result: Any) -> None:
        """Give a layer's modules their parameters back, and prepare its backward."""
        if not self.handles:
            return
        layer = self.layers[number]
        layer.put(layer.params)
        y = result[0] if isinstance(result, tuple) else result
        if isinstance(y, Tensor) and y.requires_grad:
            before = functools.partial(self._before_backward, number, layer.changes)
            y.register_hook(_refuse_backward if layer.is_wide else before)

    # ---- the backward ---------------------------------------------------------------------------------

    def _before_backward(self, number: int, changes: int, _gradient: Tensor) -> None:
        """Wait for a layer's codes and for the step of older gradients, and begin to copy the next layer's codes.

        changes: of the layer's weights before the forward. ValueError: there were more since.
        """
        if self.task != torch._C._current_graph_task_id():
            self.task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        self._bound_gradients(BACKLOG)
        layer = self.layers[number]
        self._fetch(layer)
        if layer.changes != changes:  # autograd cannot see it: it has saved the stand-ins
            raise ValueError(
                f"overcoat.stream: weights of {layer.name} were stepped or written to between a forward and its "
                "backward: call backward() first, of several passes of a step all but the last inside `with "
                "handle.accumulate():`"
            )
        self._wait(layer.arrived)
        if number:
            self._fetch(self.layers[number - 1])

    def _bound_gradients(self, most: int) -> None:
        """Free gradients after their step, except those of the last `most` layers; the current stream waits for it."""
        if self.held:
            with self._on("update"):
                stepped = self._now()
            self.pending.append((stepped, self.held))
            self.held = []
        while len(self.pending) > most:
            stepped, gradients = self.pending.popleft()
            self._wait(stepped)
            del gradients  # whoever gets their memory writes after that

    def _take(self, number: int, index: int, param: Tensor, grad: Tensor) -> None:
        stack = self.owners.get(id(param))
        if stack is None:
            return super()._take(number, index, param, grad)
        self.parts.complete(param)
        stack.entries.append((number, index, param, grad))
        if len(stack.entries) == stack.awaited:
            self._step_stack(stack)

    # ---- accumulation ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Add gradients up in backward passes inside; the step's last pass runs outside and steps with the sums.

        Sums of streamed weights are FP32 in host memory, 4 bytes more of each weight; those of others are in their
        `grad`, in its dtype, as ever.
        """
        needed = sum(4 * sum(stack.sizes) for stack in self.stacks if stack.sums is None)
        processes, free = tightest_host(self.stacks[0], bytes_free()) if needed else (1, 0)
        if free and (needed := processes * needed) > free:
            raise ValueError(
                f"overcoat.stream: accumulation needs {needed / 2**30:.1f} GiB more host memory, and "
                f"{free / 2**30:.1f} GiB are free: use larger batches instead"
            )
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    def adds_up(self, param: Tensor, leaf: Tensor) -> bool:
        """Take a gradient inside `accumulate`; of what is not streamed autograd adds up."""
        stack = self.owners.get(id(param))
        if self.accumulates and stack is not None:
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            stack.entries.append((0, 0, param, grad))
            if len(stack.entries) == stack.awaited:
                self._add_up(stack)
        return self.accumulates

    def _add_up(self, stack: Stack) -> None:
        """Add a stack's gradients to their sums in host memory, on the stream of updates."""
        entries, stack.entries = stack.entries, []
        self.held += [grad for *_, grad in entries]
        stack.allocate_sums(self.device.type == "cuda")
        assert stack.sums is not None
        with self._on("update", self._now()), torch.no_grad():
            sums = self._sums_on_device(stack, stack.reduced(entries))
            with self._on("out", self._now()):
                stack.sums.copy_(sums, non_blocking=True)
                self.buffers[stack.place].freed = self._now()
        stack.summed = (stack.summed if stack.has_sums else set()) | {id(param) for *_, param, _ in entries}
        stack.has_sums = True

    def _sums_on_device(self, stack: Stack, entries: list[Any]) -> Tensor:
        """Return the sums of a stack's gradients, these included, in its buffer."""
        buffer, size = self.buffers[stack.place], sum(stack.sizes)
        if not buffer.sums.numel():
            buffer.sums = self._device_memory(4 * max(sum(of.sizes) for of in self.stacks)).view(torch.float32)
        sums = buffer.sums[:size]
        with self._on("in", buffer.freed):
            if stack.has_sums:
                assert stack.sums is not None
                sums.copy_(stack.sums, non_blocking=True)
            else:
                sums.zero_()
            arrived = self._now()
        self._wait(arrived)
        for *_, param, grad in entries:
            stack.own.sums_in(sums)[stack.place_of(param)].add_(grad)
        return sums

    # ---- the step -------------------------------------------------------------------------------------

    def check_step(self, clip_grad_norm: Optional[float]) -> None:
        super().check_step(clip_grad_norm)
        if any(stack.has_sums for stack in self.stacks):
            raise ValueError("overcoat.stream: the last backward of a step must run outside of accumulate()")

    def _step_stack(self, stack: Stack) -> None:
        """Step a stack's weights on the stream of updates."""
        entries, stack.entries = stack.entries, []
        if stack.has_sums and (lost := stack.summed - {id(param) for *_, param, _ in entries}):
            name = next(name for param, name in zip(stack.params, stack.names, strict=True) if id(param) in lost)
            raise ValueError(
                f"overcoat.stream: {name} has gradients of passes before, and none of the step's last one: freeze it "
                "before the first pass of a step"
            )
        self.held += [grad for *_, grad in entries]
        self._begin()
        self.optimizer.constants(self.device)  # made on this stream, which all others follow
        layer = next(layer for layer in self.layers if stack in layer.stacks)
        with self._on("update", self._now()), torch.no_grad():
            entries = stack.reduced(entries)
        with self._on("update"), torch.no_grad(), self._on_device(layer, stack, True):
            if stack.has_sums:
                sums = stack.own.sums_in(self._sums_on_device(stack, entries))
                entries = [(*of, param, sums[stack.place_of(param)]) for *of, param, _ in entries]  # type: ignore[misc]
                stack.has_sums = False
            self._step([(*of, param, rewrap(param, grad)) for *of, param, grad in entries])  # type: ignore[misc]

    def _finish_backward(self) -> None:
        for stack in self.stacks:
            if stack.entries:  # of weights that were frozen since
                (self._add_up if self.accumulates else self._step_stack)(stack)
        super()._finish_backward()
        self._bound_gradients(0)
        if self.task != -1:  # the forward is next
            self.task = -1
            for layer in self.layers[:SLOTS]:
                self._fetch(layer)

    # ---- what the optimizer asks ----------------------------------------------------------------------

    def leaf_of(self, param: Tensor) -> Tensor:
        stack = self.owners.get(id(param))
        return param if stack is None else stack.leaves[stack.place_of(param)]

    def device_of(self, param: Tensor) -> Optional[torch.device]:
        return self.device if id(param) in self.owners else None

    def stepped_on_device(self, params: list[Tensor]) -> Optional[list[Tensor]]:
        stack = self.owners.get(id(params[0]))
        if stack is None:
            return None
        copies = stack.own.weights_in(self.buffers[stack.place].memory)
        return [copies[stack.place_of(param)] for param in params]

    def drop_pending(self) -> None:
        super().drop_pending()
        for stack in self.stacks:
            stack.entries, stack.has_sums = [], False
        self._bound_gradients(0)

    def remove(self) -> None:
        """Move weights back to the device and remove the hooks: `optimizer.step()` does the whole step again.

        Accumulated gradients become those of the weights.
        """
        if not self.handles:
            return
        super().remove()
        self.synchronize()
        for stack in self.stacks:
            for place, param in enumerate(stack.params):
                set_data(param, rewrap(param, local(param.data).to(self.device, copy=True)))
                if stack.has_sums and param.requires_grad:
                    assert stack.sums is not None
                    param.grad = rewrap(param, stack.own.sums_in(stack.sums)[place].to(self.device, param.dtype))
        self.taken_over.give_back()
        self.owners, self.stacks, self.layers = {}, [], []

    def _before_reading(self, *_: Any) -> None:
        if self.handles:
            self.synchronize()


def _refuse_backward(_gradient: Tensor) -> None:
    raise ValueError(
        "overcoat.stream: a streamed layer that ran in eval() has no backward, since its weights have left the device: "
        "call train(), or use torch.no_grad() to evaluate"
    )
