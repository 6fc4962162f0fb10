"""What all attacks share: a run of a third of a second, forked children that run it, and the verdict.

A command must end done, with the right numbers; or in one line of error, with an exit status that is not 0, nothing
destroyed, and the corrected command works. `Ground` runs the tiny training once in this process: that is the reference,
and it imports and warms up all that the forked children inherit. No thread is started here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from overcoat import cli
from overcoat.train import summary
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.metrics import read_metrics

SECONDS = 180.0  # a command takes 0.3, lm-eval's list 5; a limit for a machine that does other things, too
MORE_MEMORY = 4 << 30
PIPE_BYTES = 1 << 20
STRIDE = 7919  # number * STRIDE % n: n numbers take each place once (a prime), neighbours far apart
Finding = tuple[str, str]  # a case, and what is wrong with how it ended: "" if nothing
# Flat, so that a mutation replaces one line.
BASE: dict[str, str] = {
    "model.config.model_type": '"llama"', "model.config.hidden_size": "64", "model.config.intermediate_size": "64",
    "model.config.num_hidden_layers": "1", "model.config.num_attention_heads": "2",
    "model.config.num_key_value_heads": "1", "model.config.tie_word_embeddings": "true",
    "tokenizer.vocab_size": "280", "data.files": '["FOLDER/text/*.txt"]', "data.cache_dir": '"FOLDER/cache"',
    "data.sequence_length": "16", "data.held_out": "0.2", "schedule.warmup_steps": "1",
    "train.steps": "4", "train.batch_size": "2", "train.log_every": "1", "train.tensorboard": "false",
    "train.device": '"cpu"', "eval.every": "2", "eval.rows": "4", "checkpoint.every": "2", "sample.tokens": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status or minus the signal's number; whether it was late and got SIGTERM."""

    status: int
    is_late: bool
    output: str
    error: str

    def fault(self, *expected: int) -> str:
        """What is wrong with it, "" if nothing; `expected` statuses need no line of error."""
        by = signal.Signals(-self.status).name if self.status < 0 else ""
        if self.is_late and by:
            return f"does not end within {SECONDS:.0f} s; SIGTERM then leads to {by}"
        if "Traceback (most recent call last)" in self.error:
            return "traceback: " + self.last_line()
        if by or self.status in (0, *expected):
            return "" if self.status in (0, *expected) else f"dies of {by}"
        lines = [line for line in self.error.split("\n") if line.strip()]
        said = [line for line in lines if line.startswith("overcoat")]
        return "" if said and said == lines[-1:] else f"exit status {self.status}, not one line of error: {lines[-3:]}"

    def last_line(self) -> str:
        """The error, in one line."""
        lines = [line for line in self.error.split("\n") if line.strip() and not line.startswith(" ")]
        return lines[-1][:1000] if lines else ""


