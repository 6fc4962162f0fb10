"""`convert`: turn a model's decoder layers to FP8 and its loss to one without logits, in place.

A layer keeps its parameters, submodules, hooks and names; only its class changes, to a subclass of its own class, of
the same name, whose forward computes in FP8 while training (models/decoder.py); the model likewise, and its lm_head to
`LossHead` (models/head.py). So checkpoints, `save_pretrained`, `from_pretrained`, FSDP2 and `generate` see the model
they know.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn

from overcoat.block.attention import Attention
from overcoat.block.offload import choose_blocks
from overcoat.kernels.gemm import has_float8_tensor_cores, why_no_block_gemm
from overcoat.models.decoder import Fp8DecoderLayer, attention_of, remember
from overcoat.models.experts import Fp8Experts
from overcoat.models.family import (
    Family,
    causal_models,
    decoder_layers,
    family_of,
    mixed,
    model_spec_of,
    original_class,
    tower_path,
)
from overcoat.models.frozen import check_scaling, hold_frozen
from overcoat.models.head import LeanLossModel, install_head, remove_head, why_head_unsupported
from overcoat.models.images import multiply_patches
from overcoat.models.linear_layers import Fp8Linear, convert_linears, large_linears, restore_linears
from overcoat.models.lora import active_adapters
from overcoat.models.masks import cache_of
from overcoat.models.proposal import forget_proposed
from overcoat.models.propose import propose
from overcoat.models.propose_head import End, propose_end
from overcoat.models.refusals import why_unsupported
from overcoat.models.report import LayerReport, Report, parts_of
from overcoat.models.verify import DIFFERS, verify, verify_again
from overcoat.recipe import Recipe

FilterFn = Callable[[nn.Module, str], bool]
FILTERED = "filter_fn said no"
# Layers that cannot be exact, and why.
REFUSED = {"T5Block": "its attention adds a trained bias by relative position, whose gradient is not computed"}


def convert(
    model: nn.Module,
    recipe: Optional[Recipe] = None,
    filter_fn: Optional[FilterFn] = None,
    *,
    strict: bool = False,
    eval_fp8: bool = False,
) -> Report:
    """Convert a Hugging Face model to FP8 training, in place: its decoder layers, and the loss at its end.

    In `train()` mode converted layers compute in FP8 and keep 8-bit tensors for the backward; in `eval()` they run
    their original forward, unless `eval_fp8`. While they compute in FP8 no key/value cache is built (`use_cache` is off
    for the call unless given; with a cache, as in `generate()`, they run their original forward).

    Layers may have LoRA adapters of peft, before or after: the base in FP8, adapters in the activations' dtype.

    Given labels, the model in `train()` mode computes its loss in chunks of tokens and returns no logits; with
    `output_logits=True`, without labels and in `eval()` it returns them as ever (`models/head.py`).

    Args:
        model: any module that contains layers of transformers, of whatever class (docs/models.md), or torchtitan's
            Llama 3. Parameters are shared, names unchanged. Converting again changes the recipe.
        recipe: all numerical choices; `Recipe()` if None.
        filter_fn: `filter_fn(module, name) -> bool`; False leaves that decoder layer, or lm_head, alone.
        strict: an error instead of a warning if no layer can train in FP8.
        eval_fp8: FP8 in `eval()` too, for the reference model of DPO or GRPO: bit for bit what the policy computes.

    Returns:
        a `Report`: how each decoder layer and the head will run, or why it was left alone.

    Raises:
        TypeError: model is no module, or recipe no `Recipe`.
        ValueError: the model lies on a GPU without FP8 tensor cores (or without block-scaled GEMMs, if the recipe
            asks for them), or contains no decoder layer, or with `strict` none that trains in FP8;
            `Recipe.z_loss` without a head that can have it; `Recipe.frozen_weights` is "fp8", and no weight is frozen.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"overcoat.convert takes a model (nn.Module), not {model!r:.80}")
    if not isinstance(recipe, (Recipe, type(None))):
        raise TypeError(
            f"overcoat.convert takes a Recipe, not {recipe!r:.80}; Recipe.from_name(...) makes one of a name"
        )
    recipe = recipe or Recipe()
    report = Report(recipe)
    layers = decoder_layers(model)
    if type(model) is nn.ModuleList and any(child is layer for child in model for layer in layers.values()):
        raise ValueError(
            "overcoat.convert got a list of layers: give it the model that calls them, which must build no key/value "
            "cache while they compute in FP8"
        )
    if not layers and recipe.fp8:
        raise ValueError(
            f"{type(model).__name__} contains no decoder layer of transformers or torchtitan: give convert a model of "
            "theirs (docs/models.md)"
        )
    if recipe.fp8 or recipe.head == "fp8":
        _check_device(model, recipe)
    check_scaling(model, recipe)
    causals = list(causal_models(model))
    ends = [_head_of(path, causal, recipe, filter_fn) for path, causal in causals]
    end, others = (ends[0], ends[1:]) if ends else (None, [])
    reason = "there is no lm_head" if end is None else end.reason
    if recipe.z_loss and reason is None and others:
        reason = f"{causals[1][0]} is a second model, with a loss of its own: convert each by itself"
    if recipe.z_loss and reason is not None:
        raise ValueError(f"Recipe.z_loss = {recipe.z_loss} needs the converted loss, and {reason}; use z_loss=0")
    for name in layers:
        report.layers.append(_convert_layer(model, name, report, filter_fn, eval_fp8))
    report.layers += [_convert_other(model, name, report, filter_fn, eval_fp8) for name in _other_layers(model, layers)]
    check_converted(report, strict)
    for name in report.converted:
        report.watch(name, layers[name], model)
    _choose_offloaded(model, layers, report)
    multiply_patches(model, report.converted, eval_fp8)
    if end is not None:
        report.head = _convert_head(end, recipe)
        if report.head.converted:
            report.watch(end.name, end.causal, model)
    for other in others:
        if type(other.causal) is not original_class(other.causal):  # converted by itself: its recipe changes, too
            _convert_head(other, recipe)
    report.parts, report.weights = parts_of(model, report), hold_frozen(model, recipe)
    _forbid_cache(model, report, eval_fp8)
    return report


