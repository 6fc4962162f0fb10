"""Verify by numbers, at `convert`, that a layer computes what the proposed block computes.

A family (family.py) proposes a block. Here the layer's own forward runs in FP32 beside `block.reference` of that block,
on arguments caught from the model's own forward: one row, several rows with padding, packed documents, each longer
than a layer's window. Compared are the result less the input, and the input's gradient less the result's.

    relative error <= 1e-5, 100 dB

FP32 rounds to 6e-8 (144 dB). Sums of many terms, in another order on either side, leave 119 dB and more in all
families; a wrong eps, activation, multiplier or rotation leaves 87 dB or less. 100 dB lies between. BF16 leaves 53.

The layer itself is not touched. Its clone shares no parameter: the clone's are random numbers of the same shapes, so
that weights of zero or one (fresh norms, biases, LoRA's B) hide nothing, and weights that are not there (on the meta
device, sharded) are not needed. A layer that is large for its device is built anew from a small configuration of the
same kind ("twin"). What was found holds for all layers of one kind (`_kind`) in this process.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.spec import Block, Tables
from overcoat.models.decoder import as_called, block_of, norm_of, rotation_of
from overcoat.models.family import Family, original_class
from overcoat.models.fingerprint import CALLED, HARMLESS_HOOKS, HOOKS, called_by_name, has_hooks
from overcoat.models.lora import is_lora
from overcoat.models.masks import check_mask, window_of

LIMIT_DB = 100.0
ROWS, LENGTH, WINDOW = 3, 26, 9  # tokens of a row: more than any window of the clone
DOCUMENTS = [0, 7, 12, LENGTH]  # where they begin in a packed row, and its end
LARGE = 4_000_000  # parameters that a CPU multiplies in 0.1 s
DIFFERS = "its own forward in FP32 agrees with the proposed block only"
PLAIN = (int, float, bool, str, type(None), tuple, list, dict, torch.dtype)


class Verified(NamedTuple):
    """Result of a verification: decibels of the worst comparison, or the reason why there was none. twin: of a small
    layer."""

    decibels: Optional[float] = None
    reason: Optional[str] = None
    compared: str = ""
    twin: bool = False

    @property
    def difference(self) -> Optional[str]:
        """Return what says that the layer computes something else than the block, None if it does not."""
        if self.decibels is None or self.decibels >= LIMIT_DB:
            return None
        return f"{DIFFERS} to {self.decibels:.0f} dB, below {LIMIT_DB:.0f} ({self.compared})"


class UnverifiableError(Exception):
    """The comparison cannot be made; says why."""


class _CaughtError(Exception):
    """All layers of a forward have been called."""


_found: dict[Any, Verified] = {}


def verify(model: nn.Module, name: str, family: Family) -> Verified:
    """Return how closely the layer `name` of a model agrees with the block that `family` proposes for it."""
    layer = model.get_submodule(name)
    key = _kind(layer, family)
    if key is None:
        _found.pop(None, None)
    if key not in _found:
        with _undisturbed():
            try:
                _found[key] = _verify(model, name, layer, family)
            except UnverifiableError as error:
                _found[key] = Verified(reason=str(error))
            except Exception as error:  # a check that cannot run must not stop the conversion
                _found[key] = Verified(reason=f"{error!r:.80}")
    return _found[key]


def _verify(model: nn.Module, name: str, layer: Any, family: Family) -> Verified:
    owner_name, _, place = name.rpartition(".")
    owner_name, _, stack = owner_name.rpartition(".")
    owner: Any = model.get_submodule(owner_name) if stack and place.isdigit() else None
    if owner is None or not isinstance(getattr(owner, stack, None), nn.ModuleList):
        raise UnverifiableError("the model's own call of the layer is not known")
    if not original_class(layer).__module__.startswith("transformers."):
        raise UnverifiableError("only transformers' layers are called here")
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    is_large = sum(p.numel() for p in layer.parameters()) > LARGE
    twin = is_large and (device.type == "cpu" or not _fits(layer, device))
    configs: dict[int, Any] = {}
    clone = _twin(layer, configs).to(device) if twin else Cloner(device, configs).layer(layer)
    worst, compared = math.inf, ""
    for title, given in _scenes(owner, family).items():
        arguments = _caught(owner, family, stack, int(place), given, device, configs)
        for how, found in _compare(clone, family, layer, arguments, given).items():
            if not found >= worst:
                worst, compared = found, f"{how}, {title}"
    return Verified(worst, None, compared, twin)


# ---- the clone ---------------------------------------------------------------------------------------------------


class Cloner:
    """Makes modules like others, with their classes, attributes and hooks, and random parameters in FP32 on a device.

    configs: by `id` of a configuration the copy that clones get instead: a short window, attention that FP32 and every
        device has. zeros: parameters of zeros that take no memory, where no number matters.
    """

    def __init__(self, device: torch.device, configs: dict[int, Any], zeros: bool = False) -> None:
        self.device, self.configs, self.zeros = device, configs, zeros
        self.made: dict[int, Any] = {}
        self.generator = torch.Generator(device).manual_seed(0)

    def layer(self, module: nn.Module, owned: bool = True) -> Any:
        """Return a clone of a module and of all in it; not `owned`: its own buffers and attributes alone."""
        if id(module) in self.made:
            return self.made[id(module)]
        clone: Any = object.__new__(original_class(module))
        self.made[id(module)] = clone
        own = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}
        vars(clone).update({name: self._config(value) for name, value in own.items()})
        if getattr(clone, "sliding_window", None):
            vars(clone)["sliding_window"] = min(clone.sliding_window, WINDOW)
        vars(clone)["training"] = True  # with its dropout, which is a difference
        if "gradient_checkpointing" in own:
            vars(clone)["gradient_checkpointing"] = False
        for name in HOOKS:
            vars(clone)[name] = OrderedDict(
                (key, hook)
                for key, hook in getattr(module, name).items()
                if not _origin(hook).startswith(HARMLESS_HOOKS)
            )
        vars(clone)["_buffers"] = {name: self._buffer(module, name, x) for name, x in module._buffers.items()}
        if owned:
            vars(clone)["_parameters"] = {name: self._random(name, p) for name, p in module._parameters.items()}
            vars(clone)["_modules"] = {
                name: None if part is None else self.layer(part) for name, part in module._modules.items()
            }
        if owned and is_lora(module):
            for name, part in clone.lora_B.items():
                # An addition of the base's size at most: large scores would amplify FP32's own rounding.
                part.weight.div_(max(1.0, 3.0 * abs(float(clone.scaling[name]))))
        return clone

    def _config(self, value: Any) -> Any:
        if not hasattr(value, "_attn_implementation"):
            return value
        if id(value) not in self.configs:
            self.configs[id(value)] = _short(value)
        return self.configs[id(value)]

    def _random(self, name: str, parameter: Optional[Tensor]) -> Optional[Tensor]:
        """Random weights that keep a value's size, random norms around 1, random biases."""
        if parameter is None or id(parameter) in self.made:
            return None if parameter is None else self.made[id(parameter)]
        if self.zeros:
            return nn.Parameter(torch.zeros((), device=self.device).expand(parameter.shape), requires_grad=False)
        x = torch.randn(parameter.shape, generator=self.generator, device=self.device, dtype=torch.float32)
        center = 0.0 if name.endswith("bias") else 1.0
        x = x * x.shape[-1] ** -0.5 if x.dim() > 1 else center + 0.3 * x
        self.made[id(parameter)] = nn.Parameter(x, requires_grad=False)
        return self.made[id(parameter)]

    def _buffer(self, module: Any, name: str, x: Optional[Tensor]) -> Optional[Tensor]:
        if x is None:
            return None
        if x.device.type == "meta":  # of rotary embeddings, which are made of their configuration
            if self.zeros and any(p is not None for p in module._parameters.values()):
                return torch.zeros(x.shape, device=self.device)  # an embedding's scale
            if not hasattr(module, "config"):
                raise UnverifiableError(f"the buffer {name} has no data")
            x = type(module)(config=module.config)._buffers[name]
            assert x is not None
        return x.to(self.device, torch.float32) if x.is_floating_point() else x.to(self.device)


