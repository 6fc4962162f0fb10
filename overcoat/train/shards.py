"""Weights of checkpoints: several processes write what each holds, any number of them reads what it needs.

PyTorch's distributed checkpoints (DCP) do both, with its safetensors storage: parameters and buffers as "model/NAME",
tensors of the optimizer's state that are cut like their parameter as "optimizer/INDEX/NAME", in files
shard-RANK-model-PART-of-PARTS.safetensors whose headers say where in the whole tensor each piece begins. What is alike
in all processes is written once. Counters and the states of vectors are in training.pt.

DCP's own storage is not used: its .metadata is a pickle, which can run a stranger's code on reading.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from overcoat.extras import load_extra, reason
from overcoat.optim.sharding import is_cut, local, rewrap, shard_bytes, state_shape, wrap_state
from overcoat.train import process
from overcoat.train.build import trained_state
from overcoat.train.files import loading

WEIGHT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # converted into each other
FILE_BYTES = 2 << 30  # of a file at most, but for larger tensors: DCP makes a file in memory before it writes it


def is_sharded(checkpoint: Path) -> bool:
    """True if several processes wrote the checkpoint."""
    return any(checkpoint.glob("shard-*.safetensors"))


def tensors_of(model: Any, optimizer_states: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors of the files, by name; states are taken out of `optimizer_states`."""
    found = {f"model/{name}": tensor for name, tensor in named_tensors(model)}
    for index, state in optimizer_states.items():
        for name in [name for name, value in state.items() if isinstance(value, DTensor)]:
            found[f"optimizer/{index}/{name}"] = state.pop(name)
    return found


def copy_to_host(value: Any) -> Any:
    """A copy of a tensor in host memory, laid out alike; of what is no tensor itself."""
    return rewrap(value, local(value.detach()).to("cpu", copy=True)) if isinstance(value, Tensor) else value


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of all processes, to be called in each of them; returns when all have written. OSError: a
    process could not write; names it."""
    load_extra("safetensors", "hf", "writing a checkpoint")
    sizes = itertools.accumulate(map(shard_bytes, tensors.values()))
    files = {name: 1 + size // FILE_BYTES for name, size in zip(tensors, sizes, strict=True)}
    ordered = {number: place for place, number in enumerate(dict.fromkeys(files.values()), 1)}
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), {name: ordered[number] for name, number in files.items()}, save_distributed=True
    )
    try:
        dcp.save(tensors, storage_writer=writer, process_group=process.writing_group())
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if process.follows_from_another(cause):
            raise cause from error
        raise OSError(f"rank {rank} cannot write its part of {folder}: {reason(cause)}") from error


def read_model(folder: Path, model: Any) -> None:
    """Copy a checkpoint's weights into a model, each process its own rows. ValueError: they are those of another
    model."""
    reader, found, prefix = _open(folder)
    own = {f"{prefix}{name}": tensor.detach() for name, tensor in named_tensors(model)}
    tied = {f"{prefix}{name}" for name in trained_state(model)}
    # peft's files leave the adapter's name out of those of its tensors.
    keys = {
        re.sub(r"(\.lora_[AB])\.weight$", r"\1.default.weight", key): key for key in found if key.startswith(prefix)
    }
    wrong = sorted(own.keys() - keys) + sorted(keys.keys() - tied)
    wrong += [name for name in own if name in keys and found[keys[name]].size != own[name].shape]
    if wrong:
        name = wrong[0].removeprefix(prefix)
        raise ValueError(f"{folder} holds another model: {len(wrong)} parameters differ, the first is {name}")
    for name, tensor in own.items():
        dtype = found[keys[name]].properties.dtype
        if dtype != tensor.dtype and not {dtype, tensor.dtype} <= WEIGHT_DTYPES:
            raise ValueError(
                f"{folder}: {name.removeprefix(prefix)} is {dtype}, expected {tensor.dtype}: choose another checkpoint "
                "with train.resume=PATH"
            )
    _read(folder, reader, {keys[name]: tensor for name, tensor in own.items()})


def read_states(folder: Path, optimizer: torch.optim.Optimizer, states: dict[int, dict[str, Any]]) -> None:
    """Put the cut states of a checkpoint into `states` (those of training.pt), laid out for this optimizer."""
    reader, stored, _ = _open(folder)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = {}
    for key, of in stored.items():
        if key.startswith("optimizer/"):
            _, index, name = key.split("/") if key.count("/") == 2 else ("", "", "")
            if not index.isdecimal() or int(index) >= len(params):
                raise ValueError(f"{folder}: {key} is no state of this model's {len(params)} parameters")
            param, shape = params[int(index)], tuple(of.size)
            part = state_shape(param, shape) if is_cut(param) else shape
            found[key] = wrap_state(param, torch.empty(part, dtype=of.properties.dtype), shape)
            states.setdefault(int(index), {})[name] = found[key]
    _read(folder, reader, found)


def named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, tied ones under their first name."""
    seen: set[int] = set()
    for name, tensor in trained_state(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _open(folder: Path) -> tuple[Any, dict[str, TensorStorageMetadata], str]:
    """The reader of a checkpoint of several processes or of one, what it holds, and what its weights' names begin
    with."""
    load_extra("safetensors", "hf", "reading a checkpoint")
    with loading(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for name, of in stored.items():
        rows = sum(chunk.sizes.numel() for chunk in of.chunks)
        if rows != of.size.numel():
            raise ValueError(f"{folder}: {of.size.numel() - rows} elements of {name} are in none of its files")
    return reader, stored, "model/" if is_sharded(folder) else ""


def _read(folder: Path, reader: Any, into: dict[str, Tensor]) -> None:
    if not into:
        return
    try:
        with loading(folder), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads, too
            dcp.load(into, storage_reader=reader, process_group=process.writing_group())
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if process.follows_from_another(cause):
            raise cause from error
        raise ValueError(f"{folder} cannot be loaded by rank {rank}: {reason(cause)}") from error
