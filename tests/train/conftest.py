"""A tiny corpus and a tiny model that every training test shares: 2 layers, 128 wide, rows of 32 tokens."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat.train.config import Config
from overcoat.train.configfile import build_config

TINY: dict[str, Any] = {
    "model": {"config": {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
    }},
    "tokenizer": {"vocab_size": 320},
    "data": {"sequence_length": 32, "held_out": 0.1},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 12, "batch_size": 2, "log_every": 2, "tensorboard": False, "device": "cpu"},
    "eval": {"every": 6, "rows": 4},
    "checkpoint": {"every": 3, "keep": 2},
    "sample": {"tokens": 0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Bit-exactness is promised for an equal number of threads; the killed processes have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pattern for 40 text files with some structure to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "return", "import", "x = 1", "print()", "\n", "(", ")"]
    for index in range(40):
        text = " ".join(generator.choices(words, k=generator.randint(20, 200)))
        (folder / f"{index:02d}.txt").write_text(f"file {index}\n{text}\n")
    return str(folder / "*.txt")


@pytest.fixture
def make_config(corpus_files: str, tmp_path: Path) -> Callable[..., Config]:
    """`make_config("section.key=value", ...)`: the tiny run in `tmp_path / "run"` with changes."""

    def make(*arguments: str) -> Config:
        standard = [f"data.files={corpus_files}", f"train.run_dir={tmp_path / 'run'}"]
        return build_config(TINY, [*standard, *arguments])

    return make


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
