"""A decoder layer that trains in FP8, and how its modules become the branches of a block.

`Fp8DecoderLayer` is mixed into the layer's own class (convert.py), so parameters, names, hooks and the original forward
stay. It computes in FP8 in `train()` mode (`eval_fp8`: always); otherwise, and whenever a module of it was replaced or
hooked since or a cache is asked for, the original forward runs. LoRA adapters become part of the block (lora.py).
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.adapters import with_seeds
from overcoat.block.attention import Attention, Heads, observers
from overcoat.block.mlp import Mlp
from overcoat.block.norm import norm_forward
from overcoat.block.offload import advance_offload, offload_active
from overcoat.block.run import run_block
from overcoat.block.spec import Block, Branch, Linear, Norm, RowPermutation, Tables
from overcoat.models.compiled import run_compiled
from overcoat.models.family import INPUT, REST, Family, Mixin, Modules, family_of, original_class
from overcoat.models.fingerprint import Checked, Fingerprint, why_mode
from overcoat.models.lora import active_adapters, base_of
from overcoat.models.masks import (
    as_starts,
    cache_of,
    check_mask,
    mask_from,
    mask_of_original,
    reads_lengths,
    rows_of,
    window_of,
)
from overcoat.models.refusals import ACTIVATIONS, branches_of, is_conv1d, why_unusable
from overcoat.recipe import Recipe

IN_EVAL = "this layer trains in its original precision, in eval(): call train(), or use torch.no_grad() to evaluate"

# Arguments that transformers passes to every layer, read by attention or not at all.
ARGUMENTS = (
    "attention_mask",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "max_seqlen",
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
)

# ---- what families are made of ----------------------------------------------------------------------------------


def attention(
    module: Any,
    batch: int,
    *,
    pre: Any = None,
    post: Any = None,
    in_proj: Optional[tuple[Any, ...]] = None,
    qkv_interleaved: bool = False,
    out_proj: Any = None,
    width: Optional[int] = None,
    scaling: Optional[float] = None,
    layer_scale: Any = None,
    scale: float = 1.0,
    sinks: Optional[str] = None,
    **options: Any,
) -> Modules:
    """The branch of an attention module with q_proj, k_proj, v_proj and o_proj, and perhaps norms of q and k.

    in_proj: instead of q_proj, k_proj and v_proj; one layer makes all three, with rows of all q, then k, then v; or if
        `qkv_interleaved` q, k, v of each head. out_proj: instead of o_proj. width: of a head, instead of head_dim;
        scaling: of scores. layer_scale, scale, sinks: `Modules`. options: fields of `Heads`.
    """
    q_norm, k_norm = (
        None if isinstance(norm := module._modules.get(name), nn.Identity) else norm for name in ("q_norm", "k_norm")
    )
    in_proj = (module.q_proj, module.k_proj, module.v_proj) if in_proj is None else in_proj
    width = module.head_dim if width is None else width
    if len(in_proj) == 1:
        total = max(in_proj[0].weight.shape) // width
        num_q = getattr(module.config, "num_attention_heads", total // 3)
        num_kv = (total - num_q) // 2
    else:
        num_q, num_kv = (linear.weight.shape[0] // width for linear in in_proj[:2])
    if scaling is None:
        scaling = module.scaling if hasattr(module, "scaling") else module.scale
    if q_norm is None:
        options["full_norm"] = False
    eps, causal = 0.0 if q_norm is None else norm_eps(q_norm), bool(getattr(module, "is_causal", True))
    heads = Heads(batch, num_q, num_kv, width, scaling, eps, causal=causal, **options)
    orders: tuple[Optional[RowPermutation], ...] = ()
    if qkv_interleaved or heads.rope_interleaved or heads.rotated:
        counts = (num_q, num_kv) if len(in_proj) > 1 else (num_q + num_kv,)
        turned = [
            RowPermutation(width, heads.rotated or width, count, heads.rope_interleaved, int(qkv_interleaved))
            for count in counts
        ]
        orders = (*turned, None) if len(in_proj) > 1 else tuple(turned)
    out_proj = module.o_proj if out_proj is None else out_proj
    norms = (q_norm, k_norm)
    return Modules(
        Attention(heads),
        module,
        in_proj,
        out_proj,
        norms,
        pre,
        post,
        layer_scale,
        orders=orders,
        scale=scale,
        sinks=sinks,
    )


def rotated_columns(module: Any, width: int) -> int:
    """How many of a head's columns rotate, as transformers counts them; 0: all."""
    count = int(width * module.config.rope_parameters.get("partial_rotary_factor", 1.0))
    return 0 if count == width else count


