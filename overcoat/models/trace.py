"""A layer's own forward, once, in FP32 on random weights: what each of its modules read and made.

`traced` catches the arguments from the model's own call. The other functions answer questions of propose.py and
propose_mixer.py about the recorded calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.models import calls, verify
from overcoat.models.clone import Cloner, UnverifiableError, config_of, twin_of
from overcoat.models.family import INPUT, REST, Argument, Family, original_class
from overcoat.models.lora import base_of
from overcoat.models.refusals import is_conv1d


class Event(NamedTuple):
    """A call of a module: its first input and its result, in their order. call, results: as `Modules` has
    them; call None where an argument was made on the way."""

    path: str
    module: Any
    x: Tensor
    y: Tensor
    call: Optional[tuple[Argument, ...]]
    results: int


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
    without: tuple[str, ...]


def traced(model: nn.Module, name: str, layer: Any, blank: Family) -> Trace:
    """Return the trace of the layer `name`, with the arguments of the model's own call; made-up ones if that cannot be
    caught and the layer must be given lengths or a mask alone.

    Raises:
        UnverifiableError: neither can be had, or its own forward does not run in FP32.
    """
    owner_name, _, place = name.rpartition(".")
    owner_name, _, stack = owner_name.rpartition(".")
    owner: Any = model.get_submodule(owner_name) if stack and place.isdigit() else None
    if owner is None or not isinstance(getattr(owner, stack, None), nn.ModuleList):
        raise UnverifiableError("the model's own call of the layer is not known")
    # Where the layer's own kernels run.
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    configs: dict[int, Any] = {}
    is_large = sum(p.numel() for p in layer.parameters()) > verify.LARGE
    clone = twin_of(layer, configs).to(device) if is_large else Cloner(device, configs).layer(layer)
    for part in clone.modules():
        vars(part)["training"] = False  # rates of dropout are refused by name, later
    scene = list(calls.scenes_of(owner, blank).values())[1]  # several rows, or images
    try:
        given = calls.caught_call(owner, blank, stack, int(place), scene, device, configs)
        without = tuple(name for name, value in given.items() if value is None)
    except calls.UncallableError:
        if not (needed := set(calls.required_by(layer))) or needed - {"cu_seqlens", "attention_mask"}:
            raise
        scene, without = calls.PLAIN_SCENES["one row"], ()
        given = calls.made_up(clone, blank, scene, False, device)
        if "attention_mask" in given:  # without one, `is_causal` shows; verified with one
            given["attention_mask"] = None
    names = tuple(name for name, value in given.items() if value is not None)
    named = tuple(inspect.signature(original_class(layer).forward).parameters)[2:]
    if isinstance(given.get("attention_mask"), Tensor) and given["attention_mask"].dim() == 2:
        given["attention_mask"] = None
    width = calls.width_of(owner, clone)
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn((*scene.real.shape, width), generator=generator, device=device)
    events: list[Event] = []
    own = inspect.signature(original_class(layer).forward).parameters.values()
    passed = {each.name: each.default for each in own if each.default is not each.empty}  # what calls may leave out
    passed |= {name: calls.detached(value) for name, value in given.items()}
    watched = {path: part for path, part in clone.named_modules() if path}
    for path, part in watched.items():
        vars(part)["forward"] = _watched(path, part, events, passed, named)
    try:
        with torch.no_grad():
            y = original_class(clone).forward(clone, x.clone() if given.dims == 3 else x[0].clone(), **passed)
    except Exception as error:
        raise UnverifiableError(f"its own forward could not run in FP32 ({error!r:.80})") from error
    finally:
        for part in watched.values():
            del vars(part)["forward"]
    results = len(y) if isinstance(y, tuple) else 0
    y = (y[0] if isinstance(y, tuple) else y).view(x.shape)
    config = config_of(clone)[0] or getattr(owner, "config", None)
    embeddings, mask = given.get("position_embeddings"), given.get("cu_seqlens", given.get("attention_mask"))
    return Trace(clone, x, y, events, embeddings, mask, config, results, names, without)


def _watched(
    path: str, part: Any, events: list[Event], passed: dict[str, Any], named: tuple[str, ...]
) -> Callable[..., Any]:
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        x = None if first is None else first.detach().clone()
        y = own(*args, **kwargs)
        result = y[0] if isinstance(y, tuple) and y else y
        if x is not None and isinstance(result, Tensor):
            results = len(y) if isinstance(y, tuple) else 0
            call = _call_of(part, args, kwargs, passed, named)
            events.append(Event(path, part, x, result.detach().clone(), call, results))
        return y

    return forward


def _call_of(
    part: Any, args: tuple[Any, ...], kwargs: dict[str, Any], passed: dict[str, Any], named: tuple[str, ...]
) -> Optional[tuple[Argument, ...]]:
    """Return where a module's arguments came from, as `Modules.call`; None where one was made on the way."""
    call: list[Argument] = []
    own = list(inspect.signature(original_class(part).forward).parameters.values())[1:]
    is_open = any(each.kind is each.VAR_KEYWORD for each in own)
    found = False
    for place, (name, value) in enumerate((*((None, each) for each in args), *kwargs.items())):
        known = name or (own[place].name if place < len(own) else "")
        same = [key for key, each in passed.items() if each is value]
        is_shared = isinstance(value, (bool, int, str, type(None)))  # one object, whoever passes it
        if is_shared and same and known not in same:
            return None
        source = known if known in same else same[0] if same else None
        if source is not None and source == name and source not in named and is_open:
            continue  # with the rest
        if isinstance(value, Tensor) and source is None and not found:
            call.append(Argument(name, INPUT))
            found = True
        elif source is not None or isinstance(value, (bool, str, type(None))):  # a number may be the rows' own
            call.append(Argument(name, source, value if is_shared else None))
        else:
            return None
    return (*call, Argument(None, REST)) if is_open else tuple(call)


def shape_of(linear: Any) -> tuple[int, int]:
    """How many outputs and inputs a linear layer has."""
    base = base_of(linear)
    rows, columns = base.weight.shape
    return (columns, rows) if is_conv1d(base) else (rows, columns)


def parent(path: str) -> str:
    """Return the path of the module that a module is in."""
    return path.rpartition(".")[0]


def same(a: Tensor, b: Tensor) -> bool:
    """True if both hold the same numbers, whatever the shape in front of their last dimension."""
    return a.numel() == b.numel() and a.shape[-1] == b.shape[-1] and torch.equal(a.reshape(b.shape), b)
