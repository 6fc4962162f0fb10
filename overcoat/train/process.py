"""One process of a run: its device, its memory, its rank, what the processes agree on, how it is told to stop.

torchrun starts the processes of a run and says by the environment which one each is (RANK, WORLD_SIZE, LOCAL_RANK).
The rest of the trainer asks this module for whatever differs between processes. With one process nothing is sent.
Files of a run are written by the first process. A process that fails says why (`may_report`) and ends (`leave`); the
launcher then ends the others, which cannot go on without it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from overcoat.extras import is_worker
from overcoat.train.config import require

T = TypeVar("T")
# Of what is agreed on outside of training: one process tokenizes, verifies or writes while the others wait.
PATIENCE = datetime.timedelta(days=2)
CGROUP = Path("/sys/fs/cgroup")
SECONDS_FOR_THE_CAUSE = 3.0  # to whoever failed first, and to the launcher that ends everybody else


class _Together:
    """What the processes of this run share: a group for what the host says, one for what is written while training
    goes on, and a store; None in a run of one."""

    # SIGTERM has come: where others are gone too, from the launcher, which says why.
    is_ended = False
    group: dist.ProcessGroup | None = None
    writing: dist.ProcessGroup | None = None
    store: dist.Store | None = None


def count() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def machines() -> int:
    """Machines that the processes of this run are on, as torchrun says."""
    return count() // int(os.environ.get("LOCAL_WORLD_SIZE", str(count())))


def is_first() -> bool:
    """Whether this process writes the files and the lines of the run."""
    return rank() == 0


def is_restarted() -> bool:
    """Whether torchrun started the processes again (`--max-restarts`) after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextlib.contextmanager
def joined(device_name: str) -> Iterator[None]:
    """Inside, the processes that torchrun started are one run, on `train.device`: NCCL between GPUs, gloo between
    CPUs."""
    if not is_worker():
        require(
            int(os.environ.get("WORLD_SIZE", "1")) == 1,
            "WORLD_SIZE is above 1, and RANK is not set: start several processes with --gpus N, or torchrun",
        )
        yield
        return
    device = choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, place, size = next(iter(dist.rendezvous("env://")))
    # torchrun's store outlives an attempt, with the addresses of its processes.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _Together.store = dist.PrefixStore(f"overcoat/{attempt}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=_Together.store, rank=place, world_size=size
    )
    _Together.group = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield
    wait_for_all()  # one that leaves early takes its connections from the others


def leave(status: int) -> int:
    """The exit status, of a process that was alone; one of many ends here. Its communicators may hang: they wait for
    processes that are gone, and PyTorch 2.13 may abort while it takes gloo's threads down."""
    if is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def may_report(text: str, is_cause: bool = True) -> bool:
    """Whether this process says why the run fails: the first one with a cause does. An error that only follows from
    another process' end (`is_cause` False) is said if after SECONDS_FOR_THE_CAUSE no process has said a cause. torchrun
    gets the text, too."""
    if not is_worker():
        return True
    if not is_cause:
        if _Together.is_ended:
            if os.environ.get("LOCAL_RANK") == "0":  # who sent SIGTERM may not know of it
                print(f"{text} (after SIGTERM)", file=sys.stderr)
            return False
        time.sleep(SECONDS_FOR_THE_CAUSE)
    if not _is_first_to_report(is_cause):
        return False
    get_error_handler().record_exception(RuntimeError(text))
    return True


def _is_first_to_report(is_cause: bool) -> bool:
    if _Together.store is None:  # nothing is shared yet, so all that are here have the same to say
        return os.environ.get("LOCAL_RANK", "0") == "0"
    own = os.environ["RANK"]
    try:
        return bool(_Together.store.compare_set("failed", "", own) == own.encode())
    except (RuntimeError, dist.DistError):  # it went with the process that held it
        return is_cause


def follows_from_another(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    words = ("gloo", "NCCL", "Connection", "Socket", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def writing_group() -> dist.ProcessGroup | None:
    """The group of a thread that writes checkpoints; made when all processes ask for it first. None in a run of one."""
    if count() > 1 and _Together.writing is None:
        _Together.writing = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _Together.writing


def wait_for_writers() -> None:
    """Return when all processes are here, in the threads that write."""
    if count() > 1:
        dist.barrier(group=_Together.writing)


# ---- agreement ------------------------------------------------------------------------------------------------------


def wait_for_all() -> None:
    """Return when all processes are here."""
    if count() > 1:
        dist.barrier(group=_Together.group)


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """The others run what is inside once the first process has: it fetches and writes what they read."""
    if not is_first():
        wait_for_all()
    yield
    if is_first():
        wait_for_all()


def share(make: Callable[[], T]) -> T:
    """What `make` returns in the first process; the others do not call it. It is pickled on the way, between processes
    of one run."""
    if count() == 1:
        return make()
    held: list[Any] = [make() if is_first() else None]
    dist.broadcast_object_list(held, src=0, group=_Together.group)
    return held[0]


def gather(value: Any) -> list[Any]:
    """What each process has, in the order of their ranks; only the first process' list is filled."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.gather_object(value, found if is_first() else None, group=_Together.group)
    return found


def largest(*values: int) -> list[int]:
    """Each number's largest over all processes; no wait for a GPU."""
    if count() == 1:
        return list(values)
    found = torch.tensor(values)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=_Together.group)
    return found.tolist()


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in place on the device."""
    if count() > 1:
        dist.all_reduce(value)
    return value


def share_of(rows: np.ndarray, context: int) -> np.ndarray:
    """The rows of a step that are this process' and its context's: consecutive ones, as many for everybody."""
    size, place = len(rows) * context // count(), rank() // context
    return rows[place * size : (place + 1) * size]


# ---- device and memory ----------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """`train.device` as a device; "auto" is the GPU where there is one, of several processes each one's own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    require(device.type in ("cuda", "cpu"), f"train.device = {name!r}: expected cuda, cpu or auto")
    is_gpu = device.type == "cuda"
    require(not is_gpu or torch.cuda.is_available(), f"train.device = {name!r}: PyTorch sees no CUDA GPU here")
    count = torch.cuda.device_count() if is_gpu else 1
    if is_gpu and is_worker():
        many = int(os.environ["LOCAL_WORLD_SIZE"])
        require(device.index is None, f"train.device = {name!r}: {many} processes have a GPU each, set it to cuda")
        require(many <= count, f"{many} processes, and {count} GPUs here: start one for each GPU")
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    require((device.index or 0) < count, f"train.device = {name!r}: there are {count}, counted from 0")
    return device


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_bytes_free() -> int:
    """Bytes of host memory that each process of this machine can still have; 0 if the system does not say."""
    try:
        named = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(named["MemAvailable"].split()[0]) << 10
        with contextlib.suppress(OSError, ValueError, KeyError):  # a container's limit
            most, now = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
            free = min(free, most - now + int(cached))
    except (OSError, ValueError, KeyError):
        return 0
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a request the loop honours between two steps; a second Ctrl-C insists."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def agreed(self) -> int | None:
        """The signal that some process was sent, the same on all of them."""
        return largest(self.signum or 0)[0] or None

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        if signum == signal.SIGINT and rank() == 0:  # at once, though the step may take a minute
            with contextlib.suppress(OSError):
                os.write(2, b"\novercoat: stopping after this step and a checkpoint; Ctrl-C again ends it at once\n")
        _Together.is_ended |= signum == signal.SIGTERM
