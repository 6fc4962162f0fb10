"""Directories that appear whole or not at all.

A checkpoint, a token cache and an export are each a directory of several files. `write_directory` fills a
sibling directory with a temporary name, forces every file and then the directory itself to the disk, and
renames it into place: one atomic step of the file system. Whoever is killed in between leaves a `.partial-*`
directory, which nothing reads and the next writer removes. A manifest inside records the size and SHA-256 of
every file, so damage that happens later (a full disk, a truncated copy) is found when the directory is read,
not when training has gone wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
DISCARDED = ".discarded-"


class DamagedError(ValueError):
    """A directory whose contents are not what its manifest says."""


def write_directory(target: Path, fill: Callable[[Path], None], about: dict[str, Any]) -> None:
    """Create `target` with the files that `fill(folder)` writes, plus a manifest that also holds `about`.

    An existing `target` is replaced: it is first renamed out of the way, so no moment has half of it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    partial = target.with_name(PARTIAL + target.name)
    partial.mkdir()
    fill(partial)
    names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    manifest = {**about, "files": {name: _fingerprint(partial / name) for name in names}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")
    for path in [*(partial / name for name in names), partial / MANIFEST, partial]:
        sync(path)
    if target.exists():
        target.rename(target.with_name(DISCARDED + target.name))
    partial.rename(target)
    sync(target.parent)
    sweep(target.parent)


def remove_directory(target: Path) -> None:
    """Delete `target`, renamed first: an interrupted deletion must not look like a damaged directory."""
    discarded = target.with_name(DISCARDED + target.name)
    target.rename(discarded)
    shutil.rmtree(discarded)


def sweep(parent: Path) -> None:
    """Remove what interrupted writers and deletions left in `parent`, and undo a replacement cut in its
    middle."""
    for path in parent.glob(DISCARDED + "*"):
        name = path.name.removeprefix(DISCARDED)
        if (parent / (PARTIAL + name)).exists() and not (parent / name).exists():
            path.rename(parent / name)
        else:
            shutil.rmtree(path)
    for path in parent.glob(PARTIAL + "*"):
        shutil.rmtree(path)


def verify_directory(target: Path) -> dict[str, Any]:
    """The manifest of `target`, after comparing every file with it; DamagedError says what is wrong."""
    try:
        manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text(encoding="ascii"))
        files = manifest["files"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{target} is damaged: its {MANIFEST} is missing or unreadable ({error})") from error
    for name, expected in files:
        path = target / name
        if not path.is_file():
            raise DamagedError(f"{target} is damaged: {name} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DamagedError(f"{target} is damaged: {name} has {size} bytes instead of {expected['bytes']}")
        if _fingerprint(path) != expected:
            raise DamagedError(f"{target} is damaged: the contents of {name} do not match its checksum")
    return manifest


def sync(path: Path) -> None:
    """Force a file's or directory's contents to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
