"""Checkpoints: `RUN_DIR/checkpoints/step-00000500/`, each complete, checked and a Hugging Face folder of its
own.

    model.safetensors, config.json, tokenizer...   what `from_pretrained` reads
    training.pt    optimizer, data position, generators, counters; loaded with weights_only=True
    manifest.json  size and SHA-256 of every file

They are written atomically (see `files.py`) and only then is the oldest beyond `checkpoint.keep` removed, so
at every moment there is one that can be resumed from.

Which one a run starts from (`choose_checkpoint`), decided before anything is written:
  * a `train.run_dir` that is new, or holds nothing but tokens, or a run that ended before its first checkpoint
    (whatever its configuration): none, a fresh start;
  * a `train.run_dir` with a run of the same configuration: its newest checkpoint, so repeating a command
    continues it;
  * a run of another configuration, or files that are not ours: an error that names the difference;
  * `train.resume=PATH`: that checkpoint, whatever else differs; the way past a damaged newest one and to
    fine-tune on. Repeating that command goes back to PATH; without train.resume it continues.
A checkpoint that does not match its manifest, or holds weights that are not in it, is never used and never replaced
silently: the error names the one before. What has another name than a checkpoint is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from overcoat.extras import load_extra
from overcoat.train.config import Config, require
from overcoat.train.configfile import differences, load_config
from overcoat.train.corpus import STREAMED, cache_dir
from overcoat.train.files import DamagedError, remove_directory, verify_directory, write_directory
from overcoat.train.metrics import METRICS
from overcoat.train.state import TrainState
from overcoat.train.tokenizer import save_tokenizer

RECORDED_CONFIG = "config.toml"
TRAINING = "training.pt"
NAME = re.compile(r"step-(\d{8,})")


def checkpoint_dir(config: Config) -> Path:
    return Path(config.train.run_dir) / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete or damaged, oldest first; unfinished ones carry another name, and so does what is not ours."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.exists() else []
    for path in found:
        # A write of the same step would fail on it, hours from now.
        require(path.is_dir() and not path.is_symlink(), f"{path} is a link or a file, not a checkpoint: move it away")
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(state: TrainState, config: Config, tokenizer: Any | None) -> Path:
    """Write the state and remove the oldest checkpoints beyond `checkpoint.keep`."""
    folder = checkpoint_dir(config)
    target = folder / f"step-{state.step:08d}"

    def fill(partial: Path) -> None:
        write_model(state.model, tokenizer, partial)
        with _writing(partial / TRAINING):
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
        if _step(path) > step:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"abandoned-{number}-{path.name}")).exists():
        number += 1
    path.rename(aside)


def set_aside_attempt(config: Config) -> None:
    """Rename the metrics of a run that left no checkpoint, if this one is configured otherwise: they are not its own,
    and would tell it what fits."""
    metrics = Path(config.train.run_dir) / METRICS
    if not metrics.exists():
        return
    try:
        is_another = bool(_changes(config))
    except ValueError:  # a record that cannot be read
        is_another = True
    if is_another:
        _set_aside(metrics)


def write_model(model: Any, tokenizer: Any | None, folder: Path) -> None:
    """The Hugging Face files of a model."""
    with _writing(folder):
        model.save_pretrained(folder)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What libraries raise when they cannot write, as an OSError; PyTorch does not say that the disk is full."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, _safetensors().SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(errno.EIO, f"{_short(error)}, with {free} bytes free on that disk", str(path)) from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What libraries raise on a file that is whole and yet not what it should be."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of pickle, zip, safetensors, or a key that is not there
        raise ValueError(f"{path} cannot be loaded ({_short(error)}): choose another with train.resume=PATH") from error


def _short(error: Exception) -> str:
    """Its kind and first sentence: what follows in PyTorch's is the advice to load with weights_only=False."""
    return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _safetensors() -> Any:
    return load_extra("safetensors", "hf", "checkpoints")