def _origin(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def _short(config: Any) -> Any:
    """Return a copy of a configuration with a window shorter than the rows here, and attention in plain PyTorch."""
    made = copy.copy(config)
    vars(made).update({name: copy.copy(value) for name, value in vars(config).items() if isinstance(value, dict)})
    for name in ("sliding_window", "attention_window"):
        if getattr(made, name, None):
            setattr(made, name, min(getattr(made, name), WINDOW))
    if config._attn_implementation not in ("sdpa", "eager"):
        vars(made)["_attn_implementation_internal"] = "eager"
    return made


SMALL_HEADS = 4


def _twin(layer: Any, configs: dict[int, Any]) -> Any:
    """Return a small layer of the same class and configuration, but for its sizes, with random parameters."""
    config = next((part.config for part in layer.modules() if hasattr(part, "config")), None)
    index = next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), 0)
    if config is None:
        raise UnverifiableError("the layer is large, and has no configuration to make a small one of")
    small = copy.deepcopy(_short(config))
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"hidden_size": SMALL_HEADS * width, "intermediate_size": 304, "num_attention_heads": SMALL_HEADS}
    sizes["num_key_value_heads"] = SMALL_HEADS if shared in (None, heads) else SMALL_HEADS // 2
    many = {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}
    for name, size in {**sizes, **dict.fromkeys(many, SMALL_HEADS), "moe_intermediate_size": 128}.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, size)
    if getattr(small, "num_experts_per_tok", None) is not None:
        small.num_experts_per_tok = 2
    try:
        made = original_class(layer)(small, index)
    except Exception as error:
        raise UnverifiableError(f"the layer is large, and no small one could be built ({error!r:.80})") from error
    for own, other in zip(_constants(made), _constants(layer), strict=False):
        if own != other:
            raise UnverifiableError(f"the layer is large, and a small one differs from it: {own} and {other}")
    return Cloner(torch.device("cpu"), {id(small): small}).layer(made)


