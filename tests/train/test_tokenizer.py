"""The tokenizer: which one a run takes, and one trained on the corpus."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from overcoat.train import tokenizer as module
from overcoat.train.tokenizer import (
    END_OF_TEXT,
    encode,
    load_tokenizer,
    make_tokenizer,
    set_chat_template,
    tokenizer_name,
    train_tokenizer,
)
from tests.train.runs import MakeConfig

BINARY = ("data.files=a.bin", "tokenizer.vocab_size=0")
NAMED = ("model.config={}", "model.name=some/model")


def test_trained_tokenizer_round_trips_any_text_and_ends_documents(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = train_tokenizer(make_config())
    trained.save_pretrained(tmp_path / "tok")
    for tokenizer in (trained, load_tokenizer(tmp_path / "tok")):
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


def test_tokens_may_come_without_a_tokenizer_and_text_may_not(make_config: MakeConfig) -> None:
    assert make_tokenizer(make_config(*BINARY)) is None
    with pytest.raises(ValueError, match=r"no tokenizer: set tokenizer\.vocab_size .* or tokenizer\.name"):
        make_tokenizer(make_config("tokenizer.vocab_size=0"))


def test_every_byte_is_a_token_and_merges_fill_the_vocabulary(make_config: MakeConfig) -> None:
    trained = make_tokenizer(make_config("tokenizer.vocab_size=280"))
    assert trained is not None
    assert len(trained) == 280
    assert {trained.bos_token_id, trained.eos_token_id, trained.pad_token_id} == {0}
    # No byte of this text is in the corpus, so each is a token of its own: 2 + 3 + 4 bytes and the end.
    (ids,) = encode(trained, ["\u00e9\u4e2d\U0001f600"])
    assert len(ids) == 2 + 3 + 4 + 1
    assert len(encode(trained, ["alpha beta"])[0]) < len("alpha beta") + 1  # merged by frequency
    assert encode(trained, [""]) == [[trained.eos_token_id]]


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load the tokenizer '.*nothing'"):
        load_tokenizer(tmp_path / "nothing")


@pytest.mark.parametrize(("is_fast", "end"), [(False, 0), (True, None)])
def test_a_tokenizer_that_cannot_pack_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool, end: int | None
) -> None:
    found = SimpleNamespace(is_fast=is_fast, eos_token_id=end, backend_tokenizer=SimpleNamespace())
    monkeypatch.setattr(module, "load_pretrained", lambda *_: found)
    with pytest.raises(ValueError, match=r"the tokenizer 'slow' must be a fast one with an end-of-text token"):
        load_tokenizer("slow")


@pytest.mark.parametrize("template", ["%s", "\x85\u2028", "long" * 100, "-1"])
def test_a_chat_template_that_is_nowhere_is_named_by_its_key(template: str) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer\.chat_template: no file, and cannot load the tokenizer"):
        set_chat_template(None, template)


def test_a_chat_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"^tokenizer\.chat_template = .*template\.jinja': not UTF-8"):
        set_chat_template(None, str(tmp_path / "template.jinja"))
