"""One process of a run: its device, its memory, its rank, what the processes agree on, how it is told to stop.

torchrun starts the processes of a run and says by the environment which one each is (RANK, WORLD_SIZE, LOCAL_RANK).
All that differs between processes is in this module. With one process nothing is sent. The first process writes the
files of a run. A process that fails prints why (`may_report`) and exits (`leave`); the launcher then ends the others.
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
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from overcoat.extras import check_environment, is_worker, number_in_environment
from overcoat.pinned_memory import bytes_free
from overcoat.train.config import require

T = TypeVar("T")
# Timeout of host collectives: others wait while one process tokenizes. An exited process is noticed at once anyway.
PATIENCE = datetime.timedelta(days=2)
SECONDS_TO_MEET = 600.0  # until all processes have connected
SECONDS_TO_ANSWER = 300.0  # to a signal, for a process that waits for another; then it ends without a checkpoint
# What ends a run after a checkpoint. Slurm sends SIGUSR1 before a time limit or pre-emption (--signal=USR1@300).
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
CPU = torch.device("cpu")
SECONDS_FOR_THE_CAUSE = 3.0  # that the first failing process and the launcher get to report


class _Groups:
    """State of a run of several processes: one group for host messages, one for the checkpoint thread, and a store;
    None in a run of one."""

    # True after a signal to stop; if other processes are gone, too, the launcher sent it and reports why.
    is_ended = False
    group: dist.ProcessGroup | None = None
    writing: dist.ProcessGroup | None = None
    store: dist.Store | None = None


def count() -> int:
    """Return the number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def machines() -> int:
    """Return the number of machines, from torchrun's LOCAL_WORLD_SIZE."""
    return count() // number_in_environment("LOCAL_WORLD_SIZE", count(), 1)


def is_first() -> bool:
    """True if this process writes the files and the lines of the run."""
    return rank() == 0


def is_restarted() -> bool:
    """True if torchrun started the processes again (`--max-restarts`) after one of them failed."""
    return number_in_environment("TORCHELASTIC_RESTART_COUNT", 0) > 0


@contextlib.contextmanager
def joined(device_name: str) -> Iterator[None]:
    """Connect the processes that torchrun started, for the duration of the context: NCCL between GPUs, gloo between
    CPUs."""
    if not is_worker():
        require(
            number_in_environment("WORLD_SIZE", 1) == 1,
            "WORLD_SIZE is above 1, and RANK is not set: start several processes with --gpus N, or torchrun",
        )
        yield
        return
    check_environment()
    device = choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, place, size = next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=SECONDS_TO_MEET))))
    # torchrun's store outlives an attempt, with the addresses of its processes.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _Groups.store = dist.PrefixStore(f"overcoat/{attempt}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=_Groups.store, rank=place, world_size=size
    )
    # All groups are made here: a process that dies later cannot leave the others waiting for its address.
    _Groups.group, _Groups.writing = (
        dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=SECONDS_TO_MEET)) for _ in range(2)
    )
    for group in (_Groups.group, _Groups.writing):
        dist.barrier(group=group)  # gloo connects at the first use
        group._get_backend(CPU)._set_default_timeout(PATIENCE)
    yield
    wait_for_all()  # one that leaves early takes its connections from the others


def leave(status: int) -> int:
    """Return the exit status; in a run of several processes exit at once. Their communicators may hang waiting for
    processes that are gone, and PyTorch 2.13 may abort in gloo's shutdown."""
    if is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def may_report(text: str, is_cause: bool = True) -> bool:
    """True if this process prints why the run fails: the first one with a cause. An error that follows from another
    process' exit (is_cause=False) is printed only if no cause is reported within SECONDS_FOR_THE_CAUSE. torchrun
    receives the text, too."""
    if not is_worker():
        return True
    if not is_cause:
        if _Groups.is_ended:
            if os.environ.get("LOCAL_RANK") == "0":  # who sent the signal may not know of it
                print(f"{text} (after a signal to stop)", file=sys.stderr)
            return False
        time.sleep(SECONDS_FOR_THE_CAUSE)
    if not _is_first_to_report(is_cause):
        return False
    get_error_handler().record_exception(RuntimeError(text))
    return True


def _is_first_to_report(is_cause: bool) -> bool:
    if _Groups.store is None:  # nothing is shared yet, so all that are here have the same to say
        return os.environ.get("LOCAL_RANK", "0") == "0"
    own = os.environ["RANK"]
    try:
        return bool(_Groups.store.compare_set("failed", "", own) == own.encode())
    except (RuntimeError, dist.DistError):  # it went with the process that held it
        return is_cause


