"""That every product of a block is compared, and under its own name."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import benchmarks.accumulation
import overcoat
from benchmarks.accumulation import compare


def test_all_products_of_all_blocks_are_compared():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32)).train()
    overcoat.convert(model)
    ids = torch.randint(64, (2, 16))

    def run() -> None:
        model(ids, labels=ids).loss.backward()

    with mock.patch.object(benchmarks.accumulation, "TOKENS", (16, 32, 64)):
        rows = {row["product"]: row for row in compare(run)}
    # q k v, o, gate up, down of three layers; no pass has 64 tokens.
    assert {kind: row["products"] for kind, row in rows.items()} == {
        "forward": 12,
        "dgrad": 12,
        "wgrad, 16 tokens": 12,
        "wgrad, 32 tokens": 12,
    }
    # On a CPU both ways are the same sum.
    assert all(row["shrinks_by"]["worst"] == pytest.approx(0.0, abs=1e-6) for row in rows.values())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run()
    assert all(map(torch.equal, grads, (parameter.grad for parameter in model.parameters())))
