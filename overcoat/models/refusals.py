"""Reasons why a layer cannot run in FP8, at conversion or later, in one line each."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn

from overcoat.block.mlp import Mlp
from overcoat.models.family import Family, Modules, class_name
from overcoat.models.fingerprint import has_hooks, known, why_all_patched, why_other_attention, why_torch_patched
from overcoat.models.lora import base_of, parts_of, why_not_plain
from overcoat.models.masks import reads_lengths, window_of

# transformers' names of the activations, and ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}
# The classes that transformers makes of them.
FUNCTIONS = {
    "silu": ("SiLUActivation", "SiLU"),
    "gelu": ("GELUActivation",),
    "gelu_tanh": ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"),
    "quick_gelu": ("QuickGELUActivation",),
    "relu2": ("ReLUSquaredActivation",),
}
# What MLPs of all families call theirs.
ACTIVATION_NAMES = ("act_fn", "act", "activation_fn", "intermediate_act_fn")

# Attributes of attention modules and MLPs that say how much is dropped.
RATES = ("attention_dropout", "residual_dropout", "dropout")
# Direct parts of a layer that are not of the family's own file.
PARTS = (nn.LayerNorm, nn.Identity, nn.Dropout, nn.Linear)
# Attention code of transformers that hands every mask to the layer, as all pairs or as flex attention's; "flash" in a
# name, also of the hub's kernels, stands for code that reads position_ids, lengths or padding instead.
ATTENTION = ("sdpa", "eager", "flex_attention", "flex_torchtitan")


def why_unsupported(layer: nn.Module, family: Family) -> Optional[str]:
    """The reason why a layer of a family cannot run in FP8, or None if it can."""
    if (reason := why_partitioned(layer)) is not None:  # its weights have no sizes that heads could be counted by
        return reason
    branches, reason = branches_of(layer, family, 1)
    if branches is None:
        return reason
    # What accelerate does to spread a model over devices. It would run, or be left out, whatever the class is.
    for module in (layer, *_modules_of(branches)):
        if "forward" in vars(module):
            return f"the forward of {_path(layer, module)} was replaced on the object: convert before"
    config: Any = getattr(branches[0].owner, "config", None)
    for mixer in (modules.mixer for modules in branches):
        if isinstance(mixer, Mlp) and mixer.activation not in FUNCTIONS:
            return f"hidden_act is {mixer.activation!r}; only {', '.join(ACTIVATIONS)} are supported"
        if mixer is not None and not isinstance(mixer, Mlp) and mixer.heads.num_q % mixer.heads.num_kv:
            return f"{mixer.heads.num_q} heads of q do not share {mixer.heads.num_kv} of k and v evenly"
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not branches[0].mixer.heads.rotated:
        return f"partial_rotary_factor is {partial}; only 1.0 is supported"
    return family.refused(layer) or why_changed(layer, family, branches) or _why_other_weights(layer, branches)


def why_partitioned(module: nn.Module) -> Optional[str]:
    """Weights that ZeRO-3 has taken away, as `deepspeed.zero.Init` does before its engine hooks the modules."""
    taken = (name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id"))
    name = next(taken, None)
    return name and f"{name} is partitioned by ZeRO-3: only the model's own code gathers it"


def _why_other_weights(layer: nn.Module, branches: tuple[Modules, ...]) -> Optional[str]:
    """Weights of another class stay in nn.Linear: quantized ones of torchao. A subclass of Parameter may be a mark."""
    for linear in (
        each for modules in branches if modules.mixer is not None for each in (*modules.in_proj, modules.out_proj)
    ):
        kind: Any = type(base_of(linear)._parameters.get("weight"))
        is_mark = issubclass(kind, nn.Parameter) and kind.__torch_function__ is nn.Parameter.__torch_function__
        if not is_mark and kind.__module__.partition(".")[0] not in ("torch", "overcoat", "builtins"):
            return f"{_path(layer, linear)}.weight is a {kind.__module__}.{kind.__name__}, not a plain tensor"
    return None


def why_replaced(layer: nn.Module, family: Family) -> Optional[str]:
    """The reason why a layer's modules or attention are not what the FP8 block computes."""
    branches, reason = branches_of(layer, family, 1)
    return reason if branches is None else why_changed(layer, family, branches)


def branches_of(layer: Any, family: Family, batch: int) -> tuple[Optional[tuple[Modules, ...]], Optional[str]]:
    """A layer's branches, or why its modules are not those of which `Family.branches` expects attributes."""
    for name, part in layer._modules.items():
        if part is not None and type(part).__module__ not in (family.module, *family.parts) and type(part) not in PARTS:
            return None, f"{name} is a {class_name(part)}, not the model's own"
    try:
        return family.branches(layer, batch), None
    except AttributeError as error:
        return None, f"a module is not what {family.layer} has there ({error})"


