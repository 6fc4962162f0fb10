"""Transformer Engine's block gets the right weights, inputs and recipe, and gives the right results."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overcoat.bench import transformer_engine as module
from overcoat.bench.layer import accuracy
from overcoat.bench.shapes import BlockShape, ModelShape, build_block
from overcoat.bench.transformer_engine import TransformerEngineBlock
from tests.bench.peers import SHAPE, compare


@pytest.mark.parametrize(
    ("recipe", "used"),
    [("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling")],
)
def test_transformer_engine_computes_the_same_block(transformer_engine: list[Any], recipe: str, used: str) -> None:
    compare(f"transformer engine {recipe}")
    reset, used_recipe = transformer_engine
    assert reset == "reset"
    assert type(used_recipe).__name__ == used


def test_delayed_scales_are_measured_from_the_second_step_on(transformer_engine: list[Any]) -> None:
    """The first has none; its gradients are not added to the second's."""
    twice = accuracy("transformer engine delayed", SHAPE, 1, "cpu")
    assert [used == "reset" for used in transformer_engine] == [True, False, False]
    once = accuracy("transformer engine current", SHAPE, 1, "cpu")
    assert [used == "reset" for used in transformer_engine[3:]] == [True, False]
    assert twice == once  # the stand-in does not scale


def test_blocks_inside_a_models_context_enter_none(transformer_engine: list[Any]) -> None:
    model, _ = build_block(SHAPE, torch.float32, "cpu")
    block = TransformerEngineBlock(model.layers[0], "current", 8, inside=True)
    block(torch.randn(2, 8, 64))
    assert transformer_engine == ["reset"]
    with block.context():
        assert len(transformer_engine) == 2


def names_of(qkv_bias: bool) -> tuple[Any, TransformerEngineBlock]:
    shape = BlockShape(ModelShape(64, 128, 1, 4, 2, 32, qkv_bias=qkv_bias), 1, 8)
    model, _ = build_block(shape, torch.bfloat16, "cpu")
    return model.layers[0], TransformerEngineBlock(model.layers[0], "current", 8)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["Llama", "Qwen2"])
def test_gradients_have_the_transformers_layers_names(qkv_bias: bool) -> None:
    """Each is filled with a number of its own in the fused parameters; biases are left out."""
    layer, block = names_of(qkv_bias)
    shapes = {name: weight.shape for name, weight in layer.named_parameters() if not name.endswith("bias")}
    for name, weight in block.layer.named_parameters():
        weight.grad = torch.full_like(weight, float(len(name)))
    qkv = block.layer.self_attention.layernorm_qkv.weight.grad
    qkv[:64], qkv[64:96], qkv[96:] = 1.0, 2.0, 3.0
    block.layer.layernorm_mlp.fc1_weight.grad[:128] = 4.0
    block.layer.layernorm_mlp.fc1_weight.grad[128:] = 5.0
    gradients = block.gradients()
    assert {name: gradient.shape for name, gradient in gradients.items()} == shapes
    numbers = {"q_proj": 1.0, "k_proj": 2.0, "v_proj": 3.0, "gate_proj": 4.0, "up_proj": 5.0}
    for name, number in numbers.items():
        (gradient,) = (gradient for key, gradient in gradients.items() if f".{name}." in key)
        assert (gradient == number).all(), name


@pytest.mark.usefixtures("transformer_engine")
def test_weights_have_the_layers_dtype() -> None:
    layer, block = names_of(False)
    assert {weight.dtype for weight in block.layer.parameters()} == {torch.bfloat16}
    assert torch.equal(block.layer.layernorm_mlp.fc2_weight, layer.mlp.down_proj.weight)


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where NVIDIA's wheels would be installed; none are."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
            del sys.modules[name]
        yield tmp_path


@pytest.mark.parametrize("chosen", [None, "/opt/cudnn"])
def test_the_cudnn_is_pytorchs(monkeypatch: pytest.MonkeyPatch, wheels: Path, chosen: str | None) -> None:
    """All its parts, before another is found by their names; a CUDNN_HOME that the user has set stays."""
    folder, loaded = wheels / "nvidia" / "cudnn", list[str]()
    (folder / "lib").mkdir(parents=True)
    parts = ["libcudnn.so.9", "libcudnn_cnn.so.9", "libcudnn_graph.so.9"]
    for name in [*parts, "libother.so.9"]:
        (folder / "lib" / name).touch()
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    monkeypatch.setenv("CUDNN_HOME", chosen or "to be removed")
    if chosen is None:
        monkeypatch.delenv("CUDNN_HOME")
    module._load_pytorchs_cudnn()
    assert loaded == [str(folder / "lib" / name) for name in parts]
    assert os.environ["CUDNN_HOME"] == (chosen or str(folder))


@pytest.mark.usefixtures("wheels")
def test_a_pytorch_without_wheels_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as conda's, or a build for the CPU: Transformer Engine looks for itself."""
    monkeypatch.setenv("CUDNN_HOME", "")
    module._load_pytorchs_cudnn()
    assert os.environ["CUDNN_HOME"] == ""