def check_converted(report: Report, strict: bool = True) -> None:
    """Raise (strict) or warn if the recipe is FP8 and no decoder layer trains in it."""
    reasons = dict.fromkeys(row.detail for row in report.layers if not row.converted and row.detail != FILTERED)
    wrong = [row.detail for row in report.layers if not row.converted and DIFFERS in row.detail]
    if wrong and (report.converted or report.in_linear_layers):
        warnings.warn(f"{len(wrong)} layers run their own forward: {wrong[0]}", stacklevel=3)
    if not report.recipe.fp8 or report.converted or report.in_linear_layers or not reasons:
        return
    message = f"no decoder layer trains in FP8: {'; '.join(reasons)}"
    if strict:
        raise ValueError(f"{message}; Recipe.bf16() (recipe.name=bf16) trains it as it is")
    warnings.warn(message, stacklevel=3)


def _check_device(model: nn.Module, recipe: Recipe) -> None:
    for parameter in model.parameters():
        if parameter.is_cuda and not has_float8_tensor_cores(parameter.device):
            name = torch.cuda.get_device_name(parameter.device)
            major, minor = torch.cuda.get_device_capability(parameter.device)
            raise ValueError(
                f"{name} (sm_{major}{minor}) has no FP8 tensor cores; FP8 training needs sm_89 (Ada), sm_90 (Hopper) "
                "or newer. Use Recipe.bf16() on this GPU, or only overcoat.AdamW: its 8-bit states need no FP8."
            )
        if parameter.is_cuda and recipe.linear_scaling == "block":
            reason = why_no_block_gemm(parameter.device)
            if reason is not None:
                raise ValueError(
                    f"Recipe.linear_scaling = 'block' cannot run on {parameter.device}: {reason}. "
                    "Use linear_scaling='tensor' there."
                )


class _Head(NamedTuple):
    """The model whose end it is, the last layer's name, and why the loss cannot do without logits, or None."""

    causal: nn.Module
    name: str
    reason: Optional[str]


