"""Check a configuration across its keys: one table of combinations that cannot work, and of keys that nothing reads.

A row is (key, True if refused, the reason and the remedy). The error message begins with the key and its value.
"""

from __future__ import annotations

import operator
from dataclasses import fields, replace

from overcoat.train.config import Config, DataConfig, OptimizerConfig, require

Row = tuple[str, bool, str]

OF_MUON = ("adamw_lr", "momentum", "nesterov", "newton_schulz_steps", "scale", "qkv")
MOST_TOKENS = 2**30  # in one optimizer step: the host holds all its rows, 8 bytes a token
LEAST_VOCABULARY = 257  # of a byte-level BPE: 256 bytes and the end of text
# Options that compiled layers ignore, and options that CUDA graphs would get wrong.
NOT_COMPILED = {
    "train.stream": "compiled layers cannot wait for their weights",
    "lora.dropout": "compiled layers with it would run their own forward, not FP8",
    "recipe.offload_blocks": "compiled layers keep everything on the GPU",
    "memory.report": "it measures, and predicts, layers that are not compiled",
    "train.fp8_every": "operands inside of compiled layers are not seen",
}
NOT_IN_GRAPHS = {
    **NOT_COMPILED,
    "optimizer.offload": "states would be copied while the next pass is recorded",
    "data.document_mask": "each batch has its own number of documents, a graph has one shape",
    "data.format": "each batch has its own number of conversations, a graph has one shape",
    "train.batch_size": "the estimate does not know what memory graphs keep to themselves",
}


def check(config: Config, is_recorded: bool = False) -> None:
    """Raise ValueError for the first row that is refused. is_recorded: the configuration was written by a run, so keys
    that nothing reads are allowed."""
    rows = [*_single(config), *_combined(config), *_compiled(config), *([] if is_recorded else _unused(config))]
    _refuse(rows, config)


def _refuse(rows: list[Row], config: Config) -> None:
    for key, is_wrong, why in rows:
        require(not is_wrong, f"{key} = {operator.attrgetter(key)(config)!r:.200}: {why}")


def _single(config: Config) -> list[Row]:
    """Return the checks of single keys beyond type and limits."""
    optimizer, moments = config.optimizer, config.optimizer.moments
    size, binaries = config.tokenizer.vocab_size, [name for name in config.data.files if name.endswith(".bin")]
    return [
        ("optimizer.betas", len(optimizer.betas) != 2, "two numbers, one for each moment"),
        (
            "optimizer.moments",
            not isinstance(moments, str) and len(moments) != 2,
            "a name, or two codes such as ['ratio8', 'log8']",
        ),
        (
            "tokenizer.vocab_size",
            0 < size < LEAST_VOCABULARY,
            f"a byte-level vocabulary needs {LEAST_VOCABULARY} (bytes, EOS)",
        ),
        (
            "optimizer.moments",
            optimizer.name == "muon" and moments not in ("8bit", "fp8", "bf16", "fp32"),
            "with optimizer.name = 'muon' one of 8bit, fp8, bf16, fp32",
        ),
        ("data.files", len(binaries) not in (0, len(config.data.files)), "mixes .bin with text: tokenize the text"),
        (
            "data.prompt_template",
            "{prompt}" not in config.data.prompt_template,
            "must hold {prompt}, where the prompt goes",
        ),
        *(
            (f"schedule.{name}", steps > 1 and steps % 1 > 0, "a whole number of steps, or a share of them below 1")
            for name, steps in vars(config.schedule).items()
            if name.endswith("_steps")
        ),
    ]


