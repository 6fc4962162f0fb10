"""Documents out of files, Python's own source, JSONL and datasets, and the stream's position in them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from overcoat.train import sources
from overcoat.train.config import DataConfig
from overcoat.train.sources import DocumentStream, documents, find_files, read_documents


def test_documents_of_text_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("  \n")  # nothing in it
    (tmp_path / "e.txt").touch()
    (tmp_path / "c.txt").write_text("one\ntwo\n")  # a duplicate
    (tmp_path / "d.jsonl").write_text('{"body": "three"}\n\n{"body": "four"}\n')
    config = DataConfig(files=[str(tmp_path / "*")], text_key="body")
    assert sorted(documents(config)) == ["four", "one\ntwo\n", "one\ntwo\n", "three"]
    assert sorted(documents(dataclasses.replace(config, dedupe=True))) == ["four", "one\ntwo\n", "three"]


def test_a_missing_extra_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'overcoat\[hf\]'"):
        list(documents(DataConfig(dataset="some/name")))


def test_the_order_of_files_is_that_of_their_names_checksums_wherever_they_lie(tmp_path: Path) -> None:
    orders = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for number in range(20):
            (tmp_path / folder / f"{number:02d}.txt").touch()
        orders.append([path.name for path in find_files([f"{tmp_path / folder}/*.txt"])])
    assert orders[0] == orders[1] != sorted(orders[0])
    assert all(zlib.crc32(first.encode()) < zlib.crc32(second.encode()) for first, second in pairwise(orders[0]))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("latin.txt", b"caf\xe9", "is not UTF-8 text: convert it .iconv"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "is not UTF-8 text"),
        ("large.txt", b"\xff" * (sources.CORPUS_BYTES + 1), "is not UTF-8 text"),
        ("source.py", b"# caf\xe9", "is not UTF-8 text"),
        ("wide.txt", "wide".encode("utf-16-le"), "holds NUL characters and is not text"),
        ("cut.txt.gz", gzip.compress(b"words " * 99, mtime=0)[:-9], "cannot read .*: repair it"),
        ("not.txt.gz", b"words", "cannot read .*Not a gzipped file"),
        ("not.parquet", b"words", "cannot read .*[Pp]arquet.*: repair it"),
        ("a.csv", b"text", r"a \.csv file is not read as text: convert it to \.jsonl, or read it as a dataset"),
        ("a.json", b'[{"text": "a"}, {"tex', r"a\.json, row 2: no JSON \(.*\): correct or remove it"),
        ("a.jsonl.zst", b"", r"a \.zst file is not read as text: unpack it first"),
        ("a.tar.gz", b"", r"a \.tar file is not read as text: unpack it first"),
        ("a.bin", b"", r"pattern that ends in \.bin"),
    ],
)
def test_what_is_no_text_is_refused_with_its_path(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=why) as caught:
        list(documents(DataConfig(files=[f"{tmp_path}/*"])))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot read /proc/self/mem \(Input/output error\)"):
        list(read_documents(Path("/proc/self/mem"), "text"))


def test_gzip_and_parquet_are_read_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'))
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["five", "six"]}), tmp_path / "c.parquet")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    (tmp_path / "mark.txt").write_bytes("\ufeffmark".encode())
    (tmp_path / "d.json").write_text(' [{"text": "array"}]')
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(b'\n{"text": "by line"}\n{"text": "by line 2"}'))
    (tmp_path / "f.ndjson").write_text('{"text": "x"}\n')
    found = sorted(documents(DataConfig(files=[f"{tmp_path}/*"])))
    others = ["array", "by line", "by line 2", "five", "four", "mark", "one\ntwo\n", "six", "three", "x"]
    assert found == ["# -*- coding: latin-1 -*-\n# caf\xe9\n", *others]
    with pytest.raises(ValueError, match=r"c\.parquet, row 1: no field 'body' \(text_key\) among id, text"):
        list(read_documents(tmp_path / "c.parquet", "body"))
    parquet.write_table(pyarrow.table([["seven"], ["eight"]], names=["text", "text"]), tmp_path / "g.parquet")
    with pytest.raises(ValueError, match=r"g\.parquet has a column twice among text, text: rename one"):
        list(read_documents(tmp_path / "g.parquet", "text"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "cut o', r"no JSON \("),
        ('{"text": ', r"no JSON \(.*: line 1 column 10 "),
        ('{"text": "a", "b": 1, "text": "c"}', r"no JSON \(the field 'text' twice\): correct or remove it"),
        ('{"txt": "x", "b": 1}', r"no field 'text' \(text_key\) among txt, b"),
        ("[1, 2]", "a list, not an object"),
        ("null", "null, not an object"),
        ('{"text": null}', "'text' holds null, not text"),
        ('{"text": [1]}', "'text' holds a list, not text"),
        ('{"text": 0.5}', "'text' holds a number, not text"),
        ('{"text": true}', "'text' holds true or false, not text"),
        ('{"text": "\\ud83d"}', "'text' holds half of a surrogate pair"),
    ],
)
def test_a_row_without_text_is_named(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'\n{{"text": "\\ud83d\\ude00"}}\n{line}\n')
    found = read_documents(tmp_path / "a.jsonl", "text")
    assert next(found) == "\U0001f600"
    with pytest.raises(ValueError, match=rf"a\.jsonl:3: {why}"):
        next(found)
    if why.startswith("'text' holds") and "surrogate" not in why:
        parquet.write_table(pyarrow.table({"text": [json.loads(line)["text"]]}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=rf"a\.parquet, row 1: {why}"):
            list(read_documents(tmp_path / "a.parquet", "text"))


class FakeDataset:
    """Stands in for a streaming dataset."""

    def __init__(self, *examples: dict[str, object]):
        self.examples = examples

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.examples)


def test_a_dataset_is_opened_as_configured_and_a_wrong_key_names_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple, dict]] = []

    def load_dataset(*arguments: object, **options: object) -> FakeDataset:
        calls.append((arguments, options))
        return FakeDataset({"body": "one", "id": 1}, {"body": "two", "id": 2}, {"body": 3, "id": 3})

    monkeypatch.setattr(sources, "load_extra", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    config = DataConfig(dataset="some/name", dataset_config="en", split="test", text_key="body")
    found = documents(config)
    assert [next(found), next(found)] == ["one", "two"]
    with pytest.raises(ValueError, match=r"dataset 'some/name', row 3: 'body' holds a number, not text"):
        next(found)
    assert calls == [(("some/name", "en"), {"data_files": None, "split": "test", "streaming": True})]
    with pytest.raises(ValueError, match=r"row 1: no field 'text' \(text_key\) among body, id"):
        list(documents(DataConfig(dataset="some/name")))
    assert calls[1][0] == ("some/name", None)  # no configuration of the dataset, rather than one without a name


@pytest.mark.parametrize("error", [FileNotFoundError, ConnectionError, KeyError])
def test_a_dataset_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise error("no way there")

    monkeypatch.setattr(sources, "load_extra", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"dataset 'some/name': (KeyError: ')?no way there"):
        list(documents(DataConfig(dataset="some/name")))


def numbered(folder: Path, count: int) -> DataConfig:
    """`count` files, each with its number."""
    for number in range(count):
        (folder / f"{number}.txt").write_text(str(number))
    return DataConfig(files=[f"{folder}/*.txt"])


def test_a_limit_below_the_first_document_is_named(tmp_path: Path) -> None:
    file = tmp_path / "some.md"
    file.write_text("some text")
    config = DataConfig(files=[str(file)], max_bytes=5)
    with pytest.raises(
        ValueError, match=r"data\.files have no documents with text within data\.max_bytes = 5: raise it"
    ):
        list(documents(config))
    file.write_text(" \n")
    with pytest.raises(ValueError, match=r"data\.files have no documents with text: name others"):
        list(documents(dataclasses.replace(config, max_bytes=0)))


@pytest.mark.parametrize("taken", [0, 1, 8, 9, 10, 20])
def test_a_stream_goes_on_where_it_stood(tmp_path: Path, taken: int) -> None:
    config = numbered(tmp_path, 9)
    first, second = DocumentStream(config, seed=1), DocumentStream(config, seed=1)
    for _ in range(taken):
        first.take(1)
    second.load_state_dict(first.state_dict())
    assert [second.take(1) for _ in range(12)] == [first.take(1) for _ in range(12)]


def test_a_stream_without_documents_or_with_fewer_than_before_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"data\.files have no documents with text: name others"):
        DocumentStream(DataConfig(files=[f"{tmp_path}/empty.jsonl"]), seed=1).take(1)
    stream = DocumentStream(numbered(tmp_path, 3), seed=1)
    state = {"epoch": 0, "num_done": 4, "dataset": None}
    with pytest.raises(ValueError, match=r"ends after 3 documents, but .* had read 4: .* another train\.run_dir"):
        stream.load_state_dict(state)


def test_a_file_named_twice_is_found_once_and_folders_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "deep.txt").mkdir()
    (tmp_path / "deep.txt/a.txt").touch()
    (tmp_path / "link.txt").symlink_to(tmp_path / "deep.txt/a.txt")
    patterns = [f"{tmp_path}/*.txt", f"{tmp_path}/**/a.txt"]
    assert find_files(patterns) == [(tmp_path / "deep.txt/a.txt").resolve()]
    for name in ("a[1].txt", "a1.txt", "empty.txt"):
        (tmp_path / name).write_text(name.replace("empty.txt", ""))
    assert find_files([str(tmp_path / "a[1].txt")]) == [(tmp_path / "a[1].txt").resolve()]
    for name, why in (("deep.txt", "no files found for '.*deep"), ("empty.txt", "empty.txt is empty: leave it out")):
        with pytest.raises(ValueError, match=why):
            find_files([str(tmp_path / name)])


def test_stdlib_is_found_without_tests_and_packages() -> None:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    files = find_files(["stdlib"])
    assert root / "json" / "decoder.py" in files
    inside = [path.relative_to(root) for path in files if path.is_relative_to(root)]  # Debian links to a file in /etc
    assert not [path for path in inside if {"test", "tests", "site-packages", "encodings"} & set(path.parts)]
    assert len(inside) > len(files) - 10
    assert len(files) == len(set(files)) > 300


def test_site_packages_are_found() -> None:
    import torch

    assert Path(torch.__file__).resolve() in find_files(["site-packages"])
