"""Processes of one process group, mostly two: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])

# Parametrizes tests by the device that the two processes compute on.
two_of = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def on_two(work: Callable[..., None], device: str, *arguments: object) -> None:
    """work(rank, *arguments) in two processes; each one's current GPU is its own."""
    on_many(2, work, device, *arguments)


def on_many(count: int, work: Callable[..., None], device: str, *arguments: object) -> None:
    """The same in `count` processes."""
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # Not for GPUs: the imports may ask how many there are, and CUDA does not outlive a fork.
    method = "spawn" if device == "cuda" else "forkserver"
    mp.start_processes(_process, args=(count, port, device, work, arguments), nprocs=count, start_method=method)


def repeatable() -> None:
    """One result each time: else cuDNN's attention adds up dq in any order, and embeddings their gradients."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def repeating(device: str) -> Iterator[None]:
    """The same in this process, on a GPU and for a while."""
    repeats = torch.are_deterministic_algorithms_enabled()
    if device == "cuda":
        repeatable()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(repeats)


def _process(
    rank: int, count: int, port: int, device: str, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        repeatable()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        work(rank, *arguments)
        dist.barrier()  # one that leaves early takes its connections from the other
        # Once DTensors have communicated, PyTorch 2.13 holds the process group beyond destroy_process_group: gloo's
        # threads run on while Python takes everything down, and now and then a process aborts there ("terminate called
        # without an active exception", 2 of some 60 pairs). What was to be tested has been by now: leave without that.
        os._exit(0)
    finally:
        dist.destroy_process_group()