def _constants(layer: nn.Module) -> Iterator[Any]:
    """Yield what the modules of a layer say of themselves beside sizes: classes, eps, multipliers, windows."""
    for module in layer.modules():
        own = vars(module).items()
        yield original_class(module), {n: x for n, x in own if isinstance(x, float) and not n.startswith("overcoat")}


def _fits(layer: nn.Module, device: torch.device) -> bool:
    """True if the device has room for the layer in FP32 three times."""
    count = sum(p.numel() for p in layer.parameters())
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 12 * count


# ---- the model's own call ----------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """Rows that the model is given. real: bool (B, S), tokens that are no padding."""

    rows: int
    given: dict[str, Any]
    real: Tensor


def _scenes(owner: Any, family: Family) -> dict[str, Scene]:
    accepted = inspect.signature(original_class(owner).forward).parameters
    every = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    found = {"one row": Scene(1, {}, every[:1]), "several rows": Scene(ROWS, {}, every)}
    if "attention_mask" in accepted and "inputs_embeds" in accepted:
        real = torch.arange(LENGTH) >= torch.tensor([[0], [5], [11]])
        found["padding"] = Scene(ROWS, {"attention_mask": real.long()}, real)
    if "position_ids" in accepted and not family.encoder:
        cuts = torch.tensor(DOCUMENTS)
        positions = torch.cat([torch.arange(int(count)) for count in cuts.diff()])[None]
        found["packed documents"] = Scene(1, {"position_ids": positions}, every[:1])
    return found


