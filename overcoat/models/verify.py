"""Verify by numbers, at `convert`, that a layer computes what the proposed block computes.

A family (family.py) proposes a block. Here the layer's own forward runs in FP32 beside `block.reference` of that block,
on arguments caught from the model's own forward: one row, several rows with padding, packed documents, each longer
than a layer's window. Compared are the result less the input, and the input's gradient less the result's. Where the
model's own call cannot be caught, and when a layer has changed since (`verify_again`), the arguments are made up.

    relative error <= 1e-5, 100 dB

FP32 rounds to 6e-8 (144 dB). Sums of many terms, in another order on either side, leave 119 dB and more in all
families; a wrong eps, activation, multiplier or rotation leaves 87 dB or less. 100 dB lies between. BF16 leaves 53.

The layer itself is not touched. Its clone shares no parameter: the clone's are random numbers of the same shapes, so
that weights of zero or one (fresh norms, biases, LoRA's B) hide nothing, and weights that are not there (on the meta
device, sharded) are not needed. A layer that is large for its device is built anew from a small configuration of the
same kind ("twin"). What was found holds for all layers of one kind (`kind_of`) in this process.

    verified to 100 dB and more       the layer trains in FP8
    less, or no comparison possible   its own forward runs; the report says which comparison or why
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.spec import Block, Norm, Tables
from overcoat.models.calls import (
    DOCUMENTS,
    LENGTH,
    PLAIN_SCENES,
    Call,
    Scene,
    UncallableError,
    caught_call,
    detached,
    made_up,
    scenes_of,
)
from overcoat.models.clone import Cloner, UnverifiableError, fits, twin_of
from overcoat.models.decoder import (
    as_called,
    as_they_are,
    attention_of,
    block_of,
    embeddings_of,
    in_turn,
    norm_eps,
    rotation_of,
)
from overcoat.models.family import Family, Modules, original_class
from overcoat.models.fingerprint import CALLED, HARMLESS_HOOKS, called_by_name, has_hooks, interfaces_in, methods_in
from overcoat.models.lora import base_of
from overcoat.models.masks import check_mask, mask_makers, window_of
from overcoat.models.refusals import is_conv1d

LIMIT_DB = 100.0
LARGE = 4_000_000  # parameters that a CPU multiplies in 0.1 s
STARTS = "starts of documents"
DIFFERS = "its own forward in FP32 agrees with the proposed block only"
PLAIN = (int, float, bool, str, type(None), tuple, list, dict, torch.dtype)


class Verified(NamedTuple):
    """Result of a verification: decibels of the worst comparison, or the reason why there was none.

    starts: whether the model's own masks were compared with those of `masks.causal_mask`. twin: of a small layer.
    made_up: on arguments that are not the model's own. trusted: known by its modules alone (torchtitan's layers, whose
        attention does not run in FP32).
    """

    decibels: Optional[float] = None
    reason: Optional[str] = None
    compared: str = ""
    starts: bool = False
    twin: bool = False
    made_up: bool = False
    trusted: bool = False

    @property
    def difference(self) -> Optional[str]:
        """Return what says that the layer computes something else than the block, None if it does not."""
        if self.trusted:
            return None
        if self.decibels is None:
            return f"it could not be verified: {self.reason}"
        if self.decibels >= LIMIT_DB:
            return None
        return f"{DIFFERS} to {self.decibels:.0f} dB, below {LIMIT_DB:.0f} ({self.compared})"


_found: dict[Any, Verified] = {}


def verify(model: nn.Module, name: str, family: Family) -> Verified:
    """Return how closely the layer `name` of a model agrees with the block that `family` proposes for it."""
    layer = model.get_submodule(name)
    owner_name, _, place = name.rpartition(".")
    owner_name, _, stack = owner_name.rpartition(".")
    owner: Any = model.get_submodule(owner_name) if stack and place.isdigit() else None
    if isinstance(getattr(owner, stack, None), nn.ModuleList):
        return _once(layer, family, owner, stack, int(place))
    return verify_again(layer, family)


def verify_again(layer: nn.Module, family: Family) -> Verified:
    """Return how closely a layer agrees with its proposed block on arguments that are made up, without its model."""
    return _once(layer, family, None, "", 0)


def _once(layer: Any, family: Family, owner: Any, stack: str, place: int) -> Verified:
    """Return what was found for this kind of layer, called by this kind of owner, or find it."""
    if family.inputs is not None:
        return Verified(reason="torchtitan's attention does not run in FP32", trusted=True)
    kind = kind_of(layer, family)
    key = (kind, None if owner is None else (original_class(owner), *mask_makers([owner]), stack))
    if kind is None or key not in _found:
        with undisturbed():
            try:
                found = _verify(layer, family, owner, stack, place)
            except UnverifiableError as error:
                found = Verified(reason=str(error))
            except Exception as error:  # a check that cannot run must not stop the conversion
                found = Verified(reason=f"{error!r:.100}")
        if kind is None:
            return found
        _found[key] = found
        _found.setdefault((kind, None), found)
    return _found[key]


def _verify(layer: Any, family: Family, owner: Any, stack: str, place: int) -> Verified:
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    is_large = sum(p.numel() for p in layer.parameters()) > LARGE
    twin = is_large and (device.type == "cpu" or not fits(layer, device))
    configs: dict[int, Any] = {}
    clone = twin_of(layer, configs).to(device) if twin else Cloner(device, configs).layer(layer)
    for modules in family.branches(clone, 1):
        if modules.mixer is None and family.proposed:
            vars(modules.owner)["forward"] = partial(_stand_in, modules.results)
    if owner is not None:
        scenes = scenes_of(owner, family)
        with contextlib.suppress(UncallableError):
            called = {
                title: caught_call(owner, family, stack, place, scene, device, configs)
                for title, scene in scenes.items()
            }
            return _worst(clone, family, scenes, called)._replace(twin=twin)
    for half in (False, True):  # tables of half a head's width (gpt-oss)
        called = {title: made_up(clone, family, scene, half, device) for title, scene in PLAIN_SCENES.items()}
        # Images of all sizes share one row.
        scenes = {title: x for title, x in PLAIN_SCENES.items() if "cu_seqlens" not in called[title] or x.rows == 1}
        try:
            return _worst(clone, family, scenes, called)._replace(starts=False, twin=twin, made_up=True)
        except UnverifiableError:
            if half or not family.rotary:
                raise
    raise AssertionError


def _stand_in(results: int, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module that runs as it is, on either side: what it computes is of no matter, and may take long."""
    x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    y = torch.sin(x.flip(-1))
    return (y, *(None,) * (results - 1)) if results else y


