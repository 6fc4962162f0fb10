"""Who takes part: what is converted, compiled and called, under which attention, loss and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import contestants
from benchmarks.contestants import (
    ENGINES,
    TRAINERS,
    WAYS,
    make_block,
    overcoat_engine,
    trainer_of,
)
from benchmarks.shapes import build_block, build_model
from overcoat import Recipe
from tests.benchmarks.peers import SHAPE, SMALL, model_of, module
from tests.models.zoo import KINDS, every_kind


def block_of(name: str, **options: Any) -> tuple[Any, contestants.Block]:
    model, inputs = build_block(SHAPE, torch.bfloat16, "cpu")
    return model, make_block(name, model, inputs, **{"compiled": False, "attention": "default", **options})


def called(block: contestants.Block) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(1, SHAPE.sequence, 128, dtype=torch.bfloat16, requires_grad=True)
    y = block.call(x)
    y.sum().backward()
    assert x.grad is not None
    return torch.stack([y.detach(), x.grad])


def test_torch_compile_where_it_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch, torchao: list[Any]) -> None:
    """Of peers' layers none runs into the limit of recompilations."""
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer, mode: compiled.append((layer, mode)))
    for name in ("bf16 eager", "bf16 compile", "bf16 compile, graphs", "torchao tensorwise, compile"):
        model, block = block_of(name)
        assert not compiled
        model, block = block_of(name, compiled=True)
        mode = "reduce-overhead" if "graphs" in name else None
        assert compiled == ([(model.layers[0], mode)] if "compile" in name else []), name
        assert block.layer is model.layers[0]
        compiled.clear()
    for name, engine in ENGINES.items():
        assert ("compile" in name, "graphs" in name) == (engine.compile is not None, engine.graphs), name
    model = build_model(SMALL, torch.float32, "cpu")
    with torch._dynamo.config.patch(recompile_limit=3):
        TRAINERS["bf16 compile, torch AdamW"].prepare(model)
        assert [layer for layer, _ in compiled] == list(model.model.layers)
        assert torch._dynamo.config.recompile_limit == 4
    TRAINERS["torchao tensorwise, torch AdamW"].prepare(model)
    assert [(layer, config.recipe) for layer, config in torchao[-2:]] == [
        (layer, "tensorwise") for layer in model.model.layers
    ]
    assert not torchao[-1][1].enable_fsdp_float8_all_gather


@pytest.mark.parametrize("part", ["layer", "head"])
def test_what_convert_leaves_alone_is_no_contestant(part: str) -> None:
    model = build_model(SMALL, torch.bfloat16, "cpu")
    changed = model.model.layers[1] if part == "layer" else model
    changed.forward = changed.forward  # somebody's own
    with pytest.raises(ValueError, match="not converted:\nlayer  "):
        overcoat_engine(Recipe()).change(model)


# ---- whole steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, "llama")
            for name, trainer in TRAINERS.items()
            if not (trainer.needs or trainer.engine.compile or trainer.fp8_all_gather)
        ),
        *(
            pytest.param("overcoat", *kind.values, marks=kind.marks)
            for kind in every_kind()
            if "llama" not in kind.values and KINDS[kind.values[0]][0].backbone  # a text alone has no loss
        ),
    ],
)
def test_steps_move_every_weight_and_release_where_the_name_says(name: str, kind: str) -> None:
    """Of every family in the registry."""
    model = build_model(model_of(kind), torch.bfloat16, "cpu")
    forward, optimizer = TRAINERS[name].prepare(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    ids = torch.randperm(320)[None]  # every token, so that every row of the embedding moves
    loss = forward({"input_ids": ids, "labels": ids})
    loss.backward()
    assert all(p.grad is None for p in model.parameters()) is ("released" in name or "streamed" in name)
    optimizer.step()
    assert loss.isfinite()
    for key, p in model.named_parameters():
        assert key.endswith("k_proj.bias") or not torch.equal(p, before[key]), key  # softmax does not see k's bias


@pytest.mark.parametrize("name", TRAINERS)
def test_names_say_how_contestants_train(name: str) -> None:
    trainer = TRAINERS[name]
    assert trainer.released is name.endswith(("released", " rel."))
    if name.startswith(("overcoat", "bf16")):
        assert trainer.engine.graphs is ("graphs" in name)
        assert (trainer.engine.compile is not None) is ("compile" in name or "graphs" in name)


def test_a_recipe_is_a_contestant() -> None:
    name = "overcoat recipe default offload_blocks=1"
    for way in WAYS:
        trainer = trainer_of(name + way)
        assert (trainer.engine.graphs, trainer.released) == ("graphs" in way, "released" in way)
        assert trainer.streamed == ("streamed" in way)
        assert (trainer.optimizer == "overcoat 8bit, bf16") == ("bf16 w." in way)
    assert trainer_of(f"{name}, streamed, 8 resident").resident == 8
    model = build_model(SMALL, torch.bfloat16, "cpu")
    trainer_of(name).prepare(model)
    assert model.model.layers[0].overcoat_recipe == Recipe(offload_blocks=1)
    assert trainer_of("overcoat") is TRAINERS["overcoat"]
    for wrong in ("overcoat recipe no_such", "overcoat recipe default, no_such"):
        with pytest.raises(ValueError, match="no_such"):
            trainer_of(wrong)


# ---- the loss of peers --------------------------------------------------------------------------------------------


class FakeFusedLoss(nn.Module):
    """liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss."""

    calls = 0

    def forward(self, weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        type(self).calls += 1
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100)


def loss_and_gradients(name: str, kind: str = "llama") -> tuple[Tensor, dict[str, Tensor]]:
    model = build_model(model_of(kind), torch.float32, "cpu")
    ids = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = contestants.loss_function(model, ENGINES[name].change(model))({"input_ids": ids, "labels": ids})
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_the_fused_loss_is_the_models_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = loss_and_gradients("bf16 eager", kind)
    module(monkeypatch, "liger_kernel")
    module(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=FakeFusedLoss)
    monkeypatch.setattr(FakeFusedLoss, "calls", 0)
    torch.testing.assert_close(loss_and_gradients("bf16 eager", kind), own)
    assert FakeFusedLoss.calls == 1
    monkeypatch.setattr(contestants, "why_head_unsupported", lambda _: "lm_head has a bias")
    torch.testing.assert_close(loss_and_gradients("bf16 eager", kind), own)
    loss_and_gradients("overcoat", kind)
    assert FakeFusedLoss.calls == 1  # neither of a head that it does not know nor of ours


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "scaled"])
def test_transformer_engines_layer_is_not_made_to_look_like_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head norms, norms after, other rotations would be left out. Its numbers: `benchmarks.layer`'s accuracy."""
    module(monkeypatch, "transformer_engine")
    module(monkeypatch, "transformer_engine.common", recipe=None)
    module(monkeypatch, "transformer_engine.pytorch", TransformerLayer=None)
    module(monkeypatch, "transformer_engine.pytorch.attention", RotaryPositionEmbedding=None)
    monkeypatch.setattr("benchmarks.transformer_engine._forget_other_models", lambda: None)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    other = model_of("llama").changed(rope_parameters=rope) if kind == "scaled" else model_of(kind)
    with pytest.raises(ValueError, match="stands in for LlamaDecoderLayer, Qwen2DecoderLayer"):
        ENGINES["transformer engine current"].change(build_model(other, torch.bfloat16, "cpu"))
