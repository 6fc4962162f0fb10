"""Results of a model that computed its loss without logits: in their place an object that raises when it is used.

It is an attribute of the result and no item, as None was: accelerate, DataParallel and FSDP go through the items, and
make a result of the same class of them, which has the attribute again. Who asks for the item gets the same answer.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

REMEDY = "pass output_logits=True to the model, or convert it with Recipe(head=None)"
MISSING = f"the loss was computed without logits: {REMEDY}"


def refuse_second_call(*_: Any) -> NoReturn:
    """Refuse a second call of lm_head in a forward that computes its loss there: the first got the loss as logits."""
    raise ValueError(f"lm_head was called twice while the model computes its loss without logits: {REMEDY}")


class NoLogits:
    """In the place of logits; whatever is done with them raises ValueError, and AttributeError for an attribute."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(MISSING)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(MISSING)

    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse
    __lt__ = __gt__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(MISSING)

    def __repr__(self) -> str:
        return f"<{MISSING}>"

    def __reduce__(self) -> str:
        return "NO_LOGITS"


NO_LOGITS = NoLogits()


class WithoutLogits:
    """Mixin before transformers' class of a result."""

    logits: Any

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.logits is None:
            object.__setattr__(self, "logits", NO_LOGITS)

    def __getitem__(self, key: Any) -> Any:
        # Of a tuple the logits would be the second, and others come after them.
        is_theirs = isinstance(key, int) and (key > 0 or key == -len(self))  # type: ignore[arg-type]
        if self.logits is NO_LOGITS and (key == "logits" or is_theirs):
            raise ValueError(MISSING)
        return super().__getitem__(key)  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        return self.logits if key == "logits" else super().get(key, default)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        fields: Any = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        values = (getattr(self, name) for name in fields)
        return type(self).__mro__[2], tuple(None if value is NO_LOGITS else value for value in values)


@functools.cache
def without_logits(output: Any) -> Any:
    """A result's class, whose objects have `NO_LOGITS` where they have no logits."""
    return type(output.__name__, (WithoutLogits, output), {"__module__": output.__module__})
