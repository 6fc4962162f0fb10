"""TOML and dotted arguments to a `Config` and back: precedence, types, unknown keys, differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overcoat.train import configfile
from overcoat.train.configfile import (
    all_keys,
    build_config,
    differences,
    dump_toml,
    help_text,
    load_config,
    record_config,
)
from tests.train.test_config import MINIMAL


def test_defaults_then_file_then_arguments(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[model]\nname = "m"\n[data]\nfiles = ["a.txt"]\n[optimizer]\nlr = 0.5\neps = 1e-6\n')
    config = load_config(path, ["optimizer.lr=0.25", "optimizer.lr=0.125"])
    assert config.optimizer.lr == 0.125  # the last argument over the first, the file and the default
    assert config.optimizer.eps == 1e-6  # the file over the default
    assert config.optimizer.betas == [0.9, 0.95]  # the default
    assert config.train.run_dir == "runs/my"


@pytest.mark.parametrize(
    ("argument", "section", "key", "value"),
    [
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("train.device=cpu", "train", "device", "cpu"),
        ("model.name=7", "model", "name", "7"),
        ("data.files=b.txt", "data", "files", ["b.txt"]),
        ('data.files=["b", "c"]', "data", "files", ["b", "c"]),
        ("optimizer.betas=[0, 0.5]", "optimizer", "betas", [0.0, 0.5]),
        ("optimizer.moments=fp32", "optimizer", "moments", "fp32"),
        ("optimizer.moments=['sqrt8', 'log8']", "optimizer", "moments", ["sqrt8", "log8"]),
        ("recipe.group_size=16", "recipe", "group_size", 16),
        ("optimizer.offload=true", "optimizer", "offload", True),
        ("data.streaming=true", "data", "streaming", True),
        ("sample.prompt=a = b", "sample", "prompt", "a = b"),
    ],
)
def test_argument_values(argument: str, section: str, key: str, value: object) -> None:
    found = getattr(getattr(build_config(MINIMAL, [argument]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_unknown_key_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\nname = "m"\n[data]\nfiles = ["a"]\nseqence_length = 3\n')
    with pytest.raises(ValueError, match=r"data.seqence_length; did you mean data.sequence_length\?"):
        load_config(path)


def test_unreadable_files_are_value_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the config"):
        load_config(tmp_path / "absent.toml")
    for content in (b"[model\n", b'[model]\nname = "caf\xe9"\n', b"a = " + b"[" * 10_000):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML"):
            load_config(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text('train = 5\n[model]\nname = "m"\n[data]\nfiles = ["a"]\n')
    with pytest.raises(ValueError, match=r"train = 5: expected a table \[train\]"):
        load_config(tmp_path / "bad.toml")


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    config = build_config(
        {"model": {"config": {"model_type": "llama", "rope": {"theta": 1e4}}}, "data": {"files": ['q"uo\\te\n']}},
        [
            "recipe.checkpoint=block",
            "train.batch_size=auto",
            "train.global_batch_size=9",
            "optimizer.lr=1e-5",
            "compare.overrides=['recipe.name=bf16']",
        ],
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml", ["train.run_dir="]) == config


@pytest.mark.parametrize(
    "argument",
    [
        "optimizer.clip=inf",
        "sample.prompt=a \N{GRINNING FACE} \x07 \\u0041",
        'model.config.vocab={"a.b" = [1, {c = 2}]}',
    ],
)
def test_odd_values_are_recorded_as_they_are(tmp_path: Path, argument: str) -> None:
    start = {"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}}
    config = build_config(start, [argument, "train.run_dir=r"])
    record_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.config.theta=nan", "model.config.theta = nan: a TOML file cannot hold this value"),
        ("sample.prompt=\udcff", r"sample.prompt = '\\udcff': a TOML file cannot"),
    ],
)
def test_what_does_not_come_back_is_refused(argument: str, message: str) -> None:
    start = {"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}}
    with pytest.raises(ValueError, match=message):
        dump_toml(build_config(start, [argument]))


def test_a_record_is_replaced_whole_and_only_if_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    old, new = build_config(MINIMAL, []), build_config(MINIMAL, ["train.seed=1"])
    record_config(old, path)
    before = path.stat()
    record_config(old, path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def full(_: Path) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(configfile, "sync", full)
        with pytest.raises(OSError, match="no space left"):
            record_config(new, path)
    assert path.read_text() == dump_toml(old)
    record_config(new, path)
    assert path.read_text() == dump_toml(new)
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


def test_differences_ignore_what_decides_nothing() -> None:
    old = build_config(MINIMAL, [])
    free = ["train.run_dir=x", "checkpoint.keep=9", "eval.every=3", "train.resume=y", "sample.tokens=1"]
    free += ["memory.report=true", "train.on_oom=error", "train.memory_limit_gib=40"]
    assert differences(old, build_config(MINIMAL, free)) == []
    assert differences(old, build_config(MINIMAL, ["train.seed=1"])) == ["train.seed: 0 -> 1"]


def test_every_key_is_explained() -> None:
    text = help_text()
    for key, spec in all_keys().items():
        assert f"{key} = " in text
        assert spec.metadata["help"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": 3}, r"optimizer = 3: expected a table \[optimizer\]"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr = 'fast': expected a number"),
        ({"optimizer": {"betas": ["a"]}}, r"optimizer\.betas = 'a': expected a number"),
        ({"train": {"steps": True}}, r"train\.steps = True: expected a whole number"),
        ({"train": {"device": 3}}, r"train\.device = 3: expected text"),
        ({"data": {"files": 3}}, r"data\.files = 3: expected text"),
        ({"model": {"config": "llama"}}, r"model\.config = 'llama': expected a table"),
        ({"optimizer": {"moments": 8}}, r"optimizer\.moments = 8: expected text or a list of text"),
        ({"optimiser": {"lr": 1.0}}, r"unknown key optimiser; did you mean optimizer\?"),
        ({"zzzz": 1}, r"unknown key zzzz \(overcoat train --keys lists all\)"),  # nothing is near: no guess
    ],
)
def test_values_of_a_file_are_checked_like_arguments(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config({**MINIMAL, **values}, [])


def test_an_empty_file_is_a_config_that_arguments_complete(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ValueError, match="no data: set data"):
        load_config(tmp_path / "empty.toml")
    config = load_config(tmp_path / "empty.toml", ["model.name=m", "data.files=a.txt"])
    assert config == build_config({}, ["model.name=m", "data.files=a.txt", "train.run_dir=runs/empty"])


def test_arguments_reach_into_free_tables_and_nowhere_else() -> None:
    values: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}}
    arguments = ["model.config.rope.theta=1e4", "model.config.name=7 b", "model.config.sizes=[1, 2]"]
    expected = {"model_type": "llama", "rope": {"theta": 1e4}, "name": "7 b", "sizes": [1, 2]}
    assert build_config(values, arguments).model.config == expected
    assert values["model"]["config"] == {"model_type": "llama"}  # the caller's own is not written to
    with pytest.raises(ValueError, match=r"'model\.config\.model_type\.x=1': model_type is not a table"):
        build_config(values, ["model.config.model_type.x=1"])
    with pytest.raises(ValueError, match=r"unknown key train\.steps\.x"):
        build_config(values, ["train.steps.x=1"])


def test_the_first_reading_of_an_argument_is_the_one_complained_about() -> None:
    """`[8]` is a list first and only then text: the message shows what was read."""
    with pytest.raises(ValueError, match=r"train\.steps = \[8\]: expected a whole number"):
        build_config(MINIMAL, ["train.steps=[8]"])


def test_differences_reach_into_free_tables() -> None:
    old = build_config({"model": {"config": {"a": 1, "b": {"c": 2}}}, "data": {"files": ["a.txt"]}}, [])
    new = build_config({"model": {"config": {"b": {"c": 3}, "d": 4}}, "data": {"files": ["a.txt"]}}, [])
    assert differences(old, new) == [
        "model.config.a: 1 -> None",
        "model.config.b.c: 2 -> 3",
        "model.config.d: None -> 4",
    ]


def test_every_key_stands_in_the_dump_under_its_table() -> None:
    dumped = dump_toml(build_config(MINIMAL, []))
    found = {f"{table}.{key}" for table, values in configfile.tomllib.loads(dumped).items() for key in values}
    left_out = {key for key in all_keys() if key not in found}
    assert left_out == {key for key, spec in all_keys().items() if spec.default is None}
    assert found <= set(all_keys())
