"""Conversations: from a row of the data to tokens, and which of them are trained on.

    "messages"            a list of {role, content}, or of {from, value} (ShareGPT, LLaVA); the assistant's tokens
    "prompt-completion"   two texts, or two lists of messages; the completion's tokens

The tokenizer's chat template says what the assistant's tokens are ({% generation %}); for templates that do not, TRL
has versions that do. Tokens and labels are those of TRL's SFTTrainer, with `assistant_only_loss` for messages. A row
of another shape is an error that names file, row and field.

With `data.images` a row names its images where they stand: in a message's parts ({"type": "image", "image": PATH}), or
in its field "images" (or "image"), in the order of the parts without a path, or of `<image>` in the texts (as LLaVA's
data have it). Paths are relative to `data.images`. The model's processor puts each image's tokens in.

A token is kept as uint32: its id, with the flag TRAINED where it is a label.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.extras import load_extra
from overcoat.train.config import DataConfig, error_context, require
from overcoat.train.encoding import begin, encode
from overcoat.train.sources import KINDS, as_text, field_of, parsed, rows

TRAINED = 1 << 31
MARK = "<image>"
SHAREGPT = {"human": "user", "gpt": "assistant"}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def examples(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every conversation, checked, with where it is: its "messages", or "prompt" and "completion"; perhaps "tools"."""
    for where, row in rows(data):
        names = ["messages"] if data.format == "messages" else ["prompt", "completion"]
        found: dict[str, Any] = {}
        for name in names:
            key = getattr(data, f"{name}_key")
            value, place = field_of(row, key, f"data.{name}_key", where), f"{where}: {key!r}"
            is_text = name != "messages" and not isinstance(value, list)
            found[name] = as_text(value, place) if is_text else _messages(value, place)
        learned = found[names[-1]]
        for number, message in enumerate(learned if isinstance(learned, list) else []):
            for key in ("weight", "train"):  # by which other trainers leave a turn's tokens out
                require(
                    message["role"] != "assistant" or message.get(key, 1) == 1,
                    f"{place}[{number}].{key} is {message.get(key)!r}: every turn of the assistant is trained on; "
                    "remove the turn, or the key to train on it",
                )
        kinds = {type(value) for value in found.values()}
        require(len(kinds) == 1, f"{where}: {' and '.join(names)} are not both text, or both messages: correct the row")
        if str in kinds:
            found["prompt"] = data.prompt_template.replace("{prompt}", found["prompt"])
        if data.images:
            found["images"] = place_images(found["messages"], row, where)
        else:
            named = _named_images(found, row)
            require(
                not named,
                f"{where}: {named} names images, which would be left out: set data.images to their folder, with "
                "data.format = 'messages' and a vision-language model.name, or remove them from the rows",
            )
            heard = next((kind for kind in _part_types(found) if "video" in kind or "audio" in kind), None)
            require(heard is None, f"{where}: a part of type {heard!r}: text and images are supported")
        if str not in kinds and row.get("tools"):
            found["tools"] = _tools(row["tools"], f"{where}: 'tools'")
        yield where, found


def texts(data: DataConfig) -> Iterator[str]:
    """The text of all conversations, to train a tokenizer on."""
    for _, example in examples(data):
        for said in (example[name] for name in ("messages", "prompt", "completion") if name in example):
            parts = [said] if isinstance(said, str) else [each.get("content") for each in said]
            yield from (part for part in parts if isinstance(part, str))


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    what = "an empty list" if value == [] else KINDS.get(type(value), f"a {type(value).__name__}")
    require(isinstance(value, list) and bool(value), f"{where} holds {what}, not a list of messages: correct the row")
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(value)]


def _tools(value: Any, where: str) -> list[Any]:
    """A list of tools, or its JSON."""
    tools = parsed(value, where) if isinstance(value, str) else value
    require(isinstance(tools, list), f"{where} holds {KINDS.get(type(tools), 'none')}, not a list: correct the row")
    for number, tool in enumerate(tools):
        require(isinstance(tool, dict), f"{where}[{number}] is no object: correct or remove it")
    return list(tools)


