"""Register an op with PyTorch: its schema, readable reference, CUDA kernel, and shapes for torch.compile.

Every numerical op of the project is one `Op` in the `overcoat::` namespace of `torch.library`:

    @op
    def amax(x: Tensor) -> Tensor:          # the reference: plain PyTorch, the specification, runs on every device
        ...

    @amax.cuda                              # the Triton kernel's launcher; otherwise a GPU runs the reference
    def _(x): ...

    @amax.fake                              # shapes for torch.compile; otherwise the reference runs on fake tensors
    def _(x): ...

Write a shape function if the reference takes more than 1 ms on fake tensors, or if it would make compiled code depend
on the number of tokens.

Ops carry no autograd formula: `overcoat.block` pairs forward and backward ops in `torch.autograd.Function`s. An op
never returns one of its inputs or a view of it (a rule of `torch.library`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from operator import attrgetter
from typing import Any, Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import SAC_IGNORED_OPS

_library = torch.library.Library("overcoat", "DEF")

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# All registered ops by name; tests run `opcheck` on each.
CATALOGUE: dict[str, Op] = {}

# Looked up once: every call of an op uses them.
_is_cuda = attrgetter("is_cuda")
_is_grad_enabled = torch.is_grad_enabled
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_is_batched, _is_mapped = torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_batchedtensor
_is_profiled = torch.autograd._profiler_enabled


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function that has no second derivative; RuntimeError if one is requested, or vmap.

    PyTorch's `once_differentiable` raises only if dy needs a gradient. A loss's dy does not, and then a penalty on
    gradients made with create_graph=True would silently lack the terms that pass through the Function.
    """
    compiled = once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *dy: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(ctx, *dy)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: converted layers and losses have no second derivative; do not convert this model"
            )
        if _is_batched(dy[0]) or _is_mapped(dy[0]):
            raise RuntimeError(
                "is_grads_batched=True or vmap: converted layers and losses take one gradient at a time; call "
                "torch.autograd.grad(..., retain_graph=True) for each, or do not convert this model"
            )
        return backward(ctx, *dy)

    return wrapper


def check_no_transforms() -> None:
    """Raise RuntimeError under torch.func (grad, vjp, vmap, ...) and torch.jit.trace: PyTorch's own errors name no
    remedy."""
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func: converted layers and losses support backward() and torch.autograd.grad only, no transforms; "
            "use these, or do not convert this model"
        )
    if _tracing() is not None:
        raise RuntimeError(
            "torch.jit.trace: converted layers and losses cannot be traced; trace in eval() without eval_fp8, or do "
            "not convert this model"
        )


class _Local(threading.local):
    """dispatcher_is_idle: True while `check_dispatcher_once` has found it idle in this thread."""

    dispatcher_is_idle = False


_local = _Local()


def _only_devices() -> bool:
    """True if every active function mode is `torch.set_default_device`'s, which these ops ignore."""
    return all(type(torch._C._get_function_stack_at(i)) is DeviceContext for i in range(_function_modes()))


def _dispatcher_is_idle() -> bool:
    """True if no autograd, fake tensor or other mode, vmap, trace or profiler is active.

    `make_fx(pre_dispatch=True)` on real tensors is not detected: only PyTorch's exporters use it, with fake tensors."""
    return (
        not _is_grad_enabled()
        and _dispatch_modes() == 0
        and (_function_modes() == 0 or _only_devices())
        and _transforms() is None
        and _tracing() is None
        and not _is_profiled()
    )


def check_dispatcher_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function: check once at its beginning whether the dispatcher is idle, for all ops that it calls."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _local.dispatcher_is_idle or not _dispatcher_is_idle():
            return function(*args)
        _local.dispatcher_is_idle = True
        try:
            return function(*args)
        finally:
            _local.dispatcher_is_idle = False

    return run


