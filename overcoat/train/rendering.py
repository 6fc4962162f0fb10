"""Check that a chat template shows what a conversation says.

A conversation is rendered a second time with a mark in each text, name, argument and reasoning. What the result lacks,
the template leaves out: a role that it does not know, tools, calls, a list of parts where it wants text. Marks
distinguish equal texts, and survive a template that strips or escapes the text around them; that text is searched for,
too. If a template accepts content in one form only, the conversation is converted to it (FORMS).

`data.on_lost` decides what happens to a loss: the row is refused, or counted and reported once. Reasoning of earlier
turns, which templates drop by design (Qwen 3), is always counted only.
"""

from __future__ import annotations

import functools
import html
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from overcoat.train.config import require
from overcoat.train.messages import CALLS, function_of, text_of_message, with_function

Messages = list[dict[str, Any]]
THINKING = re.compile(r"(</?think>)")
REASONING = ("reasoning_content", "thinking", "reasoning")
UNREAD = (
    "role",
    "content",
    "tools",
    "tool_call_id",
    "id",
    "type",
    *REASONING,
    *CALLS,
)  # of a message, not looked for as text
NO_TEXT = ("type", "id", "tool_use_id", "tool_call_id", "signature")  # of a part
PART_KEY = "ovcpart"  # a field of marked parts, shown only by templates that write a list as it is
THOUGHT = "reasoning in <think>"
EARLIER = "reasoning of earlier turns"


@dataclass(frozen=True)
class Piece:
    """A piece of a conversation: its kind, its text, and the marked text that must appear `count` times in the
    rendering."""

    what: str
    text: str
    mark: str
    marked: str
    count: int = 1
    turn: int = -1
    is_grave: bool = True

    def is_in(self, rendered: str, squashed: Callable[[], str]) -> bool:
        """True if the rendering contains the marks and the text around them."""
        if rendered.count(self.mark) < self.count:
            return False
        if self.marked == self.mark or self.marked in rendered:
            return True
        written = (self.marked, *(json.dumps(self.marked, ensure_ascii=ascii)[1:-1] for ascii in (True, False)))
        return any(_squash(form) in squashed() for form in written)


def _squash(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "", text)


def _with_marks(value: Any, mark: str, unread: Collection[str] = ()) -> tuple[Any, int]:
    """Return a value with the mark at the end of each text in it, and how many these are.

    unread: keys left out; "type" at every depth, others at the first.
    """
    inside = {"type"}.intersection(unread)
    if isinstance(value, dict):
        each = {key: (x, 0) if key in unread else _with_marks(x, mark, inside) for key, x in value.items()}
        return {key: x for key, (x, _) in each.items()}, sum(count for _, count in each.values())
    if isinstance(value, list):
        items = [_with_marks(x, mark, inside) for x in value]
        return [x for x, _ in items], sum(count for _, count in items)
    return (value + mark, 1) if isinstance(value, str) and value.strip() else (value, 0)


