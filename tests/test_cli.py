"""The command line: exit status, messages, the JSON line."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel

from overcoat import cli
from overcoat.train import loop, run
from overcoat.version import VERSION
from tests.nightly import mostly_nightly
from tests.train.runs import names, stop_at

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 128
intermediate_size = 128
num_hidden_layers = 1
num_attention_heads = 2
[tokenizer]
vocab_size = 300
[data]
files = ["{files}"]
sequence_length = 16
held_out = 0.2
[schedule]
warmup_steps = 1
[train]
steps = 3
batch_size = 2
device = "cpu"
tensorboard = false
[sample]
tokens = 0
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(files=tmp_path / "*.txt"))
    return str(path)


def test_train_prints_one_json_line(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", config, "--json", f"train.run_dir={tmp_path / 'run'}", "train.steps=2"]) == 0
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["runs"][0]["steps"] == 2
    assert "held-out loss" in captured.err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            "train CONFIG train.stepz=3",
            2,
            "unknown key train.stepz; did you mean train.steps? (overcoat train --keys l",
        ),
        ("train --json CONFIG train.stepz=3", 2, "unknown key train.stepz"),
        ("train CONFIG train.steps=2 --json train.stepz=3", 2, "unknown key train.stepz"),
        ("train CONFIG --jsonn train.steps=2", 2, "unrecognized arguments: --jsonn; keys are set as train.steps=10"),
        ("report run --jsonn", 2, "unrecognized arguments: --jsonn\n"),
        ("train", 2, "needs a CONFIG.toml"),
        ("", 2, "COMMAND"),
        ("--version", 0, VERSION),
        ("train --keys", 0, "optimizer.lr = 0.0003"),
    ],
)
def test_what_is_said_without_training(
    config: str, capsys: pytest.CaptureFixture[str], arguments: str, status: int, said: str
) -> None:
    """Mistakes are one line; options may stand between and before the arguments."""
    try:
        found = cli.main(arguments.replace("CONFIG", config).split())
    except SystemExit as stop:  # argparse
        found = stop.code
    printed = capsys.readouterr()
    assert found == status
    assert said in (printed.err if status else printed.out)
    if "train.stepz" in arguments:
        assert printed.err.startswith("overcoat: ")
        assert printed.err.count("\n") == 1


def test_one_of_several_processes_without_a_number_is_refused(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", config]) == 2
    assert "WORLD_SIZE is above 1, and RANK is not set" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpus", "-1"], ["--max-restarts", "1"]])
def test_a_number_of_processes_that_is_none_is_refused(
    words: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", config, *words]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_diverging_run_is_status_1(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"train.run_dir={tmp_path / 'run'}", "optimizer.lr=1e15", "optimizer.clip=0", "recipe.name=bf16"]
    arguments.append("optimizer.weight_decay=0")
    assert cli.main(["train", config, *arguments, "train.steps=12"]) == 1
    assert "training failed: step" in capsys.readouterr().err
    assert not (tmp_path / "run/checkpoints").exists()
    assert cli.main(["train", config, arguments[0]]) == 0  # corrected, in the same directory
    assert (tmp_path / "run/abandoned-1-metrics.jsonl").exists()


def test_a_missing_extra_names_it(config: str) -> None:
    """Without rich (the extra `hf`), in a process of its own since it must not be imported yet."""
    code = (
        f"import sys; sys.modules['rich'] = None; from overcoat import cli; sys.exit(cli.main(['train', {config!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "overcoat train needs the package 'rich': pip install 'overcoat[hf]'" in done.stderr


# A command's own words and argparse's.
@pytest.mark.parametrize(
    "words", mostly_nightly(["train --keys", "estimate --help", "--version"], ["train --keys", "--version"])
)
def test_a_reader_that_leaves_is_no_error(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`overcoat train --keys | head`: here the other end is closed before the first byte."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it argparse itself passes over the error
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "overcoat", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("where", ["pipe", "full", "closed"])
def test_a_run_goes_on_when_nobody_reads(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """`| head -3`, a log on a full disk, `>&-`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", {"pipe": pipe, "full": full, "closed": None}[where])
        assert cli.main(["train", config, f"train.run_dir={tmp_path / 'run'}", "train.log_every=1"]) == 0
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir()
    assert (tmp_path / "run/results.json").exists()


