"""What the claims about speed, memory and correctness rest on, measured anew in one call, within a given time.

    python -m benchmarks.evidence --minutes 9               all jobs, on all GPUs of this machine
    python -m benchmarks.evidence --only suite racecheck    jobs with such a word in the name; =WORD: so named
    python -m benchmarks.evidence --list                    what there is, and how long it takes on an H200

First the jobs that time the host, one after the other with the machine to themselves; then the others, one on each GPU
with its share of the cores. In the order of `JOBS`: the earlier, the more rests on it. A job begins only if it should
end in time, and what has not ended by then is killed. Each writes its rows as it does when called alone, to --out, and
what it prints to --logs. At the end it is said what has ended, with which status, and what has not begun; the exit
status is 0 if all jobs ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import RESULTS
from overcoat.bench.rows import commit

ROOT = Path(__file__).parents[1]
# Seconds between a job's own end and the one that it is given: to begin, and to write its rows.
MARGIN = 30


class Job(NamedTuple):
    """A module to run.

    Attributes:
        command: what `python -m` is given; {rows} is the folder for rows, {left} the seconds in which to write them,
            {soon} the same with a minute for what is under way, {cores} how many cores the job has.
        seconds: how long it takes on an H200, or how much is worth while for what stops by itself at {left}.
        alone: whether it times the host, so that nothing else may run.
    """

    name: str
    command: str
    seconds: int
    alone: bool = False


# All contestants of `overcoat bench layer`, peers among them; seconds by shape.
SHAPES = {
    "7b-s2048": 130,
    "1b-s2048": 110,
    "7b-s4096": 150,
    "1b-s4096": 120,
    "llama3-8b": 130,
    "qwen2.5-7b": 130,
    "13b": 130,
    "30b": 130,
}
_TURNS = "benchmarks.turns --out {rows}/turns.jsonl"
_SANITIZER = "benchmarks.sanitizer --out {rows}/sanitizer.jsonl --deadline {left} --processes {cores} --tests 6 --tools"

JOBS = [
    Job("turns", f"{_TURNS} --turns 12 --only =eager =torch.compile =leanest '=leanest, torch.compile'", 65, True),
    Job("turns any number", f"{_TURNS} --dynamic --turns 16 --only =eager =torch.compile", 75, True),
    Job("turns 7b", f"{_TURNS} --shapes 7b-s2048 --turns 3 --only =eager =torch.compile", 30, True),
    Job("suite", "benchmarks.suite --out {rows}/suite.jsonl --processes {cores}", 200),
    *(
        Job(
            f"layer {shape}",
            f"overcoat.cli bench layer --shapes {shape} --json {{rows}}/layer.jsonl --timeout 60",
            seconds,
        )
        for shape, seconds in SHAPES.items()
    ),
    Job("kernels", "overcoat.cli bench kernels --json {rows}/kernels.jsonl", 60),
    Job("racecheck", f"{_SANITIZER} racecheck", 200),
    Job("memcheck", f"{_SANITIZER} memcheck", 200),
    Job("counters", "benchmarks.counters --out {rows}/counters.jsonl --timeout {soon}", 150),
]


class Session:
    """One call: what is left of its time and of its jobs, and how those that began have ended."""

    def __init__(self, jobs: list[Job], seconds: float, rows: Path, logs: Path) -> None:
        self.start, self.seconds, self.rows, self.logs = time.monotonic(), seconds, rows, logs
        self.waiting = list(jobs)
        self.ended: dict[str, str] = {}
        self._running: set[int] = set()
        self.commit = commit()  # before there are rows, which change the checkout
        self._lock = threading.Lock()
        for folder in (rows, logs):
            folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds until everything has to have ended."""
        return self.seconds - (time.monotonic() - self.start)

    def take(self, alone: bool) -> Job | None:
        """The first job of those left that is to run `alone` or not, and should end in time."""
        with self._lock:
            for job in self.waiting:
                if job.alone == alone and job.seconds <= self.left():
                    self.waiting.remove(job)
                    return job
            return None

    def work(self, gpu: str, cores: set[int], alone: bool = False) -> None:
        """Run such jobs one after the other on a GPU and cores, as long as there are any that fit."""
        while (job := self.take(alone)) is not None:
            self._say(f"begins on GPU {gpu}: {job.name}")
            self.ended[job.name] = self._run(job, gpu, cores)
            self._say(f"{self.ended[job.name]}: {job.name}")

    def _run(self, job: Job, gpu: str, cores: set[int]) -> str:
        begin, left = time.monotonic(), self.left()
        fields = {
            "rows": self.rows.resolve(),
            "left": max(int(left) - MARGIN, 1),
            "soon": max(int(left) - MARGIN - 60, 1),
            "cores": len(cores),
        }
        command = [sys.executable, "-m", *(word.format(**fields) for word in shlex.split(job.command))]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpu,
            "PYTHONUNBUFFERED": "1",
            "OVERCOAT_COMMIT": self.commit,
        }
        with open(self.logs / f"{job.name.replace(' ', '-')}.log", "w") as log:
            with self._lock:  # `stop` kills what has begun, and nothing begins after it
                if self.left() <= 0:
                    return "not begun"
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running.add(process.pid)
            os.sched_setaffinity(process.pid, cores)
            try:
                status = f"exit {process.wait(left)}"
            except subprocess.TimeoutExpired:
                status = "cut off"
            finally:
                _kill(process.pid)  # what it may have started and left
                with self._lock:
                    self._running.discard(process.pid)
                process.wait()
        return f"{status} after {time.monotonic() - begin:.0f} s"

    def stop(self) -> None:
        """Begin no job any more, and kill those that run."""
        with self._lock:
            self.seconds = 0.0
            for group in self._running:
                _kill(group)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)

    def report(self) -> int:
        """Say what became of the jobs; the exit status."""
        for job in self.waiting:
            self.ended[job.name] = "not begun"
        for name, status in self.ended.items():
            print(f"{name:24} {status}")
        return int(not all(status.startswith("exit 0 ") for status in self.ended.values()))


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def shares(cores: set[int], count: int) -> list[set[int]]:
    """The cores in `count` equal parts, neighbours together: a host with two processors has a GPU's at one of them."""
    ordered, size = sorted(cores), max(len(cores) // count, 1)
    return [set(ordered[i * size : (i + 1) * size]) or set(ordered) for i in range(count)]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def chosen(words: list[str]) -> list[Job]:
    """The jobs with one of these words in the name, or that are named =WORD; all without words."""
    names = {word[1:] for word in words if word.startswith("=")}
    parts = [word for word in words if not word.startswith("=")]
    return [job for job in JOBS if not words or job.name in names or any(part in job.name for part in parts)]


def main(argv: list[str] | None = None) -> int:
    """Run the jobs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="when everything has to have ended (default 30)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for rows (default: the results')")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "evidence", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    arguments = parser.parse_args(argv)
    jobs = chosen(arguments.only)
    if not jobs:
        parser.error(f"no job has a name like {' '.join(arguments.only)}: {', '.join(job.name for job in JOBS)}")
    if arguments.list:
        for job in jobs:
            print(f"{job.name:24} {job.seconds:4} s   python -m {job.command}")
        return 0
    gpus = visible_gpus()
    if not gpus:
        parser.error("PyTorch sees no GPU here, and there is nothing to measure without one")
    session = Session(jobs, 60 * arguments.minutes, arguments.out, arguments.logs)
    cores = os.sched_getaffinity(0)
    with ThreadPoolExecutor(len(gpus)) as pool:
        try:
            # Not in this thread, which a signal may interrupt between a job's beginning and its being known.
            pool.submit(session.work, gpus[0], cores, alone=True).result()
            list(pool.map(session.work, gpus, shares(cores, len(gpus))))
        except BaseException:  # from the keyboard, or from who ends this process: the jobs would go on
            session.stop()
            raise
    return session.report()


def program() -> None:
    """`main`, and whoever ends this process ends its jobs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())


if __name__ == "__main__":
    program()
