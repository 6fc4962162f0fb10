"""Convert TOML and dotted arguments to a `Config`, and back.

Every value must match the type hint of its dataclass field; the only conversions are int to float and one value to a
list of one. An argument is read as a TOML value, or as plain text if it is not TOML, so `train.device=cpu`,
`optimizer.lr=1e-3` and `data.files='["a.txt", "b.txt"]'` work without extra quotes.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import operator
import sys
import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from overcoat.extras import load_extra
from overcoat.train.checks import check, unread
from overcoat.train.config import FREE_KEYS, Config, error_context, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
REPLACED = {"train.steps": "epochs", "train.epochs": "steps"}  # the other one, which an argument replaces
LARGEST = 10**15  # of numbers without an `at_most` of their own: so none is infinite, or too large for 64 bits
# Options of transformers' Trainer and of TRL, and the keys they correspond to.
TRAINER_OPTIONS = {
    "model_name_or_path": "model.name", "torch_dtype": "model.dtype", "lora_r": "lora.rank",
    "use_dora": "lora.dora",
    "dataset_name": "data.dataset", "dataset_text_field": "data.text_key",
    "output_dir": "train.run_dir", "resume_from_checkpoint": "train.resume",
    "max_length": "data.sequence_length", "max_seq_length": "data.sequence_length",
    "max_steps": "train.steps", "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size, of all GPUs together,",
    "gradient_accumulation_steps": "train.accumulation", "gradient_checkpointing": "recipe.checkpoint",
    "learning_rate": "optimizer.lr", "max_grad_norm": "optimizer.clip", "lr_scheduler_type": "schedule.kind",
    "warmup_ratio": "schedule.warmup_steps, below 1,", "logging_steps": "train.log_every",
    "report_to": "train.loggers",
    "eval_steps": "eval.every", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep",
}  # fmt: skip


def load_config(path: str | Path, arguments: list[str] | None = None, is_recorded: bool = False) -> Config:
    """Return the `Config` of a TOML file and dotted `section.key=value` arguments, all checked.

    is_recorded: a run wrote the file, so keys that nothing reads are allowed, and errors name the file. ValueError: the
    file cannot be read, or a value is refused.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML or of UTF-8; brackets in brackets
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    train = values.setdefault("train", {})
    if isinstance(train, dict):
        train.setdefault("run_dir", f"runs/{path.stem}")
    with error_context(f"{path}: ") if is_recorded else contextlib.nullcontext():
        return build_config(values, arguments or [], is_recorded)


def build_config(values: dict[str, Any], arguments: list[str], is_recorded: bool = False) -> Config:
    """Return a checked `Config` from nested `values` and dotted `arguments`, which win."""
    values = copy.deepcopy(values)
    for argument in arguments:
        _apply_argument(values, argument)
    config: Config = _build(Config, values, "")
    check(config, is_recorded)
    return config


def _build(cls: type, values: Any, prefix: str) -> Any:
    """Return dataclass `cls` from a table, with types and limits checked; prefix: the table's dotted name, for
    messages."""
    require(isinstance(values, dict), f"{prefix[:-1]} = {values!r}: expected a table [{prefix[:-1]}]")
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ValueError(_unknown_key(prefix + key))
    built = {}
    for spec in fields(cls):
        hint, key = hints[spec.name], prefix + spec.name
        if is_dataclass(hint):
            built[spec.name] = _build(hint, values.get(spec.name, {}), f"{key}.")  # type: ignore[arg-type]
        elif spec.name in values:
            built[spec.name] = value = _coerce(values[spec.name], hint, key)
            for number in value if isinstance(value, list) else [value]:  # NaN is outside of any limit
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    for name, limit in {"at_most": LARGEST, **spec.metadata["limits"]}.items():
                        in_limit = LIMITS[name](number, limit)
                        require(in_limit, f"{key} = {value}: must be {name.replace('_', ' ')} {limit}")
    return cls(**built)


