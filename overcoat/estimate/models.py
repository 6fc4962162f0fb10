"""The model to estimate, by name or `config.json`. No weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overcoat.bench.shapes import MODELS
from overcoat.train.extras import load_extra
from overcoat.train.pretrained import load_pretrained

# Checkpoints of the built-in shapes: their config.json need not be fetched.
CHECKPOINTS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
    "huggyllama/llama-30b": "llama-30b",
}


def load_model_config(name: str) -> Any:
    """The transformers configuration of a model.

    Args:
        name: a built-in shape, a `config.json` or the folder it is in, or a model of the Hugging Face hub, whose
            config.json alone is fetched.

    Raises:
        ValueError: there is none of that name, or it is no causal language model.
    """
    if not Path(name).exists():
        name = CHECKPOINTS.get(name, name)
        if name in MODELS:
            return MODELS[name].config()
    try:
        # Code of strangers is not run for an estimate.
        config = load_pretrained("AutoConfig", "the configuration of", name, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"--model {name!r} is neither a built-in shape ({', '.join(MODELS)}), nor a folder or file with a "
            f"transformers configuration, nor a model that can be fetched: {error}"
        ) from error
    causal = load_extra("transformers.models.auto.modeling_auto", "hf", "overcoat estimate")
    if config.model_type not in causal.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"--model {name!r} is a {config.model_type} model, no causal language model of transformers")
    return config