def _head_of(path: str, causal: nn.Module, recipe: Recipe, filter_fn: Optional[FilterFn]) -> _Head:
    end = End()
    if recipe.head is not None and model_spec_of(causal) is None and (end := propose_end(causal)).spec is not None:
        vars(causal).update(overcoat_spec=end.spec, overcoat_family=end.family)
    whole, reason = model_spec_of(causal), end.reason or why_head_unsupported(causal)
    name = f"{path}.{whole.head if whole is not None else 'lm_head'}".removeprefix(".")
    if recipe.head is None:
        reason = "Recipe.head is None"
    elif reason is None and filter_fn is not None and whole is not None:
        reason = None if filter_fn(causal.get_submodule(whole.head), name) else FILTERED
    return _Head(causal, name, reason)


def _convert_layer(
    model: nn.Module, name: str, report: Report, filter_fn: Optional[FilterFn], eval_fp8: bool
) -> LayerReport:
    layer, recipe = model.get_submodule(name), report.recipe
    original = original_class(layer)
    kind = original.__name__

    restore_linears(layer)

    def left_alone(reason: str) -> LayerReport:
        if isinstance(layer, Fp8DecoderLayer):
            if type(layer) is not mixed(Fp8DecoderLayer, original):
                raise ValueError(
                    f"{name} was converted and is wrapped since, as {type(layer).__name__}: it cannot become a plain "
                    f"{kind} again ({reason}). Build the model again and convert it before wrapping"
                )
            layer.__class__ = original
        vars(layer).pop("overcoat_starts", None)
        forget_proposed(layer)
        in_fp8 = recipe.fp8 and reason != FILTERED
        return LayerReport(name, kind, False, reason, len(convert_linears(layer, recipe, eval_fp8)) if in_fp8 else 0)

    if not recipe.fp8:
        return left_alone("Recipe.bf16()")
    if filter_fn is not None and not filter_fn(layer, name):
        return left_alone(FILTERED)
    family = family_of(layer)
    if family is None or family.proposed:  # the layer may be another since it was proposed
        if kind in REFUSED:
            return left_alone(f"{kind}: {REFUSED[kind]}")
        family, why = propose(model, name)
        if family is None:
            return left_alone(f"{kind}: {why}")
    reason = why_unsupported(layer, family)
    if reason is not None:
        return left_alone(reason)
    if not isinstance(layer, Fp8DecoderLayer) and type(layer) is not original:
        return left_alone(f"the layer is wrapped already, as {type(layer).__name__}: convert it before")
    verified = verify(model, name, family)
    if verified.difference is not None:
        return left_alone(f"{kind}: {verified.difference}")
    if not isinstance(layer, Fp8DecoderLayer):
        layer.__class__ = mixed(Fp8DecoderLayer, original)
    if family.proposed:
        layer.overcoat_family = family  # type: ignore[assignment]
    names = {id(module): path for path, module in layer.named_modules()}
    own = [modules.owner for modules in family.branches(layer, 1) if modules.mixer is None]
    layer.overcoat_fullgraph = not (family.proposed and own)  # type: ignore[assignment]
    linears = sum([len(convert_linears(owner, recipe, eval_fp8)) for owner in own])
    layer.overcoat_verify, layer.overcoat_starts = verify_again, verified.starts  # type: ignore[assignment]
    remember(layer, family.branches(layer, 1))
    layer.overcoat_recipe, layer.overcoat_eval = recipe, eval_fp8  # type: ignore[assignment]
    report.verified[name] = verified
    detail = _describe(layer, family, recipe)
    beside = [names[id(owner)] for owner in own if not _is_mixture(owner)]
    return LayerReport(
        name,
        kind,
        True,
        f"{detail}, in eval() too" if eval_fp8 else detail,
        linears,
        tuple(beside),
    )


def _is_mixture(owner: nn.Module) -> bool:
    """True of a router and experts in FP8."""
    return any(isinstance(module, Fp8Experts) for module in owner.modules())


SEVERAL = 3  # large linear layers of a layer that is none of transformers' by its class


