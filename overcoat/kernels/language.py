"""Triton, for files that hold a reference, its launcher and its kernel together.

    from overcoat.kernels.language import INTERPRETED, tl, triton

Where Triton is not installed (Windows, macOS) the names are stand-ins: such a file still imports there, and its
references run; a kernel that is launched says what is missing.
"""

from __future__ import annotations

from typing import Any


class _Absent:
    """In place of `triton` and all that is in it: false, each attribute and each call gives it again."""

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
        """The function as it is."""
        return function


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    triton = tl = _Absent()

# True under TRITON_INTERPRET=1, where kernels run on the CPU and inline assembly does not exist.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
