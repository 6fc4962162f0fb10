"""Optional packages are imported where they are needed; what goes wrong there is one clear sentence."""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_worker() -> bool:
    """True if torchrun started this process beside others, joined or not; False if WORLD_SIZE is no number."""
    size = os.environ.get("WORLD_SIZE", "1").strip()
    return size.isdecimal() and int(size[:9]) > 1 and "RANK" in os.environ


def number_in_environment(name: str, default: int | None, least: int = 0) -> int:
    """A whole number that a launcher has set. ValueError: it is none, is below `least`, or is missing and has no
    default."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not (text.isdecimal() and least <= int(text[:9]) and len(text) < 10):
        raise ValueError(
            f"{name} = {text!r} in the environment: expected a number from {least} on, as torchrun sets it"
        )
    return int(text)


def check_environment() -> None:
    """ValueError unless the environment of a process among several says which one it is, as torchrun's does."""
    size, rank = number_in_environment("WORLD_SIZE", None, 1), number_in_environment("RANK", None)
    local_size, local_rank = (
        number_in_environment("LOCAL_WORLD_SIZE", size, 1),
        number_in_environment("LOCAL_RANK", rank),
    )
    number_in_environment("MASTER_PORT", None)
    for name, place, many in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if place >= many:
            raise ValueError(f"{name} = {place} in the environment, of {many} processes: they are counted from 0")


# A terminal obeys them, or shows text in another order than it is in.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text of a user or a file with its control characters escaped, but for tabs and ends of lines."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, which `pip install 'overcoat[extra]'` brings, for `purpose`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there; something it needs is broken, and that message says more
        raise ValueError(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install 'overcoat[{extra}]'"
        ) from error


def check_exists(name: str) -> None:
    """ValueError: `name` can only be a path, and nothing is there. Hugging Face would be asked for it for a minute.

    A folder beside runs is meant as one; beside models it may as well be the name of another model of theirs.
    """
    if "://" in name or name.startswith("buckets/"):  # what datasets reads from elsewhere
        return
    is_path = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    folder = os.path.dirname(name)
    beside = [] if is_path or not folder else glob.glob(os.path.join(glob.escape(folder), "*", "config.toml"))
    if not os.path.exists(name) and (is_path or beside):
        elsewhere = f"; {beside[0]} is a run: for a hub name start where no folder {folder} is" if beside else ""
        raise ValueError(f"{name}: no such file or folder{elsewhere}")


def load_pretrained(auto: str, what: str, name: str, trust_remote_code: bool, **options: Any) -> Any:
    """`transformers.<auto>.from_pretrained(name)`, which is `what`: the one door for what comes from Hugging Face.

    A folder may bring Python code of its own (`auto_map`). transformers asks on standard input whether to run it unless
    told otherwise, and `yes |` says yes. Here it is told: it runs with `trust_remote_code` only. ValueError: there is
    none, it is broken, or it needs such code.
    """
    transformers = load_extra("transformers", "hf", f"loading {what}")
    try:
        check_exists(name)
        return getattr(transformers, auto).from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except RuntimeError as error:  # out of memory is for the caller
        if "out of memory" in str(error).lower():
            raise
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error
    except Exception as error:  # of any kind: the files of a folder are read by four libraries
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"cannot load {what} {name!r}: it needs Python code of its own (auto_map), which only "
                "model.trust_remote_code=true of overcoat train runs; read that code first"
            ) from error
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around large imports: their objects stay, and looking for garbage among them takes a third of the time. A
    decorator, too, of a short command, whose objects the end of the process need not look at either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def drawing(path: Path, extra: str, purpose: str, width: float, height: float, **grid: Any) -> Iterator[Any]:
    """The axes of an image (inches), which is written at the end; grid: of `pyplot.subplots`, for several. ValueError:
    matplotlib is not installed."""
    load_extra("matplotlib", extra, purpose).use("Agg")
    pyplot = load_extra("matplotlib.pyplot", extra, purpose)
    figure, axes = pyplot.subplots(figsize=(width, height), dpi=120, **grid)
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def one_line(text: str) -> str:
    """Return a text as one line without control characters: line breaks become spaces."""
    return printable(" ".join(text.splitlines()))


def fit_terminal(text: str, columns: int | None = None) -> str:
    """Return a text whose lines fit a terminal, cut between words; as it is where output goes elsewhere."""
    if columns is None:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if not columns:
        return text
    cut = functools.partial(textwrap.wrap, width=columns, subsequent_indent="    ", break_long_words=False)
    lines = [cut(line, replace_whitespace=False, break_on_hyphens=False) or [""] for line in text.split("\n")]
    return "\n".join(piece for pieces in lines for piece in pieces)


def reason(error: BaseException) -> str:
    """Why, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, KeyError):  # whose text is a key alone
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 300, placeholder=" ...")
