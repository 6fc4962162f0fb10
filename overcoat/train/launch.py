"""`overcoat train --gpus N`: torchrun's launcher in this process, one worker for each GPU (or CPU process).

Workers run `python -m overcoat train` with the same arguments. A worker that fails prints why (`process.may_report`);
the launcher ends the others, and reports a worker that was killed by a signal. A worker that ran out of memory has
recorded a leaner plan, and all are restarted with it.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from overcoat.train.config import require
from overcoat.train.out_of_memory import RESTART
from overcoat.train.process import choose_device

MOST_RESTARTS = 64  # out of memory; halving the rows of a GPU takes far fewer
SECONDS_TO_STOP = 45  # from SIGTERM on, for the checkpoint; then SIGKILL


def launch(num_workers: int, max_restarts: int, device_name: str, words: Sequence[str]) -> tuple[int, str]:
    """Run `overcoat train WORDS` in `num_workers` processes; restart up to `max_restarts` times from the newest
    checkpoint.

    Returns:
        the exit status, and a message to print ("" if a worker has printed one).
    """
    device = choose_device(device_name)
    if device.type == "cuda":
        here = torch.cuda.device_count()
        require(num_workers <= here, f"--gpus {num_workers}: PyTorch sees {here} GPUs here")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    options = ["--standalone", f"--nproc-per-node={num_workers}", f"--max-restarts={max_restarts}"]
    if "--shutdown-timeout" in torchrun.get_args_parser().format_help():  # not in every release; without it 30 s
        options.append(f"--shutdown-timeout={SECONDS_TO_STOP}")
    if "--signals-to-handle" in torchrun.get_args_parser().format_help():  # else SIGUSR1 ends the launcher alone
        options.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    options += ["-m", "overcoat", "train", *words]
    logging.disable(logging.CRITICAL)  # torchrun's report of what a worker has said in one line
    for _ in range(MOST_RESTARTS):
        try:
            torchrun.run(torchrun.parse_args(options))
            return 0, ""
        except SignalException as error:
            return 128 + int(error.sigval), ""
        except ChildFailedError as error:
            rank, failure = _cause(error.failures)
            if failure.exitcode != RESTART:
                return _explain(rank, failure)
    return 1, f"the run has been started again {MOST_RESTARTS} times, and still runs out of memory"


def _cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return rank and failure of the worker that caused the others to fail: one that reported an error, else the first
    that the launcher did not terminate itself."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        return not os.path.exists(failure.error_file), failure.exitcode == -signal.SIGTERM, failure.timestamp

    return min(failures.items(), key=order)


def _explain(rank: int, failure: ProcessFailure) -> tuple[int, str]:
    """Return the exit status of a failed worker, and a message if a signal killed it."""
    if failure.exitcode >= 0:
        return failure.exitcode, ""
    name = signal.Signals(-failure.exitcode).name
    hint = ", as the system does where the host's memory runs out" if name == "SIGKILL" else ""
    return 1, f"rank {rank} was killed by {name}{hint}; the same command goes on from the newest checkpoint"
