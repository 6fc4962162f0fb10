"""[lora]: adapters as peft makes, saves and loads them: `pytest tests/train/test_lora.py`."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from overcoat.train.batch_plan import BatchPlan, choose_plan, model_config
from overcoat.train.build import build_model
from overcoat.train.config import Config
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import check_before_training, run, run_once
from overcoat.train.tokenizer import train_tokenizer
from tests.processes import on_two
from tests.train.runs import CPU, MakeConfig, losses, newest, stop_at, tensors_in, text_of
from tests.train.test_batch_plan import memory_for

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def lora_config(make_config: MakeConfig, tmp_path: Path) -> Any:
    """`lora_config(word, ...)`: rank 4 on a small Llama in a folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=320, tie_word_embeddings=False)).save_pretrained(tmp_path / "base")
    train_tokenizer(make_config()).save_pretrained(tmp_path / "base")

    def make(*words: str) -> Config:
        standard = ["model.config={}", f"model.name={tmp_path}/base", "tokenizer.vocab_size=0", "lora.rank=4"]
        return make_config(*standard, "train.steps=6", "checkpoint.every=2", "optimizer.lr=1e-2", *words)

    return make


def test_adapters_alone_are_trained_in_fp8_layers(lora_config: Any, console: Console, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of peft and transformers, which no user can act on
        (result,) = run(lora_config(), console)
    assert "2 of 2 decoder layers train in FP8" in text_of(console)
    metrics = losses(tmp_path / "run")["train"]
    assert metrics[6][0] < metrics[1][0]
    assert all("lora_" in key for key in tensors_in(newest(tmp_path / "run")) if key.startswith("model/"))
    adapters = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 2  # layers, linear layers in each, A and B
    assert all(tensor.dtype == torch.float32 for tensor in adapters.values())
    assert result.optimizer_bytes < 3 * sum(tensor.numel() for tensor in adapters.values())
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.bfloat16)
    assert loaded.peft_config["default"].base_model_name_or_path == f"{tmp_path}/base"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    for name, parameter in base.named_parameters():
        other = loaded.get_base_model().state_dict()
        assert torch.equal(parameter, other.get(name, other.get(name.replace(".weight", ".base_layer.weight")))), name


@pytest.mark.parametrize("held", ["bf16", "fp8"])
def test_dora_trains_magnitudes_in_fp8_layers(held: str, lora_config: Any, console: Console, tmp_path: Path) -> None:
    """Two steps, exported as peft's; merged, they are the model with these adapters."""
    words = (
        "lora.dora=true",
        "train.steps=2",
        "schedule.warmup_steps=0",
        f"recipe.frozen_weights={held}",
        "optimizer.clip=0",
    )
    run(lora_config(*words), console)
    assert "2 of 2 decoder layers train in FP8" in text_of(console)
    assert "DoRA of rank 4" in text_of(console)
    adapters = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 3  # layers, linear layers in each, A, B and magnitudes
    assert all(tensor.dtype == torch.float32 for tensor in adapters.values())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).state_dict()
    magnitudes = {name: each for name, each in adapters.items() if "magnitude" in name}
    assert len(magnitudes) == 14
    for name, trained in magnitudes.items():
        weight = base[name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        begun = weight.float().norm(dim=1)
        assert 1e-3 < (trained - begun).abs().max() < 0.1, name  # two steps of 1e-2, and the rounding of FP8 or BF16
    if held == "bf16":
        run(lora_config(*words, "lora.merge=true"), console)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.bfloat16).state_dict()
        assert merged.keys() == base.keys()
        assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])


