"""Checkpoints: `RUN_DIR/checkpoints/step-00000500/`, atomic and with checksums, independent of the process count.

    shard-*.safetensors        weights and states of the optimizer (`state.py` has their names)
    training.json              counters, position in the data, generators
    config.json, tokenizer...  the model's configuration, for `overcoat eval` and `overcoat report`
    manifest.json              size and SHA-256 of every file

PyTorch's distributed checkpoints (DCP) write and read the tensors with their safetensors storage: each process writes
its shards to its own files, whose headers hold the offset of each shard. Replicated tensors are written once. Any
number of processes can read them. DCP's default storage is not used: its .metadata is a pickle, which can execute code.

If host memory has room, a checkpoint is copied there, and a thread writes it while training continues (`Saver`). It is
written atomically (`files.py`); only then the oldest beyond `checkpoint.keep` is removed, so there is always one to
resume from.

The checkpoint that a run starts from (`choose_checkpoint`) is chosen before anything is written:
  * a `train.run_dir` that is new, or holds nothing but tokens, or a run that ended before its first checkpoint
    (whatever its configuration): none, a fresh start;
  * a `train.run_dir` with a run of the same configuration: its newest checkpoint;
  * a run of another configuration, or files that are not ours: an error that names the difference;
  * `train.resume=PATH`: that checkpoint, whatever else differs; the way past a damaged newest one and to fine-tune on.
    Repeating that command goes back to PATH; without train.resume it continues.
A checkpoint that does not match its manifest is neither used nor replaced: the error names the previous one. Files with
other names are ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from overcoat.extras import load_extra, load_pretrained, reason
from overcoat.optim.sharding import local, rewrap, shard_bytes, state_shape, wrap_state
from overcoat.optim.state import state_fields
from overcoat.train import files, process
from overcoat.train.build import auto_class
from overcoat.train.config import Config, error_context, require
from overcoat.train.configfile import differences, dump_toml, load_config
from overcoat.train.corpus import STREAMED, cache_dir
from overcoat.train.export import write_settings
from overcoat.train.files import RECORD, DamagedError, loading, writing
from overcoat.train.metrics import METRICS
from overcoat.train.state import TrainState, named_tensors

ANOTHER = ": choose another checkpoint with train.resume=PATH"
NAME = re.compile(r"step-(\d{8,})")
WEIGHT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # converted into each other
FILE_BYTES = 2 << 30  # approximate size of a file; without a copy, GPU tensors pass through host memory file by file
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of one process; in a thread no filter is safe


# ---- writing --------------------------------------------------------------------------------------------------------


class Saver:
    """Writes a run's checkpoints while training goes on.

    Use it in `with`: at the end the last checkpoint is complete. An error of the thread is raised by the next `check`,
    `save` or `wait`, or at the end; it is a warning if another error is being raised.
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
        """Return when the pending checkpoint is complete."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise an error of the thread now: a full disk must not cost the steps until the next checkpoint."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def save(self) -> Path:
        """Write the state, in a thread from a copy if the host has memory for one; return the checkpoint's path."""
        self.wait()
        held = CheckpointSnapshot(self.state)
        if self.config.checkpoint.asynchronous and not process.largest(held.bytes > process.host_bytes_free())[0]:
            held.copy()
            self._pending = self._thread.submit(write_checkpoint, held, self.config, self.tokenizer)
        else:
            write_checkpoint(held, self.config, self.tokenizer)
        return checkpoint_dir(self.config) / held.name


