"""Clones of layers for verification: of the same classes and attributes, with random parameters in FP32.

A clone shares no parameter with the layer, so that weights of zero or one hide nothing and weights that are not there
are not needed. A twin is a layer of the same class, built anew from a small configuration.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.models.family import original_class
from overcoat.models.fingerprint import HARMLESS_HOOKS, HOOKS
from overcoat.models.lora import is_lora
from overcoat.models.refusals import is_conv1d

WINDOW = 9  # of a clone, in tokens: fewer than the rows have that it is given


class UnverifiableError(Exception):
    """The comparison cannot be made; says why."""


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
            vars(clone)["_parameters"] = {name: self.random(name, p) for name, p in module._parameters.items()}
            vars(clone)["_modules"] = {
                name: None if part is None else self.layer(part) for name, part in module._modules.items()
            }
        if owned and is_lora(module):
            for name, part in clone.lora_B.items():
                # An addition of the base's size at most: large scores would amplify FP32's own rounding.
                part.weight.div_(max(1.0, 3.0 * abs(float(clone.scaling[name]))))
                clone.lora_dropout[name].p = 0.0  # what is dropped differs from the block's
        return clone

    def _config(self, value: Any) -> Any:
        if not hasattr(value, "_attn_implementation"):
            return value
        if id(value) not in self.configs:
            self.configs[id(value)] = shortened(value)
        return self.configs[id(value)]

    def random(self, name: str, parameter: Optional[Tensor]) -> Optional[Tensor]:
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
        if x.is_floating_point() and x.numel() == 1 and not self.zeros:  # a factor (Gemma 4), which 1 would hide
            return 0.5 + torch.rand(x.shape, generator=self.generator, device=self.device)
        if x.device.type == "meta":  # of rotary embeddings, which are made of their configuration
            if self.zeros and "inv_freq" not in name:
                return torch.zeros(x.shape, device=self.device)  # the scale of an embedding or of a layer (Gemma 4)
            if not hasattr(module, "config"):
                raise UnverifiableError(f"the buffer {name} has no data")
            x = type(module)(config=module.config)._buffers[name]
            assert x is not None
        return x.to(self.device, torch.float32) if x.is_floating_point() else x.to(self.device)


def with_parts(cloner: Cloner, module: Any, parts: dict[str, nn.Module]) -> Any:
    """Return a clone of a module, with other parts in the places of those named."""
    clone = cloner.layer(module, owned=False)
    modules = dict(module._modules)
    vars(clone)["_parameters"] = {name: cloner.random(name, p) for name, p in module._parameters.items()}
    for name in modules:
        inner = {path[len(name) + 1 :]: part for path, part in parts.items() if path.startswith(f"{name}.")}
        if name in parts:
            modules[name] = parts[name]
        elif inner:
            modules[name] = with_parts(cloner, modules[name], inner)
        elif modules[name] is not None:
            modules[name] = cloner.layer(modules[name])
    vars(clone)["_modules"] = modules
    return clone


def stand_in(module: nn.Module, configs: dict[int, Any], result: Callable[..., Any]) -> Any:
    """Return a module of the same class, attributes and parts but for lists, that notes what it is given in `given`."""
    cloner = Cloner(torch.device("cpu"), configs, zeros=True)
    cloner.made.update({id(part): nn.ModuleList() for part in module.modules() if isinstance(part, nn.ModuleList)})
    part = cloner.layer(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        vars(part)["given"] = [*args, *kwargs.values()]
        return result(*args, **kwargs)

    vars(part).update({name: OrderedDict() for name in HOOKS}, given=[], forward=forward)
    return part


def _origin(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def shortened(config: Any) -> Any:
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


def config_of(layer: Any) -> tuple[Any, int]:
    """Return a layer's configuration, or None, and its index. Where layers differ in size (Gemma 4), a model's own
    configuration refuses to name one."""
    config: Any = next((part.config for part in layer.modules() if hasattr(part, "config")), None)
    index = next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), 0)
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config, index


def twin_of(layer: Any, configs: dict[int, Any]) -> Any:
    """Return a small layer of the same class and configuration, but for its sizes, with random parameters."""
    config, index = config_of(layer)
    if config is None:
        raise UnverifiableError("the layer is large, and has no configuration to make a small one of")
    small = copy.deepcopy(shortened(config))
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
        cls = original_class(layer)
        made = cls(small, index) if len(inspect.signature(cls.__init__).parameters) > 2 else cls(small)
        _adapt(made, layer)
    except Exception as error:
        raise UnverifiableError(f"the layer is large, and no small one could be built ({error!r:.80})") from error
    for own, other in zip(_constants(made), _constants(layer), strict=False):
        if own != other:
            raise UnverifiableError(f"the layer is large, and a small one differs from it: {own} and {other}")
    return Cloner(torch.device("cpu"), {id(small): small}).layer(made)


def _adapt(made: nn.Module, layer: nn.Module) -> None:
    """Put LoRA around the linear layers of `made` that have it in `layer`, of the same class, rank and scaling."""
    for path, module in [*layer.named_modules()]:
        if is_lora(module):
            parent, _, name = path.rpartition(".")
            owner = made.get_submodule(parent)
            base: Any = owner._modules[name]
            width, height = base.weight.shape if is_conv1d(base) else base.weight.shape[::-1]
            around: Any = copy.copy(module)
            ranks = {key: part.weight.shape[0] for key, part in module.lora_A.items()}
            vars(around)["_modules"] = module._modules | {
                "base_layer": base,
                "lora_A": nn.ModuleDict({key: nn.Linear(width, rank, False) for key, rank in ranks.items()}),
                "lora_B": nn.ModuleDict({key: nn.Linear(rank, height, False) for key, rank in ranks.items()}),
                "lora_magnitude_vector": nn.ModuleDict(
                    {key: _resized(part, height) for key, part in module.lora_magnitude_vector.items()}
                ),
            }
            owner._modules[name] = around


def _resized(magnitudes: Any, size: int) -> Any:
    """Return DoRA's module with other many magnitudes."""
    made = copy.copy(magnitudes)
    vars(made)["_parameters"] = {"weight": nn.Parameter(torch.ones(size))}
    return made


def _constants(layer: nn.Module) -> Iterator[Any]:
    """Yield what the modules of a layer say of themselves beside sizes: classes, eps, multipliers, windows."""
    for module in layer.modules():
        own = vars(module).items()
        yield original_class(module), {n: x for n, x in own if isinstance(x, float) and not n.startswith("overcoat")}


def fits(layer: nn.Module, device: torch.device) -> bool:
    """True if the device has room for the layer in FP32 three times."""
    count = sum(p.numel() for p in layer.parameters())
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 12 * count
