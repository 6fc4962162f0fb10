"""One file of a run directory is damaged, or a stray one put there. The same command must then end with the numbers of
the unbroken run, or refuse in one line; after the damage is undone, it must end with them in any case."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.attack.events import Events, receive
from tests.attack.harness import Finding, Ground, files, numbers, spread
from tests.attack.kills import command

Damage = Callable[[Path, random.Random], object]
JSON = ["[]", "null", "3", '{"a": {}}\n']
COPIES = [".bak", "-copy", "1", " (1)"]


def flip_a_bit(path: Path, random: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, random: random.Random) -> None:
    os.truncate(path, random.randrange(max(1, path.stat().st_size)))


def replaced_by(other: Callable[[Path, random.Random], object]) -> Damage:
    def damage(path: Path, random: random.Random) -> None:
        path.unlink()
        other(path, random)

    return damage


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def swap_with_a_neighbour(path: Path, random: random.Random) -> None:
    neighbours = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    if neighbours:
        shutil.copy(random.choice(neighbours), path)


DAMAGES: dict[str, Damage] = {
    "emptied": lambda path, _: path.write_bytes(b""),
    "cut": truncate,
    "a bit flipped": flip_a_bit,
    "a byte appended": lambda path, _: path.write_bytes(path.read_bytes() + b"\n{"),
    "removed": lambda path, _: path.unlink(),
    "a folder instead": replaced_by(lambda path, _: path.mkdir()),
    "a link to nowhere instead": replaced_by(lambda path, _: path.symlink_to("nowhere")),
    "random bytes instead": lambda path, random: path.write_bytes(random.randbytes(max(1, path.stat().st_size))),
    "JSON of another kind instead": lambda path, random: path.write_text(random.choice(JSON)),
    "a neighbour's contents": swap_with_a_neighbour,
}
STRAY: dict[str, Damage] = {
    "a stray copy of": lambda path, random: shutil.copy(path, path.with_name(random.choice(["a-", "z-"]) + path.name)),
    "a stray temporary beside": lambda path, _: path.with_name(f".{path.name}.tmp").write_bytes(b"x"),
    "a stray .partial file beside": lambda path, _: path.with_name(".partial-x").write_bytes(b"x"),
    "a stray .discarded folder beside": lambda path, _: path.with_name(".discarded-x").mkdir(),
    "a copy of the folder of": lambda path, random: shutil.copytree(
        path.parent, beside(path.parent, random.choice(COPIES))
    ),
    "a link to the folder of": lambda path, _: beside(path.parent, "-link").symlink_to(path.parent),
}


def stopped_run(ground: Ground) -> Path:
    """A run with its own tokens, stopped at step 3 of 4; made once."""
    folder = ground.folder / "stopped"
    if not folder.exists():
        folder.mkdir()
        stop = receive(signal.SIGTERM)
        events = Events(folder, 1, lambda event: stop(event) if events.seen[-1] == "step 3" else None)
        ended = ground.train(command(ground, folder), folder, events.install)
        assert ended.status == 128 + signal.SIGTERM, ended.error
    return folder


def attack(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    """Files in turn, of a stopped run and of a finished one."""
    shutil.copytree(stopped_run(ground), folder, dirs_exist_ok=True)
    arguments = command(ground, folder)
    whole = index % 3 == 0
    if whole and (wrong := ground.wrong(folder / "run", arguments, folder)):
        return Finding("a run stopped by SIGTERM at step 3", wrong)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = paths[spread(index, len(paths))]
    kinds: dict[str, Damage] = {**DAMAGES, **STRAY}
    name = random.choice(list(kinds))
    case = f"{'finished' if whole else 'stopped'} run, {path.relative_to(folder)}: {name}"
    backup = folder.with_name(folder.name + "-backup")
    shutil.copytree(folder, backup, symlinks=True)
    try:
        kinds[name](path, random)
        damaged = files(folder)
        ended = ground.train(arguments, folder)
        if fault := ended.fault():
            return Finding(case, fault)
        if ended.status == 0:
            return Finding(case, _silent(ground, folder, path))
        if name in STRAY:
            return Finding(case, f"stops the run: {ended.last_line()}")
        after = files(folder)
        if lost := [name for name, content in damaged.items() if after.get(name) != content]:
            return Finding(case, f"the refusal changed {', '.join(lost)}")
        shutil.rmtree(folder)
        shutil.copytree(backup, folder, symlinks=True)
        return Finding(case + ", then undone", ground.wrong(folder / "run", arguments, folder))
    finally:
        shutil.rmtree(backup)


def _silent(ground: Ground, folder: Path, path: Path) -> str:
    """It went on: then the damage must have changed nothing. A log is as good as its lines."""
    found = numbers(folder / "run")
    free = {"losses", "evaluations"} if path.name == "metrics.jsonl" else set()
    changed = [key for key in ground.numbers if found[key] != ground.numbers[key] and key not in free]
    return f"accepted in silence: other {' and '.join(changed)} than the unbroken run" if changed else ""
