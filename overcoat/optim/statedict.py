"""How AdamW's states leave for a state dict and come back from one: torch's own way, between hooks of ours.

torch's `load_state_dict` casts every state tensor to the dtype of its parameter, which would destroy the codes. So it
loads all but them. Ours are the hooks next to its own work: users' hooks see whole state dicts and a filled optimizer.

    load    their pre-hooks | take the states out | torch | put them in  | their post-hooks
    save    their pre-hooks |                       torch | plain copies | their post-hooks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from overcoat.optim.offload import move_to_host
from overcoat.optim.shards import copy_of
from overcoat.optim.state import check_state, restore_state

if TYPE_CHECKING:
    from overcoat.optim.adamw import AdamW

# Options of a parameter group that decide the layout: a saved state can only be loaded under the same.
LAYOUT_OPTIONS = ("moments", "master", "group_size")


@contextmanager
def saving(optimizer: AdamW) -> Iterator[None]:
    """Inside, `Optimizer.state_dict` gives plain dictionaries, and copies of what later steps write to meanwhile."""

    def put(_: Any, result: dict[str, Any]) -> None:
        for index, state in result["state"].items():
            if isinstance(state, dict):
                result["state"][index] = {
                    name: copy_of(value) if optimizer.offload and isinstance(value, Tensor) else value
                    for name, value in state.items()
                }

    optimizer.wait_for_offload()
    first = optimizer.register_state_dict_post_hook(put, prepend=True)
    try:
        yield
    finally:
        first.remove()


@contextmanager
def loading(optimizer: AdamW) -> Iterator[None]:
    """Inside, `Optimizer.load_state_dict` restores states bit for bit; ValueError before anything is lost."""
    states: list[tuple[Tensor, dict[str, Any]]] = []

    def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        groups, saved_groups = optimizer.param_groups, saved["param_groups"]
        check_layout(groups, saved_groups)
        indices = [index for group in saved_groups for index in group["params"]]
        rest = dict(saved["state"])
        for index, (number, _, param) in zip(indices, optimizer.indexed_parameters(), strict=False):
            state = rest.pop(index, None)
            if state:  # reading `optimizer.state[param]` of a parameter without a state leaves an empty one
                check_state(state, param, groups[number], index)
                states.append((param, state))
        optimizer.wait_for_offload()
        if optimizer.release is not None:
            optimizer.release.forget()
        return {**saved, "state": rest}

    def put(_: Any) -> None:
        for group in optimizer.param_groups:
            group["moments"] = tuple(group["moments"])
        for param, saved in states:
            state = restore_state(saved, param, optimizer.offload)
            state = move_to_host(state, param) if optimizer.offload else state
            optimizer.state[param] = optimizer.watched_state(state)

    last = optimizer.register_load_state_dict_pre_hook(take)
    first = optimizer.register_load_state_dict_post_hook(put, prepend=True)
    try:
        yield
    finally:
        last.remove()
        first.remove()


def check_layout(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> None:
    """ValueError if states were saved under options that lay them out in another way than these groups do."""
    for group, saved in zip(groups, saved_groups, strict=False):
        for option in LAYOUT_OPTIONS:
            if option not in saved:
                raise ValueError(
                    f"the state has no {option!r} in its parameter groups: another optimizer saved it. Start "
                    "overcoat.AdamW without a state, or go on with the optimizer that saved it"
                )
            old, new = saved[option], group[option]
            if (tuple(old) if option == "moments" else old) != new:
                raise ValueError(
                    f"the state was saved with {option}={old!r}, this optimizer has {option}={new!r}; "
                    f"build overcoat.AdamW(..., {option}={old!r}) to load it"
                )