def _apply_argument(values: dict[str, Any], argument: str) -> None:
    """Set `section.key=value` (deeper for free tables: model.config.hidden_size=64) in `values`."""
    key, separator, text = argument.partition("=")
    require(bool(separator), f"{argument!r}: arguments look like section.key=value")
    path = key.split(".")
    hint: Any = Config
    for depth, part in enumerate(path):
        hints = get_type_hints(hint) if is_dataclass(hint) else {}
        if part not in hints:
            raise ValueError(_unknown_key(key))
        hint = hints[part]
        if get_origin(hint) is dict and depth < len(path) - 1:
            hint = Any  # the keys of a free table are checked by whoever reads it
            break
    require(not is_dataclass(hint), f"{argument!r}: {key} is a section; set one of its keys, {key}.NAME=value")
    table = values
    for part in path[:-1]:
        table = table.setdefault(part, {})
        require(isinstance(table, dict), f"{argument!r}: {part} is not a table")
    table[path[-1]] = _parse(text) if hint is Any else _coerce_text(text, hint, key)
    if key in REPLACED:  # what the file says instead
        table.pop(REPLACED[key], None)


def _parse(text: str) -> Any:
    """Return `text` as a TOML value, or as it is if it is no TOML: `lr=1e-3`, `name=gpt2`, `files=["a", "b"]`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _coerce_text(text: str, hint: Any, key: str) -> Any:
    """Return an argument's text as `hint` demands: read as TOML first, then as plain text."""
    try:
        return _coerce(_parse(text), hint, key)
    except ValueError as error:
        try:
            return _coerce(text, hint, key)
        except ValueError:
            raise error from None


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as `hint` demands; the only conversions are int to float and one element to a list of one."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in choices:
            if get_origin(choice) is not list or isinstance(value, list):
                try:
                    return _coerce(value, choice, key)
                except ValueError:
                    continue
    elif origin is list:
        return [_coerce(element, choices[0], key) for element in (value if isinstance(value, list) else [value])]
    elif value in choices if origin is Literal else type(value) is (origin or hint):
        return value
    elif hint is float and type(value) is int:
        return float(value)
    raise ValueError(f"{key} = {value!r}: expected {_describe(hint)}")


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments if choice is not type(None))
    if origin is list:
        return f"a list of {_describe(arguments[0])}"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(hint, "a table")


def all_keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key with its dataclass field."""
    found: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for spec in fields(cls):
        if is_dataclass(hints[spec.name]):
            found |= all_keys(hints[spec.name], f"{prefix}{spec.name}.")
        else:
            found[prefix + spec.name] = spec
    return found


def _unknown_key(key: str) -> str:
    """Return the message for an unknown key, with a suggestion: the equivalent of a transformers Trainer option, else
    the closest by the last part (train.lr -> optimizer.lr), then by the whole key (optimiser.lr)."""
    leaves = {name.rpartition(".")[2]: name for name in all_keys()}
    leaf = key.rpartition(".")[2]
    if leaf in TRAINER_OPTIONS:
        return f"unknown key {key}: it is {TRAINER_OPTIONS[leaf]} here (overcoat train --keys lists all)"
    nearest = difflib.get_close_matches(key, [*all_keys(), *(spec.name for spec in fields(Config))], n=1, cutoff=0.7)
    if leaf in leaves or not nearest:
        nearest = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)] or nearest
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown key {key}{hint} (overcoat train --keys lists all)"


def help_text() -> str:
    """Return every key with its default and meaning, for `overcoat train --keys`."""
    lines = []
    for key, spec in all_keys().items():
        default = spec.default if spec.default is not MISSING else spec.default_factory()
        lines.append(f"{key} = {json.dumps(default)}\n    {spec.metadata['help']}")
    return "\n".join(lines)


def dump_toml(config: Config) -> str:
    """Return the resolved configuration as TOML that `load_config` reads back to an equal Config. ValueError: a value
    does not survive (NaN in [model.config], invalid Unicode)."""
    writer = load_extra("tomli_w", "hf", "recording the configuration")
    # TOML has no null; a key left out has its default, and the default of all that may be None is None.
    values = asdict(config, dict_factory=lambda items: {key: value for key, value in items if value is not None})
    text = str(writer.dumps(values).encode(errors="replace").decode())
    back = _flatten(asdict(build_config(tomllib.loads(text), [])))
    for key, value in _flatten(asdict(config)).items():
        require(back.get(key) == value, f"{key} = {value!r}: a TOML file cannot hold this value")
    return text


def differences(old: Config, new: Config) -> list[str]:
    """Return the keys in which two configurations differ: "optimizer.lr: 0.001 -> 0.002". FREE_KEYS, and keys that
    neither reads, are left out."""
    before, after = _flatten(asdict(old)), _flatten(asdict(new))
    unused = {f"data.{name}" for name in unread(old.data).keys() & unread(new.data).keys()}
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE_KEYS) and key not in unused
    ]


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
