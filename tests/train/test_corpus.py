"""Sources of documents, the tokenizer, and the token cache."""

from __future__ import annotations

import errno
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from overcoat.train import corpus, files
from overcoat.train import tokenizer as module
from overcoat.train.config import Config
from overcoat.train.corpus import open_corpus
from overcoat.train.encoding import encode
from overcoat.train.files import DamagedError
from overcoat.train.sources import documents
from overcoat.train.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    make_tokenizer,
    set_chat_template,
    tokenizer_name,
    train_tokenizer,
)
from tests.train.runs import MakeConfig


def silent(_text: str) -> None:
    pass


def test_tokens_are_written_once_and_reused(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = open_corpus(make_config(), said.append)
    assert len(said) == 1

    def forbidden(*_: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("overcoat.train.corpus.write_tokens", forbidden)
    second = open_corpus(make_config("train.seed=5"), said.append)
    assert second.identity == first.identity
    assert np.array_equal(first.held_out, second.held_out)  # whatever the seed


def test_training_and_held_out_text_are_apart_and_complete(make_config: MakeConfig) -> None:
    config = make_config("data.sequence_length=8", "eval.rows=10000")
    corpus = open_corpus(config, silent)
    texts, tokenizer = list(documents(config.data)), corpus.tokenizer
    held = tokenizer.decode(corpus.held_out[:, 1:].ravel().tolist())
    rows = corpus.rows.next_rows(corpus.rows.num_rows)
    trained = tokenizer.decode(np.unique(rows, axis=0).ravel().tolist())
    apart = [text for text in texts if f"{text.splitlines()[0]}\n" in held]
    assert apart
    assert all(f"{text.splitlines()[0]}\n" not in trained for text in apart)
    total, in_held = (sum(map(len, encode(tokenizer, some))) for some in (texts, apart))
    assert np.diff(corpus.rows.documents).sum() + in_held >= 0.97 * total


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "run/data/tokens").glob("[!.]*"))


