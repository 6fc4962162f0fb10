"""Checkpoints: `RUN_DIR/checkpoints/step-00000500/`, each complete, checked and a Hugging Face folder of its
own.

    model.safetensors, config.json, tokenizer...   what `from_pretrained` reads
    training.pt    optimizer, data position, generators, counters; loaded with weights_only=True
    manifest.json  size and SHA-256 of every file

They are written atomically (see `files.py`) and only then is the oldest beyond `checkpoint.keep` removed, so
at every moment there is one that can be resumed from.

Which one a run starts from (`choose_checkpoint`), decided before anything is written:
  * a `train.run_dir` that is new, or holds nothing but tokens (`data/`): none, a fresh start;
  * a `train.run_dir` with a run of the same configuration: its newest checkpoint, so repeating a command
    continues it;
  * a run of another configuration, or files that are not ours: an error that names the difference;
  * `train.resume=PATH`: that checkpoint, whatever else differs; the way past a damaged newest one and to
    fine-tune on. Repeating that command goes back to PATH; without train.resume it continues.
A checkpoint that does not match its manifest is never used and never replaced silently: the error names the
one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from overcoat.train.config import Config
from overcoat.train.configfile import differences, load_config
from overcoat.train.corpus import STREAMED
from overcoat.train.extras import load_extra
from overcoat.train.files import DamagedError, remove_directory, verify_directory, write_directory
from overcoat.train.state import TrainState

RECORDED_CONFIG = "config.toml"
TRAINING = "training.pt"


def checkpoint_dir(config: Config) -> Path:
    return Path(config.train.run_dir) / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete or damaged, oldest first; unfinished ones carry another name."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def save_checkpoint(state: TrainState, config: Config, tokenizer: Any | None) -> Path:
    """Write the state and remove the oldest checkpoints beyond `checkpoint.keep`."""
    folder = checkpoint_dir(config)
    target = folder / f"step-{state.step:08d}"

    def fill(partial: Path) -> None:
        write_model(state.model, tokenizer, partial)
        torch.save(state.training_dict(), partial / TRAINING)

    write_directory(target, fill, {"step": state.step})
    for path in list_checkpoints(folder)[: -config.checkpoint.keep]:
        remove_directory(path)
    return target


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints after `step` to `abandoned-*`: a run told to resume from `step` leaves that line of
    history.

    They are kept for the user to look at or delete, but are no longer what "newest" means.
    """
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            number = 1
            while (aside := path.with_name(f"abandoned-{number}-{path.name}")).exists():
                number += 1
            path.rename(aside)


def write_model(model: Any, tokenizer: Any | None, folder: Path) -> None:
    """The Hugging Face files of a model."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_checkpoint(path: Path, state: TrainState) -> None:
    """Put the (verified) checkpoint at `path` into `state`, weights in place."""
    saved = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    if saved["data_identity"] != state.data_identity:
        remedy = "set data.cache_dir to the data/ folder of its run"
        if state.data_identity.startswith(STREAMED):
            remedy = "stream the same files (names and sizes) with the same data.held_out and eval.rows"
        raise ValueError(f"{path} was trained on other tokens than these (or in another order of files); {remedy}")
    load_weights(path, state.model)
    state.load_training_dict(saved)


def load_weights(folder: Path, model: Any) -> None:
    """Copy the safetensors of `folder` into the model's parameters; tied ones are stored once."""
    safetensors = load_extra("safetensors.torch", "hf", "reading a checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.load_file(file)
    own = model.state_dict()
    wrong = [name for name in tensors if name not in own or own[name].shape != tensors[name].shape]
    present = {own[name].data_ptr() for name in tensors if name in own}
    wrong += [name for name in own if name not in tensors and own[name].data_ptr() not in present]
    if wrong:
        raise ValueError(f"{folder} holds another model: {len(wrong)} parameters differ, the first is {wrong[0]}")
    model.load_state_dict(tensors, strict=False)


def choose_checkpoint(config: Config) -> Path | None:
    """The checkpoint to start from, verified, or None; see the module docstring. Writes nothing."""
    run_dir = Path(config.train.run_dir)
    visible = [path for path in run_dir.glob("*") if path.name != "data" and not path.name.startswith(".")]
    recorded = run_dir / RECORDED_CONFIG
    if visible and not recorded.exists():
        raise ValueError(f"{run_dir} holds files but no run of overcoat: choose another train.run_dir")
    if config.train.resume != "auto":
        return _explicit_checkpoint(Path(config.train.resume), checkpoint_dir(config))
    if not visible:
        return None
    changed = differences(load_config(recorded), config)
    if changed:
        raise ValueError(
            f"{run_dir} holds a run with another configuration ({'; '.join(changed[:5])}): choose another "
            "train.run_dir, or continue it on purpose with train.resume=CHECKPOINT"
        )
    return newest_checkpoint(checkpoint_dir(config))


def _explicit_checkpoint(path: Path, folder: Path) -> Path:
    if not path.is_dir():
        others = ", ".join(map(str, list_checkpoints(folder))) or "none"
        raise ValueError(f"train.resume = {str(path)!r}: no such checkpoint (in {folder}: {others})")
    verify_directory(path)
    if not (path / TRAINING).is_file():
        raise ValueError(f"train.resume = {str(path)!r}: not a checkpoint, it has no {TRAINING}")
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint in `folder` after verification; DamagedError names a way on."""
    found = list_checkpoints(folder)
    if not found:
        return None
    try:
        verify_directory(found[-1])
    except DamagedError as error:
        remedy = (
            f"resume from the one before it with train.resume={found[-2]}" if found[1:] else "delete it to start over"
        )
        raise DamagedError(f"{error}; nothing was overwritten, {remedy}") from error
    return found[-1]
