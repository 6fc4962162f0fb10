"""Dictionaries of states that say so before they change.

From step to step the optimizer keeps lists and device tables of all state tensors: to collect them anew costs the host
more than the step costs the GPU. But the states are the user's as well, as with any torch optimizer: a tensor may be
replaced, a state taken out, all moved to the host while something else needs the GPU. The lists would not know, and
would keep the old tensors in memory. So every write tells the optimizer first, and it lets go of what it has kept.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Optional

from torch import Tensor

# Finds what is to be called before a write, `weakref.WeakMethod` of the optimizer's method; None once it is gone.
FindListener = Callable[[], Optional[Callable[[], None]]]


class State(dict[str, Tensor]):
    """The state of one parameter. Copied or pickled it is a plain dictionary, which nobody watches."""

    def __init__(self, values: Mapping[str, Tensor], listener: FindListener) -> None:
        super().__init__(values)
        self.listener = listener

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class States(defaultdict[Any, Any]):
    """What `optimizer.state` is: the states by parameter. Copied or pickled it is a plain defaultdict."""

    def __init__(self, values: Mapping[Any, Any], listener: FindListener) -> None:
        super().__init__(dict, values)
        self.listener = listener

    def keep(self, param: Tensor, state: State) -> None:
        """Write without telling: for the optimizer itself."""
        defaultdict.__setitem__(self, param, state)

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _telling(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = self.listener()
        if listener is not None:
            listener()
        return method(self, *args, **kwargs)

    return write


for _kind in (State, States):
    for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
        setattr(_kind, _name, _telling(_kind, _name))