def test_a_stream_writes_what_its_encoding_has() -> None:
    raw = io.BytesIO()
    stream = cli.LastingStream(io.TextIOWrapper(raw, encoding="ascii"))
    Console(file=stream, width=60).print(Panel("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE}"))  # type: ignore[arg-type]
    assert rb"caf\xe9 \U0001f600" in raw.getvalue()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "RUN: No space left on device; free some space there, then"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied; change its permissions"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: Not a directory; name another path"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n"), "n: File name too long; name another path"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a/b"), "a/b: Is a directory; check that path"),
        (loop.UnreadableDataError("step 3: a.jsonl:7: no text"), "training failed: step 3: a.jsonl:7: no text"),
        (MemoryError("no 9 TiB"), "the host's memory ran out: no 9 TiB"),
        (FloatingPointError("two\nlines\x85of\u2028text"), "training failed: two lines of text"),
    ],
)
def test_what_the_system_refuses_is_one_line_and_status_1(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "run", refuse)
    assert cli.main(["train", config, "train.run_dir=RUN"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"overcoat: {message}")
    assert said.count("\n") == 1


def test_a_resumed_and_stopped_run_says_how_to_go_on(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating train.resume=PATH would go back to PATH; what the message says goes on from the newest."""
    arguments = ["train", config, f"train.run_dir={tmp_path / 'run'}", "checkpoint.every=1"]
    checkpoints = tmp_path / "run/checkpoints"
    again = [*arguments, f"train.resume={checkpoints / 'step-00000001'}"]
    without = " without train.resume (or with train.resume=auto)"
    for step, command, how in ((1, arguments, ""), (2, again, without)):
        with monkeypatch.context() as patch:
            stop_at(step, patch)
            assert cli.main(command) == 128 + signal.SIGTERM
        assert f"step-{step:08d}; the same command{how} continues it" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert f"resuming from {checkpoints / 'step-00000002'}" in capsys.readouterr().out
    assert names(checkpoints) == ["step-00000002", "step-00000003"]


def test_help_needs_no_pytorch_and_answers_at_once() -> None:
    code = (
        "import sys, runpy; sys.argv = ['overcoat', '--help']\n"
        "try: runpy.run_module('overcoat', run_name='__main__')\n"
        "except SystemExit: print('loaded:', sorted({'torch', 'transformers', 'numpy', 'rich'} & {*sys.modules}))\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert "predict the memory of training" in done.stdout
    assert done.stdout.endswith("loaded: []\n"), done.stderr
    assert seconds < 0.5  # 0.05 on an idle machine


@pytest.mark.parametrize("asked", [None, "info"])
def test_the_hub_does_not_say_that_it_tries_again(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked to."""
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    if asked:
        monkeypatch.setenv("HF_HUB_VERBOSITY", asked)
    code = (
        "import contextlib, logging; from overcoat.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "import huggingface_hub.utils._http\n"
        "print(logging.getLogger('huggingface_hub.utils._http').isEnabledFor(logging.WARNING))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-1] == str(asked is not None), done.stderr


@pytest.mark.nightly
def test_an_estimate_is_there_within_seconds() -> None:
    started = time.perf_counter()
    words = "estimate --model llama-2-7b --batch 4 --seq 2048 --gpu-memory 80GB"
    done = subprocess.run([sys.executable, "-m", "overcoat", *words.split()], capture_output=True, text=True)
    assert done.stdout.startswith("6.738 B parameters, batch 4 x 2048 tokens\n"), done.stderr
    assert done.stdout.endswith("\nBatch 4 fits into 74.51 GiB as asked.\n")
    assert done.returncode == 0
    assert time.perf_counter() - started < 10.0  # 4 on an idle machine
