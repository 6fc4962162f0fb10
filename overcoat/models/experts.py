"""Experts in FP8: which modules are experts, found out and verified by numbers, and the class that computes them.

transformers keeps the experts of a layer in one module, whose forward takes tokens, the indices of their experts and
the router's weights, and whose parameters are stacked: `gate_up_proj` or `up_proj`, and `down_proj`. What it computes
(order of gate and up, activation, limits, layout) is tried on a small copy of it in FP32, with as many experts and few
columns. The router, an auxiliary loss and shared experts are other modules.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overcoat.block.experts import Experts, Weights, experts_layer, plain_experts
from overcoat.block.linear_layer import SharedInput
from overcoat.block.reference import ACTIVATIONS
from overcoat.models.family import Mixin, mixed, original_class
from overcoat.models.fingerprint import HOOKS, VALUES, why_mode
from overcoat.models.verify import LIMIT_DB, decibels, undisturbed
from overcoat.recipe import Recipe

FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"
LIMITS = ("limit", "swiglu_limit", "clamp_limit")
# Of an expert's weights, as of linear layers (linear_layers.py).
NARROW, MULTIPLE = 256, 16
SMALL_H, SMALL_I, TOKENS = 32, 24, 24
CHANGED = "a number or function of theirs has changed"


_converted: weakref.WeakSet[Any] = weakref.WeakSet()
# What was found, by all that it depends on: layers of one model are alike, and a search takes seconds.
_found: dict[Any, Optional[Experts]] = {}


@torch.compiler.assume_constant_result
def _stop_changed() -> int:
    """Let experts that have changed since `convert` run their own forward from now on, and say so: once, when code is
    being compiled, which could not compare them."""
    on = [each for each in list(_converted) if isinstance(each, Fp8Experts) and each.overcoat_recipe is not None]
    changed = [each for each in on if _seen(each) != each.overcoat_seen]
    for each in changed:
        each.overcoat_recipe = None
        warnings.warn(f"experts train in their original precision: {CHANGED}", stacklevel=2)
    return len(changed)


class Fp8Experts(Mixin):
    """Mixin before the class of experts: FP8 in `train()` mode (`overcoat_eval`: always)."""

    overcoat_recipe: Optional[Recipe]  # None: its own forward
    overcoat_how: Experts
    overcoat_shared: SharedInput
    overcoat_seen: tuple[Any, ...]
    overcoat_eval: bool = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states (T, H), indices (T, k) and weights (T, k) of each token's experts -> (T, H)."""
        if torch.compiler.is_compiling():
            _stop_changed()
        is_on = (self.training or self.overcoat_eval) and hidden_states.numel() > 0
        if self.overcoat_recipe is None or not is_on:
            return self._own(hidden_states, *args, **kwargs)
        parameters = weights_of(self)
        reason: Optional[str] = "they have other parameters than when they were converted"
        if parameters is None or (reason := _why_own(self, parameters, hidden_states, args, kwargs)) is not None:
            warnings.warn(f"experts train in their original precision: {reason}", stacklevel=2)
            return self._own(hidden_states, *args, **kwargs)
        index, weights = args
        how, recipe, shared = self.overcoat_how, self.overcoat_recipe, self.overcoat_shared
        return experts_layer(hidden_states, index, weights, parameters, how, recipe, shared)

    @property
    def weight_names(self) -> tuple[str, str]:
        """Return the names of the two stacked weights."""
        return next(name for name in FIRST if name in self._parameters), SECOND

    def _own(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().forward(*args, **kwargs)
        return result


def _why_own(module: Any, parameters: Weights, x: Tensor, args: Any, kwargs: Any) -> Optional[str]:
    """Return why FP8 cannot stand in for a call of experts, or None."""
    if x.dim() != 2 or len(args) != 2 or kwargs:
        return f"they were given {x.dim()} dimensions and {len(args) + len(kwargs)} more arguments, not (T, H) and two"
    if any(isinstance(each, DTensor) for each in parameters):
        return "their weights are sharded during the forward"
    if torch.compiler.is_compiling():
        return None
    return CHANGED if _seen(module) != module.overcoat_seen else why_mode()


def weights_of(module: Any) -> Optional[Weights]:
    """Return a module's parameters as `Weights`; None if it has others, or lacks one."""
    first = next((name for name in FIRST if isinstance(getattr(module, name, None), Tensor)), None)
    if first is None or not isinstance(getattr(module, SECOND, None), Tensor):
        return None
    names = (first, SECOND, f"{first}_bias", f"{SECOND}_bias")
    if {name for name, each in module._parameters.items() if each is not None} - {*names}:
        return None
    found: list[Any] = [getattr(module, name, None) for name in names]
    return Weights(*found)


def _seen(module: Any) -> tuple[Any, ...]:
    """Return what decides the result of an experts module beside its parameters."""
    values = vars(module)
    named = [name for name in sorted(values) if not name.startswith(("_", "overcoat_")) and name != "training"]
    kept = [(name, values[name]) for name in named if isinstance(values[name], (bool, int, float, str))]
    kept.append(("_is_expert_parallel", values.get("_is_expert_parallel", False)))
    methods = [getattr(original_class(module), name, None) for name in ("forward", "_apply_gate")]
    functions = [values.get("act_fn"), module._modules.get("act_fn"), values.get("forward"), values.get("_apply_gate")]
    return (*kept, *methods, *functions, _implementation(module), *_seen_inside(module))


def _seen_inside(module: Any) -> Iterator[tuple[Any, ...]]:
    """Yield what decides the results of the modules in an experts module, but for what makes its parameters (peft)."""
    for name, child in module._modules.items():
        for each in () if name == "parametrizations" or child is None else child.modules():
            values = [(key, value) for key, value in vars(each).items() if not key.startswith("_")]
            plain = [(key, value) for key, value in values if isinstance(value, VALUES) and key != "training"]
            yield type(each), type(each).forward, *plain, *[len(getattr(each, hooks)) for hooks in HOOKS]


def _implementation(module: Any) -> Any:
    """Return the function that a configuration names for experts, if it is not transformers' own: or None."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = ALL_EXPERTS_FUNCTIONS.get(getattr(getattr(module, "config", None), "_experts_implementation", None))
    return None if getattr(function, "__module__", "transformers.").startswith("transformers.") else function


def find_experts(module: Any) -> Optional[Experts]:
    """Return what the experts of a module compute; None if it is none, or nothing was verified."""
    parameters = weights_of(module)
    if parameters is None or any(each.dim() != 3 for each in parameters[:2]):
        return None
    if {"forward", "_apply_gate"} & vars(module).keys():  # the latter is not asked by every implementation
        return None
    if len({each.shape[0] for each in parameters if each is not None}) > 1:  # some compute nothing (LongCat)
        return None
    if any(type(each) is not nn.Parameter or each.element_size() < 2 for each in parameters if each is not None):
        return None
    if any(True for _ in module.buffers()):  # numbers that may change
        return None
    taken = [*inspect.signature(original_class(module).forward).parameters.values()][1:]
    if len(taken) != 3 or any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in taken):
        return None
    if getattr(module, "_is_expert_parallel", False) or _implementation(module) is not None:
        return None
    sizes = parameters.w1.shape[1:] + parameters.w2.shape[1:]
    if min(sizes) < NARROW or any(size % MULTIPLE for size in sizes):
        return None
    kind = _kind(module, parameters)
    if kind not in _found:
        with undisturbed():
            results = (_verified(module, *layout) for layout in _layouts(parameters))
            _found[kind] = next((each for each in results if each is not None), None)
    return _found[kind]


def _kind(module: Any, parameters: Weights) -> Any:
    """Return what decides the result of a search: of modules in a module their types and values, not themselves."""
    seen = [type(each) if isinstance(each, nn.Module) else each for each in _seen(module)]
    shapes = [None if each is None else tuple(each.shape) for each in parameters]
    limits = [_number(module, name) for name in LIMITS]
    return (original_class(module), *shapes, *limits, *seen)


def _layouts(parameters: Weights) -> Iterator[tuple[bool, bool]]:
    """Yield layouts that the shapes allow, as (transposed, gated)."""
    (_, a, b), (_, c, d) = parameters.w1.shape, parameters.w2.shape
    for transposed in (False, True):
        (wide, hidden), (out, inner) = ((b, a), (d, c)) if transposed else ((a, b), (c, d))
        if hidden == out and wide in (inner, 2 * inner):
            yield transposed, wide == 2 * inner


def _verified(module: Any, transposed: bool, gated: bool) -> Optional[Experts]:
    """Return the first candidate whose numbers are those of the module's own forward."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    parameters = weights_of(module)
    assert parameters is not None
    count, wide = parameters.w1.shape[0], SMALL_I * (1 + gated)
    shapes = [(count, wide, SMALL_H), (count, SMALL_H, SMALL_I), (count, wide), (count, SMALL_H)]
    if transposed:
        shapes[:2] = [(e, b, a) for e, a, b in shapes[:2]]
    drawn: list[Any] = [
        None if each is None else normal(*shape) for each, shape in zip(parameters, shapes, strict=True)
    ]
    small = Weights(*drawn)
    # Large ones beside others, for limits; each expert is visited.
    tokens, chosen = 2 * max(count, TOKENS // 2), min(2, count)
    x = normal(tokens, SMALL_H) * torch.tensor([1.0, 20.0]).repeat_interleave(tokens // 2)[:, None]
    scores = normal(tokens, count) + 99 * torch.eye(count).repeat(tokens // count + 1, 1)[:tokens]
    index = scores.topk(chosen).indices
    weights = normal(tokens, chosen).abs()
    expected = _run(module, small, (x, index, weights))
    if expected is None or expected.shape != x.shape:
        return None
    halves = (slice(tokens // 2), slice(tokens // 2, None))
    limits = [0.0, *dict.fromkeys(value for value in (_number(module, name) for name in LIMITS) if value)]
    choices = itertools.product(ACTIVATIONS, (False, True)[: 1 + gated], limits[::-1], (0.0, 1.0)[: 1 + gated])
    for activation, interleaved, limit, shift in choices:
        how = Experts(activation, gated, transposed, interleaved, limit, shift)
        found = plain_experts(x, index, weights, small, how)
        if all(decibels(expected[half], found[half]) >= LIMIT_DB for half in halves):
            return how
    return None


def _number(module: Any, name: str) -> Optional[float]:
    values = [getattr(owner, name, None) for owner in (module, getattr(module, "config", None))]
    return next((float(each) for each in values if isinstance(each, (int, float)) and math.isfinite(each)), None)


@torch.no_grad()
def _run(module: Any, small: Weights, given: tuple[Tensor, ...]) -> Optional[Tensor]:
    """Return the result of the module's own forward in training, with other parameters; None if it cannot run with
    them."""
    cls = original_class(module)
    clone = cls.__new__(cls)
    vars(clone).update(vars(module))
    first = next(name for name in FIRST if name in module._parameters)
    names = (first, SECOND, f"{first}_bias", f"{SECOND}_bias")
    clone._parameters = dict.fromkeys(module._parameters)
    clone._parameters.update({n: nn.Parameter(each) for n, each in zip(names, small, strict=True) if each is not None})
    clone._modules = copy.deepcopy(module._modules)
    clone.train()  # as in training: dropout and noise show
    if (config := getattr(module, "config", None)) is not None:
        clone.config = copy.copy(config)
        clone.config._experts_implementation = "eager"  # the definition; others need a GPU, or sizes
    try:
        result = clone.forward(*given)
    except Exception:  # experts of another kind: their own forward runs, as ever
        return None
    return result if isinstance(result, Tensor) else None


def convert_experts(
    layer: nn.Module, recipe: Recipe, eval_fp8: bool, shared: Optional[SharedInput] = None
) -> dict[str, nn.Module]:
    """Let the experts in a module compute in FP8, in place, and return them by name."""
    converted = {}
    for name, module in layer.named_modules():
        if type(module) is not original_class(module) or (how := find_experts(module)) is None:
            continue
        seen = _seen(module)
        module.__class__ = mixed(Fp8Experts, type(module))
        vars(module).update(
            overcoat_recipe=recipe, overcoat_how=how, overcoat_shared=shared or SharedInput(), overcoat_seen=seen,
            overcoat_eval=eval_fp8,
        )  # fmt: skip
        _converted.add(module)
        converted[name] = module
    return converted


def restore_experts(layer: nn.Module) -> None:
    """Undo `convert_experts`."""
    for module in layer.modules():
        if not isinstance(module, Fp8Experts):
            continue
        module.overcoat_recipe = None
        if type(module) is mixed(Fp8Experts, original_class(module)):
            module.__class__ = original_class(module)
            for name in [name for name in vars(module) if name.startswith("overcoat_")]:
                vars(module).pop(name)
