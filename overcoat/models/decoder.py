"""What all families share: a layer that trains in FP8, and how its modules become the branches of a block.

`Fp8DecoderLayer` is mixed into the layer's own class (convert.py), so parameters, names, hooks and the original forward
stay. It computes in FP8 in `train()` mode; otherwise, and whenever a module of it was replaced or hooked since (a
LoRA adapter, say) or a cache is asked for, the original forward runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from overcoat.block.attention import Attention, Heads, observers
from overcoat.block.mlp import Mlp
from overcoat.block.norm import norm_forward
from overcoat.block.order import Order
from overcoat.block.run import run_block
from overcoat.block.spec import Block, Branch, Linear, Norm, Tables
from overcoat.kernels.packed import dense_mask, document_starts, given_starts
from overcoat.models.family import Family, Mixin, Modules, class_name, family_of, original_class
from overcoat.recipe import Recipe

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

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that expect nothing of what a module gets and returns: transformers' sleeping recorders, FSDP2's gathering,
# the one that forbids the cache (convert.py).
HARMLESS_HOOKS = ("transformers.utils", "torch.distributed", "overcoat.models")
# Attention code of transformers that hands every mask to the layer, as all pairs or as flex attention's; "flash" in a
# name, also of the hub's kernels, stands for code that reads position_ids, lengths or padding instead.
ATTENTION = ("sdpa", "eager", "flex_attention")


# ---- what families are made of ----------------------------------------------------------------------------------


def attention(
    module: Any,
    batch: int,
    *,
    pre: Any = None,
    post: Any = None,
    into: Optional[tuple[Any, ...]] = None,
    by_head: bool = False,
    out: Any = None,
    width: Optional[int] = None,
    scaling: Optional[float] = None,
    layer_scale: Any = None,
    scale: float = 1.0,
    sinks: Any = None,
    **options: Any,
) -> Modules:
    """The branch of an attention module with q_proj, k_proj, v_proj and o_proj, and perhaps norms of q and k.

    into: instead of q_proj, k_proj and v_proj; one layer makes all three, with rows of all q, then k, then v; or if
        `by_head` q, k, v of each head. out: instead of o_proj. width: of a head, instead of head_dim; scaling: of
        scores. layer_scale, scale: `Modules`. sinks: (num_q,). options: fields of `Heads`.
    """
    q_norm, k_norm = (
        None if isinstance(norm := getattr(module, name, None), nn.Identity) else norm for name in ("q_norm", "k_norm")
    )
    into = (module.q_proj, module.k_proj, module.v_proj) if into is None else into
    width = module.head_dim if width is None else width
    if len(into) == 1:
        total = max(into[0].weight.shape) // width
        num_q = getattr(module.config, "num_attention_heads", total // 3)
        num_kv = (total - num_q) // 2
    else:
        num_q, num_kv = (linear.weight.shape[0] // width for linear in into[:2])
    if scaling is None:
        scaling = module.scaling if hasattr(module, "scaling") else module.scale
    if q_norm is None:
        options["full_norm"] = False
    eps, causal = 0.0 if q_norm is None else norm_eps(q_norm), bool(getattr(module, "is_causal", True))
    heads = Heads(batch, num_q, num_kv, width, scaling, eps, causal=causal, **options)
    orders: tuple[Optional[Order], ...] = ()
    if by_head or heads.neighbours or heads.rotated:
        counts = (num_q, num_kv) if len(into) > 1 else (num_q + num_kv,)
        turned = [Order(width, heads.rotated or width, count, heads.neighbours, by_head) for count in counts]
        orders = (*turned, None) if len(into) > 1 else tuple(turned)
    out = module.o_proj if out is None else out
    norms = (q_norm, k_norm)
    return Modules(
        Attention(heads), module, into, out, norms, pre, post, layer_scale, orders=orders, scale=scale, sinks=sinks
    )


def rotated_columns(module: Any, width: int) -> int:
    """How many of a head's columns rotate, as transformers counts them; 0: all."""
    count = int(width * module.config.rope_parameters.get("partial_rotary_factor", 1.0))
    return 0 if count == width else count