class CheckpointSnapshot:
    """This process' part of a checkpoint: the record and the tensors."""

    def __init__(self, state: TrainState) -> None:
        self.model, self.step, self.name = state.model, state.step, f"step-{state.step:08d}"
        self.record, self.tensors = state.snapshot()
        process.writing_group()

    @property
    def bytes(self) -> int:
        """Return the bytes of a copy in host memory."""
        return sum(map(shard_bytes, self.tensors.values()))

    def copy(self) -> None:
        """Replace the tensors by copies in host memory."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = rewrap(tensor, local(tensor).to("cpu", copy=True))


def write_checkpoint(held: CheckpointSnapshot, config: Config, tokenizer: Any | None) -> Path:
    """Write a checkpoint, remove the oldest beyond `checkpoint.keep`, and return its path. All processes write into a
    directory that the first one makes, and renames when all are done."""
    folder = checkpoint_dir(config)
    target = folder / held.name

    def fill(partial: Path) -> None:
        process.wait_for_writers()  # until this folder is there
        write_tensors(partial, held.tensors)
        with writing(partial):
            held.model.config.save_pretrained(partial)
            for adapters in getattr(held.model, "peft_config", {}).values():
                adapters.save_pretrained(partial)
            write_settings(held.model, tokenizer, partial)
            (partial / RECORD).write_text(json.dumps(held.record))

    if process.is_first():
        files.write_directory(target, fill, {"step": held.step, "processes": process.count()})
        for path in list_checkpoints(folder)[: -config.checkpoint.keep]:
            files.remove_directory(path)
        files.sweep(folder)  # what could not be deleted before
    else:
        process.wait_for_writers()
        write_tensors(files.partial_of(target), held.tensors)
    process.wait_for_writers()  # none goes on before it is complete
    return target


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of all processes (a collective call); returns when all have written."""
    load_extra("safetensors", "hf", "writing a checkpoint")
    writer = _Writer(str(folder), save_distributed=True)
    with _collective_errors(OSError, f"{folder} cannot be written"):
        dcp.save(tensors, storage_writer=writer, process_group=process.writing_group(), no_dist=process.count() == 1)


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes files as DCP's own writer does, without its two copies in memory that make other threads wait."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this process' pieces to files of about FILE_BYTES."""
        from safetensors.torch import save_file

        tensors, begins, size, parts = dict[str, Tensor](), dict[str, Any](), 0, itertools.count()
        for item in plan.items:
            data, key, place = planner.resolve_data(item), item.index.fqn, item.tensor_data
            assert isinstance(data, Tensor)
            assert place is not None
            tensor = data.detach().cpu().contiguous()
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            tensors[key] = tensor.clone() if is_view else tensor
            begins[key] = {"saved_offsets": [*place.chunk.offsets]}
            size += tensor.nbytes
            if item is plan.items[-1] or size >= FILE_BYTES:
                path = Path(self.path) / f"shard-{process.rank():05d}-{next(parts):05d}.safetensors"
                save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(begins), "format": "pt"})
                files.sync(path)
                tensors, begins, size = {}, {}, 0
        done = torch.futures.Future[list[WriteResult]]()
        done.set_result([])
        return done


@contextlib.contextmanager
def _collective_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """Re-raise an error of any process in all processes, as one line that names the process."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        is_own = isinstance(cause, Exception) and not isinstance(cause, torch.OutOfMemoryError)
        if not is_own or process.follows_from_another(cause):
            raise cause from error
        who = f"rank {rank}: " if process.count() > 1 else ""
        raise kind(f"{who}{what}: {reason(cause)}") from error


