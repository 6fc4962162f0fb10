"""Everyone takes a step of the same model, under the loss and the optimizer that the name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overcoat
from overcoat.bench.shapes import ModelShape, build_model
from overcoat.bench.trainers import LR, trainers
from overcoat.models.decoder import Fp8DecoderLayer
from tests.bench.peers import module

SHAPE = ModelShape(128, 256, 2, 2, 1, 320)


@pytest.mark.parametrize(
    "name",
    [
        "overcoat",
        "overcoat paper",
        "overcoat fp8 head",
        "overcoat leanest, offload, released",
        "bf16 eager, torch AdamW",
    ],
)
def test_everyone_takes_steps_that_move_every_weight(name: str) -> None:
    trainer = trainers()[name]
    model: Any = build_model(SHAPE, torch.bfloat16, "cpu")
    forward, optimizer = trainer.prepare(model), trainer.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    # Every token, so that every row of the embedding moves.
    loss = forward(torch.randperm(SHAPE.vocab)[None])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert loss.isfinite()
    for key, p in model.named_parameters():
        assert not torch.equal(p, before[key]), key
        assert p.grad is None, key


# ---- the loss of peers --------------------------------------------------------------------------------------------


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
    # Two blocks, one context around both: at its end delayed scaling updates the scales of all modules.
    names = [used if used == "reset" else type(used).__name__ for used in transformer_engine]
    assert names == ["reset", "reset", "Float8CurrentScaling"]
    assert gradients["model.layers.1.layer.layernorm_mlp.fc2_weight"].abs().sum() > 0


# ---- optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("overcoat", {"moments": "8bit", "master": "auto"}),
        ("overcoat paper", {"moments": "fp8", "master": "auto"}),
        ("overcoat bf16 weights", {"moments": "8bit", "master": "bf16"}),
        ("overcoat leanest, bf16 w., released", {"moments": "8bit", "master": "bf16"}),
    ],
)
def test_our_optimizers_have_the_options_of_their_name(name: str, group: dict[str, Any]) -> None:
    model: Any = build_model(SHAPE, torch.bfloat16, "cpu")
    optimizer = trainers()[name].optimizer(model)
    defaults = overcoat.AdamW([nn.Parameter(torch.ones(4, 4))], lr=LR, **group).param_groups[0]
    for found in optimizer.param_groups:
        assert {key: found[key] for key in ("lr", *group)} == {key: defaults[key] for key in ("lr", *group)}


@pytest.mark.parametrize("name", [n for n, t in trainers().items() if n.startswith("overcoat") and not t.graphs])
def test_released_gradients_are_gone_after_the_backward(name: str) -> None:
    model: Any = build_model(SHAPE, torch.bfloat16, "cpu")
    trainer = trainers()[name]
    forward, optimizer = trainer.prepare(model), trainer.optimizer(model)
    forward(torch.arange(64)[None]).backward()
    released = all(parameter.grad is None for parameter in model.parameters())
    assert released is ("released" in name)
    assert optimizer is not None


class FakeFlash:
    """flashoptim.FlashAdamW."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        self.parameters, self.options = list(parameters), options


@pytest.mark.parametrize(
    ("name", "released"),
    [("bf16 compile, FlashAdamW", False), ("torchao tensorwise, FlashAdamW rel.", True)],
)
def test_flash_adamw_has_its_remainders_and_releases_where_the_name_says(
    name: str, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    contents = {"FlashAdamW": FakeFlash, "enable_gradient_release": lambda *both: calls.append(both)}
    module(monkeypatch, "flashoptim", **contents)
    model: Any = build_model(SHAPE, torch.bfloat16, "cpu")
    optimizer = trainers()[name].optimizer(model)
    assert optimizer.options == {"lr": LR, "master_weight_bits": 24}
    assert len(optimizer.parameters) == len(list(model.parameters()))
    assert calls == ([(model, optimizer)] if released else [])


# ---- what torch.compile is given ----------------------------------------------------------------------------------


def test_every_layer_is_compiled_and_none_runs_into_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    modes: list[str | None] = []

    def compile_(self: nn.Module, mode: str | None) -> None:
        compiled.append(self)
        modes.append(mode)

    monkeypatch.setattr(nn.Module, "compile", compile_)
    model: Any = build_model(SHAPE, torch.float32, "cpu")
    with torch._dynamo.config.patch(recompile_limit=3):
        trainers()["bf16 eager, torch AdamW"].prepare(model)
        assert (compiled, torch._dynamo.config.recompile_limit) == ([], 3)
        trainers()["bf16 compile, torch AdamW"].prepare(model)
        assert compiled == list(model.model.layers)
        assert torch._dynamo.config.recompile_limit == 2 * SHAPE.layers
        trainers()["bf16 compile, graphs, torch AdamW"].prepare(model)
        assert modes == [None] * SHAPE.layers + ["reduce-overhead"] * SHAPE.layers


def test_layers_of_graphs_are_converted_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("overcoat.bench.trainers.compile_layers", lambda model, graphs: given.append((model, graphs)))
    for name, trainer in trainers().items():
        if name.startswith("overcoat"):
            model: Any = build_model(SHAPE, torch.bfloat16, "cpu")
            trainer.prepare(model)
            assert isinstance(model.model.layers[0], Fp8DecoderLayer)
            assert given == ([(model, True)] if name == "overcoat graphs" else []), name
            assert trainer.graphs is (name == "overcoat graphs")
            given.clear()


def test_torchao_converts_the_blocks_and_not_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Config:
        from_recipe_name = "config {}".format

    def convert(modules: Any, config: Any) -> None:
        given.append((modules, config))

    module(monkeypatch, "torchao")
    module(monkeypatch, "torchao.float8", Float8LinearConfig=Config, convert_to_float8_training=convert)
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: None)
    model: Any = build_model(SHAPE, torch.float32, "cpu")
    trainers()["torchao tensorwise, torch AdamW"].prepare(model)
    assert given == [(model.model, "config tensorwise")]


def test_peers_need_what_their_name_says() -> None:
    packages = {"torchao": "torchao", "FlashAdamW": "flashoptim", "transformer engine": "transformer_engine"}
    for name, trainer in trainers().items():
        assert set(trainer.needs) == {package for word, package in packages.items() if word in name}, name
