"""Read documents from files, Python's own source, JSONL, parquet, or a dataset of `datasets`.

`documents(config)` yields texts, with files sorted by the checksum of their name, so that any prefix is a fair sample;
`rows(config)` yields rows, for conversations.

    "stdlib"          the .py files of the running Python, without tests and tables (STDLIB_SKIPPED)
    "site-packages"   the .py files of everything installed beside it
    *.jsonl ...       (rows.py) the field `data.text_key` of each row
    other text        one document each; above CORPUS_BYTES cut at line ends into pieces of PIECE_BYTES
    *.gz              what is inside, text being a corpus of any size
    data.dataset      datasets.load_dataset(..., streaming=True): nothing is downloaded ahead or copied
"""

from __future__ import annotations

import glob
import os
import site
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.extras import check_exists, load_extra
from overcoat.train.config import DataConfig, error_context, require
from overcoat.train.rows import PIECE_BYTES, as_json, encoded_size, has_rows, open_text, read_rows, reading, text_of

CORPUS_BYTES = 1 << 18
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__"}
# Tests, which distributions leave out, and tables of characters and help texts, which are not code.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data"}


class Continuation(str):
    """A piece of a long document after its first one."""

    __slots__ = ()


def find_files(patterns: list[str]) -> list[Path]:
    """Return the files of `data.files` without duplicates, ordered by the checksum of the name. ValueError: a pattern
    matches nothing."""
    found: dict[Path, str] = {}
    for pattern in patterns:
        if pattern == "stdlib":
            matches = list(_python_files(Path(sysconfig.get_paths()["stdlib"]), NOT_SOURCE | STDLIB_SKIPPED))
        elif pattern == "site-packages":
            roots = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()}
            matches = [match for root in sorted(roots) for match in _python_files(Path(root), {"__pycache__"})]
        else:
            is_name = os.path.isfile(pattern)  # a name may hold a pattern's signs, and a pattern match an empty file
            require(not is_name or os.path.getsize(pattern) > 0, f"{pattern} is empty: leave it out")
            named = [pattern] if is_name else glob.glob(pattern, recursive=True)
            matches = [(Path(name), Path(name).name) for name in named if os.path.isfile(name)]
        require(bool(matches), f"no files found for {pattern!r} (looked from {Path.cwd()})")
        found |= {path.resolve(): name for path, name in matches}
    return sorted(found, key=lambda path: (zlib.crc32(os.fsencode(found[path])), str(path)))


def _python_files(root: Path, excluded: set[str]) -> Iterator[tuple[Path, str]]:
    """Yield every .py file below `root` with its relative name, which is the same on every machine."""
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if excluded.isdisjoint(relative.parts) and path.is_file():
            yield path, str(relative)


def read_documents(path: Path, text_key: str) -> Iterator[str]:
    """Yield the documents of one file: the texts of its rows, or plain text in pieces that end at line ends."""
    if has_rows(path):
        yield from (text_of(row, text_key, where) for where, row in read_rows(path, [text_key]))
        return
    with reading(path):
        is_corpus = path.suffix.lower() == ".gz" or path.stat().st_size > CORPUS_BYTES
        is_begun = False
        with open_text(path) as file:
            while text := "".join(file.readlines(PIECE_BYTES if is_corpus else -1)):
                require("\0" not in text, f"{path} holds NUL characters and is not text: leave it out")
                yield Continuation(text) if is_begun else text
                is_begun = True


def open_dataset(config: DataConfig) -> Any:
    """Return the streaming `datasets.IterableDataset` that the configuration names."""
    datasets = load_extra("datasets", "hf", f"dataset {config.dataset!r}")
    name, files = config.dataset_config or None, config.files or None
    with error_context(f"dataset {config.dataset!r}: ", Exception):
        check_exists(config.dataset)
        return datasets.load_dataset(config.dataset, name, data_files=files, split=config.split, streaming=True)


def rows(config: DataConfig) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) for every row of the data, once."""
    if config.dataset:
        return dataset_rows(open_dataset(config), config)
    return (row for path in find_files(config.files) for row in read_rows(path))


def dataset_rows(dataset: Any, config: DataConfig, num_done: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) for the rows of a dataset. num_done: rows that were read before."""
    # Of any kind: from the network, a parser, a decompressor.
    with error_context(f"dataset {config.dataset!r}: ", Exception):
        features = getattr(dataset, "features", None) or {}
        for number, row in enumerate(dataset, num_done + 1):
            where = f"dataset {config.dataset!r}, row {number}"
            yield where, as_json(row, features, where) if config.is_chat else row


def documents(config: DataConfig) -> Iterator[str]:
    """Yield non-blank documents, up to `data.max_bytes`; each once with `data.dedupe`. ValueError: there is none."""
    seen, num_bytes, is_empty = set[int](), 0, True
    dataset = open_dataset(config) if config.dataset else None
    for text in _texts(config, dataset, [] if config.dataset else find_files(config.files)):
        if not text.strip() or (config.dedupe and hash(text) in seen):
            continue
        seen |= {hash(text)} if config.dedupe else set()
        num_bytes += encoded_size(text)
        if config.max_bytes and num_bytes > config.max_bytes:
            break
        is_empty = False
        yield text
    if is_empty:
        raise no_documents(config)


def no_documents(config: DataConfig) -> ValueError:
    """Return the error for data without any text."""
    where = "data.dataset has" if config.dataset else "data.files have"
    limit = f" within data.max_bytes = {config.max_bytes}: raise it" if config.max_bytes else ": name others"
    return ValueError(f"{where} no documents with text{limit}")


def _texts(config: DataConfig, dataset: Any, files: Iterable[Path], num_done: int = 0) -> Iterator[str]:
    if dataset is not None:
        return (text_of(row, config.text_key, where) for where, row in dataset_rows(dataset, config, num_done))
    return (text for path in files for text in read_documents(path, config.text_key))


class DocumentStream:
    """Endless documents with a position that can be saved and restored. Each epoch is shuffled: files by (seed, epoch),
    a dataset by its own shuffle."""

    def __init__(self, config: DataConfig, seed: int):
        self.config, self.seed = config, seed
        self.epoch, self.num_done = 0, 0
        self._dataset = open_dataset(config).shuffle(seed=seed, buffer_size=1) if config.dataset else None
        self._files = [] if config.dataset else find_files(config.files)
        self._iterator = self._open()

    def take(self, count: int) -> list[str]:
        """Return the next `count` documents, fewer at the end of an epoch. ValueError: an epoch has none."""
        taken = [text for _, text in zip(range(count), self._iterator, strict=False)]
        self.num_done += len(taken)
        if len(taken) < count:
            if not self.num_done:
                raise no_documents(self.config)
            self.epoch, self.num_done = self.epoch + 1, 0
            self._iterator = self._open()
        return taken

    def _open(self) -> Iterator[str]:
        if self._dataset is not None:
            self._dataset.set_epoch(self.epoch)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self._files))
        return _texts(self.config, self._dataset, (self._files[index] for index in order), self.num_done)

    def state_dict(self) -> dict[str, Any]:
        inner = self._dataset.state_dict() if self._dataset is not None and self.num_done else None
        return {"epoch": self.epoch, "num_done": self.num_done, "dataset": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.num_done = state["epoch"], state["num_done"]
        if self._dataset is not None and state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._iterator = self._open()
        for skipped in range(self.num_done if self._dataset is None else 0):
            require(
                next(self._iterator, None) is not None,
                f"the stream ends after {skipped} documents, but the checkpoint had read {self.num_done}: data.files "
                "have changed; restore them, or start another train.run_dir",
            )
