"""Decoder blocks by name, and models of random weights."""

from __future__ import annotations

import pytest
import torch

import overcoat
from overcoat.bench.shapes import SHORT, BlockShape, block_shape, build_block
from overcoat.models.shapes import MODELS
from tests.bench.peers import model_of


def test_blocks_by_name() -> None:
    """Every model is one, and the short names stay."""
    assert block_shape("7b-s4096") == block_shape("llama-2-7b-s4096") == (MODELS["llama-2-7b"], 4, 4096)
    assert block_shape("30b") == (MODELS["llama-30b"], 2, 2048)
    assert {block_shape(name).tokens for name in [*MODELS, *SHORT]} == {4096, 8192, 16384}
    for name in ("8b", "7b-s", "7b-s0", ""):
        with pytest.raises(ValueError, match=f"unknown shape '{name}'; choose MODEL or MODEL-sTOKENS of 124m, "):
            block_shape(name)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_block_is_the_same_at_every_call_and_nothing_in_it_is_one_or_zero(kind: str) -> None:
    shape = BlockShape(model_of(kind), 1, 8)
    (first, inputs), (second, _) = (build_block(shape, torch.float32, "cpu") for _ in range(2))
    names = [name for name, _ in first.named_parameters()]
    assert ("layers.0.self_attn.q_proj.bias" in names) is (kind == "qwen2")
    for (name, a), b in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(a, b), name
        assert "embed" in name or len(a.unique()) > a.numel() // 2, name
    assert inputs["position_embeddings"][0].shape == (1, 8, 32)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_block_of_its_family(name: str) -> None:
    """Of the text, where a model sees; narrow, but with its own heads."""
    model = MODELS[name].changed(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    built, inputs = build_block(BlockShape(model.changed(head_dim=32, vocab_size=64), 1, 8), torch.bfloat16, "cpu")
    assert not overcoat.convert(built).left_alone
    x = torch.randn(1, 8, 128).bfloat16().requires_grad_()
    built.layers[0](x, **inputs).sum().backward()
    assert x.grad is not None
