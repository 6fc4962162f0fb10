"""What fits: what "auto" chooses for a batch, what gets leaner in which order, and what an estimate is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import overcoat
from overcoat import Recipe
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.dry_run import meta_model
from overcoat.estimate.predict import CONTEXT
from overcoat.estimate.times import Cluster
from overcoat.models.shapes import load_model_config
from overcoat.train import process
from overcoat.train.batch_plan import (
    SAFETY,
    BatchPlan,
    choose_plan,
    divisors,
    memory_to_plan_with,
    model_config,
    next_leaner,
    training,
    training_setup,
)  # fmt: skip
from overcoat.train.build import freeze, loss_for_estimates, make_recipe
from overcoat.train.config import Config
from overcoat.train.configfile import build_config, load_config
from overcoat.train.metrics import read_metrics
from overcoat.train.run import check_before_training, run_once
from tests.train.runs import CONFIGS, MakeConfig, assert_same_end, fits_of, losses, stop_at, text_of

AUTO = ("train.batch_size=auto", "train.global_batch_size=12", "model.config.vocab_size=400")
LLAMA = {"model": {"config": {"model_type": "llama", "hidden_size": 256}}, "data": {"files": ["a.txt"]}}


def needed(config: Config, plan: BatchPlan) -> int:
    predictor = Predictor(model_config(config), loss_for_estimates(config.data.document_mask))
    return predictor.predict(plan.micro_batch, config.data.sequence_length, training_setup(config, plan)).total_bytes


def memory_for(config: Config, plan: BatchPlan) -> int:
    """The least memory in which `fit` is safe."""
    return int(needed(config, plan) / (1 - SAFETY)) + 1


# ---- chosen ---------------------------------------------------------------------------------------------------------


def test_the_largest_divisor_that_fits_is_chosen(make_config: MakeConfig) -> None:
    config = make_config(*AUTO)
    model = model_config(config)
    for rows in (12, 4, 1):
        memory = memory_for(config, BatchPlan(rows))
        assert choose_plan(config, model, memory) == BatchPlan(rows)
        assert choose_plan(config, model, memory - 2) != BatchPlan(rows)


@pytest.mark.parametrize(("shard", "shards"), [("full", 4), ("hybrid", 2), ("none", 1)])
def test_what_fits_is_that_of_the_parts_of_each_process(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, shard: str, shards: int
) -> None:
    """In four processes, and before there are any."""
    config = make_config(*AUTO, f"parallel.shard={shard}", "parallel.nodes=2", "train.global_batch_size=4")
    model = model_config(config)
    setup = Setup(make_recipe(config.recipe), reduce_dtype="float32", all_gather="fp8")
    setup = replace(setup, replicated=shard != "full")
    needed = Predictor(model).predict(1, config.data.sequence_length, setup, shards).total_bytes
    memory = int(needed / (1 - SAFETY)) + 1
    cluster = Cluster(4, 2 if shard == "hybrid" else 1, shard == "hybrid")
    if shard != "none":
        assert choose_plan(config, model, memory, cluster) == BatchPlan(1)
        assert choose_plan(config, model, memory - 2, cluster) != BatchPlan(1)
    monkeypatch.setattr(process, "count", lambda: 4)
    assert choose_plan(config, model, memory) == BatchPlan(1)
    assert choose_plan(config, model, memory - 2) != BatchPlan(1)


def test_block_checkpoints_come_last_and_only_if_they_may(make_config: MakeConfig) -> None:
    config = make_config(*AUTO, "data.sequence_length=256")
    leaner = next(
        BatchPlan(rows, True)
        for rows in divisors(12)
        if needed(config, BatchPlan(rows, True)) < needed(config, BatchPlan(1))
    )
    memory = memory_for(config, leaner)
    assert choose_plan(config, model_config(config), memory) == leaner
    refusing = make_config(*AUTO, "data.sequence_length=256", "train.on_oom=error")
    assert choose_plan(refusing, model_config(config), min(memory, needed(config, BatchPlan(1)) - 1)) is None


def test_the_leanest_may_use_what_is_kept_free_for_safety(make_config: MakeConfig) -> None:
    config = make_config(*AUTO)
    least = needed(config, BatchPlan(1, True))
    assert choose_plan(config, model_config(config), least) == BatchPlan(1, True)
    asked = training(config, least - 1)
    assert (asked.batch, asked.setup.accumulation) == (1, 12)
    assert asked.note.endswith("1 row in a forward pass, 12 in a step, which does not fit either")


def test_where_no_memory_is_enough_or_known_the_error_says_what_to_do(
    make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"not even one row fits 0.50 GiB; overcoat estimate .*--gpu-memory 0.5GiB"):
        run_once(make_config(*AUTO, "train.memory_limit_gib=0.5"), console, "run")
    assert not (tmp_path / "run/config.toml").exists()  # before anything is built
    with pytest.raises(ValueError, match=r"this run has none: set train.batch_size to a number"):
        check_before_training(make_config(*AUTO))
    with pytest.raises(ValueError, match="this run has none"):
        memory_to_plan_with(make_config(*AUTO), None)


def test_the_least_of_what_is_free_allowed_and_wanted(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, fraction, used = 2**30, [1.0], [0]
    for name, answer in {
        "empty_cache": lambda: None, "mem_get_info": lambda _: (30 * gib, 80 * gib),
        "memory_reserved": lambda _: 4 * gib, "memory_allocated": lambda _: used[0],
        "get_per_process_memory_fraction": lambda _: fraction[0],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    for fraction[0], used[0], limit, expected in [
        (1.0, 0, 0, 34 * gib), (1.0, 0, 24.5, 24.5 * gib), (0.25, 0, 0, 20 * gib + CONTEXT),
        (0.25, 3 * gib, 0, 17 * gib + CONTEXT), (1.0, 3 * gib, 0, 31 * gib),
    ]:  # fmt: skip
        config = make_config(*AUTO, f"train.memory_limit_gib={limit}")
        assert memory_to_plan_with(config, torch.device("cuda", 0)) == expected


def test_a_run_is_that_of_the_batch_it_chose_also_when_resumed_with_other_memory(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = memory_for(make_config(*AUTO), BatchPlan(4)) / 2**30
    words = ("model.config.vocab_size=400", "train.steps=6", f"data.cache_dir={tmp_path / 'data'}")
    number = (*words, "train.batch_size=4", "train.accumulation=3", f"train.run_dir={tmp_path / 'number'}")
    expected = run_once(make_config(*number), console, "number")
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(Exception, match="stopped after writing"):
            run_once(make_config(*AUTO, *words, f"train.memory_limit_gib={limit}"), console, "auto")
    found = run_once(make_config(*AUTO, *words, "train.memory_limit_gib=100"), console, "auto")
    assert fits_of(tmp_path / "run") == {1: (4, False)}
    assert not read_metrics(tmp_path / "run/metrics.jsonl")["fit"][1]["out_of_memory"]
    assert "train.batch_size = auto: 4 rows in a forward pass, 12 in a step" in text_of(console)
    assert losses(tmp_path / "run")["train"] == losses(tmp_path / "number")["train"]
    assert_same_end(tmp_path / "run", tmp_path / "number")
    assert (found.num_tokens, found.kept_bytes) == (expected.num_tokens, expected.kept_bytes)


# ---- leaner ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [(4, False), (3, False), (2, False), (1, False), (1, True)]),
        ("train.on_oom=leaner_recipe", [(6, True), (4, True), (3, True), (2, True), (1, True)]),
        ("recipe.name=leanest", [(4, False), (3, False), (2, False), (1, False)]),
        ("recipe.name=bf16 train.on_oom=leaner_recipe", [(4, False), (3, False), (2, False), (1, False)]),
        ("train.on_oom=error", []),
        ("optimizer.release_gradients=true optimizer.clip=0", [(6, True)]),  # cannot accumulate
        ("optimizer.release_gradients=true optimizer.clip=0 train.on_oom=leaner_recipe", [(6, True)]),
    ],
)
def test_what_is_tried(make_config: MakeConfig, words: str, expected: list[tuple[int, bool]]) -> None:
    accumulation = 1 if "release" in words else 2
    config = make_config("train.batch_size=6", f"train.accumulation={accumulation}", *words.split())
    plan, found = BatchPlan(6), []
    while (leaner := next_leaner(config, plan)) is not None:
        found.append(tuple(plan := leaner))
    assert found == expected


# ---- for an estimate ------------------------------------------------------------------------------------------------


def test_a_training_configuration_in_full() -> None:
    words = """model.config.vocab_size=1000 recipe.name=paper recipe.head=none optimizer.moments=['sqrt8','fp32']
        optimizer.master=bf16 optimizer.group_size=64 optimizer.release_gradients=true optimizer.clip=0
        optimizer.offload=true model.dtype=float32 data.document_mask=true data.sequence_length=96 train.batch_size=3"""
    asked = training(build_config(LLAMA, words.split()))
    recipe = Recipe(kept_format="e4m3", group_size=16, kept_attention="bf16", head=None)
    others = {"dtype": "float32", "document_mask": True, "reduce_dtype": "float32", "all_gather": "fp8"}
    assert asked.setup == Setup(recipe, "adamw", ("sqrt8", "fp32"), "bf16", 64, True, True, **others)
    assert (asked.batch, asked.sequence) == (3, 96)
    assert (asked.predictor.config.hidden_size, asked.predictor.config.vocab_size) == (256, 1000)


def test_the_vocabulary_of_a_tokenizer_to_be_trained() -> None:
    assert training(build_config(LLAMA, ["tokenizer.vocab_size=777"])).predictor.config.vocab_size == 777
    with pytest.raises(ValueError, match=r"pass model.config.vocab_size=N"):
        training(build_config(LLAMA, ["tokenizer.name=some/tokenizer"]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load_and_make_their_models(path: Path) -> None:
    config = load_config(path)
    assert replace(config) == config
    if config.not_estimated:
        made = load_model_config(config.model.name, with_images=True)
    else:
        made = training(config).predictor.config
    assert made.model_type in ("llama", "qwen2", "qwen3", "olmo", "olmo2", "llava")
    model = meta_model(made, torch.bfloat16)
    freeze(model, config.model.freeze)
    converted = overcoat.convert(model, make_recipe(config.recipe)).converted
    assert len(converted) >= made.get_text_config().num_hidden_layers
    assert config.train.rows_per_step * config.data.sequence_length >= 1024
    assert not config.tokenizer.chat_template or (CONFIGS.parent / config.tokenizer.chat_template).is_file()