def test_a_small_host_is_told_before_the_model_is_read(lora_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 bytes a weight and 1 of its codes; without adapters, 3 more of states."""
    words, needed = ("train.stream=true", "optimizer.clip=0", "recipe.name=leanest"), 2 * (4 * 128**2 + 3 * 128 * 256)
    for free, is_enough in ((3 * needed, True), (3 * needed - 1, False)):
        monkeypatch.setattr("overcoat.streaming.choice.bytes_free", lambda free=free: free)
        with contextlib.nullcontext() if is_enough else pytest.raises(ValueError, match=r"\(weights .* are free"):
            check_before_training(lora_config(*words))
        with pytest.raises(ValueError, match=r"host memory \(weights 0\.0, FP8 codes 0\.0, optimizer states 0\.0"):
            check_before_training(lora_config("lora.rank=0", *words))


def test_frozen_modules_get_no_adapters(lora_config: Any) -> None:
    model = build_model(lora_config("model.freeze=layers.0"), None, CPU)
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert adapters == [name for name, each in model.named_parameters() if each.requires_grad]
    assert len(adapters) == 7 * 2
    assert all(".layers.1." in name for name in adapters)


def test_it_stops_and_goes_on_bit_for_bit(
    lora_config: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lora_config(f"train.run_dir={tmp_path}/whole"), console)
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(RunStoppedError):
            run(lora_config(), console)
    run(lora_config(), console)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    mine, other = (load_file(tmp_path / name / "export/adapter_model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    with pytest.raises(ValueError, match="holds another model"):
        run(lora_config("lora.rank=8", f"train.resume={newest(tmp_path / 'run')}", "train.steps=8"), console)


def _run(_rank: int, *configs: Config) -> None:
    for config in configs:
        run_once(config, Console(quiet=True), "many")


@pytest.mark.parametrize(("held", "dora"), [("bf16", "false"), ("fp8", "false"), ("bf16", "true"), ("fp8", "true")])
def test_two_processes_train_the_same_adapters(
    held: str, dora: str, lora_config: Any, console: Console, tmp_path: Path
) -> None:
    """And go on from one process' checkpoint, as one process does from theirs; bases are in neither."""
    words = (
        "train.batch_size=1",
        "train.accumulation=2",
        "eval.rows=2",
        "checkpoint.keep=9",
        f"recipe.frozen_weights={held}",
        f"lora.dora={dora}",
    )

    def config(name: str, resumed: str) -> Config:
        from_there = f"train.resume={tmp_path}/{resumed}" if resumed else "train.resume=auto"
        return lora_config(*words, f"train.run_dir={tmp_path}/{name}", from_there)

    run(config("run", ""), console)
    on_two(_run, "cpu", config("two", "run/checkpoints/step-00000002"))
    run(config("one", "two/checkpoints/step-00000004"), console)
    expected = losses(tmp_path / "run")["train"]
    for name, first in (("two", 3), ("one", 5)):
        found = losses(tmp_path / name)["train"]
        assert list(found) == list(range(first, 7))
        assert all(abs(values[0] - expected[step][0]) < 1e-3 for step, values in found.items()), name
        mine, other = (load_file(tmp_path / each / "export/adapter_model.safetensors") for each in (name, "run"))
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, other[key], rtol=0, atol=2e-3)
    limit = {"false": 200_000, "true": 240_000}[dora]  # bytes; the base has 655,360
    assert sum(path.stat().st_size for path in newest(tmp_path / "two").glob("*.safetensors")) < limit


@pytest.mark.parametrize("many", [1, 2])
def test_merged_it_is_a_model_of_its_own(many: int, lora_config: Any, tmp_path: Path) -> None:
    """Asked for from the beginning, or (one process) of a run that has ended."""
    merging = lora_config("lora.merge=true", f"train.run_dir={tmp_path}/merged", "sample.tokens=4")
    if many == 1:
        _run(0, lora_config())
        shutil.copytree(tmp_path / "run", tmp_path / "merged")
        _run(0, merging)
    else:
        on_two(_run, "cpu", lora_config(), merging)
    assert not (tmp_path / "merged/export/adapter_model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged/export", dtype=torch.bfloat16)
    expected = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.bfloat16)
    for name, tensor in expected.merge_and_unload().state_dict().items():
        assert torch.equal(tensor, merged.state_dict()[name]), name


