"""The original COAT's decoder block (package `fp8-coat`) with the weights of a transformers layer.

Its Llama file was written for transformers 4.45 and imports a few names that are gone; the block uses none of them, so
they get placeholders. The block takes and returns the residual stream in BF16 beside its FP8 copy; here, as in its own
model, a module before and one after it do the conversion, which adds about 4 of 140 passes over the stream.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

# Imported by coat.models.coat_llama, used only by its model classes.
PLACEHOLDERS = (
    "_prepare_4d_causal_attention_mask_with_cache_position",
    "LlamaLinearScalingRotaryEmbedding",
    "LlamaDynamicNTKScalingRotaryEmbedding",
)
# Its parameter: the transformers layer's.
NAMES = {
    "BeforeAttention.q_proj.weight": "self_attn.q_proj.weight",
    "BeforeAttention.k_proj.weight": "self_attn.k_proj.weight",
    "BeforeAttention.v_proj.weight": "self_attn.v_proj.weight",
    "AfterAttention.o_proj.weight": "self_attn.o_proj.weight",
    "MLPResidual.gate_proj.weight": "mlp.gate_proj.weight",
    "MLPResidual.up_proj.weight": "mlp.up_proj.weight",
    "MLPResidual.down_proj.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}


class OriginalCoatBlock(nn.Module):
    """A `CoatLlamaDecoderLayer` under its default options, called like a transformers decoder layer.

    Raises:
        ValueError: the layer has biases, which its kernels ignore.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        biases = [name for name, _ in layer.named_parameters() if name.endswith("proj.bias")]
        if biases:
            raise ValueError(f"the original COAT ignores biases: {', '.join(biases)}")
        coat_llama = _import_coat_llama()
        from coat.activation.real_quantization import Coat_quantize_bgn, Coat_quantize_end

        config, options = layer.self_attn.config, coat_llama.QuantizationConfig()
        config.rope_theta = config.rope_parameters["rope_theta"]
        config.coat_fp8_args = asdict(options)
        weight = layer.self_attn.q_proj.weight
        with torch.device(weight.device):
            self.layer = coat_llama.CoatLlamaDecoderLayer(config, 0).to(weight.dtype)
            self.before, self.after = Coat_quantize_bgn(options), Coat_quantize_end(options)
        with torch.no_grad():
            for mine, theirs in NAMES.items():
                self.layer.get_parameter(mine).copy_(layer.get_parameter(theirs))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """(batch, sequence, hidden) to the same, causal."""
        stream = self.before(hidden_states)
        (stream,) = self.layer(*stream, position_embeddings=position_embeddings)
        return self.after(*stream)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients under the names of the transformers layer."""
        grads = {theirs: self.layer.get_parameter(mine).grad for mine, theirs in NAMES.items()}
        return {name: grad for name, grad in grads.items() if grad is not None}


def _import_coat_llama() -> Any:
    """coat.models.coat_llama, with placeholders for what transformers no longer has."""
    from transformers.models.llama import modeling_llama

    for name in PLACEHOLDERS:
        if not hasattr(modeling_llama, name):
            setattr(modeling_llama, name, None)
    if not hasattr(modeling_llama.LlamaModel, "_update_causal_mask"):
        modeling_llama.LlamaModel._update_causal_mask = None
    import coat.models.coat_llama as coat_llama

    return coat_llama