def _without_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast in a reference, which computes in FP32: autocast would lower its GEMMs."""

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return reference(*args, **kwargs)

    return run


class Op(torch._ops.OpOverload):
    """`torch.ops.overcoat.NAME.default`, for eager and compiled code, with a shortcut past the dispatcher.

    reference: the function in plain PyTorch. kernel: the launcher for CUDA tensors. shapes: the shape function.
    """

    reference: Callable[..., Any]
    kernel: Callable[..., Any] | None = None
    shapes: Callable[..., Any]
    written: list[tuple[int, str]]  # the arguments that are written to

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel directly if the dispatcher, which takes 3.5 to 10 us, would do nothing else.

        Only the first argument is checked: all tensors of a call are of one kind."""
        if self.kernel is not None and args and (_local.dispatcher_is_idle or _dispatcher_is_idle()):
            first = args[0]
            if type(first) is list and first:
                first = first[0]
            # The dispatcher would first materialize a lazily negated view.
            if type(first) in _PLAIN and _is_cuda(first) and not first.is_neg():
                return self.kernel(*args, **kwargs)
        return self._op(*args, **kwargs)

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a shape function, used on fake tensors instead of the reference."""
        self.shapes = function
        return function

    def cuda(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the kernel's launcher for CUDA tensors."""
        self.kernel = self.counting_versions(function)
        _library.impl(self._opname, self.kernel, "CUDA")
        return function

    def counting_versions(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make `function` increment the version counters of arguments that it writes to.

        By them autograd detects that a saved tensor was changed in place.
        """
        if not self.written:
            return function

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            for place, name in self.written:
                torch.autograd.graph.increment_version(args[place] if place < len(args) else kwargs[name])
            return result

        return run

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        self._introduce_to_inductor()
        return self.shapes(*args, **kwargs)

    def _introduce_to_inductor(self) -> None:
        """Register this op as a fallback with Inductor, if it is imported: compiled code calls the op itself.

        Without this, Inductor before 2.13 formats a debug string that grows exponentially with the graph's depth. Shape
        functions run while a graph is traced: after Inductor's import and before it lowers the first op.
        """
        lowering: Any = sys.modules.get("torch._inductor.lowering")
        # No `make_fallback` yet: another thread is importing the module, and its graph is not traced yet.
        if not hasattr(lowering, "make_fallback") or self in lowering.lowerings:
            return
        tag = torch._library.utils.get_layout_constraint_tag(self, with_default=True)
        lowering.make_fallback(self, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
        create = lowering.lowerings[self]

        @functools.wraps(create)
        def unchecked(*args: Any, **kwargs: Any) -> Any:
            """Write the call into compiled code, as `create` does, without run-time checks of each result's strides.

            tests/kernels/test_op.py compares these with the shape function, and every result is its own allocation. A
            block would check 92 results twice, and a small block is bound by the host.
            """
            results = create(*args, **kwargs)
            for box in results if isinstance(results, (list, tuple)) else [results]:
                if box is not None:  # an op that only writes to its arguments
                    box.data.data.skip_size_stride_alignment_checks = True
            return results

        lowering.lowerings[self] = unchecked


def op(reference: Callable[..., Any] | None = None, *, mutates: tuple[str, ...] = ()) -> Any:
    """Register an annotated function as the op `overcoat::<its name>`; mutates: names of arguments written to."""
    if reference is None:
        return functools.partial(op, mutates=mutates)
    name, names = reference.__name__, list(inspect.signature(reference).parameters)
    schema = torch.library.infer_schema(reference, mutates_args=mutates)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    # PyTorch creates the op's object, and compiled code looks it up by name: so change its class, not the object.
    made = getattr(torch.ops.overcoat, name).default
    made.__class__, made.__doc__ = Op, reference.__doc__
    made.reference, made.written = reference, [(names.index(each), each) for each in mutates]
    made.shapes = _without_autocast(reference)
    _library.impl(name, made.counting_versions(made.shapes), "CompositeExplicitAutograd")
    if mutates:  # selective checkpointing must not reuse saved results: the write would be skipped
        SAC_IGNORED_OPS.add(made)
    torch.library.register_fake(f"overcoat::{name}", made._fake, lib=_library)
    CATALOGUE[name] = made
    return made
