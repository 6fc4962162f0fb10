"""What `overcoat eval` is pointed at: a run, one of its checkpoints, an exported folder, a Hugging Face name.

A run is its export/, else its newest checkpoint. What Overcoat wrote is compared with its manifest first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from overcoat.extras import load_extra
from overcoat.models.pretrained import load_pretrained
from overcoat.train.build import load_model
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.files import MANIFEST, verify_directory
from overcoat.train.shards import is_sharded, read_model
from overcoat.train.tokenizer import load_tokenizer


class Target(NamedTuple):
    """name: as it was asked for. place: the folder with the weights, or a name on the Hugging Face hub."""

    name: str
    place: str


def find_target(name: str) -> Target:
    """Where the weights are.

    Raises:
        ValueError: it is a folder without a model, or damaged.
    """
    folder = Path(name)
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"{name}: no such folder")
        return Target(name, name)
    if (folder / "config.toml").exists():
        made = [folder / "export"] if (folder / "export").is_dir() else list_checkpoints(folder / "checkpoints")[-1:]
        if not made:
            raise ValueError(f"{name} is a run without a checkpoint: train it first")
        folder = made[0]
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{name} holds adapters without their model, which are not put together here: train with lora.merge=true, "
            "or save the result of merge_and_unload()"
        )
    if not (folder / "config.json").exists():
        raise ValueError(f"{name} is no run, checkpoint or model folder: it has no config.toml and no config.json")
    if (folder / MANIFEST).exists():
        verify_directory(folder)
    return Target(name, str(folder))


def load_target(target: Target, device: torch.device, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model, in the dtype it was saved in, and its tokenizer."""
    transformers = load_extra("transformers", "hf", "overcoat eval")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(target.place, trust_remote_code)
    settings = {"dtype": "auto", "attn_implementation": "sdpa"}
    if not is_sharded(Path(target.place)):
        return load_model(target.place, device, settings, trust_remote_code, "the model").eval(), tokenizer
    config = load_pretrained("AutoConfig", "the model", target.place, trust_remote_code)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation="sdpa")
    read_model(Path(target.place), model)
    return model.eval(), tokenizer
