"""Import optional packages and load Hugging Face models, with one clear sentence for each error."""

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
    """True if torchrun started this process with others, connected or not; False if WORLD_SIZE is no number."""
    size = os.environ.get("WORLD_SIZE", "1").strip()
    return size.isdecimal() and int(size[:9]) > 1 and "RANK" in os.environ


def number_in_environment(name: str, default: int | None, least: int = 0) -> int:
    """Return a whole number from the environment. ValueError: no number, below `least`, or missing without default."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not (text.isdecimal() and least <= int(text[:9]) and len(text) < 10):
        raise ValueError(
            f"{name} = {text!r} in the environment: expected a number from {least} on, as torchrun sets it"
        )
    return int(text)


def check_environment() -> None:
    """Raise ValueError if this is one of several processes and the environment lacks the numbers that torchrun sets."""
    size, rank = number_in_environment("WORLD_SIZE", None, 1), number_in_environment("RANK", None)
    local_size, local_rank = (
        number_in_environment("LOCAL_WORLD_SIZE", size, 1),
        number_in_environment("LOCAL_RANK", rank),
    )
    number_in_environment("MASTER_PORT", None)
    for name, place, many in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if place >= many:
            raise ValueError(f"{name} = {place} in the environment, of {many} processes: they are counted from 0")


GGUF = ".gguf"  # ends the name of a model in one file
# Characters that control a terminal, or change the order in which it shows text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text of a user or a file with control characters escaped, except tabs and line ends."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """Import and return `module`. ValueError: it is missing; the message names `purpose` and the pip extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is installed but something it needs is broken: that error says more
        raise ValueError(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install 'overcoat[{extra}]'"
        ) from error


def check_exists(name: str) -> None:
    """Raise ValueError if `name` can only be a path that does not exist; the hub would be asked for a minute.

    If its parent folder exists and has runs in it, `name` is a path; if it has models, it may be a model of the hub.
    """
    if "://" in name or name.startswith("buckets/"):  # remote files that `datasets` can read
        return
    is_path = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    folder = os.path.dirname(name)
    beside = [] if is_path or not folder else glob.glob(os.path.join(glob.escape(folder), "*", "config.toml"))
    if not os.path.exists(name) and (is_path or beside):
        elsewhere = f"; {beside[0]} is a run: for a hub name start where no folder {folder} is" if beside else ""
        raise ValueError(f"{name}: no such file or folder{elsewhere}")


def load_pretrained(auto: str, what: str, name: str, trust_remote_code: bool, **options: Any) -> Any:
    """Return `transformers.<auto>.from_pretrained(name)`; everything from Hugging Face is loaded here. what: its name
    in messages.

    A name that ends in GGUF is a file in a folder or in a repository of the hub.

    A folder may contain Python code (`auto_map`). By default transformers asks on standard input whether to run it, and
    `yes |` would agree. Here it runs with `trust_remote_code` only. ValueError: nothing is there, it is broken, or it
    needs such code.
    """
    transformers, place = load_extra("transformers", "hf", f"loading {what}"), name
    if name.endswith(GGUF):
        place, options = os.path.dirname(name) or ".", {**options, "gguf_file": os.path.basename(name)}
    try:
        check_exists(place)
        return getattr(transformers, auto).from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    except RuntimeError as error:  # out of memory is left to the caller
        if "out of memory" in str(error).lower():
            raise
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error
    except Exception as error:  # of any type: four libraries read the files of a folder
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"cannot load {what} {name!r}: it needs Python code of its own (auto_map), which only "
                "model.trust_remote_code=true of overcoat train runs; read that code first"
            ) from error
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during large imports, where it takes a third of the time and frees nothing.

    Also a decorator, for short commands.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def drawing(path: Path, extra: str, purpose: str, width: float, height: float, **grid: Any) -> Iterator[Any]:
    """Yield the axes of an image of width x height inches, which is written to `path` at the end.

    grid: options of `pyplot.subplots`, for several axes. ValueError: matplotlib is not installed.
    """
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
    """Return a text with lines wrapped between words to the terminal's width; unchanged if output is no terminal."""
    if columns is None:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if not columns:
        return text
    cut = functools.partial(textwrap.wrap, width=columns, subsequent_indent="    ", break_long_words=False)
    lines = [cut(line, replace_whitespace=False, break_on_hyphens=False) or [""] for line in text.split("\n")]
    return "\n".join(piece for pieces in lines for piece in pieces)


def reason(error: BaseException) -> str:
    """Return an error's message in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, KeyError):  # its text is only the key
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 300, placeholder=" ...")
