"""Rows as people have them: what a row says is what is trained on, or the run refuses, in one line, or counts what the
template leaves out. Each text, name and argument is a word of its own, looked for in the decoded tokens.

    chats    conversations with parts, roles, tools, reasoning, a column beside them, in JSON lines and parquet, with a
             template of a real model
    texts    rows repeated on purpose, with special tokens written out, and a tokenizer that begins texts or does not
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from overcoat.train.configfile import all_keys
from tests.attack.harness import Child, Ended, Finding, Ground, start, toml
from tests.attack.weapons import plain

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEMPLATES = (
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "llama3",
    "gemma",
    "gemma3",
    "phi3_5",
    "deepseekv3",
    "glm4moe",
    "gptoss",
    "lfm2",
)
FLAG, COUNTED = np.uint32(1 << 31), re.compile(r"\d[\d,]* of \d[\d,]*|\d[\d,]* rows|\d[\d,]* conversations")
ROWS = 12


@functools.cache
def tokenizer(begins: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's tokens; `begins`: each text with <s>, as Llama's do."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator(["the user asks and the assistant answers"] * 3, trainer)
    first = {"bos_token": "<s>"} if begins else {}
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>", **first)


class Words:
    """New words, by what they are a part of."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}

    def __call__(self, what: str) -> str:
        word = f"{what[:3].upper()}{len(self.given):05d}"
        self.given[word] = what
        return word


def conversation(words: Words, oddities: list[str], number: int) -> dict[str, Any]:
    """A row of two turns, with what the oddities add; every second row has another tool and other arguments."""
    ask, answer, again, last = (words("text") for _ in range(4))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ask}, {"role": "assistant", "content": answer},
        {"role": "user", "content": again}, {"role": "assistant", "content": last},
    ]  # fmt: skip
    row: dict[str, Any] = {"messages": messages}
    if "reasoning" in oddities:
        messages[1]["reasoning_content"] = words("reasoning")
    if "think" in oddities:
        messages[1]["content"] = f"<think>\n{words('reasoning')}\n</think>\n\n{answer}"
    if "calls" in oddities:
        name, key = ("weather", "city") if number % 2 else ("search", "query")
        given: Any = {key: words("argument")}
        if "calls as text" in oddities:
            given = json.dumps(given)
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        messages[2:2] = [
            {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": words("result")},
            {"role": "assistant", "content": words("text")},
        ]  # fmt: skip
        about = {"name": words("tool"), "description": "d", "parameters": {"type": "object", "properties": {}}}
        row["tools"] = [{"type": "function", "function": about}]
        if "tools as text" in oddities:
            row["tools"] = json.dumps(row["tools"])
    if "system column" in oddities:
        row["system"] = words("system")
    for role in ("developer", "function_call", "observation", "critic"):
        if role in oddities:
            messages.insert(0 if role == "developer" else 2, {"role": role, "content": words(role)})
    if "capitals" in oddities:
        for message in messages:
            message["role"] = message["role"].capitalize()
    if "parts" in oddities:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}, {"type": "text", "text": words("part")}]
    return row


ODDITIES = (
    "parts",
    "reasoning",
    "think",
    "calls",
    "system column",
    "developer",
    "function_call",
    "observation",
    "critic",
    "capitals",
)


def train(ground: Ground, folder: Path, begins: bool, changes: dict[str, str]) -> Ended:
    tokenizer(begins).save_pretrained(folder / "tokenizer")
    keys = {key: value for key, value in ground.base.items() if key != "tokenizer.vocab_size"}
    keys |= {
        "tokenizer.name": f'"{folder / "tokenizer"}"', "data.sequence_length": "1024", "train.steps": "1",
        "train.batch_size": "1", "eval.rows": "1", "data.cache_dir": f'"{folder / "cache"}"', "schedule.warmup_steps": "0",  # noqa: E501
        "train.run_dir": f'"{folder / "run"}"', "model.config.vocab_size": "320", **changes,
    }  # fmt: skip
    (folder / "run.toml").write_text(toml(keys), encoding="utf-8")
    return start(["train", str(folder / "run.toml")], folder).wait()


def stored(folder: Path, kind: Any) -> list[list[int]]:
    """The documents that a run has tokenized, without flags."""
    cache = next((folder / "cache/tokens").glob("[!.]*"))
    flat, table = np.fromfile(cache / "tokens.bin", dtype=kind), np.load(cache / "documents.npy")
    return [(flat[begin:end] & ~FLAG if kind is np.uint32 else flat[begin:end]).tolist() for begin, end in table[:, :2]]


