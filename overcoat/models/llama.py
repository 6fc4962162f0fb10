"""The FP8 forward of a Llama-shaped decoder layer: Llama, Mistral, Qwen2 (biases), Qwen3 (q/k norm), Starcoder2.

    qkv, x = norm_linear(x, input_layernorm, [Wq, Wk, Wv])
    o      = attention(qkv)
    x      = linear_residual(o, Wo, x)
    gu, x  = norm_linear(x, post_attention_layernorm, [Wgate, Wup])
    x      = mlp(gu, Wdown, x)

Starcoder2 has LayerNorm, biases, and an MLP without gate: gu is then u of norm_linear(..., [Wfc]).

`Fp8DecoderLayer` is mixed into the layer's own class (convert.py), so parameters, names, hooks and the original forward
stay. It computes in FP8 in `train()` mode; otherwise, and whenever a module of it was replaced or hooked since (a
LoRA adapter, say) or a cache is asked for, the original forward runs.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.kernels.packed import dense_mask
from overcoat.ops.attention import Heads, Rotary
from overcoat.ops.block import decoder_block
from overcoat.ops.linear import Norm
from overcoat.ops.parameters import Block, Linear
from overcoat.recipe import Recipe

# The linear layers a layer must have, by attribute path: Llama's, and one's without a gate.
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
GELU_PROJECTIONS = (*_ATTENTION, "mlp.c_fc", "mlp.c_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

# Decoder layers of transformers whose forward is the one above.
SUPPORTED = {
    "transformers.models.llama.modeling_llama": "LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral": "MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3DecoderLayer",
    "transformers.models.starcoder2.modeling_starcoder2": "Starcoder2DecoderLayer",
}
# transformers' names of the GELUs, and the form of each.
GELUS = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that expect nothing of what a module gets and returns: transformers' sleeping recorders, FSDP2's gathering.
HARMLESS_HOOKS = ("transformers.utils", "torch.distributed")
# Attention code of transformers that hands every mask to the layer; others read position_ids or lengths instead.
ATTENTION = ("sdpa", "eager")


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's transformers class, whatever was mixed in (by this package or by FSDP2)."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("transformers."):
            return cls
    return type(module)


class Parts(NamedTuple):
    """The modules whose forward the FP8 block stands in for.

    gated: whether the MLP is SwiGLU; else it is GELU, and the norms are LayerNorm.
    projections: in the order of PROJECTIONS or GELU_PROJECTIONS, None where a replaced module has none; norms: of
        NORMS.
    """

    gated: bool
    projections: tuple[Any, ...]
    norms: tuple[Any, Any]
    attention: Any
    mlp: Any

    @property
    def paths(self) -> tuple[str, ...]:
        """Where `projections`, `norms`, `attention` and `mlp` lie in the layer."""
        return (*(PROJECTIONS if self.gated else GELU_PROJECTIONS), *NORMS, "self_attn", "mlp")


def parts_of(layer: nn.Module) -> Parts:
    """A supported layer's modules, looked up once a forward: by path that would take a tenth of a millisecond."""
    found: Any = layer
    attention, mlp = found.self_attn, found.mlp
    gated = hasattr(mlp, "gate_proj")
    names = ("gate_proj", "up_proj", "down_proj") if gated else ("c_fc", "c_proj")
    first = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    projections = (*first, *(getattr(mlp, name, None) for name in names))
    return Parts(gated, projections, (found.input_layernorm, found.post_attention_layernorm), attention, mlp)


def why_unsupported(layer: nn.Module) -> Optional[str]:
    """The reason why a layer of a supported kind cannot run in FP8, or None if it can."""
    parts = parts_of(layer)
    if None in parts.projections:
        return why_replaced(parts)
    config: Any = parts.attention.config
    # What accelerate does to spread a model over devices. It would run, or be left out, whatever the class is.
    modules = (layer, *parts.projections, *parts.norms, parts.attention, parts.mlp)
    for path, module in zip(("the layer", *parts.paths), modules, strict=True):
        if "forward" in vars(module):
            return f"the forward of {path} was replaced on the object: convert before"
    for part in (parts.attention, parts.mlp):
        for name in ("attention_dropout", "residual_dropout"):
            dropout = getattr(part, name, 0.0)
            if dropout:
                return f"{name} is {dropout}; only 0 is supported"
    known = ("silu", "swish") if parts.gated else tuple(GELUS)
    if config.hidden_act not in known:
        return f"hidden_act is {config.hidden_act!r}; only {', '.join(known)} are supported"
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        return f"partial_rotary_factor is {partial}; only 1.0 is supported"
    return why_replaced(parts)


