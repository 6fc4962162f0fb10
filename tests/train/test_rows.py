"""Rows of files and of Arrow's types: `pytest tests/train/test_rows.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from overcoat.train import rows
from overcoat.train.config import DataConfig
from overcoat.train.conversations import examples
from overcoat.train.rows import read_rows
from overcoat.train.sources import rows as rows_of
from tests.train.test_chat import TOOLS

ARGUMENTS = {"weather": {"city": "Paris", "days": 3}, "search": {"query": "a", "filter": {"tags": ["x"], "at": None}}}


def chat(name: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": ARGUMENTS[name]}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return {"messages": [messages[0], {**messages[1], "tool_calls": [call]}], "tools": TOOLS}


def found(path: Path) -> list[Any]:
    return [row for _, row in read_rows(path)]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


CHATS = [chat("weather"), chat("search")]


def test_json_is_what_was_written(tmp_path: Path) -> None:
    """Types are not made equal over a file, nulls stay, and large numbers."""
    written = [{"a": 1, "b": None, "c": {"x": None}}, {"a": 1.0, "c": {"y": [1, "2", None]}}, {"a": "3", "d": 2**70}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, written)))
    (tmp_path / "a.json").write_text(json.dumps(written, indent=2))
    for name in ("a.jsonl", "a.json"):
        assert list(map(repr, found(tmp_path / name))) == list(map(repr, written))


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_an_array_is_read_row_by_row(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PIECE_BYTES", piece)
    written = [{"text": 'é ] } [ \\" ' * size} for size in (0, 1, 50)]
    (tmp_path / "a.json").write_text(f" \n{json.dumps(written)}\n")
    assert found(tmp_path / "a.json") == written
    (tmp_path / "a.json").write_text("[]")
    assert found(tmp_path / "a.json") == []
    for text, why in [('[{"a": 1}, {"a": 1, "a": 2}]', "the field 'a' twice"), ('[{"a": 1}, {"a"', "Expecting")]:
        (tmp_path / "a.json").write_text(text)
        reading = read_rows(tmp_path / "a.json")
        assert next(reading) == (f"{tmp_path}/a.json, row 1", {"a": 1})
        with pytest.raises(ValueError, match=rf"a\.json, row 2: no JSON \(.*{why}"):
            next(reading)


def test_a_large_array_is_not_held_in_memory(tmp_path: Path) -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    row = json.dumps({"text": "word " * 2000})
    (tmp_path / "a.json").write_text(f"[{', '.join([row] * 2000)}]")  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in read_rows(tmp_path / "a.json")) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6


@pytest.mark.parametrize("kind", ["structs", "json", "texts", "large"])
def test_parquet_holds_what_json_lines_do(kind: str, tmp_path: Path) -> None:
    """Structs have null for the fields of other rows; `datasets` writes Json columns as text."""
    path = tmp_path / "a.parquet"
    if kind == "structs":
        datasets.Dataset.from_list(CHATS).to_parquet(path)
    elif kind == "json":
        datasets.Dataset.from_list(CHATS, on_mixed_types="use_json").to_parquet(path)
    else:
        columns = {key: [json.dumps(row[key]) for row in CHATS] for key in ("messages", "tools")}
        text = pyarrow.large_string() if kind == "large" else pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        types = {"messages": text, "tools": pyarrow.string_view() if kind == "large" else pyarrow.string()}
        parquet.write_table(
            pyarrow.table({key: pyarrow.array(column).cast(types[key]) for key, column in columns.items()}), path
        )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    config = DataConfig(files=[str(path)], format="messages")
    expected = [example for _, example in examples(dataclasses.replace(config, files=[str(tmp_path / "a.jsonl")]))]
    if kind == "structs":  # in which a null in a list of a row's own cannot be told from others
        expected = without_nulls(expected)
    assert [example for _, example in examples(config)] == expected
    if kind != "large":  # whose string_view `datasets` does not read
        as_dataset = dataclasses.replace(config, dataset="parquet")
        assert [example for _, example in examples(as_dataset)] == expected
    as_dataset = dataclasses.replace(config, dataset="json", files=[str(tmp_path / "a.jsonl")])
    assert without_nulls([example for _, example in examples(as_dataset)]) == without_nulls(expected)


def test_nulls_that_json_columns_hold_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    given = [{"m": [{"args": {"x": 1, "z": None}}]}, {"m": [{"args": {"y": "s"}}]}]
    datasets.Dataset.from_list(given, on_mixed_types="use_json").to_parquet(path)
    assert found(path) == given
    assert [row for _, row in rows_of(DataConfig(dataset="parquet", files=[str(path)], format="messages"))] == given


def test_other_types_of_arrow(tmp_path: Path) -> None:
    """A map is an object, numbers stay numbers, and a type that `datasets` does not know harms no other column."""
    table = pyarrow.table(
        {
            "map": pyarrow.array([[("a", 1)], None], type=pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "list": pyarrow.array([[{"a": 1, "b": None}], []]),
            "float": [1.0, 2.5],
            "int": [1, 2**60],
            "text": ["x", None],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet") == [
        {"map": {"a": 1}, "list": [{"a": 1}], "float": 1.0, "int": 1, "text": "x"},
        {"map": None, "list": [], "float": 2.5, "int": 2**60, "text": None},
    ]
