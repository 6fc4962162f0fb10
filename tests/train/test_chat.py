"""Conversations as data: tokens and labels beside TRL's, packing, refusals: `pytest tests/train/test_chat.py`."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from datasets import Dataset, IterableDataset

from overcoat.train.chat import Encoder
from overcoat.train.config import DataConfig
from overcoat.train.conversations import examples
from overcoat.train.corpus import Corpus, open_corpus
from overcoat.train.data import IGNORED, START, TRAINED, ChatRows, conversations, count_labels, make_batch
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run
from tests.train.runs import MakeConfig, assert_same_run, stop_at, text_of

trl = pytest.importorskip("trl")  # the dev extra brings it; a machine for GPU tests may lack it
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WORDS = ["alpha", "beta", "gamma", "delta", "is", "a", "letter", "what", "follows", "?", "\n", "<b>", "I'm"]


@functools.cache
def tokenizer_of(template: str, bos: bool = False) -> Any:
    """A byte-level tokenizer with ChatML's special tokens and a chat template that TRL ships; `bos`: with Llama's
    habit to begin every text with a token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS * 20)], trainer)
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<s>"
    )
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return made


def said(generator: random.Random, most: int = 30) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))


def chats(count: int = 100) -> list[dict[str, Any]]:
    generator = random.Random(0)
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": said(generator)}] * (number % 3 == 0)
        for _ in range(generator.randint(1, 3)):
            messages += [
                {"role": "user", "content": said(generator)},
                {"role": "assistant", "content": said(generator)},
            ]
        found.append({"messages": messages})
    return found


def pairs(count: int = 100) -> list[dict[str, Any]]:
    generator = random.Random(1)
    return [{"prompt": said(generator), "completion": " " + said(generator)} for _ in range(count)]


def conversational_pairs() -> list[dict[str, Any]]:
    return [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in chats()]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def of_trl(rows: Any, tokenizer: Any, folder: Path, **options: Any) -> Any:
    """What TRL's SFTTrainer trains on."""
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=len(tokenizer)
    )
    arguments = trl.SFTConfig(str(folder), report_to="none", use_cpu=True, bf16=False, **options)
    return trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_list(json.loads(json.dumps(rows))) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
    ).train_dataset


@pytest.mark.parametrize(
    ("kind", "template", "bos"),
    [
        ("messages", "qwen3", False),  # has no marks: TRL's version of it
        ("messages", "qwen2_5_training", False),  # has marks of its own
        ("prompt-completion", "qwen3", False),
        ("prompt-completion", "qwen3", True),
        ("conversational", "qwen3", False),
    ],
)
def test_tokens_and_labels_are_those_of_trl(kind: str, template: str, bos: bool, tmp_path: Path) -> None:
    """On 100 conversations, with the real preparation and collator, truncated, and as batches of rows."""
    tokenizer, length = tokenizer_of(template, bos), 64
    rows = {"messages": chats, "prompt-completion": pairs, "conversational": conversational_pairs}[kind]()
    options = {"assistant_only_loss": True} if kind == "messages" else {}
    expected = of_trl(rows, tokenizer, tmp_path, max_length=length, **options)
    batch = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)([dict(row) for row in expected])
    data = DataConfig(
        files=[str(write_jsonl(tmp_path / "a.jsonl", rows))],
        format="messages" if kind == "messages" else "prompt-completion",
    )
    encoder = Encoder(data, tokenizer)
    encoded = [encoder(example, where) for where, example in examples(data)]
    assert len(encoded) == 100
    fitting = [tokens[:length] for tokens, needed in encoded if needed <= length]
    assert len(fitting) == len(expected)
    assert sum(len(tokens) > length for tokens, _ in encoded) > 5 or kind == "prompt-completion"
    ends = np.cumsum([len(tokens) for tokens in fitting])
    table = np.stack([ends - [len(tokens) for tokens in fitting], ends, np.arange(len(ends))], axis=1)
    for index in range(len(expected)):  # a row for each conversation, as the collator has it
        source = ChatRows(np.concatenate(fitting), table[index : index + 1], length, 0, pad=0, shuffle=False)
        mine, labels = make_batch(source.next_rows(1), None, False), batch["labels"][index]
        count = len(fitting[index])
        assert mine.input_ids[0, :count].tolist() == batch["input_ids"][index, :count].tolist()
        assert mine.labels[0, : count - 1].tolist() == labels[1:count].tolist()
        assert (mine.labels[0, count - 1 :] == IGNORED).all()
        assert (labels[count:] == IGNORED).all()
    packed = ChatRows(np.concatenate(fitting), table, length, 0, pad=0)
    rows_BT = packed.next_rows(packed.num_rows)
    assert count_labels(rows_BT, None, False) == int((batch["labels"][:, 1:] != IGNORED).sum())
    assert int((make_batch(rows_BT, None, False).labels != IGNORED).sum()) == count_labels(rows_BT, None, False)


