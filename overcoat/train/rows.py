"""Rows of JSON lines, JSON and parquet files, and what their fields hold.

JSON is parsed row by row, without changing types; rows of parquet are converted to what JSON lines would hold
(`as_json`). Errors name the file, the row and the field.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overcoat.extras import load_extra, reason
from overcoat.train.config import error_context, require

ROWS = (".jsonl", ".ndjson", ".json", ".parquet")
PIECE_BYTES = 1 << 16
PACKED = "unpack it first"
NOT_TEXT = {
    ".csv": "convert it to .jsonl, or read it as a dataset (csv)",
    ".tsv": "convert it to .jsonl",
    ".arrow": "convert it to .jsonl, or read it as a dataset (arrow)",
    ".bin": "name token files by a pattern that ends in .bin",
    **dict.fromkeys([".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z"], PACKED),
}
KINDS = {
    type(None): "null", dict: "an object", list: "a list", int: "a number", float: "a number", str: "text",
    bool: "true or false",
}  # fmt: skip


def has_rows(path: Path) -> bool:
    """True if a file holds rows with fields, False if text. ValueError: its suffix is neither."""
    return _kind(path) in ROWS


def _kind(path: Path) -> str:
    """Return the suffix of a file, without .gz."""
    packed = path.suffix.lower() == ".gz"
    kind = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    if kind in NOT_TEXT or (packed and kind == ".parquet"):
        remedy = PACKED if packed else NOT_TEXT[kind]
        raise ValueError(f"{path}: a {kind} file is not read as text: {remedy}, or leave it out")
    return kind


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Re-raise read and decoding errors as a ValueError that names the file and the remedy."""
    try:
        yield
    except (UnicodeError, SyntaxError) as error:
        remedy = "convert it (iconv -t UTF-8), or leave it out"
        raise ValueError(f"{path} is not UTF-8 text: {remedy}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path} ({reason(error)}): repair it, or leave it out") from error


def open_text(path: Path) -> Any:
    """Open a text file for reading, gzip or plain."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return tokenize.open(path) if path.suffix == ".py" else path.open(encoding="utf-8-sig")


def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) for the rows of one file; columns: of parquet only these (None: all)."""
    kind = _kind(path)
    require(kind in ROWS, f"{path} is text, and conversations want {', '.join(ROWS)}: leave it out")
    with reading(path):
        yield from _read_parquet(path, columns) if kind == ".parquet" else _read_json(path, kind == ".json")


def _read_json(path: Path, may_be_array: bool) -> Iterator[tuple[str, Any]]:
    """Yield one object per line, or the elements of an array. Not read by `datasets`, which gives all rows the same
    types: missing fields become null, 1 becomes 1.0, and "3" becomes 3."""
    with open_text(path) as file:
        if may_be_array:
            while (first := file.read(1)).isspace():
                pass
            if first == "[":
                yield from _read_array(path, file)
                return
            file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parsed(line.rstrip("\n"), f"{path}:{number}")  # no second line for errors


def _read_array(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """Yield the elements of an array whose "[" has been read, with one row in memory at a time."""
    decoder, text, number = json.JSONDecoder(object_pairs_hook=_object), "", 1
    while not (text := text.lstrip(" \t\r\n,")).startswith("]"):
        where = f"{path}, row {number}"
        try:
            row, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            # It may go on. As much again: a large row is not parsed often.
            more = file.read(PIECE_BYTES + len(text)) if isinstance(error, json.JSONDecodeError) else ""
            if not more:
                parsed(text, where)  # raises
            text += more
        else:
            yield where, row
            text, number = text[end:], number + 1


def parsed(text: str, where: str) -> Any:
    """Return parsed JSON. ValueError: it is invalid, or an object has a key twice."""
    with error_context(f"{where}: no JSON (", Exception, "): correct or remove it"):  # RecursionError, too
        return json.loads(text, object_pairs_hook=_object)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of key-value pairs. ValueError: a key occurs twice."""
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
            schema, names = file.schema_arrow, file.schema_arrow.names
            require(len(set(names)) == len(names), f"{path} has a column twice among {', '.join(names)}: rename one")
            wanted = columns if columns and set(columns) <= set(names) else None
            features: Any = {}
            if wanted is None:
                with contextlib.suppress(ValueError):  # a type that `datasets` does not know, and so no Json
                    features = load_extra("datasets", "hf", "reading parquet").Features.from_arrow_schema(schema)
            batches = file.iter_batches(columns=wanted, batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", as_json(row, features, f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path} ({reason(error)}): repair it, or leave it out") from error


def as_json(row: dict[str, Any], features: Any, where: str) -> dict[str, Any]:
    """Return a row of Arrow as JSON lines would hold it: structs without null fields (TRL: remove_none_values), and
    Json columns parsed. features: of `datasets`, or {}."""

    def plain(value: Any, feature: Any) -> Any:
        if type(feature).__name__ == "Json":  # decoded, or text in text
            return as_data(as_data(value, where), where)
        if isinstance(value, list):
            return [plain(each, getattr(feature, "feature", None)) for each in value]
        if isinstance(value, dict):
            known = feature if isinstance(feature, dict) else {}
            return {key: plain(each, known.get(key)) for key, each in value.items() if each is not None}
        return value

    return {key: plain(value, features.get(key)) for key, value in row.items()}


def kind_of(value: Any) -> str:
    """Return JSON's name of the type of `value`, for messages."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def as_data(value: Any, where: str) -> Any:
    """Return `value`, parsed if it is a text with a JSON object or list."""
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    return parsed(value, where) if is_json else value


def as_object(row: Any, where: str) -> dict[str, Any]:
    """Return the row. ValueError: it is not an object."""
    require(isinstance(row, dict), f"{where}: {kind_of(row)}, not an object: correct or remove the row")
    return row


def field_of(row: Any, key: str, option: str, where: str) -> Any:
    """Return a row's field `key`. option: the configuration key that names it, for the message of the ValueError."""
    has_key = key in as_object(row, where)
    require(has_key, f"{where}: no field {key!r} ({option}) among {', '.join(map(str, row)) or 'none'}")
    return row[key]


def text_of(row: Any, key: str, where: str) -> str:
    return as_text(field_of(row, key, "text_key", where), f"{where}: {key!r}", ", or name another text_key")


def as_text(value: Any, where: str, other: str = "") -> str:
    """Return `value`. ValueError: it is not valid text."""
    is_text = isinstance(value, str)
    require(is_text, f"{where} holds {kind_of(value)}, not text: correct or remove the row{other}")
    with error_context(f"{where} holds half of a surrogate pair (", UnicodeEncodeError, "): correct or remove the row"):
        encoded_size(value)
    return value


def encoded_size(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