def gated_mlp(
    module: Any,
    activation: str = "",
    *,
    in_proj: Optional[tuple[Any, ...]] = None,
    pre: Any = None,
    post: Any = None,
    layer_scale: Any = None,
    scale: float = 1.0,
) -> Modules:
    """The branch of an MLP down_proj(act(gate_proj(x)) * up_proj(x)).

    activation: transformers' name; else the configuration's hidden_act. in_proj: instead of gate_proj and up_proj; one
    layer makes both, with rows of gate, then up. layer_scale, scale: `Modules`.
    """
    in_proj = (module.gate_proj, module.up_proj) if in_proj is None else in_proj
    mixer = Mlp(activation_of(activation or module.config.hidden_act), True)
    return Modules(mixer, module, in_proj, module.down_proj, (), pre, post, layer_scale, scale=scale)


def plain_mlp(
    module: Any,
    in_proj: Any,
    out_proj: Any,
    activation: str,
    *,
    pre: Any = None,
    post: Any = None,
    layer_scale: Any = None,
) -> Modules:
    """The branch of an MLP out_proj(act(in_proj(x)))."""
    return Modules(Mlp(activation_of(activation), False), module, (in_proj,), out_proj, (), pre, post, layer_scale)


def as_it_is(module: Any, *, pre: Any) -> Modules:
    """The branch of a module that runs by itself behind its norm: a router and its experts."""
    return Modules(None, module, (), None, (), pre)


def activation_of(name: str) -> str:
    return ACTIVATIONS.get(name, name)


def norm_eps(norm: Any) -> float:
    """Return a norm's eps; 1e-5 for one without (OLMo's)."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5)))


def block_of(branches: tuple[Modules, ...], family: Family, layer: Any) -> Block:
    """Return a layer's branches that have a mixer as the `Block` of parameters that `run_block` takes."""
    branches = tuple([modules for modules in branches if modules.mixer is not None])
    made = [_branch(modules, family) for modules in branches]
    for place, (_, _, _, _, pre, *_) in enumerate(made[1:], 1):
        if pre is not None and pre.weight is not None and branches[place].pre is branches[0].pre:
            # torch.compile takes no tensor twice.
            bias = None if pre.bias is None else pre.bias.view_as(pre.bias)
            made[place] = made[place]._replace(pre=pre._replace(weight=pre.weight.view_as(pre.weight), bias=bias))
    return Block(tuple(made), family.parallel is not None and family.parallel(layer))


def _branch(modules: Modules, family: Family) -> Branch:
    (
        mixer, owner, in_proj, out_proj, qk_norm, pre, post, layer_scale, norm_after_residual, _, orders, scale, sinks,
        *_,
    ) = modules  # fmt: skip
    weights = tuple([None if norm is None else _qk_weight(norm_of(norm, family), mixer, out_proj) for norm in qk_norm])
    if sinks is not None:
        weights = (*weights, getattr(owner, sinks))
    result = _linear((out_proj,), (), scale)
    if layer_scale is not None:
        # Into the weight, whose gradient autograd takes apart again. FP8 has exponents enough for columns' sizes.
        factor = getattr(*layer_scale)
        (weight,), (bias,) = result.weights, result.biases
        result = result._replace(
            weights=(factor[:, None] * weight,),
            biases=(None if bias is None else factor * bias,),
            adapters=tuple([each._replace(b=factor[:, None] * each.b) for each in result.adapters]),
        )
    return Branch(
        mixer,
        _linear(in_proj, orders),
        result,
        weights,
        norm_of(pre, family),
        norm_of(post, family),
        norm_after_residual,
    )


