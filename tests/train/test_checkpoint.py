"""Checkpoints one by one: written whole or not at all, what is loaded from them, and which one is chosen.

Whole runs that are killed and continued are in `test_resume.py`.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from overcoat.train import checkpoint, files
from overcoat.train.build import build_model
from overcoat.train.checkpoint import (
    CheckpointSnapshot,
    Saver,
    checkpoint_dir,
    choose_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_model,
    read_record,
    set_aside_attempt,
    set_aside_newer,
    write_checkpoint,
    write_tensors,
)
from overcoat.train.config import CheckpointConfig, Config
from overcoat.train.configfile import dump_toml
from overcoat.train.corpus import STREAMED
from overcoat.train.export import write_model
from overcoat.train.files import RECORD, DamagedError, verify_directory, write_directory
from overcoat.train.loop import train_step
from overcoat.train.run import run_once
from overcoat.train.state import TrainState
from tests.train import runs
from tests.train.runs import EXACT, MakeConfig, assert_same_tensors, make_state, names, tensors_in


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(*EXACT, "checkpoint.keep=2")


@pytest.fixture
def state(config: Config) -> TrainState:
    return make_state(config)


def save_at(state: TrainState, config: Config, *steps: int) -> Path:
    for state.step in steps:
        path = write_checkpoint(CheckpointSnapshot(state), config, None)
    return path


def fake_run(config: Config, *steps: int) -> Path:
    """The run directory of `config` with checkpoints that are valid and hold next to nothing."""
    for step in steps:
        target = checkpoint_dir(config) / f"step-{step:08d}"
        write_directory(target, lambda folder: (folder / RECORD).write_text("state") and None, {"step": step})
    run_dir = Path(config.train.run_dir)
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.toml").write_text(dump_toml(config))
    return run_dir


def damage(path: Path) -> None:
    (path / RECORD).write_text("stat")


def full(*_: object) -> None:
    raise OSError("no space left")


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_complete_and_the_oldest_go(config: Config, state: TrainState) -> None:
    newest = save_at(state, config, 3, 20, 100)
    assert names(newest.parent) == ["step-00000020", "step-00000100"]  # the order is that of steps
    manifest = verify_directory(newest)
    assert manifest["step"] == 100
    shard = "shard-00000-00000.safetensors"
    assert set(manifest["files"]) == {shard, "config.json", "generation_config.json", RECORD}


def test_training_goes_on_while_a_copy_is_written(
    config: Config, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step(state, config)
    waiting = dataclasses.replace(config, checkpoint=CheckpointConfig(asynchronous=False))
    with Saver(state, waiting, None) as saver:
        expected = saver.save()
        wait, gate, real = threading.Event(), threading.Event(), checkpoint.write_tensors

        def write_tensors(*arguments: Any) -> None:
            wait.set()
            gate.wait(60)
            real(*arguments)

        monkeypatch.setattr(checkpoint, "write_tensors", write_tensors)
        saver.config = config
        state.step += 1  # another name
        path = saver.save()
        wait.wait(60)
        state.step -= 1
        for _ in range(2):
            train_step(state, config)
        assert list_checkpoints(path.parent) == [expected]
        gate.set()
    written, same = (read_record(folder) for folder in (path, expected))
    assert written.pop("step") == same.pop("step") + 1
    assert written == same
    assert_same_tensors(tensors_in(path), tensors_in(expected))


def test_what_a_thread_could_not_write_is_raised(
    config: Config, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next check or checkpoint, or at the end; the one before is there."""
    saver = Saver(state, config, None)
    first = saver.save()
    saver.wait()
    state.step = 1
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    saver.check()
    saver.save()
    with pytest.raises(OSError, match="no space left"):
        saver.save()
    saver.save()
    assert saver._pending is not None
    wait([saver._pending])
    with pytest.raises(OSError, match="no space left"):
        saver.check()
    saver.save()
    with pytest.raises(OSError, match="no space left"):
        saver.__exit__(None)

    def lose() -> None:
        with Saver(state, config, None) as saver:
            saver.save()
            raise FloatingPointError

    with pytest.warns(UserWarning, match="could not be written: no space left"), pytest.raises(FloatingPointError):
        lose()
    assert list_checkpoints(first.parent) == [first]