def _worst(clone: Any, family: Family, scenes: dict[str, Scene], called: dict[str, Any]) -> Verified:
    """Return the worst comparison of a layer and its block over all scenes."""
    worst, compared, starts = math.inf, "", False
    for title, scene in scenes.items():
        for how, found in _compare(clone, family, called[title], scene).items():
            starts = starts or STARTS in how
            if not found >= worst:
                worst, compared = found, f"{how}, {title}"
    return Verified(worst, None, compared, starts)


# ---- the comparison ----------------------------------------------------------------------------------------------


def _compare(clone: Any, family: Family, arguments: Call, scene: Scene) -> dict[str, float]:
    """Return dB by what was compared: the block under the mask that the layer got, and where that is plainly causal or
    packed also under the mark that `masks.causal_mask` gives instead."""
    device = next(p.device for p in clone.parameters())
    generator = torch.Generator(device).manual_seed(1)
    size = (*scene.real.shape, _hidden(clone, family))
    real = scene.real.to(device)[..., None]
    x, dy = (torch.randn(size, generator=generator, device=device, dtype=torch.float32) for _ in range(2))
    dy = dy * real
    forward, mask = original_class(clone).forward, arguments.get("attention_mask")
    attends = attention_of(family.branches(clone, scene.rows))
    if isinstance(mask, Tensor) and mask.dim() == 2 and attends is not None:  # handed on as the model was given it
        # Additive: eager attention adds what it is given, a bool mask as ones.
        hidden = ~real[..., 0].bool()[:, None, None].expand(-1, 1, LENGTH, -1)
        arguments["attention_mask"] = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -math.inf)

    images = arguments.get("cu_seqlens")  # of a tower that takes all images in one row, (T, H)

    def own(x: Tensor) -> Tensor:
        given = {name: detached(value) for name, value in arguments.items()}
        result = forward(clone, x if arguments.dims == 3 else x[0], **given)
        return (result[0] if isinstance(result, tuple) else result).view(x.shape)

    try:
        expected = _delta(own, x, dy, real)
    except Exception as error:
        if any("forward" in vars(module) for module in clone.modules()):
            return {f"a forward that was replaced on an object and fails with other weights: {error!r:.80}": -math.inf}
        raise UnverifiableError(f"its own forward could not run in FP32 ({error!r:.80})") from error
    mask = images
    if images is None and attends is not None:
        mask = check_mask(arguments.get("attention_mask"), LENGTH)
    ways: dict[str, Any] = {"its own mask": (mask, None)}
    positions = scene.given.get("position_ids")
    is_packed = positions is not None and bool((positions.diff() < 0).any())
    if "attention_mask" not in scene.given and not family.encoder:
        window = 0 if attends is None else window_of(attends.owner)
        starts = DOCUMENTS if is_packed else [LENGTH * row for row in range(scene.rows + 1)]
        # Eager attention of some models, and Qwen2.5-VL's text, do not look for documents in position_ids.
        is_seen = is_packed and mask is not None and not _sees(mask, DOCUMENTS[1], DOCUMENTS[1] - 1)
        if attends is not None and attends.mixer.heads.causal and (is_seen or not is_packed):
            ways[STARTS] = (torch.tensor(starts, dtype=torch.int32, device=device), window)
    found = {}
    for title, (mask, window) in ways.items():

        def proposed(x: Tensor, mask: Any = mask, window: Any = window) -> Tensor:
            return propose(clone, family, x, arguments, mask, window)

        result = _delta(proposed, x, dy, real)
        found[f"result, {title}"] = decibels(expected[0], result[0])
        found[f"input gradient, {title}"] = decibels(expected[1], result[1])
    return found