def _why_other_modules(layer: nn.Module, family: Family, branches: tuple[Modules, ...]) -> Optional[str]:
    for mixer, owner, in_proj, out_proj, qk_norm, pre, post, *_ in branches:
        if isinstance(mixer, Mlp):
            for part in owner._modules.values():
                if (
                    part not in in_proj
                    and part is not out_proj
                    and not isinstance(part, nn.Dropout)
                    and type(part).__name__ not in FUNCTIONS.get(mixer.activation, ())
                ):
                    return f"{_path(layer, part)} is a {class_name(part)}, not what hidden_act says"
            # Deleted as a module, an activation can be any function. PyTorch 2.11 traces no `__dict__`.
            if torch.compiler.is_compiling():
                named: Any = [(name, getattr(owner, name, None)) for name in ACTIVATION_NAMES]
            else:
                named = owner.__dict__.items()
            for name, value in named:
                if name[0] != "_" and name != "forward" and not isinstance(value, nn.Module) and callable(value):
                    return f"{_path(layer, owner)}.{name} is a function, not what hidden_act says"
        # PaliGemma's text is not causal, and its masks say what is hidden.
        elif mixer is not None and mixer.heads.causal is (
            family.encoder or bool(getattr(getattr(owner, "config", None), "use_bidirectional_attention", False))
        ):
            kind = "attention of all tokens" if mixer.heads.causal else "causal attention"
            return f"{_path(layer, owner)}.is_causal is {owner.is_causal}; only {kind} is supported"
        for linear in (*in_proj, out_proj) if mixer is not None else ():
            if type(linear) is nn.Linear:
                continue
            base = base_of(linear)
            if type(base) is not nn.Linear and not is_conv1d(base) and not _is_of(base, "Linear", family.parts):
                return f"{_path(layer, base)} is a {class_name(base)}, not nn.Linear"
            variant = why_not_plain(linear) if base is not linear else None
            if variant is not None:
                return f"{_path(layer, linear)} is a {class_name(linear)} with {variant}"
        for norm in (*qk_norm, pre, post):
            if norm is None or type(norm) in (nn.LayerNorm, nn.Identity):
                continue
            if family.norm is None or not _is_of(norm, family.norm, (family.module, *family.parts)):
                return f"{_path(layer, norm)} is a {class_name(norm)}, not the model's own norm"
    return None


def why_changed(layer: nn.Module, family: Family, branches: tuple[Modules, ...]) -> Optional[str]:
    """Return what a layer's modules, hooks or attention compute beside the FP8 block, or None."""
    reason = _why_other_modules(layer, family, branches) or _why_dropout(layer, branches)
    if reason is not None:
        return reason
    # Compiled code was traced with what was there.
    is_compiled = torch.compiler.is_compiling()
    own: Any = getattr(layer, "overcoat_own", type(layer))
    if (reason := why_torch_patched()) is not None:
        return reason
    if not is_compiled and own.forward not in known and (reason := why_all_patched(own)):
        return reason
    # A hook on a module whose forward the FP8 block stands in for would not run.
    for module in _modules_of(branches):
        hooks = module._forward_hooks or module._forward_pre_hooks
        if (hooks or module._backward_hooks or module._backward_pre_hooks) and has_hooks(module):
            return f"{_path(layer, module)} has hooks, which the FP8 block would not run"
        if not is_compiled and "forward" in vars(module):
            return f"the forward of {_path(layer, module)} was replaced on the object"
        if not is_compiled and (cls := type(module)).forward not in known and (reason := why_all_patched(cls)):
            return reason
    if family.inputs is not None:  # its attention is what `refused` accepted
        return None
    config: Any = branches[0].owner.config
    kind, owner = config._attn_implementation, branches[0].owner
    if kind not in ATTENTION:
        if not reads_lengths(config):
            return f"attn_implementation is {kind!r}; only {', '.join(ATTENTION)} and kinds of flash are known"
        if family.encoder and window_of(owner):
            return f"attn_implementation is {kind!r}, whose layers get no mask for their window: use sdpa"
    if not family.encoder and getattr(config, "is_causal", True) is False:
        return "config.is_causal is False; only causal attention is supported"
    return None if is_compiled else why_other_attention(kind, type(owner).forward)


def _why_dropout(layer: nn.Module, branches: tuple[Modules, ...]) -> Optional[str]:
    """The first rate of dropout above 0 in the modules whose forward the block replaces, or in their parts, as it is
    now: rates can be set after the conversion."""
    found = [layer]
    for modules in branches:
        if modules.mixer is not None:
            found += (modules.owner, *modules.around)
    for module in found:
        own = module.__dict__
        for name in RATES:
            if rate := own.get(name):
                place = name if name != "dropout" else f"{_path(layer, module)}.{name}"
                return f"{place} is {rate}; only 0 is supported"
        for part in own["_modules"].values():
            if part is not None and (rate := part.__dict__.get("p") or part.__dict__.get("drop_prob")):
                name = "p" if isinstance(part, nn.Dropout) else "drop_prob"
                return f"{_path(layer, part)}.{name} is {rate}; only 0 is supported"
    return None


def _modules_of(branches: tuple[Modules, ...]) -> list[Any]:
    found: list[Any] = []
    for mixer, owner, in_proj, out_proj, qk_norm, pre, post, layer_scale, _, around, *_ in branches:
        if mixer is None:  # its own hooks run
            found += [module for module in (pre, post) if module is not None]
            continue
        parts = owner._modules.values() if isinstance(mixer, Mlp) else (*in_proj, *qk_norm)  # an MLP's activation, too
        adapted = [
            part for linear in (*in_proj, out_proj) if type(linear) is not nn.Linear for part in parts_of(linear)
        ]
        modules = (owner, *parts, *adapted, out_proj, pre, post, layer_scale, *around)
        found += [module for module in modules if isinstance(module, nn.Module)]
    return found


def _is_of(module: Any, name: str, modules: tuple[str, ...]) -> bool:
    return type(module).__name__ == name and type(module).__module__ in modules


def is_conv1d(linear: Any) -> bool:
    return (type(linear).__module__, type(linear).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _path(layer: nn.Module, module: Any) -> str:
    return next((name for name, part in layer.named_modules() if part is module and name), "the layer")
