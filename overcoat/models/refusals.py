"""Plain rules: what no comparison of numbers finds, and what an FP8 block would leave out in silence.

Whether a layer computes what its block computes, numbers decide (verify.py). Rules remain for what only sometimes
changes a number (dropout, hooks, masks) and for weights that are no plain tensors. Each reason is one line.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn

from overcoat.block.attention import Attention
from overcoat.block.mlp import Mlp
from overcoat.models.family import Family, Modules
from overcoat.models.fingerprint import has_hooks
from overcoat.models.lora import is_lora, parts_of, why_not_plain
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
    "relu": "relu",
}
# Attributes of attention modules and MLPs that say how much is dropped.
RATES = ("attention_dropout", "residual_dropout", "activation_dropout", "hidden_dropout", "dropout")
# Attention code of transformers that hands every mask to the layer, as all pairs or as flex attention's; "flash" in a
# name, also of the hub's kernels, stands for code that reads position_ids, lengths or padding instead.
ATTENTION = ("sdpa", "eager", "flex_attention", "flex_torchtitan")


def why_unsupported(layer: nn.Module, family: Family) -> Optional[str]:
    """Return the reason why a layer of a family cannot run in FP8, or None if its numbers may decide (verify.py)."""
    if (reason := why_partitioned(layer)) is not None:  # its weights have no sizes that heads could be counted by
        return reason
    if "forward" in vars(layer):
        return "the forward of the layer was replaced on the object: convert before"
    branches, reason = branches_of(layer, family)
    for mixer in (modules.mixer for modules in branches or ()):
        if isinstance(mixer, Mlp) and mixer.activation not in ACTIVATIONS.values():
            return f"hidden_act is {mixer.activation!r}; only {', '.join(ACTIVATIONS)} are supported"
        if isinstance(mixer, Attention) and mixer.heads.num_q % mixer.heads.num_kv:
            return f"{mixer.heads.num_q} heads of q do not share {mixer.heads.num_kv} of k and v evenly"
    return reason if branches is None else family.refused(layer) or why_unusable(layer, family, branches)


def why_partitioned(module: nn.Module) -> Optional[str]:
    """Return why a module's weights cannot be read: ZeRO-3 (`deepspeed.zero.Init`) has partitioned them; else None."""
    taken = (name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id"))
    name = next(taken, None)
    return name and f"{name} is partitioned by ZeRO-3: only the model's own code gathers it"


def branches_of(layer: Any, family: Family) -> tuple[Optional[tuple[Modules, ...]], Optional[str]]:
    """A layer's branches, or why its modules are not those of which `Family.branches` expects attributes."""
    try:
        return family.branches(layer, 1), None
    except (AttributeError, TypeError) as error:
        return None, f"a module is not what {family.layer} has there ({error})"


def why_unusable(layer: nn.Module, family: Family, branches: tuple[Modules, ...]) -> Optional[str]:
    """Return what the FP8 block would leave out of a layer, whatever its numbers are: hooks, dropout, weights that are
    no plain tensors, masks that it does not read. Compiled code asks when it is traced."""
    if (reason := _why_dropout(layer, branches)) is not None:
        return reason
    for module in _modules_of(branches):
        hooks = module._forward_hooks or module._forward_pre_hooks
        if (hooks or module._backward_hooks or module._backward_pre_hooks) and has_hooks(module):
            return f"{_path(layer, module)} has hooks, which the FP8 block would not run"
        # What accelerate does to spread a model over devices.
        if not torch.compiler.is_compiling() and "forward" in vars(module):
            return f"the forward of {_path(layer, module)} was replaced on the object"
    for modules in branches:
        for linear in (*modules.in_proj, modules.out_proj) if modules.mixer is not None else ():
            if (reason := why_not_plain(linear)) is not None:
                return f"{_path(layer, linear)} {reason}"
        owner: Any = modules.owner
        # Without `is_causal` a decoder's masks say what is hidden (PaliGemma, embeddings of text).
        is_causal = isinstance(modules.mixer, Attention) and modules.mixer.heads.causal
        if is_causal and attends_both_ways(owner, family):
            return f"{_path(layer, owner)}.is_causal is True; only attention of all tokens is supported"
    owner = next((modules.owner for modules in branches if isinstance(modules.mixer, Attention)), None)
    config = getattr(owner, "config", None)
    kind = getattr(config, "_attn_implementation", "sdpa")  # torchtitan's is what `refused` accepted
    if kind not in ATTENTION:
        if not reads_lengths(config):
            return f"attn_implementation is {kind!r}; only {', '.join(ATTENTION)} and kinds of flash are known"
        if family.encoder and window_of(owner):
            return f"attn_implementation is {kind!r}, whose layers get no mask for their window: use sdpa"
        if not getattr(owner, "is_causal", True) and not attends_both_ways(owner, family):  # packed, of a window
            return f"{_path(layer, owner)}.is_causal is False and attn_implementation {kind!r}: use sdpa"
    return None


def attends_both_ways(owner: Any, family: Family) -> bool:
    """True if a layer's family or its configuration says that a token sees those after it."""
    return family.encoder or bool(getattr(getattr(owner, "config", None), "use_bidirectional_attention", False))


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
        scales = [each for each in (layer_scale or ())[:1] if owner not in each._modules.values()]  # or of the layer
        modules = (owner, *parts, *adapted, out_proj, pre, post, *scales, *around)
        found += [module for module in modules if isinstance(module, nn.Module)]
    return found


def is_linear(module: Any) -> bool:
    """True if the module is a linear layer, or LoRA around one."""
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_lora(module)


def is_conv1d(linear: Any) -> bool:
    return (type(linear).__module__, type(linear).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _path(layer: nn.Module, module: Any) -> str:
    return next((name for name, part in layer.named_modules() if part is module and name), "the layer")
