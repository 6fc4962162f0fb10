"""FSDP2 in the dry run: `fully_shard` itself, as the first of so many processes, whose collectives move nothing.

`fully_shard` takes a mesh whose groups are PyTorch's fake ones, and its parameters stay on the meta device. What it
allocates besides them it allocates by `Comm`, also on the meta device, and by resizing gathered parameters' storages.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import _get_current_dispatch_mode

from overcoat.distributed.fp8_all_gather import fp8_all_gather, fsdp_params
from overcoat.estimate.meter import GRADIENTS, META, Meter, own
from overcoat.estimate.setup import Setup
from overcoat.models.family import decoder_layers, find_causal_model


def part_bytes(tensor: Tensor, gpus: int) -> int:
    """Return the bytes of the largest part that FSDP2 gives a process; smaller parts are padded to it."""
    return -(-tensor.shape[0] // gpus) * tensor[:1].nbytes if gpus > 1 and tensor.dim() else tensor.nbytes


class FakeMesh(DeviceMesh):
    """The mesh of processes that do not exist, seen by the first, without a default process group."""

    def __init__(self, *shape: int) -> None:
        names, ranks = ("replicate", "shard")[-len(shape) :], torch.arange(math.prod(shape)).view(shape)
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
        self._groups = [FakeProcessGroup._create_internal(0, size) for size in shape]

    def get_group(self, mesh_dim: Any = None) -> Any:
        """Return the fake group of a dimension."""
        return self._groups[mesh_dim or 0]

    def __getitem__(self, names: Any) -> FakeMesh:
        """Return the mesh of the processes that share one copy."""
        return FakeMesh(self.shape[-1])


class Comm:
    """FSDP2's all-gather and reduce-scatter without communication."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer on the meta device."""
        return torch.empty(size, dtype=dtype, device=META)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


class Stream(torch.cpu.Stream):
    """A CPU's stream with what FSDP2 of PyTorch 2.15 asks one for."""

    stream_id = device_index = device_type = 0


def shard(model: nn.Module, setup: Setup, gpus: int, streamed: frozenset[Any] = frozenset()) -> int:
    """Shard a converted meta model over so many processes as `overcoat train` does; return the bytes of all gathered
    parameters. streamed: those that `overcoat.stream` takes over from FSDP2, which stay whole."""
    found = find_causal_model(model)
    assert found is not None  # a dry run's model is one
    causal: Any = found[1]
    parts: list[Any] = [*decoder_layers(causal).values(), causal]
    mesh = FakeMesh(2, gpus) if setup.replicated else FakeMesh(gpus)
    policy = MixedPrecisionPolicy(reduce_dtype=setup.torch_reduce_dtype)
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=set(streamed))
        part.set_custom_all_gather(Comm())
        part.set_custom_reduce_scatter(Comm())
        if setup.replicated:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    for param, group in fsdp_params(causal).values():
        group._validate_no_meta_params = lambda: None
        param.init_all_gather_outputs = functools.partial(_on_meta, param.init_all_gather_outputs)
    if setup.all_gather == "fp8":
        with contextlib.suppress(ValueError):  # no weight can be: `overcoat train` warns, and goes on without
            fp8_all_gather(causal)
    for part in parts:
        part.unshard()
    gathered = 0
    for parameter in causal.parameters():
        gathered += own(parameter).nbytes if parameter not in streamed else 0
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_name_gradient)
    for part in parts:
        part.reshard()
    return gathered


def _on_meta(allocate: Callable[..., None], numels: Any, dtypes: Any, processes: int, *_: Any, **others: Any) -> None:
    allocate(numels, dtypes, processes, META, **others)  # not on the mesh's device


def _name_gradient(parameter: Tensor) -> None:
    if isinstance(meter := _get_current_dispatch_mode(), Meter) and parameter.grad is not None:
        meter.tag(parameter.grad, GRADIENTS)
