"""Count the memory that a forward pass saves for the backward, by op and tensor.

`record_kept` sees each tensor as autograd packs it (torch's saved-tensor hooks), counts every storage once, and leaves
out parameters. Overcoat's ops name the tensors that they save (`keep`); those of other modules appear under the
module's path. Tensors that `Recipe.offload_blocks` moves to host memory are counted separately.

    with overcoat.memory.record_kept(model) as kept:
        loss = model(**batch).loss
    print(kept)

Unit U: tokens * hidden * 2 bytes, one BF16 copy of the residual stream.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle


class SavedTensor(NamedTuple):
    """One tensor saved for the backward; on_host: True if it waits in host memory; module: path of the one that ran."""

    op: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    on_host: bool = False
    module: str = ""


@dataclass
class SavedReport:
    """Tensors that `record_kept` saw; printable. Sizes in bytes."""

    rows: list[SavedTensor] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors, on device and host, each storage counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """Return the bytes that are in host memory (`Recipe.offload_blocks`)."""
        return sum(row.bytes for row in self.rows if row.on_host)

    def by_op(self) -> dict[str, int]:
        """Return the bytes of each op, in order of appearance."""
        return _totals((row.op, row.bytes) for row in self.rows)

    def by_tensor(self) -> dict[tuple[str, str], int]:
        """Return the bytes of each (op, tensor), summed over layers, in order of appearance."""
        return _totals(((row.op, row.name), row.bytes) for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'op':24s} {'tensor':24s} {'MiB':>10s}  share"]
        total = max(self.total_bytes, 1)
        for (op, name), size in self.by_tensor().items():
            lines.append(f"{op:24s} {name:24s} {size / 2**20:10.3f}  {100 * size / total:5.1f}%")
        lines.append(f"{'total':24s} {'':24s} {self.total_bytes / 2**20:10.3f}")
        if self.host_bytes:
            lines.append(f"{'of it in host memory':49s} {self.host_bytes / 2**20:10.3f}")
        return "\n".join(lines)


def _totals(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    totals: dict[Any, int] = defaultdict(int)
    for key, size in pairs:
        totals[key] += size
    return dict(totals)


class _Recorder:
    """Saved-tensor hooks that fill a report, and module hooks that track which module is running."""

    def __init__(self, model: nn.Module | None, given: Iterable[Tensor]) -> None:
        self.report = SavedReport()
        self.names: dict[int, tuple[str, str]] = {}
        self.seen: dict[int, int] = {}
        self.holders: list[Tensor] = []
        self.modules: list[str] = []
        self.inside: list[str] = []  # as `modules`, for one that is not the model's the path of what called it
        self.paths = {id(m): path for path, m in model.named_modules()} if model is not None else {}
        there = [] if model is None else [*model.parameters(), *model.buffers()]
        self.inputs = set(map(_storage, [*there, *given]))
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        self.record(tensor, False)
        return tensor.detach()  # an op's result would hold its op, which holds the result: a cycle that is never freed

    def record(self, tensor: Tensor, on_host: bool) -> None:
        storage = _storage(tensor)
        if isinstance(tensor, nn.Parameter) or storage in self.inputs or storage in self.seen:
            return
        size = tensor.untyped_storage().nbytes()
        # Hold the tensor, so that its address is not reused while we record. But not one that moves to the host: its
        # device memory must be freed, so its address is not recorded either.
        if not on_host:
            self.holders.append(tensor.detach())
            self.seen[storage] = size
        place = self.modules[-1] if self.modules else "other"
        op, name = self.names.get(storage, (place, f"{str(tensor.dtype).removeprefix('torch.')}"))
        if on_host:
            self.names.pop(storage, None)
        path = self.inside[-1] if self.inside else ""
        self.report.rows.append(SavedTensor(op, name, tuple(tensor.shape), tensor.dtype, size, on_host, path))

    def enter(self, module: nn.Module, _args: object) -> None:
        path = self.paths.get(id(module))
        self.modules.append(path or type(module).__name__)
        self.inside.append(path or (self.inside[-1] if self.inside else ""))

    def leave(self, _module: nn.Module, _args: object, _result: object) -> None:
        if self.modules:  # else the module was running when recording began
            self.modules.pop()
            self.inside.pop()


def _storage(tensor: Tensor) -> int:
    # The storage object's address, not its data's: on the meta device there is no data.
    return tensor.untyped_storage()._cdata


_active: list[_Recorder] = []
# An op, names of the tensors that it saves, and the tensors; those beyond the names are unnamed.
Part = tuple[str, tuple[str, ...], tuple[Tensor | None, ...]]


@contextlib.contextmanager
def record_kept(model: nn.Module | None = None, given: Iterable[Tensor] = ()) -> Iterator[SavedReport]:
    """Record what autograd saves for the backward inside the `with` block.

    Args:
        model: its modules' names appear in the report, and its parameters and buffers (and views of them) are not
            counted; without it only `nn.Parameter`s themselves are left out.
        given: further tensors that are not counted, such as rotary tables that all layers share.

    Yields:
        a `SavedReport`, filled as the forward runs. The tensors stay alive until the `with` block ends.
    """
    recorder = _Recorder(model, given)
    handles: list[RemovableHandle] = [
        nn.modules.module.register_module_forward_pre_hook(recorder.enter),
        nn.modules.module.register_module_forward_hook(recorder.leave, always_call=True),
    ]
    _active.append(recorder)
    try:
        with recorder.hooks:
            yield recorder.report
    finally:
        _active.remove(recorder)
        for handle in handles:
            handle.remove()
        recorder.holders.clear()


@contextlib.contextmanager
def without_hooks() -> Iterator[Callable[[Tensor, bool], None] | None]:
    """Suspend saved-tensor hooks inside the `with` block, so that hooks can be set on single saved tensors afterwards.

    Yields:
        a function to call with each saved tensor and whether it moves to host memory, for `record_kept`; or None if
        saved-tensor hooks that are not ours are active (checkpointing, `save_on_cpu`): they stay.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    recorder = None if hooks is None else getattr(hooks[0], "__self__", None)
    if hooks is None:
        yield lambda tensor, on_host: None
    elif isinstance(recorder, _Recorder):
        recorder.hooks.__exit__()
        try:
            yield recorder.record
        finally:
            recorder.hooks.__enter__()
    else:
        yield None


