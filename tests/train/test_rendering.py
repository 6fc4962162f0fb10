"""What chat templates leave out of conversations: `pytest tests/train/test_rendering.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overcoat.train.chat import Encoder
from overcoat.train.config import DataConfig
from overcoat.train.conversations import examples
from overcoat.train.corpus import open_corpus
from overcoat.train.data import TRAINED
from overcoat.train.rendering import Marker
from tests.train.runs import MakeConfig
from tests.train.test_chat import TEMPLATES, TOOLS, chat_config, tokenizer_of, write_jsonl

ASK, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "boats", "count": 3}}}
CALLS = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "found"}, ANSWER]
THOUGHT = {**ANSWER, "reasoning_content": "because"}
IN_TEXT = {"role": "assistant", "content": "<think>\nbecause\n</think>\n\nanswer"}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
# Templates that show calls and tools, and those that show reasoning of the last turn alone.
WITH_TOOLS = [
    "diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5",
    "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "llama3_1",
    "llama3_2", "muse_glimmer", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning",
    "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl",
]  # fmt: skip
LAST_REASONING = ["glm4moe", "gptoss", "lfm2_2_5", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_6"]


def rendered(template: str, row: dict[str, Any], folder: Path, text: str = "", **options: Any) -> tuple[str, list[str]]:
    """The tokens of a row of prompt and completion (the model's own template is used) as text; and what was counted."""
    tokenizer = tokenizer_of(template)
    own, tokenizer.chat_template = tokenizer.chat_template, text or tokenizer.chat_template
    try:
        row = {**row, "prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        del row["messages"]
        file = write_jsonl(folder / "a.jsonl", [row])
        data = DataConfig(files=[str(file)], format="prompt-completion", **options)
        encoder = Encoder(data, tokenizer)
        ((where, example),) = examples(data)
        tokens, _ = encoder(example, where)
        return tokenizer.decode(tokens & (TRAINED - 1)), encoder.losses.notes(1)
    finally:
        tokenizer.chat_template = own


@pytest.mark.parametrize("template", NAMES)
def test_ordinary_rows_are_shown_by_every_template(template: str, tmp_path: Path) -> None:
    texts = ["one\n\n  two ", 'a "b" <c> & \\n', "one\n\n  two ", "ünïcødé 漢字"]
    turns = [{**(ASK, ANSWER)[at % 2], "content": text} for at, text in enumerate(texts)]
    text, notes = rendered(template, {"messages": turns}, tmp_path)
    assert not notes
    assert text.count("one\n\n  two") == 2
    assert 'a "b" <c> & \\n' in text
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    assert rendered(template, {"messages": parts}, tmp_path) == (text, [])
    if template in WITH_TOOLS:
        assert rendered(template, {"messages": CALLS, "tools": TOOLS}, tmp_path)[1] == []
    else:
        with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template (leaves out|cannot render)"):
            rendered(template, {"messages": CALLS, "tools": TOOLS}, tmp_path)


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        ("qwen3", {"messages": [{"role": "developer", "content": "rules"}, ASK, ANSWER]}, "text of 'developer' turns"),
        ("qwen3", {"messages": [{**ASK, "role": "developer"}, ASK, ANSWER]}, "text of 'developer' turns"),
        ("glm4moe", {"messages": [ASK, {"from": "observation", "value": "seen"}, ANSWER]}, "text of 'observation' t"),
        ("qwen2_5", {"messages": [ASK, THOUGHT]}, "reasoning, such as 'because'"),
        ("deepseekv3", {"messages": [ASK, IN_TEXT]}, "reasoning in <think>, such as 'because'"),
        ("llama3", {"messages": CALLS}, "tool calls, such as 'search'"),
        ("gemma3", {"messages": [ASK, ANSWER], "tools": TOOLS}, "tools, such as 'weather'"),
        ("phi3_5", {"messages": [ASK, {"role": "tool", "content": "found"}, ANSWER]}, "text of 'tool' turns"),
        (
            "qwen3",
            {"messages": [ASK, {**ANSWER, "function_call": CALL["function"]}]},
            "tool calls, such as 'search'",
        ),
        *(
            ("qwen3", {"messages": [{"role": "system", "content": "s", "tools": tools}, ASK, ANSWER]}, "tools, such as")
            for tools in (TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS])
        ),
        # Parts without text of their own, which loops over parts pass by.
        *(
            (template, {"messages": [ASK, {**ANSWER, "content": [part, {"type": "text", "text": "answer"}]}]}, what)
            for template in ("gemma3", "glm4moe")
            for part, what in (
                ({"type": "thinking", "thinking": "because"}, "reasoning"),
                ({"type": "tool_use", "name": "search", "input": {"query": ["boats"]}}, "text of 'tool_use'"),
            )
        ),
        # One call of two, and the text beside them.
        ("gptoss", {"messages": [ASK, {**ANSWER, "tool_calls": [CALL, CALL]}, *CALLS[2:]]}, "'assistant' turns"),
    ],
)
def test_what_a_template_leaves_out_is_refused_or_counted(
    template: str, row: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"data\.on_lost = 'warn'") as caught:
        rendered(template, row, tmp_path)
    assert f"a.jsonl:1: the chat template leaves out {what}" in str(caught.value) or what in str(caught.value)
    assert "\n" not in str(caught.value)
    _, notes = rendered(template, row, tmp_path, on_lost="warn")
    assert any(f"1 of 1 conversations have {what.split(',')[0]}" in note or what in note for note in notes)
    assert all("left out" in note for note in notes)


CONTENT = "{{ m['role'] + ':' + m['content'] + '\n' }}"
LOOP = "{% for m in messages %}%s{% endfor %}"


