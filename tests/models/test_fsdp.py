"""A converted model under FSDP2 (`fully_shard`), two gloo processes on the CPU: `pytest tests/models/test_fsdp.py`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import overcoat
from overcoat import Recipe, weight_amax
from tests.models.zoo import make_batch, make_model

RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    "offloaded": Recipe(offload_blocks="all"),
    "block scales": Recipe(linear_scaling="block"),
    "fp8 head": Recipe(head="fp8"),
}
# Qwen2: RMSNorm, SwiGLU, biases of q, k, v. Starcoder2: LayerNorm, GELU, biases, and a head tied to the embedding.
KINDS = ["qwen2", "starcoder2"]


def _worker(rank: int, port: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for name, recipe in RECIPES.items():
            grads = _sharded_gradients(kind, recipe)
            if rank == 0:
                torch.save(grads, Path(folder) / name)
        dist.barrier()
        os._exit(
            0
        )  # gloo's threads outlive the process group, and may abort at Python's exit: tests/optim/test_shards.py
    finally:
        dist.destroy_process_group()


def _sharded_gradients(kind: str, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The whole gradients of a first step; a second one runs to its end."""
    model = make_model(kind, layers=3)
    overcoat.convert(model, recipe)
    for layer in model.model.layers:
        fully_shard(layer)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if recipe.checkpoint is None and not is_tied:
        fully_shard(model.lm_head)  # by itself: its weight is gathered by the hooks of its own call
    fully_shard(model)
    # Both ranks see the same batch, so the averaged gradient is that of one process.
    model(**make_batch()).loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[name] = parameter.grad.full_tensor()
    # What the forward multiplies is gathered, what is stepped is a shard: its maximum is nobody's guess.
    overcoat.AdamW(model.parameters()).step()
    assert all(entry.version is None for entry in weight_amax._asked.values())
    model(**make_batch()).loss.backward()
    return grads


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_gradients_equal_those_of_one_process(kind: str, tmp_path: Path) -> None:
    """All recipes in one pair of processes, which take longer to begin than a step does."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.spawn(_worker, args=(port, kind, str(tmp_path)), nprocs=2)
    for recipe_name, recipe in RECIPES.items():
        sharded = torch.load(tmp_path / recipe_name)
        model = make_model(kind, layers=3)
        overcoat.convert(model, recipe)
        model(**make_batch()).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(sharded[name], parameter.grad, rtol=0, atol=0, msg=f"{recipe_name}: {name}")