def _combined(config: Config) -> list[Row]:
    """Return the checks of several keys; each message names the other keys."""
    model, data, train, optimizer, tokenizer, lora = (
        config.model, config.data, config.train, config.optimizer, config.tokenizer, config.lora,
    )  # fmt: skip
    is_auto, released, is_named = train.batch_size == "auto", config.releases_gradients, bool(model.name)
    key = "train.stream" if train.stream else "optimizer.release_gradients"
    rows, decay = train.rows_per_step, optimizer.lr * optimizer.weight_decay
    unknown = f"does not go with {config.not_estimated}: leave one out"
    wants_rows = "train.global_batch_size says how many rows a step has"
    wants_model = "wants a model.name to start from"
    added, continues = tokenizer.add_tokens, model.holds_adapters and not lora.merge_start
    return [
        ("data.files", not (data.files or data.dataset), "no data: set data.files or data.dataset"),
        (
            "data.images",
            bool(data.images) and data.format != "messages",
            "images are parts of conversations: set data.format to 'messages'",
        ),
        ("model.name", not (is_named or model.config), "no model: set it, or [model.config]"),
        ("model.name", is_named and bool(model.config), "set it or [model.config], not both"),
        ("model.freeze", bool(model.freeze) and not is_named, wants_model),
        ("model.dequantize", model.dequantize and not is_named, wants_model),
        ("data.images", bool(data.images) and not is_named, wants_model),
        ("lora.rank", bool(lora.rank) and not is_named, f"adapters of random weights are of no use: {wants_model}"),
        (
            "lora.rank",
            continues and bool(lora.rank),
            "model.name holds adapters, which go on with their own rank: leave it out, or set lora.merge_start",
        ),
        (
            "model.freeze",
            continues and bool(model.freeze),
            "adapters in model.name decide what is trained: leave it out",
        ),
        (
            "lora.rank",
            lora.merge_start and bool(lora.rank) and not lora.merge,
            "new adapters fit only the model that lora.merge_start makes: set lora.merge = true to export it",
        ),
        (
            "lora.dora",
            lora.dora and lora.dropout > 0 and config.recipe.name != "bf16",
            "with lora.dropout layers would run their own forward, not FP8: set that to 0",
        ),
        (
            "lora.dora",
            lora.dora and train.stream,
            "reads the weights in 16 bits for the norms of their rows, which train.stream does not move: drop one",
        ),
        (
            "recipe.frozen_weights",
            config.recipe.frozen_weights == "fp8" and train.stream,
            "train.stream moves weights that are whole: drop one of both",
        ),
        (
            "recipe.frozen_weights",
            config.recipe.frozen_weights == "fp8" and not (lora.rank or continues),
            "checkpoints would need the weights: it is for the base of adapters, set lora.rank",
        ),
        (
            "lora.merge",
            lora.merge and config.recipe.frozen_weights == "fp8",
            "recipe.frozen_weights = 'fp8' has only codes to merge into: merge the exported adapters into the model",
        ),
        *(
            (f"data.{name}", data.streaming and getattr(data, name), "does not apply to data.streaming: drop one")
            for name in ("max_bytes", "dedupe")
        ),
        *(
            (f"data.{name}", data.is_tokens and getattr(data, name), "does not apply to .bin files: drop it")
            for name in ("streaming", "max_bytes", "dedupe")
        ),
        (
            "data.format",
            data.is_chat and (data.is_tokens or data.streaming),
            "not for .bin files nor data.streaming: conversations are tokenized once and kept",
        ),
        ("tokenizer.vocab_size", bool(tokenizer.vocab_size and tokenizer.name), "set it or tokenizer.name, not both"),
        (
            "tokenizer.add_tokens",
            not all(map(str.strip, added)) or len({*added}) < len(added),
            "names of tokens, each once",
        ),
        (
            "tokenizer.add_tokens",
            bool(added) and not data.is_chat and data.special_tokens == "text",
            "data.special_tokens = 'text' would read them as plain text: set that to 'tokens'",
        ),
        (
            "tokenizer.add_tokens",
            bool(added) and continues,
            "model.name holds adapters, which train the tokens that they have: set lora.merge_start",
        ),
        (
            "tokenizer.vocab_size",
            bool(tokenizer.vocab_size and data.images),
            "with data.images it is the processor's own; leave it out",
        ),
        ("train.batch_size", is_auto and not train.global_batch_size, f"set {wants_rows}"),
        (
            "train.global_batch_size",
            bool(train.global_batch_size) and not is_auto,
            f"goes with train.batch_size = 'auto'; a step has batch_size x accumulation = {rows} rows",
        ),
        (
            "train.accumulation",
            is_auto and train.accumulation > 1,
            f"follows from train.batch_size = 'auto'; leave it out: {wants_rows}",
        ),
        (
            key,
            bool(released and optimizer.clip),
            f"no moment has all gradients to clip at {optimizer.clip}: set optimizer.clip to 0",
        ),
        ("train.resident", bool(train.resident) and not train.stream, "is for train.stream alone; drop it"),
        (
            "train.stream",
            train.stream and optimizer.name == "muon" and not (lora.rank or continues),
            "steps layers by AdamW alone: set optimizer.name = 'adamw', or leave it out",
        ),
        (
            "optimizer.adamw_lr",
            optimizer.name == "muon" and optimizer.scale == "spectral" and not optimizer.adamw_lr,
            f"optimizer.lr = {optimizer.lr:g} is that of matrices with optimizer.scale = 'spectral', and too large for "
            "the rest: set it, for example to 3e-4",
        ),
        (
            "train.accumulation",
            released and not train.stream and train.accumulation > 1,
            f"{key} moves the weights in the first backward pass, and cannot accumulate: set it to 1, or raise "
            "train.batch_size",
        ),
        (
            "train.batch_size",
            released and is_auto,
            f"would accumulate what does not fit at once, which {'is not estimated' if train.stream else 'is refused'} "
            f"beside {key}: set it to a number (overcoat estimate knows the largest)",
        ),
        (
            "data.sequence_length",
            rows * data.sequence_length > MOST_TOKENS,
            f"a step of {rows} rows (train.global_batch_size, or train.batch_size x train.accumulation) has "
            f"{rows * data.sequence_length} tokens: must be at most {MOST_TOKENS}",
        ),
        (
            "optimizer.weight_decay",
            decay > 1,
            f"times optimizer.lr = {decay:g}: above 1 a step turns the sign of every weight; lower one",
        ),
        ("train.epochs", bool(train.epochs and train.steps), "set it or train.steps, not both"),
        (
            "train.epochs",
            bool(train.epochs) and data.streaming,
            "the rows of data.streaming are not counted: set train.steps",
        ),
        *([] if train.epochs else _schedule(config)),  # that of epochs once their steps are known
        ("memory.report", bool(config.memory.report and config.not_estimated), unknown),
        ("memory.report", config.memory.report and train.stream, "measures resident models: leave train.stream out"),
        ("train.batch_size", bool(is_auto and config.not_estimated), unknown),
    ]