@pytest.mark.parametrize(
    ("owner", "name"), [(checkpoint, "write_tensors"), (json, "dumps"), (files, "sync"), (Path, "rename")]
)
def test_a_failed_write_leaves_the_checkpoints_there_were(
    config: Config, state: TrainState, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    folder = save_at(state, config, 3).parent
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match="no space left"):
            save_at(state, config, 6)
    assert list_checkpoints(folder) == [folder / "step-00000003"]
    save_at(state, config, 6)  # and nothing of it is in the way of the next
    assert names(folder) == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize(("tensors", "limit"), [(True, 100_000), (False, 2_000)])
def test_a_full_disk_is_an_error_of_the_system(
    config: Config, state: TrainState, monkeypatch: pytest.MonkeyPatch, tensors: bool, limit: int
) -> None:
    if not tensors:
        monkeypatch.setattr(checkpoint, "write_tensors", lambda *_: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_at(state, config, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list_checkpoints(checkpoint_dir(config)) == []


@pytest.mark.parametrize(
    ("error", "number"), [(Exception("No space left on device (os error 28)"), 5), (PermissionError(13, "no"), 13)]
)
def test_so_is_a_tokenizer_that_cannot_be_written(
    state: TrainState, tmp_path: Path, error: Exception, number: int
) -> None:
    """tokenizers raises a bare Exception."""

    class Unwritable:
        def save_pretrained(self, _: Path) -> None:
            raise error

    with pytest.raises(OSError, match=r"No space left|no") as raised:
        write_model(state.model, Unwritable(), tmp_path)
    assert raised.value.errno == number


# ---- loading --------------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved_in_place(config: Config, state: TrainState) -> None:
    state.rows.next_rows(5)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    path, other = save_at(state, config, 4), make_state(config)
    before = [parameter.data_ptr() for parameter in other.model.parameters()]
    load_checkpoint(path, other)
    assert other.step == 4
    assert other.rows.state_dict() == state.rows.state_dict()
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == before  # the optimizer holds them
    for mine, theirs in zip(other.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("identity", "remedy"),
    [("other", r"set data\.cache_dir to the data/ folder"), (f"{STREAMED} x", "stream the same files")],
)
def test_other_tokens_are_refused_before_anything_is_loaded(
    config: Config, state: TrainState, identity: str, remedy: str
) -> None:
    path = save_at(state, config, 4)
    state.data_identity, state.step = identity, 0
    weight = next(state.model.parameters())
    weight.data.zero_()
    with pytest.raises(ValueError, match=rf"step-00000004 was trained on other tokens than these .*{remedy}"):
        load_checkpoint(path, state)
    assert state.step == 0
    assert not weight.any()


@pytest.mark.parametrize(
    ("stored", "count", "first"),
    [
        ({"weight": (3, 2)}, 1, "bias"),  # missing
        ({"weight": (3, 2), "bias": (3,), "more": (1,)}, 1, "more"),
        ({"weight": (2, 3), "bias": (3,)}, 1, "weight"),  # of another shape
        ({"weight": (1, 2), "bias": (1,)}, 2, "bias"),  # would broadcast
        ({}, 2, "bias"),
    ],
)
def test_weights_of_another_model_are_refused_and_none_copied(
    tmp_path: Path, stored: dict[str, tuple[int, ...]], count: int, first: str
) -> None:
    model = torch.nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, shape in stored.items():  # in as many files: all are read
        save_file({f"model/{name}": torch.full(shape, 9.0)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=rf"another model: {count} tensors differ, the first is {first}"):
        read_model(tmp_path, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_states_of_other_parameters_of_the_same_shapes_are_refused(config: Config, monkeypatch: Any) -> None:
    """An optimizer's state names none: frozen otherwise, parameters would go on with each other's moments."""

    def frozen(layer: int) -> TrainState:
        def build(config: Config, tokenizer: Any) -> torch.nn.Module:
            model = build_model(config, tokenizer)
            model.model.layers[layer].requires_grad_(False)
            return model

        monkeypatch.setattr(runs, "build_model", build)
        return make_state(config)

    path = save_at(frozen(0), config, 4)
    load_checkpoint(path, frozen(0))
    with pytest.raises(
        ValueError, match=r"step-00000004 trained other parameters: 18 differ, .*layers\.0\..*model\.freeze as"
    ):
        load_checkpoint(path, frozen(1))


@pytest.mark.parametrize("content", [b"no JSON", b"[]", b"{}", None])
@pytest.mark.parametrize("name", [RECORD, "shard-00000-00000.safetensors"])
def test_files_that_are_whole_and_of_no_use_are_one_line(
    config: Config, state: TrainState, name: str, content: bytes | None
) -> None:
    """Their manifest agrees with them. None: a record without a key."""
    path = save_at(state, config, 4)
    if content is None:
        name, record = RECORD, read_record(path)
        del record["param_groups"]
        content = json.dumps(record).encode()
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}\S* cannot be loaded \(\w+: .*\): choose another"):
        load_checkpoint(path, state)


def test_no_pickle_is_read(config: Config, state: TrainState) -> None:
    """A stranger's checkpoint runs no code: of pickles as PyTorch writes them, in whichever file."""
    path = save_at(state, config, 4)
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"PK", b"\x80")), file.name


def saved_and_harmed(state: TrainState, config: Config, harm: Callable[[dict[str, Any], Any], object]) -> Path:
    """A checkpoint of a step, after `harm(record, tensors)`."""
    train_step(state, config)
    path = save_at(state, config, 1)
    record, tensors = read_record(path), {key: of.clone() for key, of in tensors_in(path).items()}  # not mapped
    harm(record, tensors)
    write_tensors(path, tensors)
    (path / RECORD).write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda record, _: record["with_state"].remove(1),
            r"holds other states .*: 3 tensors differ, .* optimizer/1/exp_avg",
        ),
        (lambda record, _: record["with_state"].append(99), r"cannot be loaded \(IndexError"),
        (lambda _, tensors: tensors.pop("optimizer/0/exp_avg"), "1 tensors differ, the first is optimizer/0/exp_avg"),
        (
            lambda _, tensors: tensors.update({"optimizer/0/more": torch.ones(1)}),
            "1 tensors differ, .*optimizer/0/more",
        ),
        (
            lambda _, tensors: tensors.update({"optimizer/0/exp_avg": torch.ones(3)}),
            "1 tensors differ, .*optimizer/0/exp_avg",
        ),
        (lambda record, _: record.pop("kept_bytes"), "KeyError: 'kept_bytes'"),
    ],
)
def test_a_training_state_that_no_run_leaves_is_refused(
    config: Config, state: TrainState, harm: Any, said: str
) -> None:
    path = saved_and_harmed(state, config, harm)
    with pytest.raises(ValueError, match=rf"{path}.*{said}.*: choose another"):
        load_checkpoint(path, make_state(config))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_type_that_is_none_are_refused(config: Config, state: TrainState, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    path = saved_and_harmed(
        state, config, lambda _, tensors: tensors.update({f"model/{name}": tensors[f"model/{name}"].to(dtype)})
    )
    with pytest.raises(ValueError, match=rf"{path.name} holds another model: 1 tensors differ, .* {name} \({dtype} "):
        load_checkpoint(path, state)


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_newer_checkpoints_are_renamed_not_lost(config: Config) -> None:
    folder = checkpoint_dir(config)
    for _ in range(2):  # the same history abandoned twice
        fake_run(config, 3, 6, 9)
        set_aside_newer(folder, 3)
    aside = [f"abandoned-{number}-step-{step:08d}" for number in (1, 2) for step in (6, 9)]
    assert names(folder) == [*aside, "step-00000003"]
    assert verify_directory(folder / aside[0])["step"] == 6


def test_a_new_directory_and_one_with_tokens_alone_are_fresh_starts(make_config: MakeConfig) -> None:
    """Also with what a run inside it left that was refused, tokens and a lock."""
    config = make_config()
    run_dir = Path(config.train.run_dir)
    assert choose_checkpoint(config) is None
    for folder in (run_dir, run_dir / "inside"):
        (folder / "data/tokens").mkdir(parents=True)
        (folder / "data/tokens/0.bin").write_bytes(b"1")
        (folder / ".lock").touch()
        assert choose_checkpoint(config) is None
        (folder / "thesis.txt").touch()
        with pytest.raises(ValueError, match=r"holds files but no run of overcoat: choose another train\.run_dir"):
            choose_checkpoint(config)
        (folder / "thesis.txt").unlink()
    fake_run(config)
    assert choose_checkpoint(config) is None  # a run that died before its first checkpoint


def test_the_same_configuration_continues_from_the_newest(make_config: MakeConfig) -> None:
    run_dir = fake_run(make_config(), 3, 12, 6)
    assert choose_checkpoint(make_config("eval.every=1")) == run_dir / "checkpoints/step-00000012"
    with pytest.raises(ValueError, match=r"\(train\.seed: 0 -> 1\): choose another train\.run_dir, or .*train\.resume"):
        choose_checkpoint(make_config("train.seed=1"))


def test_an_explicit_checkpoint_is_taken_whatever_else_differs(make_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = fake_run(make_config(), 3, 6)
    older = run_dir / "checkpoints/step-00000003"
    damage(run_dir / "checkpoints/step-00000006")
    for word in ("train.seed=1", f"train.run_dir={tmp_path / 'new'}"):
        assert choose_checkpoint(make_config(word, f"train.resume={older}")) == older


def test_a_run_that_torchrun_starts_again_keeps_what_it_has_done_since(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From train.resume=PATH: as by `--max-restarts`, where the command is repeated without anybody's wish."""
    older = fake_run(make_config(), 3, 6) / "checkpoints/step-00000003"
    new = tmp_path / "new"
    config = make_config(f"train.run_dir={new}", f"train.resume={older}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose_checkpoint(config) == older
    fake_run(config, 5)
    assert choose_checkpoint(config) == new / "checkpoints/step-00000005"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert choose_checkpoint(config) == older


def test_an_explicit_checkpoint_that_is_none_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    older = fake_run(make_config(), 3) / "checkpoints/step-00000003"

    def refused(path: Path, message: str, *words: str) -> None:
        with pytest.raises(ValueError, match=rf"train\.resume = '{path}': {message}"):
            choose_checkpoint(make_config(f"train.resume={path}", *words))

    refused(tmp_path / "gone", r"no such checkpoint \(in .*: .*step-00000003\)")
    refused(Path("x" * 5000), "no such checkpoint")  # longer than any file's name
    refused(
        tmp_path / "gone", r"no such checkpoint \(in .*new/checkpoints: none\)", f"train.run_dir={tmp_path / 'new'}"
    )
    write_directory(tmp_path / "export", lambda folder: (folder / "config.json").write_text("{}") and None, {})
    refused(
        tmp_path / "export", r".*export is no checkpoint of this version: its manifest does not list training\.json"
    )
    damage(older)
    refused(older, r".*training\.json has 4 bytes instead of 5")


def test_a_damaged_newest_names_the_way_on_and_is_never_skipped(make_config: MakeConfig) -> None:
    config = make_config()
    folder = fake_run(config, 3) / "checkpoints"
    damage(folder / "step-00000003")
    with pytest.raises(DamagedError, match="bytes instead of 5; nothing was overwritten, delete it to start over"):
        choose_checkpoint(config)
    fake_run(config, 3, 6)
    damage(folder / "step-00000006")
    with pytest.raises(DamagedError, match=r"resume from the one before it with train\.resume=.*step-00000003$"):
        choose_checkpoint(config)


def test_a_run_that_left_no_checkpoint_may_be_corrected(make_config: MakeConfig) -> None:
    """Its metrics are set aside: what fitted that run says nothing of this one."""
    run_dir, corrected = fake_run(make_config()), make_config("train.seed=1")
    (run_dir / "metrics.jsonl").write_text("rows")
    for config in (make_config(), corrected):
        assert choose_checkpoint(config) is None
        assert (run_dir / "metrics.jsonl").exists()
        set_aside_attempt(config)
    assert names(run_dir) == ["abandoned-1-metrics.jsonl", "config.toml"]
    (run_dir / "metrics.jsonl").write_text("rows")
    (run_dir / "config.toml").write_text("")  # as a version before this one left it when the disk was full
    assert choose_checkpoint(corrected) is None
    set_aside_attempt(corrected)
    assert names(run_dir) == ["abandoned-1-metrics.jsonl", "abandoned-2-metrics.jsonl", "config.toml"]
    (run_dir / "export").mkdir()  # but a finished run is kept, whatever became of its checkpoints
    (run_dir / "config.toml").write_text(dump_toml(make_config()))
    with pytest.raises(ValueError, match=r"\(train\.seed: 0 -> 1\): choose another train\.run_dir$"):
        choose_checkpoint(corrected)


@pytest.mark.parametrize(
    ("content", "message"), [("", "no data: set data.files"), ("[", "not valid TOML"), ("[odd]", "unknown key odd")]
)
def test_a_recorded_configuration_that_cannot_be_read_is_named(
    make_config: MakeConfig, content: str, message: str
) -> None:
    (fake_run(make_config(), 3) / "config.toml").write_text(content)
    with pytest.raises(ValueError, match=rf"run/config\.toml.*{message}.*; train\.resume=CHECKPOINT continues"):
        choose_checkpoint(make_config())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"train\.run_dir = '.*run' is a file: choose another"),
        # What the write of step 9 would fail on; weights that would be loaded instead of its own.
        ("checkpoints/step-00000009", "step-00000009 is a link or a file, not a checkpoint: move it away"),
        ("checkpoints/step-00000003/zz.safetensors", r"holds zz\.safetensors, which is not in its manifest: move that"),
    ],
)
@pytest.mark.parametrize("is_explicit", [False, True])
def test_files_in_the_wrong_place_are_refused(
    make_config: MakeConfig, tmp_path: Path, name: str, message: str, is_explicit: bool
) -> None:
    if name:
        newest = fake_run(make_config(), 3) / "checkpoints/step-00000003"
    path = tmp_path / "run" / name
    path.touch()
    with pytest.raises(ValueError, match=message):
        choose_checkpoint(make_config(*([f"train.resume={newest}"] if is_explicit and name else [])))


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("TMP/notes.txt/x", r"train\.run_dir = '.*notes\.txt/x': '.*notes\.txt' is a file: choose another"),
        ("long" * 100, r"train\.run_dir = 'long.* \.\.\.: File name too long: choose another"),
        ("/proc/x/y", r"\(train\.run_dir\): '/proc/x'"),
    ],
)
def test_a_run_directory_that_cannot_be_made_is_refused(
    make_config: MakeConfig, tmp_path: Path, run_dir: str, message: str
) -> None:
    (tmp_path / "notes.txt").touch()
    config = make_config(f"train.run_dir={run_dir.replace('TMP', str(tmp_path))}")
    with pytest.raises((ValueError, OSError), match=message):
        run_once(config, Console(quiet=True), "nowhere")