class Marker:
    """Puts marks into a conversation and records them as `pieces`."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def conversation(self, messages: Messages, tools: list[Any] | None) -> tuple[Messages, list[Any] | None]:
        marked = [self._message(message, turn) for turn, message in enumerate(messages)]
        return marked, [self._named(tool, "tools", -1) for tool in tools] if tools else tools

    def _message(self, message: dict[str, Any], turn: int) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        made = dict(message)
        for key, value in message.items():
            is_read = key in UNREAD or (key == "name" and role == "tool")  # a result's, whose call has it
            if isinstance(value, str) and not is_read:
                made[key] = self._put(f"the field {key!r} of messages", value, turn, is_grave=False)
        if isinstance(content, str):
            made["content"] = self._content(content, role, turn)
        elif content:
            made["content"] = [
                {**part, "text": self._content(part["text"], role, turn)} if "text" in part else self._part(part, turn)
                for part in content
            ]
        if tools := message.get("tools"):  # which some data have in the system's message, and few templates read there
            is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
            each = [self._named(tool, "tools", turn) for tool in tools] if is_list else None
            made["tools"] = each or self._put("tools", tools if isinstance(tools, str) else json.dumps(tools), turn)
        thoughts = {key: message[key] for key in REASONING if isinstance(message.get(key), str)}
        marked = {text: self._put("reasoning", text, turn) for text in set(thoughts.values())}  # one may have two names
        made |= {key: marked[text] for key, text in thoughts.items()}
        for key in CALLS:
            if isinstance(calls := message.get(key), list):
                made[key] = [self._call(call, turn) for call in calls]
            elif calls:
                made[key] = self._call(calls, turn)
        return made

    def _part(self, part: dict[str, Any], turn: int) -> dict[str, Any]:
        """Return a part without text of its own, such as a thought or a result, with a mark in each of its texts."""
        unread = {*NO_TEXT, "name"} if "result" in part["type"] else NO_TEXT  # a result's call has its name
        found, count = _with_marks(part, mark := self._mark(), unread)
        if not count or part["type"] in ("image", "image_url"):
            return part
        what = "reasoning" if part["type"] in REASONING else f"text of {part['type']!r} parts"
        self.pieces.append(Piece(what, json.dumps(part), mark, mark, count, turn))
        return found

    def _content(self, text: str, role: str, turn: int) -> str:
        """Return `text` with a mark; with <think> in it, a mark in each part before, inside and after."""
        if role != "assistant" or "</think>" not in text:
            return self._put(f"text of {role!r} turns", text, turn)
        parts = THINKING.split(text)
        for at in range(0, len(parts), 2):
            what = THOUGHT if parts[at + 1 : at + 2] == ["</think>"] else f"text of {role!r} turns"
            parts[at] = self._put(what, parts[at], turn)
        return "".join(parts)

    def _call(self, call: dict[str, Any], turn: int) -> dict[str, Any]:
        arguments, name = function_of(call).get("arguments"), function_of(call).get("name")
        call = self._named(call, "tool calls", turn)
        if not isinstance(arguments, dict) or not arguments:
            return call
        arguments, count = _with_marks(arguments, mark := self._mark())
        if not count:
            arguments, count = {**arguments, mark: 1}, 1
        self.pieces.append(Piece("tool calls", f"arguments of {name}", mark, mark, count, turn))
        return with_function(call, {**function_of(call), "arguments": arguments})

    def _named(self, call: dict[str, Any], what: str, turn: int) -> dict[str, Any]:
        function = function_of(call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return call
        return with_function(call, {**function, "name": self._put(what, function["name"], turn)})

    def _put(self, what: str, text: str, turn: int, is_grave: bool = True) -> str:
        """Return `text` with a mark at its end, but before a closing tag: templates test how a text begins and ends."""
        body = text.rstrip()
        if not body:
            return text
        at = body.rfind("<") if body.endswith(">") and "<" in body else len(body)
        mark = self._mark()
        marked = text[:at] + mark + text[at:]
        self.pieces.append(Piece(what, text, mark, marked.strip(), 1, turn, is_grave))
        return marked

    def _mark(self) -> str:
        return f"ovc{len(self.pieces)}x"


# ---- forms of content -----------------------------------------------------------------------------------------------


def _as_texts(messages: Messages) -> Messages:
    """Return messages whose content is text; unchanged if there are images."""
    has_images = [any("text" not in part for part in m["content"]) for m in messages if _has_parts(m)]
    return messages if any(has_images) else [{**m, "content": text_of_message(m)} for m in messages]


def _as_parts(messages: Messages) -> Messages:
    return [m if _has_parts(m) else {**m, "content": [{"type": "text", "text": text_of_message(m)}]} for m in messages]


def _has_parts(message: dict[str, Any]) -> bool:
    return isinstance(message.get("content"), list)


def _with_json(messages: Messages) -> Messages:
    """Return messages whose calls have their arguments as JSON text (DeepSeek V3's template)."""

    def as_json(call: dict[str, Any]) -> dict[str, Any]:
        function = function_of(call)
        if not isinstance(function.get("arguments"), dict):
            return call
        return with_function(call, {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)})

    return [
        {**m, **{key: list(map(as_json, m[key])) for key in CALLS if isinstance(m.get(key), list)}}
        for m in _as_texts(messages)
    ]


FORMS: tuple[Callable[[Messages], Messages], ...] = (lambda messages: messages, _as_texts, _as_parts, _with_json)


# ---- the check ------------------------------------------------------------------------------------------------------


