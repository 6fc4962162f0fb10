"""Decoder blocks by name, and models of random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overcoat.bench.shapes import BLOCKS, BlockShape, build_block, build_model
from overcoat.models.shapes import ModelShape


def test_every_block_divides_into_heads() -> None:
    for block in BLOCKS.values():
        assert block.model.heads % block.model.kv_heads == 0
        assert block.model.head_dim * block.model.heads == block.model.hidden
        assert block.tokens == block.batch * block.sequence


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_a_block_is_the_same_at_every_call_and_nothing_in_it_is_one_or_zero(qkv_bias: bool) -> None:
    shape = BlockShape(ModelShape(64, 128, 2, 4, 2, 100, qkv_bias=qkv_bias), 1, 8)
    (first, tables), (second, _) = (build_block(shape, torch.float32, "cpu") for _ in range(2))
    names = [name for name, _ in first.named_parameters()]
    assert ("layers.0.self_attn.q_proj.bias" in names) is qkv_bias
    for (name, a), b in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(a, b), name
        assert "embed" in name or len(a.unique()) > a.numel() // 2, name
    assert tables[0].shape == (1, 8, 16)


def test_a_model_trains_tied_or_not() -> None:
    for tied in (False, True):
        model = build_model(replace(ModelShape(64, 128, 2, 4, 2, 100), tied=tied), torch.float32, "cpu")
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
        assert model.training
