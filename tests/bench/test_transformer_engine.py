"""Transformer Engine's block gets the right weights, inputs and recipe, and gives the right results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overcoat.bench.contestants import make_block
from overcoat.bench.layer import accuracy, results
from overcoat.bench.shapes import BlockShape, build_block
from overcoat.bench.transformer_engine import use_transformer_engine
from tests.bench.peers import SHAPE, model_of, sqnr


@pytest.mark.parametrize(
    ("recipe", "used"),
    [("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling")],
)
def test_transformer_engine_computes_the_same_block(transformer_engine: list[Any], recipe: str, used: str) -> None:
    """Outputs and gradients, under the transformers layer's names."""
    outcomes = []
    for name in ("bf16 eager", f"transformer engine {recipe}"):
        model, inputs = build_block(SHAPE, torch.float32, "cpu")
        torch.manual_seed(1)
        x, dy = (torch.randn(SHAPE.batch, SHAPE.sequence, 128) for _ in range(2))
        outcomes.append(results(make_block(name, model, inputs, compiled=False), x, dy))
    truth, got = outcomes
    assert set(got) == set(truth)
    for key, value in truth.items():
        assert sqnr(value, got[key]) > 80, key
    assert transformer_engine == ["reset", used]


def test_delayed_scales_are_measured_from_the_second_step_on(transformer_engine: list[Any]) -> None:
    """The first has none; its gradients are not added to the second's."""
    twice = accuracy("transformer engine delayed", SHAPE, 1, "cpu")
    assert [used == "reset" for used in transformer_engine] == [True, False, False]
    once = accuracy("transformer engine current", SHAPE, 1, "cpu")
    assert [used == "reset" for used in transformer_engine[3:]] == [True, False]
    assert twice == once  # the stand-in does not scale


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_have_the_layers_dtype_and_biases_are_left_out(kind: str) -> None:
    model, _ = build_block(BlockShape(model_of(kind), 1, 8), torch.bfloat16, "cpu")
    layer = model.layers[0]
    use_transformer_engine(model, "current")
    block = model.layers[0]
    assert {weight.dtype for weight in block.parameters()} == {torch.bfloat16}
    for weight in block.parameters():
        weight.grad = weight.detach()
    weights = {name: weight for name, weight in layer.named_parameters() if not name.endswith("bias")}
    gradients = block.gradients()
    assert gradients.keys() == weights.keys()
    assert all(torch.equal(gradients[name], weight) for name, weight in weights.items())


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "scaled"])
def test_other_layers_are_not_made_to_look_like_llama(kind: str) -> None:
    """Head norms, norms after, other rotations would be left out."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    other = model_of("llama").changed(rope_parameters=rope) if kind == "scaled" else model_of(kind)
    model, _ = build_block(BlockShape(other, 1, 8), torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="stands in for LlamaDecoderLayer, Qwen2DecoderLayer"):
        use_transformer_engine(model, "current")