def gated_mlp(
    module: Any,
    activation: str = "",
    *,
    into: Optional[tuple[Any, ...]] = None,
    pre: Any = None,
    post: Any = None,
    layer_scale: Any = None,
    scale: float = 1.0,
) -> Modules:
    """The branch of an MLP down_proj(act(gate_proj(x)) * up_proj(x)).

    activation: transformers' name; else the configuration's hidden_act. into: instead of gate_proj and up_proj; one
    layer makes both, with rows of gate, then up. layer_scale, scale: `Modules`.
    """
    into = (module.gate_proj, module.up_proj) if into is None else into
    core = Mlp(activation_of(activation or module.config.hidden_act), True)
    return Modules(core, module, into, module.down_proj, (), pre, post, layer_scale, scale=scale)


def plain_mlp(
    module: Any, into: Any, out: Any, activation: str, *, pre: Any = None, post: Any = None, layer_scale: Any = None
) -> Modules:
    """The branch of an MLP out(act(into(x)))."""
    return Modules(Mlp(activation_of(activation), False), module, (into,), out, (), pre, post, layer_scale)


def as_it_is(module: Any, *, pre: Any) -> Modules:
    """The branch of a module that runs by itself, in the model's dtype, behind its norm: experts and their router."""
    return Modules(None, module, (), None, (), pre)


def activation_of(name: str) -> str:
    return ACTIVATIONS.get(name, name)


def norm_eps(norm: Any) -> float:
    """OLMo's norm has none of its own."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5)))


def block_of(branches: tuple[Modules, ...], family: Family, layer: Any) -> Block:
    """A layer's parameters, as `run_block` takes them, of the branches that have a core."""
    made = [_branch(modules, family) for modules in branches if modules.core is not None]
    for place, (_, _, _, _, pre, *_) in enumerate(made[1:], 1):
        if pre is not None and pre.weight is not None and branches[place].pre is branches[0].pre:
            # torch.compile takes no tensor twice.
            made[place] = made[place]._replace(pre=pre._replace(weight=pre.weight.view_as(pre.weight)))
    return Block(tuple(made), family.parallel(layer))


def _branch(modules: Modules, family: Family) -> Branch:
    core, _, into, out, inner, pre, post, layer_scale, outer, _, orders, scale, sinks = modules
    weights = tuple([None if norm is None else _norm(norm, family).weight for norm in inner])
    if sinks is not None:
        weights = (*weights, sinks)
    result = _linear((out,), (), scale)
    if layer_scale is not None:
        # Into the weight, whose gradient autograd takes apart again. FP8 has exponents enough for columns' sizes.
        factor = getattr(layer_scale, "lambda1", layer_scale)
        (weight,), (bias,) = result.weights, result.biases
        result = result._replace(weights=(factor[:, None] * weight,), biases=(None if bias is None else factor * bias,))
    return Branch(core, _linear(into, orders), result, weights, _norm(pre, family), _norm(post, family), outer)


def _linear(layers: tuple[Any, ...], orders: tuple[Optional[Order], ...] = (), scale: float = 1.0) -> Linear:
    own = [layer._parameters for layer in layers]  # `layer.weight` would take three times as long
    if type(layers[0]) is not nn.Linear:  # Conv1D
        orders = (Order(transposed=True),)
    return Linear(tuple([each["weight"] for each in own]), tuple([each["bias"] for each in own]), orders, scale)


def _norm(norm: Any, family: Family) -> Any:
    if norm is None or isinstance(norm, nn.Identity):
        return None
    if isinstance(norm, nn.LayerNorm):
        return Norm(norm.weight, norm.bias, float(norm.eps), centered=True)
    weight = getattr(norm, "weight", None)
    if family.plus_one:
        assert weight is not None
        weight = 1.0 + weight.float()
    return Norm(weight, None, norm_eps(norm), family.centered)


# ---- what cannot run in FP8 ---------------------------------------------------------------------------------------


