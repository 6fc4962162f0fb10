"""A layer's own forward, once, in FP32 on random weights: what each of its modules read and made.

`traced` catches the arguments from the model's own call. The rest of the file tells about the calls what propose.py and
propose_mixer.py ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overcoat.models import verify
from overcoat.models.clone import Cloner, UnverifiableError, twin_of
from overcoat.models.family import Family, original_class
from overcoat.models.lora import base_of
from overcoat.models.refusals import is_conv1d


class Event(NamedTuple):
    """A call of a module: its first input and its result, in their order."""

    path: str
    module: Any
    x: Tensor
    y: Tensor


class Trace(NamedTuple):
    """A layer's own forward: x (B, S, H) -> y, and what its modules did."""

    layer: Any
    x: Tensor
    y: Tensor
    events: list[Event]
    embeddings: Any
    mask: Any
    config: Any
    results: int
    given: tuple[str, ...]


def traced(model: nn.Module, name: str, layer: Any, blank: Family) -> Trace:
    owner_name, _, place = name.rpartition(".")
    owner_name, _, stack = owner_name.rpartition(".")
    owner: Any = model.get_submodule(owner_name) if stack and place.isdigit() else None
    if owner is None or not isinstance(getattr(owner, stack, None), nn.ModuleList):
        raise UnverifiableError("the model's own call of the layer is not known")
    device = torch.device("cpu")
    configs: dict[int, Any] = {}
    is_large = sum(p.numel() for p in layer.parameters()) > verify.LARGE
    clone = twin_of(layer, configs) if is_large else Cloner(device, configs).layer(layer)
    for part in clone.modules():
        vars(part)["training"] = False  # rates of dropout are refused by name, later
    scene = verify.scenes_of(owner, blank)["several rows"]
    given = verify.caught_call(owner, blank, stack, int(place), scene, device, configs)
    names = tuple(name for name, value in given.items() if value is not None)
    if isinstance(given.get("attention_mask"), Tensor) and given["attention_mask"].dim() == 2:
        given["attention_mask"] = None
    width = verify.width_of(owner, clone)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((scene.rows, verify.LENGTH, width), generator=generator)
    events: list[Event] = []
    watched = {path: part for path, part in clone.named_modules() if path}
    for path, part in watched.items():
        vars(part)["forward"] = _watched(path, part, events)
    try:
        with torch.no_grad():
            y = original_class(clone).forward(clone, x.clone(), **{n: verify.detached(v) for n, v in given.items()})
    except Exception as error:
        raise UnverifiableError(f"its own forward could not run in FP32 ({error!r:.80})") from error
    finally:
        for part in watched.values():
            del vars(part)["forward"]
    results = len(y) if isinstance(y, tuple) else 0
    y = y[0] if isinstance(y, tuple) else y
    config = next((part.config for part in clone.modules() if hasattr(part, "config")), getattr(owner, "config", None))
    return Trace(
        clone, x, y, events, given.get("position_embeddings"), given.get("attention_mask"), config, results, names
    )


def _watched(path: str, part: Any, events: list[Event]) -> Callable[..., Any]:
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        x = None if first is None else first.detach().clone()
        y = own(*args, **kwargs)
        result = y[0] if isinstance(y, tuple) and y else y
        if x is not None and isinstance(result, Tensor):
            events.append(Event(path, part, x, result.detach().clone()))
        return y

    return forward


def shape_of(linear: Any) -> tuple[int, int]:
    """How many outputs and inputs a linear layer has."""
    base = base_of(linear)
    rows, columns = base.weight.shape
    return (columns, rows) if is_conv1d(base) else (rows, columns)


def parent(path: str) -> str:
    return path.rpartition(".")[0]


def same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.shape[-1] == b.shape[-1] and torch.equal(a.reshape(b.shape), b)
