"""A cache of compiled kernels that cuts a repeated launch to a third of its host time: the `kernel` decorator.

A decoder block is about 75 launches of 5 to 500 us. Triton's own launch takes 16 us on a slow host, mostly to find the
compiled kernel for the arguments. Kernels here are launched repeatedly with the same integers and flags, so one
dictionary look-up finds the compiled kernel, and its launcher takes 6 us.

The key is finer than Triton's own specialization: dtypes of tensors, and the exact value of everything else. Only
launches whose tensors are all aligned to 16 bytes are cached. So a hit is never a kernel compiled for other arguments,
provided that an argument always has the same type (0 and 0.0 are equal). All other launches go through Triton.
"""

from __future__ import annotations

import functools
from inspect import signature
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from overcoat.kernels.language import TensorDescriptor, triton

# Launches remembered per kernel. Integers are part of the key (a new number of tokens is a new entry), hence a bound.
MAX_ENTRIES = 4096


class Blocks(TensorDescriptor):
    """A tensor that the copy engine (TMA) reads in blocks; to `Kernel` a tensor whose dtype includes the block."""

    __hash__ = object.__hash__

    def data_ptr(self) -> int:
        return self.base.data_ptr()

    @property
    def dtype(self) -> Any:
        return (self.base.dtype, *self.block_shape)


class Kernel(triton.runtime.JITFunction):
    """A `triton.jit` function with a cache of launches: `kernel[grid](*args, **options)`, tensors first in args."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # T = 1 must not be compiled in: all rows outside would become constant zeros, ptxas would merge their
        # conversions, and then drop some uses (the bug in tiles.store_quad_rows).
        super().__init__(
            function, do_not_specialize=[name for name in ("T",) if name in signature(function).parameters]
        )
        self.entries: dict[Any, tuple[Any, ...]] = {}  # the compiled kernel, how it is run, arguments given by name
        self.pointers = 0  # how many arguments are tensors; set by the first launch
        runtime = triton.knobs.runtime
        # With a profiler's hooks set, launches go through Triton, which calls them.
        self.hooks = (runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch on the first tensor's device and its current stream; returns the compiled kernel."""
        device, own = torch._C._cuda_getDevice(), args[0].get_device()
        if 0 <= own != device:  # Triton launches on the current one
            with torch.cuda.device(own):
                return self.launch(grid, *args, **options)
        pointers, addresses = args[: self.pointers], 0
        for pointer in pointers:
            addresses |= pointer.data_ptr()
        types = [pointer.dtype for pointer in pointers]
        key = (device, args[self.pointers :], tuple(options.values()), *types)
        entry = self.entries.get(key)
        if entry is None or addresses & 15 or self.hooks[0] or self.hooks[1]:
            return self._launch_by_triton(grid, args, options)
        compiled, run, function, metadata, by_name = entry
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        if by_name:
            args += tuple([options[name] for name in by_name])
        run(x, y, z, stream, function, metadata, None, None, None, *args)
        return compiled

    def _launch_by_triton(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        compiled = self.run(*args, grid=grid, warmup=False, **options)
        self.pointers = next((i for i, arg in enumerate(args) if not isinstance(arg, (Tensor, Blocks))), len(args))
        pointers, rest = args[: self.pointers], args[self.pointers :]
        if any(isinstance(arg, (Tensor, Blocks)) for arg in (*rest, *options.values())):
            raise TypeError(f"{self.__name__}: tensors are passed first, before all other arguments")
        if all(pointer.data_ptr() & 15 == 0 for pointer in pointers):
            if len(self.entries) >= MAX_ENTRIES:
                self.entries.clear()
            by_name = tuple(name for name in self.arg_names[len(args) :] if name in options)
            types = [pointer.dtype for pointer in pointers]
            key = (torch._C._cuda_getDevice(), rest, tuple(options.values()), *types)
            self.entries[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata, by_name)
        return compiled


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b); `triton.cdiv` takes 3 us."""
    return -(-a // b)


def registers(most: Optional[int], x: Tensor, group_size: int) -> Optional[int]:
    """Return a launch's `maxnreg`: `most` if x (T, C) is in 16 bits, with groups of 64 or more and aligned rows.

    `most` was measured for these. Other inputs need more registers: None, the compiler decides.
    """
    return most if x.element_size() == 2 and x.shape[1] % 16 == 0 and group_size >= 64 else None


def dense(*tensors: Optional[Tensor]) -> list[Any]:
    """Return the tensors contiguous, since most kernels take sizes, not strides. None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


def dense_rows(x: Tensor) -> Tensor:
    """Return x (rows, columns) with contiguous rows, for kernels that take a row stride."""
    return x if x.stride(1) == 1 else x.contiguous()


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate an entry kernel: `Kernel`, or plain `triton.jit` under TRITON_INTERPRET=1."""
    if not triton:
        return triton  # a stand-in whose launch raises
    return triton.jit(function) if triton.knobs.runtime.interpret else Kernel(function)
