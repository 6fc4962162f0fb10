"""Blocks and parts of peers get the right weights and inputs and give the right results.

None needs to be installed: modules of the same interface stand in for them, as far as their documentation and source
promise it, computing in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat.bench.blocks import make_block
from overcoat.bench.layer import results, sqnr
from overcoat.bench.shapes import BlockShape, ModelShape, build_block, build_model
from overcoat.bench.trainers import trainers

SHAPE = BlockShape(ModelShape(64, 128, 1, 4, 2, 32), 2, 8)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q (B, S, heads, D), k and v (B, S, kv heads, D); cos and sin broadcast to q without heads."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class FakeTransformerLayer(nn.Module):
    """transformer_engine.pytorch.TransformerLayer with fused, not interleaved q, k, v."""

    def __init__(self, hidden: int, ffn: int, heads: int, **options: Any) -> None:
        super().__init__()
        expected = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "attn_input_format": "bshd"}
        assert {key: options[key] for key in expected} == expected
        assert options["fuse_qkv_params"] is True
        assert options["qkv_weight_interleaved"] is False
        self.eps, self.heads, self.groups = options["layernorm_epsilon"], heads, options["num_gqa_groups"]
        self.width = options["kv_channels"]
        dtype = options["params_dtype"]
        qkv = (heads + 2 * self.groups) * self.width
        self.self_attention = nn.Module()
        self.self_attention.layernorm_qkv = nn.Linear(hidden, qkv, bias=False, dtype=dtype)
        self.self_attention.layernorm_qkv.layer_norm_weight = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.self_attention.proj = nn.Linear(heads * self.width, hidden, bias=False, dtype=dtype)
        self.layernorm_mlp = nn.Module()
        self.layernorm_mlp.layer_norm_weight = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.layernorm_mlp.fc1_weight = nn.Parameter(torch.empty(2 * ffn, hidden, dtype=dtype))
        self.layernorm_mlp.fc2_weight = nn.Parameter(torch.empty(hidden, ffn, dtype=dtype))

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        qkv = self.self_attention.layernorm_qkv
        mixed = qkv(rms_norm(x, qkv.layer_norm_weight, self.eps)).unflatten(-1, (-1, self.width))
        q, k, v = mixed.split([self.heads, self.groups, self.groups], 2)
        frequencies = rotary_pos_emb[: x.shape[1]].transpose(0, 1)  # (1, S, 1, D)
        x = x + self.self_attention.proj(causal_attention(q, k, v, frequencies.cos(), frequencies.sin()))
        mlp = self.layernorm_mlp
        gate, up = F.linear(rms_norm(x, mlp.layer_norm_weight, self.eps), mlp.fc1_weight).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, mlp.fc2_weight)


class FakeRotary(nn.Module):
    """transformer_engine.pytorch.attention.RotaryPositionEmbedding."""

    def __init__(self, dim: int, rotary_base: float) -> None:
        super().__init__()
        self.rates = 1.0 / rotary_base ** (torch.arange(0, dim, 2) / dim)

    def forward(self, max_seq_len: int) -> Tensor:
        angles = torch.arange(max_seq_len)[:, None] * self.rates
        return torch.cat((angles, angles), -1)[:, None, None]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """An importable module of these contents; its parents must be made first."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    made.__path__ = []  # type: ignore[attr-defined]
    made.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, made)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


@pytest.fixture(params=["autocast", "fp8_autocast"])
def transformer_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for Transformer Engine of a new or an old release; returns the recipes it was used with."""
    used: list[Any] = []
    keyword = {"autocast": "recipe", "fp8_autocast": "fp8_recipe"}[request.param]

    @contextlib.contextmanager
    def autocast(enabled: bool, **options: Any) -> Iterator[None]:
        assert enabled
        used.append(options[keyword])
        yield

    recipes = {name: type(name, (), {}) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}
    module(monkeypatch, "transformer_engine")
    module(monkeypatch, "transformer_engine.common")
    module(monkeypatch, "transformer_engine.common.recipe", **recipes)
    module(
        monkeypatch,
        "transformer_engine.pytorch",
        TransformerLayer=FakeTransformerLayer,
        **{request.param: autocast},
    )
    module(monkeypatch, "transformer_engine.pytorch.attention", RotaryPositionEmbedding=FakeRotary)
    return used


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


def compare(name: str) -> None:
    outcomes = []
    for who in ("bf16 eager", name):
        model, tables = build_block(SHAPE, torch.float32, "cpu")
        torch.manual_seed(1)
        x, dy = (torch.randn(SHAPE.batch, SHAPE.sequence, SHAPE.model.hidden) for _ in range(2))
        outcomes.append(results(make_block(who, model, tables, compiled=False, attention="default"), x, dy))
    truth, got = outcomes
    assert set(got) == set(truth)
    for key, value in truth.items():
        assert sqnr(value, got[key]) > 80, key


@pytest.mark.parametrize(
    ("recipe", "used"),
    [("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling")],
)
def test_transformer_engine_computes_the_same_block(transformer_engine: list[Any], recipe: str, used: str) -> None:
    compare(f"transformer engine {recipe}")
    assert [type(recipe).__name__ for recipe in transformer_engine] == [used]


@pytest.mark.usefixtures("coat")
def test_the_original_coat_computes_the_same_block() -> None:
    compare("original COAT")


@pytest.mark.usefixtures("coat")
def test_the_original_coat_refuses_biases() -> None:
    shape = BlockShape(ModelShape(64, 128, 1, 4, 2, 32, qkv_bias=True), 1, 8)
    model, tables = build_block(shape, torch.float32, "cpu")
    with pytest.raises(ValueError, match="ignores biases"):
        make_block("original COAT", model, tables, compiled=False, attention="default")


class FakeFusedLoss(nn.Module):
    """liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss."""

    def forward(self, weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100)


def whole_model_loss(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model: Any = build_model(ModelShape(64, 128, 2, 4, 2, 96), torch.float32, "cpu")
    torch.manual_seed(1)
    ids = torch.randint(96, (2, 16))
    loss = trainers()[name].prepare(model)(ids)
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def test_the_fused_loss_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own, own_gradients = whole_model_loss("bf16 eager, torch AdamW")
    module(monkeypatch, "liger_kernel")
    module(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=FakeFusedLoss)
    fused, gradients = whole_model_loss("bf16 eager, torch AdamW")
    torch.testing.assert_close(fused, own)
    torch.testing.assert_close(gradients, own_gradients)


def test_a_whole_model_of_transformer_engine_blocks(transformer_engine: list[Any]) -> None:
    own, _ = whole_model_loss("bf16 eager, torch AdamW")
    theirs, gradients = whole_model_loss("transformer engine current, FlashAdamW")
    torch.testing.assert_close(theirs, own)
    assert len(transformer_engine) == 2
    assert gradients["model.layers.1.layer.layernorm_mlp.fc2_weight"].abs().sum() > 0
