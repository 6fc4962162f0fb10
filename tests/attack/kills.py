"""A run ends at some event: killed, killed in the middle of a write, or stopped by a signal. The same command must
then end with the numbers of the unbroken run. Every third case interrupts that command as well."""

from __future__ import annotations

import functools
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from overcoat import cli
from tests.attack.events import Events, die, die_after, receive
from tests.attack.harness import Child, Finding, Ground, spread

# Name, action, the statuses that it may lead to.
Kill = tuple[str, Callable[[str], None], tuple[int, ...]]


def command(ground: Ground, folder: Path) -> list[str]:
    """The run that also tokenizes."""
    return ground.command(folder / "run", f"data.cache_dir={folder / 'cache'}")


@functools.cache
def events_of(ground: Ground, folder: Path) -> list[str]:
    """All events of an unbroken run, in their order."""
    events = Events(folder)

    def work() -> int:
        events.install()
        status = cli.main(command(ground, folder))
        print("\n".join(["", *events.seen]), file=sys.stderr)
        return status

    folder.mkdir()
    ended = Child(work, folder).wait()
    assert ended.status == 0, ended.error
    found = [line for line in ended.error.splitlines() if line.startswith(("open ", "os.", "fcntl.", "step "))]
    assert len(found) > 50, ended.error
    return found


def choose_kill(random: random.Random) -> Kill:
    limit = int(2 ** random.uniform(0, 17)) - 1
    return random.choice([
        ("killed", die, (-signal.SIGKILL,)),
        (f"killed in a write beyond byte {limit}", die_after(limit), (-signal.SIGXFSZ,)),
        ("stopped by SIGTERM", receive(signal.SIGTERM), (128 + signal.SIGTERM, -signal.SIGTERM)),
        ("stopped by Ctrl-C", receive(signal.SIGINT), (128 + signal.SIGINT, -signal.SIGINT)),
    ])  # fmt: skip


def attack(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    """As many cases as there are events take each once."""
    events = events_of(ground, ground.folder / "events")
    place, told = spread(index, len(events)), []
    for _ in range(1 + (index % 3 == 2)):
        name, act, statuses = choose_kill(random)
        ended = ground.train(command(ground, folder), folder, Events(folder, place + 1, act).install)
        told.append(f"{name} at event {place + 1} ({events[place]})")
        if fault := ended.fault(*statuses):
            return Finding(", then ".join(told), fault)
        if ended.status == 128 + signal.SIGTERM and "the same command continues it" not in ended.output:
            return Finding(", then ".join(told), f"does not say how to go on: {ended.output[-200:]!r}")
        place = random.randrange(len(events))
    return Finding(", then ".join(told), ground.wrong(folder / "run", command(ground, folder), folder))
