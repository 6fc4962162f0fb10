"""Tokenize text: begin-of-text tokens, EOS, and special tokens that a text spells out.

A document is what the tokenizer makes of a text, as in transformers and TRL: its begin-of-text tokens (Llama, Gemma;
most others have none), the text, and EOS; each once, even if the text spells it or the tokenizer adds EOS by itself.
A `Continuation`, a later piece of a long document, has no begin-of-text tokens.

`data.special_tokens` says how special tokens spelled out in a text ("<|im_end|>") are read: as "tokens", as
transformers and TRL do, or as plain "text". transformers keeps that in `tokenizer.split_special_tokens`, and sets the
backend anew in every call. The text of a chat template is always read as tokens.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from overcoat.train.sources import Continuation


def edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer puts before and after a text."""
    bare, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    starts = range(len(full) - len(bare) + 1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), len(full))
    return full[:start], full[start + len(bare) :]


def begin(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text to be continued: with the tokenizer's begin-of-text tokens, without EOS."""
    before = edges(tokenizer)[0]
    ids = list(_backend(tokenizer).encode(text, add_special_tokens=False).ids)
    return ids if ids[: len(before)] == before else before + ids


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each document, with begin-of-text tokens and EOS, computed on all CPU cores."""
    before, after = edges(tokenizer)
    end = tokenizer.eos_token_id
    after = after if after[-1:] == [end] else [*after, end]
    found = []
    for text, item in zip(texts, _backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False), strict=True):
        ids = item.ids
        is_begun = isinstance(text, Continuation) or ids[: len(before)] == before
        ids = ids if is_begun else before + ids
        found.append(ids if ids[-len(after) :] == after else ids + after)
    return found


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer's backend, set to read special tokens as the tokenizer does, without truncation or
    padding."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.no_truncation()  # some tokenizer.json say so, and calls of the tokenizer itself do not heed it
    backend.no_padding()
    return backend


class Spelled:
    """Count of texts that spell out special tokens."""

    def __init__(self, tokenizer: Any):
        names = sorted(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        names = [name for name in names if name.strip()]
        self.pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self.as_text = tokenizer.split_special_tokens
        self.count, self.first = 0, ""

    def see(self, text: str) -> None:
        """Count `text` if it spells out a special token."""
        found = self.pattern.search(text) if self.pattern else None
        if found:
            self.count += 1
            self.first = self.first or found[0]

    def warn_of(self, texts: list[str]) -> None:
        """Warn once, at the first text of a stream that spells out a special token."""
        for text in texts if not self.count else []:
            self.see(text)
            if self.count:
                warnings.warn(self.note(""), stacklevel=2)
                return

    def note(self, of: str, is_rendered: bool = False) -> str:
        """Return one line for the user, "" if no text was counted. of: "of 1,000 documents"; is_rendered: a chat
        template rendered the texts."""
        if not self.count:
            return ""
        texts = f"{self.count:,} {of} spell" if of else "documents spell"
        if is_rendered:
            return f"{texts} special tokens, the first {self.first!r}: read as tokens, as all that a template renders"
        how, other = ("text", "tokens") if self.as_text else ("tokens", "text")
        return (
            f"{texts} special tokens, the first {self.first!r}: read as {how} (data.special_tokens = {how!r}; "
            f"{other!r} reads them as {other})"
        )