def test_a_second_run_waits_for_the_tokens_of_the_first(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    said: list[str] = []
    written: list[Path] = []
    real = corpus.write_tokens

    def slow(config: Config, target: Path) -> None:
        written.append(target)
        begun.set()
        assert go_on.wait(60)
        real(config, target)

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    monkeypatch.setattr(corpus, "write_tokens", slow)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(open_corpus, make_config(), silent)
        assert begun.wait(60)
        second = threads.submit(open_corpus, make_config("train.seed=5"), say)
        try:
            assert waits.wait(60)
        finally:
            go_on.set()
        assert first.result().identity == second.result().identity
    assert len(written) == 1
    assert len(said) == 1
    assert said[0].startswith("another run is tokenizing into ")


def test_what_a_killed_run_left_is_not_in_the_way(make_config: MakeConfig, tmp_path: Path) -> None:
    expected = open_corpus(make_config(), silent).identity
    (folder,) = cached(tmp_path)
    partial = folder.with_name(f".partial-{folder.name}")
    folder.rename(partial)
    (partial / "manifest.json").unlink()
    assert folder.with_name(f".{folder.name}.lock").exists()
    assert open_corpus(make_config(), silent).identity == expected
    assert not partial.exists()


def test_too_little_data_leave_nothing_in_the_way_of_more(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    config = make_config(f"data.files={file}")
    for text, message in [("few words", "training share .* data.sequence_length"), ("\n", "no documents")]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            open_corpus(config, silent)
        assert not cached(tmp_path)
    file.write_text(" ".join(map(str, range(900))))
    assert open_corpus(config, silent).rows.next_rows(1).shape == (1, 33)


def test_files_that_have_changed_since_are_said(make_config: MakeConfig, tmp_path: Path) -> None:
    file, said = tmp_path / "some.txt", list[str]()
    file.write_text(" ".join(map(str, range(900))))
    config = make_config(f"data.files={file}")
    first = open_corpus(config, silent)
    file.write_text(" ".join(map(str, range(1000))))
    assert open_corpus(config, said.append).identity == first.identity
    file.unlink()
    assert open_corpus(config, said.append).identity == first.identity
    assert len(said) == 1
    assert said[0].startswith("data.files have changed since")


def test_a_damaged_cache_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    open_corpus(make_config(), silent)
    (folder,) = cached(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    with (folder / "tokens.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DamagedError, match=r"contents of tokens\.bin .*; delete .* to tokenize again"):
        open_corpus(make_config(), silent)
    (folder / "tokens.bin").unlink()
    del manifest["files"]["tokens.bin"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match=r"does not list tokens\.bin; delete .* to tokenize again"):
        open_corpus(make_config(), silent)


def test_tokens_that_cannot_be_written_are_one_line(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*/file/tokens/.*Not a directory; .*choose another"):
        open_corpus(make_config(f"data.cache_dir={tmp_path}/file"), silent)
    # The key comes first: a long name would push it out.
    with pytest.raises(ValueError, match=r"^data\.cache_dir: cannot write longlong.*: File name too long; "):
        open_corpus(make_config(f"data.cache_dir={'long' * 1000}"), silent)

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device; make room there"):
        open_corpus(make_config(), silent)
    assert not list((tmp_path / "run/data/tokens").glob(".partial*"))


@pytest.mark.parametrize("eos", [0, None])
def test_token_binaries(make_config: MakeConfig, tmp_path: Path, eos: int | None) -> None:
    generator = np.random.default_rng(0)
    for name, size in (("a", 700), ("b", 400)):
        tokens = generator.integers(1, 300, size).astype(np.uint16)
        tokens[49::50] = 0
        tokens.tofile(tmp_path / f"{name}.bin")
    extra = [f"model.config.eos_token_id={eos}"] if eos is not None else []
    config = make_config(
        f"data.files={tmp_path}/*.bin", "tokenizer.vocab_size=0", "model.config.vocab_size=300", *extra
    )
    corpus = open_corpus(config, silent)
    assert corpus.tokenizer is None
    assert corpus.eos == eos
    assert 900 <= np.diff(corpus.rows.documents).sum() < 1100  # type: ignore[attr-defined]
    assert corpus.num_ids == 300
    row = corpus.rows.next_rows(1)[0]
    assert row.shape == (33,)
    assert 0 <= row.min() <= row.max() < 300


@pytest.mark.parametrize(("kept", "read"), [("uint32", "uint16"), ("uint64", "uint32")])
@pytest.mark.parametrize("vocabulary", [300, 130_000])
def test_wider_tokens_than_configured_are_an_error(
    make_config: MakeConfig, tmp_path: Path, kept: str, read: str, vocabulary: int
) -> None:
    tokens = np.random.default_rng(0).integers(0, vocabulary, 999)
    tokens.astype(kept).tofile(tmp_path / "a.bin")
    words = ("tokenizer.vocab_size=0", f"model.config.vocab_size={vocabulary}", f"data.token_dtype={read}")
    with pytest.raises(ValueError, match=rf"a\.bin holds wider tokens than {read} \(data\.token_dtype\): .*uint32"):
        open_corpus(make_config(f"data.files={tmp_path}/a.bin", *words), silent)


def test_half_a_token_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"a\.bin .* uint16 tokens \(data\.token_dtype\)"):
        open_corpus(make_config(f"data.files={tmp_path}/a.bin", "tokenizer.vocab_size=0"), silent)


# ---- The tokenizer: which one a run takes, and one trained on the corpus --------------------------------------------


BINARY = ("data.files=a.bin", "tokenizer.vocab_size=0")
NAMED = ("model.config={}", "model.name=some/model")


def test_trained_tokenizer_round_trips_any_text_and_ends_documents(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = train_tokenizer(make_config())
    trained.save_pretrained(tmp_path / "tok")
    trained.split_special_tokens = True
    for tokenizer in (trained, load_tokenizer(tmp_path / "tok", special_tokens="text")):
        assert len(tokenizer) <= 320
        for text in ("x = 1\n\treturn  alpha", "\u00e9\u4e2d\U0001f600", f"source that says {END_OF_TEXT} in it"):
            (ids,) = encode(tokenizer, [text])
            assert ids[-1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in ids[:-1]
            assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("tokenizer.vocab_size=0", "tokenizer.name=other"), "other"),
        ((*NAMED, "tokenizer.vocab_size=0", "tokenizer.name=other"), "other"),
        ((*NAMED, "tokenizer.vocab_size=0"), "some/model"),  # the model's own
        (NAMED, ""),  # a vocabulary size asks for one to be trained, whatever the model
        (BINARY, ""),
    ],
)
def test_which_tokenizer_is_loaded(make_config: MakeConfig, arguments: tuple[str, ...], name: str) -> None:
    assert tokenizer_name(make_config(*arguments)) == name
    assert arguments != BINARY or make_tokenizer(make_config(*arguments)) is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tokenizer.vocab_size=0"], "set tokenizer.vocab_size"),
        (["tokenizer.vocab_size=0", "tokenizer.name=nothing"], "cannot load the tokenizer 'nothing'"),
        (["tokenizer.chat_template=%s"], "tokenizer.chat_template: no file"),
        ([f"tokenizer.chat_template={'long' * 100}"], "tokenizer.chat_template: no file"),
        (["tokenizer.chat_template=TMP/latin.jinja"], "latin.jinja': not UTF-8"),
    ],
)
def test_refused_tokenizers(make_config: MakeConfig, tmp_path: Path, words: list[str], named: str) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    config = make_config(*(word.replace("TMP", str(tmp_path)) for word in words))
    with pytest.raises(ValueError, match=re.escape(named)):
        make_tokenizer(config)


@pytest.mark.parametrize(("is_fast", "end"), [(False, 0), (True, None)])
def test_a_tokenizer_that_cannot_pack_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool, end: int | None
) -> None:
    monkeypatch.setattr(module, "load_pretrained", lambda *_: SimpleNamespace(is_fast=is_fast, eos_token_id=end))
    with pytest.raises(ValueError, match="'slow' must be a fast one with an end-of-text token"):
        load_tokenizer("slow")


@pytest.mark.parametrize("given", ["saved", "saved/*", "saved/data-00000-of-00001.arrow"])
@pytest.mark.parametrize("key", ["files", "dataset"])
def test_what_save_to_disk_wrote_is_told_apart(make_config: MakeConfig, tmp_path: Path, given: str, key: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    config = make_config(f"data.{key}={tmp_path / given}", *(["data.files=[]"] if key == "dataset" else []))
    with pytest.raises(ValueError, match=r"saved' was written by datasets\.save_to_disk, .*to_parquet"):
        open_corpus(config, silent)


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
    tokenizer = SimpleNamespace(chat_template="")
    set_chat_template(tokenizer, str(tmp_path / "template.jinja"))
    assert tokenizer.chat_template == "{{ messages }}"