def why_unsupported(layer: nn.Module, family: Family) -> Optional[str]:
    """The reason why a layer of a family cannot run in FP8, or None if it can."""
    reason = _why_foreign(layer, family)
    if reason is not None:
        return reason
    branches = family.branches(layer, 1)
    # What accelerate does to spread a model over devices. It would run, or be left out, whatever the class is.
    for module in (layer, *_modules_of(branches)):
        if "forward" in vars(module):
            return f"the forward of {_path(layer, module)} was replaced on the object: convert before"
    for name, module in layer.named_modules():
        for rate in ("attention_dropout", "residual_dropout", "dropout", "drop_prob", "p"):
            dropout = getattr(module, rate, 0.0)
            if isinstance(dropout, float) and dropout:
                place = rate if rate.endswith("_dropout") else f"{name}.{rate}"
                return f"{place} is {dropout}; only 0 is supported"
    config: Any = branches[0].owner.config
    for core in (modules.core for modules in branches):
        if isinstance(core, Mlp) and core.activation not in FUNCTIONS:
            return f"hidden_act is {core.activation!r}; only {', '.join(ACTIVATIONS)} are supported"
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not branches[0].core.heads.rotated:
        return f"partial_rotary_factor is {partial}; only 1.0 is supported"
    return family.refused(layer) or _why_changed(layer, family, branches)


def why_replaced(layer: nn.Module, family: Family) -> Optional[str]:
    """The reason why a layer's modules or attention are not what the FP8 block computes."""
    return _why_foreign(layer, family) or _why_changed(layer, family, family.branches(layer, 1))


def _why_foreign(layer: nn.Module, family: Family) -> Optional[str]:
    """Whether a direct part of a layer, of which `Family.branches` expects attributes, is another module's."""
    for name, part in layer._modules.items():
        module = type(part).__module__
        if part is not None and module != family.module and not module.startswith("torch.nn.modules."):
            return f"{name} is a {class_name(part)}, not the model's own"
    return None


def _why_changed(layer: nn.Module, family: Family, branches: tuple[Modules, ...]) -> Optional[str]:
    for core, owner, into, out, inner, pre, post, *_ in branches:
        if isinstance(core, Mlp):
            for part in owner._modules.values():
                if (
                    part not in into
                    and part is not out
                    and not (isinstance(part, nn.Dropout) and part.p == 0)
                    and type(part).__name__ not in FUNCTIONS.get(core.activation, ())
                ):
                    return f"{_path(layer, part)} is a {class_name(part)}, not what hidden_act says"
        elif core is not None and bool(getattr(owner, "is_causal", True)) is family.encoder:
            kind = "attention of all tokens" if family.encoder else "causal attention"
            return f"{_path(layer, owner)}.is_causal is {owner.is_causal}; only {kind} is supported"
        for linear in (*into, out) if core is not None else ():
            if type(linear) is not nn.Linear and not _is_conv1d(linear):
                return f"{_path(layer, linear)} is a {class_name(linear)}, not nn.Linear"
        for norm in (*inner, pre, post):
            if norm is not None and not _is_own_norm(norm, family):
                return f"{_path(layer, norm)} is a {class_name(norm)}, not the model's own norm"
    # A hook on a module whose forward the FP8 block stands in for would not run.
    for module in _modules_of(branches):
        if has_hooks(module):
            return f"{_path(layer, module)} has hooks, which the FP8 block would not run"
        # Compiled code was traced with what was there.
        if not torch.compiler.is_compiling() and "forward" in vars(module):
            return f"the forward of {_path(layer, module)} was replaced on the object"
    config: Any = branches[0].owner.config
    kind, owner = config._attn_implementation, branches[0].owner
    if kind not in ATTENTION and not reads_lengths(config):
        return f"attn_implementation is {kind!r}; only {', '.join(ATTENTION)} and kinds of flash are known"
    window = getattr(owner, "sliding_window", getattr(config, "sliding_window", None))
    if window is not None and reads_lengths(config):
        return f"attn_implementation is {kind!r}, whose layers get no mask for sliding_window = {window}: use sdpa"
    if not family.encoder and getattr(config, "is_causal", True) is False:
        return "config.is_causal is False; only causal attention is supported"
    return None


def reads_lengths(config: Any) -> bool:
    """Whether transformers would compute attention by a kernel that is given lengths instead of a mask."""
    kind = config._attn_implementation
    return kind is not None and "flash" in kind and not kind.startswith("paged|")


