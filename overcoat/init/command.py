"""`overcoat init`: a commented configuration to train with, and how many rows of it fit at once.

    overcoat init chat.toml --model Qwen/Qwen3-8B --data chats.jsonl --gpu-memory 80GB
    overcoat init chat.toml --model Qwen/Qwen3-8B --data chats.jsonl --gpu-memory 24GB --lora 16
    overcoat init small.toml --model smollm2-135m --from-scratch --data 'texts/*.txt'

Asks for missing options on a terminal. The estimate chooses the rows of a forward pass and, if not even one row fits,
block checkpoints (recipe "leanest"), then optimizer states in host memory. Small data to fine-tune on are passed over
three times (train.epochs), unless --steps or --epochs say how often. No weights are read. Images that conversations
name are looked for beside the data and in the folders there. The chat template and the first rows are tried as in
training; if they would be refused, the file is still written, the output says why, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import PreTrainedConfig

from overcoat.estimate.command import memory_size, positive
from overcoat.estimate.dry_run import own_loss
from overcoat.extras import GGUF, one_line
from overcoat.models.dummy_batch import sees
from overcoat.models.shapes import MODELS, load_model_config
from overcoat.train.batch_plan import choose_plan, model_config
from overcoat.train.build import check_is_model, check_tables
from overcoat.train.chat import Encoder
from overcoat.train.config import Config, DataConfig, error_context, require
from overcoat.train.configfile import all_keys, build_config, tomllib
from overcoat.train.conversations import examples, image_paths
from overcoat.train.corpus import check_sources
from overcoat.train.metrics import shown_passes
from overcoat.train.preflight import trial_model
from overcoat.train.quantized import is_known
from overcoat.train.rows import NOT_TEXT, ROWS, as_object, has_rows, read_rows
from overcoat.train.sources import documents, find_files, read_documents
from overcoat.train.tokenizer import make_processor, make_tokenizer, tokenizer_name
from overcoat.train.vocabulary import num_ids

GIBI = 2**30
FIRST_ROWS = 100  # rows that are tried, and searched for images
COUNTED = 2**20  # bytes of the data that are tokenized to estimate the total
IMAGE_SIDE = 512  # pixels of the image per row that memory is planned for, if the model accepts any size
ASKED = {"model": "Model (a Hugging Face name, a folder, or a built-in shape)", "data": "Data (files or a dataset)"}
# Keys of a model's configuration that are not written: set by the tokenizer, or not needed for training.
UNTOLD = {"vocab_size", "quantization_config"}
STEPS, EPOCHS, WARMUP = 1000, 3, 0.1  # by default, and passes over data that have fewer steps, and their warm-up
SELDOM = 10  # fewest steps from one evaluation or checkpoint to the next
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # files of a model's, whole or in parts
# Changes that save memory, tried in order if not even one row fits.
LEANER: tuple[dict[str, Any], ...] = ({}, {"optimizer.offload": True})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", nargs="?", default="overcoat.toml", metavar="CONFIG.toml", help="the file to write")
    parser.add_argument("--model", metavar="NAME", help=f"a Hugging Face name, a folder, or one of {', '.join(MODELS)}")
    parser.add_argument("--from-scratch", action="store_true", help="random weights and a tokenizer of its own")
    parser.add_argument(
        "--data", nargs="+", metavar="FILE|NAME", help='files, patterns, "stdlib", or a dataset\'s name'
    )
    parser.add_argument("--gpu-memory", type=memory_size, metavar="SIZE", help="80GB, 24GiB (default: this GPU's)")
    parser.add_argument("--lora", type=positive, metavar="R", help="train adapters of rank R instead of the model")
    parser.add_argument("--seq", type=positive, default=1024, help="tokens in a row (default 1024)")
    parser.add_argument("--rows", type=positive, default=16, help="rows in a step (default 16)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, help=f"optimizer steps (default {STEPS}; of small data 3 epochs)")
    length.add_argument("--epochs", type=float, help="passes over the data instead of --steps")
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    target = Path(parsed.config)
    require(not target.exists(), f"{target} exists: name another file, or remove it")
    for name, question in ASKED.items():
        if getattr(parsed, name) is None:
            require(sys.stdin.isatty(), f"--{name} is missing, and there is no terminal to ask on")
            answer = _answer(question)
            require(bool(answer), f"--{name} is missing")
            setattr(parsed, name, answer.split() if name == "data" else answer)
    memory = parsed.gpu_memory
    if memory is None and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    elif memory is None and sys.stdin.isatty():
        answer = _answer("GPU memory (80GB; empty: none is planned with)")
        with error_context("GPU memory: ", argparse.ArgumentTypeError):
            memory = memory_size(answer) if answer else None
    values = {**_model(parsed), **_data(parsed.data), "data.sequence_length": parsed.seq, **_training(parsed)}
    values, chosen = _planned(values, parsed, memory)
    # A new tokenizer has no chat template.
    needs_template = parsed.from_scratch and values.get("data.format") == "messages"
    command = f"overcoat train {shlex.quote(str(target))}" + " tokenizer.chat_template=FILE" * needs_template
    named = values.get("model.name", "")
    kind = load_model_config(named, with_images=True) if named else None
    if named and is_known(kind, named):
        values = {"model.name": named, "model.dequantize": True, **values}
    config = build_config(tomllib.loads(_written(command, values)), [])
    kind = model_config(config) if kind is None else kind
    model = trial_model(config, kind)
    try:
        tokenizer = _tokenizer(config, parsed.model)
        check_tables(model, num_ids(tokenizer) if tokenizer is not None else 0, config)
        values, passes = _length(values, _data_tokens(config, tokenizer), parsed)
        said = [chosen, *passes]
    except ValueError as error:  # which a line of the file's can mend
        refused = f"overcoat train refuses this as it is: {error}"
        target.write_text(_written(command, values, chosen, refused), encoding="utf-8")
        raise ValueError(f"{target} is written, but overcoat train refuses it as it is: {error}") from error
    target.write_text(_written(command, values, *said), encoding="utf-8")
    print(one_line(f"{target}: {said[0]}"), *map(one_line, said[1:]), one_line(command), sep="\n")
    return 0


def _tokenizer(config: Config, name: str) -> Any | None:
    """Return the tokenizer after trying it on the first rows; None if it is trained on the data or cannot be fetched
    here. ValueError: training would refuse it, its chat template or a row."""
    if not tokenizer_name(config) or config.data.is_tokens:
        return None
    try:
        tokenizer = make_tokenizer(config)
        processor = make_processor(config) if config.data.images else None
    except ValueError as error:
        if os.path.exists(config.model.name) or not str(error).startswith("cannot load"):
            raise
        warnings.warn(
            f"the tokenizer of {name} cannot be fetched here: whether its chat template and the data go together is "
            "seen when training starts",
            stacklevel=2,
        )
        return None
    if config.data.is_chat:
        encoder = Encoder(config.data, tokenizer, processor)
        rows = examples(config.data) if config.data.files else iter(())  # a hub's data are not fetched
        for where, example in itertools.islice(rows, FIRST_ROWS):
            encoder(example, where)
    return tokenizer


def _length(values: dict[str, Any], tokens: int, parsed: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the values with epochs for small data to fine-tune on, and a sentence on the passes over the data.
    tokens: of the data, 0 if unknown."""
    if not tokens:
        return values, []
    of_step, steps, epochs = parsed.rows * parsed.seq, parsed.steps or STEPS, parsed.epochs
    is_small = steps * of_step > EPOCHS * tokens
    if epochs is None and parsed.steps is None and not parsed.from_scratch and is_small:
        epochs = float(EPOCHS)
    if epochs is not None:
        steps = max(1, round(epochs * tokens / of_step))
        values = {key: value for key, value in values.items() if key != "train.steps"} | _epochs(epochs, steps)
    passes = shown_passes(steps * of_step / tokens if epochs is None else epochs)
    return values, [f"{steps:,} steps are about {passes} passes (epochs) over the data's {tokens:,} tokens"]


