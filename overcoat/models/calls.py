"""Calls of a layer: rows of several kinds, and the arguments that its model's own forward makes of them.

The layers' owner runs with weights of zeros, in which no number matters, and its layers write down what they are given:
rotary tables, masks (padded, packed, windowed), positions. Where that cannot be done the arguments are made up.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.models.clone import Cloner, UnverifiableError
from overcoat.models.decoder import attention_of
from overcoat.models.family import Family, original_class
from overcoat.models.masks import window_of
from overcoat.models.towers import count_of, patches_of, sizes_of

ROWS, LENGTH = 3, 26  # tokens of a row: more than any window of the clone
DOCUMENTS = [0, 7, 12, LENGTH]  # where they begin in a packed row, and its end


class Call(dict[str, Any]):
    """The arguments of a layer without its input. dims: of the input: 3, or 2 where it is (T, H)."""

    dims = 3


class UncallableError(UnverifiableError):
    """The model's own call of the layer cannot be caught; says why."""


class _CaughtError(Exception):
    """All layers of a forward have been called."""


class Scene(NamedTuple):
    """Rows that the model is given. real: bool (B, S), tokens that are no padding."""

    rows: int
    given: dict[str, Any]
    real: Tensor


EVERY = torch.ones(ROWS, LENGTH, dtype=torch.bool)
PLAIN_SCENES = {"one row": Scene(1, {}, EVERY[:1]), "several rows": Scene(ROWS, {}, EVERY)}


def scenes_of(owner: Any, family: Family) -> dict[str, Scene]:
    """Return the rows that the owner can be given, by title: one row and several, padded, packed, far from position 0,
    positions of images; of a tower one image and several."""
    if sizes := sizes_of(owner):
        counts = {title: count_of(given) for title, given in sizes.items()}
        return {title: Scene(1, given, torch.ones(1, counts[title]).bool()) for title, given in sizes.items()}
    accepted = inspect.signature(original_class(owner).forward).parameters
    found = dict(PLAIN_SCENES)
    if "attention_mask" in accepted and "inputs_embeds" in accepted:
        real = torch.arange(LENGTH) >= torch.tensor([[0], [5], [11]])
        found["padding"] = Scene(ROWS, {"attention_mask": real.long()}, real)
    longest = getattr(getattr(owner, "config", None), "max_position_embeddings", None) or 0
    if "position_ids" in accepted and family.proposed and longest > LENGTH:  # what only grows far from 0
        found["last positions"] = Scene(1, {"position_ids": torch.arange(longest - LENGTH, longest)[None]}, EVERY[:1])
    rope = getattr(getattr(owner, "config", None), "rope_parameters", None) or {}
    if "position_ids" in accepted and "mrope_section" in rope:  # in time, by row and by column
        positions = torch.arange(LENGTH) // torch.tensor([1, 2, 3])[:, None, None]
        found["positions in images"] = Scene(1, {"position_ids": positions}, EVERY[:1])
    if "position_ids" in accepted and not family.encoder:
        cuts = torch.tensor(DOCUMENTS)
        positions = torch.cat([torch.arange(int(count)) for count in cuts.diff()])[None]
        found["packed documents"] = Scene(1, {"position_ids": positions}, EVERY[:1])
    return found


def caught_call(
    owner: Any, family: Family, stack: str, place: int, scene: Scene, device: torch.device, configs: dict[int, Any]
) -> Call:
    """Return the arguments, without hidden_states, with which the owner's own forward calls the layer at `place`."""
    for results in range(4):  # how many a layer returns, in a tuple
        try:
            return _caught_call(owner, family, stack, place, scene, device, configs, results)
        except _TakenError as error:
            wrong = error
    raise UncallableError(str(wrong)) from wrong


class _TakenError(Exception):
    """The owner's forward cannot take what its layers gave."""


def _caught_call(
    owner: Any,
    family: Family,
    stack: str,
    place: int,
    scene: Scene,
    device: torch.device,
    configs: dict[int, Any],
    results: int,
) -> Call:
    cloner = Cloner(device, configs, zeros=True)
    layers = list(getattr(owner, stack))
    caught: dict[int, dict[str, Any]] = {}
    clone = _with_recorders(owner, stack, cloner, caught, results)
    given = {name: x.to(device) for name, x in scene.given.items()}
    inputs = _inputs_of(owner, family, layers[place], scene, device, given)
    if inputs is None:
        return Call()  # layers of an owner that takes images get hidden_states alone
    for each in inputs:
        try:
            original_class(owner).forward(clone, **each, **given)
        except _CaughtError:
            break
        except Exception as error:
            if each is inputs[-1]:
                kind = _TakenError if caught else UncallableError
                raise kind(f"{type(owner).__name__} could not be called with made-up rows ({error!r:.80})") from error
    if place not in caught:
        raise UncallableError(f"{type(owner).__name__} did not call the layer")
    if family.rotary and caught[place].get("position_embeddings") is None:
        raise UncallableError(f"{type(owner).__name__} is given the rotation from outside")
    first_name = tuple(inspect.signature(original_class(layers[place]).forward).parameters)[1]
    call = Call({name: value for name, value in caught[place].items() if name != first_name})
    call.dims = caught[place][first_name].dim()
    return call


