"""A tiny model with its tokenizer in a folder, and tasks of lm-evaluation-harness over JSONL files, all made here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from overcoat.train.configfile import build_config
from overcoat.train.tokenizer import train_tokenizer

WORDS = """the cat sat on a mat while rain fell and nobody asked why it had to be so wet
    outside today""".split()  # noqa: SIM905


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(5, 60))) for _ in range(count)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder of a random Llama whose choices are not all the same."""
    place = tmp_path_factory.mktemp("model")
    (place / "corpus.txt").write_text("\n".join(sentences(50)))
    values: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 300}}
    tokenizer = train_tokenizer(build_config({**values, "data": {"files": [str(place / "corpus.txt")]}}, []))
    torch.manual_seed(0)
    sizes = dict(
        zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), (128, 256, 2, 2))
    )
    config = LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=64, initializer_range=0.2)
    for part in (LlamaForCausalLM(config).bfloat16(), tokenizer):
        part.save_pretrained(place / "export")
    return place / "export"


@pytest.fixture(scope="session")
def choices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A task with four choices, and its examples."""
    generator, place = random.Random(1), tmp_path_factory.mktemp("task")
    questions = sentences(24, seed=2)
    rows = [
        {"question": text[:40], "choices": generator.sample(WORDS, 4), "label": generator.randrange(4)}
        for text in questions
    ]
    return write_task(place, "tiny_choice", rows, "output_type: multiple_choice\ndoc_to_choice: choices", "acc"), rows


def write_task(place: Path, name: str, rows: list[dict[str, Any]], how: str, metric: str) -> Path:
    data, task = place / f"{name}.jsonl", place / f"{name}.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n{how}\n"
        f"doc_to_text: '{{{{question}}}}'\ndoc_to_target: label\nnum_fewshot: 0\n"
        f"metric_list:\n  - metric: {metric}\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return task
