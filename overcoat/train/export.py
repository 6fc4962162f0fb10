"""Export a trained model as a Hugging Face folder, atomically, from one process or many."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overcoat.extras import load_extra
from overcoat.models.family import decoder_layers
from overcoat.optim.sharding import gather
from overcoat.train import files, process
from overcoat.train.build import base_model
from overcoat.train.files import write_directory, writing
from overcoat.train.state import TrainState, named_tensors

# Of a file at most; and of those that several processes write at least.
FILE_BYTES, SMALLEST = 5 * 10**9, 10**8


def write_model(model: Any, tokenizer: Any | None, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Write the Hugging Face files of a model. weights: gathered, if the model is sharded over several processes."""
    options: dict[str, Any] = {"max_shard_size": FILE_BYTES}
    if hasattr(model, "peft_config"):
        options = {"save_embedding_layers": False}  # else peft asks the hub for the base model's vocabulary
    with writing(folder):
        model.save_pretrained(folder, state_dict=weights, **options)
        write_settings(model, tokenizer, folder)


def write_settings(model: Any, tokenizer: Any | None, folder: Path) -> None:
    """Write the tokenizer, and generation_config.json (stop tokens), which peft does not write."""
    found = base_model(model).generation_config
    if found is not None and not (folder / "generation_config.json").exists():
        found.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def export(state: TrainState, tokenizer: Any | None, target: Path, merge: bool = False) -> None:
    """Write the trained model as a Hugging Face folder. merge: merge its adapters into its weights first.

    Each of several processes writes files of its own, so that none holds more than the weights of one file. Adapters
    are written by the first process.
    """
    if merge:
        state.model = state.model.merge_and_unload()
    model, has_adapters = state.model, not merge and hasattr(state.model, "peft_config")
    alone = process.count() == 1 or has_adapters
    weights = None
    if has_adapters:  # alone: of the base, which may be sharded or held in FP8, peft would gather everything
        weights = {name: gather(tensor.detach()).cpu() for name, tensor in named_tensors(model).items()}

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
    """Return the names of each file's tensors, which have `sizes` bytes and are written by `many` processes. A layer
    stays in one file; one larger than FILE_BYTES has a file of its own."""
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
    """Write a sharded model's weights in Hugging Face's files; all processes call it. They gather file after file, and
    one of them writes it. Names are those of the model's files on the hub, which differ within a layer only."""
    load_extra("safetensors", "hf", "exporting the model")
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    inner, named = base_model(model), named_tensors(model)
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
