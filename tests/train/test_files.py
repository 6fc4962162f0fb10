"""Atomic directories: nothing half-written is ever visible, damage is found."""

from __future__ import annotations

import contextlib
import errno
import warnings
from pathlib import Path

import pytest

from overcoat.train import files
from overcoat.train.files import DamagedError, remove_directory, sweep, verify_directory, write_directory


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"hello")
    (folder / "deep").mkdir()
    (folder / "deep" / "b.txt").write_text("world")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fails_at", range(6))
def test_failing_at_any_sync_leaves_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """An existing directory survives an interruption at every step of its replacement."""
    write_directory(tmp_path / "x", fill, {"step": 1})
    calls = iter(range(100))
    real = files.sync

    def failing(path: Path) -> None:
        if next(calls) == fails_at:
            raise OSError("power cut")
        real(path)

    monkeypatch.setattr(files, "sync", failing)
    with contextlib.suppress(OSError):
        write_directory(tmp_path / "x", fill, {"step": 2})
    monkeypatch.setattr(files, "sync", real)
    sweep(tmp_path)
    # Syncs: a.bin, deep/b.txt, manifest, the directory itself, (renamed here), the parent; the sixth does not happen.
    assert verify_directory(tmp_path / "x")["step"] == (1 if fails_at < 4 else 2)
    assert visible(tmp_path) == ["x"]


def test_a_renamed_directory_is_synced_after_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that a power cut may undo the rename; what it replaced must not be gone by then."""
    write_directory(tmp_path / "x", fill, {"step": 1})
    real, seen = files.sync, []

    def noting(path: Path) -> None:
        seen.append((path, visible(tmp_path)))
        real(path)

    monkeypatch.setattr(files, "sync", noting)
    write_directory(tmp_path / "x", fill, {"step": 2})
    assert seen[-1] == (tmp_path, [".discarded-0~x", "x"])


def test_a_failed_writer_leaves_nothing_and_touches_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / ".partial-y").mkdir()  # of a writer that may be at work

    def no_room(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(tmp_path / "x", no_room, {})
    assert visible(tmp_path) == [".partial-y"]
    write_directory(tmp_path / "x", fill, {})
    assert visible(tmp_path) == [".partial-y", "x"]


def test_interruption_between_the_two_renames_is_undone(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", fill, {"step": 1})
    (tmp_path / "x").rename(tmp_path / ".discarded-0~x")
    (tmp_path / ".partial-x").mkdir()
    sweep(tmp_path)
    assert verify_directory(tmp_path / "x")["step"] == 1
    assert visible(tmp_path) == ["x"]


def test_interrupted_removal_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_directory(tmp_path / "x", fill, {})

    def killed(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_directory(tmp_path / "x")
    monkeypatch.undo()
    assert not (tmp_path / "x").exists()
    sweep(tmp_path)
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a.bin").write_bytes(b"hellO"), "contents of a.bin"),
        (lambda folder: (folder / "a.bin").write_bytes(b"hell"), "a.bin has 4 bytes instead of 5"),
        (lambda folder: (folder / "a.bin").unlink(), "a.bin is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing or unreadable"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is missing or unreadable"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is missing or unreadable"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"files": {"a": 3}}'),
            "manifest.json is missing or unr",
        ),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {}}'), "does not list a.bin"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: object, message: str) -> None:
    write_directory(tmp_path / "x", fill, {})
    damage(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(DamagedError, match=message):
        verify_directory(tmp_path / "x", ["a.bin"])


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_what_cannot_be_deleted_is_said_once_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for name in ("x", "y"):
        write_directory(tmp_path / name, fill, {})

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(*((Path, call, busy) if call == "rename" else (files.shutil, call, busy)))
    with pytest.warns(UserWarning, match="cannot be deleted now, and will be tried again .*busy"):
        remove_directory(tmp_path / "x")
    if call == "rmtree":  # the name is free, for another that cannot be deleted either
        monkeypatch.undo()
        write_directory(tmp_path / "x.", fill, {})
        (tmp_path / "x.").rename(tmp_path / "x")
        monkeypatch.setattr(files.shutil, call, busy)
        remove_directory(tmp_path / "x")
        assert visible(tmp_path) == [".discarded-0~x", ".discarded-1~x", "y"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sweep(tmp_path)
    monkeypatch.undo()
    if (tmp_path / "x").exists():
        remove_directory(tmp_path / "x")
    sweep(tmp_path)
    assert visible(tmp_path) == ["y"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_or_directory_sync_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(code, "not supported")

    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    monkeypatch.setattr(files.os, "fsync", unsupported)
    with pytest.warns(UserWarning) as said:  # noqa: PT030, PT031
        for _ in range(2):
            with files.lock(tmp_path / "lock", lambda: None):
                write_directory(tmp_path / "x", fill, {"step": 1})
    assert [str(each.message).count("file system") for each in said] == [1, 1, 1]
    assert verify_directory(tmp_path / "x")["step"] == 1


def test_an_error_of_the_disk_is_no_lack_of_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        write_directory(tmp_path / "x", fill, {})
