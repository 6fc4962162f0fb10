"""Attention as the mixer of a branch: q/k norm, rotary embedding, softmax attention, and the tensors they save.

With `Recipe.kept_attention="8bit"` the fused q/k/v buffer is saved as it was *before* the rotation: q and k in 12 bits,
v in 8, one group per token and head (2 U for multi-head attention, less with grouped queries; U as in memory.py).

q and k decode exactly (formats/bf12.py), so the backward recomputes the forward's own scores. An error in them would
grow under exp: with 8-bit q and k, gradients explode where scores exceed about 100. v decodes with an error, so the
backward recomputes o from the decoded v: dP - sum(do * o) cancels only if o and dP use the same v. So o is not saved.
Before v is encoded, its token mean is subtracted per head where that lowers max |v|: a bias or an outlier channel
cancels in attention's gradients, its quantization error would not.

With "bf16" q, k, v and o are saved in 16 bits, with the log-sum-exp (4 U).

With `Heads.gated` the layers make gates g as well, and the output layer reads h = o * sigmoid(g). g is saved in 8-bit
groups, with "bf16" in 16 bits (0.5 U or 1 U); h is rebuilt in the backward, with the forward's scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.adapters import (
    FactorGradients,
    Input,
    adapters_backward_,
    add_adapters_,
    before_factors,
    has_factors,
)
from overcoat.block.context import context_attention, context_attention_backward, gathered, share_largest
from overcoat.block.linear import (
    Gradient,
    OutputSaved,
    linear_backward,
    linear_forward,
    quantize_blocks_of,
    rebuild_input_t,
)
from overcoat.block.spec import Adapter, Branch, ForwardScales, Linear, Tables, padded
from overcoat.formats.bits import from_bits, to_bits
from overcoat.kernels.attention import attention as attention_op
from overcoat.kernels.attention import attention_backward as attention_backward_op
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.gate import gate, gate_backward
from overcoat.kernels.groups import group_decode, group_encode, token_center
from overcoat.kernels.norm import rms_norm, rms_norm_backward
from overcoat.kernels.quantize import amax
from overcoat.kernels.rope import qk_rope, qk_rope_backward, qk_rope_decode12, qk_rope_encode12_
from overcoat.kernels.rope_quantize import (
    qk_rope_backward_amax,
    qk_rope_backward_blocks,
    qk_rope_backward_quantize,
)
from overcoat.recipe import Recipe


class Heads(NamedTuple):
    """Constants of attention: batch, query heads, key/value heads, head width, softmax scale, eps of the q/k norm.

    full_norm: the q/k norm is over all heads of q (or k) together (OLMo 2); False: over each head (Qwen 3).
    causal: a token attends to itself and earlier tokens; ignored if the mask covers all pairs.
    rotates: False if the layer has no rotary embedding (every fourth layer of SmolLM3).
    rotated: how many of a head's first columns rotate (Phi); 0: all.
    rope_interleaved: columns 2 i and 2 i + 1 rotate together (GLM-4); False: columns i and i + rotated / 2.
    rope_repeated: with `rope_interleaved`, the tables hold each angle twice in a row (Cohere).
    clip: q, k and v are first clamped to [-clip, clip] (OLMo); 0: not.
    softcap: scores are softcap * tanh(score / softcap) (Gemma 2); 0: not.
    window: with `causal`, a token attends to the last `window` tokens, itself included (Mistral, Gemma 3); 0: no limit.
        Ignored if the mask covers all pairs.
    context: process group over which rows are split (context.py), or None.
    gated: o is multiplied by sigmoid(g) before the output layer (Qwen3.5, Afmoe); the stacked layers make
        (g | q | k | v), g as wide as q.
    """

    batch: int
    num_q: int
    num_kv: int
    width: int
    scale: float
    eps: float = 0.0
    full_norm: bool = False
    causal: bool = True
    rotates: bool = True
    rotated: int = 0
    rope_interleaved: bool = False
    rope_repeated: bool = False
    clip: float = 0.0
    softcap: float = 0.0
    window: int = 0
    context: Any = None
    gated: bool = False

    @property
    def gates(self) -> int:
        """Return how many columns g has."""
        return self.num_q * self.width if self.gated else 0


class Rotary(NamedTuple):
    """Tensors of one layer's attention. cos, sin (P, D) and mask are shared by all layers.

    q_weight, k_weight: q/k norm weights, (D,) or with `Heads.full_norm` (heads * D,), or None.
    sinks: (num_q,), one extra score per head without a value (gpt-oss), or None.
    q_scale: (P, 1), factor of q (Ministral 3), or None.
    """

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None
    q_weight: Optional[Tensor] = None
    k_weight: Optional[Tensor] = None
    sinks: Optional[Tensor] = None
    q_scale: Optional[Tensor] = None


# While models/recording.py records, each observer's `note` is called with every layer's log-sum-exp (B, num_q, S).
observers: list[Any] = []


def rotary_of(tables: Tables, qk_norm: Sequence[Any], heads: Heads) -> Rotary:
    """Return tables (P, D) in the kernels' layout: columns i and i + D / 2 rotate together.

    Columns that do not rotate get cos 1 and sin 0.
    """
    cos, sin, mask = tables
    if not heads.rotates:
        cos = cos.new_ones((1, heads.width))
        return Rotary(cos, torch.zeros_like(cos), mask, *qk_norm)
    pairs = (heads.rotated or heads.width) // 2
    if heads.rope_interleaved or 2 * pairs < heads.width or cos.shape[1] == pairs:
        cos, sin = (x[:, ::2] if heads.rope_repeated else x[:, :pairs] for x in (cos, sin))
        cos, sin = padded(cos, heads.width, 1.0), padded(sin, heads.width, 0.0)
    return Rotary(cos, sin, mask, *qk_norm)


def attend(
    rotated: Tensor, rotary: Rotary, heads: Heads, observed: bool = False, keys: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """Return o (T, num_q * D) and the log-sum-exp (B, num_q, S) with sinks, from rotated q, k and v.

    Multiplies q by `Rotary.q_scale` in place. keys: `gathered` k and v if already there (context parallelism).
    """
    if rotary.q_scale is not None:
        scale_q(rotated[:, : heads.num_q * heads.width], rotary.q_scale)
    if heads.context is None:
        shape = (rotary.mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
        o, lse = attention_op(rotated, *shape, heads.causal, heads.softcap, heads.window)
    else:
        o, lse = context_attention(rotated, gathered(rotated, heads) if keys is None else keys, heads)
    if observed:
        _observe(lse)
    if rotary.sinks is None:
        return o, lse
    whole = torch.logaddexp(lse, rotary.sinks.float()[:, None])
    return _by_head(o, heads).mul((lse - whole).exp().transpose(1, 2).unsqueeze(3)).to(o.dtype).view_as(o), whole


def _by_head(x: Tensor, heads: Heads) -> Tensor:
    """Return x (T, num_q * D) as a view (B, S, num_q, D)."""
    return x.view(heads.batch, -1, heads.num_q, heads.width)


def scale_q(q: Tensor, factor: Tensor) -> None:
    """Multiply q (T, num_q * D) in place by factor (P, 1), repeated over rows of P tokens."""
    q.unflatten(0, (-1, factor.shape[0])).mul_(factor.to(q.dtype))


def sink_gradient(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor, heads: Heads) -> Tensor:
    """Return the gradient of sinks (num_q,): -P * sum_d(do * o), summed over tokens, since a sink has no value."""
    mean = (_by_head(do.float(), heads) * _by_head(o.float(), heads)).sum(3).transpose(1, 2)
    return -((sinks.float()[:, None] - lse).exp() * mean).sum((0, 2)).to(sinks.dtype)


def _observe(lse: Tensor) -> None:
    if not torch.compiler.is_compiling():
        for observer in observers:
            observer.note(lse)


class AttentionSaved(NamedTuple):
    """Tensors saved by attention: q/k/v before the rotation, as codes or in 16 bits.

    "8bit": qkv holds codes; lower: the lower bits of q and k; qkv_amax: group maxima; qkv_center: v's subtracted mean.
    "bf16": qkv, o and lse. clipped: one bit per element of q/k/v that `Heads.clip` changed.
    """

    qkv: Tensor
    lower: Optional[Tensor] = None
    qkv_amax: Optional[Tensor] = None
    qkv_center: Optional[Tensor] = None
    o: Optional[Tensor] = None
    lse: Optional[Tensor] = None
    clipped: Optional[Tensor] = None


class GateSaved(NamedTuple):
    """Tensors saved by an output gate: g in 8-bit groups; or with "bf16" in 16 bits, and None."""

    g: Tensor
    g_amax: Optional[Tensor]


def gate_forward(o: Tensor, g: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, GateSaved]:
    """Return h = o * sigmoid(g) (T, num_q * D), max |h| (0-d), and the saved tensors."""
    g = g.contiguous()
    keeps_codes = recipe.kept_attention == "8bit"
    entry = GateSaved(*group_encode(g, recipe.kept_format, recipe.group_size)) if keeps_codes else GateSaved(g, None)
    return *gate(o, g), entry


def gate_decode(saved: GateSaved, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return g (T, num_q * D), decoded to `dtype`."""
    if saved.g_amax is None:
        return saved.g
    return group_decode(saved.g, saved.g_amax, recipe.kept_format, recipe.group_size, dtype)


