"""The verdict on a call of the library, beside torch's or transformers' outcome of the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REFUSALS = (ValueError, TypeError, NotImplementedError)
Job = tuple[str, Callable[[], str]]  # a case, and what finds out what is wrong with it


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def judge(plain: tuple[Any, Exception | None], own: tuple[Any, Exception | None], *, tolerance: float = 0.3) -> str:
    """What is wrong with our outcome beside the plain one; values are vectors."""
    (expected, plain_error), (found, error) = plain, own
    if error is not None:
        text = f"{type(error).__name__}: {str(error)[:300]!r}"
        if plain_error is None and not isinstance(error, REFUSALS):
            return f"fails with {text}, which is no clear refusal, where torch succeeds"
        return "" if str(error).strip() else f"an error without words: {text}"
    if plain_error is not None:
        return f"accepted in silence; torch: {type(plain_error).__name__}: {str(plain_error)[:150]!r}"
    if found.shape != expected.shape:
        return f"{found.numel()} numbers, torch has {expected.numel()}"
    if not bool(expected.isfinite().all()):
        return ""
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return "" if distance < tolerance else f"other numbers than torch's: relative distance {distance:.3g}"


def refusal(error: Exception | None) -> str:
    """What is wrong with an error, "" if it is a clear one."""
    if error is None or (isinstance(error, REFUSALS) and str(error).strip()):
        return ""
    return f"fails with {type(error).__name__}: {str(error)[:300]!r}, which is no clear refusal"
