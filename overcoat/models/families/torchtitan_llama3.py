"""torchtitan's own Llama 3: Llama's layers, whose neighbouring columns rotate, in modules of torchtitan.

It has no family of models here: torchtitan computes the loss. Layers are given an index of tokens instead of cos and
sin, and flex attention's mask, lengths, or nothing where attention is plainly causal.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overcoat.block.attention import Attention, Heads
from overcoat.block.mlp import Mlp
from overcoat.block.spec import RowPermutation
from overcoat.kernels.attention import given_starts
from overcoat.models.family import Family, Modules

COMMON = "torchtitan.models.common."
# What the block stands in for, by the name it has in a layer.
CLASSES = {
    "attention": ("GQAttention",),
    "attention.qkv_linear": ("QKVLinear", "FusedQKVLinear"),
    "attention.rope": ("ComplexRoPE",),
    "attention.inner_attention": ("ScaledDotProductAttention", "FlexAttention", "VarlenAttention"),
    "feed_forward": ("FeedForward",),
}


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x))."""
    attention, mlp = layer.attention, layer.feed_forward
    qkv, width, num_q, num_kv = attention.qkv_linear, attention.head_dim, attention.n_heads, attention.n_kv_heads
    heads = Heads(batch, num_q, num_kv, width, attention.scaling or width**-0.5, rope_interleaved=True)
    in_proj: tuple[Any, ...]
    orders: tuple[Optional[RowPermutation], ...]
    if hasattr(qkv, "wqkv"):
        in_proj, orders = (qkv.wqkv,), (RowPermutation(width, width, num_q + num_kv, True, num_q // num_kv),)
    else:
        in_proj = (qkv.wq, qkv.wk, qkv.wv)
        orders = (RowPermutation(width, width, num_q, True), RowPermutation(width, width, num_kv, True), None)
    around = (qkv, attention.rope, attention.inner_attention)
    return (
        Modules(
            Attention(heads), attention, in_proj, attention.wo, pre=layer.attention_norm, around=around, orders=orders
        ),
        Modules(Mlp("silu", True), mlp, (mlp.w1, mlp.w3), mlp.w2, pre=layer.ffn_norm),
    )


def refused(layer: Any) -> Optional[str]:
    """Anything but the modules that were read."""
    for path, names in CLASSES.items():
        part = layer.get_submodule(path)
        if not type(part).__module__.startswith(COMMON) or type(part).__name__ not in names:
            return f"{path} is a {type(part).__module__}.{type(part).__name__}; only {', '.join(names)} is supported"
    for path, part in layer.named_modules():
        if path and not type(part).__module__.startswith((COMMON, "torch.nn.")):
            return f"{path} is a {type(part).__module__}.{type(part).__name__}, not torchtitan's own"
    attention = layer.attention
    if attention.q_norm is not None or attention.k_norm is not None:
        return "attention has norms of q and k; only Llama 3's is supported"
    if getattr(attention.inner_attention, "window_size", (-1, 0)) != (-1, 0):
        return f"window_size is {attention.inner_attention.window_size}; only (-1, 0) is supported"
    return None


def inputs(layer: Any, x: Tensor, own: dict[str, Any]) -> dict[str, Any]:
    """attention_masks and positions (B, S) as the arguments of transformers' layers. ValueError: tensor parallelism has
    divided the layer's weights."""
    attention, positions = layer.attention, own.get("positions")
    mask: Any = own.get("attention_masks")
    if isinstance(attention.wo.weight, DTensor):
        raise ValueError(
            "tensor parallelism has divided this layer's weights, and FP8 layers take whole ones: set "
            "parallelism.tensor_parallel_degree=1, or leave this layer out by filter_fn"
        )
    cache = attention.rope.cache
    angles = torch.view_as_real(cache[: x.shape[1]] if positions is None else cache[positions])  # (..., S, D / 2, 2)
    if hasattr(mask, "cu_seq_q"):
        mask = given_starts(mask.cu_seq_q, x.shape[0], x.shape[1], x.device).view(1, 1, -1, 1)
    return {"position_embeddings": (angles[..., 0], angles[..., 1]), "attention_mask": mask}


FAMILIES = (
    Family(
        module="torchtitan.models.llama3.model",
        layer="Llama3TransformerBlock",
        causal="",
        norm="RMSNorm",
        branches=branches,
        samples={},
        refused=refused,
        parts=tuple(COMMON + name for name in ("attention", "feed_forward", "linear", "nn_modules")),
        inputs=inputs,
    ),
)
