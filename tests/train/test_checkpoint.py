"""Checkpoints one by one: written whole or not at all, what is loaded from them, and which one is chosen.

Whole runs that are killed and continued are in `test_resume.py`.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overcoat.train import checkpoint, files
from overcoat.train.checkpoint import (
    checkpoint_dir,
    choose_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    save_checkpoint,
    set_aside_attempt,
    set_aside_newer,
    write_model,
)
from overcoat.train.config import Config
from overcoat.train.configfile import dump_toml
from overcoat.train.files import DamagedError, verify_directory, write_directory
from overcoat.train.state import TrainState
from tests.train.test_loop import EXACT, make_state

MakeConfig = Callable[..., Config]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_at(state: TrainState, config: Config, *steps: int) -> None:
    for step in steps:
        state.step = step
        save_checkpoint(state, config, None)


def fake_run(config: Config, *steps: int) -> Path:
    """The run directory of `config` with checkpoints that are valid and hold next to nothing."""
    run_dir = Path(config.train.run_dir)
    for step in steps:
        target = checkpoint_dir(config) / f"step-{step:08d}"
        write_directory(target, lambda folder: (folder / "training.pt").write_text("state") and None, {"step": step})
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.toml").write_text(dump_toml(config))
    return run_dir


def damage(path: Path) -> None:
    (path / "training.pt").write_text("stat")


def test_a_checkpoint_is_complete_and_the_oldest_go(make_config: MakeConfig) -> None:
    config = make_config(*EXACT, "checkpoint.keep=2")
    folder = checkpoint_dir(config)
    state = make_state(config)
    save_at(state, config, 3, 20, 100)
    assert names(folder) == ["step-00000020", "step-00000100"]  # the order is that of steps
    manifest = verify_directory(folder / "step-00000100")
    assert manifest["step"] == 100
    assert {"model.safetensors", "config.json", "training.pt"} <= set(manifest["files"])
    assert newest_checkpoint(folder) == folder / "step-00000100"


@pytest.mark.parametrize("where", ["model", "training", "sync", "rename"])
def test_a_failed_write_leaves_the_checkpoints_there_were(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    config = make_config(*EXACT, "checkpoint.keep=1")
    folder = checkpoint_dir(config)
    state = make_state(config)
    save_at(state, config, 3)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        owner, name = {
            "model": (checkpoint, "write_model"),
            "training": (torch, "save"),
            "sync": (files, "sync"),
            "rename": (Path, "rename"),
        }[where]
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match="no space left"):
            save_at(state, config, 6)
    assert list_checkpoints(folder) == [folder / "step-00000003"]
    assert newest_checkpoint(folder) == folder / "step-00000003"
    save_at(state, config, 6)  # and nothing of it is in the way of the next
    assert names(folder) == ["step-00000006"]


def test_what_is_loaded_is_what_was_saved_in_place(make_config: MakeConfig) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    state.rows.next_rows(5)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    save_at(state, config, 4)
    other = make_state(config)
    before = [parameter.data_ptr() for parameter in other.model.parameters()]
    load_checkpoint(checkpoint_dir(config) / "step-00000004", other)
    assert other.step == 4
    assert other.rows.state_dict() == state.rows.state_dict()
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == before  # the optimizer holds them
    for mine, theirs in zip(other.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("identity", "remedy"),
    [("other", r"set data\.cache_dir to the data/ folder"), (f"{checkpoint.STREAMED} x", "stream the same files")],
)
def test_other_tokens_are_refused_before_anything_is_loaded(
    make_config: MakeConfig, identity: str, remedy: str
) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    save_at(state, config, 4)
    other = make_state(config)
    other.data_identity = identity
    with torch.no_grad():
        next(other.model.parameters()).zero_()
    with pytest.raises(ValueError, match=rf"step-00000004 was trained on other tokens than these .*{remedy}"):
        load_checkpoint(checkpoint_dir(config) / "step-00000004", other)
    assert other.step == 0
    assert not next(other.model.parameters()).any()


def test_tied_weights_are_stored_once_and_loaded_as_one(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    load_weights(tmp_path, model)
    assert model[1].weight is model[0].weight
    assert model[1].weight.eq(1).all()


@pytest.mark.parametrize(
    ("stored", "count", "first"),
    [
        ({"weight": (3, 2)}, 1, "bias"),  # missing
        ({"weight": (3, 2), "bias": (3,), "more": (1,)}, 1, "more"),
        ({"weight": (2, 3), "bias": (3,)}, 1, "weight"),  # of another shape
        ({"weight": (1, 2), "bias": (1,)}, 2, "bias"),  # would broadcast
        ({}, 2, "weight"),
    ],
)
def test_weights_of_another_model_are_refused_and_none_copied(
    tmp_path: Path, stored: dict[str, tuple[int, ...]], count: int, first: str
) -> None:
    from safetensors.torch import save_file

    model = torch.nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, shape in stored.items():  # in as many files: all are read
        save_file({name: torch.full(shape, 9.0)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=rf"another model: {count} parameters differ, the first is {first}"):
        load_weights(tmp_path, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_newer_checkpoints_are_renamed_not_lost(make_config: MakeConfig) -> None:
    config = make_config()
    folder = checkpoint_dir(config)
    for _ in range(2):  # the same history abandoned twice
        fake_run(config, 3, 6, 9)
        set_aside_newer(folder, 3)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000003"]
    aside = [f"abandoned-{number}-step-{step:08d}" for number in (1, 2) for step in (6, 9)]
    assert names(folder) == [*aside, "step-00000003"]
    assert verify_directory(folder / aside[0])["step"] == 6


def test_a_new_directory_and_one_with_tokens_alone_are_fresh_starts(make_config: MakeConfig) -> None:
    config = make_config()
    run_dir = Path(config.train.run_dir)
    assert choose_checkpoint(config) is None
    (run_dir / "data").mkdir(parents=True)
    (run_dir / ".lock").touch()
    assert choose_checkpoint(config) is None
    (run_dir / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"holds files but no run of overcoat: choose another train\.run_dir"):
        choose_checkpoint(config)
    fake_run(config)
    assert choose_checkpoint(config) is None  # a run that died before its first checkpoint


def test_what_a_refused_run_inside_left_is_in_nobodys_way(make_config: MakeConfig) -> None:
    config = make_config()
    inside = Path(config.train.run_dir) / "inside"
    (inside / "data/tokens").mkdir(parents=True)
    (inside / "data/tokens/0.bin").write_bytes(b"1")
    (inside / ".lock").touch()
    assert choose_checkpoint(config) is None
    (inside / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds files but no run of overcoat"):
        choose_checkpoint(config)


def test_the_same_configuration_continues_from_the_newest(make_config: MakeConfig) -> None:
    run_dir = fake_run(make_config(), 3, 12, 6)
    assert choose_checkpoint(make_config("eval.every=1")) == run_dir / "checkpoints/step-00000012"
    with pytest.raises(ValueError, match=r"\(train\.seed: 0 -> 1\): choose another train\.run_dir, or .*train\.resume"):
        choose_checkpoint(make_config("train.seed=1"))


def test_an_explicit_checkpoint_is_taken_whatever_else_differs(make_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = fake_run(make_config(), 3, 6)
    older = run_dir / "checkpoints/step-00000003"
    damage(run_dir / "checkpoints/step-00000006")
    assert choose_checkpoint(make_config("train.seed=1", f"train.resume={older}")) == older
    elsewhere = make_config(f"train.resume={older}", f"train.run_dir={tmp_path / 'new'}")
    assert choose_checkpoint(elsewhere) == older


def test_an_explicit_checkpoint_that_is_none_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = fake_run(make_config(), 3)
    with pytest.raises(ValueError, match=r"train\.resume = '.*/gone': no such checkpoint \(in .*: .*step-00000003\)"):
        choose_checkpoint(make_config(f"train.resume={tmp_path}/gone"))
    fresh = make_config(f"train.resume={tmp_path}/gone", f"train.run_dir={tmp_path / 'new'}")
    with pytest.raises(ValueError, match=r"no such checkpoint \(in .*new/checkpoints: none\)"):
        choose_checkpoint(fresh)
    write_directory(tmp_path / "export", lambda folder: (folder / "config.json").write_text("{}") and None, {})
    with pytest.raises(
        DamagedError, match=r"train\.resume = '.*': .*export is damaged: its manifest.json does not list training\.pt"
    ):
        choose_checkpoint(make_config(f"train.resume={tmp_path}/export"))
    damage(run_dir / "checkpoints/step-00000003")
    with pytest.raises(DamagedError, match=r"training\.pt has 4 bytes instead of 5"):
        choose_checkpoint(make_config(f"train.resume={run_dir}/checkpoints/step-00000003"))


@pytest.mark.parametrize("where", ["tokens", "", "data", "deep/inside"])
def test_tokens_inside_the_run_directory_are_a_fresh_start(make_config: MakeConfig, tmp_path: Path, where: str) -> None:
    config = make_config(f"data.cache_dir={tmp_path / 'run' / where}")
    for folder in ("tokens", "tokenizer"):
        (tmp_path / "run" / where / folder).mkdir(parents=True)
    assert choose_checkpoint(config) is None


def test_a_run_that_left_no_checkpoint_may_be_corrected(make_config: MakeConfig) -> None:
    """Its metrics are set aside: what fitted that run says nothing of this one."""
    run_dir = fake_run(make_config())
    (run_dir / "metrics.jsonl").write_text("rows")
    corrected = make_config("train.seed=1")
    for config in (make_config(), corrected):
        assert choose_checkpoint(config) is None
        assert (run_dir / "metrics.jsonl").exists()
        set_aside_attempt(config)
    assert names(run_dir) == ["abandoned-1-metrics.jsonl", "config.toml"]
    (run_dir / "config.toml").write_text("")  # as a version before this one left it when the disk was full
    assert choose_checkpoint(corrected) is None
    set_aside_attempt(corrected)
    (run_dir / "export").mkdir()  # but a finished run is kept, whatever became of its checkpoints
    (run_dir / "config.toml").write_text(dump_toml(make_config()))
    with pytest.raises(ValueError, match=r"\(train\.seed: 0 -> 1\): choose another train\.run_dir$"):
        choose_checkpoint(corrected)


def test_a_recorded_configuration_that_cannot_be_read_is_named(make_config: MakeConfig) -> None:
    run_dir = fake_run(make_config(), 3)
    for content, message in (("", "no data: set data.files"), ("[", "not valid TOML"), ("[odd]", "unknown key odd")):
        (run_dir / "config.toml").write_text(content)
        with pytest.raises(ValueError, match=rf"run/config\.toml: .*{message}.*; train\.resume=CHECKPOINT continues"):
            choose_checkpoint(make_config())


def test_a_run_directory_that_is_a_file_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match=r"train\.run_dir = '.*run' is a file: choose another"):
        choose_checkpoint(make_config())


def test_what_is_not_named_like_a_checkpoint_is_left_alone(make_config: MakeConfig) -> None:
    folder = fake_run(make_config(), 3, 6) / "checkpoints"
    (folder / "step-6.bak").mkdir()
    (folder / "step-00000009.bak").mkdir()
    (folder / "step-latest").symlink_to("step-00000006")
    assert choose_checkpoint(make_config()) == folder / "step-00000006"
    set_aside_newer(folder, 3)
    assert names(folder) == [
        "abandoned-1-step-00000006", "step-00000003", "step-00000009.bak", "step-6.bak", "step-latest"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_in_the_place_of_a_checkpoint_is_refused(make_config: MakeConfig, kind: str) -> None:
    """The write of step 9 would fail on it."""
    odd = fake_run(make_config(), 3) / "checkpoints/step-00000009"
    odd.symlink_to("step-00000003") if kind == "link" else odd.touch()
    with pytest.raises(ValueError, match="step-00000009 is a link or a file, not a checkpoint: move it away"):
        choose_checkpoint(make_config())


def test_weights_that_the_manifest_does_not_name_are_refused(make_config: MakeConfig) -> None:
    """They would be loaded instead of its own."""
    newest = fake_run(make_config(), 3) / "checkpoints/step-00000003"
    (newest / "zz.safetensors").touch()
    for words in ([], [f"train.resume={newest}"]):
        with pytest.raises(DamagedError, match=r"holds zz\.safetensors, which is not in its manifest: move that file"):
            choose_checkpoint(make_config(*words))


@pytest.mark.parametrize("content", [b"no pickle", b"\x80\x02}q\x00."])
@pytest.mark.parametrize("name", ["training.pt", "model.safetensors"])
def test_files_that_are_whole_and_of_no_use_are_one_line(make_config: MakeConfig, name: str, content: bytes) -> None:
    """Their manifest agrees with them."""
    config = make_config(*EXACT)
    state = make_state(config)
    save_at(state, config, 4)
    path = checkpoint_dir(config) / "step-00000004"
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be loaded \(\w+: .*\): choose another") as raised:
        load_checkpoint(path, state)
    assert "weights_only" not in str(raised.value)  # PyTorch's advice to run what is in the file


def test_a_training_state_without_a_key_is_one_line(make_config: MakeConfig) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    save_at(state, config, 4)
    path = checkpoint_dir(config) / "step-00000004"
    saved = torch.load(path / "training.pt")
    del saved["optimizer"]
    torch.save(saved, path / "training.pt")
    with pytest.raises(ValueError, match=r"training\.pt cannot be loaded \(KeyError: 'optimizer'\)"):
        load_checkpoint(path, state)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_a_full_disk_is_an_error_of_the_system(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The libraries raise errors of their own; PyTorch's does not even say why."""
    config = make_config(*EXACT)
    state = make_state(config)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "training.pt":
        monkeypatch.setattr(state.model, "save_pretrained", lambda _: None)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({"model.safetensors": 100_000, "training.pt": 2_000}[name], limit[1]))
    try:
        with pytest.raises(OSError, match=r"with \d+ bytes free on that disk"):
            save_at(state, config, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert list_checkpoints(checkpoint_dir(config)) == []


def test_so_is_a_tokenizer_that_cannot_be_written(make_config: MakeConfig, tmp_path: Path) -> None:
    class Unwritable:
        def save_pretrained(self, _: Path) -> None:
            raise Exception("No space left on device (os error 28)")  # as tokenizers does

    config = make_config(*EXACT)
    with pytest.raises(OSError, match="No space left on device"):
        write_model(make_state(config).model, Unwritable(), tmp_path)


def test_a_damaged_newest_names_the_way_on_and_is_never_skipped(make_config: MakeConfig) -> None:
    config = make_config()
    run_dir = fake_run(config, 3)
    damage(run_dir / "checkpoints/step-00000003")
    with pytest.raises(DamagedError, match="bytes instead of 5; nothing was overwritten, delete it to start over"):
        choose_checkpoint(config)
    fake_run(config, 3, 6)
    damage(run_dir / "checkpoints/step-00000006")
    with pytest.raises(DamagedError, match=r"resume from the one before it with train\.resume=.*step-00000003$"):
        choose_checkpoint(config)
    manifest = json.loads((run_dir / "checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["step"] == 6
