"""The original COAT's block gets the right weights and inputs and gives the right results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from overcoat.bench.blocks import make_block
from overcoat.bench.coat import NAMES, PLACEHOLDERS, OriginalCoatBlock
from overcoat.bench.shapes import build_block
from tests.bench.peers import SHAPE, causal_attention, compare, module


class FakeCoatLayer(nn.Module):
    """coat.models.coat_llama.CoatLlamaDecoderLayer: the stream in BF16, its FP8 copy and scales, in and out."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        assert config.coat_fp8_args == {"group_size": 16}
        assert config.rope_theta == 10000.0
        hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * 16

        def linears(**widths: tuple[int, int]) -> nn.Module:
            return nn.ModuleDict({name: nn.Linear(*width, bias=False) for name, width in widths.items()})

        self.BeforeAttention: Any = linears(q_proj=(hidden, hidden), k_proj=(hidden, kv), v_proj=(hidden, kv))
        self.AfterAttention: Any = linears(o_proj=(hidden, hidden))
        self.MLPResidual: Any = linears(gate_proj=(hidden, ffn), up_proj=(hidden, ffn), down_proj=(ffn, hidden))
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, x: Tensor, codes: Tensor, scale: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Any:
        assert (codes, scale) == ("codes", "scale")
        y = self.input_layernorm(x)
        q, k, v = (self.BeforeAttention[f"{name}_proj"](y).unflatten(-1, (-1, 16)) for name in "qkv")
        cos, sin = (table[:, :, None] for table in position_embeddings)
        x = x + self.AfterAttention["o_proj"](causal_attention(q, k, v, cos, sin))
        y = self.post_attention_layernorm(x)
        gate, up = self.MLPResidual["gate_proj"](y), self.MLPResidual["up_proj"](y)
        return ((x + self.MLPResidual["down_proj"](F.silu(gate) * up), "codes", "scale"),)


class FakeConversion(nn.Module):
    """Coat_quantize_bgn and Coat_quantize_end."""

    def __init__(self, options: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, *quantized: Any) -> Any:
        return x if quantized else (x, "codes", "scale")


@pytest.fixture
def coat(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import dataclass

    @dataclass
    class QuantizationConfig:
        group_size: int = 16

    for name in ("coat", "coat.models", "coat.activation"):
        module(monkeypatch, name)
    module(
        monkeypatch,
        "coat.models.coat_llama",
        CoatLlamaDecoderLayer=FakeCoatLayer,
        QuantizationConfig=QuantizationConfig,
    )
    conversions = {"Coat_quantize_bgn": FakeConversion, "Coat_quantize_end": FakeConversion}
    module(monkeypatch, "coat.activation.real_quantization", **conversions)


@pytest.mark.usefixtures("coat")
def test_the_original_coat_computes_the_same_block() -> None:
    compare("original COAT")


@pytest.mark.usefixtures("coat")
@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_the_original_coat_refuses_biases(place: str) -> None:
    model, tables = build_block(SHAPE, torch.float32, "cpu")
    linear = model.layers[0].get_submodule(place)
    linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    with pytest.raises(ValueError, match=f"ignores biases: {place}.bias$"):
        make_block("original COAT", model, tables, compiled=False, attention="default")


@pytest.mark.usefixtures("coat")
def test_gradients_have_the_transformers_layers_names() -> None:
    """All of them, also of its parameters that no test of values tells apart; none where there is none."""
    model, _ = build_block(SHAPE, torch.float32, "cpu")
    block = OriginalCoatBlock(model.layers[0])
    assert block.gradients() == {}
    assert set(NAMES.values()) == {name for name, _ in model.layers[0].named_parameters()}
    for number, name in enumerate(NAMES):
        parameter = block.layer.get_parameter(name)
        parameter.grad = torch.full_like(parameter, float(number))
    found = block.gradients()
    assert {name: gradient.unique().tolist() for name, gradient in found.items()} == {
        name: [float(number)] for number, name in enumerate(NAMES.values())
    }
    assert all(gradient.shape == model.layers[0].get_parameter(name).shape for name, gradient in found.items())


@pytest.mark.usefixtures("coat")
def test_weights_are_copies_in_the_layers_dtype() -> None:
    model, _ = build_block(SHAPE, torch.bfloat16, "cpu")
    block = OriginalCoatBlock(model.layers[0])
    for mine, theirs in NAMES.items():
        ours, original = block.layer.get_parameter(mine), model.layers[0].get_parameter(theirs)
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, original)
        assert ours.data_ptr() != original.data_ptr()


@pytest.mark.usefixtures("coat")
def test_names_that_are_gone_get_placeholders_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, there = PLACEHOLDERS[:2]
    monkeypatch.delattr(modeling_llama, gone, raising=False)
    monkeypatch.setattr(modeling_llama, there, "its own", raising=False)
    model, _ = build_block(SHAPE, torch.float32, "cpu")
    OriginalCoatBlock(model.layers[0])
    assert getattr(modeling_llama, gone) is None
    assert getattr(modeling_llama, there) == "its own"
    assert hasattr(modeling_llama.LlamaModel, "_update_causal_mask")