def follows_from_another(error: BaseException) -> bool:
    """True if an error, or a cause of it, says that another process is gone."""
    if count() == 1 and not is_worker():
        return False
    words = ("gloo", "NCCL", "Connection", "Socket", "Broken pipe")
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, dist.DistError) or (
            isinstance(found, RuntimeError) and any(word in str(found) for word in words)
        ):
            return True
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def writing_group() -> dist.ProcessGroup | None:
    """Return the process group of the checkpoint thread, None in a run of one; outside of `joined` the first call, in
    all processes, creates it."""
    if count() > 1 and _Groups.writing is None:
        _Groups.writing = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _Groups.writing


def wait_for_writers() -> None:
    """Wait until all processes' checkpoint threads are here."""
    _meet(_Groups.writing)


def _meet(group: dist.ProcessGroup | None) -> None:
    if count() > 1:
        _finish(dist.barrier(group=group, async_op=True))


def _finish(work: Any) -> None:
    """Wait for a collective in Python, so that signals are handled. RuntimeError: a process is gone."""
    pause = 1e-5
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    work.wait()


# ---- agreement ------------------------------------------------------------------------------------------------------


def wait_for_all() -> None:
    """Wait until all processes are here."""
    _meet(_Groups.group)


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """Run the context in the first process, then in the others, which read what it fetched or wrote."""
    if not is_first():
        wait_for_all()
    yield
    if is_first():
        wait_for_all()


def share(make: Callable[[], T]) -> T:
    """Return the first process' `make()`; the others do not call it and receive the pickled result."""
    if count() == 1:
        return make()
    held: list[Any] = [make() if is_first() else None]
    wait_for_all()
    dist.broadcast_object_list(held, src=0, group=_Groups.group)
    return held[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all processes by rank, in the first process; other processes get a list of None."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    wait_for_all()
    dist.gather_object(value, found if is_first() else None, group=_Groups.group)
    return found


def largest(*values: int) -> list[int]:
    """Return the maximum of each number over all processes, without a GPU sync."""
    if count() == 1:
        return list(values)
    found = torch.tensor(values)
    _finish(dist.all_reduce(found, dist.ReduceOp.MAX, group=_Groups.group, async_op=True))
    return found.tolist()


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes, in place on the device."""
    if count() > 1:
        dist.all_reduce(value)
    return value


def share_of(rows: np.ndarray, context: int) -> np.ndarray:
    """Return this process' consecutive rows of a step; processes of one context get the same rows."""
    size, place = len(rows) * context // count(), rank() // context
    return rows[place * size : (place + 1) * size]


# ---- device and memory ----------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """Return `train.device` as a device; "auto" is a GPU if there is one, and each of several processes gets its own.
    ValueError: there is no such device."""
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
        many = number_in_environment("LOCAL_WORLD_SIZE", None, 1)
        require(device.index is None, f"train.device = {name!r}: {many} processes have a GPU each, set it to cuda")
        require(many <= count, f"{many} processes, and {count} GPUs here: start one for each GPU")
        return torch.device("cuda", number_in_environment("LOCAL_RANK", None))
    require((device.index or 0) < count, f"train.device = {name!r}: there are {count}, counted from 0")
    return device


def memory_of(device: torch.device) -> int:
    """Return the total bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_bytes_free() -> int:
    """Return the bytes of host memory that each process on this machine can still allocate; 0 if unknown."""
    return bytes_free() // number_in_environment("LOCAL_WORLD_SIZE", 1, 1)


class StopRequest:
    """Turns STOPPING signals and the first Ctrl-C into a request that the loop handles between two steps; a second
    Ctrl-C raises KeyboardInterrupt.

    Python handles a signal only after native code returns, which a collective with a missing process never does. With
    several processes, one that has not handled a signal after SECONDS_TO_ANSWER exits.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (*STOPPING, signal.SIGINT):
                # nohup has a run ignore SIGHUP.
                if signal.getsignal(signum) != signal.SIG_IGN or signum == signal.SIGINT:
                    self._previous[signum] = signal.signal(signum, self._handle)
            if is_worker():
                self._pipe = os.pipe()
                os.set_blocking(self._pipe[1], False)
                signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
                threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # which ends the thread

    def _watch(self, pipe: int) -> None:
        """Exit if the main thread does not handle a signal in time; signal numbers arrive in the pipe."""
        with open(pipe, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] not in self._previous:
                    continue
                deadline = time.monotonic() + SECONDS_TO_ANSWER
                while self.signum is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                if self.signum is None:
                    name = signal.Signals(number[0]).name
                    print(f"overcoat: rank {rank()}: {name}: no checkpoint, it waits for a process", file=sys.stderr)
                    leave(128 + number[0])

    def agreed(self) -> int | None:
        """Return the signal that any process received, the same in all of them; None without one."""
        return largest(self.signum or 0)[0] or None

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        if signum == signal.SIGINT and rank() == 0:  # at once, though the step may take a minute
            with contextlib.suppress(OSError):
                os.write(2, b"\novercoat: stopping after this step and a checkpoint; Ctrl-C again ends it at once\n")
        _Groups.is_ended |= signum in STOPPING
