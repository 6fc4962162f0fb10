"""Weights as FP8 operands, stacked: made where they are used and freed after, or kept while the weights do not change.

With gradient accumulation the same weights are read by every micro-batch. `Recipe.reuse_weights` keeps their maxima and
FP8 copies, in both layouts, until the weights change: 2 bytes per weight for the time in which each layout is made, 0.2
ms of the 10 ms that a Llama-2-7B block takes for 8,192 tokens (3 bytes a weight at the copy bandwidth). A kept copy is
used again only if, for all weights of the stack,

* no `torch.optim.Optimizer` has stepped since,
* the version counter is the same: in-place operations, `load_state_dict` and `overcoat.AdamW` raise it,
* the weight lies where it lay.

Without it the maxima are known all the same where `overcoat.AdamW` wrote the weights or an earlier micro-batch looked
for them, which is checked on the way (weight_amax.py).

What is not seen is a write through `weight.data` outside of an optimizer: do not reuse weights then. Under FSDP2, whose
parameters are other objects in every forward, under torch.compile and in inference mode (no later backward may use
such tensors) nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable, Optional, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from overcoat import weight_amax
from overcoat.kernels.stack import stack_amax, stack_weights
from overcoat.kernels.stack_predicted import stack_weights_predicted, stack_weights_tracked


@dataclass
class _Kept:
    """Of the stack that begins with a weight: what tells that nothing changed, the maximum, operands by layout."""

    token: Any = None
    amax: Optional[Tensor] = None
    operands: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)


_kept = WeakTensorKeyDictionary()
_steps = [0]  # of all optimizers, once `reuse` was called
_hooks: list[Any] = []


def _count_step(*_: Any) -> None:
    _steps[0] += 1


def reuse(weights: Iterable[Tensor], on: bool) -> None:
    """Keep the operands of these weights, or (on=False) drop what is kept and keep no more."""
    for weight in weights:
        if on:
            _kept[weight] = _Kept()
        else:
            _kept.pop(weight, None)
    if on and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count_step))


def kept_bytes() -> int:
    """Bytes of all operands that are kept."""
    operands = [operand for kept in _kept.values() for operand in kept.operands.values()]
    return sum(tensor.nbytes for operand in operands for tensor in operand)


def operand(weights: Sequence[Tensor], transposed: bool, amax: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand, (sum N, K) or (K, sum N); its 0-d scale; their 0-d maximum.

    amax: the maximum if known.
    """
    kept = _still_valid(weights)
    if kept is not None and transposed in kept.operands and kept.amax is not None:
        return *kept.operands[transposed], kept.amax
    if amax is None and kept is not None:
        amax = kept.amax
    data, scale, amax = _make(weights, transposed, amax)
    if kept is not None:
        kept.amax, kept.operands[transposed] = amax, (data, scale)
    return data, scale, amax


def _make(weights: Sequence[Tensor], transposed: bool, amax: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    is_new = amax is None and not transposed
    if is_new and torch.compiler.is_compiling():
        return stack_weights_tracked(list(weights))
    predicted = weight_amax.predict(weights) if is_new else None
    if predicted is not None:
        return stack_weights_predicted(list(weights), predicted)
    if amax is None:
        amax = stack_amax(list(weights))
        weight_amax.observe(weights, amax)
    return *stack_weights(list(weights), amax, transposed), amax


def _still_valid(weights: Sequence[Tensor]) -> Optional[_Kept]:
    """What is kept of these weights, emptied if they have changed; None if nothing is to be kept."""
    # First, as torch.compile cannot look at `_hooks`.
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _hooks:
        return None
    kept = _kept.get(weights[0])
    if kept is None:
        return None
    token = (_steps[0], [(weight._version, weight.data_ptr()) for weight in weights])
    if token != kept.token:
        kept.token, kept.amax, kept.operands = token, None, {}
    return kept
