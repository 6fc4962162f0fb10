"""Transformer Engine's decoder block with the weights of a transformers layer.

`TransformerLayer` with RMSNorm, SwiGLU and rotary embeddings, q, k and v in one parameter, as its documentation builds
a Llama. It has biases on all projections or on none: here on none, also in the shape of Qwen2.5.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Name: class in transformer_engine.common.recipe
RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


class TransformerEngineBlock(nn.Module):
    """A `TransformerLayer` called like a transformers decoder layer; `layer` gives weights and sizes.

    Args:
        layer: a transformers Llama or Qwen2 decoder layer on the GPU.
        recipe: one of `RECIPES`.
        max_sequence: tokens for which rotary tables are made.
        inside: the caller enters `context()` around a whole model of blocks. Delayed scaling updates the scales of
            all modules there are at the end of each, so that one for each block would do it as often as there are.

    Attributes:
        frequencies: the rotary table, (max_sequence, 1, 1, head_dim): blocks of one model can share it.
    """

    def __init__(self, layer: Any, recipe: str, max_sequence: int, inside: bool = False) -> None:
        super().__init__()
        # Where neither cuDNN nor FlashAttention can be loaded its attention writes out all scores: an error instead of
        # the times of a peer that nobody would run.
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        _load_pytorchs_cudnn()
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
        from transformer_engine.pytorch.attention import RotaryPositionEmbedding

        _forget_other_models()
        self.autocast, self.recipe, self.inside = _autocast(te), getattr(recipes, RECIPES[recipe])(), inside
        config = layer.self_attn.config
        head_dim = layer.self_attn.head_dim
        self.splits = [config.num_attention_heads * head_dim] + 2 * [config.num_key_value_heads * head_dim]
        self.layer = te.TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
            params_dtype=layer.self_attn.q_proj.weight.dtype,
        )
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = RotaryPositionEmbedding(head_dim, rotary_base=theta)(max_sequence)
        with torch.no_grad():
            for name, part in self._parts().items():
                part.copy_(layer.get_parameter(name))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """(batch, sequence, hidden) to the same; masks and positions are always causal and 0, 1, 2, ..."""
        with contextlib.nullcontext() if self.inside else self.context():
            return self.layer(hidden_states, rotary_pos_emb=self.frequencies)

    def context(self) -> Any:
        """Where its recipe holds."""
        return self.autocast(self.recipe)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients under the names of the transformers layer."""
        return self._parts(gradients=True)

    def _parts(self, gradients: bool = False) -> dict[str, Tensor]:
        """The weights, or their gradients, under the names of the transformers layer."""

        def of(name: str) -> Tensor:
            parameter = self.layer.get_parameter(name)
            return parameter.grad if gradients else parameter

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


def _load_pytorchs_cudnn() -> None:
    """Load all libraries of the cuDNN that PyTorch's wheels bring, before Transformer Engine looks for one.

    cuDNN opens its parts by name when they are first needed. Where the machine has a cuDNN of its own as well,
    Transformer Engine or such a part may be given that one, and parts of two releases refuse each other. A part that
    is loaded already is not looked for.
    """
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        found = None
    for folder in (found and found.submodule_search_locations) or []:
        os.environ.setdefault("CUDNN_HOME", folder)
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library))


def _forget_other_models() -> None:
    """Delayed scaling keeps the maxima of models that are gone, and updates them with the others."""
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:  # older releases
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    FP8GlobalStateManager.reset()


def _autocast(te: Any) -> Any:
    """recipe -> context: `autocast`, called `fp8_autocast` in older releases."""
    if hasattr(te, "autocast"):
        return lambda recipe: te.autocast(enabled=True, recipe=recipe)
    return lambda recipe: te.fp8_autocast(enabled=True, fp8_recipe=recipe)