def propose(
    layer: Any,
    family: Family,
    x: Tensor,
    given: Mapping[str, Any],
    mask: Optional[Tensor],
    window: Optional[int] = None,
) -> Tensor:
    """Return the reference of the proposed block for x (B, S, H), and of what runs as it is behind it."""
    branches = family.branches(layer, x.shape[0])
    called = as_called(branches, causal=given.get("is_causal"), window=window)
    block: Block = block_of(called, family, layer)
    embeddings = embeddings_of(family, given)
    tables = Tables(*rotation_of(embeddings, x, block), mask)
    if family.q_scale is not None:
        first = block.branches[0]
        qk_norm = (*first.qk_norm, None, family.q_scale(layer, given["position_ids"]).view(-1, 1))
        block = block._replace(branches=(first._replace(qk_norm=qk_norm), *block.branches[1:]))
    named = tuple(inspect.signature(original_class(layer).forward).parameters)[2:]

    def fused(x: Tensor) -> Tensor:
        return reference.block(x.flatten(0, -2), block, tables).view(x.shape)

    def own(modules: Modules, x: Tensor) -> Tensor:
        return as_they_are(modules, family, x, {name: detached(value) for name, value in given.items()}, named)

    result = in_turn(x, branches, block.parallel, fused, own)
    return result * getattr(layer, family.factor) if family.factor else result


