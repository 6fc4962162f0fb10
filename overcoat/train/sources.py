"""Where text comes from: files, Python's own source, JSONL, or a `datasets` name, all seen as documents.

`documents(config)` yields every document once, in an order that depends on names only and is not alphabetical (sorted
by the checksum of the name): any prefix is a fair sample, for the tokenizer or under `data.max_bytes`.

    "stdlib"          the .py files of the running Python, without tests and tables (STDLIB_SKIPPED)
    "site-packages"   the .py files of everything installed beside it
    *.jsonl, .ndjson  one JSON object per line, its `data.text_key`; *.json (an array of objects, or one a line) and
                      *.parquet likewise
    other text        one document each; above CORPUS_BYTES cut at line ends into pieces of PIECE_BYTES
    *.gz              what is inside, text being a corpus of any size
    data.dataset      datasets.load_dataset(..., streaming=True): nothing is downloaded ahead or copied

Text is UTF-8 (Python source: what it declares), and a document is a string: anything else is an error that names the
file and the row. Formats that hold text but are none (NOT_TEXT) are refused with the way to read them. `rows(config)`
yields the rows themselves, for conversations (chat.py).

`DocumentStream` walks the same documents again and again, reshuffled in each epoch, and can say where it stands: for
local files (epoch, documents done), for a dataset the state of its own iterator.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import json
import os
import site
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.extras import check_exists, load_extra, reason
from overcoat.train.config import DataConfig, error_context

ROWS = (".jsonl", ".ndjson", ".json", ".parquet")
CORPUS_BYTES = 1 << 18
PIECE_BYTES = 1 << 16
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__"}
# Tests, which distributions leave out, and tables of characters and help texts, which are not code.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
PACKED = "unpack it first"
NOT_TEXT = {
    ".csv": "convert it to .jsonl, or read it as a dataset (csv)",
    ".tsv": "convert it to .jsonl",
    ".arrow": "convert it to .jsonl, or read it as a dataset (arrow)",
    ".bin": "name token files by a pattern that ends in .bin",
    **dict.fromkeys([".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z"], PACKED),
}


class Continuation(str):
    """A piece of a long document after its first one."""

    __slots__ = ()


def find_files(patterns: list[str]) -> list[Path]:
    """The files behind `data.files`, each once, ordered by the checksum of the name."""
    found: dict[Path, str] = {}
    for pattern in patterns:
        if pattern == "stdlib":
            matches = list(_python_files(Path(sysconfig.get_paths()["stdlib"]), NOT_SOURCE | STDLIB_SKIPPED))
        elif pattern == "site-packages":
            roots = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()}
            matches = [match for root in sorted(roots) for match in _python_files(Path(root), {"__pycache__"})]
        else:
            # A name may hold a pattern's signs: "chats[1].jsonl".
            is_name = os.path.isfile(pattern)
            if is_name and not os.path.getsize(pattern):  # of a pattern's files some may be
                raise ValueError(f"{pattern} is empty: leave it out")
            named = [pattern] if is_name else glob.glob(pattern, recursive=True)
            named = [name for name in named if os.path.isfile(name)]
            matches = [(path, path.name) for path in map(Path, named)]
        if not matches:
            raise ValueError(f"no files found for {pattern!r} (looked from {Path.cwd()})")
        found |= {path.resolve(): name for path, name in matches}
    return sorted(found, key=lambda path: (zlib.crc32(os.fsencode(found[path])), str(path)))


def _python_files(root: Path, excluded: set[str]) -> Iterator[tuple[Path, str]]:
    """Every .py file below `root` with its name relative to it, which is the same on every machine."""
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if excluded.isdisjoint(relative.parts) and path.is_file():
            yield path, str(relative)


def read_documents(path: Path, text_key: str) -> Iterator[str]:
    if has_rows(path):
        for where, row in read_rows(path, [text_key]):
            yield text_of(row, text_key, where)
        return
    with reading(path):
        is_corpus = path.suffix.lower() == ".gz" or path.stat().st_size > CORPUS_BYTES
        yield from _read_text(path, PIECE_BYTES if is_corpus else -1)


def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The rows of one file, each with where it is; of parquet these columns, or all."""
    kind = _kind(path)
    if kind not in ROWS:
        raise ValueError(f"{path} is text, and conversations want {', '.join(ROWS)}: leave it out")
    with reading(path):
        yield from _read_parquet(path, columns) if kind == ".parquet" else _read_json(path, kind == ".json")


