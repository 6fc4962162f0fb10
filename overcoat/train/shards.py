"""Checkpoints of several processes: each writes what it holds, any number of them reads what it needs.

    shard-00000.safetensors   one file a process: its rows of every parameter ("model/NAME") and of every tensor of the
                              optimizer's state that is cut like its parameter ("optimizer/INDEX/NAME")

A file's header says at which row of the whole tensor each piece begins, and how many rows the whole has. What is alike
in all processes (buffers; counters and the states of vectors, in training.pt) is written by the first one alone; of
replicas the first one is written. safetensors are data: nothing of a stranger's is run on reading.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from overcoat.extras import load_extra
from overcoat.optim.sharding import first_row, is_cut, local, wrap_state
from overcoat.train import process
from overcoat.train.build import trained_state
from overcoat.train.files import loading, writing

ROWS = "rows"  # key of a file's header: {name: [first row, rows of the whole]}


def is_sharded(checkpoint: Path) -> bool:
    """Whether several processes have written a checkpoint."""
    return any(checkpoint.glob("shard-*.safetensors"))


def write_shard(folder: Path, model: Any, optimizer_states: dict[int, dict[str, Any]]) -> None:
    """This process' file; the states that go into it are taken out of `optimizer_states`."""
    safetensors = load_extra("safetensors.torch", "hf", "writing a checkpoint")
    pieces, rows = {}, {}
    for name, tensor in [*_named(model), *_cut_states(optimizer_states)]:
        piece = local(tensor.detach())
        if _is_ours_to_write(tensor) and piece.numel():
            pieces[name] = piece.cpu().contiguous()
            rows[name] = [first_row(tensor), len(tensor) if tensor.dim() else 1]
    path = folder / f"shard-{process.rank():05d}.safetensors"
    with writing(path):
        safetensors.save_file(pieces, path, metadata={ROWS: json.dumps(rows)})


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, tied ones under their first name."""
    seen: set[int] = set()
    for name, tensor in trained_state(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"model/{name}", tensor


def _cut_states(states: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for index, state in states.items():
        for name in [name for name, value in state.items() if isinstance(value, DTensor)]:
            yield f"optimizer/{index}/{name}", state.pop(name)


def _is_ours_to_write(tensor: Tensor) -> bool:
    """Whether this process is the first of those that hold the same piece."""
    if not isinstance(tensor, DTensor):
        return process.is_first()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return all(at == 0 for at, kind in zip(place, tensor.placements, strict=True) if kind == Replicate())


def adapter_key(name: str) -> str:
    """The name in a model of a tensor of peft's files, which leave out that of the adapter."""
    return re.sub(r"(\.lora_[AB])\.weight$", r"\1.default.weight", name)


class _Piece(NamedTuple):
    first: int
    end: int
    file: Any


class Pieces:
    """The tensors of a checkpoint, of several processes or of one, by name and rows, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        safetensors = load_extra("safetensors", "hf", "reading a checkpoint")
        self.pieces: dict[str, list[_Piece]] = defaultdict(list)
        self.rows: dict[str, int] = {}
        self.keys: dict[str, str] = {}  # in the files
        for path in sorted(folder.glob("*.safetensors")):  # of the manifest: `checkpoint` lets no others in
            with loading(path):
                file = safetensors.safe_open(path, "pt")
                named = json.loads((file.metadata() or {}).get(ROWS, "null"))
                for key in file.keys():  # noqa: SIM118
                    shape = file.get_slice(key).get_shape()
                    first, whole = (0, shape[0] if shape else 1) if named is None else named[key]
                    name = key if named is not None else f"model/{adapter_key(key)}"
                    self.keys[name] = key
                    self.pieces[name].append(_Piece(first, first + (shape[0] if shape else 1), file))
                    self.rows[name] = whole

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = self._slice(self.pieces[name][0], name).get_shape()
        return (self.rows[name], *shape[1:]) if shape else ()

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a tensor; all of one without dimensions."""
        if not self.shape(name):
            return self.pieces[name][0].file.get_tensor(self.keys[name])
        parts, at = [], first
        for piece in sorted(self.pieces[name], key=lambda piece: piece.first):
            if piece.first <= at < min(piece.end, first + count):
                part = self._slice(piece, name)[at - piece.first : min(piece.end, first + count) - piece.first]
                parts.append(part)
                at += len(part)
        if at != first + count:
            raise ValueError(f"rows {at} to {first + count} of {name} are in none of its files")
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._slice(self.pieces[name][0], name)[:0]
        as_bytes = [part.contiguous().view(torch.uint8) for part in parts]  # 8-bit floats cannot be joined
        return torch.cat(as_bytes).view(parts[0].dtype)

    def _slice(self, piece: _Piece, name: str) -> Any:
        return piece.file.get_slice(self.keys[name])


def read_model(folder: Path, pieces: Pieces, model: Any) -> None:
    """Copy a checkpoint's weights into a model, each process its own rows.

    Raises:
        ValueError: they are those of another model.
    """
    own = dict(_named(model))
    tied = {f"model/{name}" for name in trained_state(model)}
    stored = {name for name in pieces.pieces if name.startswith("model/")}
    wrong = sorted(own.keys() - stored) + sorted(stored - tied)
    wrong += [name for name in own.keys() & stored if pieces.shape(name) != tuple(own[name].shape)]
    if wrong:
        name = wrong[0].removeprefix("model/")
        raise ValueError(f"{folder} holds another model: {len(wrong)} parameters differ, the first is {name}")
    for name, tensor in own.items():
        part = local(tensor.detach())
        part.copy_(pieces.read(name, first_row(tensor), len(part) if part.dim() else 1))


def read_states(pieces: Pieces, optimizer: torch.optim.Optimizer, states: dict[int, dict[str, Any]]) -> None:
    """Put the cut states of a checkpoint into `states` (those of training.pt), laid out for this optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key in pieces.pieces:
        if key.startswith("optimizer/"):
            _, index, name = key.split("/")
            param, shape = params[int(index)], pieces.shape(key)
            count = len(local(param)) if is_cut(param) else shape[0]
            piece = pieces.read(key, first_row(param) if is_cut(param) else 0, count)
            states.setdefault(int(index), {})[name] = wrap_state(param, piece, shape)