def _message(message: Any, where: str) -> dict[str, Any]:
    what = KINDS.get(type(message), f"a {type(message).__name__}")
    require(isinstance(message, dict), f"{where} holds {what}, not a message: correct or remove the row")
    given = {key: value for key, value in message.items() if value is not None}
    is_sharegpt = "from" in given or ("from" in message and "role" not in message)
    names = ("from", "value") if is_sharegpt else ("role", "content")
    needed = names[:1] if given.get("tool_calls") else names
    if missing := [name for name in needed if name not in message]:
        among = " among " + ", ".join(map(str, message)) if message else ""
        raise ValueError(f"{where} has no field {missing[0]!r}{among}: rename one, or correct the row")
    role, content = as_text(given.get(names[0]), f"{where}.{names[0]}"), given.get(names[1])
    if is_sharegpt:
        both = [key for key in ("role", "content") if key in given]
        require(not both, f"{where} has {' and '.join(both)} beside from and value: remove one pair")
        given = {key: value for key, value in given.items() if key not in names}
        given |= {"role": SHAREGPT.get(role, role), "content": content}
    if not isinstance(content, list):
        if content is not None or not given.get("tool_calls"):
            as_text(content, f"{where}.{names[1]}")
        return given
    for number, part in enumerate(content):
        place = f"{where}.{names[1]}[{number}]"
        require(isinstance(part, dict), f"{place} holds no object with a type: correct or remove the row")
        if as_text(part.get("type"), f"{place}.type") == "text":
            as_text(part.get("text"), f"{place}.text")
    return given


def _named_images(found: dict[str, Any], row: Any) -> str:
    """What of a row names images: a field that is not empty, or a part of its messages; "" if nothing does."""
    for key in ("images", "image"):
        value = row.get(key)
        if any(value) if isinstance(value, list) else value:
            return repr(key)
    return next((f"a part of type {kind!r}" for kind in _part_types(found) if "image" in kind), "")


def _part_types(found: dict[str, Any]) -> Iterator[str]:
    """Of the messages' parts."""
    contents = [message.get("content") for said in found.values() if isinstance(said, list) for message in said]
    yield from (part["type"] for content in contents if isinstance(content, list) for part in content)


def place_images(messages: list[dict[str, Any]], row: Any, where: str) -> list[str]:
    """Make the contents of `messages` lists of parts, each image part with its path; returns the paths in order."""
    given = row.get("images") or row.get("image") or []
    waiting = [given] if isinstance(given, str) else list(given)
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts = [text.strip() for text in content.split(MARK)]
            parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
            message["content"] = [part for part in parts if part.get("text", True)] or [{"type": "text", "text": ""}]
    parts = [part for message in messages for part in message.get("content") or [] if part["type"] != "text"]
    users = [message for message in messages if message["role"] == "user"]
    if waiting and not parts and users:  # as TRL does: before the first question
        parts = [{"type": "image"} for _ in waiting]
        users[0]["content"] = [*parts, *users[0]["content"]]
    paths = []
    for part in parts:
        require(part["type"] == "image", f"{where}: a part of type {part['type']!r}: images and text are supported")
        own = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
        require(own is not None or bool(waiting), f"{where}: more image parts than images: correct the row")
        path = waiting.pop(0) if own is None else own
        require(isinstance(path, str), f"{where}: an image is a {type(path).__name__}, not a path: write it to a file")
        paths.append(path)
        part.clear()
        part |= {"type": "image", "image": paths[-1]}
    require(not waiting, f"{where}: {len(waiting)} images more than image parts: correct the row")
    return paths


def image_paths(row: Any, key: str, where: str) -> list[str]:
    """The images that a row with messages names."""
    found = {"messages": _messages(field_of(row, key, "data.messages_key", where), f"{where}: {key!r}")}
    return place_images(found["messages"], row, where) if _named_images(found, row) else []