def _modules_of(branches: tuple[Modules, ...]) -> Iterator[Any]:
    for core, owner, into, out, inner, pre, post, layer_scale, _, around, *_ in branches:
        if core is None:  # its own hooks run
            yield from (module for module in (pre, post) if module is not None)
            continue
        parts = owner._modules.values() if isinstance(core, Mlp) else (*into, *inner)  # an MLP's activation, too
        for module in (owner, *parts, out, pre, post, layer_scale, *around):
            if isinstance(module, nn.Module):
                yield module


def _is_conv1d(linear: Any) -> bool:
    return (type(linear).__module__, type(linear).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _path(layer: nn.Module, module: Any) -> str:
    return next((name for name, part in layer.named_modules() if part is module and name), "the layer")


def _is_own_norm(norm: nn.Module, family: Family) -> bool:
    if type(norm) in (nn.LayerNorm, nn.Identity):
        return True
    return (type(norm).__module__, type(norm).__name__) == (family.module, family.norm)


def has_hooks(module: Any, harmless: tuple[str, ...] = ("transformers.utils",), kinds: tuple[str, ...] = HOOKS) -> bool:
    """Whether somebody hooked the module, but for functions of modules whose names begin so; transformers' recording
    hooks stay on it and sleep."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return False
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(harmless)
        for hooks in kinds
        for hook in getattr(module, hooks).values()
    )


# ---- the layer -------------------------------------------------------------------------------------------------------


class Fp8DecoderLayer(Mixin):
    """Mixin before the layer's own class: FP8 while training, the original forward otherwise."""

    overcoat_recipe: Recipe
    overcoat_family: Any
    # The names of the arguments of the layer's own forward after hidden_states.
    overcoat_arguments: tuple[str, ...] = ()
    # Whether this layer's kept tensors go to host memory; None where those of no layer do.
    overcoat_offload: Optional[bool] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.overcoat_family = family_of(cls)
        cls.overcoat_arguments = tuple(inspect.signature(original_class(cls).forward).parameters)[2:]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own signature (transformers): hidden_states (B, S, H) -> (B, S, H); or (T, H) with `cu_seqlens`,
        where images begin."""
        kwargs.update(zip(self.overcoat_arguments, args, strict=False))
        embeddings: Any = kwargs.get("position_embeddings")
        mask = kwargs.get("attention_mask")
        is_known = isinstance(mask, Tensor) and not mask.numel()  # models/causal.py
        if is_known:
            mask = kwargs["attention_mask"] = None
        branches, family, lengths = None, self.overcoat_family, kwargs.get("cu_seqlens")
        batch = 1 if lengths is not None and hidden_states.dim() == 2 else hidden_states.shape[0]
        if embeddings is not None or not family.rotary:
            branches = self._fp8_branches(batch, kwargs.get("past_key_values", kwargs.get("layer_past")))
        if branches is None:
            starts = _as_starts(mask)
            if starts is not None:
                by_lengths = any(reads_lengths(part.config) for part in self.modules() if hasattr(part, "config"))
                kwargs["attention_mask"] = None if by_lengths else dense_mask(starts, *hidden_states.shape[:2])
            return super().forward(hidden_states, **kwargs)
        if hidden_states.dim() != 3 and lengths is None:
            raise ValueError(
                f"hidden_states has the shape {tuple(hidden_states.shape)}: a decoder layer takes (batch, sequence, "
                "hidden), the model input_ids of (batch, sequence)"
            )
        if lengths is None:
            if not is_known and (type(mask).__name__ == "BlockMask" or reads_lengths(branches[0].owner.config)):
                mask = _mask_from(mask, kwargs, hidden_states, not family.encoder)
            mask = check_mask(mask, hidden_states.shape[-2])
        else:
            mask = lengths.int()
        block = block_of(_as_called(branches, kwargs.get("is_causal")), family, self)
        tables = Tables(*_rotation(embeddings if family.rotary else None, hidden_states, block), mask)
        if family.q_scale is not None:
            first = block.branches[0]
            inner = (*first.inner, None, family.q_scale(self, kwargs["position_ids"]).view(-1, 1))
            block = block._replace(branches=(first._replace(inner=inner), *block.branches[1:]))
        watched = not torch.compiler.is_compiling() and bool(observers)
        for observer in observers if watched else ():
            observer.enter(self)
        result = run_block(hidden_states, block, tables, self.overcoat_recipe, self.overcoat_offload)
        for modules in branches:
            if modules.core is None:
                result = result + _run_as_it_is(result, modules, family, self.overcoat_recipe)
        for observer in observers if watched else ():
            observer.enter(None)
        return result

    def _fp8_branches(self, batch: int, cache: Any) -> Optional[tuple[Modules, ...]]:
        """The modules whose forward the FP8 block stands in for; None where each is to run its own."""
        # Not `torch.is_grad_enabled()`: a reentrant checkpoint runs its first forward without gradients, and the
        # recomputation must repeat the same numbers.
        if not self.training:
            return None
        family = self.overcoat_family
        if cache is not None:
            reason: Optional[str] = "a key/value cache was asked for (use_cache=True)"
        else:
            reason = _why_foreign(self, family)
        if reason is None:
            branches = family.branches(self, batch)
            reason = _why_changed(self, family, branches)
            if reason is None:
                return branches
        warnings.warn(f"this layer trains in its original precision: {reason}", stacklevel=3)
        return None


def _run_as_it_is(x: Tensor, modules: Modules, family: Family, recipe: Recipe) -> Tensor:
    y = modules.owner(norm_forward(x, _norm(modules.pre, family), recipe))
    return y[0] if isinstance(y, tuple) else y  # gpt-oss returns the router's scores as well


def _mask_from(mask: Any, inputs: dict[str, Any], x: Tensor, causal: bool) -> Any:
    """What flash and flex attention read, as `check_mask` takes it: lengths, padding (B, S), positions, a BlockMask."""
    batch, sequence = x.shape[:2]
    if type(mask).__name__ == "BlockMask":
        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], sequence, sequence, x.device)
    starts = inputs.get("cu_seq_lens_q")
    if starts is not None:
        return given_starts(starts, batch, sequence, x.device).view(1, 1, -1, 1)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        visible = mask.bool()[:, None, None].expand(batch, 1, sequence, sequence)
        return visible.tril() if causal else visible
    positions = inputs.get("position_ids")
    # Compiled code does not look for packed sequences, here as little as with sdpa.
    if mask is not None or not causal or positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return mask
    starts = document_starts(positions.expand(batch, -1))
    return None if len(starts) == batch + 1 else starts.view(1, 1, -1, 1)


def _as_called(branches: tuple[Modules, ...], causal: Optional[bool]) -> tuple[Modules, ...]:
    """Branches whose attention is causal or not as the model asks for in the call (CLIP's text tower), if it does."""
    if causal is None:
        return branches
    return tuple(
        modules._replace(core=Attention(modules.core.heads._replace(causal=causal)))
        if isinstance(modules.core, Attention)
        else modules
        for modules in branches
    )


def _rotation(embeddings: Any, x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """cos and sin (P, D); of no angle where the layer gets none, which the kernels multiply with exactly."""
    if embeddings is not None:
        cos, sin = embeddings
        return cos.flatten(0, -2), sin.flatten(0, -2)
    width = next(branch.core.heads.width for branch in block.branches if isinstance(branch.core, Attention))
    return x.new_ones(1, width), x.new_zeros(1, width)


def _as_starts(mask: Any) -> Optional[Tensor]:
    """What models/causal.py gives where sequences are packed, as attention takes it; None for other masks."""
    given = isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] > 1
    return mask.flatten() if given and mask.numel() == mask.shape[2] else None


def check_mask(mask: Any, sequence: int) -> Optional[Tensor]:
    """The mask a layer received, as attention takes it; ValueError for kinds that only other attention code reads."""
    if mask is None:
        return None
    starts = _as_starts(mask)
    if starts is not None:
        return starts
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != (sequence, sequence):
        kind = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {kind}; Overcoat's attention takes None or (batch, heads or 1, {sequence}, {sequence})"
            '. Load the model with attn_implementation="sdpa" (or "eager").'
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {mask.dtype}; Overcoat's attention takes bool (True = visible) or an additive floating "
            "mask. Write mask.bool() for one of zeros and ones."
        )
    return mask
