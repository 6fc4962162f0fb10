"""Two runs at once, on one run directory or on one data.cache_dir. The first stops at some event, the second runs, the
first goes on or is killed there. Both must end with the numbers of the unbroken run, or in one line of error after
which the same command does."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from tests.attack.events import Events, receive
from tests.attack.harness import Finding, Ground
from tests.attack.kills import events_of

PATIENCE = 1.5  # seconds in which the second, which may wait for the first, gets to where it waits


def attack(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    events = events_of(ground, ground.folder / "events")
    shares_run = index % 2 == 0
    runs = [folder / "run", folder / ("run" if shares_run else "run2")]
    commands = [ground.command(run, f"data.cache_dir={folder / 'cache'}") for run in runs]
    # Tokens are made in the first third of a run.
    place = random.randrange(len(events) if shares_run else len(events) // 3)
    is_killed = random.random() < 0.3
    shared, then = "run directory" if shares_run else "cache", "is killed" if is_killed else "goes on"
    case = f"two on one {shared}, the first waits at event {place + 1} ({events[place]}), then {then}"

    first = ground.start(commands[0], folder, Events(folder, place + 1, receive(signal.SIGSTOP)).install)
    _wait_until_stopped(first.pid)
    second = ground.start(commands[1], folder)
    second.ended_within(PATIENCE)
    os.kill(first.pid, signal.SIGKILL if is_killed else signal.SIGCONT)
    for name, child, expected in (("first", first, (-signal.SIGKILL,) * is_killed), ("second", second, ())):
        if fault := child.wait().fault(*expected):
            return Finding(case, f"the {name} {fault}")
    for run, arguments in zip(runs, commands, strict=True):
        if wrong := ground.wrong(run, arguments, folder):
            return Finding(case, wrong)
    return Finding(case, "")


def _wait_until_stopped(pid: int) -> None:
    """Or ended; its status stays to be waited for."""
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