def keep(ctx: torch.autograd.function.FunctionCtx, op: str, **tensors: Tensor | None) -> None:
    """Call `ctx.save_for_backward` with named tensors; `ctx.saved_tensors` has the order of the keywords."""
    save_parts(ctx, (op, tuple(tensors), tuple(tensors.values())))


def save_parts(ctx: torch.autograd.function.FunctionCtx, *parts: Part) -> None:
    """Do as `keep` does for a Function that runs several ops; their tensors are saved in order."""
    saved: list[Any] = [tensor for _, _, tensors in parts for tensor in tensors]
    ctx.save_for_backward(*saved)
    # If nothing is trained autograd saves nothing, and the addresses will be reused by other tensors.
    if _active and any(ctx.needs_input_grad) and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
        labels: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for op, names, tensors in parts:
            for name, tensor in zip(names, tensors, strict=False):
                if tensor is not None:
                    labels[_storage(tensor)].append((op, name))
        for storage, found in labels.items():
            # Tensors that share a storage, as the weight maxima of a small block do, are one row of the whole Function.
            ops, together = ([*dict.fromkeys(each)] for each in zip(*found, strict=True))
            for recorder in _active:
                # The newest name wins: an address named earlier may have been freed and given to this tensor.
                recorder.names[storage] = (ops[0] if len(ops) == 1 else parts[0][0], ", ".join(together))


def release_saved(ctx: Any) -> None:
    """Let go of ctx's saved tensors inside its backward, so that each is freed after its last use there.

    Does nothing if the graph is retained for another backward. Otherwise a backward that fails (out of memory, say)
    cannot be repeated.
    """
    if not torch.compiler.is_compiling():  # a compiled backward frees tensors after their last use by itself
        ctx.maybe_clear_saved_tensors()


def optimizer_bytes(optimizer: torch.optim.Optimizer, device_type: str | None = None) -> int:
    """Return the bytes of all tensors in an optimizer's state, of sharded ones this process' part.

    device_type: count only tensors on such a device: "cuda", or "cpu" for offloaded states.
    """
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in own if device_type in (None, tensor.device.type))


_earlier_peak = 0  # peak bytes of this process' GPU before the last `restart_peak`


def forget_peak(device: torch.device) -> None:
    """Reset the peak at the beginning of a run: `peak_bytes` counts from here."""
    global _earlier_peak
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _earlier_peak = 0


def restart_peak(device: torch.device) -> int:
    """Return the most bytes allocated on a GPU since the last call, and count anew; `peak_bytes` is unaffected."""
    global _earlier_peak
    peak = torch.cuda.max_memory_allocated(device)
    _earlier_peak = max(peak, _earlier_peak)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _earlier_peak)
    import resource  # missing on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def use_expandable_segments() -> None:
    """Make PyTorch's CUDA allocator use expandable segments, as `overcoat train` does: less fragmentation
    (docs/memory.md), so that a step that nearly fills the GPU fits.

    Call it before the process's first CUDA allocation; later calls change nothing. Nothing changes either if the
    environment configures the allocator (PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, not empty); for instance
    expandable_segments:False keeps PyTorch's usual segments.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
