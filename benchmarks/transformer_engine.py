"""Transformer Engine's decoder block with the weights of a transformers layer.

`TransformerLayer` with RMSNorm, SwiGLU and rotary embeddings, q, k and v in one parameter, as its documentation builds
a Llama. It has biases on all projections or on none: here on none, also in the shape of Qwen2.5.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.models.family import decoder_layers, original_class

# Name: class in transformer_engine.common.recipe
RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
# What it computes; layers of other families have other norms.
LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer")
LIKE_LLAMA: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "self_attn_mask_type": "causal",
    "attn_input_format": "bshd",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": False,
}


def use_transformer_engine(model: Any, recipe: str) -> Callable[[], Any]:
    """Put a `TransformerEngineBlock` in the place of every decoder layer; returns the context to call the model in, one
    around all blocks: delayed scaling updates the scales of all modules there are at the end of each. ValueError: the
    layers are of a family that it does not compute."""
    # Where neither cuDNN nor FlashAttention can be loaded its attention writes out all scores: an error instead of
    # the times of a peer that nobody would run.
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding

    _forget_other_models()
    config = model.config
    rotary: Any = None
    layers: dict[str, Any] = decoder_layers(model)
    for name, layer in layers.items():
        kind = original_class(layer).__name__
        if kind not in LAYERS or config.rope_parameters["rope_type"] != "default" or config.hidden_act != "silu":
            raise ValueError(
                f"its TransformerLayer stands in for {', '.join(LAYERS)} as they are by default, not {kind}"
            )
        block: Any = TransformerEngineBlock(te.TransformerLayer, layer)
        if rotary is None:
            theta = config.rope_parameters["rope_theta"]
            embedding = RotaryPositionEmbedding(layer.self_attn.head_dim, rotary_base=theta)
            rotary = embedding(config.max_position_embeddings)  # (tokens, 1, 1, head_dim)
        block.rotary = rotary
        model.set_submodule(name, block)
    chosen = getattr(recipes, RECIPES[recipe])()
    return functools.partial(te.autocast, enabled=True, recipe=chosen)


class TransformerEngineBlock(nn.Module):
    """A `TransformerLayer` called like a transformers decoder layer; `layer` gives weights and sizes. rotary: the
    table, (tokens, 1, 1, head_dim), which blocks of one model share."""

    rotary: Tensor

    def __init__(self, kind: Any, layer: Any) -> None:
        super().__init__()
        config, head_dim = layer.self_attn.config, layer.self_attn.head_dim
        self.splits = [config.num_attention_heads * head_dim] + 2 * [config.num_key_value_heads * head_dim]
        self.layer = kind(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            params_dtype=layer.self_attn.q_proj.weight.dtype,
            **LIKE_LLAMA,
        )
        with torch.no_grad():
            for name, part in self._parts(self.layer.get_parameter).items():
                part.copy_(layer.get_parameter(name))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """(batch, sequence, hidden) to the same; masks and positions are always causal and 0, 1, 2, ..."""
        return self.layer(hidden_states, rotary_pos_emb=self.rotary)

    def gradients(self) -> dict[str, Tensor]:
        return self._parts(lambda name: self.layer.get_parameter(name).grad)

    def _parts(self, of: Callable[[str], Any]) -> dict[str, Tensor]:
        """Apply `of` to the weights, by the names of the transformers layer."""
        q, k, v = of("self_attention.layernorm_qkv.weight").split(self.splits)
        gate, up = of("layernorm_mlp.fc1_weight").chunk(2)
        return {
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": of("self_attention.proj.weight"),
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": of("layernorm_mlp.fc2_weight"),
            "input_layernorm.weight": of("self_attention.layernorm_qkv.layer_norm_weight"),
            "post_attention_layernorm.weight": of("layernorm_mlp.layer_norm_weight"),
        }


def _forget_other_models() -> None:
    """Delayed scaling keeps the maxima of models that are gone, and updates them with the others."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
