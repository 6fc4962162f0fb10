"""Checkpoints: `RUN_DIR/checkpoints/step-00000500/`, each complete, checked and a Hugging Face folder of its own.

    model.safetensors, config.json, tokenizer...   what `from_pretrained` reads
    training.pt    optimizer, data position, generators, counters; loaded with weights_only=True
    manifest.json  size and SHA-256 of every file

Several processes write one file each instead of model.safetensors. Any number of processes resumes from either kind
(`shards.py`).

They are written atomically (see `files.py`) and only then is the oldest beyond `checkpoint.keep` removed, so at every
moment there is one that can be resumed from. saving.py writes them.

Which one a run starts from (`choose_checkpoint`), decided before anything is written:
  * a `train.run_dir` that is new, or holds nothing but tokens, or a run that ended before its first checkpoint
    (whatever its configuration): none, a fresh start;
  * a `train.run_dir` with a run of the same configuration: its newest checkpoint;
  * a run of another configuration, or files that are not ours: an error that names the difference;
  * `train.resume=PATH`: that checkpoint, whatever else differs; the way past a damaged newest one and to fine-tune on.
    Repeating that command goes back to PATH; without train.resume it continues.
A checkpoint that does not match its manifest, or holds weights that are not in it, is never used and never replaced
silently: the error names the one before. What has another name than a checkpoint is left alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from overcoat.train import files, process
from overcoat.train.config import Config, error_context, require
from overcoat.train.configfile import differences, dump_toml, load_config
from overcoat.train.corpus import STREAMED, cache_dir
from overcoat.train.files import DamagedError
from overcoat.train.metrics import METRICS
from overcoat.train.shards import read_model, read_states
from overcoat.train.state import TrainState, check_counts

TRAINING = "training.pt"
ANOTHER = ": choose another checkpoint with train.resume=PATH"
WRITTEN_LAST = ("loss.png", "kept.txt", "results.json")  # files of a finished run
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


def record_config(config: Config) -> None:
    """Write the run's configuration, whole or not at all, unless it says the same already."""
    path, content = _recorded(config), dump_toml(config).encode()
    if path.exists() and path.read_bytes() == content:
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    files.sync(partial)
    partial.replace(path)
    files.sync(path.parent)


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints after `step` to `abandoned-*`: a run told to resume from `step` leaves that line of history.
    They are kept for the user to look at or delete, but are no longer what "newest" means."""
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
    try:
        if metrics.exists() and _changes(config):
            _set_aside(metrics)
    except ValueError:  # a record that cannot be read
        _set_aside(metrics)


# ---- reading --------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Path, state: TrainState) -> int | None:
    """Put the (verified) checkpoint at `path` into `state`, weights in place; returns the checksum of the rows that its
    run held out, None where it is not recorded."""
    with files.loading(path / TRAINING):
        # Mapped where a process takes but its part.
        saved = torch.load(path / TRAINING, map_location="cpu", weights_only=True, mmap=process.count() > 1)
        identity, states = saved["data_identity"], saved["optimizer"]["state"]
    with error_context(f"{path / TRAINING}: ", Exception, ANOTHER):
        check_counts(saved)
    if identity != state.data_identity:
        remedy = "set data.cache_dir to the data/ folder of its run"
        if state.data_identity.startswith(STREAMED):
            remedy = (
                "stream the same files (names and sizes) with the same data.held_out, sequence_length and eval.rows"
            )
        raise ValueError(f"{path} was trained on other tokens than these (or in another order of files); {remedy}")
    read_model(path, state.model)
    if changed := sorted(set(saved.get("trained", state.trained())) ^ set(state.trained())):
        raise ValueError(
            f"{path} trained other parameters: {len(changed)} differ, the first is {changed[0]}; set model.freeze as "
            "its run did, or start anew from its weights with model.name"
        )
    read_states(path, state.optimizer, states)
    with error_context(f"{path / TRAINING}: ", Exception, ANOTHER):
        state.check_states(saved)
    with files.loading(path / TRAINING):
        state.load_training_dict(saved)
    return saved.get("held_out")


def choose_checkpoint(config: Config) -> Path | None:
    """The checkpoint to start from, verified, or None; see the module docstring. Writes nothing."""
    run_dir, folder = Path(config.train.run_dir), checkpoint_dir(config)
    try:
        nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    except OSError as error:
        raise ValueError(f"train.run_dir = {str(run_dir)[:80]!r} ...: {error.strerror}: choose another") from error
    require(nearest.is_dir(), f"train.run_dir = '{run_dir}': '{nearest}' is a file: choose another")
    for name in WRITTEN_LAST:  # found at the end, it would cost the run
        require(not (run_dir / name).is_dir(), f"{run_dir / name} is a folder: move it away, the run writes that file")
    if not _recorded(config).exists() and _holds_other_files(run_dir.resolve(), cache_dir(config).resolve()):
        raise ValueError(f"{run_dir} holds files but no run of overcoat: choose another train.run_dir")
    found = list_checkpoints(folder)
    if config.train.resume != "auto":
        path = Path(config.train.resume)
        others = ", ".join(map(str, found)) or "none"
        require(os.path.isdir(path), f"train.resume = {str(path)!r}: no such checkpoint (in {folder}: {others})")
        if process.is_restarted() and found and _step(found[-1]) > files.verify_directory(path)["step"]:
            return _verify(found[-1], "", "")  # what this run has written since, before torchrun started it again
        return _verify(path, f"train.resume = {str(path)!r}: ", "")
    if found or (run_dir / "export").exists():
        changed = _changes(config)
        on_purpose = ", or continue it on purpose with train.resume=CHECKPOINT" if found else ""
        require(
            not changed,
            f"{run_dir} holds a run with another configuration ({'; '.join(changed[:5])}): choose another "
            f"train.run_dir{on_purpose}",
        )
    if not found:
        return None
    remedy = f"resume from the one before it with train.resume={found[-2]}" if found[1:] else "delete it to start over"
    return _verify(found[-1], "", f"; nothing was overwritten, {remedy}")


def _holds_other_files(run_dir: Path, cache: Path) -> bool:
    """True if `run_dir` holds more than tokens, hidden files, and folders of these alone (left by a refused run)."""
    if not run_dir.is_dir() or run_dir.is_symlink():
        return run_dir.is_symlink() or run_dir.exists()
    tokens = [run_dir / "data", cache / "tokens", cache / "tokenizer"]
    return any(
        _holds_other_files(path, cache)
        for path in run_dir.iterdir()
        if not path.name.startswith(".") and not any(place.is_relative_to(path) for place in tokens)
    )


def _recorded(config: Config) -> Path:
    return Path(config.train.run_dir) / "config.toml"


def _changes(config: Config) -> list[str]:
    """In what the configuration differs from the one that its run directory has recorded."""
    with error_context("", after="; train.resume=CHECKPOINT continues, and records it anew"):
        return differences(load_config(_recorded(config), is_recorded=True), config)


def _verify(path: Path, before: str, after: str) -> Path:
    """`path`, or DamagedError unless it holds what its manifest says, the training state, and no weights beside."""
    try:
        named = files.verify_directory(path, [TRAINING])["files"]
        strays = sorted({file.name for file in path.glob("*.safetensors")} - set(named))
        if strays:
            raise DamagedError(f"{path} holds {strays[0]}, which is not in its manifest: move that file away")
    except DamagedError as error:
        raise DamagedError(f"{before}{error}{after}") from error
    return path
