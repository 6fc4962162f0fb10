"""From TOML and dotted arguments to a `Config` and back: precedence, types, ranges, refusals, differences."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import overcoat
from overcoat.train import configfile
from overcoat.train.config import RecipeConfig
from overcoat.train.configfile import all_keys, build_config, differences, dump_toml, help_text, load_config

MINIMAL = {"model": {"name": "some/model"}, "data": {"files": ["a.txt"]}}
INLINE: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}}


RELEASED = "optimizer.release_gradients=true optimizer.clip=0"
AUTO = "train.batch_size=auto train.global_batch_size=8"


def test_names_of_trainers_have_another_name_here() -> None:
    assert {name.partition(",")[0] for name in configfile.TRAINER_OPTIONS.values()} <= all_keys().keys()
    assert not {*configfile.TRAINER_OPTIONS} & {name.rpartition(".")[2] for name in all_keys()}


# What is given, and what the refusal must name: of an unknown key the nearest, of a value its key and what helps.
REFUSALS = [
    ("optimizer.lrr=1", "did you mean optimizer.lr?"),
    ("optimiser.weight_decay=1", "did you mean optimizer.weight_decay?"),
    ("train.lr=1", "did you mean optimizer.lr?"),
    ("trian.steps=1", "did you mean train.steps?"),
    ("lr=1", "did you mean optimizer.lr?"),
    ("train.max_grad_norm=1", "optimizer.clip"),
    ("train=3", "train.NAME"),
    ("train.steps", "section.key=value"),
    ("train.steps=many", "train.steps = 'many': expected a whole number"),
    ("train.steps=1.5", "train.steps = 1.5: expected a whole number"),
    ("train.steps=true", "train.steps = True: expected a whole number"),
    ("train.steps=[8]", "train.steps = [8]"),  # a list first, and only then text: the message shows what was read
    ("train.steps=10000000000000000000000", "at most 10"),
    ("train.steps=50", "schedule.warmup_steps = 100: must be below train.steps = 50: a value below 1 is a share"),
    ("schedule.kind=wsd schedule.decay_steps=950", "schedule.decay_steps = 950"),
    ("schedule.warmup_steps=1.5", "schedule.warmup_steps = 1.5"),
    ("train.steps=0", "train.steps = 0: must be at least 1"),
    ("train.epochs=0", "train.epochs = 0.0: must be above 0"),
    ("train.epochs=2 data.streaming=true", "train.epochs = 2.0: the rows of data.streaming"),
    ("train.num_train_epochs=3", "train.epochs"),
    ("train.batch_size=0", "train.batch_size = 0"),
    ("train.batch_size=all", "train.batch_size = 'all': expected a whole number or one of 'auto'"),
    ("train.batch_size=auto", "train.global_batch_size"),
    ("train.batch_size=1000000000000", "data.sequence_length"),
    ("train.global_batch_size=32", "train.batch_size = 'auto'"),
    (f"{AUTO} train.accumulation=2", "train.accumulation = 2"),
    (f"{AUTO} parallel.accumulate=whole", "parallel.accumulate = 'whole'"),
    ("memory.report=true parallel.context=2", "memory.report = True: does not go with parallel.context = 2"),
    ("train.memory_limit_gib=-1", "train.memory_limit_gib = -1.0"),
    ("train.on_oom=retry", "'smaller_batch', 'leaner_recipe', 'error'"),
    ("train.compile=all", "'none', 'layers', 'graphs'"),
    ("train.seed=-1", "train.seed = -1"),
    ("train.seed=4294967296", "train.seed = 4294967296"),
    ("schedule.kind=cosin", "'cosine', 'linear', 'wsd', 'constant'"),
    ("optimizer.lr=-1", "optimizer.lr = -1.0: must be above 0"),
    ("optimizer.lr=nan", "optimizer.lr = nan"),
    ("optimizer.lr=0.5 optimizer.weight_decay=4", "optimizer.weight_decay = 4.0: times optimizer.lr = 2"),
    ("optimizer.weight_decay=inf", "optimizer.weight_decay = inf"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas = [0.9, 1.0]: must be below 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: two numbers"),
    ("optimizer.moments=['log8']", "optimizer.moments = ['log8']"),
    ("optimizer.momentum=0.9", "optimizer.momentum = 0.9: for optimizer.name = 'muon' alone"),
    ("optimizer.name=muon optimizer.scale=spectral", "optimizer.adamw_lr = 0.0"),
    ("optimizer.name=muon optimizer.moments=['ratio8','log8']", "one of 8bit"),
    ("optimizer.release_gradients=true", "set optimizer.clip to 0"),
    ("train.stream=true", "train.stream = True: no moment has all gradients"),
    ("train.stream=true optimizer.clip=0 optimizer.name=muon", "train.stream = True: steps layers by AdamW alone"),
    ("train.resident=1", "train.resident = 1: is for train.stream"),
    ("train.stream=true optimizer.clip=0 train.compile=layers", "train.stream = True: does not go with train.compile"),
    (f"{RELEASED} train.accumulation=2", "train.accumulation = 2: optimizer.release_gradients"),
    (f"{RELEASED} {AUTO}", "train.batch_size = 'auto'"),
    ("lora.merge=true", "set lora.rank"),
    ("lora.dora=true", "set lora.rank"),
    ("model.name=", "model.name"),
    ("model.config.model_type=llama", "not both"),
    ("model.name= model.config.model_type=llama model.freeze=a", "model.freeze = ['a']: wants a model.name"),
    ("model.name= model.config.model_type=llama data.format=messages data.images=x", "data.images = 'x'"),
    ("model.name= model.config.model_type=llama lora.rank=4", "lora.rank = 4"),
    ("tokenizer.vocab_size=100", "tokenizer.vocab_size = 100"),
    ("tokenizer.vocab_size=-1", "tokenizer.vocab_size = -1"),
    ("tokenizer.vocab_size=1000000000000", "tokenizer.vocab_size"),
    ("tokenizer.vocab_size=300 tokenizer.name=t", "tokenizer.name"),
    ("data.format=messages data.images=x tokenizer.vocab_size=300", "tokenizer.vocab_size = 300: with data.images"),
    ("data.images=x", "data.format to 'messages'"),
    ("data.files=[]", "data.dataset"),
    ("data.files=['a.bin','b.txt']", "data.files = ['a.bin', 'b.txt']"),
    ("data.max_bytes=10 data.files=a.bin", "data.max_bytes = 10"),
    ("data.streaming=true data.files=a.bin", "data.streaming = True"),
    ("data.streaming=true data.dedupe=true", "data.dedupe = True: does not apply to data.streaming"),
    ("data.streaming=true data.format=messages", "data.format = 'messages'"),
    ("data.streaming=1", "data.streaming = 1: expected true or false"),
    ("data.format=prompt-completion data.prompt_template=a", "data.prompt_template = 'a': must hold {prompt}"),
    ("data.too_long=drop", "data.too_long = 'drop': for conversations alone"),
    ("data.format=messages data.text_key=a", "data.text_key = 'a'"),
    ("data.format=messages data.prompt_template=a{prompt}", "data.prompt_template = 'a{prompt}'"),
    ("data.token_dtype=uint32", "data.token_dtype = 'uint32': for .bin files alone"),
    ("memory.report=yes", "memory.report = 'yes': expected true or false"),
    ("sample.temperature=-1", "sample.temperature = -1.0"),
    ("sample.temperature=inf", "sample.temperature = inf"),
    ("sample.tokens=-5", "sample.tokens = -5"),
    ("sample.tokens=1000000000000", "at most 65536"),
    ("eval.tasks_every=5", "eval.tasks_every = 5: no eval.tasks"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSALS)
def test_mistakes_name_the_key_and_the_remedy(arguments: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        build_config(MINIMAL, arguments.split())


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("recipe.offload_blocks=2", "layers"),
        ("recipe.offload_blocks=all", "layers"),
        ("memory.report=true", "layers"),
        ("train.fp8_every=50", "layers"),
        ("optimizer.offload=true", "graphs"),
        ("data.document_mask=true", "graphs"),
        ("data.format=messages", "graphs"),
        (AUTO, "graphs"),
    ],
)
def test_what_compiled_layers_cannot_do_is_refused(words: str, mode: str) -> None:
    """What layers cannot, graphs cannot either."""
    for compiled in ("none", "layers", "graphs"):
        arguments = [*words.split(), f"train.compile={compiled}"]
        if compiled == "none" or (compiled, mode) == ("layers", "graphs"):
            assert build_config(MINIMAL, arguments).train.compile == compiled
        else:
            with pytest.raises(ValueError, match=f"{words.partition('=')[0]} = .* does not go with train.compile"):
                build_config(MINIMAL, arguments)


def test_recipe_section_covers_the_recipe() -> None:
    """A field added to Recipe must be reachable from a config; `fp8` is what the name "bf16" sets."""
    assert {f.name for f in fields(overcoat.Recipe)} - {"fp8"} == {f.name for f in fields(RecipeConfig)} - {"name"}


# ---- files and arguments --------------------------------------------------------------------------------------------


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


def test_unreadable_files_are_value_errors(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(ValueError, match="cannot read the config"):
        load_config(path)
    for content in (b"[model\n", b'[model]\nname = "caf\xe9"\n', b"a = " + b"[" * 10_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML"):
            load_config(path)
    for text, message in (
        ('train = 5\n[model]\nname = "m"\n[data]\nfiles = ["a"]\n', r"train = 5: expected a table \[train\]"),
        ("data.seqence_length = 3", r"data.seqence_length; did you mean data.sequence_length\?"),
        ("", "no data: set data"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(path)
    config = load_config(path, ["model.name=m", "data.files=a.txt"])  # an empty file that arguments complete
    assert config == build_config({}, ["model.name=m", "data.files=a.txt", "train.run_dir=runs/bad"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.clip=inf"],
        ["sample.prompt=a \N{GRINNING FACE} \x07 \\u0041", 'data.files=["q\\"uo\\\\te\\n"]'],
        ['model.config.vocab={"a.b" = [1, {c = 2}]}', "model.config.rope={theta = 1e4}"],
        ["recipe.checkpoint=block", *AUTO.split(), "optimizer.lr=1e-5", "compare.overrides=['recipe.name=bf16']"],
    ],
)
def test_dump_reads_back_equal(tmp_path: Path, arguments: list[str]) -> None:
    config = build_config(INLINE, [*arguments, "train.run_dir=r"])
    (tmp_path / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.config.theta=nan", "model.config.theta = nan: a TOML file cannot hold this value"),
        ("sample.prompt=\udcff", r"sample.prompt = '\\udcff': a TOML file cannot"),
    ],
)
def test_what_does_not_come_back_is_refused(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dump_toml(build_config(INLINE, [argument]))


def test_every_key_stands_in_the_dump_under_its_table_and_is_explained() -> None:
    dumped, text = dump_toml(build_config(MINIMAL, [])), help_text()
    found = {f"{table}.{key}" for table, values in configfile.tomllib.loads(dumped).items() for key in values}
    assert found == {key for key, spec in all_keys().items() if spec.default is not None}
    assert all(f"{key} = " in text and spec.metadata["help"] in text for key, spec in all_keys().items())


def test_differences_ignore_what_decides_nothing() -> None:
    old = build_config(MINIMAL, [])
    free = """train.run_dir=x checkpoint.keep=9 eval.every=3 train.resume=y sample.tokens=1 memory.report=true
        train.on_oom=error train.memory_limit_gib=40 optimizer.offload=true"""
    assert differences(old, build_config(MINIMAL, free.split())) == []
    changed = build_config(MINIMAL, ["train.seed=1", "train.compile=graphs"])
    assert differences(old, changed) == ["train.compile: 'none' -> 'graphs'", "train.seed: 0 -> 1"]
    recorded = build_config(MINIMAL, ["data.split=dev", "data.max_bytes=5"], is_recorded=True)  # no data.dataset
    assert differences(recorded, old) == ["data.max_bytes: 5 -> 0"]
    read = build_config(MINIMAL, ["data.split=dev", "data.dataset=d"])
    assert "data.split: 'dev' -> 'train'" in differences(read, old)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": 3}, r"optimizer = 3: expected a table \[optimizer\]"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr = 'fast': expected a number"),
        ({"optimizer": {"betas": ["a"]}}, r"optimizer\.betas = 'a': expected a number"),
        ({"train": {"steps": True}}, r"train\.steps = True: expected a whole number"),
        ({"train": {"steps": 500, "epochs": 2}}, r"train\.epochs = 2\.0: set it or train\.steps, not both"),
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


def test_arguments_reach_into_free_tables_and_nowhere_else() -> None:
    arguments = ["model.config.rope.theta=1e4", "model.config.name=7 b", "model.config.sizes=[1, 2]"]
    expected = {"model_type": "llama", "rope": {"theta": 1e4}, "name": "7 b", "sizes": [1, 2]}
    assert build_config(INLINE, arguments).model.config == expected
    assert INLINE["model"]["config"] == {"model_type": "llama"}  # the caller's own is not written to
    with pytest.raises(ValueError, match=r"'model\.config\.model_type\.x=1': model_type is not a table"):
        build_config(INLINE, ["model.config.model_type.x=1"])
    with pytest.raises(ValueError, match=r"unknown key train\.steps\.x"):
        build_config(INLINE, ["train.steps.x=1"])


def test_a_byte_order_mark_before_a_configuration_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('\ufeff[model]\nname = "m"\n[data]\nfiles = ["x.txt"]\n', encoding="utf-8")
    assert load_config(path).model.name == "m"
