"""Encoders of text and images: attention of all tokens, LayerNorm and biases, an MLP with GELU and without gate.

In the towers of Qwen's and Mistral's vision-language models images of all sizes lie in one row, rotated by row and
column: (T, H) with `cu_seqlens` (Qwen), or kept apart by the mask (Pixtral).
"""

from __future__ import annotations

from typing import Any

from overcoat.block.mlp import Mlp
from overcoat.models.decoder import activation_of, attention, gated_mlp, plain_mlp
from overcoat.models.family import Family, Modules


def vit(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + fc2(gelu(fc1(norm(x))))."""
    mlp = layer.mlp
    return (
        attention(layer.attention, batch, pre=layer.layernorm_before),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, layer.attention.config.hidden_act, pre=layer.layernorm_after),
    )


def clip(layer: Any, batch: int) -> tuple[Modules, ...]:
    """The text tower's layers are of the same class, and the model asks them for causal attention in the call."""
    module, mlp = layer.self_attn, layer.mlp
    return (
        attention(module, batch, out_proj=module.out_proj, pre=layer.layer_norm1),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, module.config.hidden_act, pre=layer.layer_norm2),
    )


def dinov2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """A scale of each column after attention and MLP (LayerScale), and in the largest model SwiGLU."""
    mlp, after = layer.mlp, {"pre": layer.norm2, "layer_scale": (layer.layer_scale2, "lambda1")}
    return (
        attention(layer.attention, batch, pre=layer.norm1, layer_scale=(layer.layer_scale1, "lambda1")),
        gated_mlp(mlp, "silu", **after)
        if hasattr(mlp, "gate_proj")
        else plain_mlp(mlp, mlp.fc1, mlp.fc2, mlp.config.hidden_act, **after),
    )


def internvl(layer: Any, batch: int) -> tuple[Modules, ...]:
    """LayerScale; in the largest model RMSNorms, also of all heads of q together and of k."""
    module, mlp, norms = layer.attention, layer.mlp, {"pre": layer.layernorm_before, "full_norm": True}
    after = {"pre": layer.layernorm_after, "layer_scale": (layer, "lambda_2")}
    return (
        attention(module, batch, out_proj=module.projection_layer, layer_scale=(layer, "lambda_1"), **norms),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, mlp.config.hidden_act, **after),
    )


def qwen3_vl(layer: Any, batch: int) -> tuple[Modules, ...]:
    """q, k and v in one layer."""
    module, mlp = layer.attn, layer.mlp
    return (
        attention(module, batch, in_proj=(module.qkv,), out_proj=module.proj, pre=layer.norm1),
        plain_mlp(mlp, mlp.linear_fc1, mlp.linear_fc2, module.config.hidden_act, pre=layer.norm2),
    )


def qwen2_5_vl(layer: Any, batch: int) -> tuple[Modules, ...]:
    """RMSNorm, SwiGLU with biases; in most layers `cu_seqlens` says where each window of 8 x 8 patches begins."""
    module = layer.attn
    return (
        attention(module, batch, in_proj=(module.qkv,), out_proj=module.proj, pre=layer.norm1),
        gated_mlp(layer.mlp, module.config.hidden_act, pre=layer.norm2),
    )


def pixtral(layer: Any, batch: int) -> tuple[Modules, ...]:
    """RMSNorm, SwiGLU."""
    return (
        attention(layer.attention, batch, pre=layer.attention_norm),
        gated_mlp(layer.feed_forward, pre=layer.ffn_norm),
    )


def modernbert(layer: Any, batch: int) -> tuple[Modules, ...]:
    """No norm before the first attention; rotation; gated GELU from one layer; windows, which arrive as the mask."""
    module, mlp, scaling = layer.attn, layer.mlp, layer.attn.head_dim**-0.5
    mixer = Mlp(activation_of(mlp.config.hidden_activation), True)
    return (
        attention(module, batch, in_proj=(module.Wqkv,), out_proj=module.Wo, scaling=scaling, pre=layer.attn_norm),
        Modules(mixer, mlp, (mlp.Wi,), mlp.Wo, pre=layer.mlp_norm),
    )


def bert(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = norm(x + attention(x)); x = norm(x + dense(gelu(dense(x)))): norms of the sums."""
    module, after, mlp, last = layer.attention.self, layer.attention.output, layer.intermediate, layer.output
    in_proj, width = (module.query, module.key, module.value), module.attention_head_size
    first = attention(module, batch, in_proj=in_proj, out_proj=after.dense, width=width, post=after.LayerNorm)
    second = plain_mlp(mlp, mlp.dense, last.dense, module.config.hidden_act, post=last.LayerNorm)
    return (
        first._replace(norm_after_residual=True, around=(layer.attention, after)),
        second._replace(norm_after_residual=True, around=(last,)),
    )


def _of(model_type: str, layer: str, model: str, *rest: Any, norm: Any = None, rotary: bool = False) -> Family:
    return Family.of(model_type, "", *rest, layer=layer, causal=model, norm=norm, encoder=True, rotary=rotary)


RMS = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
WINDOWS = {"local_attention": 16, "global_attn_every_n_layers": 2}
FAMILIES = (
    _of("vit", "ViTLayer", "ViTModel", vit, {"vit": {}}),
    _of("clip", "CLIPEncoderLayer", "CLIPVisionModel", clip, {"clip": {}, "clip-gelu": {"hidden_act": "gelu"}}),
    _of("siglip", "SiglipEncoderLayer", "SiglipVisionModel", clip, {"siglip": {}}),
    # On images of different sizes, padded to one length: a mask of all pairs hides the padding.
    _of("siglip2", "Siglip2EncoderLayer", "Siglip2VisionModel", clip, {"siglip2": {}}),
    _of("idefics3", "Idefics3EncoderLayer", "Idefics3VisionTransformer", clip, {"idefics3": {}}),
    _of("smolvlm", "SmolVLMEncoderLayer", "SmolVLMVisionTransformer", clip, {"smolvlm": {}}),
    _of("dinov2", "Dinov2Layer", "Dinov2Model", dinov2, {"dinov2": {}, "dinov2-swiglu": {"use_swiglu_ffn": True}}),
    _of(
        "internvl", "InternVLVisionLayer", "InternVLVisionModel", internvl, {"internvl": {}, "internvl-6b": RMS},
        norm="InternVLVisionRMSNorm",
    ),
    _of("qwen3_vl", "Qwen3VLVisionBlock", "Qwen3VLVisionModel", qwen3_vl, {"qwen3-vl-vision": {}}, rotary=True),
    _of(
        "qwen2_5_vl", "Qwen2_5_VLVisionBlock", "Qwen2_5_VisionTransformerPretrainedModel", qwen2_5_vl,
        {"qwen2.5-vl-vision": {"fullatt_block_indexes": [1]}}, norm="Qwen2_5_VLRMSNorm", rotary=True,
    ),
    _of(
        "pixtral", "PixtralAttentionLayer", "PixtralVisionModel", pixtral, {"pixtral": {}}, norm="PixtralRMSNorm",
        rotary=True,
    ),
    _of("modernbert", "ModernBertEncoderLayer", "ModernBertModel", modernbert, {"modernbert": WINDOWS}, rotary=True),
    _of("bert", "BertLayer", "BertModel", bert, {"bert": {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }}),
)  # fmt: skip
