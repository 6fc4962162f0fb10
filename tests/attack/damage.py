"""One file of a run directory is damaged, or a stray one put there. The same command must then end with the numbers of
the unbroken run, or refuse in one line; after the damage is undone, it must end with them in any case."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

from tests.attack.events import Events, receive
from tests.attack.harness import STRIDE, Finding, Ground, start

# Statements on `path`, its bytes `old` and the random numbers `r`.
DAMAGES = [
    "path.write_bytes(b'')", "path.write_bytes(old[:r.randrange(len(old) or 1)])", "path.write_bytes(old + b'\\n{')",
    "b = bytearray(old or b'-'); b[r.randrange(len(b))] ^= 1 << r.randrange(8); path.write_bytes(b)",
    "path.unlink()", "path.unlink(); path.mkdir()", "path.unlink(); path.symlink_to('nowhere')",
    "path.write_bytes(r.randbytes(len(old) or 1))", "path.write_text(r.choice(['[]', 'null', '3', '{\"a\": {}}\\n']))",
    "path.write_bytes(r.choice(sorted(p for p in path.parent.iterdir() if p.is_file())).read_bytes())",
]  # fmt: skip
STRAY = [
    "path.with_name(r.choice(['a-', 'z-']) + path.name).write_bytes(old)", "path.with_name('.discarded-x').mkdir()",
    "path.with_name(f'.{path.name}.tmp').write_bytes(b'x')", "path.with_name('.partial-x').write_bytes(b'x')",
    "shutil.copytree(folder, folder.with_name(folder.name + r.choice(['.bak', '-copy', '1', ' (1)'])))",
    "folder.with_name(folder.name + '-link').symlink_to(folder)",
]  # fmt: skip


def stopped_run(ground: Ground) -> Path:
    """A run with its own tokens, stopped at step 3 of 4; made once."""
    folder = ground.folder / "stopped"
    if not folder.exists():
        folder.mkdir()
        stop = receive(signal.SIGTERM)
        events = Events(folder, 1, lambda event: stop(event) if events.seen[-1] == "step 3" else None)
        ended = start(ground.command(folder), folder, events.install).wait()
        assert ended.status == 128 + signal.SIGTERM, ended.error
    return folder


def damage(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    """Files in turn, of a stopped run and of a finished one."""
    shutil.copytree(stopped_run(ground), folder, dirs_exist_ok=True)
    arguments, run_dir = ground.command(folder), folder / "run"
    if index % 3 == 0 and (wrong := ground.wrong(folder)):
        return "a run stopped by SIGTERM at step 3", wrong
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path, before = paths[index * STRIDE % len(paths)], files(folder)
    statement = random.choice([*DAMAGES, *STRAY])
    case = f"{'finished' if index % 3 == 0 else 'stopped'} run, {path.relative_to(folder)}: {statement}"
    exec(statement, {"path": path, "folder": path.parent, "old": path.read_bytes(), "r": random, "shutil": shutil})
    damaged = files(folder)
    ended = start(arguments, folder).wait()
    if fault := ended.fault():
        return case, fault
    if ended.status == 0:  # then the damage must have changed nothing; a log is as good as its lines
        free = {"losses", "evaluations"} if path.name == "metrics.jsonl" else set()
        changed = ", ".join(set(ground.changed(run_dir)) - free)
        return case, changed and f"accepted in silence: other {changed} than the unbroken run"
    if statement in STRAY and path.suffix != ".safetensors":  # weights beside a manifest may be refused
        return case, f"stops the run: {ended.last_line()}"
    after = files(folder)
    if lost := [name for name, content in damaged.items() if after.get(name) != content]:
        return case, f"the refusal changed {', '.join(lost)}"
    shutil.rmtree(folder)
    for name, content in before.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return case + ", then undone", ground.wrong(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