class Child:
    """A function in a forked process, its output in pipes; what it returns is its exit status."""

    def __init__(self, work: Callable[[], int], folder: Path, wrong_stdout: str = ""):
        pipes = [os.pipe() for _ in range(2)]
        for _, end in pipes:
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(work, folder, [end for _, end in pipes], wrong_stdout)
        for _, end in pipes:
            os.close(end)
        self._pipes = [begin for begin, _ in pipes]
        self._pidfd = os.pidfd_open(self.pid)

    def ended_within(self, seconds: float) -> bool:
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Its end; after the time limit SIGTERM must end it, as it would a run with many steps."""
        is_late = not self.ended_within(seconds)
        if is_late:
            os.kill(self.pid, signal.SIGTERM)
            if not self.ended_within(seconds):
                os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        for pipe in self._pipes:
            os.set_blocking(pipe, False)  # a child of the child may still hold the other end
        texts = [(os.fdopen(pipe, "rb").read() or b"").decode(errors="replace") for pipe in self._pipes]
        return Ended(os.waitstatus_to_exitcode(status), is_late, *texts)


def _be_child(work: Callable[[], int], folder: Path, out: list[int], wrong_stdout: str) -> None:
    status = 1
    try:
        os.dup2(os.open("/dev/full", os.O_WRONLY) if wrong_stdout == "full" else out[0], 1)
        os.dup2(out[1], 2)
        if wrong_stdout == "closed":  # a pipe whose reader has gone, as of `| head`
            begin, end = os.pipe()
            os.close(begin)
            os.dup2(end, 1)
        # Not the streams of this process, which pytest may have replaced.
        sys.stdout = os.fdopen(1, "w", encoding="ascii" if wrong_stdout == "ascii" else "utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        os.chdir(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Makes torch's pool anew, which a fork breaks: two threads at once fail ("Invalid thread pool").
        torch.set_num_threads(1)
        status = work()
    except SystemExit as stop:  # argparse
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def toml(values: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in values.items())


class Ground:
    """Text, tokens, a configuration, and the numbers of its unbroken run, in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = {key: value.replace("FOLDER", str(folder)) for key, value in BASE.items()}
        (folder / "text").mkdir(parents=True)
        generator = random.Random(0)
        words = ["alpha", "beta", "gamma", "delta", "return", "import", "x = 1", "(", ")", "print"]
        for number in range(12):
            text = f"file {number} " + " ".join(generator.choices(words, k=40))
            (folder / "text" / f"{number:02d}.txt").write_text(text)
        self.config = folder / "base.toml"
        self.config.write_text(toml(self.base))
        with (folder / "reference.log").open("w") as log, contextlib.redirect_stdout(log):
            status = cli.main(["train", str(self.config), f"train.run_dir={folder / 'reference'}"])
        assert status == 0, (folder / "reference.log").read_text()
        self.numbers = numbers(folder / "reference")
        # Drawing takes as long as all else; the children write the file alone.
        summary.plot_losses = lambda _results, path: path.write_bytes(b"x" * 20_000)
        gc.collect()
        gc.freeze()  # the run asks for a collection, which need not look at all that was imported

    def command(self, folder: Path, name: str = "run") -> list[str]:
        """A run in `folder` that also tokenizes."""
        return ["train", str(self.config), f"train.run_dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]

    def wrong(self, folder: Path, name: str = "run", arguments: list[str] | None = None) -> str:
        """Run the command (again); "" if it ends with the numbers of the unbroken run, else what it does instead."""
        ended = start(arguments or self.command(folder, name), self.folder).wait()
        if ended.status or ended.fault():
            return f"the same command: {ended.fault() or ended.last_line()}"
        changed = self.changed(folder / name)
        return f"the same command ends with other {' and '.join(changed)} than the unbroken run" if changed else ""

    def changed(self, run_dir: Path) -> list[str]:
        """In what the numbers of a run differ from those of the unbroken run."""
        found = numbers(run_dir)
        return [key for key in self.numbers if found[key] != self.numbers[key]]


SHARD = "shard-00000-00000.safetensors"  # all tensors of one process' checkpoint


def start(arguments: list[str], folder: Path, before: Callable[[], None] = bool, wrong_stdout: str = "") -> Child:
    """`overcoat ARGUMENTS` from `folder`; `before` runs in the child first."""
    return Child(lambda: before() or cli.main(arguments), folder, wrong_stdout)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: (str(tensor.dtype), tensor.flatten().view(torch.uint8).tolist()) for key, tensor in tensors.items()}


def numbers(run_dir: Path) -> dict[str, Any]:
    """All that a run has computed: what it logged, its weights, its optimizer's state."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    newest = list_checkpoints(run_dir / "checkpoints")[-1]
    saved = load_file(newest / SHARD)
    state = {key: saved.pop(key) for key in sorted(saved) if key.startswith("optimizer/")}
    return {
        "losses": {step: (row["loss"], row["lr"], row["gradient_norm"]) for step, row in metrics["train"].items()},
        "evaluations": {step: row["loss"] for step, row in metrics["eval"].items()},
        "weights": (run_dir / "export/model.safetensors").read_bytes(),
        "checkpoints": [newest.name, bits(saved)],
        "optimizer state": bits(state),
    }  # fmt: skip
