"""Functions that somebody put in the place of a library's own, for all models at once: what they compute must run.

Who patches transformers replaces the forward of a class, a function that it calls by a name of its module
(`apply_rotary_pos_emb`), attention, or the loss. An FP8 block or the loss without logits would leave that out, so each
forward asks whether all of them are still the library's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Optional

import torch
import torch.nn.functional as F

# And what they decorate their own with.
LIBRARIES = ("transformers", "torch", "torchtitan", "spmd_types", "kernels", "peft", "overcoat")
# What layers call of torch.nn.functional; PyTorch's own context parallelism replaces some of the first, which are C++.
CALLED = ("scaled_dot_product_attention", "linear", "gelu", "silu", "relu", "softmax", "layer_norm")
# Functions that have been found to be a library's own.
known: set[Any] = set()


def why_patched(function: Any, title: str) -> Optional[str]:
    """Return the function that is not its library's: this one, called `title`, or one that it calls by name; None if
    all are."""
    called = [(names, name) for names, name in called_by_name(function) if names.get(name) not in known]
    for name, each in ((title, function), *((name, names.get(name)) for names, name in called)):
        if (source := _foreign(each)) is not None:
            return f"{name} was replaced, by {source}'s"
        known.add(each)
    return None


def why_all_patched(cls: Any) -> Optional[str]:
    """`why_patched` of the forward of all objects of a class."""
    return why_patched(cls.forward, f"the forward of all {cls.__name__}")


@torch.compiler.assume_constant_result
def why_torch_patched() -> Optional[str]:
    """Return a message if somebody replaced what layers call of PyTorch; in compiled code, when it was traced."""
    for name in CALLED:
        if (now := getattr(F, name)) not in known:
            if name in CALLED[:3] and now is not getattr(torch._C._nn, name):
                return f"F.{name} was replaced, by {now.__module__}'s"
            if (reason := why_patched(now, f"F.{name}")) is not None:
                return reason
    return None


@torch.compiler.assume_constant_result
def why_loss_patched() -> Optional[str]:
    """Return a message if somebody replaced the loss of causal models, or what it calls; in compiled code as above."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    reason = why_patched(ForCausalLMLoss, "ForCausalLMLoss")
    return reason or why_patched(F.cross_entropy, "F.cross_entropy") or why_patched(F.linear, "F.linear")


def why_mode() -> Optional[str]:
    """Return a message if a TorchFunctionMode of no library is on at a forward, which would see nothing of what our ops
    compute."""
    for place in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(place))
        if _foreign(kind) is not None:
            return f"the mode {kind.__module__}.{kind.__qualname__} is on, which may change functions of PyTorch"
    return None


def why_other_attention(kind: Optional[str], forward: Any) -> Optional[str]:
    """Return a message if somebody replaced transformers' attention. kind: transformers' name of it; forward: the
    function by which a layer's attention module calls it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if kind in ALL_ATTENTION_FUNCTIONS and "/" not in str(kind):  # not one of the hub's kernels
        function = ALL_ATTENTION_FUNCTIONS[kind]
        if function not in known and (reason := why_patched(function, f"attention of kind {kind!r}")) is not None:
            return reason
    for names, name in called_by_name(forward):
        if names.get(name) not in known:
            return why_patched(forward, "the forward of attention")
    return None


@functools.cache
def called_by_name(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The names, with the module that has them, of the functions that a function calls, and those in its file."""
    found: list[tuple[dict[str, Any], str]] = []
    todo = [inspect.unwrap(function)]
    for each in todo:
        names = getattr(each, "__globals__", {})
        for name in each.__code__.co_names if names else ():
            called = names.get(name)
            if callable(called) and not isinstance(called, type) and (names, name) not in found:
                found.append((names, name))
                if getattr(called, "__globals__", None) is names:
                    todo.append(called)
    return found


def _foreign(function: Any) -> Optional[str]:
    """The module of a function, or of one that it decorates, that is of no library; None if all are."""
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
        if module is not None and module.partition(".")[0] not in LIBRARIES:
            return str(module)
        function = getattr(function, "__wrapped__", None)
    return None
