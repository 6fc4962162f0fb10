"""A training configuration as the predictor sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from overcoat import Recipe
from overcoat.estimate import Setup
from overcoat.train.fit import training
from overcoat.train.configfile import build_config, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = {"model": {"config": {"model_type": "llama", "hidden_size": 256}}, "data": {"files": ["a.txt"]}}


def test_a_training_configuration_in_full():
    words = [
        "model.config.vocab_size=1000",
        "recipe.name=paper",
        "recipe.head=none",
        "optimizer.moments=['sqrt8', 'fp32']",
        "optimizer.master=bf16",
        "optimizer.group_size=64",
        "optimizer.release_gradients=true",
        "optimizer.clip=0",
        "optimizer.offload=true",
        "model.dtype=float32",
        "data.document_mask=true",
        "data.sequence_length=96",
        "train.batch_size=3",
    ]
    asked = training(build_config(MINIMAL, words))
    recipe = Recipe(kept_format="e4m3", group_size=16, kept_attention="bf16", head=None)
    assert asked.setup == Setup(recipe, ("sqrt8", "fp32"), "bf16", 64, True, True, dtype="float32", document_mask=True)
    assert (asked.batch, asked.sequence) == (3, 96)
    assert (asked.model.hidden_size, asked.model.vocab_size) == (256, 1000)


def test_the_vocabulary_of_a_tokenizer_to_be_trained():
    assert training(build_config(MINIMAL, ["tokenizer.vocab_size=777"])).model.vocab_size == 777
    with pytest.raises(ValueError, match=r"pass model.config.vocab_size=N"):
        training(build_config(MINIMAL, ["tokenizer.name=some/tokenizer"]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_can_be_estimated(path):
    asked = training(load_config(path))
    assert asked.model.model_type in ("llama", "qwen2")
    assert asked.batch * asked.sequence >= 1024
