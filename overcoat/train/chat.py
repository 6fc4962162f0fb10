"""Conversations: from a row of the data to tokens, and which of them are trained on.

    "messages"            a list of {role, content}, or of {from, value} (ShareGPT, LLaVA); the assistant's tokens
    "prompt-completion"   two texts, or two lists of messages; the completion's tokens

The tokenizer's chat template says what the assistant's tokens are ({% generation %}); for templates that do not, TRL
has versions that do. Tokens and labels are those of TRL's SFTTrainer, with `assistant_only_loss` for messages. A row
of another shape is an error that names file, row and field.

A token is kept as uint32: its id, with the flag TRAINED where it is a label.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from overcoat.extras import load_extra, reason
from overcoat.train.config import DataConfig, require
from overcoat.train.sources import KINDS, as_text, field_of, rows

TRAINED = 1 << 31
SHAREGPT = {"human": "user", "gpt": "assistant"}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def examples(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every conversation, checked, with where it is: its "messages", or "prompt" and "completion"; perhaps "tools"."""
    for where, row in rows(data):
        names = ["messages"] if data.format == "messages" else ["prompt", "completion"]
        found: dict[str, Any] = {}
        for name in names:
            key = getattr(data, f"{name}_key")
            value, place = field_of(row, key, f"{name}_key", where), f"{where}: {key!r}"
            is_text = name != "messages" and not isinstance(value, list)
            found[name] = as_text(value, place) if is_text else _messages(value, place)
        kinds = {type(value) for value in found.values()}
        require(len(kinds) == 1, f"{where}: {' and '.join(names)} are not both text, or both messages: correct the row")
        if str in kinds:
            found["prompt"] = data.prompt_template.replace("{prompt}", found["prompt"])
        elif row.get("tools"):
            found["tools"] = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]
        yield where, found


def texts(data: DataConfig) -> Iterator[str]:
    """What is said in all conversations, for a tokenizer that is trained on it."""
    for _, example in examples(data):
        for said in example.values():
            parts = [said] if isinstance(said, str) else [each.get("content") for each in said]
            yield from (part for part in parts if isinstance(part, str))


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    what = "an empty list" if value == [] else KINDS.get(type(value), f"a {type(value).__name__}")
    require(isinstance(value, list) and bool(value), f"{where} holds {what}, not a list of messages: correct the row")
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    what = KINDS.get(type(message), f"a {type(message).__name__}")
    require(isinstance(message, dict), f"{where} holds {what}, not a message: correct or remove the row")
    given = {key: value for key, value in message.items() if value is not None}
    if "from" in given:
        role, content = given.pop("from"), given.pop("value", None)
        given |= {"role": SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": content}
    as_text(given.get("role"), f"{where}.role")
    content = given.get("content")
    if not isinstance(content, list):
        if content is not None or not given.get("tool_calls"):
            as_text(content, f"{where}.content")
        return given
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        require(isinstance(part, dict), f"{place} holds no object with a type: correct or remove the row")
        if as_text(part.get("type"), f"{place}.type") == "text":
            as_text(part.get("text"), f"{place}.text")
    return given


def training_template(tokenizer: Any) -> str | None:
    """A chat template that marks the assistant's tokens; None: the tokenizer's own does.

    Raises:
        ValueError: there is none, so that what to train on is not known.
    """
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    require(
        bool(own),
        "data.format = 'messages': the tokenizer has no chat template: set tokenizer.chat_template to a file, or to a "
        "tokenizer that has one",
    )
    template, trl = None, load_extra("trl.chat_template_utils", "hf", "data.format = 'messages'")
    if not MARKED.search(own):
        try:
            template = trl.get_training_chat_template(tokenizer)
        except ValueError as error:
            raise ValueError(
                "the tokenizer's chat template does not mark the assistant's tokens ({% generation %}), and TRL has no "
                "version of it that does: mark them in a copy, and set tokenizer.chat_template to its file"
            ) from error
    if not trl.is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        warnings.warn(
            "the chat template leaves the token that ends the assistant's turn out of what is trained on: the model "
            "may not learn to stop. Put it before {% endgeneration %}",
            stacklevel=2,
        )
    return template


class Encoder:
    """Tokens of conversations."""

    def __init__(self, data: DataConfig, tokenizer: Any):
        self.tokenizer = tokenizer
        self.template = training_template(tokenizer) if data.format == "messages" else None

    def __call__(self, example: dict[str, Any], where: str) -> tuple[np.ndarray, int]:
        """Its tokens, uint32, and how many of the first ones it takes to have a label.

        Raises:
            ValueError: the template refuses it, or nothing of it is trained on.
        """
        if "messages" in example:
            found = self._apply(example["messages"], example, where, return_assistant_tokens_mask=True)
            ids, is_trained = found["input_ids"], found["assistant_masks"]
        else:
            prompt, ids = self._prompt_and_all(example, where)
            ends = (at for at, both in enumerate(zip(prompt, ids, strict=False)) if both[0] != both[1])
            shared = next(ends, min(len(prompt), len(ids)))
            is_trained = [0] * shared + [1] * (len(ids) - shared)
        tokens = np.asarray(ids, dtype=np.uint32) | np.asarray(is_trained, dtype=np.uint32) * np.uint32(TRAINED)
        labels = np.flatnonzero(tokens[1:] & TRAINED)
        require(bool(len(labels)), f"{where}: nothing in it to train on, such as an assistant's turn: remove the row")
        return tokens, int(labels[0]) + 2

    def _prompt_and_all(self, example: dict[str, Any], where: str) -> tuple[list[int], list[int]]:
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, list):
            begun = self._apply(prompt, example, where, add_generation_prompt=True)
            return begun["input_ids"], self._apply(prompt + completion, example, where)["input_ids"]
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer((prompt + completion).removesuffix(self.tokenizer.eos_token))["input_ids"]
        return self.tokenizer(prompt)["input_ids"], ids if ids[-1:] == [end] else [*ids, end]

    def _apply(self, messages: list[dict[str, Any]], example: dict[str, Any], where: str, **options: Any) -> Any:
        try:
            return apply_template(
                self.tokenizer, messages, tools=example.get("tools"), chat_template=self.template, **options
            )
        except Exception as error:  # of any kind: a template is a program
            raise ValueError(f"{where}: the chat template cannot render it: {reason(error)}") from error


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """The tokens of messages, in which special tokens are read as such: templates are made of them."""
    backend = tokenizer.backend_tokenizer
    before, backend.encode_special_tokens = backend.encode_special_tokens, False
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    finally:
        backend.encode_special_tokens = before


def prompt_ids(data: DataConfig, tokenizer: Any, prompt: str) -> list[int]:
    """What the model is given to answer `prompt`, as it was trained."""
    if data.format == "messages":
        asked = [{"role": "user", "content": prompt}]
        return list(apply_template(tokenizer, asked, add_generation_prompt=True)["input_ids"])
    return list(tokenizer(data.prompt_template.replace("{prompt}", prompt)).input_ids)
