"""A folder of peft's adapters as model.name: trained on, or merged first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from overcoat.train.build import build_model, check_config
from overcoat.train.config import Config
from overcoat.train.run import run_once
from overcoat.train.tokenizer import tokenizer_name, train_tokenizer
from tests.train.runs import CPU, MakeConfig, losses, text_of

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def save(folder: Path, **changes: Any) -> None:
    """Write a small Llama and adapters of it, made with peft, that change its output."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=320)).bfloat16()
    model.save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0, **changes}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder / "adapters")


@pytest.fixture
def started(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    """`started(word, ...)`: a run that starts from `tmp_path / "adapters"`; the tokenizer is with their model."""
    save(tmp_path)
    train_tokenizer(make_config()).save_pretrained(tmp_path / "base")

    def make(*words: str) -> Config:
        named = ["model.config={}", f"model.name={tmp_path}/adapters", "tokenizer.vocab_size=0"]
        return make_config(*named, "train.steps=3", "optimizer.lr=1e-2", *words)

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize("dora", [False, True])
def test_training_goes_on_in_them(dora: bool, started: Callable[..., Config], console: Console, tmp_path: Path) -> None:
    save(tmp_path, use_dora=dora)
    expected = logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters", dtype=torch.bfloat16))
    model = build_model(started(), None, CPU)
    assert torch.equal(logits(model), expected)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all("lora_" in name and each.dtype == torch.float32 for name, each in trained.items())
    assert len(trained) == 2 * 2 * (2 + dora)
    assert tokenizer_name(started()) == f"{tmp_path}/base"
    result = run_once(started(), console, "on")
    assert f"starting from {tmp_path}/adapters, adapters trained on in {tmp_path}/base" in text_of(console)
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapters", Path(result.export))
    )
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    exported = peft.PeftConfig.from_pretrained(result.export)
    assert (exported.base_model_name_or_path, exported.r, exported.lora_alpha) == (f"{tmp_path}/base", 3, 6)
    assert exported.use_dora is dora
    assert "2 of 2 decoder layers train in FP8" in text_of(console)
    assert losses(tmp_path / "run")["train"][3][0] < losses(tmp_path / "run")["train"][1][0]


def test_their_model_can_be_held_in_fp8(started: Callable[..., Config], console: Console, tmp_path: Path) -> None:
    for held in ("bf16", "fp8"):
        run_once(started(f"train.run_dir={tmp_path}/{held}", f"recipe.frozen_weights={held}"), console, held)
    assert "14 frozen weights held in FP8" in text_of(console)
    assert losses(tmp_path / "fp8")["train"] == losses(tmp_path / "bf16")["train"]


def test_it_can_be_merged_at_the_end(started: Callable[..., Config], console: Console, tmp_path: Path) -> None:
    result = run_once(started("lora.merge=true"), console, "merged")
    assert not (Path(result.export) / "adapter_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(result.export).config.vocab_size == 320


@pytest.mark.parametrize("words", [(), ("lora.rank=2", "lora.merge=true"), ("model.freeze=embed_tokens",)])
def test_merged_first_it_is_a_model_as_any_other(
    words: tuple[str, ...], started: Callable[..., Config], tmp_path: Path
) -> None:
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters", dtype=torch.bfloat16)
    expected = merged.merge_and_unload(safe_merge=True)
    model = build_model(started("lora.merge_start=true", *words), None, CPU)
    assert torch.equal(logits(model), logits(expected))
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    if "lora.rank=2" in words:
        assert all("lora_" in name for name in trained)
    else:
        assert hasattr(model, "peft_config") is False
        frozen = {"model.embed_tokens.weight"} if words else set()
        assert set(trained) == {name for name, _ in expected.named_parameters()} - frozen


def test_their_dropout_is_applied(started: Callable[..., Config], tmp_path: Path) -> None:
    save(tmp_path, lora_dropout=0.05)
    model = build_model(started(), None, CPU)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.05}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["lora.rank=4"], r"lora\.rank = 4: model\.name holds adapters"),
        (["model.freeze=embed_tokens"], r"model\.freeze = .*adapters in model\.name"),
        (["lora.merge_start=true", "lora.rank=4"], r"lora\.rank = 4: .*lora\.merge = true"),
        (["memory.report=true"], r"memory\.report = True: does not go with model\.name"),
        (["model.name=hub/name", "lora.merge_start=true"], r"lora\.merge_start = True: model\.name holds no adapters"),
        (["model.name=hub/name", "lora.merge=true"], r"lora\.merge = True: there are no adapters"),
    ],
)
def test_what_does_not_go_with_them_is_refused(words: list[str], why: str, started: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=why):
        started(*words)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "IA3"}, "holds adapters of kind IA3"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"peft_type": "zz"}, "cannot load model.name"),
        ({"base_model_name_or_path": "/nowhere"}, "no such file"),
    ],
)
def test_folders_that_cannot_be_are_named(
    change: dict[str, Any], why: str, started: Callable[..., Config], tmp_path: Path
) -> None:
    file = tmp_path / "adapters/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=why):
        check_config(started())


def test_adapters_of_another_model_are_refused(started: Callable[..., Config], tmp_path: Path) -> None:
    file = tmp_path / "adapters/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": ["q_proj", "up_proj", "down_proj"]}))
    with pytest.raises(ValueError, match=r"model\.name = .*: Found missing adapter keys"):
        build_model(started(), None, CPU)