def read_image(path: Path) -> Any:
    """An RGB image (PIL)."""
    pillow = load_extra("PIL.Image", "hf", "data.images")
    failing = error_context(f"cannot read the image {path} (", Exception, "): repair it, or remove its row")
    with failing, pillow.open(path) as image:
        return image.convert("RGB")


def training_template(tokenizer: Any) -> str | None:
    """A chat template that marks the assistant's tokens; None: the tokenizer's own does. ValueError: there is none, so
    that what to train on is not known."""
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
    """Tokens of conversations; `processor`: of those with images."""

    def __init__(self, data: DataConfig, tokenizer: Any, processor: Any = None):
        self.tokenizer, self.processor, self.folder = tokenizer, processor, Path(data.images)
        self.template = training_template(processor or tokenizer) if data.format == "messages" else None
        self.marks = tokenizer.convert_ids_to_tokens(processor.image_token_ids) if processor else []

    def __call__(self, example: dict[str, Any], where: str) -> tuple[np.ndarray, int]:
        """Its tokens, uint32, and how many of the first ones it takes to have a label. ValueError: the template refuses
        it, or nothing of it is trained on."""
        if "images" in example:
            ids, is_trained = self._with_images(example, where)
        elif "messages" in example:
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
        needed = int(labels[0]) + 2
        if example.get("images"):  # all that is left of each
            needed = max(needed, 1 + int(np.flatnonzero(np.isin(ids, self.processor.image_token_ids))[-1]))
        return tokens, needed

    def _with_images(self, example: dict[str, Any], where: str) -> tuple[list[int], list[int]]:
        """Each image's own tokens are among them, as many as its size asks for."""
        messages = copy.deepcopy(example["messages"])
        for part in (part for message in messages for part in message.get("content") or []):
            held = [mark for mark in self.marks if mark in part.get("text", "")]
            require(not held, f"{where}: the text holds {', '.join(held)}, which stands for an image: correct the row")
            if part["type"] == "image":
                part["image"] = read_image(self.folder / part["image"])
        options = {"add_special_tokens": False}
        found = self._apply(messages, example, where, return_assistant_tokens_mask=True, processor_kwargs=options)
        unknown = sorted(found.keys() & {"token_type_ids", "cross_attention_mask"})
        require(not unknown, f"{type(self.processor).__name__} makes {unknown}, which rows do not hold: not supported")
        return found["input_ids"][0], found["assistant_masks"][0]

    def _prompt_and_all(self, example: dict[str, Any], where: str) -> tuple[list[int], list[int]]:
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, list):
            begun = self._apply(prompt, example, where, add_generation_prompt=True)
            return begun["input_ids"], self._apply(prompt + completion, example, where)["input_ids"]
        return begin(self.tokenizer, prompt), encode(self.tokenizer, [prompt + completion])[0]

    def _apply(self, messages: list[dict[str, Any]], example: dict[str, Any], where: str, **options: Any) -> Any:
        given = {"tools": example.get("tools"), "chat_template": self.template, **options}
        with error_context(f"{where}: the chat template cannot render it: ", Exception):  # a template is a program
            return apply_template(self.processor or self.tokenizer, messages, **given)


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """The tokens of messages, in which special tokens are read as such: templates are made of them."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    before, inner.split_special_tokens = inner.split_special_tokens, False
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    finally:
        inner.split_special_tokens = before


def prompt_ids(data: DataConfig, tokenizer: Any, prompt: str) -> list[int]:
    """What the model is given to answer `prompt`, as it was trained."""
    if data.format == "messages":
        parts: Any = [{"type": "text", "text": prompt}]
        asked = [{"role": "user", "content": parts if data.images else prompt}]
        return list(apply_template(tokenizer, asked, add_generation_prompt=True)["input_ids"])
    return begin(tokenizer, data.prompt_template.replace("{prompt}", prompt))
