"""Named models, and the transformers configuration of any model. No weights are read.

`overcoat estimate --model` and the benchmarks share `MODELS`. A new
model is one entry: a configuration class of transformers and its keyword arguments, those of a multimodal model's
language part as `text_config`. Only sizes matter here: rotary bases and token ids are the class's defaults.

"coat-1b" has the layer of hidden 2048 that COAT measures, with Llama's ratio of intermediate to hidden; "gemma-3-12b"
is its text model; "124m" is configs/llama-124m.toml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from overcoat.extras import load_extra, load_pretrained
from overcoat.models.dummy_batch import sees


class Model(NamedTuple):
    """A model's configuration: class of transformers and its arguments. checkpoint: on the Hugging Face hub; its
    config.json need not be fetched. batch: rows that `python -m benchmarks layer` runs."""

    kind: str
    fields: dict[str, Any]
    checkpoint: str = ""
    batch: int = 4

    def changed(self, **fields: Any) -> Model:
        """The same with other fields; of a multimodal model in its language part."""
        if "text_config" in self.fields:
            fields = {"text_config": {**self.fields["text_config"], **fields}}
        return self._replace(fields={**self.fields, **fields})

    def config(self) -> Any:
        """The transformers configuration."""
        kind = getattr(load_extra("transformers", "hf", "a named model"), self.kind)
        return kind(**{"attn_implementation": "sdpa", **self.fields})


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    """Keyword arguments of a language model's configuration."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        **more,
    }


def theta(base: float) -> dict[str, Any]:
    """Plain rotary embeddings of another base than 10,000."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


_QWEN3_VL = {
    "text_config": sizes(
        *(4096, 12288, 36, 32, 8, 151936),
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    ),
    "vision_config": {"out_hidden_size": 4096},  # the rest is the class's
}
# The vision tower is the class's: CLIP's large one, of images of 336 pixels.
_LLAVA = {"text_config": {"model_type": "llama", **sizes(4096, 11008, 32, 32, 32, 32064)}}
_GEMMA_3 = sizes(3840, 15360, 48, 16, 8, 262208, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024)


def gemma_4(*size: int, window: int, sliding: int, **more: Any) -> dict[str, Any]:
    """Keyword arguments of a dense Gemma 4's text model; sliding: layers with a window before each without."""
    kinds = ["full_attention" if (i + 1) % (sliding + 1) == 0 else "sliding_attention" for i in range(size[2])]
    more.update(head_dim=256, global_head_dim=512, final_logit_softcapping=30.0, sliding_window=window)
    return {**sizes(*size), **more, "layer_types": kinds}