def _other_layers(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Return the names of modules in lists that look like layers and are none by their class: of some towers,
    resamplers and adapters."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [f"{name}.{place}".removeprefix(".") for name in lists for place in model.get_submodule(name)._modules]
    names = [name for name in found if len(large_linears(model.get_submodule(name))) >= SEVERAL]
    inside = tuple([f"{name}." for name in layers])
    return [
        name
        for name in names
        if not f"{name}.".startswith(inside)
        and not any(layer.startswith(f"{name}.") for layer in layers)
        and not any(name.startswith(f"{outer}.") for outer in names)
    ]


def _convert_other(
    model: nn.Module, name: str, report: Report, filter_fn: Optional[FilterFn], eval_fp8: bool
) -> LayerReport:
    layer = model.get_submodule(name)
    kind = type(layer).__name__
    restore_linears(layer)
    if not report.recipe.fp8:
        return LayerReport(name, kind, False, "Recipe.bf16()")
    if filter_fn is not None and not filter_fn(layer, name):
        return LayerReport(name, kind, False, FILTERED)
    count = len(convert_linears(layer, report.recipe, eval_fp8))
    return LayerReport(name, kind, False, f"{kind} is no layer of transformers by its class", count)


def _choose_offloaded(model: nn.Module, layers: dict[str, nn.Module], report: Report) -> None:
    """Tell the converted layers which of them keep their tensors in host memory, and say so in the report."""
    count, tower = report.recipe.offload_blocks, tower_path(model)
    for name in report.converted:
        layers[name].overcoat_offload = 0 if count else None  # type: ignore[assignment]
    if not count:
        return
    keeping = _keeping(model, report.converted, tower)
    names = keeping or report.converted  # a frozen model's, whose input may want gradients: of a prompt, say
    of_tower = [name for name in names if tower and name.startswith(tower)]
    places, ahead = choose_blocks(count, len(names), len(of_tower))
    as_they_run = of_tower + [name for name in names if name not in of_tower]
    for name in [as_they_run[place] for place in places]:
        layers[name].overcoat_offload = ahead  # type: ignore[assignment]
    where = "in host memory" if keeping else "in host memory where its input wants gradients"
    for place, row in enumerate(report.layers):
        if row.converted and layers[row.name].overcoat_offload:
            report.layers[place] = row._replace(detail=f"{row.detail}, {where}")


def _keeping(model: nn.Module, names: list[str], tower: str) -> list[str]:
    """Return the layers that save tensors for the backward: something in or before them is trained."""
    if any(getattr(module, "_require_grads_hooks", None) for module in model.modules()):
        return names  # `enable_input_require_grads`
    # Not `named_parameters`, which wrappers override: the layers' names are those of modules.
    modules = model.named_modules(remove_duplicate=False)
    named = [(f"{path}.{name}".removeprefix("."), each) for path, m in modules for name, each in m._parameters.items()]
    # As they are used.
    parameters = sorted([each for each in named if each[1] is not None], key=lambda each: not each[0].startswith(tower))
    found = []
    for name in names:
        # Of the parameters around the layers' owner: those of a text tower are not before a vision tower's.
        around, own = ".".join(name.split(".")[:-3]), f"{name}.".removeprefix(".")
        last = max(place for place, (path, _) in enumerate(parameters) if path.startswith(own))
        if any(each.requires_grad and path.startswith(around) for path, each in parameters[: last + 1]):
            found.append(name)
    return found


def _convert_head(end: _Head, recipe: Recipe) -> LayerReport:
    kind = original_class(end.causal).__name__
    if end.reason is not None:
        remove_head(end.causal)
        if not isinstance(end.causal, LeanLossModel):
            forget_proposed(end.causal)
        return LayerReport(end.name, kind, False, end.reason)
    install_head(end.causal, recipe)
    gemms = f"e4m3/{recipe.grad_format}" if recipe.head == "fp8" else "in the model's dtype"
    detail = f"no logits with labels in train(), GEMMs {gemms}"
    if recipe.z_loss:
        detail += f", z-loss {recipe.z_loss}"
    return LayerReport(end.name, kind, True, detail)


def _describe(layer: nn.Module, family: Family, recipe: Recipe) -> str:
    kept = f"kept {recipe.kept_format} 1x{recipe.group_size}"
    if recipe.checkpoint == "block":
        kept = f"block input {kept}, the rest recomputed"
    elif attention_of(family.branches(layer, 1)) is not None:
        kept += ", attention " + (recipe.kept_format if recipe.kept_attention == "8bit" else "bf16")
    extras = []
    for mixer, owner, in_proj, out_proj, qk_norm, pre, post, layer_scale, *_ in family.branches(layer, 1):
        adapters = [active for linear in (*in_proj, out_proj) for active in active_adapters(linear)]
        kinds = {("LoRA" if each.factor is None else "DoRA", each.a.shape[0], each.dropout) for each in adapters}
        for kind, rank, rate in sorted(kinds):
            extras.append(f"{kind} of rank {rank}{f', dropout {rate}' if rate else ''} in the model's dtype")
        if layer_scale is not None:
            extras.append("LayerScale")
        if family.centered or isinstance(pre or post, nn.LayerNorm):
            extras.append("LayerNorm")
        if post is not None:
            extras.append("norms after" if pre is None else "norms before and after")
        if mixer is None:
            own = "router and experts as they are" if not family.proposed else f"{type(owner).__name__} as it is"
            count = sum(isinstance(part, Fp8Linear) for part in owner.modules())
            if _is_mixture(owner):
                in_blocks = " with one scale each" if recipe.linear_scaling == "block" else ""
                own = f"experts in FP8{in_blocks}, the router"
            extras.append(f"{own}, {count} of its linear layers in FP8" if count else f"{own}, in the model's dtype")
            continue
        if not isinstance(mixer, Attention):
            extras += [] if (mixer.activation, mixer.gated) == ("silu", True) else [mixer.activation]
            continue
        if not mixer.heads.causal:
            extras.append("not causal")
        if any(linear.bias is not None for linear in in_proj):
            extras.append("biases")
        if any(norm is not None for norm in qk_norm):
            extras.append("q/k norm" + (" over all heads (unfused)" if mixer.heads.full_norm else ""))
        if mixer.heads.gated:
            extras.append("output gate")
        if mixer.heads.softcap:
            extras.append(f"scores capped at {mixer.heads.softcap:g} (attention in plain PyTorch, slow)")
    scales = " in 1x128 and 128x128 blocks" if recipe.linear_scaling == "block" else ""
    return ", ".join([f"GEMMs e4m3/{recipe.grad_format}{scales}", kept, *dict.fromkeys(extras)])


def _forbid_cache(model: nn.Module, report: Report, eval_fp8: bool) -> None:
    """Turn the key/value cache off while layers compute in FP8, by a hook on the module that calls them."""
    known = {row.name: family_of(model.get_submodule(row.name)) for row in report.layers}
    decoders = [row for row in report.layers if not ((f := known[row.name]) and f.encoder and not f.proposed)]
    owners = {_owner(model, row.name): False for row in decoders}
    owners.update({_owner(model, row.name): True for row in decoders if row.converted})
    for path, causal in causal_models(model):
        inside, whole = f"{path}.".removeprefix("."), model_spec_of(causal)
        rows = [row for row in decoders if row.converted and row.name.startswith(inside)]
        is_proposed = any((family := known[row.name]) and family.proposed for row in rows)
        if rows and (is_proposed or (whole and whole.vision)):
            owners[causal] = True  # SmolVLM and BERT make a cache before they call the text's owner
    for owner, has_converted in owners.items():
        if owner is None or not _takes_use_cache(owner):
            continue
        if has_converted and _no_cache_in_fp8 not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(_no_cache_in_fp8, with_kwargs=True)
        owner.overcoat_eval = eval_fp8 and has_converted  # type: ignore[assignment]


def _takes_use_cache(owner: nn.Module) -> bool:
    taken = inspect.signature(original_class(owner).forward).parameters.values()
    return any(each.name == "use_cache" or each.kind is each.VAR_KEYWORD for each in taken)


def _owner(model: nn.Module, name: str) -> Optional[nn.Module]:
    """Return the module that owns the list of a layer and calls it; None for a layer that is the model itself."""
    path = name.split(".")
    while len(path) > 1 and path[-1].startswith("_"):  # what wraps the layer: torch.compile, checkpoints
        path.pop()
    owner = model
    while path and type(owner := model.get_submodule(".".join(path[:-1]))) is nn.ModuleList:
        path.pop()
    return owner if name else None


def _no_cache_in_fp8(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # A cache would hold every layer's K and V in BF16, and transformers reads packed position_ids only without one.
    if (module.training or module.overcoat_eval) and cache_of(kwargs) is None and kwargs.get("use_cache") is None:
        kwargs["use_cache"] = False
    return args, kwargs