def attention_forward(
    qkv: Tensor, rotary: Rotary, heads: Heads, recipe: Recipe
) -> tuple[Tensor, Tensor, AttentionSaved]:
    """Return o (T, num_q * D), an upper bound of max |o| (0-d), and the saved tensors.

    qkv: (T, (num_q + 2 num_kv) * D), the projections' output; overwritten.
    """
    cos, sin, _, q_weight, k_weight, *_ = rotary
    clipped = None
    if heads.clip:
        clipped = to_bits(qkv.abs() > heads.clip)
        qkv = qkv.clamp_(-heads.clip, heads.clip)
    tables = (cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)
    if recipe.kept_attention == "bf16":
        # The bound and not amax(o), so that "bf16" and "8bit" have the same forward bit for bit. With sinks max |v| is
        # a poor bound of |o|: a sink may take most of the softmax.
        rotated, bound = _rotated(qkv, rotary, heads)
        o, lse = attend(rotated, rotary, heads, observed=True)
        bound = bound if rotary.sinks is None else amax(o)
        return o, bound, AttentionSaved(qkv, o=o, lse=lse, clipped=clipped)
    center = token_center(qkv[:, -heads.num_kv * heads.width :])
    # `qk_rope_encode12_` norms (each head) and rotates q and k in place.
    rotated = _rotated(qkv, rotary, heads)[0] if heads.full_norm else qkv
    if heads.full_norm:
        tables = (cos, sin, None, None, heads.eps, heads.num_q, heads.num_kv)
    codes, lower, group_amax, bound = qk_rope_encode12_(qkv, center, *tables, recipe.kept_format)
    o, _ = attend(rotated, rotary, heads, observed=True)
    bound = bound if rotary.sinks is None else amax(o)
    return o, bound, AttentionSaved(codes, lower, group_amax, center, clipped=clipped)


