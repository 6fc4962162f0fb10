"""Two processes of one process group: gloo on the CPU, NCCL on two GPUs."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, in the process that all those on the CPU are forked from: it takes longer than what most of them do.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "pytest", "overcoat", "tests.models.zoo"]
)

# Parametrizes tests by the device that the two processes compute on.
two_of = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def on_two(work: Callable[..., None], device: str, *arguments: object) -> None:
    """work(rank, *arguments) in two processes; each one's current GPU is its own."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # Not for GPUs: the imports may ask how many there are, and CUDA does not outlive a fork.
    method = "spawn" if device == "cuda" else "forkserver"
    mp.start_processes(_process, args=(port, device, work, arguments), nprocs=2, start_method=method)


def repeatable() -> None:
    """One result each time: else cuDNN's attention adds up dq in any order, and embeddings their gradients."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _process(rank: int, port: int, device: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        repeatable()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        work(rank, *arguments)
        dist.barrier()  # one that leaves early takes its connections from the other
        # Once DTensors have communicated, PyTorch 2.13 holds the process group beyond destroy_process_group: gloo's
        # threads run on while Python takes everything down, and now and then a process aborts there ("terminate called
        # without an active exception", 2 of some 60 pairs). What was to be tested has been by now: leave without that.
        os._exit(0)
    finally:
        dist.destroy_process_group()
