"""The disk is full: a small tmpfs (root), or no byte more from some event on. One line of error; with more space the
same command must end with the numbers of the unbroken run."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

from tests.attack.events import Events, full_disk
from tests.attack.harness import Ended, Finding, Ground
from tests.attack.kills import command, events_of

PAGE = 4096


def attack(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    if index % 2 == 0 and os.geteuid() == 0:
        with contextlib.suppress(subprocess.CalledProcessError):  # root of a container that may not mount
            return small_disk(ground, random, folder)
    events = events_of(ground, ground.folder / "events")
    place = random.randrange(len(events))
    ended = ground.train(command(ground, folder), folder, Events(folder, place + 1, full_disk).install)
    return _judge(ground, folder, f"disk full from event {place + 1} ({events[place]}) on", ended)


def small_disk(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """Of any size up to what the run needs (about 1 MB)."""
    pages = int(2 ** random.uniform(1, 8))
    _mount("-t", "tmpfs", "-o", f"size={pages * PAGE}", "none", str(folder))
    try:
        ended = ground.train(command(ground, folder), ground.folder)
        _mount("-o", "remount,size=64m", str(folder))
        return _judge(ground, folder, f"disk of {pages * PAGE >> 10} KiB", ended)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _judge(ground: Ground, folder: Path, case: str, ended: Ended) -> Finding:
    if fault := ended.fault():
        return Finding(case, fault)
    return Finding(case + ", then not", ground.wrong(folder / "run", command(ground, folder), ground.folder))
