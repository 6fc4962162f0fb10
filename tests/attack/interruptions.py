"""What comes between a run's events: kills, a full disk, a second run. Afterwards the same command must end with the
numbers of the unbroken run.

    kills   killed, killed in the middle of a write, or stopped by a signal; in every third case once more
    disk    a small tmpfs (root), or no byte more from some event on: one line of error
    two     two runs on one run directory or one data.cache_dir: the first stops at some event, the second runs, the
            first goes on or is killed there; both end well or in one line of error
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGXFSZ

from overcoat import cli
from tests.attack.events import Events, die_after, full_disk, receive
from tests.attack.harness import STRIDE, Child, Finding, Ground, start

PATIENCE = 1.5  # seconds in which the second, which may wait for the first, gets to where it waits


@functools.cache
def events_of(ground: Ground) -> list[str]:
    """All events of an unbroken run, in their order."""
    folder = ground.folder / "events"
    events = Events(folder)

    def work() -> int:
        events.install()
        status = cli.main(ground.command(folder))
        print("\n".join(["", *events.seen]), file=sys.stderr)
        return status

    folder.mkdir()
    ended = Child(work, folder).wait()
    found = [line for line in ended.error.splitlines() if line.startswith(("open ", "os.", "fcntl.", "step "))]
    assert (ended.status, len(found) > 50) == (0, True), ended.error
    return found


def kills(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    """As many cases as there are events take each once."""
    events, told = events_of(ground), ""
    place = index * STRIDE % len(events)
    for _ in range(1 + (index % 3 == 2)):
        limit = int(2 ** random.uniform(0, 17)) - 1
        signals = [(receive(signum), signum) for signum in (SIGKILL, SIGTERM, SIGINT)]
        act, signum = random.choice([*signals, (die_after(limit), SIGXFSZ)])
        ended = start(ground.command(folder), folder, Events(folder, place + 1, act).install).wait()
        told += f"{signum.name} at event {place + 1} ({events[place]}; SIGXFSZ: at byte {limit}), then "
        if fault := ended.fault(-signum, 128 + signum):
            return told, fault
        if ended.status == 128 + SIGTERM and "the same command continues it" not in ended.output:
            return told, f"does not say how to go on: {ended.output[-200:]!r}"
        place = random.randrange(len(events))
    return told, ground.wrong(folder)


def disk(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    def call(*command: str) -> int:
        return subprocess.run([*command, str(folder)], capture_output=True).returncode

    place, pages = random.randrange(len(events_of(ground))), int(2 ** random.uniform(1, 8))  # a run needs about 1 MB
    if index % 2 or call("mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "none"):  # which not everybody may
        ended = start(ground.command(folder), folder, Events(folder, place + 1, full_disk).install).wait()
        return f"disk full from event {place + 1} on", ended.fault() or ground.wrong(folder)
    try:
        ended = start(ground.command(folder), ground.folder).wait()
        assert call("mount", "-o", "remount,size=64m") == 0
        return f"disk of {pages} pages", ended.fault() or ground.wrong(folder)
    finally:
        call("umount", "-l")


def two(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    events, names = events_of(ground), ["run", "run" if index % 2 == 0 else "run2"]
    # Tokens are made in the first third of a run.
    place = random.randrange(len(events) if index % 2 == 0 else len(events) // 3)
    is_killed = random.random() < 0.3
    case = f"{' and '.join(names)}, the first waits at event {place + 1} ({events[place]}), killed: {is_killed}"

    first = start(ground.command(folder), folder, Events(folder, place + 1, receive(SIGSTOP)).install)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    second = start(ground.command(folder, names[1]), folder)
    second.ended_within(PATIENCE)
    os.kill(first.pid, SIGKILL if is_killed else SIGCONT)
    faults = [first.wait().fault(*[-SIGKILL] * is_killed), second.wait().fault()]
    faults += [ground.wrong(folder, name) for name in names if not any(faults)]
    return case, "; ".join(filter(None, faults))
