"""Checkpoints and exports as they are written; which one is read, and how, is in checkpoint.py.

A checkpoint is copied into host memory, if that has room, and a thread writes the copy while training goes on
(`Saver`).
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from overcoat.extras import load_extra, reason
from overcoat.models.family import decoder_layers
from overcoat.optim.sharding import gather, shard_bytes
from overcoat.train import files, process
from overcoat.train.build import base_model, trained_state
from overcoat.train.checkpoint import TRAINING, checkpoint_dir, list_checkpoints
from overcoat.train.config import Config
from overcoat.train.files import remove_directory, write_directory, writing
from overcoat.train.shards import copy_to_host, named_tensors, tensors_of, write_shards
from overcoat.train.state import TrainState

# Of a Hugging Face file at most; and of those that several processes write at least.
FILE_BYTES, SMALLEST = 5 * 10**9, 10**8


class Saver:
    """Writes checkpoints of a run, each beside the training that follows it.

    To be used in `with`: at its end the last one is complete. What goes wrong in a thread is raised by the next
    `check`, `save` or `wait`, or there; said, where another error is on its way.
    """

    def __init__(self, state: TrainState, config: Config, tokenizer: Any | None) -> None:
        self.state, self.config, self.tokenizer = state, config, tokenizer
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception as error:
            if kind is None:
                raise
            warnings.warn(f"the newest checkpoint could not be written: {reason(error)}", stacklevel=2)
        finally:
            self._thread.shutdown()

    def wait(self) -> None:
        """Until what was saved is complete."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what went wrong so far: a full disk is not to cost the steps until the next checkpoint."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def save(self) -> Path:
        """The checkpoint of the state as it is, once it is complete; copied, if the host has memory for that."""
        self.wait()
        held = CheckpointSnapshot(self.state)
        if self.config.checkpoint.asynchronous and not process.largest(held.bytes > process.host_bytes_free())[0]:
            held.copy()
            self._pending = self._thread.submit(write_checkpoint, held, self.config, self.tokenizer)
        else:
            write_checkpoint(held, self.config, self.tokenizer)
        return checkpoint_dir(self.config) / held.name


class CheckpointSnapshot:
    """Tensors of this process for a checkpoint."""

    def __init__(self, state: TrainState) -> None:
        self.model, self.step, self.name = state.model, state.step, f"step-{state.step:08d}"
        self.training = state.training_dict()
        if process.count() == 1:
            once: dict[int, torch.Tensor] = {}  # of tied ones
            named = trained_state(state.model).items()
            self.weights = {name: once.setdefault(id(value), value.detach()) for name, value in named}
        else:
            self.weights = tensors_of(state.model, self.training["optimizer"]["state"])
            process.writing_group()

    @property
    def bytes(self) -> int:
        """Return the bytes of a copy in host memory."""
        values = tree_leaves((self.weights, self.training))
        return sum(shard_bytes(value) for value in values if isinstance(value, torch.Tensor))

    def copy(self) -> None:
        """Hold copies in host memory, tied tensors once."""
        copies = {id(value): copy_to_host(value) for value in tree_leaves((self.weights, self.training))}
        self.weights, self.training = tree_map(lambda value: copies[id(value)], (self.weights, self.training))


def write_checkpoint(held: CheckpointSnapshot, config: Config, tokenizer: Any | None) -> Path:
    """The complete checkpoint; the oldest beyond `checkpoint.keep` are removed. Of several processes each writes its
    files into the first one's unfinished directory, which takes its name once all have."""
    folder = checkpoint_dir(config)
    target = folder / held.name

    def fill(partial: Path) -> None:
        if process.count() == 1:
            write_model(held.model, tokenizer, partial, held.weights, True)
        else:
            process.wait_for_writers()  # until this folder is there
            write_shards(partial, held.weights)
            with writing(partial):
                held.model.config.save_pretrained(partial)
                save_stops(held.model, partial)
                if tokenizer is not None:
                    tokenizer.save_pretrained(partial)
        with writing(partial / TRAINING):
            torch.save(held.training, partial / TRAINING)

    if process.is_first():
        write_directory(target, fill, {"step": held.step, "processes": process.count()})
        for path in list_checkpoints(folder)[: -config.checkpoint.keep]:
            remove_directory(path)
        files.sweep(folder)  # what could not be deleted before
    else:
        process.wait_for_writers()
        write_shards(files.partial_of(target), held.weights)
    process.wait_for_writers()  # none goes on before it is complete
    return target