def _with_recorders(owner: Any, stack: str, cloner: Cloner, caught: dict[int, dict[str, Any]], results: int) -> Any:
    """Return a clone of the owner whose layers write down what they are given, until all have been called."""
    clone, layers = cloner.layer(owner, owned=False), list(getattr(owner, stack))

    def recorder(index: int) -> Callable[..., Tensor]:
        names = tuple(inspect.signature(original_class(layers[index]).forward).parameters)[1:]

        def record(*args: Any, **kwargs: Any) -> Any:
            caught[index] = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(caught) == len(layers):
                raise _CaughtError
            hidden = caught[index][names[0]]
            return (hidden, *(None,) * (results - 1)) if results else hidden

        return record

    fakes = []
    for index, layer in enumerate(layers):
        fake = cloner.layer(layer, owned=False)
        vars(fake)["forward"] = recorder(index)
        fakes.append(fake)
    others = {name: part for name, part in owner._modules.items() if name != stack}
    modules = {name: None if part is None else cloner.layer(part) for name, part in others.items()}
    modules[stack] = nn.ModuleList(fakes)
    vars(clone)["_modules"] = modules
    # transformers' hooks that record outputs (router_logits) would go to the layers' own modules, once for each call.
    vars(clone)["_output_capturing_hooks_installed"] = True
    return clone


def _inputs_of(
    owner: Any, family: Family, layer: Any, scene: Scene, device: torch.device, given: dict[str, Any]
) -> Optional[list[dict[str, Tensor]]]:
    """Return inputs to try in turn, by the names of the owner's forward; None: there are none to make. Adds what goes
    with them to `given`."""
    accepted = inspect.signature(original_class(owner).forward).parameters
    first = "inputs_embeds" if "inputs_embeds" in accepted else "hidden_states"
    takes_sizes = bool(sizes_of(owner))
    if first not in accepted and not family.rotary and not takes_sizes and not required_by(layer):
        return None
    if first not in accepted and not takes_sizes:
        raise UncallableError(f"{type(owner).__name__} cannot be called with made-up rows")
    rows = torch.zeros(*scene.real.shape, width_of(owner, layer), device=device, dtype=torch.float32)
    if takes_sizes:
        return [{first: rows[0]}] if first == "inputs_embeds" else list(patches_of(owner, rows.shape[1], device))
    if "use_cache" in accepted or "kwargs" in accepted:
        given["use_cache"] = False
    return [{first: rows}]


def required_by(layer: Any) -> tuple[str, ...]:
    """Return what a layer's forward must be given beside its input."""
    named = tuple(inspect.signature(original_class(layer).forward).parameters.values())[2:]
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(each.name for each in named if each.default is each.empty and each.kind not in open_ended)


def made_up(clone: Any, family: Family, scene: Scene, half: bool, device: torch.device) -> Call:
    """Return arguments by the names that the layer's own forward has for them: any angles, a causal mask with the
    layer's window or, for an encoder, one of two images."""
    names = {*inspect.signature(original_class(clone).forward).parameters, *family.given}
    attends = attention_of(family.branches(clone, scene.rows))
    window = window_of(attends.owner) if attends is not None else 0
    places = torch.arange(LENGTH, device=device)
    given = Call()
    distance = places[:, None] - places
    if family.encoder:
        visible = (places[:, None] < DOCUMENTS[1]) == (places < DOCUMENTS[1])
    else:
        visible = (distance >= 0) & (distance < (window or LENGTH))
    if "cu_seqlens" in names:
        given["cu_seqlens"] = torch.tensor([0, DOCUMENTS[1], LENGTH], dtype=torch.int32, device=device)
        given.dims = 2
    elif "attention_mask" in names and "attention_mask" not in family.without:
        given["attention_mask"] = torch.zeros(visible.shape, device=device).masked_fill(~visible, -math.inf)[None, None]
    if "position_ids" in names or family.q_scale is not None:
        given["position_ids"] = places.expand(scene.rows, -1)
    if family.rotary:
        generator = torch.Generator(device).manual_seed(2)
        heads = None if attends is None else attends.mixer.heads
        columns = family.columns if heads is None else heads.rotated or heads.width
        angles = torch.rand(LENGTH, columns // 2, generator=generator, device=device) * 6.0
        if not half:
            twice = heads is not None and heads.rope_repeated
            angles = angles.repeat_interleave(2, -1) if twice else torch.cat((angles, angles), -1)
        tables: Any = (angles.cos(), angles.sin())
        given["position_embeddings"] = tables if family.encoder else tuple(x[None] for x in tables)
    return given


def width_of(owner: Any, layer: Any) -> int:
    """Return the hidden width that the configuration of the layer or of its owner says."""
    config = next((part.config for part in (*layer.modules(), owner) if hasattr(part, "config")), None)
    if config is None:
        raise UnverifiableError("the layer has no configuration that says how wide it is")
    return int(config.hidden_size)


def detached(value: Any) -> Any:
    """Return a copy of an argument, tensors in tuples and lists included."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(detached, value))
    return value.clone() if isinstance(value, Tensor) else value
