"""Sources of documents, the tokenizer, and the token cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overcoat.train import tokenizer
from overcoat.train.config import Config, DataConfig
from overcoat.train.corpus import open_corpus
from overcoat.train.files import DamagedError
from overcoat.train.sources import documents
from overcoat.train.tokenizer import encode

MakeConfig = Callable[..., Config]


def silent(_text: str) -> None:
    pass


def test_sizes_are_counted_in_bytes(tmp_path: Path, make_config: MakeConfig) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number:02d}" + "\u4e2d" * 100, encoding="utf-8")  # 302 bytes
    files = [str(tmp_path / "*.txt")]
    assert len(list(documents(DataConfig(files=files, max_bytes=1000)))) == 3
    config = make_config(f"data.files={files[0]}", "tokenizer.train_bytes=1000")
    assert len(list(tokenizer._sample(config))) == 4  # the one that reaches it is the last


@pytest.mark.parametrize("argument", ["data.max_bytes=10", "data.streaming=true"])
def test_what_binaries_ignore_is_an_error(make_config: MakeConfig, argument: str) -> None:
    with pytest.raises(ValueError, match=r"does not apply to \.bin files"):
        make_config("data.files=a.bin", argument)


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
    texts = list(documents(config.data))
    tokenizer = corpus.tokenizer
    assert tokenizer is not None
    held = tokenizer.decode(corpus.held_out[:, 1:].ravel().tolist())
    rows = corpus.rows.next_rows(corpus.rows.num_rows)  # type: ignore[attr-defined]
    trained = tokenizer.decode(np.unique(rows, axis=0).ravel().tolist())
    titles = {text.splitlines()[0] for text in texts}
    in_held = {title for title in titles if f"{title}\n" in held}
    assert in_held
    assert all(f"{title}\n" not in trained for title in in_held)
    total = sum(len(ids) for ids in encode(tokenizer, texts))
    in_training = np.diff(corpus.rows.documents).sum()  # type: ignore[attr-defined]
    assert in_training + sum(len(i) for t, i in zip(texts, encode(tokenizer, texts)) if _held(t, in_held)) >= (
        0.97 * total
    )


def _held(text: str, titles: set[str]) -> bool:
    return text.splitlines()[0] in titles


def test_other_data_in_the_same_cache_is_an_error(make_config: MakeConfig) -> None:
    open_corpus(make_config(), silent)
    with pytest.raises(ValueError, match="tokenized from other data"):
        open_corpus(make_config("tokenizer.vocab_size=300"), silent)


def test_a_damaged_cache_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    open_corpus(make_config(), silent)
    with (tmp_path / "run/data/tokens/tokens.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DamagedError, match=r"contents of tokens\.bin"):
        open_corpus(make_config(), silent)


def test_rows_longer_than_the_data_are_an_error(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"no full row of data\.sequence_length = 100000"):
        open_corpus(make_config("data.sequence_length=100000"), silent)


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


def test_a_torn_binary_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    config = make_config(f"data.files={tmp_path}/a.bin", "tokenizer.vocab_size=0")
    with pytest.raises(ValueError, match="is not a file of uint16 tokens"):
        open_corpus(config, silent)


def test_no_tokenizer_is_an_error(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        open_corpus(make_config("tokenizer.vocab_size=0"), silent)


def test_streaming_holds_out_the_same_rows_every_time(make_config: MakeConfig) -> None:
    config = make_config("data.streaming=true", "data.held_out=0.3", "data.shuffle_rows=4")
    first, second = open_corpus(config, silent), open_corpus(config, silent)
    assert len(first.held_out) == config.eval.rows
    assert np.array_equal(first.held_out, second.held_out)
    assert np.array_equal(first.rows.next_rows(5), second.rows.next_rows(5))


def test_the_identity_of_a_stream_is_what_it_is_made_of(make_config: MakeConfig, tmp_path: Path) -> None:
    def identity(folder: str, *arguments: str) -> str:
        return open_corpus(
            make_config(
                "data.streaming=true", "data.held_out=0.3", f"data.files={tmp_path / folder}/*.txt", *arguments
            ),
            silent,
        ).identity

    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for number in range(40):
            (tmp_path / folder / f"{number}.txt").write_text(f"document {number} " * 30)
    first = identity("one")
    assert identity("one", "train.seed=3") == first
    shutil.rmtree(tmp_path / "run")
    assert identity("two") == first  # a moved folder is the same data
    with (tmp_path / "one/7.txt").open("a") as file:
        file.write("more")
    shutil.rmtree(tmp_path / "run")
    assert identity("one") != first
