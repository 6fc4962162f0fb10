"""Models by name or file; no network is needed for any of these."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, T5Config

from overcoat.models.dummy_batch import model_class
from overcoat.models.shapes import MODELS, load_model_config

# Millions of parameters, from the models' cards; of models that see their text's; COAT's 1B is no model of a card.
PARAMETERS = {
    "124m": 124.3,
    "smollm2-135m": 134.5,
    "qwen3-0.6b": 596.0,
    "olmo-1b": 1176.8,
    "coat-1b": 912.6,
    "llama-2-7b": 6738.4,
    "llava-1.5-7b": 7063.4,
    "llama-3-8b": 8030.3,
    "qwen2.5-7b": 7615.6,
    "olmo-2-7b": 7298.6,
    "qwen3-8b": 8190.7,
    "qwen3-vl-8b": 8767.1,
    "gemma-3-12b": 11766.0,
    "qwen3.5-9b": 8953.8,
    "olmo-hybrid-7b": 7430.9,
    "gemma-4-e2b": 4628.6,
    "gemma-4-e4b": 7463.0,
    "gemma-4-12b": 11907.4,
    "gemma-4-31b": 30697.3,
    "llama-4-scout": 107769.9,
    "olmoe-1b-7b": 6919.2,
    "gpt-oss-20b": 20914.8,
    "qwen3-30b-a3b": 30532.1,
    "mixtral-8x7b": 46702.8,
    "llama-2-13b": 13015.9,
    "phi-4": 14659.5,
    "llama-30b": 32528.9,
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_names_have_the_parameters_of_their_models(name):
    config = load_model_config(name, with_images=True)
    with torch.device("meta"):
        model = model_class(config)(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PARAMETERS[name], rel=2e-3)


@pytest.mark.parametrize("target", ["", "config.json"], ids=["folder", "file"])
def test_a_configuration_on_disk(tmp_path, target):
    LlamaConfig(hidden_size=384, num_attention_heads=6).save_pretrained(tmp_path)
    assert load_model_config(str(tmp_path / target)).hidden_size == 384


def test_a_model_with_images_is_taken_where_images_are(tmp_path):
    MODELS["llava-1.5-7b"].config().save_pretrained(tmp_path)
    for name in ("llava-1.5-7b", str(tmp_path)):
        assert load_model_config(name, with_images=True).model_type == "llava"
        with pytest.raises(ValueError, match="is a llava model, no causal language model"):
            load_model_config(name)


def test_what_is_no_causal_model(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a t5 model, no causal language model"):
        load_model_config(str(tmp_path))


def test_what_is_no_model_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layers": 3}))
    with pytest.raises(ValueError, match=r"neither a built-in shape.*llama-2-7b"):
        load_model_config(str(tmp_path))


def test_more_layers_than_any_model_has_are_refused(tmp_path):
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="num_hidden_layers = 1000000000"):
        load_model_config(str(tmp_path))