def _qk_weight(norm: Norm, mixer: Any, out_proj: Any) -> Tensor:
    """Return the weight of a norm of q or k, in the order of its heads' rows; ones for a norm without one, which None
    would leave out (NanoChat)."""
    if norm.weight is not None:
        weight, heads = norm.weight, mixer.heads
        if not (heads.rotated or heads.rope_interleaved):
            return weight
        counted = weight.shape[0] // heads.width
        return RowPermutation(heads.width, heads.rotated or heads.width, counted, heads.rope_interleaved).take(weight)
    like = base_of(out_proj).weight
    return torch.ones(mixer.heads.width, dtype=like.dtype, device=like.device)


def _linear(layers: tuple[Any, ...], orders: tuple[Optional[RowPermutation], ...] = (), scale: float = 1.0) -> Linear:
    others = [(place, layer) for place, layer in enumerate(layers) if type(layer) is not nn.Linear]
    bases = [base_of(layer) for layer in layers] if others else layers
    own = [base._parameters for base in bases]  # `base.weight` would take three times as long
    if type(bases[0]) is not nn.Linear and is_conv1d(bases[0]):
        orders = (RowPermutation(transposed=True),)
    for parameters in own:
        if "weight" not in parameters:
            raise ValueError(
                "the weight of a linear layer is no parameter. If these are nn.DataParallel's copies, start a process "
                "for each GPU (torchrun, accelerate launch) or show one (CUDA_VISIBLE_DEVICES=0)"
            )
    adapters = [adapter for place, layer in others for adapter in active_adapters(layer, place)]
    return Linear(
        tuple([each["weight"] for each in own]), tuple([each["bias"] for each in own]), orders, scale, tuple(adapters)
    )


def norm_of(norm: Any, family: Family) -> Any:
    if norm is None or isinstance(norm, nn.Identity):
        return None
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if family.plus_one and weight is not None and type(norm) is not nn.LayerNorm:
        weight = 1.0 + weight.float()
    return Norm(weight, bias, norm_eps(norm), family.centered or isinstance(norm, nn.LayerNorm))


# ---- the layer -------------------------------------------------------------------------------------------------------


def checked_now(layer: Any) -> Checked:
    """Return a layer's branches (batch 1), or why its own forward must run: what was found when it was last verified,
    or, where its fingerprint has changed since, what is found now."""
    before, family = layer.overcoat_checked, layer.overcoat_family
    if before is not None and before.fingerprint.holds(layer):
        return before
    branches, reason = branches_of(layer, family)
    if branches is not None:
        reason = why_unusable(layer, family, branches)
    if branches is not None and reason is None:
        try:
            block_of(branches, family, layer)  # ValueError: weights are no parameters, of nn.DataParallel's copies
        except (AttributeError, TypeError) as error:
            reason = f"a module is not what {family.layer} has there ({error})"
    if reason is None:
        changed = before.fingerprint.difference(layer) if before is not None else None
        found = layer.overcoat_verify(layer, family)
        reason = found.reason if found.trusted and changed else found.difference
        reason = f"{changed} has changed since it was converted, and {reason}" if reason and changed else reason
    return remember(layer, branches if reason is None else None, reason)


# Layers that were verified.
_verified: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(layer: Any, branches: Optional[tuple[Modules, ...]], reason: Optional[str] = None) -> Checked:
    """Freeze what was found for a layer by the identity of all that decides what it computes."""
    layer.overcoat_checked = Checked(Fingerprint(layer), branches, reason)
    _verified.add(layer)
    return layer.overcoat_checked


@torch.compiler.assume_constant_result
def _check_all() -> int:
    """Verify again what has changed, of all layers, when code is being compiled: not of the one that is being traced,
    which would give each layer a graph of its own."""
    return len([checked_now(layer) for layer in list(_verified) if isinstance(layer, Fp8DecoderLayer)])