def load_checkpoint(path: Path, state: TrainState) -> None:
    """Put the (verified) checkpoint at `path` into `state`, weights in place."""
    with _reading(path / TRAINING):
        saved = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        identity = saved["data_identity"]
    if identity != state.data_identity:
        remedy = "set data.cache_dir to the data/ folder of its run"
        if state.data_identity.startswith(STREAMED):
            remedy = "stream the same files (names and sizes) with the same data.held_out and eval.rows"
        raise ValueError(f"{path} was trained on other tokens than these (or in another order of files); {remedy}")
    load_weights(path, state.model)
    with _reading(path / TRAINING):
        state.load_training_dict(saved)


def load_weights(folder: Path, model: Any) -> None:
    """Copy the safetensors of `folder` into the model's parameters; tied ones are stored once."""
    safetensors = load_extra("safetensors.torch", "hf", "reading a checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):  # of the manifest: `_verify` lets no others in
        with _reading(file):
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
    run_dir, folder = Path(config.train.run_dir), checkpoint_dir(config)
    require(run_dir.is_dir() or not run_dir.exists(), f"train.run_dir = '{run_dir}' is a file: choose another")
    if not (run_dir / RECORDED_CONFIG).exists() and _holds_other_files(run_dir.resolve(), cache_dir(config).resolve()):
        raise ValueError(f"{run_dir} holds files but no run of overcoat: choose another train.run_dir")
    found = list_checkpoints(folder)
    if config.train.resume != "auto":
        return _explicit_checkpoint(Path(config.train.resume), folder)
    if found or (run_dir / "export").exists():
        changed = _changes(config)
        on_purpose = ", or continue it on purpose with train.resume=CHECKPOINT" if found else ""
        require(
            not changed,
            f"{run_dir} holds a run with another configuration ({'; '.join(changed[:5])}): choose another "
            f"train.run_dir{on_purpose}",
        )
    return newest_checkpoint(folder)


def _holds_other_files(run_dir: Path, cache: Path) -> bool:
    """Whether there is more in `run_dir` than tokens, hidden files, and folders that hold nothing else: those of a run
    inside it that was refused."""
    if not run_dir.is_dir() or run_dir.is_symlink():
        return run_dir.is_symlink() or run_dir.exists()
    tokens = [run_dir / "data", cache / "tokens", cache / "tokenizer"]
    return any(
        _holds_other_files(path, cache)
        for path in run_dir.iterdir()
        if not path.name.startswith(".") and not any(place.is_relative_to(path) for place in tokens)
    )


def _changes(config: Config) -> list[str]:
    """In what the configuration differs from the one that its run directory has recorded."""
    recorded = Path(config.train.run_dir) / RECORDED_CONFIG
    try:
        return differences(load_config(recorded), config)
    except ValueError as error:
        raise ValueError(f"{recorded}: {error}; train.resume=CHECKPOINT continues, and records it anew") from error


def _explicit_checkpoint(path: Path, folder: Path) -> Path:
    if not path.is_dir():
        others = ", ".join(map(str, list_checkpoints(folder))) or "none"
        raise ValueError(f"train.resume = {str(path)!r}: no such checkpoint (in {folder}: {others})")
    try:
        _verify(path)
    except DamagedError as error:
        raise DamagedError(f"train.resume = {str(path)!r}: {error}") from error
    return path


def _verify(path: Path) -> None:
    """DamagedError unless `path` holds what its manifest says, the training state, and no weights beside."""
    named = verify_directory(path, [TRAINING])["files"]
    strays = sorted({file.name for file in path.glob("*.safetensors")} - set(named))
    if strays:
        raise DamagedError(f"{path} holds {strays[0]}, which is not in its manifest: move that file away")


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint in `folder` after verification; DamagedError names a way on."""
    found = list_checkpoints(folder)
    if not found:
        return None
    try:
        _verify(found[-1])
    except DamagedError as error:
        remedy = (
            f"resume from the one before it with train.resume={found[-2]}" if found[1:] else "delete it to start over"
        )
        raise DamagedError(f"{error}; nothing was overwritten, {remedy}") from error
    return found[-1]
