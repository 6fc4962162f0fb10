"""Rows that are cut between processes: the loss and the gradients of one that has them whole. gloo on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overcoat
from overcoat import Recipe
from overcoat.block.attention import Heads
from overcoat.block.context import context_attention, context_attention_backward, gathered, own_part
from overcoat.kernels.attention import attention, attention_backward
from tests.emulation import sqnr
from tests.models.zoo import VOCAB, make_model
from tests.processes import on_many
from tests.sweep.tiny import tiny

HEADS = Heads(2, 4, 2, 16, 0.25)
LENGTH = 96
# By what is new in each: grouped heads; norms of q and k; learned positions; sinks; a factor of q by position; an
# output gate (of the sweep's models).
KINDS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "llama": (Recipe(), {}),
    "qwen3": (Recipe(kept_attention="bf16"), {}),
    "gpt2": (Recipe.leanest(), {}),
    "gpt_oss": (Recipe(linear_scaling="block"), {"sliding_window": 128}),
    "ministral3": (Recipe(z_loss=1e-4), {"sliding_window": None}),
    "qwen3_5_text": (Recipe(), {"layer_types": ["full_attention"] * 2}),
}


def _small(kind: str) -> Any:
    fields = KINDS[kind][1]
    return tiny(kind, narrow=True, **fields) if kind == "qwen3_5_text" else make_model(kind, layers=2, **fields)


def _attention(rank: int, device: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)

    def rows(heads: int) -> Tensor:
        drawn = torch.randn(HEADS.batch, LENGTH, heads * HEADS.width, generator=generator).to(device)
        return drawn.bfloat16() if device == "cuda" else drawn

    def part(x: Tensor, heads: int) -> Tensor:
        return own_part(x.view(HEADS.batch, LENGTH, heads * HEADS.width), group).flatten(0, 1)

    qkv, do, heads = rows(8), rows(4), HEADS._replace(context=group)
    o, lse = attention(qkv.flatten(0, 1), None, *HEADS[:3], HEADS.scale)
    dqkv = attention_backward(do.flatten(0, 1), qkv.flatten(0, 1), o, lse, None, *HEADS[:3], HEADS.scale)
    own = part(qkv, 8)
    keys = gathered(own, heads)
    assert torch.equal(keys.cpu(), qkv[..., 4 * HEADS.width :].cpu())
    found, found_lse = context_attention(own, keys, heads)
    gradients = context_attention_backward(part(do, 4), own, keys, found, found_lse, heads)
    least = 110 if device == "cpu" else 40
    assert sqnr(part(o, 4), found) > least
    assert sqnr(own_part(lse.transpose(1, 2), group), found_lse.transpose(1, 2)) > least
    for whole, mine, count in zip(dqkv, gradients, (4, 2, 2), strict=True):
        assert sqnr(part(whole, count), mine) > least


@pytest.mark.parametrize(("many", "device"), [(3, "cpu"), pytest.param(1, "cuda", marks=pytest.mark.gpu), (1, "cpu")])
def test_attention_is_that_of_whole_rows(many: int, device: str) -> None:
    on_many(many, _attention, device, device)


def _batch(seed: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    # Labels are not as many in each process; the last chunk of a row has none.
    labels = ids.masked_fill(torch.arange(LENGTH) % 7 == seed, -100)
    labels[0, LENGTH // 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def _models(rank: int, kinds: Sequence[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    for kind in kinds:
        whole, cut = (_small(kind) for _ in range(2))
        for model in (whole, cut):
            overcoat.convert(model, KINDS[kind][0])
        overcoat.context_parallel(cut, mesh)
        for layer in cut.transformer.h if kind == "gpt2" else cut.model.layers:
            fully_shard(layer)
        fully_shard(cut)
        exact = _small(kind).float()
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            losses = [model(**_batch(1)).loss for model in (exact, whole, cut)]
            for loss in losses:
                loss.backward()
        assert abs(losses[1].item() - losses[2].item()) < 3e-3, (kind, losses)
        lost = []
        parameters = zip(*(model.named_parameters() for model in (exact, whole, cut)), strict=True)
        for (name, right), (_, mine), (_, theirs) in parameters:
            if right.grad is not None:
                assert theirs.grad is not None, name
                lost.append(sqnr(right.grad, mine.grad) - sqnr(right.grad, theirs.grad.full_tensor()))
                assert lost[-1] < 3, (kind, name, lost)
        assert sum(lost) / len(lost) < 0.5, (kind, lost)
        for model in (whole, cut):
            model.eval()
        with torch.no_grad():
            assert torch.equal(whole(**_batch(1)).loss, cut(**_batch(1)).loss)


@pytest.mark.parametrize(
    "kinds",
    [("llama", "gpt2", "gpt_oss", "qwen3_5_text"), pytest.param(("qwen3", "ministral3"), marks=pytest.mark.nightly)],
    ids=str,
)
def test_loss_and_gradients_are_those_of_whole_rows(kinds: Sequence[str]) -> None:
    on_many(2, _models, "cpu", kinds)


def _refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))

    def made(kind: str = "llama", recipe: Recipe | None = None, **extra: Any) -> Any:
        model = make_model(kind, layers=1, **extra)
        overcoat.convert(model, recipe or Recipe())
        return model

    hybrid = tiny("qwen3_5_text", narrow=True, layer_types=["linear_attention", "full_attention"])
    overcoat.convert(hybrid)
    yarn = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for model, words in (
        (make_model(layers=1), "has not given it"),
        (made(recipe=Recipe.bf16()), "has not given it"),
        (made("gemma2"), "capped"),
        (made(rope_parameters=yarn), "dynamic"),
        (made(recipe=Recipe(head=None)), "has not given it"),
        (hybrid, "Qwen3_5GatedDeltaNet runs as it is"),
    ):
        with pytest.raises(ValueError, match=words):
            overcoat.context_parallel(model, mesh)
    model, batch = made(), _batch(1)
    overcoat.context_parallel(model, mesh)
    for change, words in (
        ({"position_ids": torch.arange(LENGTH)[None]}, "position_ids"),
        ({"attention_mask": torch.ones(4, LENGTH)}, "attention_mask"),
        ({"output_logits": True}, "no logits"),
        ({"labels": None}, "takes labels"),
        ({"input_ids": batch["input_ids"][:, :-1], "labels": batch["labels"][:, :-1]}, "4 chunks"),
        (_batch(1 + rank), "different rows"),
        (_batch(1, 4 + rank), "different rows"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**{**batch, **change})
    with pytest.raises(ValueError, match="not given labels"):
        model.model(batch["input_ids"])
    sharded = made()
    overcoat.context_parallel(sharded, mesh)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    with pytest.raises(ValueError, match="fewer processes"):
        sharded(**batch)
    model(**batch)
    model.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="not as it was converted"):
        model(**batch)


def test_what_cannot_be_cut_is_refused() -> None:
    on_many(2, _refused, "cpu")
