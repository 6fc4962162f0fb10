"""Small random models of every kind in transformers' mappings: `tiny("llama", CAUSAL)`.

A kind's configuration is its own default with small sizes, by the names that configurations have for them (`SIZES`),
inner configurations (text_config, vision_config) alike. What a kind wants beside them is in `MORE`.
"""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from tests.models.zoo import VOCAB, unevenly

CAUSAL, IMAGE_TEXT, ENCODERS = "causal", "image-text", "encoders"
MAPPINGS = {
    CAUSAL: ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    IMAGE_TEXT: ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
    ENCODERS: ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_MAPPING_NAMES"),
}
# Wide enough that linear layers compute in FP8 by themselves (models/linear_layers.py).
SIZES: dict[Any, tuple[str, ...]] = {
    512: ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff",
          "vocab_size", "text_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "mamba_d_ssm"),
    256: ("hidden_size", "n_embd", "d_model", "embedding_size", "dim", "emb_dim", "lru_width", "embed_dim",
          "q_lora_rank", "kv_lora_rank", "max_position_embeddings", "n_positions", "max_seq_len",
          "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
          "out_hidden_size", "text_hidden_size", "text_dim", "projection_dim", "adapter_in_dim", "adapter_out_dim",
          "adapter_input_size", "output_dim", "projection_hidden_dim", "encoder_hidden_size", "position_embedding_size",
          "llm_hidden_size", "projector_hidden_size", "vision_output_dim", "num_position_embeddings"),
    64: ("head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim", "index_head_dim", "linear_head_dim",
         "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "global_head_dim"),
    32: ("qk_rope_head_dim", "image_size"),
    16: ("sliding_window", "sliding_window_size", "attention_window", "chunk_size", "mamba_chunk_size", "index_topk"),
    8: ("mamba_num_heads", "mamba_n_heads", "patch_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_n_heads", "linear_num_heads",
        "linear_num_value_heads"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_key_value_heads",
        "num_layers", "depth", "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k",
        "linear_num_key_heads", "encoder_num_layers", "num_blocks"),
    1: ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
    0.02: ("initializer_range",),
}  # fmt: skip
# By model type, of an inner configuration as well.
HIDDEN = 256
SPECIAL = VOCAB - 24  # the first of the tokens that stand for images and the like
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [8, 12, 12]}
MORE: dict[str, dict[str, Any]] = {
    "aria": {"text_config": {"head_dim": 64}},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1},
    "wavtokenizer_encoder": {"hidden_size": ...},
    "bailing_hybrid": {"head_dim": 64, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 512, "local_attention_window_len": 16},
    "blt_local_encoder": {"hidden_size_global": 256},
    "blt_local_decoder": {"hidden_size_global": 256},
    "chameleon": {"vocabulary_map": {"<image>": SPECIAL}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"full_attention": None, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256, "global_head_dim": 64},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 256,
                        "swa_kv_lora_rank": 256, "swa_head_dim": 96, "swa_qk_nope_head_dim": 64,
                        "swa_v_head_dim": 64, "head_dim": 96},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 512},
    "gemma3": {"mm_tokens_per_image": 16},
    "shieldgemma2": {"mm_tokens_per_image": 16},
    "gemma3n_text": {"intermediate_size": [512] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                     "num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 64},
    "gemma4_unified_text": {"global_head_dim": 64},
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.125},
    "granite_swa": {"attention_multiplier": 0.125},
    "granitemoe": {"attention_multiplier": 0.125},
    "granitemoe_swa": {"attention_multiplier": 0.125},
    "granitemoeshared": {"attention_multiplier": 0.125},
    "granitemoehybrid": {"attention_multiplier": 0.125,
                         "layer_types": ["linear_attention", "full_attention"]},
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
    "glm5_next_text": {"qk_rope_head_dim": ...},
    "hunyuan_vl_text": {"head_dim": 64},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"expert_ffn_hidden_size": 256, "zero_expert_num": 2, "num_hidden_layers": ..., "head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 64},
    "ministral": {"head_dim": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "num_key_value_heads": 4}},
    "muse_spark_audio": {"hidden_sizes": (64, 128, 128, 256), "depths": (1, 1, 1, 1)},
    "nemotron": {"head_dim": 64, "num_key_value_heads": 2},
    "phi4_multimodal_audio": {"num_blocks": 2, "ext_pw_out_channel": 256, "depthwise_separable_out_channel": 256,
                              "nemo_conv_channels": 256},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 16,
                       "indexer_compress_ratio": 2, "hc_lowrank": 64},
    "reformer": {"axial_pos_shape": (6, 8)},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Where the default is None, with which no model can be built.
UNSET = {"n_routed_experts": 4, "num_experts_per_tok": 2}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
NARROWED = {name for size in (512, 256, 64, 32) for name in SIZES[size]}
NARROWED -= {"vocab_size", "text_vocab_size", "max_position_embeddings", "n_positions", "image_size"}
PAIRS = ("image_size", "patch_size")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST = 40_000_000  # parameters of a model that a machine builds at once


def kinds(mapping: str) -> dict[str, str]:
    """The names of the model classes, by kind."""
    return dict(sorted({k: v for name in MAPPINGS[mapping] for k, v in getattr(modeling_auto, name).items()}.items()))