class Losses:
    """Counts, by kind, of what templates and fields leave out of conversations, with the first example."""

    def __init__(self, on_lost: str):
        self.on_lost = on_lost
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}
        self.fields: dict[str, None] = {}  # of rows, that nothing reads

    def add(self, what: str, text: str, where: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.first.setdefault(what, f"{where}: {_short(text)}")

    def notes(self, total: int) -> list[str]:
        """Return one sentence for each kind."""
        found = [
            f"{count} of {total} conversations have {what}, left out of what is trained on (first: {self.first[what]})"
            for what, count in self.counts.items()
        ]
        names = textwrap.shorten(", ".join(map(repr, self.fields)), 200, placeholder=" ...")
        return [*found, f"fields of the rows that nothing reads, left out: {names}"] if names else found


def _short(text: str) -> str:
    return repr(textwrap.shorten(text, 60, placeholder=" ..."))


class Shown:
    """Finds the form in which a template shows a conversation. render: (messages, example) -> text."""

    def __init__(self, render: Callable[[Messages, dict[str, Any]], str], losses: Losses):
        self.render, self.losses = render, losses
        self._by_design = functools.cache(self._drops_earlier)

    def form(self, messages: Messages, example: dict[str, Any], where: str) -> Callable[[Messages], Messages]:
        """Return the function of FORMS with which the template shows most of `messages`. ValueError: something is left
        out, and `data.on_lost` is "refuse". example: may have "tools"."""
        form, lost = self._best(messages, example)
        told = set()
        for piece in lost:
            what, is_grave = piece.what, piece.is_grave
            if self._may_be_earlier(piece, messages) and self._by_design(what):
                what, is_grave = EARLIER, False
            require(
                not is_grave or self.losses.on_lost == "warn",
                f"the chat template leaves out {what}, such as {_short(piece.text)}: take another "
                "(tokenizer.chat_template), remove it from the row, or set data.on_lost = 'warn'",
            )
            if what not in told:
                self.losses.add(what, piece.text, where)
            told.add(what)
        return form

    @staticmethod
    def _may_be_earlier(piece: Piece, messages: Messages) -> bool:
        return piece.what in ("reasoning", THOUGHT) and piece.turn < len(messages) - 1

    def _drops_earlier(self, what: str) -> bool:
        """True if the template shows the reasoning of the last turn only."""
        think = {"content": "<think>\nc\n</think>\n\nb"} if what == THOUGHT else {"content": "b", REASONING[0]: "c"}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", **think}]
        try:
            return [piece.turn for piece in self._best([*turns, *turns], {})[1]] == [1]
        except Exception:  # a template is a program
            return False

    def _best(self, messages: Messages, example: dict[str, Any]) -> tuple[Any, list[Piece]]:
        """Return the first form that loses least, and the pieces it loses."""
        marker = Marker()
        marked, tools = marker.conversation(messages, example.get("tools"))
        calls = [piece.mark for piece in marker.pieces if piece.what == "tool calls"]
        found: list[tuple[int, Any, list[Piece]]] = []
        failure: Exception | None = None
        for form in FORMS:
            try:
                rendered = self.render(_with_part_key(form(marked)), {**example, "tools": tools})
            except Exception as error:  # a template is a program
                failure = failure or error
                continue
            lost = list(_lost(marker.pieces, rendered))
            doubts = sum(piece.is_grave and not self._may_be_earlier(piece, messages) for piece in lost)
            doubts += sum(f"{mark}'" in rendered for mark in calls)  # as Python writes them, not JSON
            if not doubts:
                return form, lost
            found.append((doubts, form, lost))
        if failure is not None and not found:
            raise failure
        return min(found, key=lambda each: each[0])[1:]


def _with_part_key(messages: Messages) -> Messages:
    return [
        {**m, "content": [{**part, PART_KEY: PART_KEY} for part in m["content"]]} if _has_parts(m) else m
        for m in messages
    ]


def _lost(pieces: list[Piece], rendered: str) -> Iterator[Piece]:
    """Yield the pieces that the rendering does not contain."""
    squashed = functools.cache(lambda: f"{_squash(rendered)} {_squash(html.unescape(rendered))}")
    is_dumped = PART_KEY in rendered  # parts as Python or JSON writes them
    for piece in pieces:
        if (is_dumped and piece.what.startswith("text of")) or not piece.is_in(rendered, squashed):
            yield piece