def has_rows(path: Path) -> bool:
    """Whether a file holds rows with fields, instead of text. ValueError: by its name neither."""
    return _kind(path) in ROWS


def _kind(path: Path) -> str:
    """What a file is by its name, without .gz."""
    packed = path.suffix.lower() == ".gz"
    kind = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    if kind in NOT_TEXT or (packed and kind == ".parquet"):
        remedy = PACKED if packed else NOT_TEXT[kind]
        raise ValueError(f"{path}: a {kind} file is not read as text: {remedy}, or leave it out")
    return kind


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file could not be read or decoded, and what to do about it."""
    try:
        yield
    except (UnicodeError, SyntaxError) as error:
        remedy = "convert it (iconv -t UTF-8), or leave it out"
        raise ValueError(f"{path} is not UTF-8 text: {remedy}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path} ({reason(error)}): repair it, or leave it out") from error


def _open_text(path: Path) -> Any:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return tokenize.open(path) if path.suffix == ".py" else path.open(encoding="utf-8-sig")


def _read_text(path: Path, piece: int) -> Iterator[str]:
    """Pieces of about `piece` characters that end where lines do; -1: all at once."""
    is_begun = False
    with _open_text(path) as file:
        while lines := file.readlines(piece):
            text = "".join(lines)
            if "\0" in text:
                raise ValueError(f"{path} holds NUL characters and is not text: leave it out")
            yield Continuation(text) if is_begun else text
            is_begun = True


def _read_json(path: Path, may_be_array: bool) -> Iterator[tuple[str, Any]]:
    """One object a line, or an array of objects."""
    with _open_text(path) as file:
        if may_be_array:
            while (first := file.read(1)).isspace():
                pass
            if first == "[":
                rows = parsed(first + file.read(), str(path))
                yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
                return
            file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parsed(line.rstrip("\n"), f"{path}:{number}")  # no second line for errors


def parsed(text: str, where: str) -> Any:
    with error_context(f"{where}: no JSON (", Exception, "): correct or remove it"):  # RecursionError, too
        return json.loads(text, object_pairs_hook=_object)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose fields hides another."""
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _read_parquet(path: Path, columns: list[str] | None) -> Iterator[tuple[str, Any]]:
    pyarrow = load_extra("pyarrow", "hf", "reading parquet")
    parquet = load_extra("pyarrow.parquet", "hf", "reading parquet")
    try:
        with parquet.ParquetFile(path) as file:
            # Of a column that is lacking the first row is refused, with the names of those that are there.
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{path} has a column twice among {', '.join(names)}: rename one")
            wanted = columns if columns and set(columns) <= set(names) else None
            rows = (row for batch in file.iter_batches(columns=wanted) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path} ({reason(error)}): repair it, or leave it out") from error


KINDS = {
    type(None): "null", dict: "an object", list: "a list", int: "a number", float: "a number", str: "text",
    bool: "true or false",
}  # fmt: skip


def as_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {KINDS.get(type(row), 'no object')}, not an object: correct or remove the row")
    return row


def field_of(row: Any, key: str, option: str, where: str) -> Any:
    """A field of a row, which `option` names `key`."""
    if key not in as_object(row, where):
        raise ValueError(f"{where}: no field {key!r} ({option}) among {', '.join(map(str, row)) or 'none'}")
    return row[key]


def text_of(row: Any, key: str, where: str) -> str:
    return as_text(field_of(row, key, "text_key", where), f"{where}: {key!r}", ", or name another text_key")


