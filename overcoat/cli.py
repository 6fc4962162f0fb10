"""The `overcoat` command.

    overcoat train CONFIG.toml [section.key=value ...]    train, resume or fine-tune, configured by the file
    overcoat train CONFIG.toml --gpus 8                   the same on several GPUs, as under torchrun
    overcoat train --keys                                 every key with its default and meaning
    overcoat estimate --model llama-2-7b --batch 4        memory and time of a training step, without a GPU
    overcoat eval runs/demo --text FILE --tasks paper     perplexity and tasks of trained models, side by side
    overcoat export runs/demo --format fp8                a trained model for vLLM
    overcoat init new.toml --model NAME --data FILE       a configuration that fits the GPU
    overcoat doctor                                       what this machine can train, and how fast
    overcoat report runs/demo                             one or several runs as an HTML page

Exit status: 0 done; 2 an invalid command or configuration, nothing done; 1 training failed, or a system error (disk
full, permissions); 130, 143, 129 and 138 stopped by Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 after writing a checkpoint (128
plus the signal's number, so that a script can tell a stopped run from a finished one). Every status but 0 prints
one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from overcoat.extras import importing, is_worker, one_line, printable
from overcoat.version import VERSION

# Commands besides `train`. Their options are in overcoat/COMMAND/command.py, imported late: PyTorch takes seconds.
COMMANDS = {
    "doctor": "what this machine can train, and how fast",
    "estimate": "predict the memory of training, without a GPU",
    "eval": "perplexity and tasks of trained models, side by side",
    "export": "write a model for an inference engine, in FP8 or BF16",
    "init": "write a configuration that fits the GPU",
    "report": "one or several runs as an HTML page",
}

# Remedies for system errors of any command; the same command continues from the newest checkpoint.
_SPACE = "free some space there, then the same command goes on"
_PLACE = "name another path"
_ACCESS = "change its permissions or name another path, then the same command goes on"
REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO), _SPACE),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP), _PLACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ACCESS),
}


# Messages of PyTorch and Python, in errors of other types, when an allocation or a thread is refused.
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "can't start new thread")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after help and errors; flushes first, so that a closed pipe or a full disk is reported in one line."""
        super().exit(_status_of(argparse.Namespace(function=lambda _: status)), message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    # By default PyTorch's CPU threads spin while waiting, which makes a run up to 20 times slower next to other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Without a network the hub library logs six retries before our error message.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    parser = _Parser(prog="overcoat", description="Train large models in FP8 (COAT).")
    parser.add_argument("--version", action="version", version=f"overcoat {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train_parser(commands)
    words = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            try:
                with importing():
                    module = importlib.import_module(f"overcoat.{name}.command")
            except ModuleNotFoundError as error:  # installed without what it requires
                if str(error.name).startswith("overcoat"):
                    raise
                missing = f"the package {error.name!r}, which is missing"
                return _fail(2, f"overcoat {name} needs {missing}: pip install 'overcoat[hf]'")
            module.add_arguments(command)
    # argparse stops taking positionals at the first option after one; later ones are returned as unknown.
    parsed, rest = parser.parse_known_args(words)
    parsed.argv, parsed.read_config = words, read_config
    takes_rest = hasattr(parsed, "overrides")
    if unknown := [argument for argument in rest if argument.startswith("-") or not takes_rest]:
        hint = "; keys are set as train.steps=10 (overcoat train --keys lists all)" if takes_rest else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if takes_rest:
        parsed.overrides += rest
    if is_worker():
        from overcoat.train import process

        return process.leave(_status_of(parsed))
    status = _status_of(parsed)
    if arguments is None and parsed.command == "estimate":
        os._exit(status)  # everything is written; Python's own exit takes a quarter of a second
    return status


def _status_of(parsed: argparse.Namespace) -> int:
    """Run a command and return its exit status; report errors in one line."""
    try:
        status = int(parsed.function(parsed))
        if sys.stdout is not None:
            sys.stdout.flush()  # else a full disk shows only when Python exits
        return status
    except ValueError as error:
        if is_worker() and _follows(error):
            return _fail(1, str(error), error)
        return _fail(2, str(error))
    except FloatingPointError as error:
        return _fail(1, f"training failed: {error}")
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 0  # `| head -1` closed the pipe
        place = f"{error.filename}: " if error.filename else ""
        return _fail(1, f"{place}{error.strerror or error}; {REMEDIES.get(error.errno, 'check that path')}")
    except MemoryError as error:
        return _fail(1, _memory(error))
    except RecursionError:
        return _fail(2, "what was read is nested too deeply: a row of data, or a template that calls itself")
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except Exception as error:
        if any(text in str(error) for text in NO_MEMORY):
            return _fail(1, _memory(error))
        if not is_worker():
            raise
        return _fail(1, f"{type(error).__name__}: {error}", error)


def _memory(error: BaseException) -> str:
    return f"the host's memory ran out: {str(error) or 'Python could not allocate more'}"


def _follows(error: BaseException) -> bool:
    """True if an error says that another process is gone."""
    from overcoat.train import process

    return process.follows_from_another(error)


def _add_train_parser(commands: Any) -> None:
    train = commands.add_parser("train", help="train, resume or fine-tune a model", description=train_command.__doc__)
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the run's configuration")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it, the last one wins")
    train.add_argument("--keys", action="store_true", help="list every key with its default and meaning, and exit")
    train.add_argument(
        "--json", action="store_true", help="print the results as one JSON line on stdout, all else on stderr"
    )
    train.add_argument("--gpus", type=int, default=0, metavar="N", help="start N processes of this machine, a GPU each")
    train.add_argument("--max-restarts", type=int, default=0, metavar="R", help="with --gpus: start R times anew")
    train.set_defaults(function=train_command)


def train_command(parsed: argparse.Namespace) -> int:
    """Train as configured by a TOML file. The same command again (without train.resume) continues an interrupted
    run."""
    from overcoat.extras import load_extra

    load_extra("rich", "hf", "overcoat train")
    from overcoat.train.configfile import help_text, load_config

    if parsed.keys:
        _write(help_text())
        return 0
    if parsed.config is None:
        raise ValueError("overcoat train needs a CONFIG.toml (overcoat train --keys lists what it may hold)")
    config = load_config(parsed.config, parsed.overrides)
    if parsed.gpus or parsed.max_restarts:
        return _launch(parsed, config)

    # Check the configuration first: importing PyTorch and transformers takes seconds.
    from overcoat.memory import use_expandable_segments
    from overcoat.train import process
    from overcoat.train.console import PrintableConsole
    from overcoat.train.loop import RunStoppedError, UnreadableDataError
    from overcoat.train.metrics import PLAIN
    from overcoat.train.out_of_memory import RESTART, DoesNotFitError, RestartError
    from overcoat.train.run import run
    from overcoat.train.summary import summarize

    use_expandable_segments()
    # A sample may hold characters that the terminal does not have.
    console = PrintableConsole(file=LastingStream(sys.stderr if parsed.json else sys.stdout))  # type: ignore[arg-type]
    # Libraries print, too: DeepSpeed, where it is installed.
    aside = contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext()
    try:
        with aside, process.joined(config.train.device):
            results = run(config, console)
            if process.is_first():
                summary = summarize(results, Path(config.train.run_dir), console)
    except RunStoppedError as stop:
        # With train.resume the same command would go back to that checkpoint and set aside all newer ones.
        again = "" if config.train.resume == "auto" else " without train.resume (or with train.resume=auto)"
        if process.is_first():
            console.print(f"{stop}; the same command{again} continues it", **PLAIN)
        return 128 + stop.signum
    except (DoesNotFitError, UnreadableDataError) as error:
        return _fail(1, f"training failed: {error}")
    except RestartError as error:
        return _fail(RESTART, str(error))
    except OSError as error:
        error.filename = error.filename or config.train.run_dir  # a write names no file
        raise
    if parsed.json and process.is_first():
        _write(json.dumps(summary))
    return 0


def _launch(parsed: argparse.Namespace, config: Any) -> int:
    """Run `overcoat train` in --gpus processes."""
    if parsed.gpus < 1 or parsed.max_restarts < 0:
        raise ValueError(
            f"--gpus {parsed.gpus} --max-restarts {parsed.max_restarts}: a number of processes, at least 1"
        )
    if is_worker():
        raise ValueError(f"--gpus {parsed.gpus}: torchrun has started this process, leave --gpus out")
    from overcoat.train.launch import launch

    words = [parsed.config, *parsed.overrides, *(["--json"] if parsed.json else [])]
    status, text = launch(parsed.gpus, parsed.max_restarts, config.train.device, words)
    return _fail(status, text) if text else status


def read_config(path: str, overrides: list[str], memory: int | None, cluster: Any) -> Any:
    """Return the arguments of `overcoat estimate --config`."""
    from overcoat.train.batch_plan import training
    from overcoat.train.configfile import load_config

    return training(load_config(path, overrides), memory, cluster)


class LastingStream:
    """A text stream that never raises: neither when its reader is gone (`| head`, a closed terminal, a full disk), nor
    at characters that its encoding lacks."""

    def __init__(self, stream: TextIO | None):
        # None: closed before this process began
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            _write_nowhere(self.stream)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _reader_left() -> bool:
    """True if a broken pipe is standard output's, which is then closed."""
    try:
        print(flush=True)
    except BrokenPipeError:
        _write_nowhere(sys.stdout)
        return True
    return False


def _write_nowhere(stream: TextIO) -> None:
    """Redirect a stream to nowhere; otherwise Python would write its buffer again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(text: str) -> None:
    LastingStream(sys.stdout).write(f"{text}\n")


def _fail(status: int, text: str, error: Exception | None = None) -> int:
    """Print the reason of a failure in one line and return the exit status. With several processes only one prints.

    error: an unexpected exception, whose traceback is printed first.
    """
    if is_worker():
        from overcoat.train import process

        is_cause = error is None or not _follows(error)
        text = f"rank {os.environ['RANK']}: {text}"
        if not process.may_report(text, is_cause):
            return status
        if error is not None and is_cause:
            traceback.print_exception(error)
    LastingStream(sys.stderr).write(f"overcoat: {one_line(text)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