# ---- reading --------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Path, state: TrainState) -> int:
    """Load the (verified) checkpoint at `path` into `state`, weights in place; return the checksum of its run's
    held-out rows. ValueError: it is of another model, optimizer or data."""
    record = read_record(path)
    if record["data_identity"] != state.data_identity:
        same = "stream the same files (names and sizes) with the same data.held_out, sequence_length and eval.rows"
        cached = "set data.cache_dir to the data/ folder of its run"
        remedy = same if state.data_identity.startswith(STREAMED) else cached
        raise ValueError(f"{path} was trained on other tokens than these (or in another order of files); {remedy}")
    stored = _stored(path)
    weights = _weights(path, stored, state.model)
    if changed := sorted(set(record["trained"]) ^ set(state.trained())):
        raise ValueError(
            f"{path} trained other parameters: {len(changed)} differ, the first is {changed[0]}; set model.freeze as "
            "its run did, or start anew from its run's export/ with model.name"
        )
    states = _states(path, stored, state, record["with_state"])
    rest = _empty(stored, "rows/") | _empty(stored, "drawn")
    _read(path, weights | states | rest)
    if (release := state.optimizer.release) is not None and release.keeps_on_host:
        release.weights_changed()
    with loading(path):
        state.load(record, states | rest)
    return int(record["held_out"])


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of training.json."""
    with loading(checkpoint / RECORD):
        record: dict[str, Any] = json.loads((checkpoint / RECORD).read_text())
        if missing := {"data_identity", "held_out", "trained", "with_state"} - record.keys():
            raise KeyError(*missing)
    return record


def read_model(checkpoint: Path, model: Any) -> None:
    """Copy a checkpoint's weights into a model, each process its own shard. ValueError: the checkpoint is of another
    model."""
    _read(checkpoint, _weights(checkpoint, _stored(checkpoint), model))


def load_model(checkpoint: Path | str, device: torch.device | str = "cpu", trust_remote_code: bool = False) -> Any:
    """Return the model of a checkpoint, in the dtype it was saved in, with the tokens at which it stops."""
    config = load_pretrained("AutoConfig", "the model", str(checkpoint), trust_remote_code)
    with torch.device(device):
        model = auto_class(type(config)).from_config(config, dtype=config.dtype)
    read_model(Path(checkpoint), model)
    if (Path(checkpoint) / "generation_config.json").exists():
        model.generation_config = type(model.generation_config).from_pretrained(checkpoint)
    return model


def read_states(checkpoint: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the optimizer state of one parameter after the other, unsharded."""
    stored = _stored(checkpoint)
    for number in sorted({int(key.split("/")[1]) for key in stored if key.startswith("optimizer/")}):
        found = _empty(stored, f"optimizer/{number}/")
        _read(checkpoint, found)
        yield {key.split("/")[2]: value for key, value in found.items()}


def num_processes(folder: Path) -> int:
    """Return how many processes wrote a checkpoint; 0 for any other folder."""
    return len({file.name.split("-")[1] for file in folder.glob("shard-*.safetensors")})


Stored = dict[str, TensorStorageMetadata]


def _stored(folder: Path) -> Stored:
    """Return the tensors' metadata from the headers of a checkpoint's files. ValueError: pieces of a tensor are
    missing."""
    load_extra("safetensors", "hf", "reading a checkpoint")
    with loading(folder):
        stored: dict[str, Any] = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, of in stored.items():
        missing = of.size.numel() - sum(chunk.sizes.numel() for chunk in of.chunks)
        require(not missing, f"{folder}: {missing} elements of {name} are in none of its files")
    return stored


def _weights(folder: Path, stored: Stored, model: Any) -> dict[str, Tensor]:
    """Return a model's tensors by their names in a checkpoint. ValueError: the checkpoint is of another model."""
    own = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(model).items()}
    return _match(folder, stored, own, "model/", "another model")


def _states(folder: Path, stored: Stored, state: TrainState, numbers: list[int]) -> dict[str, Tensor]:
    """Allocate the optimizer's states of the parameters `numbers`, sharded as in this process. ValueError: the
    checkpoint holds other states."""
    params, found = state.params(), dict[str, Tensor]()
    for number in numbers:
        with loading(folder / RECORD):
            _, param, group = params[number]
        for field, (shape, dtype, _) in state_fields(param, group).items():
            part = torch.empty(state_shape(param, shape), dtype=dtype)
            found[f"optimizer/{number}/{field}"] = wrap_state(param, part, shape)
    moments, master = (params[0][2][option] for option in ("moments", "master"))
    what = f"other states than an optimizer with moments={moments} and master={master}"
    return _match(folder, stored, found, "optimizer/", what)


def _match(folder: Path, stored: Stored, own: dict[str, Tensor], prefix: str, what: str) -> dict[str, Tensor]:
    """Return `own` if the checkpoint's tensors below `prefix` have the same names, shapes and dtypes. ValueError: they
    differ."""
    found = {key: _layout(of.properties.dtype, of.size) for key, of in stored.items() if key.startswith(prefix)}
    wanted = {key: _layout(tensor.dtype, tensor.shape) for key, tensor in own.items()}
    if wrong := sorted(key for key in found | wanted if found.get(key) != wanted.get(key)):
        first = f"{wrong[0].removeprefix('model/')} ({found.get(wrong[0])} instead of {wanted.get(wrong[0])})"
        raise ValueError(f"{folder} holds {what}: {len(wrong)} tensors differ, the first is {first}{ANOTHER}")
    return own


