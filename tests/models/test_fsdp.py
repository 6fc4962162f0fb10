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

RECIPES = {"default": Recipe(), "leanest": Recipe.leanest(), "offloaded": Recipe(offload_blocks="all")}


def _worker(rank: int, port: int, recipe: Recipe, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        model = make_model("qwen2", layers=3)
        overcoat.convert(model, recipe)
        for layer in model.model.layers:
            fully_shard(layer)
        if recipe.checkpoint is None:
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
        if rank == 0:
            torch.save(grads, Path(folder) / "grads.pt")
        dist.barrier()
        os._exit(
            0
        )  # gloo's threads outlive the process group, and may abort at Python's exit: tests/optim/test_shards.py
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_sharded_gradients_equal_those_of_one_process(recipe: Recipe, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.spawn(_worker, args=(port, recipe, str(tmp_path)), nprocs=2)
    sharded = torch.load(tmp_path / "grads.pt")
    model = make_model("qwen2", layers=3)
    overcoat.convert(model, recipe)
    model(**make_batch()).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sharded[name], parameter.grad, rtol=0, atol=0, msg=name)
