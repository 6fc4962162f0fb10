"""Precedence, types, ranges and the errors of the configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import overcoat
from overcoat.train.build import make_optimizer
from overcoat.train.config import Config, RecipeConfig
from overcoat.train.configfile import build_config, differences, load_config

MINIMAL = {"model": {"name": "some/model"}, "data": {"files": ["a.txt"]}}
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optimizer.lrr=1", "did you mean optimizer.lr?"),
        ("optimiser.weight_decay=1", "did you mean optimizer.weight_decay?"),
        ("train.lr=1", "did you mean optimizer.lr?"),
        ("trian.steps=1", "did you mean train.steps?"),
        ("lr=1", "did you mean optimizer.lr?"),
        ("train.steps=many", "train.steps = 'many': expected a whole number"),
        ("train.steps=1.5", "expected a whole number"),
        ("train.steps=true", "expected a whole number"),
        ("data.streaming=1", "expected true or false"),
        ("schedule.kind=cosin", "expected one of 'cosine', 'linear', 'wsd', 'constant'"),
        ("optimizer.lr=-1", "must be above 0"),
        ("train.steps=50", "schedule.warmup_steps = 100: must be below train.steps = 50"),
        ("train=3", "is a section"),
        ("train.steps", "section.key=value"),
        ("data.files=[]", "no data"),
        ("model.name=", "no model"),
        ("model.config.model_type=llama", "not both"),
        ("tokenizer.vocab_size=100", "at least 257|needs 257"),
        ("tokenizer.vocab_size=1000000000000", "tokenizer.vocab_size"),
        ('data.files=["a.bin", "b.txt"]', "mixes .bin with text"),
        ("optimizer.release_gradients=true", "optimizer.release_gradients cannot clip at 1.0.*set it to 0"),
        ("memory.report=yes", "memory.report = 'yes': expected true or false"),
        ("train.batch_size=all", "train.batch_size = 'all': expected a whole number or one of 'auto'"),
        ("train.batch_size=0", "train.batch_size = 0: must be at least 1"),
        ("train.batch_size=auto", "train.global_batch_size = 0: must be at least 1"),
        ("train.global_batch_size=32", "goes with train.batch_size = 'auto'; a step has .* 8 rows"),
        ("train.memory_limit_gib=-1", "train.memory_limit_gib = -1.0: must be at least 0"),
        ("train.on_oom=retry", "expected one of 'smaller_batch', 'leaner_recipe', 'error'"),
        ("train.run_dir=a\0b", "train.run_dir: holds a NUL character"),
        ("sample.temperature=-1", "sample.temperature = -1.0: must be at least 0"),
        ("sample.temperature=inf", "sample.temperature = inf: must be at most 10{15}"),
        ("sample.temperature=1e-40", "sample.temperature = 1e-40: 0 .greedy., or at least 1e-06"),
        ("sample.tokens=-5", "sample.tokens = -5: must be at least 0"),
        ("sample.tokens=1000000000000", "sample.tokens = 10{12}: must be at most 65536"),
        ("train.seed=-1", "train.seed = -1: must be at least 0"),
        ("train.seed=4294967296", "train.seed = 4294967296: must be below 4294967296"),
        ("optimizer.lr=nan", "optimizer.lr = nan: must be at most"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay = inf: must be at most"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = .*: must be below 1"),
        ("train.steps=10000000000000000000000", "must be at most 10{15}"),
        ("train.batch_size=1000000000000", "a step of 10{12} rows .* must be at most 1073741824"),
        ("train.compile=all", "train.compile = 'all': expected one of 'none', 'layers', 'graphs'"),
    ],
)
def test_mistakes_name_the_remedy(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        build_config(MINIMAL, [argument])


def test_released_gradients_cannot_accumulate() -> None:
    words = ["optimizer.release_gradients=true", "optimizer.clip=0"]
    assert build_config(MINIMAL, words).optimizer.release_gradients
    with pytest.raises(ValueError, match=r"cannot accumulate \(train.accumulation = 2\)"):
        build_config(MINIMAL, [*words, "train.accumulation=2"])


def test_the_rows_of_a_step() -> None:
    assert build_config(MINIMAL, ["train.batch_size=3", "train.accumulation=4"]).train.rows_per_step == 12
    auto = ["train.batch_size=auto", "train.global_batch_size=32"]
    config = build_config(MINIMAL, auto)
    assert (config.train.batch_size, config.train.rows_per_step) == ("auto", 32)
    with pytest.raises(ValueError, match=r"train.accumulation = 2: follows from train.batch_size = 'auto'"):
        build_config(MINIMAL, [*auto, "train.accumulation=2"])
    with pytest.raises(ValueError, match=r"'auto' accumulates .* optimizer.release_gradients cannot"):
        build_config(MINIMAL, [*auto, "optimizer.release_gradients=true", "optimizer.clip=0"])


LAYERS_REFUSE = [
    ("recipe.offload_blocks=2", "recipe.offload_blocks = 2 does not go with"),
    ("recipe.offload_blocks=all", "recipe.offload_blocks = 'all' does not go with"),
    ("memory.report=true", "memory.report = True does not go with"),
]
GRAPHS_REFUSE = [
    ("optimizer.release_gradients=true optimizer.clip=0", "optimizer.release_gradients = True does not go with"),
    ("optimizer.offload=true", "optimizer.offload = True does not go with"),
    ("data.document_mask=true", "data.document_mask = True does not go with"),
    (
        "train.batch_size=auto train.global_batch_size=8",
        "train.batch_size = 'auto' does not go with",
    ),
]


@pytest.mark.parametrize(("words", "message"), [*LAYERS_REFUSE, *GRAPHS_REFUSE])
def test_what_compiled_layers_cannot_do_is_refused_with_a_way_out(words: str, message: str) -> None:
    changes = words.split()
    build_config(MINIMAL, changes)
    remedy = "(Leave it out|Set it to a number), or set train.compile to 'none'"
    with pytest.raises(ValueError, match=f"{message} train.compile = 'graphs': .* {remedy}"):
        build_config(MINIMAL, [*changes, "train.compile=graphs"])
    if (words, message) in GRAPHS_REFUSE:
        assert build_config(MINIMAL, [*changes, "train.compile=layers"]).train.compile == "layers"
    else:
        with pytest.raises(ValueError, match=f"{message} train.compile = 'layers': "):
            build_config(MINIMAL, [*changes, "train.compile=layers"])


def test_graphs_go_with_accumulation_clipping_and_block_checkpoints() -> None:
    words = ["train.compile=graphs", "train.accumulation=2", "optimizer.clip=1.0", "recipe.name=leanest"]
    assert build_config(MINIMAL, [*words, "recipe.offload_blocks=0"]).train.compile == "graphs"
    assert "train.compile" in differences(build_config(MINIMAL, []), build_config(MINIMAL, words))[-1]


def test_offload_reaches_the_optimizer_and_may_change_on_resuming() -> None:
    config = build_config(MINIMAL, ["optimizer.offload=true"])
    layer = torch.nn.Linear(2, 2)
    assert make_optimizer(layer, config.optimizer, 0).offload
    assert not make_optimizer(layer, build_config(MINIMAL, []).optimizer, 0).offload
    assert differences(build_config(MINIMAL, []), config) == []


def test_recipe_section_covers_the_recipe() -> None:
    """A field added to Recipe must be reachable from a config; `fp8` is what the name "bf16" sets."""
    assert {f.name for f in fields(overcoat.Recipe)} - {"fp8"} == {f.name for f in fields(RecipeConfig)} - {"name"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config)
    assert replace(config) == config