def why_replaced(parts: Parts) -> Optional[str]:
    """The reason why a layer's modules or attention are not what the FP8 block computes; checked at each forward."""
    gated, projections, norms, attention, mlp = parts
    if None in projections:
        replaced = attention if None in projections[:4] else mlp
        return f"{_path(parts, replaced)} is a {type(replaced).__name__}, not the model's own"
    for module in projections:
        if type(module) is not nn.Linear:
            return f"{_path(parts, module)} is a {type(module).__name__}, not nn.Linear"
    for module in norms:
        if not _is_own_norm(module, gated):
            return f"{_path(parts, module)} is a {type(module).__name__}, not the model's own norm"
    # A hook on a module whose forward the FP8 block stands in for would not run.
    for module in (*projections, *norms, attention, mlp):
        if has_hooks(module):
            return f"{_path(parts, module)} has hooks, which the FP8 block would not run"
    config: Any = attention.config
    if config._attn_implementation not in ATTENTION:
        return f"attn_implementation is {config._attn_implementation!r}; only sdpa and eager masks are read"
    if getattr(config, "is_causal", True) is False:
        return "config.is_causal is False; only causal attention is supported"
    return None


def _path(parts: Parts, module: Any) -> str:
    modules = (*parts.projections, *parts.norms, parts.attention, parts.mlp)
    return next(path for path, part in zip(parts.paths, modules, strict=True) if part is module)


def _is_own_norm(module: nn.Module, gated: bool) -> bool:
    return type(module).__module__.startswith("transformers.") if gated else type(module) is nn.LayerNorm


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


class Fp8DecoderLayer(nn.Module):
    """Mixin before the layer's own class: FP8 while training, the original forward otherwise."""

    overcoat_recipe: Recipe
    # Whether this layer's kept tensors go to host memory; None where those of no layer do.
    overcoat_offload: Optional[bool] = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own signature (transformers): hidden_states (B, S, H) -> (B, S, H)."""
        embeddings: Any = kwargs.get("position_embeddings")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not mask.numel():  # models/causal.py
            mask = kwargs["attention_mask"] = None
        parts = None if args or embeddings is None else self._fp8_parts(kwargs.get("past_key_values"))
        if parts is None:
            starts = _as_starts(mask)
            if starts is not None:
                kwargs["attention_mask"] = dense_mask(starts, *hidden_states.shape[:2])
            return super().forward(hidden_states, *args, **kwargs)
        mask = check_mask(mask, hidden_states.shape[1])
        rotary, heads = _attention_inputs(parts.attention, embeddings, mask, hidden_states.shape[0])
        block, recipe = block_of(parts), self.overcoat_recipe
        return decoder_block(hidden_states, block, rotary, heads, recipe, self.overcoat_offload)

    def _fp8_parts(self, cache: Any) -> Optional[Parts]:
        """The modules whose forward the FP8 block stands in for; None where each is to run its own."""
        # Not `torch.is_grad_enabled()`: a reentrant checkpoint runs its first forward without gradients, and the
        # recomputation must repeat the same numbers.
        if not self.training:
            return None
        parts = parts_of(self)
        reason = "a key/value cache was asked for (use_cache=True)" if cache is not None else why_replaced(parts)
        if reason is None:
            return parts
        warnings.warn(f"this layer trains in its original precision: {reason}", stacklevel=3)
        return None


def _attention_inputs(
    module: Any, embeddings: tuple[Tensor, Tensor], mask: Optional[Tensor], batch: int
) -> tuple[Rotary, Heads]:
    """What attention needs beside q, k, v, of transformers' attention module."""
    cos, sin = (table.flatten(0, -2) for table in embeddings)
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    q_proj, k_proj, width = module.q_proj, module.k_proj, module.head_dim
    eps = float(q_norm.variance_epsilon) if q_norm is not None else 0.0
    num_q, num_kv = q_proj.out_features // width, k_proj.out_features // width
    heads = Heads(batch, num_q, num_kv, width, module.scaling, eps)
    weights = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
    return Rotary(cos, sin, mask, *weights), heads


def block_of(parts: Parts) -> Block:
    """The layer's parameters, as `decoder_block` takes them."""
    linears: list[Any] = [Linear(linear.weight, linear.bias) for linear in parts.projections]
    if parts.gated:
        first, second = (Norm(norm.weight, None, float(norm.variance_epsilon)) for norm in parts.norms)
        return Block(first, second, *linears)
    first, second = (Norm(norm.weight, norm.bias, float(norm.eps), centered=True) for norm in parts.norms)
    q, k, v, o, up, down = linears
    return Block(first, second, q, k, v, o, None, up, down, GELUS[parts.attention.config.hidden_act])


def _as_starts(mask: Any) -> Optional[Tensor]:
    """What models/causal.py gives where sequences are packed, as `attention` takes it; None for other masks."""
    given = isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] > 1
    return mask.flatten() if given and mask.numel() == mask.shape[2] else None


def check_mask(mask: Any, sequence: int) -> Optional[Tensor]:
    """The mask a layer received, as `attention` takes it; ValueError for kinds that only other attention code reads."""
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