@pytest.mark.parametrize(
    "words",
    [(), ("lora.dora=true",), ("train.accumulation=2", "recipe.name=leanest", "lora.targets=['q_proj', 'up_proj']")],
)
def test_a_step_takes_the_memory_that_was_predicted(words: tuple[str, ...], lora_config: Any, console: Console) -> None:
    config = lora_config("train.steps=3", "memory.report=true", "data.sequence_length=64", "lora.rank=16", *words)
    run_once(config, console, "measured")
    figures = json.loads((Path(config.train.run_dir) / "memory.json").read_text())["figures"]
    for name in ("weights", "moments and remainders", "gradients, backward done"):
        assert figures[name]["predicted"] == figures[name]["measured"], name
    for name, figure in figures.items():
        assert figure["predicted"] == pytest.approx(figure["measured"], rel=0.01), name


def test_rows_are_chosen_with_adapters(lora_config: Any) -> None:
    """More fit than of the whole model."""
    auto = ("train.batch_size=auto", "train.global_batch_size=64")
    whole, adapters = lora_config(*auto, "lora.rank=0"), lora_config(*auto)
    memory = memory_for(whole, BatchPlan(2))
    plans = [choose_plan(config, model_config(config), memory) for config in (whole, adapters)]
    assert plans[0].micro_batch < plans[1].micro_batch


def test_what_does_not_go_with_adapters_is_refused(lora_config: Any, make_config: MakeConfig) -> None:
    for refused, why in [
        (("lora.targets=nothing",), r"lora\.targets = \['nothing'\]: .*nothing"),
        (("lora.targets=embed_tokens",), r"lora\.targets = \['embed_tokens'\]: adapters of embeddings are not"),
        (("lora.rank=0", 'model.freeze=["model", "lm_head"]'), r"model\.freeze = .*: nothing is left to train"),
    ]:
        with pytest.raises(ValueError, match=why):
            build_model(lora_config(*refused), None)
    for words, why in [
        (
            ("memory.report=true", 'tokenizer.add_tokens=["<a>"]'),
            r"memory\.report = True: does not go with tokenizer\.add_tokens",
        ),
        (("lora.dora=true", "lora.dropout=0.1"), r"lora\.dora = True: with lora\.dropout"),
        (("lora.dora=true", "train.stream=true", "optimizer.clip=0"), r"lora\.dora = True: reads the weights"),
        (
            ("train.batch_size=auto", "train.global_batch_size=4", "model.freeze=embed_tokens"),
            r"train\.batch_size = .auto.: does not go with model\.freeze",
        ),
    ]:
        with pytest.raises(ValueError, match=why):
            lora_config(*words)
    with pytest.raises(ValueError, match=r"lora\.rank = 4: adapters of random weights"):
        make_config("lora.rank=4")


def test_a_base_held_in_fp8_changes_no_bit(lora_config: Any, console: Console, tmp_path: Path) -> None:
    run(lora_config(f"train.run_dir={tmp_path}/bf16"), console)
    run(lora_config(f"train.run_dir={tmp_path}/fp8", "recipe.frozen_weights=fp8"), console)
    assert "14 frozen weights held in FP8" in text_of(console)
    assert losses(tmp_path / "fp8")["train"] == losses(tmp_path / "bf16")["train"]
    mine, other = (load_file(tmp_path / name / "export/adapter_model.safetensors") for name in ("fp8", "bf16"))
    assert mine.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    with pytest.raises(ValueError, match=r"recipe\.frozen_weights"):
        run(lora_config("recipe.frozen_weights=fp8", "lora.merge=true"), console)
    with pytest.raises(ValueError, match=r"train\.stream"):
        run(lora_config("recipe.frozen_weights=fp8", "train.stream=true"), console)
    with pytest.raises(ValueError, match=r"set lora\.rank"):
        run(lora_config("recipe.frozen_weights=fp8", "lora.rank=0"), console)


def test_dropout_goes_on_bit_for_bit(
    lora_config: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lora_config("lora.dropout=0.5", f"train.run_dir={tmp_path}/whole"), console)
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(RunStoppedError):
            run(lora_config("lora.dropout=0.5"), console)
    run(lora_config("lora.dropout=0.5"), console)
    assert "dropout 0.5" in text_of(console)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    run(lora_config(f"train.run_dir={tmp_path}/without"), console)
    assert losses(tmp_path / "without") != losses(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"lora\.dropout"):
        run(lora_config("lora.dropout=0.5", "train.compile=layers"), console)
