"""Configurations, tokenizers and models of folders: their own code is not run unasked, what is broken is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from overcoat.models.shapes import load_model_config
from overcoat.train.build import build_model, check_config
from overcoat.train.tokenizer import load_tokenizer, train_tokenizer
from tests.train.runs import MakeConfig


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


@pytest.mark.parametrize("what", ["model", "check", "tokenizer", "estimate"])
def test_code_of_a_folder_is_refused_with_the_option(tmp_path: Path, make_config: MakeConfig, what: str) -> None:
    folder = folder_with_code(tmp_path, make_config, model_type="strange", tokenizer_class="Strange")
    with pytest.raises(ValueError, match=r"needs Python code of its own .* model\.trust_remote_code=true") as caught:
        loaders(folder, make_config)[what]()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["model", "check", "tokenizer", "estimate"])
def test_a_folder_that_needs_no_code_loads_without_it(tmp_path: Path, make_config: MakeConfig, what: str) -> None:
    loaders(folder_with_code(tmp_path, make_config), make_config)[what]()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_runs_where_it_is_trusted(tmp_path: Path, make_config: MakeConfig, what: str) -> None:
    folder = folder_with_code(tmp_path, make_config, model_type="strange", tokenizer_class="Strange")
    with pytest.raises(ValueError, match="cannot load"):  # the module has no such class
        loaders(folder, make_config, "model.trust_remote_code=true")[what]()
    assert (tmp_path / "ran").exists()


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