class Fp8DecoderLayer(Mixin):
    """Mixin before the layer's own class: FP8 while training, the original forward otherwise."""

    overcoat_recipe: Recipe
    overcoat_family: Any
    overcoat_own: Any  # the layer's own class
    # The names of the arguments of the layer's own forward after hidden_states.
    overcoat_arguments: tuple[str, ...] = ()
    # Layers whose forward the copy of kept tensors to host memory may take; 0: they stay; None: those of no layer go.
    overcoat_offload: Optional[int] = None
    overcoat_eval: bool = False  # whether it computes in FP8 in `eval()` too
    # What the last forward in eager mode ran: "FP8", or why not.
    overcoat_ran: Optional[str] = None
    overcoat_checked: Optional[Checked] = None
    # A layer, its family -> how closely both agree (verify.py); `convert` sets it.
    overcoat_verify: Callable[[Any, Any], Any]
    overcoat_mode: Optional[str] = None  # torch.compile's; None: eager (compiled.py)
    overcoat_fullgraph: bool = True
    # The processes between which rows are cut in `train()`; None: they are whole (distributed/context.py).
    overcoat_context: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.overcoat_family, cls.overcoat_own = family_of(cls), original_class(cls)
        cls.overcoat_arguments = tuple(inspect.signature(cls.overcoat_own.forward).parameters)[2:]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own signature (transformers): hidden_states (B, S, H) -> (B, S, H); or (T, H) with `cu_seqlens`,
        where images begin."""
        kwargs.update(zip(self.overcoat_arguments, args, strict=False))
        batch, images = rows_of(hidden_states, kwargs.get("cu_seqlens"), kwargs.get("max_seqlen"))
        if self.overcoat_mode is None:
            return self._forward(hidden_states, batch, images, kwargs)
        return run_compiled(self, hidden_states, batch, images, kwargs)

    def _forward(self, hidden_states: Tensor, batch: int, images: int, kwargs: dict[str, Any]) -> Any:
        """`forward`, after `rows_of`."""
        own = kwargs
        if self.overcoat_family.inputs is not None:
            kwargs = self.overcoat_family.inputs(self, hidden_states, own)
        embeddings, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        is_known = isinstance(mask, Tensor) and not mask.numel()  # models/masks.py
        if is_known:
            mask = kwargs["attention_mask"] = None
        branches, family, lengths = None, self.overcoat_family, kwargs.get("cu_seqlens")
        if embeddings is not None or not family.rotary:
            branches = self._fp8_branches(batch, hidden_states, kwargs)
        context = self.overcoat_context if self.training else None
        if context is not None and (branches is None or not is_known):
            why = "its model was not given labels" if branches is not None else "it is not as it was converted"
            raise ValueError(f"rows are cut between processes, which this layer cannot know (context_parallel): {why}")
        if branches is None:
            if own is kwargs and (is_known or as_starts(mask) is not None):
                own["attention_mask"] = mask_of_original(self, as_starts(mask), hidden_states)
            result = super().forward(hidden_states, **own)
            if offload_active(self.overcoat_offload, hidden_states):
                advance_offload(result)
            return result
        if hidden_states.dim() != 3 and lengths is None:
            raise ValueError(
                f"hidden_states has the shape {tuple(hidden_states.shape)}: a decoder layer takes (batch, sequence, "
                "hidden), the model input_ids of (batch, sequence)"
            )
        attends, window = attention_of(branches), None
        if attends is None:
            mask = None
        else:
            by_lengths = own is kwargs and reads_lengths(getattr(attends.owner, "config", None))
            window = window_of(attends.owner) if is_known or by_lengths or as_starts(mask) is not None else None
            if lengths is not None:
                mask = None if images else lengths.int()
            else:
                if not is_known and (type(mask).__name__ == "BlockMask" or by_lengths):
                    mask = mask_from(mask, kwargs, hidden_states, attends.mixer.heads.causal, window or 0)
                mask = check_mask(mask, hidden_states.shape[-2])
        called = as_called(branches, causal=kwargs.get("is_causal"), context=context, window=window)
        block = with_seeds(block_of(called, family, self))
        tables = Tables(*rotation_of(embeddings_of(family, kwargs), hidden_states, block), mask)
        if family.q_scale is not None:
            first = block.branches[0]
            qk_norm = (*first.qk_norm, None, family.q_scale(self, kwargs["position_ids"]).view(-1, 1))
            block = block._replace(branches=(first._replace(qk_norm=qk_norm), *block.branches[1:]))
        watched = not torch.compiler.is_compiling() and bool(observers)
        for observer in observers if watched else ():
            observer.enter(self)

        def fused(x: Tensor) -> Tensor:
            return run_block(x, block, tables, self.overcoat_recipe, self.overcoat_offload)

        result = in_turn(hidden_states, branches, block.parallel, fused, self._own(family, kwargs))
        if family.factor:
            result = result * getattr(self, family.factor)
        for observer in observers if watched else ():
            observer.enter(None)
        return (result, *(None,) * (family.results - 1)) if family.results else result

    def _own(self, family: Family, given: dict[str, Any]) -> Callable[[Modules, Tensor], Tensor]:
        """Return what runs a branch as it is, with the layer's arguments."""

        def run(modules: Modules, x: Tensor) -> Tensor:
            return as_they_are(modules, family, x, given, self.overcoat_arguments, self.overcoat_recipe)

        return run

    def _fp8_branches(self, batch: int, x: Tensor, given: dict[str, Any]) -> Optional[tuple[Modules, ...]]:
        """The modules whose forward the FP8 block stands in for; None where each is to run its own."""
        # Not `torch.is_grad_enabled()`: a reentrant checkpoint runs its first forward without gradients, and the
        # recomputation must repeat the same numbers.
        if not self.training and not self.overcoat_eval:
            self._note("eval(): the original forward")
            if x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                warnings.warn(IN_EVAL, stacklevel=3)
            return None
        cache, branches = cache_of(given), None
        reason: Optional[str] = "a key/value cache was asked for (use_cache=True)"
        if cache is None:
            branches, reason = self._checked()
        if branches is not None and (reason := self._why_given(branches, given)) is None:
            self._note("FP8")
            return as_called(branches, batch=batch)
        self._note(f"original precision: {reason}")
        # Without a word only where a model in `train()` mode generates text (GRPO); in `eval()` FP8 was asked for.
        if cache is None or torch.is_grad_enabled() or not self.training:
            does = "trains" if self.training else "computes"
            warnings.warn(f"this layer {does} in its original precision: {reason}", stacklevel=3)
        return None

    def _checked(self) -> tuple[Optional[tuple[Modules, ...]], Optional[str]]:
        """Return the layer's branches (batch 1), or the reason why its own forward must run."""
        if not torch.compiler.is_compiling():
            checked = checked_now(self)
            return checked.branches, checked.reason
        # Traced with the modules themselves: compiled code then notices when they change, and is traced anew.
        _check_all()
        reason, branches = None if self.overcoat_checked is None else self.overcoat_checked.reason, None
        if reason is None:
            branches, reason = branches_of(self, self.overcoat_family)
        if branches is not None and (reason := why_unusable(self, self.overcoat_family, branches)) is not None:
            branches = None
        return branches, reason

    def _why_given(self, branches: tuple[Modules, ...], given: Mapping[str, Any]) -> Optional[str]:
        family = self.overcoat_family
        if family.proposed:
            known = (*ARGUMENTS, *family.given)
            for name, value in given.items():
                if value is not None and value is not False and name not in known:
                    return f"{name} was given, which its layer was not verified with"
            tables = given.get("position_embeddings") if family.rotary else None
            if tables is not None and tables[0].shape[-1] != family.columns:
                return f"position_embeddings have {tables[0].shape[-1]} columns, verified with {family.columns}"
        return why_given([modules.owner for modules in branches if not isinstance(modules.mixer, Mlp)], given)

    def _note(self, ran: str) -> None:
        # A side effect, which compiled code may not have inside of a checkpoint.
        if not torch.compiler.is_compiling():
            self.overcoat_ran = ran


