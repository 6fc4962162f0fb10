"""What a process does to files below a folder, counted; at the n-th event something happens to it.

Python's audit hooks see every file opened for writing, renamed, removed, every folder made; `os.fsync` and a step of
training are patched in. What Rust and C++ write (safetensors, tokenizers, torch.save) raises no event, but the limit
on the size of files holds for it, too: with SIGXFSZ at its default the kernel kills in the middle of such a write, with
SIGXFSZ ignored the write fails.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overcoat.train import loop

CREATING = ("open", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.fsync")
# Number of the argument that holds the descriptor of the folder that a relative name is meant from.
WATCHED = {"open": 9, "os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.link": 2, "os.symlink": 2,
           "os.truncate": 9, "fcntl.flock": 9, "os.fsync": 9, "step": 9}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Events:
    """Counts events below `root`; calls `act(name)` from the `at`-th on, each time before it happens."""

    root: Path
    at: int = 0
    act: Callable[[str], None] = lambda _name: None
    seen: list[str] = field(default_factory=list)
    _busy: bool = False

    def install(self) -> None:
        """In a forked child only: an audit hook stays."""
        real_sync, real_step = os.fsync, loop.train_step

        def fsync(handle: Any) -> None:
            self._hook("os.fsync", (handle,))
            real_sync(handle)

        def train_step(*arguments: Any) -> Any:
            record = real_step(*arguments)
            self._hook("step", (str(self.root / f"{record.step}"),))
            return record

        os.fsync, loop.train_step = fsync, train_step  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or self._busy:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        self._busy = True
        try:
            path = _path(arguments, WATCHED[event])
            if path.startswith(str(self.root)):
                self.seen.append(f"{event} {os.path.relpath(path, self.root)}")
                if 0 < self.at <= len(self.seen):
                    self.act(event)
        finally:
            self._busy = False


def _path(arguments: tuple[Any, ...], folder: int) -> str:
    if isinstance(arguments[0], int):
        return os.readlink(f"/proc/self/fd/{arguments[0]}")
    path = os.fsdecode(arguments[0])
    if folder < len(arguments) and isinstance(arguments[folder], int) and arguments[folder] >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)
    return os.path.abspath(path)


def die(_event: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(num_bytes: int) -> Callable[[str], None]:
    """Die in the middle of the next write that makes a file longer than this."""

    def act(_event: str) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit_files(num_bytes)

    return act


def receive(signum: int) -> Callable[[str], None]:
    """A signal from outside, once."""
    sent: list[int] = []

    def act(_event: str) -> None:
        if not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)

    return act


def full_disk(event: str) -> None:
    """No byte more, for Python and for what is not Python, as long as the process lives."""
    limit_files(0)  # EFBIG, where a full disk says ENOSPC
    if event in CREATING:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