def chats(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    return texts(ground, random, folder) if index % 4 == 2 else conversations(ground, index, random, folder)


def conversations(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    template = random.choice(TEMPLATES)
    oddities = random.sample(ODDITIES, random.choice([1, 1, 2])) if index % 8 else []
    if "calls" in oddities:
        oddities += random.sample(["calls as text", "tools as text"], random.choice([0, 0, 1]))
    is_parquet, words = random.random() < 0.4, Words()
    rows = [conversation(words, oddities, number) for number in range(ROWS)]
    where = importlib.util.find_spec("trl")
    assert where is not None
    (folder / "template.jinja").write_text(
        (Path(str(where.origin)).parent / f"chat_templates/{template}.jinja").read_text()
    )
    data = folder / ("rows.parquet" if is_parquet else "rows.jsonl")
    case = f"{template}, {', '.join(oddities) or 'plain'}, {data.name}"
    if is_parquet:
        from datasets import Dataset, disable_progress_bars

        def write() -> int:
            disable_progress_bars()
            Dataset.from_list(rows).to_parquet(str(data))
            return 0

        if Child(write, folder).wait().status:  # Arrow has no such type
            return case, ""
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = train(ground, folder, False, {
        "data.files": f'["{data}"]', "data.format": '"messages"', "tokenizer.chat_template": f'"{folder / "template.jinja"}"',  # noqa: E501
    })  # fmt: skip
    if fault := plain(ended):
        return case, fault
    if ended.status:
        wrongly = (
            not oddities and template not in ("deepseekv3", "gptoss") and f"refuses plain rows: {ended.last_line()}"
        )
        return case, wrongly or ""
    return case, lost(words, stored(folder, np.uint32), ended)


def lost(words: Words, documents: list[list[int]], ended: Ended) -> str:
    """What of the rows is not among the tokens, or only among the tokens; "" if nothing."""
    text = "\n".join(tokenizer(False).decode(ids) for ids in documents)
    missing = [word for word in words.given if word not in text]
    is_counted = bool(COUNTED.search(ended.output + ended.error))
    if gone := sorted({words.given[word] for word in missing if words.given[word] != "reasoning" or not is_counted}):
        return f"{len(missing)} of {len(words.given)} words are lost in silence: {', '.join(gone)}"
    if made := re.search(r".{0,30}\b(null|None)\b.{0,30}", text):
        return f"no row has this: {made[0]!r}"
    return "" if len(documents) == ROWS else f"{len(documents)} conversations of {ROWS}"


def texts(ground: Ground, random: random.Random, folder: Path) -> Finding:
    begins, times, special = random.random() < 0.7, random.choice([1, 3]), random.choice(["", "<|im_end|>", "<s>"])
    written = [f"a text about number {number} and {special} more of it" for number in range(40)]
    rows = [text for text in written for _ in range(times)]
    random.shuffle(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    read_as = random.choice(["text", "tokens"]) if "data.special_tokens" in all_keys() else ""
    changes = {"data.files": f'["{folder / "rows.jsonl"}"]', "data.sequence_length": "64"}
    ended = train(ground, folder, begins, {**changes, **({"data.special_tokens": f'"{read_as}"'} if read_as else {})})
    case = f"texts {times} times, with {special!r} read as {read_as or 'ever'}, begun: {begins}"
    if ended.status or plain(ended):
        return case, plain(ended) or f"refused: {ended.last_line()}"
    found, own = stored(folder, np.uint16), tokenizer(begins)
    if len(found) != len(rows):
        return case, f"{len(found)} of {len(rows)} rows are trained on"
    first = own.bos_token_id if begins else None
    if wrong := [ids for ids in found if begins and (ids[0] != first or ids[1] == first)]:
        return case, f"{len(wrong)} of {len(found)} do not begin as the tokenizer begins texts: {wrong[0][:4]}"
    if special and read_as != "tokens":
        right = {own.decode(ids).removeprefix("<s>").removesuffix("<|im_end|>") for ids in found}
        return case, "" if right == set(written) else f"other texts: {sorted(right ^ set(written))[:2]}"
    wanted = sorted([*own(text).input_ids, own.eos_token_id] for text in rows)
    return case, "" if sorted(
        found
    ) == wanted else f"other tokens than transformers': {sorted(found)[0]}, not {wanted[0]}"