def attention_of(branches: tuple[Modules, ...]) -> Optional[Modules]:
    """Return the branch whose attention the block computes, or None."""
    for modules in branches:
        if isinstance(modules.mixer, Attention):
            return modules
    return None


def in_turn(
    x: Tensor,
    branches: tuple[Modules, ...],
    parallel: bool,
    fused: Callable[[Tensor], Tensor],
    own: Callable[[Modules, Tensor], Tensor],
) -> Tensor:
    """Return a layer's result for x (B, S, H): its block's (`fused`), and what the branches that run as they are add
    before it, after it, or beside it (`parallel`)."""
    result, done = x, False
    for modules in branches:
        if modules.mixer is None:
            if parallel and not done:
                result, done = fused(result), True
            result = result + own(modules, x if parallel else result)
        elif not done:
            result, done = fused(result), True
    return result


def why_given(owners: list[Any], given: Mapping[str, Any]) -> Optional[str]:
    """Return what a call asks for that FP8 attention does not have, or None."""
    mask, tables = given.get("attention_mask"), given.get("position_embeddings")
    for table in (mask, *tables) if isinstance(tables, (tuple, list)) else (mask, tables):
        if isinstance(table, Tensor) and table.requires_grad:
            return "attention_mask or position_embeddings want a gradient, which FP8 attention does not compute"
    if given.get("output_attentions") or (any(owner._forward_hooks for owner in owners) and _collects_attentions()):
        return "output_attentions=True, and FP8 attention keeps no probabilities to return"
    return None if torch.compiler.is_compiling() else why_mode()


