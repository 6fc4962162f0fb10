"""Fingerprint of a layer: everything that decides what its own forward computes, compared at each forward.

An FP8 block stands in for a layer's own code, so it must notice when that code is no longer what was checked: a module
replaced, a hook added, a rate of dropout set, `apply_rotary_pos_emb` or `F.linear` patched. A fingerprint remembers
where such values are found, as pairs (dictionary, name), and what they were:

    modules      each child, its class, a `forward` set on the object, the number of its hooks
    values       numbers, flags, texts and functions among a module's attributes; the names of its configuration that
                 the forwards read
    functions    the forward of each class, the methods that it calls, and what these call by name: of their own file,
                 of torch.nn.functional, of transformers' attention interface

Comparing takes about 16 us for a Llama layer. Where something differs the layer is verified again (verify.py): it goes
on in FP8 if the numbers are the same, else its own forward runs, with one warning that names what has changed.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

# Functions of PyTorch that layers call; some are C++ without a forward of their own to look into.
CALLED = ("scaled_dot_product_attention", "linear", "gelu", "silu", "relu", "softmax", "layer_norm")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
VALUES = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType, functools.partial)
# Attributes of peft's layers that say which adapters its forward adds.
ADAPTERS = ("_active_adapter", "_disable_adapters")
# Hooks that expect nothing of what a module gets and returns: transformers' sleeping recorders, FSDP2's gathering and
# ours, the one that forbids the cache (convert.py), what streams a layer's weights.
OURS = ("overcoat.models", "overcoat.distributed", "overcoat.streaming")
HARMLESS_HOOKS = ("transformers.utils", "torch.distributed.fsdp", "torch.distributed._composable", *OURS)
# Whose function modes are harmless.
LIBRARIES = ("transformers", "torch", "torchtitan", "spmd_types", "kernels", "peft", "overcoat")
Place = tuple[dict[str, Any], str]


class Fingerprint:
    """Modules, values and functions of a layer when it was last checked, or only values and functions by `places` and
    `methods`, pairs (class, name). It does not hold the layer itself."""

    def __init__(
        self,
        layer: nn.Module | None = None,
        places: list[Place] | None = None,
        methods: Iterable[tuple[Any, str]] = (),
    ) -> None:
        self.layer = layer if layer is None else weakref.ref(layer)
        modules = [] if layer is None else [module for module in layer.modules() if module is not layer]
        self.modules = modules
        self.methods = [*methods] if layer is None else methods_in(layer)
        self.places = _places(layer, modules) if layer is not None else places or []
        self.sized: list[Any] = [getattr(module, hooks) for module in modules for hooks in HOOKS]
        self.sized += [module._modules for module in modules]
        self.sized += [part for module in modules if (part := vars(module).get("merged_adapters")) is not None]
        self.seen = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        return (
            [values.get(name) for values, name in self.places],
            [*map(len, self.sized)],
            [*map(type, self.modules)],
            [getattr(cls, name, None) for cls, name in self.methods],
        )

    def holds(self, layer: Optional[nn.Module] = None) -> bool:
        """True if nothing has changed since the fingerprint was taken, and it is this layer's: nn.DataParallel's copies
        share the attributes of the layer that they were made of."""
        return bool(self.places) and (self.layer is None or self.layer() is layer) and self._now() == self.seen

    def difference(self, layer: nn.Module) -> Optional[str]:
        """Return the first thing of the layer that has changed since, by its name; None if nothing has."""
        titles = [f"{_owner_of(values, layer)}{name}" for values, name in self.places]
        paths = {id(module): path for path, module in layer.named_modules()}
        modules = [paths.get(id(module), type(module).__name__) for module in self.modules]
        hooked = [f"the hooks of {path}" for path in modules for _ in HOOKS]
        sizes = [*hooked, *(f"the modules in {path}" for path in modules)]
        sizes += ["merged adapters"] * (len(self.sized) - len(sizes))
        classes = [f"the class of {path}" for path in modules]
        methods = [f"the {name} of all {cls.__name__}" for cls, name in self.methods]
        for found, before, now in zip((titles, sizes, classes, methods), self.seen, self._now(), strict=True):
            for title, old, new in zip(found, before, now, strict=True):
                if old is not new and old != new:
                    return title
        return None


def _owner_of(values: dict[str, Any], layer: nn.Module) -> str:
    """Return how a name in a dictionary begins when a person writes it: of a module of the layer, or of a library."""
    for path, module in layer.named_modules():
        if values is vars(module) or values is module._modules:
            return f"{path}." if path else ""
        if values is getattr(getattr(module, "config", None), "__dict__", None):
            return "config."
    return "F." if values is vars(F) else "torch." if values is vars(torch) else ""


class Checked:
    """Answer of a check, for as long as its fingerprint holds: a layer's branches, or why its own forward must run.
    Empty in a copy."""

    def __init__(self, fingerprint: Optional[Fingerprint] = None, branches: Any = None, reason: Optional[str] = None):
        self.fingerprint, self.branches, self.reason = fingerprint or Fingerprint(), branches, reason

    def __deepcopy__(self, memo: Any) -> Checked:
        return Checked()

    def __reduce__(self) -> Any:
        return Checked, ()


def _places(layer: nn.Module, modules: list[nn.Module]) -> list[Place]:
    found: list[Place] = [(vars(F), name) for name in CALLED]
    functions = dict.fromkeys(getattr(cls, name) for cls, name in methods_in(layer))
    for function in functions:
        found += [*called_by_name(function), *interfaces_in(function)]
    found += [(layer._modules, name) for name in layer._modules]
    names = {name for function in functions for name in names_in(function)}
    own = vars(layer)
    found += [
        (own, name)
        for name, value in own.items()
        if not name.startswith(("_", "overcoat")) and isinstance(value, VALUES)
    ]
    for module in modules:
        own = vars(module)
        found += [(module._modules, name) for name in module._modules]
        found += [(own, name) for name, value in own.items() if name[0] != "_" and isinstance(value, VALUES)]
        found += [(own, name) for name in ("forward", *ADAPTERS) if name not in own or name in ADAPTERS]
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    for config in configs.values():
        values = getattr(config, "__dict__", None)  # torchtitan's have slots, and are frozen
        if values is None:
            continue
        found += [(values, name) for name, value in values.items() if name in names and isinstance(value, VALUES)]
        found += _attention(values)
    skipped = ("training", "layer_idx")
    return [(values, name) for values, name in found if name not in skipped]


def _attention(config: dict[str, Any]) -> list[Place]:
    """Return the places of transformers' attention function of a configuration, and of what it calls."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = "_attn_implementation_internal"
    if kind not in config:
        return []
    found: list[Place] = [(config, kind)]
    for mapping in (ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS._global_mapping):
        found.append((mapping, config.get(kind) or ""))
        if isinstance(function := mapping.get(config.get(kind)), FunctionType):
            found += called_by_name(function)
    return found