def _delta(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function adds to x and to the gradient, of tokens that are no padding."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, dy)
    return (y.detach() - x) * real, (dx - dy) * real


def decibels(expected: Tensor, found: Tensor) -> float:
    """Return the power of `expected` by that of the difference; -inf where a number is not finite."""
    expected, found = expected.detach().double(), found.detach().double()
    noise, signal = float((expected - found).square().sum()), float(expected.square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal) or (signal == 0 and noise > 0):
        return -math.inf
    return 10 * math.log10(max(signal, 1e-300) / max(noise, 1e-300 + signal * 1e-20))


def _sees(mask: Tensor, query: int, key: int) -> bool:
    """True if the mask (B, heads, S, S) shows a query of the first row a key."""
    shown = mask[0, 0, query, key]
    return bool(shown) if mask.dtype == torch.bool else float(shown) > reference.HIDDEN


def _hidden(clone: Any, family: Family) -> int:
    """The layer's own width, which a twin has smaller than the model."""
    base = base_of(next(each.in_proj[0] for each in family.branches(clone, 1) if each.in_proj))
    return int(base.weight.shape[0 if is_conv1d(base) else 1])


def is_rms_norm(norm: Any, plus_one: bool = False) -> bool:
    """True if a norm computes x / rms(x) * weight, or `plus_one` times 1 + weight, with its own eps."""
    with undisturbed():
        clone = Cloner(torch.device("cpu"), {}).layer(norm)
        x = torch.randn(9, clone.weight.shape[0], generator=torch.Generator().manual_seed(4))
        try:
            found, eps = original_class(norm).forward(clone, x), norm_eps(norm)
        except Exception:  # a norm that takes other inputs, or has no eps: its own forward runs, as ever
            return False
        if not isinstance(found, Tensor):
            return False
        weight = 1.0 + clone.weight if plus_one else clone.weight
        return decibels(reference.norm(x, Norm(weight, None, eps)), found) >= LIMIT_DB


# ---- around it ---------------------------------------------------------------------------------------------------


def _same(x: Any) -> Any:
    return x


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep autocast, function modes and TF32 out of the comparison, and leave random states as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.random.fork_rng(devices),
            torch.autocast("cuda", enabled=False),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.autograd.graph.saved_tensors_hooks(_same, _same),  # not those of a checkpoint around the layer
            torch._C.DisableTorchFunction(),  # modes: a default device, or what is on for the moment (refusals.py)
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def kind_of(layer: nn.Module, family: Family) -> Any:
    """Return what decides the numbers of a layer's own forward, whatever its weights: classes, forwards, functions
    called by name, plain attributes, the configuration. None if it has hooks or forwards of its own."""
    found: list[Any] = [value for name, value in family._asdict().items() if name != "samples"]
    methods = [getattr(cls, name) for cls, name in methods_in(layer)]
    found += (*methods, *(getattr(torch.nn.functional, name) for name in CALLED))
    configs: dict[int, Any] = {}
    for module in layer.modules():
        cls, own = original_class(module), vars(module)
        # Hooks on the layer itself run around its forward.
        if "forward" in own or (module is not layer and has_hooks(module, HARMLESS_HOOKS)):
            return None
        found.append(cls)
        values = {n: x for n, x in own.items() if n not in SKIPPED and not n.startswith(("_", "overcoat_"))}
        found.append(repr({n: x for n, x in values.items() if isinstance(x, PLAIN)}))
        found += [(n, x) for n, x in values.items() if isinstance(x, (FunctionType, BuiltinFunctionType))]
        found += [(n, x.__func__) for n, x in values.items() if isinstance(x, MethodType)]
        found += [(n, x.func, repr((x.args, x.keywords))) for n, x in values.items() if isinstance(x, partial)]
        found.append(tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None))
        for value in own.values():
            if hasattr(value, "_attn_implementation"):
                configs[id(value)] = value
    for config in configs.values():
        kind = config._attn_implementation
        found += (repr(sorted((n, repr(x)) for n, x in vars(config).items())), kind, _attention(kind))
    functions = [*methods, *(_attention(config._attn_implementation) for config in configs.values())]
    functions = [each for each in functions if isinstance(inspect.unwrap(each), FunctionType)]
    places = [place for each in functions for place in called_by_name(each)]
    tables = [id(names.get(name)) for each in functions for names, name in interfaces_in(each)]
    return (*found, tuple(names.get(name) for names, name in places), tuple(tables))


SKIPPED = ("training", "layer_idx")


def _attention(kind: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(kind) if isinstance(kind, str) else None