def as_text(value: Any, where: str, other: str = "") -> str:
    if not isinstance(value, str):
        what = f"{KINDS.get(type(value), f'a {type(value).__name__}')}, not text"
        raise ValueError(f"{where} holds {what}: correct or remove the row{other}")
    try:
        encoded_size(value)
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half of a surrogate pair: correct or remove the row") from error
    return value


def open_dataset(config: DataConfig) -> Any:
    """The streaming `datasets.IterableDataset` that the configuration names."""
    datasets = load_extra("datasets", "hf", f"dataset {config.dataset!r}")
    name = config.dataset_config or None
    files = config.files or None
    with error_context(f"dataset {config.dataset!r}: ", Exception):
        check_exists(config.dataset)
        return datasets.load_dataset(config.dataset, name, data_files=files, split=config.split, streaming=True)


def encoded_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def documents(config: DataConfig) -> Iterator[str]:
    """Every document once, exact duplicates and empty ones left out, at most `data.max_bytes` of text. ValueError:
    there is none."""
    seen: set[int] = set()
    num_bytes = 0
    if config.dataset:
        texts = _texts(open_dataset(config), config, 0)
    else:
        texts = (text for path in find_files(config.files) for text in read_documents(path, config.text_key))
    is_empty = True
    for text in texts:
        key = hash(text)
        if not text.strip() or key in seen:
            continue
        seen.add(key)
        num_bytes += encoded_size(text)
        if config.max_bytes and num_bytes > config.max_bytes:
            break
        is_empty = False
        yield text
    if is_empty:
        raise no_documents(config)


def rows(config: DataConfig) -> Iterator[tuple[str, Any]]:
    """Every row of the data once, with where it is."""
    if config.dataset:
        return _dataset_rows(open_dataset(config), config, 0)
    return (row for path in find_files(config.files) for row in read_rows(path))


def no_documents(config: DataConfig) -> ValueError:
    where = "data.dataset has" if config.dataset else "data.files have"
    limit = f" within data.max_bytes = {config.max_bytes}: raise it" if config.max_bytes else ": name others"
    return ValueError(f"{where} no documents with text{limit}")


def _dataset_rows(dataset: Any, config: DataConfig, num_done: int) -> Iterator[tuple[str, Any]]:
    """The rows of a dataset; `num_done` came before the first."""
    # Of any kind: from the network, a parser, a decompressor.
    with error_context(f"dataset {config.dataset!r}: ", Exception):
        for number, row in enumerate(dataset, num_done + 1):
            yield f"dataset {config.dataset!r}, row {number}", row


def _texts(dataset: Any, config: DataConfig, num_done: int) -> Iterator[str]:
    for where, row in _dataset_rows(dataset, config, num_done):
        yield text_of(row, config.text_key, where)


class DocumentStream:
    """Documents without end, with a position that can be saved and restored; reshuffled in each epoch, files in an
    order drawn from (seed, epoch), a dataset by itself."""

    def __init__(self, config: DataConfig, seed: int):
        self.config, self.seed = config, seed
        self.epoch, self.num_done = 0, 0
        self._dataset = open_dataset(config).shuffle(seed=seed, buffer_size=1) if config.dataset else None
        self._files = [] if config.dataset else find_files(config.files)
        self._iterator = self._open()

    def take(self, count: int) -> list[str]:
        """The next `count` documents, fewer at the end of an epoch."""
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
            return _texts(self._dataset, self.config, self.num_done)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self._files))
        return (text for index in order for text in read_documents(self._files[index], self.config.text_key))

    def state_dict(self) -> dict[str, Any]:
        inner = self._dataset.state_dict() if self._dataset is not None and self.num_done else None
        return {"epoch": self.epoch, "num_done": self.num_done, "dataset": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.num_done = state["epoch"], state["num_done"]
        if self._dataset is not None and state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._iterator = self._open()
        if self._dataset is None:
            for skipped in range(self.num_done):
                if next(self._iterator, None) is None:
                    raise ValueError(
                        f"the stream ends after {skipped} documents, but the checkpoint had read {self.num_done}: "
                        "data.files have changed; restore them, or start another train.run_dir"
                    )