def _caught(
    owner: Any, family: Family, stack: str, place: int, scene: Scene, device: torch.device, configs: dict[int, Any]
) -> dict[str, Any]:
    """Return the arguments, without hidden_states, with which the owner's own forward calls the layer at `place`."""
    cloner = Cloner(device, configs, zeros=True)
    clone = cloner.layer(owner, owned=False)
    accepted = inspect.signature(original_class(owner).forward).parameters
    caught: dict[int, dict[str, Any]] = {}
    layers = list(getattr(owner, stack))

    def recorder(index: int) -> Callable[..., Tensor]:
        names = tuple(inspect.signature(original_class(layers[index]).forward).parameters)[1:]

        def record(*args: Any, **kwargs: Any) -> Tensor:
            caught[index] = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(caught) == len(layers):
                raise _CaughtError
            hidden: Tensor = caught[index][names[0]]
            return hidden

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
    hidden = torch.zeros(scene.rows, LENGTH, _width(layers[place]), device=device, dtype=torch.float32)
    given = {name: x.to(device) for name, x in scene.given.items()}
    first = "inputs_embeds" if "inputs_embeds" in accepted else "hidden_states"
    if first not in accepted and not family.rotary:
        return {}  # layers of an owner that takes images get hidden_states alone
    if first not in accepted or "grid_thw" in accepted:
        raise UnverifiableError(f"{type(owner).__name__} cannot be called with made-up rows")
    if "use_cache" in accepted or "kwargs" in accepted:
        given["use_cache"] = False
    try:
        original_class(owner).forward(clone, **{first: hidden}, **given)
    except _CaughtError:
        pass
    except Exception as error:
        raise UnverifiableError(
            f"{type(owner).__name__} could not be called with made-up rows ({error!r:.80})"
        ) from error
    if place not in caught:
        raise UnverifiableError(f"{type(owner).__name__} did not call the layer")
    if family.rotary and caught[place].get("position_embeddings") is None:
        raise UnverifiableError(f"{type(owner).__name__} is given the rotation from outside")
    first_name = tuple(inspect.signature(original_class(layers[place]).forward).parameters)[1]
    return {name: value for name, value in caught[place].items() if name != first_name}


def _width(layer: Any) -> int:
    config = next((part.config for part in layer.modules() if hasattr(part, "config")), None)
    if config is None:
        raise UnverifiableError("the layer has no configuration that says how wide it is")
    return int(config.hidden_size)


# ---- the comparison ----------------------------------------------------------------------------------------------


def _compare(clone: Any, family: Family, layer: Any, arguments: dict[str, Any], scene: Scene) -> dict[str, float]:
    """Return dB by what was compared: the block under the mask that the layer got, and where that is plainly causal or
    packed also under the mark that `masks.causal_mask` gives instead."""
    device = next(p.device for p in clone.parameters())
    generator = torch.Generator(device).manual_seed(1)
    size = (scene.rows, LENGTH, _hidden(clone, family))
    real = scene.real.to(device)[..., None]
    x, dy = (torch.randn(size, generator=generator, device=device, dtype=torch.float32) for _ in range(2))
    dy = dy * real
    forward, mask = original_class(clone).forward, arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:  # handed on as the model was given it
        # Additive: eager attention adds what it is given, a bool mask as ones.
        hidden = ~real[..., 0].bool()[:, None, None].expand(-1, 1, LENGTH, -1)
        arguments["attention_mask"] = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -math.inf)

    def own(x: Tensor) -> Tensor:
        given = {name: _detached(value) for name, value in arguments.items()}
        result = forward(clone, x, **given)
        return result[0] if isinstance(result, tuple) else result

    try:
        expected = _delta(own, x, dy, real)
    except Exception as error:
        if any("forward" in vars(module) for module in clone.modules()):
            return {f"a forward that was replaced on an object and fails with other weights: {error!r:.80}": -math.inf}
        raise UnverifiableError(f"its own forward could not run in FP32 ({error!r:.80})") from error
    mask = check_mask(arguments.get("attention_mask"), LENGTH)
    ways: dict[str, Any] = {"its own mask": (mask, None)}
    if "attention_mask" not in scene.given and not family.encoder:
        window = window_of(family.branches(clone, scene.rows)[0].owner)
        starts = DOCUMENTS if scene.given else [LENGTH * row for row in range(scene.rows + 1)]
        # Eager attention of some models, and Qwen2.5-VL's text, do not look for documents in position_ids.
        is_seen = scene.given and mask is not None and not _sees(mask, DOCUMENTS[1], DOCUMENTS[1] - 1)
        if family.branches(clone, 1)[0].mixer.heads.causal and (is_seen or not scene.given):
            ways["starts of documents"] = (torch.tensor(starts, dtype=torch.int32, device=device), window)
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
    embeddings = given.get("position_embeddings") if family.rotary else None
    tables = Tables(*rotation_of(embeddings, x, block), mask)
    if family.q_scale is not None:
        first = block.branches[0]
        qk_norm = (*first.qk_norm, None, family.q_scale(layer, given["position_ids"]).view(-1, 1))
        block = block._replace(branches=(first._replace(qk_norm=qk_norm), *block.branches[1:]))
    result = reference.block(x.flatten(0, -2), block, tables).view(x.shape)
    for modules in branches:
        if modules.mixer is None:
            y = modules.owner(reference.norm(result, norm_of(modules.pre, family)))
            result = result + (y[0] if isinstance(y, tuple) else y)
    return result


