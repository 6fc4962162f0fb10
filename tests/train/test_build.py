"""Where a model comes from, and that it comes whole: `pytest tests/train/test_build.py`."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from overcoat.models.shapes import load_model_config
from overcoat.train import build
from overcoat.train.build import (
    build_model,
    check_builds,
    check_config,
    check_is_model,
    check_weights,
    load_model,
    make_optimizer,
    make_recipe,
)
from overcoat.train.config import ModelConfig, OptimizerConfig, RecipeConfig
from overcoat.train.process import choose_device
from overcoat.train.tokenizer import load_tokenizer, train_tokenizer
from tests.models.zoo import make_model
from tests.train.runs import CPU, MakeConfig

SETTINGS = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}


def checkpoint(folder: Path, tied: bool = False, **options: object) -> LlamaForCausalLM:
    """A small FP32 checkpoint in `folder`, and its model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=80,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "60KB"}], ids=["one file", "sharded"])
def test_a_checkpoint_is_loaded_whole_in_the_dtype_asked_for(tied: bool, shards: dict, tmp_path: Path) -> None:
    original = checkpoint(tmp_path, tied, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shards
    model = load_model(str(tmp_path), CPU, SETTINGS)
    parameters = dict(model.named_parameters())
    for name, value in original.named_parameters():
        assert torch.equal(parameters[name], value.bfloat16()), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    # Not in the checkpoint, and not to be rounded.
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is miss"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(79, 64)}), r"is \(79, 64\), not \(80, 64\)"),
    ],
    ids=["missing", "shape"],
)
def test_weights_that_would_be_made_up_are_refused(change: Callable, message: str, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), CPU, SETTINGS)


@pytest.mark.parametrize("name", ["meta", "cpu:1", "mps", "cuda:-1", "cuda:3", ""])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=f"train.device = '{name}': (expected cuda, cpu or auto|there are [12])"):
        choose_device(name)


# 64 M parameters, half of them in the embedding and the head.
LARGE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def large_checkpoint(folder: Path) -> None:
    """In FP32, in several files."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LARGE)).save_pretrained(folder, max_shard_size="50MB")


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["checkpoint", "random"])
def test_the_gpu_holds_nothing_twice(source: str, make_config: MakeConfig, tmp_path: Path) -> None:
    """Weights read from an FP32 checkpoint, and random ones: BF16 parameters and at most one tensor on its way."""
    device = torch.device("cuda")
    if source == "checkpoint":
        large_checkpoint(tmp_path)
        make = functools.partial(load_model, str(tmp_path), device, SETTINGS)
    else:
        words = [f"model.config.{key}={str(value).lower()}" for key, value in LARGE.items()]
        make = functools.partial(build_model, make_config(*words), None, device)
    make()  # what libraries take at their first use
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = make()
    peak = torch.cuda.max_memory_allocated() - before
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("cuda", torch.bfloat16)}
    assert sum(sizes) > 120e6
    assert sum(sizes) <= peak < sum(sizes) + max(sizes) + 4e6
    assert torch.cuda.memory_allocated() - before < sum(sizes) + 4e6


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("model.config.hidden_size=wide", "hidden_size.*wide"),
        ("model.config.num_attention_heads=3", "128.*multiple.*3"),
        ("model.config.hidden_size=-4", "negative dimension -4"),
        ("model.config.rope_theta=x", "str"),
        ("model.attention=fast", "fast.*not supported"),
        ("model.config.hidden_act=zz", "KeyError: 'zz'"),
    ],
)
def test_values_that_make_no_model_are_refused_before_anything_is_read(
    make_config: MakeConfig, word: str, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"\[model\.config\] and model\.attention make no llama model: .*{why}"):
        check_config(make_config(word))


@pytest.mark.parametrize(("kind", "attention"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "sdpa")])
def test_the_models_own_attention_is_the_default(make_config: MakeConfig, kind: str, attention: str) -> None:
    """transformers refuses "sdpa" for some."""
    config = make_config(f"model.config.model_type={kind}", "model.config.vocab_size=50", "model.config.pad_token_id=0")
    check_config(config)
    assert build_model(config, None, CPU).config._attn_implementation == attention


def test_a_key_that_the_models_code_alone_reads_counts(make_config: MakeConfig) -> None:
    """Qwen3-MoE's configuration class of transformers 5.24 lacks head_dim."""
    words = ["model.config.model_type=qwen3_moe", "model.config.vocab_size=50", "model.config.head_dim=48"]
    config = make_config(*words, "model.config.num_experts=8", "model.config.moe_intermediate_size=64")
    check_config(config)
    heads = config.model.config["num_attention_heads"]
    model = build_model(config, None, CPU)
    assert model.model.layers[0].self_attn.q_proj.out_features == 48 * heads
    with pytest.raises(ValueError, match=r"unknown key model\.config\.head_dims for a qwen3_moe model"):
        check_config(make_config(*words[:2], "model.config.head_dims=48"))


