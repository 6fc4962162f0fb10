"""The norm at a converted model's end: one fused op (ops/final_norm.py) where the loss is computed without logits.

`FinalNorm` is mixed into the norm's own class, as in the decoder layers: parameters, names and hooks stay. It comes and
goes with the lean loss (head.py), which switches it on while the model runs for it; else it is its original forward, so
that logits are what they were, bit for bit. LayerNorm needs nothing, PyTorch's is fused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from overcoat.models.llama import SUPPORTED, original_class
from overcoat.ops.final_norm import final_norm

# RMSNorms of transformers that compute ops/final_norm.py's formula, by their module.
_NORMS = {module: kind.replace("DecoderLayer", "RMSNorm") for module, kind in SUPPORTED.items()}


class FinalNorm(nn.Module):
    """Mixin before an RMSNorm's own class."""

    weight: nn.Parameter
    variance_epsilon: float
    overcoat_fused = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., H) -> (..., H)."""
        # With a weight of another dtype the original returns that of both.
        if not self.overcoat_fused or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return final_norm(hidden_states, self.weight, float(self.variance_epsilon))


def install_final_norm(causal: nn.Module) -> None:
    """Fuse the final norm of a supported causal model, in place, if it is one of these and as transformers made it."""
    norm = _norm_of(causal)
    if norm is not None:
        original: Any = original_class(norm)
        if _is_plain(norm, original):
            norm.__class__ = fused_class(original)


def remove_final_norm(causal: nn.Module) -> None:
    """Undo `install_final_norm`."""
    norm = _norm_of(causal)
    if norm is not None:
        original: Any = original_class(norm)
        if type(norm) is fused_class(original):
            norm.__class__ = original


@contextlib.contextmanager
def fused_final_norm(causal: nn.Module) -> Iterator[None]:
    """Switch on what `install_final_norm` has installed."""
    norm = causal.get_submodule("model.norm")
    if not isinstance(norm, FinalNorm):
        yield
        return
    norm.overcoat_fused = True
    try:
        yield
    finally:
        norm.overcoat_fused = False


def _is_plain(module: nn.Module, original: Any) -> bool:
    """Whether a module is as its class `original` made it, its forward not replaced on the object."""
    return type(module) is original and "forward" not in vars(module)


def _norm_of(causal: nn.Module) -> Any:
    """The final norm, if it is of a kind that can be fused, or None."""
    norm: Any = causal.get_submodule("model.norm")
    original: Any = original_class(norm)
    return norm if _NORMS.get(original.__module__) == original.__name__ else None


@functools.cache
def fused_class(original: Any) -> Any:
    """The subclass of an RMSNorm's class that is fused while training."""
    return type(f"Fused{original.__name__}", (FinalNorm, original), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Make `Fused<Norm>` classes importable by name, so that a converted model can be unpickled."""
    for module_name, kind in _NORMS.items():
        if name == f"Fused{kind}":
            return fused_class(getattr(__import__(module_name, fromlist=[kind]), kind))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