def _delta(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function adds to x and to the gradient, of tokens that are no padding."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, dy)
    return (y.detach() - x) * real, (dx - dy) * real


def decibels(expected: Tensor, found: Tensor) -> float:
    """Return the power of `expected` by that of the difference; -inf where a number is not finite."""
    expected, found = expected.double(), found.double()
    noise, signal = float((expected - found).square().sum()), float(expected.square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal) or (signal == 0 and noise > 0):
        return -math.inf
    return 10 * math.log10(max(signal, 1e-300) / max(noise, 1e-300 + signal * 1e-20))


def _sees(mask: Tensor, query: int, key: int) -> bool:
    """True if the mask (B, heads, S, S) shows a query of the first row a key."""
    shown = mask[0, 0, query, key]
    return bool(shown) if mask.dtype == torch.bool else float(shown) > reference.HIDDEN


def _detached(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_detached, value))
    return value.clone() if isinstance(value, Tensor) else value


def _hidden(clone: Any, family: Family) -> int:
    """The layer's own width, which a twin has smaller than the model."""
    in_proj = family.branches(clone, 1)[0].in_proj[0]
    weight = getattr(in_proj, "base_layer", in_proj).weight
    return int(weight.shape[0] if type(in_proj).__name__ == "Conv1D" else weight.shape[1])


# ---- around it ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
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
            torch._C.DisableTorchFunction(),  # modes: a default device, or what is on for the moment (refusals.py)
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _kind(layer: nn.Module, family: Family) -> Any:
    """Return what decides the numbers of a layer's own forward, whatever its weights: classes, forwards, functions
    called by name, plain attributes, the configuration. None if it has hooks or forwards of its own."""
    found: list[Any] = [value for name, value in family._asdict().items() if name != "samples"]
    found += (original_class(layer).forward, *(getattr(torch.nn.functional, name) for name in CALLED))
    configs: dict[int, Any] = {}
    for module in layer.modules():
        cls, own = original_class(module), vars(module)
        if "forward" in own or has_hooks(module, HARMLESS_HOOKS):
            return None
        found += (cls, cls.forward)
        found.append(repr({n: x for n, x in own.items() if n not in SKIPPED and n[0] != "_" and isinstance(x, PLAIN)}))
        found.append(tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None))
        for value in own.values():
            if hasattr(value, "_attn_implementation"):
                configs[id(value)] = value
    for config in configs.values():
        kind = config._attn_implementation
        found += (repr(sorted((n, repr(x)) for n, x in vars(config).items())), kind, _attention(kind))
    kinds = {original_class(m).forward for m in layer.modules() if type(m).__module__.startswith("transformers.")}
    places = [place for forward in sorted(kinds, key=repr) for place in called_by_name(forward)]
    return (*found, tuple(names.get(name) for names, name in places))


SKIPPED = ("training", "layer_idx", "overcoat_recipe", "overcoat_ran", "overcoat_offload", "overcoat_eval")


def _attention(kind: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(kind) if isinstance(kind, str) else None
