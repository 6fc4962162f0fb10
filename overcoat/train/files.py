"""Write directories atomically, with checksums.

A checkpoint, a token cache and an export are each a directory of several files. `write_directory` fills a sibling
directory with a temporary name, forces every file and then the directory itself to the disk, and renames it into place:
one atomic step of the file system. A writer that is killed leaves a `.partial-*` directory, which is never read and
which the next writer of that name removes. A manifest inside records the size and SHA-256 of every file, so damage that
happens later is found when the directory is read, not when training has gone wrong. A directory has one writer at a
time, which holds a `lock`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from overcoat.extras import reason
from overcoat.train.process import follows_from_another

MANIFEST = "manifest.json"
RECORD = "training.json"  # of a checkpoint
PARTIAL = ".partial-"
DISCARDED = ".discarded-"
STAYS = "cannot be deleted now, and will be tried again"


# Errors of a call that a file system does not have.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
OF_DIRECTORIES = (*UNSUPPORTED, errno.EBADF, errno.EISDIR, errno.EACCES, errno.EPERM)
_warned: set[str] = set()


class DamagedError(ValueError):
    """A directory whose contents are not what its manifest says."""


@contextlib.contextmanager
def lock(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, call `busy`, which raises or returns to wait. The system
    releases the lock even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (*UNSUPPORTED, errno.ENOLCK):
                raise
            _warn_once("this file system has no locks: start no second run there", path.parent, error)
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raise a library's write error as an OSError that names the free bytes of the disk: safetensors and tokenizers
    do not say when it is full."""
    try:
        yield
    except (OSError, OutOfMemoryError):
        raise
    except Exception as error:
        if follows_from_another(error):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(errno.EIO, f"{_short(error)}, with {free} bytes free on that disk", str(path)) from error


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """Re-raise a library's error in reading a checkpoint (whose checksums are right) as a ValueError."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:  # of JSON, safetensors, or a missing key
        if follows_from_another(error):
            raise
        raise ValueError(f"{path} cannot be loaded ({_short(error)}): choose another with train.resume=PATH") from error


def _short(error: Exception) -> str:
    """Return an error's type and first sentence."""
    return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def write_directory(target: Path, fill: Callable[[Path], None], about: dict[str, Any]) -> None:
    """Create `target` with the files that `fill(folder)` writes, and a manifest that also holds `about`.

    An existing `target` is first renamed, so it is replaced as a whole. If `fill` or the disk fails, nothing of the new
    one remains.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, target.name)
    partial = partial_of(target)
    partial.mkdir()
    try:
        fill(partial)
        names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
        manifest = {**about, "files": {name: _fingerprint(partial / name) for name in names}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")
        for path in [*(partial / name for name in names), partial / MANIFEST, partial]:
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would be in the way
        raise
    if target.exists():
        target.rename(_discarded(target))
    partial.rename(target)
    sync(target.parent)
    sweep(target.parent, target.name)


def partial_of(target: Path) -> Path:
    """Return the temporary folder that `write_directory` fills before it is renamed to `target`."""
    return target.with_name(PARTIAL + target.name)


def remove_directory(target: Path) -> None:
    """Rename `target`, then delete it: an interrupted deletion must not look like a damaged directory. What cannot be
    deleted now is left to `sweep`."""
    discarded = _discarded(target)
    try:
        target.rename(discarded)
    except OSError as error:
        _warn_once(STAYS, target, error)
        return
    _delete(discarded)


def _discarded(target: Path) -> Path:
    """Return an unused name, `.discarded-NUMBER~NAME`, for a `target` that is to be deleted."""
    names = (target.with_name(f"{DISCARDED}{number}~{target.name}") for number in itertools.count())
    return next(path for path in names if not os.path.lexists(path))


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        _warn_once(STAYS, path, error)


def _warn_once(what: str, place: Path, error: OSError, key: str = "") -> None:
    """Warn once for each `key`, or for each text without one."""
    text = f"{place}: {what} ({reason(error)})"
    if (key or text) not in _warned:
        _warned.add(key or text)
        warnings.warn(text, stacklevel=3)


def sweep(parent: Path, names: str = "*") -> None:
    """Delete the leftovers of interrupted writes and deletions in `parent`, for names that match the pattern, and
    restore a directory whose replacement was interrupted."""
    for path in _directories(parent, f"{DISCARDED}[0-9]*~{names}"):
        name = path.name.split("~", 1)[1]
        if (parent / (PARTIAL + name)).exists() and not (parent / name).exists():
            path.rename(parent / name)
        elif path.exists():
            _delete(path)
    for path in _directories(parent, PARTIAL + names):
        _delete(path)
        if path.exists():  # out of the way of the next writer
            path.rename(_discarded(path.with_name(path.name.removeprefix(PARTIAL))))


def _directories(parent: Path, pattern: str) -> list[Path]:
    """Return the directories that match; files and links of such names are not ours."""
    return [path for path in parent.glob(pattern) if path.is_dir() and not path.is_symlink()]


def verify_directory(target: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return the manifest of `target` after checking every file against it. DamagedError: a file differs, or one of
    `needed` is not listed."""

    def wrong(what: str) -> DamagedError:
        return DamagedError(f"{target} is damaged: {what}")

    try:
        manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text(encoding="ascii"))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise wrong(f"its {MANIFEST} is missing or unreadable ({error})") from error
    for name in needed:
        if name not in files:
            raise wrong(f"its {MANIFEST} does not list {name}")
    for name, (expected, digest) in files.items():
        if not (target / name).is_file():
            raise wrong(f"{name} is missing")
        try:
            found = _fingerprint(target / name)
        except OSError as error:
            raise wrong(f"{name} cannot be read ({reason(error)})") from error
        if found["bytes"] != expected:
            raise wrong(f"{name} has {found['bytes']} bytes instead of {expected}")
        if found["sha256"] != digest:
            raise wrong(f"the contents of {name} do not match its checksum")
    return manifest


def sync(path: Path) -> None:
    """Force a file's or directory's contents to the disk; warn once if the file system cannot."""
    kind, unsupported = ("directories", OF_DIRECTORIES) if path.is_dir() else ("files", UNSUPPORTED)
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in unsupported:
            raise
        what = f"this file system does not sync {kind}: a power cut may lose the newest checkpoints"
        _warn_once(what, path.parent, error, key=kind)


def _fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