def _layout(dtype: torch.dtype, shape: torch.Size) -> str:
    """Return a description that is equal for two tensors if one can be copied into the other."""
    return f"{'16- or 32-bit float' if dtype in WEIGHT_DTYPES else dtype} {list(shape)}"


def _empty(stored: Stored, prefix: str) -> dict[str, Tensor]:
    """Return memory for the tensors whose names begin so."""
    return {
        key: torch.empty(of.size, dtype=of.properties.dtype) for key, of in stored.items() if key.startswith(prefix)
    }


def _read(folder: Path, into: dict[str, Tensor]) -> None:
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _collective_errors(ValueError, f"{folder} cannot be loaded"), loading(folder), torch.no_grad():
        dcp.load(into, storage_reader=reader, process_group=process.writing_group(), no_dist=process.count() == 1)


# ---- names ----------------------------------------------------------------------------------------------------------


def checkpoint_dir(config: Config) -> Path:
    return Path(config.train.run_dir) / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or damaged, oldest first. Unfinished ones have other names."""
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
    """Rename checkpoints after `step` to `abandoned-*`, for the user to keep or delete: a run that resumes from `step`
    starts another line of history."""
    for path in list_checkpoints(folder):
        if _step(path) > step:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"abandoned-{number}-{path.name}")).exists():
        number += 1
    path.rename(aside)


def set_aside_attempt(config: Config) -> None:
    """Rename the metrics of a run that left no checkpoint if its configuration differs: they are not this run's, and
    their batch plans would be followed."""
    metrics = Path(config.train.run_dir) / METRICS
    try:
        if metrics.exists() and _changes(config):
            _set_aside(metrics)
    except ValueError:  # a record that cannot be read
        _set_aside(metrics)


# ---- choosing -------------------------------------------------------------------------------------------------------


def choose_checkpoint(config: Config) -> Path | None:
    """Return the verified checkpoint to start from, or None (see the module docstring). Writes nothing."""
    run_dir, folder = Path(config.train.run_dir), checkpoint_dir(config)
    with error_context(f"train.run_dir = {str(run_dir)[:80]!r} ...: ", OSError, ": choose another"):
        nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    require(nearest.is_dir(), f"train.run_dir = '{run_dir}': '{nearest}' is a file: choose another")
    if not _recorded(config).exists() and _holds_other_files(run_dir.resolve(), cache_dir(config).resolve()):
        raise ValueError(f"{run_dir} holds files but no run of overcoat: choose another train.run_dir")
    found = list_checkpoints(folder)
    if config.train.resume != "auto":
        path = Path(config.train.resume)
        others = ", ".join(map(str, found)) or "none"
        require(os.path.isdir(path), f"train.resume = {str(path)!r}: no such checkpoint (in {folder}: {others})")
        if process.is_restarted() and found and _step(found[-1]) > files.verify_directory(path)["step"]:
            return _verify(found[-1], "", "")  # written by this run before torchrun restarted it
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
    """True if `run_dir` holds anything but tokens, hidden files, and folders of nothing else (which a refused run
    leaves)."""
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
    """Return the differences between this configuration and the one recorded in the run directory."""
    with error_context("", after="; train.resume=CHECKPOINT continues, and records it anew"):
        return differences(load_config(_recorded(config), is_recorded=True), config)


def _verify(path: Path, before: str, after: str) -> Path:
    """Return `path`. DamagedError: files differ from its manifest, or hold tensors that are not in it."""
    try:
        named = files.verify_directory(path)["files"]
        strays = sorted({file.name for file in path.glob("*.safetensors")} - set(named))
        if strays:
            raise DamagedError(f"{path} holds {strays[0]}, which is not in its manifest: move that file away")
    except DamagedError as error:
        raise DamagedError(f"{before}{error}{after}") from error
    what = f"{before}{path} is no checkpoint of this version: its manifest does not list {RECORD}{after}"
    require(RECORD in named, what)
    return path