def _schedule(config: Config) -> list[Row]:
    """Return the checks of the schedule's steps, which must fit into those of the run."""
    schedule, train = config.schedule, config.train
    warmup, both = schedule.warmup(train.num_steps), schedule.warmup(train.num_steps) + schedule.decay(train.num_steps)
    return [
        (
            "schedule.warmup_steps",
            warmup >= train.num_steps,
            f"must be below {train.said_steps}: a value below 1 is a share of all steps, such as 0.1",
        ),
        (
            "schedule.decay_steps",
            schedule.kind == "wsd" and both > train.num_steps,
            f"with schedule.warmup_steps {both}, must not exceed {train.said_steps}",
        ),
    ]


def with_steps(config: Config, num_rows: int) -> Config:
    """Return the configuration with the steps of its train.epochs over `num_rows` rows. ValueError: the schedule does
    not fit into them."""
    if not config.train.epochs:
        return config
    config = replace(config, train=replace(config.train, steps=config.train.steps_of_epochs(num_rows)))
    _refuse(_schedule(config), config)
    return config


def _compiled(config: Config) -> list[Row]:
    """Return the checks of options that train.compile does not support."""
    mode = config.train.compile
    is_set = {"train.batch_size": config.train.batch_size == "auto", "data.format": config.data.is_chat}
    return [
        (
            key,
            bool(is_set.get(key, operator.attrgetter(key)(config))),
            f"does not go with train.compile = {mode!r}: {why}. Change one of them",
        )
        for key, why in {"none": {}, "layers": NOT_COMPILED, "graphs": NOT_IN_GRAPHS}[mode].items()
    ]


def _unused(config: Config) -> list[Row]:
    """Return the checks of keys that are set but not read."""
    defaults, tasks = {spec.name: spec.default for spec in fields(DataConfig)}, config.eval
    lora, has_adapters = config.lora, config.model.holds_adapters
    return [
        ("lora.merge", lora.merge and not (lora.rank or has_adapters), "there are no adapters to merge: set lora.rank"),
        ("lora.dora", lora.dora and not lora.rank, "there are no new adapters: set lora.rank, or drop it"),
        ("lora.merge_start", lora.merge_start and not has_adapters, "model.name holds no adapters; drop it"),
        *(
            (f"eval.{name}", bool(getattr(tasks, name)) and not tasks.tasks, "no eval.tasks; set them or drop it")
            for name in ("tasks_every", "tasks_limit")
        ),
        *(
            (
                f"optimizer.{spec.name}",
                config.optimizer.name != "muon" and getattr(config.optimizer, spec.name) != spec.default,
                "for optimizer.name = 'muon' alone; drop it",
            )
            for spec in fields(OptimizerConfig)
            if spec.name in OF_MUON
        ),
        *(
            (f"data.{name}", getattr(config.data, name) != defaults[name], f"for {what} alone; drop it")
            for name, what in unread(config.data).items()
        ),
    ]


def unread(data: DataConfig) -> dict[str, str]:
    """Return the keys of [data] that its other keys leave unread, with the case each is for."""
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
