"""Import Triton, or stand-ins if it is not installed (Windows, macOS).

    from overcoat.kernels.language import INTERPRETED, tl, triton

With the stand-ins the kernel files still import and their references run; launching a kernel raises
ModuleNotFoundError.
"""

from __future__ import annotations

from typing import Any


class _Absent:
    """Stand-in for `triton` and its members: false; every attribute and call returns the stand-in itself."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, grid: Any) -> Any:
        raise ModuleNotFoundError("a kernel was launched, but Triton is not installed: pip install triton")

    def jit(self, function: Any) -> Any:
        """Return the function unchanged."""
        return function


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    triton = tl = TensorDescriptor = _Absent()

# True under TRITON_INTERPRET=1: kernels run on the CPU, without inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
