"""Runs of several processes (gloo), forked like all others, which stand in for torchrun's workers.

    killed   two processes; one is killed at an event of the file system, a step or a moment of its own, the other ends
             by itself or by SIGTERM, as torchrun tells it; resumed in 1, 2, 3 or 6, the end is that of the unbroken run
    a row    a token that no vocabulary has, in one process; or a line of a streamed file that is no JSON
    memory   one process runs out of it where no leaner fit is left
    early    one process dies after its first step, before anything is shared for the first checkpoint

What goes wrong is said once, with its rank and reason.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from overcoat import cli
from overcoat.train import loop, process
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.metrics import read_metrics
from tests.attack.events import Events, receive
from tests.attack.harness import SECONDS, Child, Ended, Finding, Ground, bits

# One row in a forward pass: FP8 scales are those of that row, in however many processes.
SIZES = ["train.batch_size=1", "train.accumulation=6", "checkpoint.every=1", "eval.every=4", "data.document_mask=true"]
CLOSE = 1e-3  # losses in another number of processes
Before = Callable[[int], None]  # gets the rank, in its process


def launch(
    many: int,
    arguments: list[str],
    folder: Path,
    before: Before = bool,
    patience: float = 6.0,
    seconds: float = SECONDS,
) -> list[Ended]:
    """The workers' ends, by rank. Once one has failed the others have `patience` seconds before SIGTERM: they may say
    why first (`process.may_report`)."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    torchrun = {"WORLD_SIZE": many, "LOCAL_WORLD_SIZE": many, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def serve() -> int:  # the store outlives the workers
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        signal.pause()
        return int(store.port == 0)

    def work(rank: int) -> int:
        known = {**torchrun, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ |= {name: str(value) for name, value in known.items()}
        before(rank)
        return cli.main(arguments)

    server = Child(serve, folder)
    workers = [Child(functools.partial(work, rank), folder) for rank in range(many)] if many > 1 else []
    workers = workers or [Child(lambda: cli.main(arguments), folder)]
    while not all(worker.ended_within(0.01) for worker in workers):
        gone = [worker for worker in workers if worker.ended_within(0.0)]
        if any(os.waitid(os.P_PID, w.pid, os.WEXITED | os.WNOWAIT).si_status for w in gone):
            begun = time.monotonic()
            if all(w.ended_within(max(0.0, begun + patience - time.monotonic())) for w in workers):
                break
            for worker in workers:
                if not worker.ended_within(0.0):
                    os.kill(worker.pid, signal.SIGTERM)
            break
    ends = [worker.wait(seconds) for worker in workers]
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    return ends


def command(ground: Ground, folder: Path, *words: str) -> list[str]:
    places = [f"train.run_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    return ["train", str(ground.config), *places, *SIZES, *words]


@functools.cache
def reference(ground: Ground) -> Path:
    """An unbroken run of two."""
    folder = ground.folder / "two"
    folder.mkdir()
    ends = launch(2, command(ground, folder), folder)
    assert [ended.status for ended in ends] == [0, 0], ends
    return folder / "run"


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return {(kind, step): row["loss"] for kind in ("train", "eval") for step, row in metrics[kind].items()}


def differs(run_dir: Path, ground: Ground, is_exact: bool) -> str:
    """In what a run that was broken and resumed differs from the unbroken one."""
    whole = reference(ground)
    mine, theirs = losses(run_dir), losses(whole)
    if mine.keys() != theirs.keys():
        return f"it logged {sorted(mine)}"
    far = {key: abs(mine[key] - theirs[key]) for key in mine if abs(mine[key] - theirs[key]) > CLOSE * (not is_exact)}
    if far:
        return f"losses differ: {far}"
    newest = list_checkpoints(whole / "checkpoints")[-1]
    shards = [file.relative_to(whole) for file in newest.glob("shard-*")] if is_exact else []
    for file in [Path("export/model.safetensors"), *shards]:
        own, other = load_file(run_dir / file), load_file(whole / file)
        wrong = [name for name in other if own[name].shape != other[name].shape or not own[name].isfinite().all()]
        if is_exact:
            mine, theirs = bits(own), bits(other)
            wrong = [name for name in theirs if mine.get(name) != theirs[name]]
        if own.keys() != other.keys() or wrong:
            return f"{file} differs in {wrong or sorted(own.keys() ^ other.keys())}"
    return ""


def said_once(ends: list[Ended], *needed: str) -> str:
    """What is wrong with how processes ended of which one had a fault."""
    lines = [line for ended in ends for line in ended.error.split("\n") if line.startswith("overcoat")]
    if any(ended.is_late for ended in ends):
        return f"does not end: {[ended.status for ended in ends]}"
    if any(ended.status == 0 for ended in ends):
        return f"ends as if nothing was wrong: {[ended.status for ended in ends]}"
    if len(lines) != 1 or not all(word in lines[0] for word in needed):
        return f"not one line with {' and '.join(needed)}: {lines}"
    return ""


def processes(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    return [killed, bad_row, out_of_memory, dies_early, killed][index % 5](ground, random, folder)


def killed(ground: Ground, random: random.Random, folder: Path) -> Finding:
    reference(ground)
    victim, moment = random.randrange(2), random.uniform(0.0, 1.5)
    place, signum = (
        random.randrange(1, [150, 16][victim]),
        random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]),
    )
    by = random.choice(["event", "event", "moment"])
    again = random.choice([1, 2, 2, 3, 6])

    def before(rank: int) -> None:
        if rank == victim and by == "event":
            Events(folder, place, receive(signum)).install()
        elif rank == victim:
            pid = os.getpid()
            threading.Timer(moment, lambda: os.kill(pid, signum)).start()

    when = f"event {place}" if by == "event" else f"{moment:.2f} s"
    case = f"rank {victim} of 2 gets {signum.name} at {when}, resumed in {again}"
    ends = launch(2, command(ground, folder), folder, before, patience=0.0 if random.random() < 0.5 else 6.0)
    if any(ended.is_late for ended in ends):
        return case, f"the other does not end: {[ended.status for ended in ends]}"
    if traced := [ended.last_line() for ended in ends if "Traceback (most recent call last)" in ended.error]:
        return case, f"traceback: {traced}"
    ends = launch(again, command(ground, folder), folder)
    if any(ended.status for ended in ends):
        return case, f"the same command: {[(ended.status, ended.last_line()) for ended in ends]}"
    return case, differs(folder / "run", ground, again == 2)


def at_step(step: int, act: Callable[[], None]) -> None:
    take = loop.train_step

    def train_step(state: loop.TrainState, config: loop.Config) -> loop.StepRecord:
        if state.step + 1 == step:
            act()
        return take(state, config)

    loop.train_step = train_step


def bad_row(ground: Ground, random: random.Random, folder: Path) -> Finding:
    victim, step, is_streamed = random.randrange(2), random.choice([1, 3]), random.random() < 0.5
    words, needed = [], [f"rank {victim}"]
    if is_streamed:
        line = '{"text": "alpha beta gamma delta epsilon"}\n'
        (folder / "rows.jsonl").write_text(line * 200 + '{"text": 3\n' + line * 400)
        words = [f"data.files={folder / 'rows.jsonl'}", "data.streaming=true", "train.steps=100", "eval.every=0"]
        needed = ["rank 0", "rows.jsonl"]

    def spoil() -> None:
        share_of = process.share_of
        process.share_of = lambda *of: share_of(*of) * 0 + 10**6

    def before(rank: int) -> None:
        if rank == victim and not is_streamed:
            at_step(step, spoil)

    case = "a streamed line that is no JSON" if is_streamed else f"rank {victim} has an unknown token in step {step}"
    return case, said_once(launch(2, command(ground, folder, *words), folder, before), *needed)


def dies_early(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """What is left ends by itself or by SIGTERM, within a minute, whatever it waits for."""
    victim, signum = random.randrange(2), random.choice([signal.SIGKILL, signal.SIGSEGV])
    patience = random.choice([0.0, 6.0])

    def before(rank: int) -> None:
        if rank == victim:
            forward = random.random() < 0.5
            die = functools.partial(os.kill, os.getpid(), signum)
            if forward:
                loop.summed_loss = lambda *_: die()
            else:
                Events(folder, 1, lambda event: die() if event == "step" else None).install()

    begun = time.monotonic()
    ends = launch(2, command(ground, folder), folder, before, patience, seconds=30.0)
    case = f"rank {victim} of 2 gets {signum.name} in the first step, SIGTERM after {patience} s"
    if any(ended.is_late for ended in ends):
        return case, f"the other does not end in {time.monotonic() - begun:.0f} s: {[ended.status for ended in ends]}"
    said = [line for ended in ends for line in ended.error.split("\n") if line.startswith("overcoat")]
    return case, f"blames something else: {said}" if "[model.config]" in str(said) else ""


def out_of_memory(ground: Ground, random: random.Random, folder: Path) -> Finding:
    victim, step = random.randrange(2), random.choice([1, 3])

    def exhaust() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore lines")

    def before(rank: int) -> None:
        if rank == victim:
            at_step(step, exhaust)

    ends = launch(2, command(ground, folder, "train.on_oom=error"), folder, before)
    return f"rank {victim} runs out of memory in step {step}", said_once(ends, f"rank {victim}", "memory")
