"""Text as tokens: begin-of-text and end-of-text once, and special tokens that a text spells out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from overcoat.train.chat import prompt_ids
from overcoat.train.config import DataConfig
from overcoat.train.corpus import open_corpus
from overcoat.train.encoding import Spelled, begin, edges, encode
from overcoat.train.sources import Continuation, read_documents
from tests.train.runs import MakeConfig

KINDS = {  # what the tokenizer itself makes of a text: "<s> $A"; of T5 "$A </s>"; of GLM two before it
    "none": "$A",
    "begin": "<s> $A",
    "end": "$A </s>",
    "both": "<s> $A </s>",
    "two": "<|im_end|> <s> $A",
}
BOS, EOS, TURN = 0, 1, 2


def tokenizer_of(kind: str, as_text: bool = False) -> Any:
    """A byte-level tokenizer of single bytes."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    special = ["<s>", "</s>", "<|im_end|>"]
    vocabulary = {name: number for number, name in enumerate([*special, *sorted(byte_level.alphabet())])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    pairs = list(zip(special, range(3), strict=True))
    backend.post_processor = TemplateProcessing(KINDS[kind], special_tokens=pairs)
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    found.split_special_tokens = as_text
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["some text", "", " spaced\n", "\u00e9 \U0001f600", "with <|im_end|> in it"])
def test_a_document_is_what_the_tokenizer_makes_of_a_text_and_one_end(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    own = tokenizer(text).input_ids
    expected = own if own[-1:] == [EOS] else [*own, EOS]
    assert encode(tokenizer, [text, text]) == [expected, expected]
    assert begin(tokenizer, text) == expected[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_text_spells_itself_stands_there_once(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = edges(tokenizer)[0]
    (ids,) = encode(tokenizer, [tokenizer.decode(before) + "text</s>"])
    assert ids == [*before, *tokenizer("text", add_special_tokens=False).input_ids, EOS]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_read_as_text_survive_calls_of_the_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind, as_text=True)
    tokenizer("a call sets the backend anew")
    text = "<s>with <|im_end|> in it</s>"
    for ids in (encode(tokenizer, [text])[0][:-1], begin(tokenizer, text)):
        inner = ids[len(edges(tokenizer)[0]) :]
        assert min(inner) > TURN
        assert tokenizer.decode(inner) == text


def test_a_tokenizer_file_that_says_so_does_not_cut_documents() -> None:
    tokenizer = tokenizer_of("begin")
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert len(encode(tokenizer, ["a long text"])[0]) == 13
    assert len(begin(tokenizer, "a long text")) == 12


def test_only_the_first_piece_of_a_long_document_begins(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a line of text\n" * 30000)
    pieces = list(read_documents(tmp_path / "long.txt", "text"))
    assert [isinstance(piece, Continuation) for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    assert "".join(pieces) == "a line of text\n" * 30000
    begun = [ids[0] == BOS for ids in encode(tokenizer_of("begin"), pieces)]
    assert begun == [True] + [False] * (len(pieces) - 1)


def test_a_sample_begins_as_training_does_and_goes_on() -> None:
    prompted = DataConfig(files=["a"], format="prompt-completion", prompt_template="Q: {prompt}")
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        for data, text in ((DataConfig(files=["a"]), "ask"), (prompted, "Q: ask")):
            (ids,) = encode(tokenizer, [text + " more"])
            found = prompt_ids(data, tokenizer, "ask")
            assert found == ids[: len(found)]
            assert found[-1] != EOS


def test_spelled_tokens_are_counted_and_said_once(make_config: MakeConfig, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("begin")
    tokenizer.save_pretrained(tmp_path / "tok")
    lines = [f"a text of number {number} <|im_end|>" if number % 2 else f"plain {number}" for number in range(60)]
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.txt").write_text(line * 3)
    found = {}
    for way in ("tokens", "text"):
        arguments = (f"data.files={tmp_path}/*.txt", f"tokenizer.name={tmp_path}/tok", "tokenizer.vocab_size=0")
        for _ in range(2):  # tokenized, and found
            said: list[str] = []
            corpus = open_corpus(make_config(*arguments, f"data.special_tokens={way}"), said.append)
            (line,) = [line for line in said if "special tokens" in line]
            assert line.startswith(f"30 of 60 documents spell special tokens, the first '<|im_end|>': read as {way}")
        found[way] = corpus
        rows = corpus.rows.next_rows(corpus.rows.num_rows)  # type: ignore[union-attr]
        assert (TURN in rows) == (way == "tokens")
        assert BOS in rows
    assert found["tokens"].identity != found["text"].identity


def test_a_stream_warns_at_its_first_special_token() -> None:
    spelled = Spelled(tokenizer_of("none"))
    spelled.warn_of(["plain"])
    with pytest.warns(UserWarning, match=r"documents spell special tokens, the first '</s>': read as tokens"):
        spelled.warn_of(["plain", "a </s>"])
    spelled.warn_of(["a <s>"])  # a warning would be an error