def _data_tokens(config: Config, tokenizer: Any | None) -> int:
    """Return about how many tokens the files hold, extrapolated from the first COUNTED bytes; 0 if unknown (a dataset,
    compressed files). Without a tokenizer 4 bytes count as a token."""
    data = config.data
    if data.dataset:
        return 0
    files = find_files(data.files)
    size = sum(path.stat().st_size for path in files)
    if data.is_tokens:
        return size // (2 if data.token_dtype == "uint16" else 4)
    encoder = Encoder(data, tokenizer) if tokenizer is not None and data.is_chat and not data.images else None
    tokens = seen = 0
    for text, example, where in _documents(data):
        seen += len(text.encode(errors="replace"))
        if encoder is not None:
            tokens += len(encoder(example, where)[0])
        elif tokenizer is not None:
            tokens += len(tokenizer(text, verbose=False).input_ids) + 1
        else:
            tokens += -(-len(text.encode(errors="replace")) // 4) + 1
        if seen >= COUNTED:
            is_plain = not any(path.suffix.lower() in (".gz", ".parquet", ".arrow") for path in files)
            return int(tokens * max(1, size / seen)) if is_plain else 0
    return tokens


def _documents(data: DataConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield the text of each row as it is in a file, the row, and where it is."""
    if data.is_chat:
        yield from ((json.dumps(row, default=str), row, where) for where, row in examples(data))
    else:
        yield from ((text, None, "") for text in documents(data))


def _answer(question: str) -> str:
    """Return the typed answer; "" at the end of the input (Ctrl-D)."""
    try:
        return input(f"{question}: ").strip()
    except EOFError:
        return ""


def _model(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the [model] keys. ValueError: there are no weights to start from, or the model cannot start without."""
    check_is_model(parsed.model)
    shape = MODELS.get(parsed.model) if not Path(parsed.model).exists() else None
    if not parsed.from_scratch:
        has_weights = shape.checkpoint if shape else _may_have_weights(Path(parsed.model))
        require(bool(has_weights), f"--model {parsed.model} has no weights to start from: --from-scratch")
        return {"model.name": shape.checkpoint if shape else parsed.model}
    config = load_model_config(parsed.model, with_images=True)
    require(not sees(config), f"--model {parsed.model} sees images, and starts from weights: leave --from-scratch out")
    return {"model.config": _fields(config, parsed.model), "tokenizer.vocab_size": config.vocab_size}


def _fields(config: Any, name: str) -> dict[str, Any]:
    """Return the fields of a model's configuration that differ from transformers' defaults. Fields that the class does
    not define are left out: a config.json may come from a stranger."""
    kind = type(config)
    known = kind().to_dict().keys() - PreTrainedConfig().to_dict().keys() - UNTOLD
    found = {key: config.to_dict()[key] for key in sorted(known) if not key.endswith("token_id")}
    usual = kind().to_dict()
    fields = {key: _without_null(value) for key, value in found.items() if value is not None and value != usual[key]}
    plain = {key: value for key, value in fields.items() if isinstance(value, (bool, int, float, str))}
    # Tables and lists are long, and as a rule what transformers makes of the rest.
    made = kind(**plain).to_dict()
    kept = {key: value for key, value in fields.items() if key in plain or _without_null(made.get(key)) != value}
    for key in [key for key, value in found.items() if value is None and made.get(key) is not None]:
        warnings.warn(
            f"{name} has no {key}, which TOML cannot say: here it is {made[key]!r}, transformers' default; "
            f"set model.config.{key}",
            stacklevel=2,
        )
    return {"model_type": kind.model_type, **kept}


def _without_null(value: Any) -> Any:
    """Return a value without keys that are null, which TOML does not have."""
    if isinstance(value, dict):
        return {str(key): _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, (list, tuple)) else value


def _may_have_weights(path: Path) -> bool:
    """True for a folder with weights in a format of transformers, and for a path that does not exist (it may be a hub
    name)."""
    return not path.exists() or path.suffix == GGUF or any(any(path.glob(name)) for name in WEIGHTS)


def _data(names: list[str]) -> dict[str, Any]:
    """Return the [data] keys for files, by what their first row holds, or for a dataset."""
    is_name = len(names) == 1 and not any(sign in names[0] for sign in "*?[") and not Path(names[0]).exists()
    is_file = Path(names[0]).suffix.lower() in (*ROWS, *NOT_TEXT, ".txt") or names[0] in ("stdlib", "site-packages")
    if is_name and not is_file:
        return {"data.dataset": names[0]}
    found: dict[str, Any] = {"data.files": names}
    check_sources(DataConfig(files=names))
    files = find_files(names)
    full = [path for path in files if path.stat().st_size]
    require(bool(full), f"{', '.join(map(str, files[:3]))}: empty, no data: give other files as --data")
    first = full[0]
    if first.suffix == ".bin":
        return found
    if not has_rows(first):
        next(read_documents(first, ""), "")  # an error names a file that is not text
        return found
    where, row = next(iter(read_rows(first)), (str(first), {}))
    keys = set(as_object(row, where))
    chosen: dict[str, Any] = {}
    if messages := [key for key in ("messages", "conversations") if key in keys]:
        chosen = {"format": "messages", "messages_key": messages[0], **_images(first, messages[0])}
    elif {"prompt", "completion"} <= keys:
        chosen = {"format": "prompt-completion"}
    if chosen:
        for _ in itertools.islice(examples(DataConfig(files=[str(first)], **chosen)), FIRST_ROWS):
            pass  # an error says what training would
        return {**found, **{f"data.{key}": value for key, value in chosen.items()}}
    require(
        "text" in keys,
        f"{where}: its fields are {', '.join(sorted(keys)) or 'none'}; wanted are text, messages, or prompt and "
        "completion: rename one, or set data.text_key in a file of your own",
    )
    return found


def _images(file: Path, key: str) -> dict[str, Any]:
    """Return the folder of the images that the first rows name: the file's own, or one inside it; {} if they name
    none."""
    named = (image_paths(row, key, where) for where, row in itertools.islice(read_rows(file), FIRST_ROWS))
    path = next((paths[0] for paths in named if paths), None)
    if path is None:
        return {}
    folders = [file.parent, *sorted(each for each in file.parent.iterdir() if each.is_dir())]
    folder = next((each for each in folders if (each / path).is_file()), None)
    if folder is None:
        raise ValueError(
            f"{file} names the image {path}, which is neither beside it nor in a folder there: move the images, or set "
            "data.images in a file of your own, like configs/llava-1.5-7b.toml"
        )
    here = Path.cwd()
    return {"images": str(folder.relative_to(here) if folder.is_relative_to(here) else folder)}


def _training(parsed: argparse.Namespace) -> dict[str, Any]:
    steps, rate = parsed.steps or STEPS, {"optimizer.lr": 3e-4 if parsed.from_scratch else 2e-5}
    if parsed.lora:  # alpha / rank = 2, and ten times the rate of a whole model, as is usual
        rate = {"lora.rank": parsed.lora, "lora.alpha": 2.0 * parsed.lora, "optimizer.lr": 2e-4}
    if parsed.epochs is not None:
        return rate | _epochs(parsed.epochs, steps)
    return rate | {"schedule.warmup_steps": min(100, steps // 10), "train.steps": steps, **_intervals(steps)}


def _epochs(epochs: float, steps: int) -> dict[str, Any]:
    """Return the keys of a training of so many epochs, about `steps` steps."""
    return {"schedule.warmup_steps": WARMUP, "train.epochs": epochs, **_intervals(steps)}


def _intervals(steps: int) -> dict[str, Any]:
    """Return how often to evaluate and to save: both also happen at the end, which is enough for few steps."""
    return {"eval.every": max(SELDOM, steps // 10), "checkpoint.every": max(SELDOM, steps // 4)}


def _planned(values: dict[str, Any], parsed: argparse.Namespace, memory: int | None) -> tuple[dict[str, Any], str]:
    """Return the values with rows, recipe and the place of the moments chosen, and a sentence about the choice.
    ValueError: not one row fits."""
    if memory is None:
        rows = next(size for size in (4, 3, 2, 1) if parsed.rows % size == 0)
        chosen = f"{rows} rows in a forward pass; no GPU's memory was planned with (--gpu-memory)"
        return {**values, "recipe.name": "default", **_rows(parsed.rows, rows)}, chosen
    has_images = "data.images" in values
    with error_context(
        "", after="; configs/llava-1.5-7b.toml is an example of a file of your own" if has_images else ""
    ):
        model = load_model_config(values.get("model.name", parsed.model), with_images=True)
        require(
            sees(model) or not has_images or not hasattr(model, "vision_config"),
            f"--model {parsed.model} is a {model.model_type} model, whose images cannot be planned with",
        )
    require(
        sees(model) or not has_images,
        f"the rows of --data name images, which --model {parsed.model} does not see: name a vision-language model, or "
        "remove them from the rows",
    )
    with_image = functools.partial(own_loss, side=IMAGE_SIDE)
    for way in LEANER:
        auto = {"train.batch_size": "auto", "train.global_batch_size": parsed.rows}
        planned = {key: value for key, value in {**values, **way, **auto}.items() if key != "data.images"}
        config = build_config(tomllib.loads(_written("", planned)), [])
        plan = choose_plan(config, model, memory, loss_of=with_image if has_images else None)
        if plan is not None:
            recipe = "leanest" if plan.block_checkpoints else "default"
            chosen = f"{plan.micro_batch} of {parsed.rows} rows fit {memory / GIBI:.3g} GiB at once, recipe {recipe}"
            chosen += ", moments in host memory" if way else ""
            chosen += f", adapters of rank {parsed.lora}" if parsed.lora else ""
            chosen += f", with one image in each (of {IMAGE_SIDE} pixels a side, if not fixed)" if has_images else ""
            return {**values, **way, "recipe.name": recipe, **_rows(parsed.rows, plan.micro_batch)}, chosen
    raise ValueError(
        f"not one row of {parsed.seq} tokens of {parsed.model} fits {memory / GIBI:.3g} GiB, with block checkpoints or "
        "moments in host memory: shorten --seq, take a smaller model, or several GPUs (overcoat estimate --gpus)"
    )


def _rows(many: int, at_once: int) -> dict[str, Any]:
    return {"train.batch_size": at_once, "train.accumulation": many // at_once}


def _written(command: str, values: dict[str, Any], *said: str) -> str:
    """Return `values` as commented TOML, checked by reading it back. command: the command that reads the file.
    ValueError: TOML cannot hold a value."""
    known = all_keys()
    lines = [f"# {one_line(line)}" for line in (command, *said, "All keys: overcoat train --keys")]
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        tables.setdefault(section, {})[name] = value
    with error_context("a TOML file cannot hold what it must: ", Exception):
        for section, table in tables.items():
            own = {name: value for name, value in table.items() if not isinstance(value, dict)}
            lines += ["", f"[{section}]"] if own else []
            lines += [
                f"{tomli_w.dumps({name: value}).rstrip()}  # {known[f'{section}.{name}'].metadata['help']}"
                for name, value in own.items()
            ]
            inner = {name: value for name, value in table.items() if isinstance(value, dict)}
            lines += ["", tomli_w.dumps({section: inner}).rstrip()] if inner else []
        text = "\n".join(lines) + "\n"
        text.encode()
        require(tomllib.loads(text) == tables, "it reads back as something else")
    return text