def _collects_attentions() -> bool:
    """True if transformers' recorders wait for attention's probabilities, which FP8 attention does not compute."""
    if torch.compiler.is_compiling():
        return False
    from transformers.utils import output_capturing

    return "attentions" in (output_capturing._active_collector.get() or ())


def as_called(branches: tuple[Modules, ...], **given: Any) -> tuple[Modules, ...]:
    """Branches with those fields of `Heads` that are given: causal as the model asks for in the call (CLIP's text
    tower), context, window."""
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return branches
    return tuple(
        modules._replace(mixer=Attention(modules.mixer.heads._replace(**given)))
        if isinstance(modules.mixer, Attention)
        else modules
        for modules in branches
    )


def as_they_are(
    modules: Modules,
    family: Family,
    x: Tensor,
    given: Mapping[str, Any],
    named: tuple[str, ...],
    recipe: Optional[Recipe] = None,
) -> Tensor:
    """Return what a branch adds whose module runs by itself, of x (B, S, H).

    given: the layer's arguments; named: those that its forward has a name for. recipe: of the norm before it; None:
    plain PyTorch.
    """
    pre = norm_of(modules.pre, family)
    if pre is not None and recipe is None:
        x = reference.norm(x, pre)
    elif pre is not None and pre.weight is not None and pre.bias is None and not pre.centered:
        assert recipe is not None
        x = norm_forward(x, pre, recipe)
    elif pre is not None:
        x = modules.pre(x)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, source, value in modules.call:
        if source == REST:
            kwargs.update({key: each for key, each in given.items() if key not in named})
            continue
        each = x if source == INPUT else value if source is None else given.get(source, value)
        if name is None:
            args.append(each)
        else:
            kwargs[name] = each
    result = modules.owner(*args, **kwargs)
    y: Tensor = result[0] if isinstance(result, tuple) else result  # gpt-oss returns the router's scores as well
    y = y if modules.post is None else modules.post(y)
    return y if modules.scale == 1.0 else modules.scale * y


def embeddings_of(family: Family, given: Mapping[str, Any]) -> Any:
    """cos and sin among a layer's arguments; None where it gets none."""
    embeddings = given.get("position_embeddings") if family.rotary else None
    return embeddings if embeddings is None or family.tables is None else family.tables(embeddings)


def rotation_of(embeddings: Any, x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """cos and sin (P, D); of no angle where attention gets none, which the kernels multiply with exactly."""
    if embeddings is not None and any(isinstance(branch.mixer, Attention) for branch in block.branches):
        cos, sin = embeddings
        return cos.flatten(0, -2), sin.flatten(0, -2)
    width = next((branch.mixer.heads.width for branch in block.branches if isinstance(branch.mixer, Attention)), 2)
    return x.new_ones(1, width), x.new_zeros(1, width)
