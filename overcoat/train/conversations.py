"""Read conversations from the rows of the data: `examples(config)`.

    "messages"            a list of messages (messages.py), in the field `data.messages_key`
    "prompt-completion"   two texts, or two lists of messages; a text is put into `data.prompt_template`

Beside messages a row may have `system` (text), `tools` and `chat_template_kwargs`, as TRL reads them, and images
(images.py); `data.prompt_template` may name any field. Errors name the file, the
row and the field: for rows of another shape, and for fields of a conversation that would be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from overcoat.train.config import DataConfig, require
from overcoat.train.images import named_images, part_types, place_images
from overcoat.train.messages import messages_of, text_of_message, tools_of, with_system
from overcoat.train.rows import as_data, as_object, as_text, field_of, kind_of
from overcoat.train.sources import rows

BESIDE = ("system", "tools", "chat_template_kwargs")  # fields that belong to conversations
TO_PROMPT = (*BESIDE, "instruction", "input", "context", "history")  # and those that may belong to a prompt of text
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}|\{([^\W\d][\w .-]*)\}")


def examples(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, conversation) for every row, checked. A conversation has "messages", or "prompt" and "completion";
    optionally "tools", "options" (of the template) and "images"; "unread" lists fields that are not used."""
    for where, row in rows(data):
        yield where, _example(data, as_object(row, where), where)


def _example(data: DataConfig, row: dict[str, Any], where: str) -> dict[str, Any]:
    names = ["messages"] if data.format == "messages" else ["prompt", "completion"]
    keys = [getattr(data, f"{name}_key") for name in names]
    found: dict[str, Any] = {}
    for name, key in zip(names, keys, strict=True):
        value, place = field_of(row, key, f"data.{name}_key", where), f"{where}: {key!r}"
        is_text = name != "messages" and not isinstance(value, list)
        found[name] = as_text(value, place) if is_text else messages_of(value, place)
    learned = found[names[-1]]
    for number, message in enumerate(learned if isinstance(learned, list) else []):
        for key in ("weight", "train", "loss"):  # by which other trainers leave a turn's tokens out
            require(
                message["role"] != "assistant" or message.get(key, 1) == 1,
                f"{place}[{number}].{key} is {message.get(key)!r}: every turn of the assistant is trained on; "
                "remove the turn, or the key to train on it",
            )
    kinds = {type(value) for value in found.values()}
    require(len(kinds) == 1, f"{where}: {' and '.join(names)} are not both text, or both messages: correct the row")
    if str in kinds:
        keys += [name or "" for _, name in PLACEHOLDER.findall(data.prompt_template)]
        found["prompt"] = fill(data.prompt_template, found["prompt"], row, where)
        lost = [name for name in TO_PROMPT if row.get(name) and name not in keys]
        require(
            not lost or data.on_lost == "warn",
            f"{where}: the field {' and '.join(map(repr, lost))} would be left out: name it in data.prompt_template "
            f"({{prompt}} ... {{{lost and lost[0]}}}), remove it from the rows, or set data.on_lost = 'warn'",
        )
    else:
        keys += BESIDE
        found[names[0]] = with_system(found[names[0]], row.get("system"), f"{where}: 'system'")
        if tools := tools_of(row.get("tools"), f"{where}: 'tools'"):
            found["tools"] = tools
        options = as_data(row.get("chat_template_kwargs"), f"{where}: 'chat_template_kwargs'") or {}
        what = f"{where}: 'chat_template_kwargs' holds {kind_of(options)}"
        require(isinstance(options, dict), f"{what}, not an object: correct or remove it")
        found |= {"options": options} if options else {}
    if data.images:
        found["images"], keys = place_images(found["messages"], row, where), [*keys, "images", "image"]
    else:
        named = named_images(found, row)
        require(
            not named,
            f"{where}: {named} names images, which would be left out: set data.images to their folder, with "
            "data.format = 'messages' and a vision-language model.name, or remove them from the rows",
        )
        heard = next((kind for kind in part_types(found) if "video" in kind or "audio" in kind), None)
        require(heard is None, f"{where}: a part of type {heard!r}: text and images are supported")
    unread = [name for name, value in row.items() if name not in keys and value not in (None, "", [], {})]
    return {**found, "unread": unread}


def fill(template: str, prompt: str, row: dict[str, Any] | None, where: str) -> str:
    """Return `data.prompt_template` filled with the prompt and the row's other fields ("" for null; {{...}} gives
    {...}). row: None if only the prompt is known. ValueError: a name is no field, or its value is not text."""

    def value_of(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal or name == "prompt":
            return f"{{{literal}}}" if literal else prompt
        if row is None:
            return ""
        value = field_of(row, name, "{...} in data.prompt_template; {{...}} is no name", where)
        is_number = isinstance(value, int | float)
        return str(value) if is_number else as_text("" if value is None else value, f"{where}: {name!r}")

    return PLACEHOLDER.sub(value_of, template)


def texts(data: DataConfig) -> Iterator[str]:
    """Yield the text of all conversations, to train a tokenizer on."""
    for _, example in examples(data):
        for said in (example[name] for name in ("messages", "prompt", "completion") if name in example):
            yield from filter(None, [said] if isinstance(said, str) else map(text_of_message, said))


def image_paths(row: Any, key: str, where: str) -> list[str]:
    """Return the image paths that a row with messages names."""
    found = {"messages": messages_of(field_of(row, key, "data.messages_key", where), f"{where}: {key!r}")}
    return place_images(found["messages"], row, where) if named_images(found, row) else []
