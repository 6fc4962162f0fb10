"""`train.batch_size = "auto"`: what is chosen, and that a run with it is the run of that batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from overcoat.estimate import Predictor
from overcoat.estimate.predict import CONTEXT
from overcoat.train import fit as auto_batch
from overcoat.train.fit import SAFETY, choose_fit, first_fit, memory_to_plan_with, training
from overcoat.train.config import Config
from overcoat.train.fit import Fit
from overcoat.train.loss import loss_for_estimates
from overcoat.train.fit import model_config, training_setup
from overcoat.train.metrics import read_metrics
from overcoat.train.run import check_before_training, run_once
from tests.train.test_out_of_memory import assert_same_end, fits_of
from tests.train.test_resume import losses, stop_at

MakeConfig = Callable[..., Config]
AUTO = ("train.batch_size=auto", "train.global_batch_size=12", "model.config.vocab_size=400")
CPU = torch.device("cpu")


def needed(config: Config, fit: Fit) -> int:
    predictor = Predictor(model_config(config), loss_for_estimates(config.data.document_mask))
    return predictor.predict(fit.micro_batch, config.data.sequence_length, training_setup(config, fit)).total_bytes


def memory_for(config: Config, fit: Fit) -> int:
    """The least memory in which `fit` is safe."""
    return int(needed(config, fit) / (1 - SAFETY)) + 1


def test_the_largest_divisor_that_fits_is_chosen(make_config: MakeConfig) -> None:
    config = make_config(*AUTO)
    model = model_config(config)
    for rows in (12, 6, 4, 3, 2, 1):
        memory = memory_for(config, Fit(rows))
        assert choose_fit(config, model, memory) == Fit(rows)
        assert choose_fit(config, model, memory - 2) != Fit(rows)


def test_a_large_step_with_hundreds_of_divisors_costs_a_handful_of_predictions(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("train.batch_size=auto", "train.global_batch_size=32432400", "train.memory_limit_gib=1")
    asked: list[int] = []

    def predict(rows: int, *_: object) -> SimpleNamespace:
        asked.append(rows)
        return SimpleNamespace(total_bytes=rows)

    monkeypatch.setattr(auto_batch, "Predictor", lambda *_: SimpleNamespace(predict=predict))
    assert choose_fit(config, None, 1000) == Fit(945)  # the largest divisor that is at most 950
    assert len(asked) < 12


def test_block_checkpoints_come_last_and_only_if_they_may(make_config: MakeConfig) -> None:
    config = make_config(*AUTO, "data.sequence_length=256")
    model = model_config(config)
    leaner = next(
        Fit(rows, True) for rows in (12, 6, 4, 3, 2, 1) if needed(config, Fit(rows, True)) < needed(config, Fit(1))
    )
    memory = memory_for(config, leaner)
    assert choose_fit(config, model, memory) == leaner
    refusing = make_config(*AUTO, "data.sequence_length=256", "train.on_oom=error")
    assert choose_fit(refusing, model, min(memory, needed(config, Fit(1)) - 1)) is None


def test_the_leanest_may_use_what_is_kept_free_for_safety(make_config: MakeConfig) -> None:
    config = make_config(*AUTO)
    least = needed(config, Fit(1, True))
    assert choose_fit(config, model_config(config), least) == Fit(1, True)
    assert choose_fit(config, model_config(config), least - 1) is None
    asked = training(config, least - 1)
    assert (asked.batch, asked.setup.accumulation) == (1, 12) and "does not fit either" in asked.note


def test_too_little_memory_is_an_error_before_anything_is_built(
    make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    config = make_config(*AUTO, "train.memory_limit_gib=0.5")
    with pytest.raises(ValueError, match=r"not even one row fits 0.50 GiB; overcoat estimate .*--gpu-memory 0.5GiB"):
        run_once(config, console, "run")
    assert not (tmp_path / "run/config.toml").exists()


def test_a_cpu_cannot_be_asked(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"this run is on a CPU: set train.batch_size to a number"):
        check_before_training(make_config(*AUTO))
    check_before_training(make_config(*AUTO, "train.memory_limit_gib=8"))
    with pytest.raises(ValueError, match="there is none"):
        memory_to_plan_with(make_config(*AUTO), None)


def test_the_least_of_what_is_free_allowed_and_wanted(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, fraction = 2**30, [1.0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 4 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: used[0])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _index: fraction[0])
    gpu, used = torch.device("cuda", 0), [0]
    assert memory_to_plan_with(make_config(*AUTO), gpu) == 34 * gib
    assert memory_to_plan_with(make_config(*AUTO, "train.memory_limit_gib=24.5"), gpu) == 24.5 * gib
    fraction[0] = 0.25
    assert memory_to_plan_with(make_config(*AUTO), gpu) == 20 * gib + CONTEXT
    used[0] = 3 * gib
    assert memory_to_plan_with(make_config(*AUTO), gpu) == 17 * gib + CONTEXT
    fraction[0] = 1.0
    assert memory_to_plan_with(make_config(*AUTO), gpu) == 31 * gib


def test_a_number_is_taken_as_it_is(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_batch, "choose_fit", None)
    config = make_config("train.batch_size=3", "model.config.vocab_size=400")
    assert first_fit(config, CPU, None) == Fit(3)
    assert training(config).batch == 3


def test_a_run_is_that_of_the_batch_it_chose_also_when_resumed_with_other_memory(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(*AUTO)
    limit = memory_for(config, Fit(4)) / 2**30
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
    assert "train.batch_size = auto: 4 rows in a forward pass, 12 in a step" in console.file.getvalue()  # type: ignore[attr-defined]
    assert losses(tmp_path / "run")["train"] == losses(tmp_path / "number")["train"]
    assert_same_end(tmp_path / "run", tmp_path / "number")
    assert (found.num_tokens, found.kept_bytes) == (expected.num_tokens, expected.kept_bytes)