@pytest.mark.parametrize(
    ("body", "row", "what"),
    [
        # Half of a text; the arguments; half of the arguments; a name; equal texts, of which one is left out.
        ("{{ m['content'].split('|')[-1] + '\n' }}", [{**ASK, "content": "first | last"}, ANSWER], "text of 'user'"),
        (
            CONTENT + "{% for c in m['tool_calls'] %}{{ c['function']['name'] }}{% endfor %}",
            CALLS,
            "arguments of search",
        ),
        (
            CONTENT + "{% for c in m['tool_calls'] %}{{ c.function.name + c.function.arguments.query }}{% endfor %}",
            [ASK, {**ANSWER, "tool_calls": [{"function": {"name": "s", "arguments": {"query": "a", "more": "b"}}}]}],
            "arguments of s",
        ),
        (
            CONTENT + "{% for c in m['tool_calls'] %}{{ c['function']['arguments'] | tojson }}{% endfor %}",
            CALLS,
            "'search'",
        ),
        ("{% if not loop.first %}" + CONTENT + "{% endif %}", [ASK, ANSWER, ASK, ANSWER], "text of 'user'"),
    ],
)
def test_what_other_templates_leave_out(body: str, row: Any, what: str, tmp_path: Path) -> None:
    template = LOOP.replace("%s", body)
    with pytest.raises(ValueError, match="the chat template leaves out") as caught:
        rendered("qwen3", {"messages": row}, tmp_path, text=template)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "written",
    ["m.content | tojson", "m.content | e", "m.content | trim | replace('\n', ' ')", "m.content.split() | join(' ')"],
)
def test_texts_may_be_written_otherwise(written: str, tmp_path: Path) -> None:
    row = {"messages": [{**ASK, "content": '  a "b"\n\n<c> & ü \\n '}, ANSWER]}
    _, notes = rendered("qwen3", row, tmp_path, text=LOOP.replace("%s", "{{ m.role + (" + written + ") }}"))
    assert not notes


@pytest.mark.parametrize("template", LAST_REASONING)
def test_reasoning_that_templates_drop_by_design_is_counted(template: str, tmp_path: Path) -> None:
    row = {"messages": [ASK, THOUGHT, ASK, {**THOUGHT, "reasoning_content": "for this"}]}
    text, notes = rendered(template, row, tmp_path)
    assert "because" not in text
    assert "for this" in text
    assert notes == [
        "1 of 1 conversations have reasoning of earlier turns, left out of what is trained on (first: "
        f"{tmp_path}/a.jsonl:1: 'because')"
    ]


def test_content_is_given_in_the_form_that_the_template_takes(tmp_path: Path) -> None:
    """Parts joined, where it wants text; text as parts, where it wants these; arguments as JSON text."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    text, _ = rendered("llama3", {"messages": [{**ASK, "content": parts}, ANSWER]}, tmp_path)
    assert text == rendered("llama3", {"messages": [{**ASK, "content": "one two"}, ANSWER]}, tmp_path)[0]
    wants_parts = LOOP.replace("%s", "{% for p in m['content'] %}{{ m['role'] + p['text'] }}{% endfor %}")
    assert "useraskassistantanswer" in rendered("qwen3", {"messages": [ASK, ANSWER]}, tmp_path, text=wants_parts)[0]
    text, _ = rendered("deepseekv3", {"messages": CALLS}, tmp_path)  # its own template adds them to a text
    assert '{"query": "boats", "count": 3}' in text
    as_python = LOOP.replace("%s", CONTENT + "{% for c in m.tool_calls %}{{ c.function }}{% endfor %}")
    assert "boats" in rendered("qwen3", {"messages": CALLS}, tmp_path, text=as_python)[0]


def test_losses_are_said_of_the_run_and_of_those_that_use_its_tokens(make_config: MakeConfig, tmp_path: Path) -> None:
    row = {"messages": [{**ASK, "role": "developer"}, {**ASK, "name": "Ann"}, ANSWER], "source": "web", "empty": ""}
    file = write_jsonl(tmp_path / "lost.jsonl", [*[{"messages": [ASK, ANSWER]}] * 20, *[row] * 10])
    config = chat_config(make_config, tmp_path, f"data.files={file}", "data.on_lost=warn")
    for _ in range(2):
        said: list[str] = []
        corpus = open_corpus(config, said.append)
        found = [line for line in said if "left out" in line]
        assert found == corpus.note.split("; ")
        assert found[0].startswith("10 of 30 conversations have text of 'developer' turns, left out ")
        assert f"{file}:21: 'ask'" in found[0]
        assert "the field 'name' of messages" in found[1]
        assert found[2] == "fields of the rows that nothing reads, left out: 'source'"
    with pytest.raises(ValueError, match=r"lost\.jsonl:21: the chat template leaves out text of 'developer' turns"):
        open_corpus(chat_config(make_config, tmp_path, f"data.files={file}"), said.append)


def test_each_text_of_a_part_counts() -> None:
    """A template that shows one of two texts loses the other; ids and a result's name, which its call has, are none."""
    marker, part = Marker(), {"type": "tool_result", "id": "7", "name": "f", "content": ["a", {"type": "t", "id": "b"}]}
    assert marker._part(part, 0) == {**part, "content": ["aovc0x", {"type": "t", "id": "bovc0x"}]}
    (piece,) = marker.pieces
    assert piece.is_in("aovc0x bovc0x", str)
    assert not piece.is_in("aovc0x", str)
    assert marker._part(image := {"type": "image", "image": "a.png"}, 0) == image
    assert marker._part({"type": "image_caption", "caption": "c"}, 0) == {"type": "image_caption", "caption": "covc1x"}
