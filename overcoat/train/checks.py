"""Checks across sections: combinations of keys that cannot work, and keys that nothing reads.

Each check is a row: whether all is well, and one line that names the keys and the remedy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import fields

from overcoat.train.config import Config, DataConfig, require

MOST_TOKENS = 2**30  # in one optimizer step: its rows are made on the host at once, 8 bytes a token
# What compiled layers would leave undone, and what CUDA graphs would do wrong or are not meant for.
NOT_COMPILED = {
    "recipe.offload_blocks": "compiled layers keep everything on the GPU",
    "memory.report": "it measures, and predicts, layers that are not compiled",
    "train.fp8_every": "operands inside of compiled layers are not seen",
}
NOT_IN_GRAPHS = {
    **NOT_COMPILED,
    "optimizer.offload": "states would be copied while the next pass is recorded",
    "data.document_mask": "each batch has its own number of documents, a graph has one shape",
    "train.batch_size": "the estimate does not know what memory graphs keep to themselves",
}


def check(config: Config) -> None:
    for is_right, message in (*_sections(config), *_compiled(config)):
        require(is_right, message)


def check_read(config: Config) -> None:
    """Refuse values that nothing reads."""
    tasks = config.eval
    for name in ("tasks_every", "tasks_limit"):
        value = getattr(tasks, name)
        require(not value or bool(tasks.tasks), f"eval.{name} = {value}: no eval.tasks; set them or drop it")
    defaults = {spec.name: spec.default for spec in fields(DataConfig)}
    for name, what in unread(config.data).items():
        value = getattr(config.data, name)
        require(value == defaults[name], f"data.{name} = {value!r}: for {what} alone; drop it")


def unread(data: DataConfig) -> dict[str, str]:
    """The keys of [data] that nothing reads, beside the others there, and what would."""
    pair = (data.format == "prompt-completion", "data.format = 'prompt-completion'")
    applies = {
        **dict.fromkeys(("too_long", "on_lost"), (data.is_chat, "conversations")),
        "messages_key": (data.format == "messages", "data.format = 'messages'"),
        **dict.fromkeys(("prompt_key", "completion_key", "prompt_template"), pair),
        "text_key": (not data.is_chat, "data.format = 'text'"),
        "special_tokens": (
            data.format != "messages" and not data.is_tokens,
            "text; a chat template's text is always read as tokens",
        ),
        "shuffle_rows": (data.streaming, "data.streaming"),
        "token_dtype": (data.is_tokens, ".bin files"),
        **dict.fromkeys(("dataset_config", "split"), (bool(data.dataset), "data.dataset")),
    }
    return {name: what for name, (is_read, what) in applies.items() if not is_read}


def _sections(config: Config) -> Iterator[tuple[bool, str]]:
    model, data, train, optimizer, schedule = (
        config.model, config.data, config.train, config.optimizer, config.schedule,
    )  # fmt: skip
    is_auto, released = train.batch_size == "auto", optimizer.release_gradients
    rows, length, steps, warmup = train.rows_per_step, data.sequence_length, train.steps, schedule.warmup_steps
    yield bool(model.name or model.config), "no model: set model.name or [model.config]"
    yield (
        bool(model.name) or not (data.images or model.freeze),
        f"data.images = {data.images!r}, model.freeze = {model.freeze}: want a model.name to start from",
    )
    yield (
        not (data.images and config.tokenizer.vocab_size),
        f"tokenizer.vocab_size = {config.tokenizer.vocab_size}: with data.images it is the processor's own; leave it "
        "out",
    )
    yield (
        bool(model.name) or not config.lora.rank,
        f"lora.rank = {config.lora.rank}: adapters of random weights are of no use, set model.name to start from",
    )
    unknown = config.not_estimated
    for key, value in {"memory.report": config.memory.report, "train.batch_size = 'auto'": is_auto}.items():
        yield not (value and unknown), f"{key} does not go with {unknown}: leave one out"
    yield (
        not (released and train.accumulation > 1),
        f"optimizer.release_gradients cannot accumulate (train.accumulation = {train.accumulation}): the weights move "
        "in the first backward pass. Set train.accumulation=1, or raise train.batch_size",
    )
    yield (
        not (released and is_auto),
        "train.batch_size = 'auto' accumulates what does not fit at once, which optimizer.release_gradients cannot: "
        "set train.batch_size to a number (overcoat estimate knows the largest)",
    )
    yield (
        rows * length <= MOST_TOKENS,
        f"a step of {rows} rows (train.global_batch_size, or train.batch_size x train.accumulation) of "
        f"data.sequence_length = {length} has {rows * length} tokens: must be at most {MOST_TOKENS}",
    )
    yield warmup < steps, f"schedule.warmup_steps = {warmup}: must be below train.steps = {steps}"
    both = warmup + schedule.decay_steps
    yield (
        schedule.kind != "wsd" or both <= steps,
        f"schedule: warmup_steps + decay_steps = {both} must not exceed train.steps = {steps}",
    )


def _compiled(config: Config) -> Iterator[tuple[bool, str]]:
    mode = config.train.compile
    yield (
        not (config.data.is_chat and mode == "graphs"),
        f"data.format = {config.data.format!r} does not go with train.compile = 'graphs': each batch has its own "
        "number of conversations, a graph has one shape. Set train.compile to 'layers' or 'none'",
    )
    for key, why in {"none": {}, "layers": NOT_COMPILED, "graphs": NOT_IN_GRAPHS}[mode].items():
        value = operator.attrgetter(key)(config)
        way = "Set it to a number" if value == "auto" else "Leave it out"
        yield (
            not value or (key == "train.batch_size" and value != "auto"),
            f"{key} = {value!r} does not go with train.compile = {mode!r}: {why}. {way}, or set train.compile to "
            "'none'",
        )
