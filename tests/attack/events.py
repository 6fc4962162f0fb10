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
from pathlib import Path
from typing import Any

from overcoat.train import loop

CREATING = ("open", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.fsync")
WATCHED = (*CREATING, "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "step")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Events:
    """Counts events below `root`; calls `act(name)` from the `at`-th on, each time before it happens."""

    def __init__(self, root: Path, at: int = 0, act: Callable[[str], object] = bool) -> None:
        self.root, self.at, self.act = root, at, act
        self.seen: list[str] = []
        self._busy = False

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

        os.fsync, loop.train_step = fsync, train_step
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_reading = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING)
        if event not in WATCHED or is_reading or self._busy:
            return
        self._busy = True
        try:
            # A relative name is one in a folder that is being removed, or in `root`, from which the run was started.
            name = arguments[0]
            path = os.readlink(f"/proc/self/fd/{name}") if isinstance(name, int) else os.path.abspath(os.fsdecode(name))
            if path.startswith(str(self.root)):
                self.seen.append(f"{event} {os.path.relpath(path, self.root)}")
                if 0 < self.at <= len(self.seen):
                    self.act(event)
        finally:
            self._busy = False


def die_after(num_bytes: int) -> Callable[[str], None]:
    """Die in the middle of the next write that makes a file longer than this."""

    def act(_event: str) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    return act


def receive(signum: int) -> Callable[[str], None]:
    """A signal from outside, once."""
    left = [signum]
    return lambda _event: os.kill(os.getpid(), left.pop()) if left else None


def full_disk(event: str) -> None:
    """No byte more, for Python and for what is not Python, as long as the process lives."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # EFBIG, where a full disk says ENOSPC
    if event in CREATING:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