# The published config.json, of models that see its text_config. Gemma 4's and Llama 4's were not read at the source but
# in others' tests and conversions (KerasHub, SGLang, Ollama); the counts of parameters agree with the models' cards.
MODELS = {
    "124m": Model("LlamaConfig", sizes(768, 2560, 12, 6, 6, 16384)),
    "smollm2-135m": Model(
        "LlamaConfig", sizes(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True), "HuggingFaceTB/SmolLM2-135M", 8
    ),
    "qwen3-0.6b": Model(
        "Qwen3Config",
        sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
        *("Qwen/Qwen3-0.6B", 8),
    ),
    "olmo-1b": Model(
        "OlmoConfig", sizes(2048, 8192, 16, 16, 16, 50304, tie_word_embeddings=True), "allenai/OLMo-1B-hf"
    ),
    "coat-1b": Model("LlamaConfig", sizes(2048, 5504, 16, 16, 16, 50304, tie_word_embeddings=True)),
    "llama-2-7b": Model("LlamaConfig", sizes(4096, 11008, 32, 32, 32, 32000), "meta-llama/Llama-2-7b-hf"),
    "llava-1.5-7b": Model("LlavaConfig", _LLAVA, "llava-hf/llava-1.5-7b-hf"),
    "llama-3-8b": Model(
        "LlamaConfig", sizes(4096, 14336, 32, 32, 8, 128256, **theta(5e5)), "meta-llama/Meta-Llama-3-8B"
    ),
    "qwen2.5-7b": Model("Qwen2Config", sizes(3584, 18944, 28, 28, 4, 152064, **theta(1e6)), "Qwen/Qwen2.5-7B"),
    "olmo-2-7b": Model("Olmo2Config", sizes(4096, 11008, 32, 32, 32, 100352, **theta(5e5)), "allenai/OLMo-2-1124-7B"),
    "qwen3-8b": Model(
        "Qwen3Config", sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128, **theta(1e6)), "Qwen/Qwen3-8B"
    ),
    "qwen3-vl-8b": Model("Qwen3VLConfig", _QWEN3_VL, "Qwen/Qwen3-VL-8B-Instruct"),
    "gemma-3-12b": Model("Gemma3TextConfig", _GEMMA_3),
    "qwen3.5-9b": Model(
        "Qwen3_5TextConfig",
        sizes(
            *(4096, 12288, 32, 16, 4, 248320),
            head_dim=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            linear_num_key_heads=16,
            linear_num_value_heads=32,
        ),
    ),
    "olmo-hybrid-7b": Model("OlmoHybridConfig", sizes(3840, 11008, 32, 30, 30, 100352), "allenai/Olmo-Hybrid-7B"),
    "gemma-4-e2b": Model(
        "Gemma4TextConfig",
        gemma_4(
            *(1536, 6144, 35, 8, 1, 262144), window=512, sliding=4, num_kv_shared_layers=20, use_double_wide_mlp=True
        ),
    ),
    "gemma-4-e4b": Model(
        "Gemma4TextConfig",
        gemma_4(*(2560, 10240, 42, 8, 2, 262144), window=512, sliding=5, num_kv_shared_layers=18),
    ),
    "gemma-4-12b": Model(
        "Gemma4UnifiedTextConfig",
        gemma_4(
            *(3840, 15360, 48, 16, 8, 262144),
            window=1024,
            sliding=5,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
    ),
    "gemma-4-31b": Model(
        "Gemma4TextConfig",
        gemma_4(
            *(5376, 21504, 60, 32, 16, 262144),
            window=1024,
            sliding=5,
            attention_k_eq_v=True,
            num_global_key_value_heads=4,
            hidden_size_per_layer_input=0,
        ),
        batch=2,
    ),
    "llama-4-scout": Model(
        "Llama4TextConfig",
        sizes(
            *(5120, 8192, 48, 40, 8, 202048),
            head_dim=128,
            num_local_experts=16,
            intermediate_size_mlp=16384,
            **theta(5e5),
        ),
        batch=2,
    ),
    "olmoe-1b-7b": Model(
        "OlmoeConfig",
        sizes(2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
        *("allenai/OLMoE-1B-7B-0924", 8),
    ),
    "gpt-oss-20b": Model(
        "GptOssConfig",
        sizes(
            *(2880, 2880, 24, 64, 8, 201088),
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=131072,
            attn_implementation="eager",  # attention with sinks: transformers has no other without a download
        ),
        *("openai/gpt-oss-20b", 8),
    ),
    "qwen3-30b-a3b": Model(
        "Qwen3MoeConfig",
        sizes(
            *(2048, 6144, 48, 32, 4, 151936),
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            **theta(1e6),
        ),
        *("Qwen/Qwen3-30B-A3B", 8),
    ),
    "mixtral-8x7b": Model(
        "MixtralConfig",
        sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, **theta(1e6)),
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    "llama-2-13b": Model("LlamaConfig", sizes(5120, 13824, 40, 40, 40, 32000), "meta-llama/Llama-2-13b-hf"),
    "phi-4": Model(
        "Phi3Config", sizes(5120, 17920, 40, 40, 10, 100352, pad_token_id=None, **theta(2.5e5)), "microsoft/phi-4"
    ),
    "llama-30b": Model("LlamaConfig", sizes(6656, 17920, 60, 52, 52, 32000), "huggyllama/llama-30b", batch=2),
}
_CHECKPOINTS = {model.checkpoint: model for model in MODELS.values() if model.checkpoint}


MOST_LAYERS = 1000  # these take a second to make, even on the meta device


def check_depth(config: Any) -> None:
    """ValueError if a configuration has more layers than any model: building them would not end."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in vars(part).items() if hasattr(part, "__dict__") else ():
            if "layer" in name and "per_layer" not in name and isinstance(value, int) and value > MOST_LAYERS:
                raise ValueError(f"{name} = {value} in the model's configuration: no model has so many layers")


def load_model_config(name: str, with_images: bool = False) -> Any:
    """The transformers configuration of a model.

    Args:
        with_images: a vision-language model will do.
        name: one of `MODELS` or its checkpoint, a `config.json` or the folder it is in, or a model of the Hugging Face
            hub, whose config.json alone is fetched.

    Raises:
        ValueError: there is none of that name, or it is no causal language model.
    """
    known = MODELS.get(name) or _CHECKPOINTS.get(name)
    try:
        # Code of strangers is not run for an estimate.
        config = (
            known.config()
            if known is not None and not Path(name).exists()
            else load_pretrained("AutoConfig", "the configuration of", name, trust_remote_code=False)
        )
    except ValueError as error:
        raise ValueError(
            f"--model {name!r} is neither a built-in shape ({', '.join(MODELS)}), nor a folder or file with a "
            f"transformers configuration, nor a model that can be fetched: {error}"
        ) from error
    check_depth(config)
    causal = load_extra("transformers.models.auto.modeling_auto", "hf", "overcoat estimate")
    if config.model_type not in causal.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (with_images and sees(config)):
        raise ValueError(f"--model {name!r} is a {config.model_type} model, no causal language model of transformers")
    return config
