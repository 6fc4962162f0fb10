"""Overcoat: train large language models in FP8 with little memory and much speed (COAT, arXiv 2410.19313).

    overcoat.convert(model)                                   # FP8 layers, in place
    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)   # 8-bit moments

README.md has a complete example; docs/architecture.md explains how data flows.
"""

import importlib
from typing import TYPE_CHECKING, Any

from overcoat.version import VERSION

if TYPE_CHECKING:
    from overcoat import memory
    from overcoat.distributed.context import context_parallel
    from overcoat.distributed.fp8_all_gather import fp8_all_gather
    from overcoat.models.convert import Report, convert
    from overcoat.models.fp8_weights import fp8_state_dict
    from overcoat.models.recording import record_ranges, record_scores
    from overcoat.optim.adamw import AdamW
    from overcoat.optim.muon import Muon, muon_groups
    from overcoat.optim.release import release_gradients
    from overcoat.recipe import Recipe
    from overcoat.streaming.stream import stream

__version__ = VERSION

__all__ = [
    "AdamW",
    "Muon",
    "Recipe",
    "Report",
    "context_parallel",
    "convert",
    "fp8_all_gather",
    "fp8_state_dict",
    "memory",
    "muon_groups",
    "record_ranges",
    "record_scores",
    "release_gradients",
    "stream",
]

# Where each name is, imported when it is first used: PyTorch takes seconds, `overcoat --help` needs none of it.
_PLACES = {
    "AdamW": "optim.adamw",
    "Muon": "optim.muon",
    "Recipe": "recipe",
    "Report": "models.convert",
    "context_parallel": "distributed.context",
    "convert": "models.convert",
    "fp8_all_gather": "distributed.fp8_all_gather",
    "fp8_state_dict": "models.fp8_weights",
    "muon_groups": "optim.muon",
    "record_ranges": "models.recording",
    "record_scores": "models.recording",
    "release_gradients": "optim.release",
    "stream": "streaming.stream",
}


def __getattr__(name: str) -> Any:
    if name == "memory":
        return importlib.import_module("overcoat.memory")
    if name not in _PLACES:
        raise AttributeError(f"module 'overcoat' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"overcoat.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
