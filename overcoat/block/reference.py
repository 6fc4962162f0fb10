"""A whole decoder block in plain PyTorch: read this first.

A block is a list of residual branches. Each normalises the stream x, multiplies by stacked linear layers (q, k and v;
gate and up), computes something between them (attention, or an activation), multiplies by one output layer, and adds
the result to x:

    x = x + post(out_proj(mixer(in_proj(pre(x)))))

`run.py` computes the same in FP8, with a hand-written backward; here autograd derives it. `block` defines what a
`Block` computes: tests compare the FP8 block with it in FP64, models/verify.py a model's own layer in FP32.

Legend: T = B * S tokens of B rows, H hidden width, D head width, Q and KV heads of q and of k and v, N a layer's
outputs, I the MLP's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from overcoat.block.adapters import dropped
from overcoat.block.attention import Heads, Rotary, rotary_of
from overcoat.block.spec import Block, Branch, Linear, Norm, Tables

HIDDEN = -1e30  # an additive mask hides a key by -inf or by less than this
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda z: z * torch.sigmoid(z),
    "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu2": lambda z: z.clamp(min=0).square(),
    "relu": torch.relu,
}


def block(x: Tensor, spec: Block, tables: Tables) -> Tensor:
    """Return the block's result (T, H) for its input x (T, H), both in x's dtype."""
    source = x
    for branch in spec.branches:
        y = norm(source if spec.parallel else x, branch.pre)  # (T, H)
        z = linear(y, branch.in_proj)  # (T, (Q + 2 KV) D), with gates Q D more; or (T, 2 I), or (T, I)
        h = mixer(z, branch, tables)  # (T, Q D), or (T, I)
        y = linear(h, branch.out_proj)  # (T, H)
        x = norm(x + y, branch.post) if branch.norm_after_residual else x + norm(y, branch.post)
    return x


def norm(x: Tensor, spec: Optional[Norm]) -> Tensor:
    """Return the RMSNorm (`centered`: LayerNorm) of x (..., H); x itself if spec is None."""
    if spec is None:
        return x
    weight, bias, eps, centered = spec
    if centered:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # (..., H)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def linear(x: Tensor, spec: Linear) -> Tensor:
    """Return x (T, K) times the stacked weights, scale * (x W^T + bias) (T, sum of N), with adapters
    scale * (factor (x W^T + scaling x A^T B^T) + bias)."""
    parts = []
    for place, (weight, bias) in enumerate(zip(spec.weights, spec.biases, strict=True)):
        order = spec.orders[place] if spec.orders else None
        if order is not None:  # rows in the block's order
            weight, bias = order.take(weight), None if bias is None else order.take(bias)
        y = x @ weight.to(x.dtype).t()  # (T, N)
        for adapter in spec.adapters:
            a, b, scaling, layer, *_, factor = adapter
            if layer == place:
                added = (
                    scaling * (dropped(x, adapter) @ a.to(x.dtype).t()) @ b.to(x.dtype).t()
                )  # (T, N) by way of (T, r)
                y = y + (added if order is None or order.transposed else order.take(added.t()).t())
                if factor is not None:
                    y = y * (factor if order is None else order.take(factor)).to(x.dtype)
        parts.append(y + (0.0 if bias is None else bias.to(x.dtype)))
    return torch.cat(parts, -1) * spec.scale


def mixer(z: Tensor, branch: Branch, tables: Tables) -> Tensor:
    """Return what is between a branch's linear layers: attention of q, k and v, or the activation of gate and up."""
    mixer = branch.mixer
    if hasattr(mixer, "heads"):
        g, qkv = z.tensor_split([mixer.heads.gates], -1)  # (T, Q D), or without gates (T, 0)
        o = attention(qkv, rotary_of(tables, branch.qk_norm, mixer.heads), mixer.heads)
        return o * torch.sigmoid(g) if mixer.heads.gated else o
    f = ACTIVATIONS[mixer.activation]
    if not mixer.gated:
        return f(z)  # (T, I)
    gate, up = z.chunk(2, -1)  # (T, I) each
    return f(gate) * up


