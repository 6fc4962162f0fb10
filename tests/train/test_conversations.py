"""Conversations out of rows: fields beside them, JSON as text, roles: `pytest tests/train/test_conversations.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overcoat.train.config import DataConfig
from overcoat.train.conversations import examples, fill, texts
from tests.train.test_chat import TOOLS, write_jsonl

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "be kind"}
ARGUMENTS = {"city": "Paris", "days": 3, "at": None}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": arguments, **more}}]}]}


def example(row: Any, folder: Path, **options: Any) -> dict[str, Any]:
    options = {"format": "messages", **options}
    ((_, found),) = examples(DataConfig(files=[str(write_jsonl(folder / "a.jsonl", [row]))], **options))
    return found


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system": "be kind", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": "be kind", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": None, "messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"system": " ", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [USER, ANSWER]),
        ({"messages": [{"role": "User ", "content": "a"}, {**ANSWER, "role": "Assistant"}]}, [USER, ANSWER]),
        ({"messages": [{**USER, "name": None, "tool_calls": None}, ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"messages": [json.dumps(USER), ANSWER]}, [USER, ANSWER]),
        (called(json.dumps(ARGUMENTS)), called(ARGUMENTS)["messages"]),
        (called(ARGUMENTS), called(ARGUMENTS)["messages"]),
        (called(""), called({})["messages"]),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "image": None}]}, ANSWER]},
            [{**USER, "content": [{"type": "text", "text": "a"}]}, ANSWER],
        ),
    ],
)
def test_rows_of_many_shapes(row: Any, messages: Any, tmp_path: Path) -> None:
    assert example(row, tmp_path)["messages"] == messages


@pytest.mark.parametrize(
    "tools",
    [TOOLS, json.dumps(TOOLS), list(map(json.dumps, TOOLS)), [t["function"] for t in TOOLS], None, [], "", "[]"],
)
def test_tools_are_objects(tools: Any, tmp_path: Path) -> None:
    found = example({"messages": [USER, ANSWER], "tools": tools}, tmp_path)
    flat = [tool.get("function", tool) for tool in found.get("tools", [])]
    assert flat == ([tool["function"] for tool in TOOLS] if tools and tools != "[]" else [])
    text = [{"name": "f", "parameters": json.dumps(TOOLS[0]["function"]["parameters"])}]
    (tool,) = example({"messages": [USER, ANSWER], "tools": text}, tmp_path)["tools"]
    assert tool["parameters"] == TOOLS[0]["function"]["parameters"]


@pytest.mark.parametrize("kwargs", [{"style": "x"}, '{"style": "x"}', None, {}])
def test_options_of_the_template_are_an_object(kwargs: Any, tmp_path: Path) -> None:
    found = example({"messages": [USER, ANSWER], "chat_template_kwargs": kwargs}, tmp_path)
    assert found.get("options") == ({"style": "x"} if kwargs else None)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (called("not JSON"), "'messages'[1].tool_calls[0].function.arguments: no JSON ("),
        (called('["a"]'), ".function.arguments holds a list, not an object"),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": "[]"}]},
            "'messages'[1].tool_calls holds text, not a list of calls",
        ),
        ({"messages": [USER, {**ANSWER, "tool_calls": ["{}"]}]}, ".tool_calls[0] holds text, not an object"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": "f"}]}]}, ".function holds text, not an object"),
        ({"messages": [USER, {**ANSWER, "function_call": {"arguments": "{"}}]}, ".arguments: no JSON"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "another"}, "'system' and the first message are two different"),
        ({"messages": [USER, ANSWER], "system": 3}, "'system' holds a number, not text"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": "style"},
            "'chat_template_kwargs' holds text, not an obj",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "input_text", "text": 3}]}, ANSWER]},
            ".content[0].text holds a num",
        ),
        ({"messages": [USER, ANSWER], "tools": "weather"}, "'tools' holds text, not a list"),
        ({"messages": [USER, ANSWER], "tools": ["{"]}, "'tools'[0]: no JSON"),
    ],
)
def test_errors_name_the_field(row: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{re.escape(why)}"):
        example(row, tmp_path)


ALPACA = {"instruction": "add", "input": "1 2", "output": "3", "year": 2020, "none": None, "tags": ["x"]}
KEYS = {"format": "prompt-completion", "prompt_key": "instruction", "completion_key": "output"}


def test_a_prompt_may_hold_any_field(tmp_path: Path) -> None:
    template = '{prompt} <{input}> {year}{none} {{input}} \\boxed{} {"a": 1}'
    found = example(ALPACA, tmp_path, **KEYS, prompt_template=template)
    assert found["prompt"] == 'add <1 2> 2020 {input} \\boxed{} {"a": 1}'
    assert found["unread"] == ["tags"]
    assert fill(template, "add", None, "") == 'add <>  {input} \\boxed{} {"a": 1}'
    for name, why in [
        ("context", "no field 'context' ({...} in data.prompt_template"),
        ("tags", "'tags' holds a list"),
    ]:
        with pytest.raises(ValueError, match=rf"a\.jsonl:1: {re.escape(why)}"):
            example(ALPACA, tmp_path, **KEYS, prompt_template=f"{{prompt}} {{input}} {{{name}}}")


@pytest.mark.parametrize("name", ["input", "system", "context", "tools", "history"])
def test_fields_that_belong_to_a_prompt_are_not_left_out(name: str, tmp_path: Path) -> None:
    row = {"instruction": "a", "output": "b", name: "more"}
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: the field '{name}' would be left out: .* \{{{name}\}}"):
        example(row, tmp_path, **KEYS)
    assert example(row, tmp_path, **KEYS, on_lost="warn")["unread"] == [name]
    for empty in ("", None, []):
        assert example({**row, name: empty}, tmp_path, **KEYS)["prompt"] == "a"


def test_a_tokenizer_is_trained_on_all_texts(tmp_path: Path) -> None:
    parts = {**USER, "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    rows = [{"messages": [SYSTEM, parts, {**ANSWER, "content": ""}]}]
    config = DataConfig(files=[str(write_jsonl(tmp_path / "a.jsonl", rows))], format="messages")
    assert list(texts(config)) == ["be kind", "one two"]