def _rotated(qkv: Tensor, rotary: Rotary, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return qkv with q and k normalised and rotated, and an upper bound of max |o| (0-d)."""
    cos, sin, _, q_weight, k_weight, *_ = rotary
    if heads.full_norm:
        q, k, v = _split(qkv, heads)
        q, k = rms_norm(q, q_weight, heads.eps)[0], rms_norm(k, k_weight, heads.eps)[0]
        qkv, q_weight, k_weight = torch.cat((q, k, v), 1), None, None
    return qk_rope(qkv, cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)


def _split(qkv: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    return qkv.split((heads.num_q * heads.width, heads.num_kv * heads.width, heads.num_kv * heads.width), 1)


class Decoded(NamedTuple):
    """Inputs of attention's backward: rotated q/k/v, o and lse.

    inputs: q/k/v before norm and rotation, if there are q/k norms. keys: `gathered` k and v (context parallelism).
    """

    rotated: Tensor
    o: Tensor
    lse: Tensor
    inputs: Optional[Tensor]
    keys: Optional[Tensor] = None


def attention_decode(
    saved: AttentionSaved, rotary: Rotary, heads: Heads, recipe: Recipe, dtype: torch.dtype
) -> Decoded:
    """Decode the saved tensors to `dtype` and rotate q and k again; o and lse are saved or recomputed."""
    cos, sin, _, q_weight, k_weight, *_ = rotary
    has_norms = q_weight is not None or k_weight is not None
    qkv = saved.qkv
    if saved.lower is None:
        assert saved.o is not None
        assert saved.lse is not None
        rotated, _ = _rotated(qkv, rotary, heads)
        if rotary.q_scale is not None:
            scale_q(rotated[:, : heads.num_q * heads.width], rotary.q_scale)
        keys = None if heads.context is None else gathered(rotated, heads)
        return Decoded(rotated, saved.o, saved.lse, qkv if has_norms else None, keys)
    codes, last = saved[:4], (heads.num_q, heads.num_kv, recipe.kept_format, dtype)
    if has_norms:
        qkv = qk_rope_decode12(*codes, None, None, *last)
        rotated, _ = _rotated(qkv, rotary, heads)
    else:
        rotated = qk_rope_decode12(*codes, cos, sin, *last)
    keys = None if heads.context is None else gathered(rotated, heads)
    o, lse = attend(rotated, rotary, heads, keys=keys)
    return Decoded(rotated, o, lse, qkv if has_norms else None, keys)


def rotated_gradients(do: Tensor, decoded: Decoded, rotary: Rotary, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rotated q, rotated k, and v, (T, heads * D) each, from do (T, num_q * D)."""
    rotated, o, lse, _, keys = decoded
    gradients: tuple[Tensor, Tensor, Tensor]
    if keys is not None:
        gradients = context_attention_backward(do, rotated, keys, o, lse, heads)
    else:
        arguments = (do.contiguous(), rotated, o, lse, rotary.mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
        gradients = attention_backward_op(*arguments, heads.causal, heads.softcap, heads.window)
    if rotary.q_scale is not None:
        scale_q(gradients[0], rotary.q_scale)
    return gradients


def qkv_gradient(
    gradients: tuple[Tensor, Tensor, Tensor], inputs: Optional[Tensor], rotary: Rotary, heads: Heads
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Return the gradients of qkv and of the q/k norm weights, from `rotated_gradients` and `Decoded.inputs`."""
    cos, sin, _, q_weight, k_weight, *_ = rotary
    if heads.full_norm:
        return _full_norm_gradient(gradients, inputs, rotary, heads)
    dqkv, dq_weight, dk_weight = qk_rope_backward(
        *gradients, inputs, cos, sin, q_weight, k_weight, heads.eps, heads.num_q
    )
    return (
        dqkv,
        None if q_weight is None else dq_weight.to(q_weight.dtype),
        None if k_weight is None else dk_weight.to(k_weight.dtype),
    )


def _full_norm_gradient(gradients: Any, inputs: Any, rotary: Rotary, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    assert rotary.q_weight is not None
    assert rotary.k_weight is not None
    turned, _, _ = qk_rope_backward(*gradients, None, rotary.cos, rotary.sin, None, None, heads.eps, heads.num_q)
    (dq, dk, dv), (q, k, _) = _split(turned, heads), _split(inputs, heads)
    dq, dq_weight = rms_norm_backward(dq, q, rms_norm(q, rotary.q_weight, heads.eps)[1], rotary.q_weight)
    dk, dk_weight = rms_norm_backward(dk, k, rms_norm(k, rotary.k_weight, heads.eps)[1], rotary.k_weight)
    return torch.cat((dq, dk, dv), 1), dq_weight, dk_weight


def qkv_gradient_quantized(
    gradients: tuple[Tensor, Tensor, Tensor], rotary: Rotary, heads: Heads, in_proj: Linear, recipe: Recipe
) -> Gradient:
    """Return the gradient of qkv in both FP8 layouts, never in 16 bits; for layers without q/k norms.

    With one scale per tensor also its sums over tokens, if `in_proj` has biases.
    """
    arguments = (*gradients, rotary.cos, rotary.sin)
    if recipe.linear_scaling == "block":
        data, scale, data_t, scale_t = qk_rope_backward_blocks(*arguments, recipe.grad_format, heads.num_q)
        return Gradient(data, data_t, scale, None, gradients[0].dtype, scale_t)
    top, sums = qk_rope_backward_amax(*arguments, heads.num_q, in_proj.has_bias)
    data, data_t, scale = qk_rope_backward_quantize(*arguments, top, recipe.grad_format, heads.num_q)
    return Gradient(data, data_t, scale, sums if in_proj.has_bias else None, gradients[0].dtype)


class Attention(NamedTuple):
    """The mixer whose stacked linear layers make q, k and v, and g if `Heads.gated`.

    `Branch.qk_norm`: the fields of `Rotary` from q_weight.
    """

    heads: Heads

    @property
    def saved(self) -> tuple[type[Any], ...]:
        """Types of the tensors that `inside` and `output` save, in order."""
        return (AttentionSaved, GateSaved, OutputSaved) if self.heads.gated else (AttentionSaved, OutputSaved)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the memory report: of the input layers, of each of `saved`, of the norm after."""
        gate = ("attention gate",) if self.heads.gated else ()
        return ("attention input", "attention", *gate, "attention output", "attention norm")

    def inside(
        self, z: Tensor, branch: Branch, tables: Tables, recipe: Recipe, saved: list[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return h, which is o without a gate, and an upper bound of max |h|, and append to `saved`."""
        heads, gates = self.heads, self.heads.gates
        qkv = z[:, gates:].contiguous() if gates else z
        h, h_amax, entry = attention_forward(qkv, rotary_of(tables, branch.qk_norm, heads), heads, recipe)
        saved.append(entry)
        if gates:
            h, h_amax, gate_entry = gate_forward(h, z[:, :gates], recipe)
            saved.append(gate_entry)
        if heads.context is not None:
            share_largest(h_amax, heads.context)
        return h, h_amax

    def output(
        self,
        inside: Any,
        branch: Branch,
        recipe: Recipe,
        saved: list[Any],
        cached: ForwardScales,
        residual: Optional[Tensor],
    ) -> Tensor:
        """Return the output layer's result, plus the residual if given, and append to `saved`."""
        (h, h_amax), out_proj = inside, branch.out_proj
        early, after = (None, residual) if out_proj.adapters and has_factors(out_proj) else (residual, None)
        y, entry = linear_forward(h, out_proj, h.dtype, recipe, h_amax, cached.out_proj, early)
        if out_proj.adapters:
            add_adapters_(y, out_proj, Input(h), after)
        saved.append(entry)
        return y

    def recompute(self, inside: Any, branch: Branch, recipe: Recipe, saved: list[Any], cached: ForwardScales) -> None:
        """Save what `output` saves, without computing its result."""
        self.output(inside, branch, recipe, saved, cached, None)

    def backward(
        self,
        dy: Tensor,
        dy_amax: Optional[Tensor],
        saved: list[Any],
        branch: Branch,
        tables: Tables,
        recipe: Recipe,
        out_proj_needs_grad: bool,
    ) -> tuple[Tensor | Gradient, Linear, tuple[Optional[Tensor], ...]]:
        """Return the gradients of z, of the output layer and of `Branch.qk_norm`; pop what `inside` and `output` saved.

        q/k/v's is written straight in FP8, unless q/k norms, clipping, a gate or adapters read it in 16 bits. With
        block scales that also needs heads of 128 columns and no biases.
        """
        heads, scales, rotary = self.heads, saved.pop(), rotary_of(tables, branch.qk_norm, self.heads)
        g = gate_decode(saved.pop(), recipe, dy.dtype) if heads.gated else None
        entry = saved.pop()
        decoded, clipped = attention_decode(entry, rotary, heads, recipe, dy.dtype), entry.clipped
        del entry
        h = decoded.o if g is None else gate(decoded.o, g)[0]
        dora = FactorGradients()
        if branch.out_proj.adapters and has_factors(branch.out_proj):
            dy_amax = None
            dy, dora = before_factors(dy, branch.out_proj, Input(h), scales.w_amax, recipe)
        x_t = rebuild_input_t(h, scales.x_scale) if out_proj_needs_grad else None
        out_proj = linear_backward(dy, x_t, branch.out_proj, scales.w_amax, recipe, dy_amax)
        del x_t
        do, dg = out_proj.dx, None
        assert do is not None
        adapters: tuple[Adapter, ...] = ()
        if branch.out_proj.adapters:
            adapters = adapters_backward_(dy, do, branch.out_proj, Input(h), dora.factors)
        d_out_proj = Linear(out_proj.dweights, dora.biases or out_proj.dbiases, adapters=adapters)
        del h, out_proj
        if g is not None:
            do, dg = gate_backward(do, decoded.o, g)
            del g
        gradients, inputs = rotated_gradients(do, decoded, rotary, heads), decoded.inputs
        dsinks = None if rotary.sinks is None else sink_gradient(do, decoded.o, decoded.lse, rotary.sinks, heads)
        del decoded, do
        is_plain = rotary.q_weight is None and rotary.k_weight is None and clipped is None and dg is None
        in_fp8 = recipe.linear_scaling == "tensor" or (heads.width == BLOCK and not branch.in_proj.has_bias)
        if is_plain and in_fp8 and not branch.in_proj.adapters:
            dz: Tensor | Gradient = qkv_gradient_quantized(gradients, rotary, heads, branch.in_proj, recipe)
            return dz, d_out_proj, (None, None, dsinks, None)[: len(branch.qk_norm)]
        dz, *dnorms = qkv_gradient(gradients, inputs, rotary, heads)
        del gradients, inputs
        if clipped is not None:
            dz = dz.masked_fill(from_bits(clipped), 0.0)
        if dg is not None:
            dz = torch.cat((dg, dz), 1)
            del dg
        dz = quantize_blocks_of(dz, branch.in_proj, recipe)
        return dz, d_out_proj, (*dnorms, dsinks, None)[: len(branch.qk_norm)]

    def scales(self, saved: list[Any]) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """Return `ForwardScales.activation` and `ForwardScales.out_proj` from the last entry of `saved`."""
        return None, saved[-1].w_amax