def attention(qkv: Tensor, rotary: Rotary, heads: Heads) -> Tensor:
    """Return softmax(scale q k^T) v (T, Q D) of qkv (T, (Q + 2 KV) D), after q's and k's norms and rotation."""
    q, k, v = split(qkv, rotary, heads)  # (B, Q, S, D), then (B, KV, S, D)
    if rotary.q_scale is not None:
        q = q * rotary.q_scale.view(-1, 1, q.shape[2], 1).to(q.dtype)
    k, v = (x.repeat_interleave(heads.num_q // heads.num_kv, 1) for x in (k, v))  # (B, Q, S, D)
    scores = heads.scale * q @ k.transpose(-1, -2)  # (B, Q, S, S)
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    visible, added = visible_pairs(rotary.mask, heads, q.shape[0], q.shape[2], q.device)  # (B or 1, Q or 1, S, S)
    blind = ~visible.any(-1, keepdim=True)  # queries that see no key get zeros
    scores = (scores + added.to(scores.dtype)).masked_fill(~visible & ~blind, -math.inf)
    if rotary.sinks is not None:  # one more score, without a value
        sinks = rotary.sinks.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)  # (B, Q, S, S + 1)
    p = scores.softmax(-1)[..., : k.shape[2]] * ~blind  # (B, Q, S, S)
    return (p @ v).transpose(1, 2).reshape(qkv.shape[0], -1)  # (T, Q D)


def split(qkv: Tensor, rotary: Rotary, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, Q, S, D), k and v (B, KV, S, D) of qkv (T, (Q + 2 KV) D): clipped, normalised, rotated."""
    if heads.clip:
        qkv = qkv.clamp(-heads.clip, heads.clip)
    widths = [count * heads.width for count in (heads.num_q, heads.num_kv, heads.num_kv)]
    parts = []
    for x, weight in zip(qkv.split(widths, -1), (rotary.q_weight, rotary.k_weight, None), strict=True):
        own = None if weight is None else Norm(weight, None, heads.eps)
        x = norm(x, own) if heads.full_norm else x  # of all heads together
        x = x.unflatten(-1, (-1, heads.width)).unflatten(0, (heads.batch, -1)).transpose(1, 2)  # (B, heads, S, D)
        parts.append(x if heads.full_norm else norm(x, own))  # of each head
    return rotate(parts[0], rotary.cos, rotary.sin), rotate(parts[1], rotary.cos, rotary.sin), parts[2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, heads, S, D), columns i and i + D / 2 rotated together, token t by row t % P of cos, sin (P, D)."""
    rows = torch.arange(x.shape[0] * x.shape[2], device=x.device) % len(cos)  # (T,)
    c, s = (table.to(x.dtype)[rows].view(x.shape[0], 1, x.shape[2], -1) for table in (cos, sin))  # (B, 1, S, D)
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def visible_pairs(mask: Any, heads: Heads, batch: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, bool (B or 1, Q or 1, S, S), and what is added to the scores (or 0-d zero).

    mask: None; bool or additive over all pairs (B or 1, Q or 1, S, S), which replaces `causal` and `window`; or
    `starts` (kernels/attention.py), int32 (documents + 1,), the tokens at which documents begin.
    """
    nothing = torch.zeros((), device=device)
    if mask is not None and mask.dtype == torch.bool:
        return mask, nothing
    if mask is not None and mask.dim() == 4:
        return mask > HIDDEN, mask.masked_fill(mask <= HIDDEN, 0)
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(rows, device=device)  # (S, S)
    visible = distance >= 0 if heads.causal else torch.ones_like(distance, dtype=torch.bool)
    if heads.window and heads.causal:
        visible = visible & (distance < heads.window)
    if mask is not None:
        tokens = torch.arange(batch * rows, device=device, dtype=mask.dtype)
        documents = torch.bucketize(tokens, mask, right=True).view(batch, rows)  # (B, S)
        visible = visible & (documents[:, :, None] == documents[:, None])[:, None]
    return visible.view(-1, 1, rows, rows), nothing