@functools.cache
def called_by_name(function: Any) -> list[Place]:
    """Return the places of the functions that a function calls by name, and those that they call in its file: of that
    file, of torch and of torch.nn.functional, by whatever name it has these."""
    found: dict[tuple[int, str], Place] = {}
    todo = [inspect.unwrap(function)]
    for each in todo:
        names = getattr(each, "__globals__", {})
        for name in each.__code__.co_names if names else ():
            for owner in (names, vars(torch), vars(F)):
                called = owner.get(name)
                if callable(called) and not isinstance(called, type) and (id(owner), name) not in found:
                    found[id(owner), name] = (owner, name)
                    if getattr(called, "__globals__", None) is names:
                        todo.append(called)
    return [*found.values()]


def methods_in(layer: nn.Module) -> list[tuple[Any, str]]:
    """Return what a layer's own forward runs of its classes, as (class, name)."""
    own = getattr(layer, "overcoat_own", type(layer))
    found = dict.fromkeys((own, name) for name in methods_of(own))
    for cls in dict.fromkeys(type(module) for module in layer.modules() if module is not layer):
        found.update(dict.fromkeys((cls, name) for name in ("__call__", *methods_of(cls))))
    return [*found]


def methods_of(cls: Any) -> tuple[str, ...]:
    """Return "forward" and the names of the class's own methods that it calls, and these in turn."""
    return _methods_of(cls, cls.forward)


@functools.cache
def _methods_of(cls: Any, forward: Any) -> tuple[str, ...]:
    found, todo = ["forward"], [forward]
    for function in todo:
        for name in sorted(names_in(function)):
            method = getattr(cls, name, None)
            is_own = isinstance(method, FunctionType) and method is not getattr(nn.Module, name, None)
            if is_own and name not in found:
                found.append(name)
                todo.append(method)
    return tuple(found)


def interfaces_in(function: Any) -> list[Place]:
    """Return the places of transformers' tables of attention functions that a function reads by name."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return [(names, name) for name in sorted(names_in(function)) if hasattr(names.get(name), "get_interface")]


@functools.cache
def names_in(function: Any) -> frozenset[str]:
    """Return all names in the code of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def has_hooks(module: Any, harmless: tuple[str, ...] = ("transformers.utils",), kinds: tuple[str, ...] = HOOKS) -> bool:
    """True if the module has hooks other than functions of modules whose names begin with `harmless`; transformers'
    idle recording hooks stay on it."""
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(harmless)
        for hooks in kinds
        for hook in getattr(module, hooks).values()
    )


def why_mode() -> Optional[str]:
    """Return a message if a TorchFunctionMode of no library is on at a forward, which would see nothing of what our ops
    compute."""
    for place in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(place))
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            return f"the mode {kind.__module__}.{kind.__qualname__} is on, which may change functions of PyTorch"
    return None