def small_config(cls: type[PretrainedConfig], narrow: bool = False, **fields: Any) -> Any:
    """Return a small configuration of a class; narrow: a quarter as wide, in heads of 16 with no linear layer that is
    large. fields: of it, of an inner configuration as a dictionary."""
    default = cls()
    known = default.to_dict()
    more = {**MORE.get(default.model_type, {}), **fields}
    if narrow and "head_dim" in more and "head_dim" not in fields:
        more["head_dim"] //= 4
    given: dict[str, Any] = {}
    for size, names in SIZES.items():
        given |= {name: size for name in names if _is_number(cls, known, name)}
        given |= {
            name: [size] * len(known[name])
            for name in names
            if name in PAIRS and isinstance(known.get(name), (list, tuple))
        }
    if narrow:
        given |= {name: size // 4 for name, size in given.items() if name in NARROWED}
    given |= {name: size for name, size in UNSET.items() if name in known and known[name] is None}
    if "qk_rope_head_dim" in known:  # latent attention, whose head_dim is that of the rotation
        given.pop("head_dim", None)
    if known.get("num_key_value_heads") == known.get("num_attention_heads") and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    given |= _every_kind_of_layer(cls, known, given)
    given |= {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    given |= {name: place for place, name in enumerate(TOKENS) if known.get(name) is not None}
    special = [name for name in known if re.search("_token_(id|index)$", name) and name not in TOKENS]
    given |= {name: SPECIAL + place for place, name in enumerate(special) if isinstance(known[name], int)}
    if "mrope_section" in (rope := known.get("rope_parameters") or {}):
        whole = given.get("qk_rope_head_dim", given.get("head_dim", 64)) * rope.get("partial_rotary_factor", 1.0)
        sizes = [int(each * whole / 2 / sum(rope["mrope_section"])) for each in rope["mrope_section"]]
        sizes[0] = int(whole / 2) - sum(sizes[1:])
        given["rope_parameters"] = {**rope, "mrope_section": sizes}
    for name in getattr(cls, "sub_configs", {}):
        if isinstance(part := getattr(default, name, None), PretrainedConfig):
            inner = more.pop(name, {})
            given[name] = small_config(type(part), narrow, **inner) if isinstance(inner, dict) else inner
    given |= more
    return cls(**{name: value for name, value in given.items() if value is not ...})


def _every_kind_of_layer(cls: Any, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return lists with a value for each layer, so that each value comes once, and how many layers these are."""
    count = next((known[name] for name in LAYERS if _is_number(cls, known, name)), None)
    lists = {name: value for name, value in known.items() if isinstance(value, list) and value}
    found = {name: list(dict.fromkeys(x)) for name, x in lists.items() if len(x) == count and name != "moe_layers"}
    found = {name: x for name, x in found.items() if len(x) <= 4}
    if not found or not all(isinstance(each, (str, int, float)) for x in found.values() for each in x):
        return {}
    layers = max(2, *map(len, found.values()))
    counts = {name: layers for name in LAYERS if name in given}
    return {**{name: (x + x[-1:] * layers)[:layers] for name, x in found.items()}, **counts}


def _is_number(cls: Any, known: dict[str, Any], name: str) -> bool:
    value = known.get(name)
    is_free = not isinstance(getattr(cls, name, None), property) and name not in cls.attribute_map
    return isinstance(value, (int, float)) and not isinstance(value, bool) and is_free


def _class_of(kind: str, mapping: str, config: Any) -> Any:
    name = kinds(mapping)[kind]
    module = importlib.import_module(type(config).__module__.rpartition(".")[0])
    return getattr(module, name, None) or getattr(transformers, name)


def tiny_config(kind: str, mapping: str = CAUSAL, narrow: bool = False, **fields: Any) -> tuple[Any, Any]:
    """Return the model class and its configuration."""
    config = small_config(CONFIG_MAPPING[kind], narrow, **fields)
    cls = _class_of(kind, mapping, config)
    wanted = getattr(cls, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):  # the text of a model with images
        inner = [getattr(config, name) for name in config.sub_configs]
        config = next((each for each in inner if isinstance(each, wanted)), config)
    if mapping == CAUSAL and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return cls, config


def tiny(kind: str, mapping: str = CAUSAL, seed: int = 0, narrow: bool = False, **fields: Any) -> nn.Module:
    """Return a small model in BF16, with uneven norms and biases."""
    torch.manual_seed(seed)
    cls, config = tiny_config(kind, mapping, narrow, **fields)
    config._attn_implementation = "sdpa"
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    except ValueError as error:
        if "attention" not in str(error):
            raise
        config._attn_implementation, count = "eager", 0
    except Exception:  # some cannot be built without weights
        count = 0
    if count > MOST:
        raise ValueError(f"{count / 1e6:.0f} M parameters: not small")
    model = unevenly(cls(config).to(torch.bfloat16))
    with torch.no_grad():
        for module in model.modules():  # Gemma 4's: trained norms of q keep its scores small
            if getattr(module, "scaling", None) == 1.0 and hasattr(getattr(module, "q_norm", None), "weight"):
                module.q_norm.weight.mul_(0.125)
        for name, parameter in model.named_parameters():  # weights of transformers' 0.02 hide faults of all but norms
            if parameter.dim() > 1 and parameter.device.type != "meta" and not parameter.any():
                parameter.normal_(std=0.02)
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(2)
    return model