def write_model(
    model: Any, tokenizer: Any | None, folder: Path, weights: dict[str, Any] | None = None, own_names: bool = False
) -> None:
    """The Hugging Face files of a model. weights: of a model that is cut over several processes, gathered. own_names:
    of parameters as the model has them, rather than those that its first checkpoints on the hub had (LLaVA, Mixtral);
    transformers reads both."""
    options: dict[str, Any] = {"max_shard_size": FILE_BYTES, "save_original_format": not own_names}
    if hasattr(model, "peft_config"):
        options = {"save_embedding_layers": False}  # else peft asks the hub for the base model's vocabulary
    with writing(folder):
        model.save_pretrained(folder, state_dict=weights, **options)
        save_stops(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def save_stops(model: Any, folder: Path) -> None:
    """generation_config.json, where generation stops; adapters and pieces of a model are saved without it."""
    found = base_model(model).generation_config
    if found is not None and not (folder / "generation_config.json").exists():
        found.to_json_file(folder / "generation_config.json")


def export(state: TrainState, tokenizer: Any | None, target: Path, merge: bool = False) -> None:
    """The trained model as a Hugging Face folder; merge: with its adapters in its weights, from now on. Of several
    processes each writes files of its own, so that none holds more than one file's weights; adapters are written by the
    first."""
    if merge:
        state.model = state.model.merge_and_unload()
    model, alone = state.model, process.count() == 1 or hasattr(state.model, "peft_config")
    weights = None
    if alone and process.count() > 1:  # adapters
        weights = {name: gather(tensor.detach()).cpu() for name, tensor in trained_state(model).items()}

    def fill(folder: Path) -> None:
        write_model(model, tokenizer, folder, weights if alone else {})
        if not alone:
            process.wait_for_all()  # until this folder is there
            write_parts(model, folder)

    if process.is_first():
        write_directory(target, fill, {"step": state.step})
    elif not alone:
        process.wait_for_all()
        write_parts(model, files.partial_of(target))
    process.wait_for_all()


def cut_into_files(sizes: dict[str, int], layers: Iterable[str], many: int) -> list[list[str]]:
    """The names in each file, of tensors of `sizes` bytes that `many` processes write. A layer stays whole: one larger
    than a file may be is a file of its own."""
    groups, found, held = defaultdict[str, list[str]](list), list[list[str]](), 0
    prefixes = tuple(f"{layer}." for layer in layers)
    for name in sizes:
        groups[next((prefix for prefix in prefixes if name.startswith(prefix)), name)].append(name)
    most = min(FILE_BYTES, max(sum(sizes.values()) // many, SMALLEST))
    for group in groups.values():
        size = sum(sizes[name] for name in group)
        if not found or held + size > most:
            found.append([])
            held = 0
        found[-1] += group
        held += size
    return found


def write_parts(model: Any, folder: Path) -> None:
    """The weights of a model in Hugging Face's files, in each of several processes: file after file is gathered, and
    written by one of them. Names are those of the model's first checkpoints, which stay within a layer."""
    load_extra("safetensors", "hf", "exporting the model")
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    inner, named = base_model(model), dict(named_tensors(model))
    sizes = {name: tensor.nbytes for name, tensor in named.items()}
    of_file = cut_into_files(sizes, decoder_layers(inner), process.count())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(of_file):
        held = {}
        for name in names:
            whole = gather(named[name].detach())
            if number % process.count() == process.rank():
                held[name] = whole.cpu().contiguous()
        if held:
            file = f"model-{number + 1:05d}-of-{len(of_file):05d}.safetensors"
            file = "model.safetensors" if len(of_file) == 1 else file
            with writing(folder / file):
                held = revert_weight_conversion(inner, held)
                save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(held, file)
    found = process.gather(weight_map)
    if process.is_first() and len(of_file) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {k: v for of in found for k, v in of.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