# ---- odd rows: what a user may write, and what of it TRL is given ----------------------------------------------------

ODD = [
    "ünïcødé 漢字 🙂",
    '{"a": "b"}',
    "  spaces  ",
    "two\n\nlines\n",
    "a",
    "<b>&amp;</b>",
    "back\\slash",
    "'quotes\"",
    "a",
]
FUNCTIONS = {
    "weather": {"city": "Paris", "days": 3},
    "search": {"query": 'a "b"\n', "filter": {"tags": ["x", 1.5, None]}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": {
        "type": "object", "properties": {key: {"type": "string"} for key in arguments}, "required": []}}}
    for name, arguments in FUNCTIONS.items()
]  # fmt: skip


def odd_rows(generator: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of one of many shapes, and the same as TRL takes it: objects, text, roles and all in messages."""
    odd = lambda: generator.choice(ODD) + said(generator, 5)  # noqa: E731
    chance = lambda: generator.random() < 0.3  # noqa: E731
    written: list[dict[str, Any]] = []
    meant: list[dict[str, Any]] = []

    def add(role: str, content: str, **more: Any) -> None:
        meant.append({"role": role, "content": content, **more})
        own = {**more, "name": None} if chance() else dict(more)
        if calls := own.get("tool_calls"):
            as_text = generator.choice([json.dumps, lambda each: each])
            functions = [{**c["function"], "arguments": as_text(c["function"]["arguments"])} for c in calls]
            own["tool_calls"] = [{**c, "function": function} for c, function in zip(calls, functions, strict=True)]
        names = {"user": ["User", "user ", "user"], "assistant": ["assistant", "Assistant"]}.get(role, [role])
        whole = [{"type": "text", "text": content, "image": None}] if chance() and role != "tool" else content
        written.append({"role": generator.choice(names), "content": whole, **own})

    system, has_calls = odd() if chance() else None, chance()
    for turn in range(generator.randint(1, 3)):
        add("user", odd())
        if has_calls and turn == 0:
            name = generator.choice(list(FUNCTIONS))
            add(
                "assistant",
                "",
                tool_calls=[{"type": "function", "function": {"name": name, "arguments": FUNCTIONS[name]}}],
            )
            add("tool", odd())
        add("assistant", odd(), **({"reasoning_content": odd()} if chance() else {}))
    if not (has_calls or any("reasoning_content" in m or isinstance(m["content"], list) for m in written)) and chance():
        sides = {"user": "human", "assistant": "gpt"}
        written = [{"from": sides[m["role"]], "value": m["content"]} for m in meant]
    row: dict[str, Any] = {"messages": written, "id": 7}
    if system is not None:
        if chance():
            written.insert(0, {"role": "system", "content": system})
        row["system"] = system
        meant.insert(0, {"role": "system", "content": system})
    expected: dict[str, Any] = {"messages": meant}
    if has_calls or chance():
        forms = [TOOLS, json.dumps(TOOLS), list(map(json.dumps, TOOLS))]
        row["tools"], expected["tools"] = generator.choice(forms), TOOLS
    else:
        row["tools"] = generator.choice([None, [], "", "null", "[]"])
    if chance():
        row["chat_template_kwargs"] = generator.choice([{"enable_thinking": False}, '{"enable_thinking": false}'])
        expected["chat_template_kwargs"] = {"enable_thinking": False}
    return row, expected


def split(row: dict[str, Any]) -> dict[str, Any]:
    """A row of messages as prompt and completion."""
    messages = row["messages"]
    return {**{k: v for k, v in row.items() if k != "messages"}, "prompt": messages[:-1], "completion": messages[-1:]}


@pytest.mark.parametrize(
    ("template", "kind", "least"),
    [
        *((name, "messages", 24) for name in ("qwen3", "qwen3_5_think", "glm4moe", "gptoss", "nemotron_3_nano")),
        *(
            (name, "messages", 5)
            for name in ("qwen2_5", "llama3", "gemma", "gemma3", "phi3_5", "deepseekv3", "cohere2")
        ),
        *((name, "prompt-completion", least) for name, least in {"qwen3": 24, "gptoss": 24, "deepseekv3": 5}.items()),
    ],
)
def test_odd_rows_are_what_trl_is_given(template: str, kind: str, least: int, tmp_path: Path) -> None:
    """Each in many shapes; those of which the template leaves something out are refused."""
    generator, tokenizer = random.Random(template), tokenizer_of(template)
    both = [odd_rows(generator) for _ in range(30)]
    if kind != "messages":
        both = [(split(row), split(expected)) for row, expected in both]
    data = DataConfig(files=[str(write_jsonl(tmp_path / "a.jsonl", [row for row, _ in both]))], format=kind)  # type: ignore[arg-type]
    encoder, mine, theirs, refused = Encoder(data, tokenizer), [], [], []
    for (where, example), (_, expected) in zip(examples(data), both, strict=True):
        try:
            mine.append(encoder(example, where)[0])
        except ValueError as error:
            refused.append(str(error))
        else:
            theirs.append(expected)
    assert len(mine) >= least
    assert all(re.search("leaves out|cannot render", error) for error in refused)
    options = {"assistant_only_loss": True} if kind == "messages" else {}
    given = IterableDataset.from_generator(lambda: iter(theirs))
    expected_rows = of_trl(given, tokenizer, tmp_path, max_steps=1, max_length=None, **options)
    for tokens, row in zip(mine, expected_rows, strict=True):
        assert (tokens & (TRAINED - 1)).tolist() == row["input_ids"]
        assert (tokens & TRAINED != 0).tolist() == [label != IGNORED for label in row["labels"]]


def test_the_first_held_out_rows_are_like_the_others() -> None:
    """Packing takes the longest conversations first; an evaluation on some rows must not be of these alone."""
    lengths = np.random.default_rng(0).integers(20, 64, 2000)
    ends = np.cumsum(lengths)
    table = np.stack([ends - lengths, ends, np.arange(2000)], axis=1)
    held_out = ChatRows(np.ones(ends[-1], dtype=np.uint32), table, 64, 0, pad=0, shuffle=False)
    found = [lengths[conversations(held_out.next_rows(400))].mean() for _ in range(2)]
    assert abs(found[0] - lengths.mean()) < 2
    assert abs(found[1] - lengths.mean()) < 2


def test_rows_hold_whole_conversations_in_an_order_of_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(3, 65, 300)
    ends = np.cumsum(lengths)
    tokens = np.repeat(np.arange(1, 301), lengths).astype(np.uint32)
    table = np.stack([ends - lengths, ends, np.arange(300)], axis=1)
    make = functools.partial(ChatRows, tokens, table, 64, pad=0)
    rows = make(seed=1)
    epochs = []
    for number in range(2):
        rows.load_state_dict({"epoch": number, "num_done": 0})
        epochs.append(rows.next_rows(rows.num_rows))
    for epoch in epochs:
        counts = np.bincount((epoch & (TRAINED - 1)).ravel(), minlength=301)[1:]
        assert np.array_equal(counts, lengths)  # each once, and whole
        assert (epoch[:, -1] & (TRAINED - 1) == 0).all()
        assert lengths.sum() / (64 * len(epoch)) > 0.95  # in shuffled order 0.93
        starts = make_batch(epoch, None, False).document_starts
        assert starts is not None
        documents = np.split((epoch[:, :-1] & (TRAINED - 1)).ravel(), starts[1:-1].numpy())
        assert all(len(set(document)) == 1 for document in documents)
    assert not np.array_equal(epochs[0], epochs[1])
    for stop in (0, 7, len(epochs[0]) - 1, len(epochs[0]) + 3):
        first, second = make(seed=1), make(seed=1)
        taken = first.next_rows(stop)
        second.load_state_dict(first.state_dict())
        together = np.concatenate([taken, second.next_rows(len(epochs[0]) + 9 - stop)])
        assert np.array_equal(together[: len(epochs[0])], epochs[0])
        assert np.array_equal(together[len(epochs[0]) :], epochs[1][:9])
    assert not np.array_equal(make(seed=2).next_rows(9), epochs[0][:9])


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": "text"}, "'messages' holds text, not a list of messages"),
        ({"messages": None}, "'messages' holds null, not a list of messages"),
        ({"messages": []}, "'messages' holds an empty list, not a list of messages"),
        ({"messages": [USER, "b"]}, "'messages'[1] holds text, not a message"),
        ({"messages": [{"content": "a"}]}, "'messages'[0] has no field 'role' among content"),
        ({"messages": [{"role": None, "content": "a"}]}, "'messages'[0].role holds null, not text"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "'messages'[1].content holds a number, not text"),
        (
            {"messages": [USER, {"role": "assistant", "text": "b"}]},
            "[1] has no field 'content' among role, text: rename",
        ),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "'messages'[1].content holds null, not text"),
        ({"messages": [{}]}, "'messages'[0] has no field 'role': rename"),
        ({"messages": [{"from": "gpt", "text": "b"}]}, "'messages'[0] has no field 'value' among from, text: rename"),
        ({"messages": [{"from": None, "value": "a"}]}, "'messages'[0].from holds null, not text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "'messages'[0].content[0] holds no object with a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "[0].text holds a number"),
        ({"messages": [{"from": "human", "value": 1}]}, "'messages'[0].value holds a number, not text"),
        ({"messages": [USER, {**ANSWER, "weight": 0}, ANSWER]}, "'messages'[1].weight is 0: every turn"),
        ({"messages": [USER, {**ANSWER, "loss": False}, ANSWER]}, "'messages'[1].loss is False: every turn"),
        ({"messages": [USER, {**ANSWER, "weight": "1"}]}, "'messages'[1].weight is '1': every turn"),
        (
            {"messages": [{**USER, "from": "human", "value": "Hi"}, ANSWER]},
            "[0] has role and content beside from and value",
        ),
        ({"messages": [USER, {**ANSWER, "train": False}]}, "'messages'[1].train is False: every turn"),
        ({"messages": [USER], "tools": "[{"}, "'tools': no JSON"),
        ({"messages": [USER], "tools": "{}"}, "'tools' holds an object, not a list"),
        ({"messages": [USER], "tools": [3]}, "'tools'[0] is no object"),
        ({"chat": [USER]}, "no field 'messages' (data.messages_key) among chat"),
        ([USER], "a list, not an object"),
        ({"messages": [USER]}, "nothing in it to train on"),
    ],
)
def test_a_row_of_another_shape_is_named(row: Any, why: str, tmp_path: Path) -> None:
    data = DataConfig(files=[str(write_jsonl(tmp_path / "a.jsonl", [chats(1)[0], row]))], format="messages")
    encoder = Encoder(data, tokenizer_of("qwen2_5_training"))
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{re.escape(why)}"):
        [encoder(example, where) for where, example in examples(data)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "completion": 3}, "'completion' holds a number, not text"),
        ({"prompt": "a"}, r"no field 'completion' (data.completion_key) among prompt"),
        ({"prompt": [USER], "completion": [{**ANSWER, "weight": 0}]}, "'completion'[0].weight is 0: every turn"),
        ({"prompt": "a", "completion": [ANSWER]}, "prompt and completion are not both text"),
    ],
)
def test_a_pair_of_another_shape_is_named(row: Any, why: str, tmp_path: Path) -> None:
    data = DataConfig(files=[str(write_jsonl(tmp_path / "a.jsonl", [row]))], format="prompt-completion")
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{re.escape(why)}"):
        list(examples(data))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a\.txt is text, and conversations want \.jsonl"):
        list(examples(DataConfig(files=[str(tmp_path / "a.txt")], format="messages")))


ANSWER = {"role": "assistant", "content": "b"}
WITH_IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
WITH_PATH = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "path": "0.png"}]}
WITH_MARK = {"from": "human", "value": "<image>\na"}
WITHOUT = {"role": "user", "content": "an <image>?"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"images": ["0.png"], "messages": [WITH_IMAGE, ANSWER]}, "'images'"),
        ({"image": "0.png", "messages": [WITH_MARK, ANSWER]}, "'image'"),
        ({"images": ["0.png"], "messages": [WITHOUT, ANSWER]}, "'images'"),
        ({"messages": [WITH_PATH, ANSWER]}, "a part of type 'image'"),
        ({"messages": [WITHOUT, ANSWER, WITH_IMAGE, ANSWER], "images": []}, "a part of type 'image'"),
        ({"prompt": [WITH_PATH], "completion": [ANSWER]}, "a part of type 'image'"),
        ({"prompt": "a", "completion": "b", "images": ["0.png"]}, "'images'"),
    ],
)
def test_images_are_never_left_out_in_silence(
    row: dict[str, Any], named: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    kind = "messages" if "messages" in row else "prompt-completion"
    plain = {"messages": [WITHOUT, ANSWER]} if kind == "messages" else {"prompt": "a", "completion": "b"}
    before = [{**plain, "images": [], "image": ""}, {**plain, "images": None}, {**plain, "images": [None]}]
    file = write_jsonl(tmp_path / "a.jsonl", [*before, row])
    config = chat_config(make_config, tmp_path, f"data.files={file}", f"data.format={kind}")
    why = rf"a\.jsonl:4: {re.escape(named)} names images, .*: set data\.images to their folder, .*, or remove them"
    with pytest.raises(ValueError, match=why) as caught:
        open_corpus(config, lambda _: None)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("tokens.bin"))
    write_jsonl(file, before * 30)
    open_corpus(config, lambda _: None)


@pytest.mark.parametrize("kind", ["video", "input_audio"])
def test_neither_are_videos_and_sounds(kind: str, tmp_path: Path) -> None:
    asked = {"role": "user", "content": [{"type": kind, kind: "0"}, {"type": "text", "text": "a"}]}
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [WITHOUT, ANSWER]}, {"messages": [asked, ANSWER]}])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: a part of type '{kind}': text and images are supported"):
        list(examples(DataConfig(files=[str(tmp_path / "a.jsonl")], format="messages")))


def test_a_template_whose_mask_cannot_be_known_is_refused() -> None:
    data = DataConfig(files=["a"], format="messages")
    plain = tokenizer_of("qwen3")
    for template, why in [
        (None, "has no chat template: set tokenizer.chat_template"),
        ("{{ x }}", "TRL has no version"),
    ]:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>"
        )
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=why):
            Encoder(data, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    with pytest.warns(UserWarning, match="may not learn to stop"):
        Encoder(data, tokenizer)


def chat_config(make_config: MakeConfig, tmp_path: Path, *words: str) -> Any:
    tokenizer_of("qwen2_5_training").save_pretrained(tmp_path / "tokenizer")
    file = write_jsonl(tmp_path / "chats.jsonl", chats(60))
    standard = [
        f"data.files={file}", "data.format=messages", "tokenizer.vocab_size=0",
        f"tokenizer.name={tmp_path}/tokenizer", "data.sequence_length=110",
    ]  # fmt: skip
    return make_config(*standard, *words)


def opened(config: Any) -> tuple[Corpus, list[str]]:
    said: list[str] = []
    return open_corpus(config, said.append), said


def test_conversations_that_are_too_long_are_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    cut, said = opened(chat_config(make_config, tmp_path))
    (line,) = [text for text in said if "longer" in text]
    assert cut.note == line
    found = re.fullmatch(
        r"(\d+) of 60 conversations are longer than data\.sequence_length = 110: (\d+) truncated, (\d+) dropped", line
    )
    assert found is not None
    long, truncated, dropped = map(int, found.groups())
    assert long == truncated + dropped > truncated > 0
    whole, said = opened(chat_config(make_config, tmp_path, "data.too_long=drop"))
    assert f"0 truncated, {long} dropped" in whole.note
    assert not [text for text in said if "tokenizing" in text]  # the same tokens serve any length
    assert len(whole.rows.documents) + truncated >= len(cut.rows.documents) > len(whole.rows.documents)  # type: ignore[union-attr]
    assert opened(chat_config(make_config, tmp_path, "data.sequence_length=1000"))[0].note == ""


def test_a_dataset_gives_the_conversations_of_its_file(tmp_path: Path) -> None:
    data = DataConfig(dataset="json", files=[str(write_jsonl(tmp_path / "a.jsonl", chats(9)))], format="messages")
    assert [example["messages"] for _, example in examples(data)] == [chat["messages"] for chat in chats(9)]


def test_copies_stay_unless_they_are_not_wanted(make_config: MakeConfig, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "copies.jsonl", chats(20) * 3)
    words = [f"data.files={file}", "data.sequence_length=1000"]
    for more, count in (([], 60), (["data.dedupe=true"], 20)):
        opened(chat_config(make_config, tmp_path, *words, *more, f"data.cache_dir={tmp_path}/{count}"))
        (table,) = (tmp_path / f"{count}/tokens").glob("[!.]*/documents.npy")
        assert len(np.load(table)) == count


def test_a_limit_below_the_first_conversation_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no documents with text within data\.max_bytes = 5: raise it"):
        opened(chat_config(make_config, tmp_path, "data.max_bytes=5"))


def test_held_out_conversations_are_not_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    corpus, _ = opened(chat_config(make_config, tmp_path, "data.sequence_length=300", "eval.rows=1000"))
    rows = corpus.rows.next_rows(corpus.rows.num_rows)  # type: ignore[union-attr]
    held, trained = (int((each & START != 0).sum() - len(each)) for each in (corpus.held_out, rows))
    assert 3 <= held <= 12
    assert held + trained == 60
    one = chat_config(make_config, tmp_path, f"data.files={write_jsonl(tmp_path / 'one.jsonl', chats(1))}")
    with pytest.raises(ValueError, match=r"the training share .* has no conversation .* raise data\.sequence_length"):
        opened(one)


def test_a_chat_run_stops_and_goes_on_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.steps=6", "checkpoint.every=2", "train.accumulation=2", "train.batch_size=1")
    config = chat_config(make_config, tmp_path, *words, f"train.run_dir={tmp_path}/whole")
    (result,) = run(config, console)
    assert "longer than data.sequence_length" in result.note
    assert result.note in text_of(console)
    stopped = chat_config(make_config, tmp_path, *words, "train.batch_size=1")
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(RunStoppedError):
            run(stopped, console)
    run(stopped, console)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/export")
    assert exported.chat_template == tokenizer_of("qwen2_5_training").chat_template


def test_a_resumed_run_says_that_its_held_out_rows_are_others(
    make_config: MakeConfig, tmp_path: Path, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.steps=3", "checkpoint.every=2", "train.batch_size=1")
    run(chat_config(make_config, tmp_path, *words, f"train.run_dir={tmp_path}/whole"), console)
    resume = f"train.resume={tmp_path}/whole/checkpoints/step-00000002"
    for name, word, said in [
        ("same", "train.seed=0", None),
        ("fewer", "eval.rows=1", "the rows held out are others than before this checkpoint"),
    ]:
        config = chat_config(make_config, tmp_path, *words, resume, word, f"train.run_dir={tmp_path}/{name}")
        console.file.truncate(0)
        run(config, console)
        assert (said or "resuming from") in text_of(console)
        assert ("the rows held out" in text_of(console)) == (said is not None)