def test_weights_of_experts_decay_and_their_biases_do_not() -> None:
    model = make_model("gpt_oss", layers=1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = make_optimizer(model, OptimizerConfig(), 0).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    found = [{names[id(p)].rpartition("layers.0.")[2] for p in group["params"]} for group in (decayed, others)]
    assert {name for name in found[0] if "experts" in name} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert all(name.endswith(("bias", "norm.weight", "sinks")) for name in found[1])
    assert len(found[1]) == 4 + 1 + 2 + 1 + 3  # attention, router, experts; sinks, norms


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_hidden_layers": 2**31}, r"model\.config\.num_hidden_layers = 2147483648: from 1 to 1000 layers"),
        ({"hidden_size": 40_000}, r"weights alone take \d+\.\d GiB, and the host has 1\.0 GiB of memory"),
        ({"model_type": "gpt2", "n_layer": 10**8}, r"model\.config\.n_layer = 100000000: from 1"),
        ({"num_hidden_layers": 0}, r"model\.config\.num_hidden_layers = 0: from 1"),
    ],
    ids=["layers", "width", "GPT-2", "no layers"],
)
def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(
    model: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = re.findall(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert build.memory_of(CPU) == 1024 * int(line)
    monkeypatch.setattr(build, "memory_of", lambda _: 2**30)
    with pytest.raises(ValueError, match=message):
        check_builds(ModelConfig(config={"model_type": "llama"} | model), CPU, make_recipe(RecipeConfig()))


@pytest.mark.parametrize(
    ("section", "field", "expected"),
    [
        ({"offload_blocks": "all"}, "offload_blocks", "all"),
        ({"offload_blocks": 8}, "offload_blocks", 8),
        ({"head": "none"}, "head", None),
        ({"name": "bf16"}, "head", None),
        ({"name": "bf16", "head": "bf16"}, "head", "bf16"),
        ({"name": "leanest"}, "checkpoint", "block"),
        ({"name": "leanest", "checkpoint": "none"}, "checkpoint", None),
        ({"name": "leanest", "group_size": 32}, "group_size", 32),
    ],
)
def test_a_section_replaces_fields_of_the_named_recipe(section: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(make_recipe(RecipeConfig(**section)), field) == expected
    with pytest.raises(ValueError, match="offload_blocks = 'many'"):
        make_recipe(RecipeConfig(**{**section, "offload_blocks": "many"}))


# Configurations, tokenizers and models of folders: their own code is not run unasked, what is broken is one line


def folder_with_code(tmp_path: Path, make_config: MakeConfig, **changes: Any) -> Path:
    """A model with its tokenizer whose `auto_map` names a module that leaves the file "ran"."""
    folder = tmp_path / "model"
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=320)).save_pretrained(folder)
    train_tokenizer(make_config()).save_pretrained(folder)
    (folder / "code_of_strangers.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    name = "code_of_strangers.Any"
    maps = {
        "config.json": {"AutoConfig": name, "AutoModelForCausalLM": name},
        "tokenizer_config.json": {"AutoTokenizer": [None, name]},
    }
    for file, auto_map in maps.items():
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**values, "auto_map": auto_map, **changes}))
    return folder


@pytest.fixture(autouse=True)
def _yes_to_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds the modules' folder


def loaders(folder: Path, make_config: MakeConfig, *words: str) -> dict[str, Callable[[], Any]]:
    config = make_config("model.config={}", f"model.name={folder}", *words)
    return {
        "model": lambda: build_model(config, None, torch.device("cpu")),
        "check": lambda: check_config(config),  # before data are read
        "tokenizer": lambda: load_tokenizer(folder, config.model.trust_remote_code),
        "estimate": lambda: load_model_config(str(folder)),
    }


STRANGE = {"model_type": "strange", "tokenizer_class": "Strange"}
TRUSTED = "model.trust_remote_code=true"
UNTRUSTED = rf"needs Python code of its own .* {re.escape(TRUSTED)}"


@pytest.mark.parametrize("what", ["model", "check", "tokenizer", "estimate"])
@pytest.mark.parametrize(
    ("changes", "words", "refused"),
    [
        (STRANGE, [], UNTRUSTED),
        ({}, [], ""),  # needs no code
        (STRANGE, [TRUSTED], "cannot load"),  # it ran, and the module has no such class
    ],
)
def test_code_of_a_folder_runs_only_where_it_is_trusted(
    tmp_path: Path, make_config: MakeConfig, what: str, changes: dict[str, str], words: list[str], refused: str
) -> None:
    if what == "estimate" and words:
        return  # which trusts none
    load = loaders(folder_with_code(tmp_path, make_config, **changes), make_config, *words)[what]
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext() as caught:
        load()
    assert caught is None or "\n" not in str(caught.value)
    assert (tmp_path / "ran").exists() == bool(words)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer.json", b"{", "tokenizer"),
        ("tokenizer.json", b'{"version": 3}', "tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer"),
        ("config.json", b"\xff", "model"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "x"}', "model"),
        ("model.safetensors", b"cut", "model"),
    ],
)
def test_a_broken_folder_is_one_line(
    tmp_path: Path, make_config: MakeConfig, name: str, content: bytes, what: str
) -> None:
    folder = folder_with_code(tmp_path, make_config)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"cannot load .*{folder}") as caught:
        loaders(folder, make_config)[what]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    check_weights(model, "model.name = 'x'")
    with torch.no_grad():
        model[1].weight[2, 3] = value
    with pytest.raises(ValueError, match=r"^model\.name = 'x' holds weights that are NaN or infinite, in 1\.weight:"):
        check_weights(model, "model.name = 'x'")


@pytest.mark.parametrize("file", build.NOT_MODELS)
def test_folders_that_hold_no_model_say_what_they_are(tmp_path: Path, file: str) -> None:
    check_is_model(str(tmp_path))
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"model.name = '{tmp_path}' {build.NOT_MODELS[file]}")):
        check_is_model(str(tmp_path))
