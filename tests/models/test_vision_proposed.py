"""Vision-language and audio models whose layers are proposed, tiny, with images: what converts, and that it trains.

A step in FP8 beside one in BF16: the loss, and the gradient of every matrix, of the tower's too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import overcoat
from overcoat.models import propose, verify
from tests.models.test_vision_language import IMAGE, LENGTH, MROPE, QWEN, START, TEXT, VISION
from tests.models.zoo import trained, unevenly
from tests.nightly import mostly_nightly

GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
GLM = {
    "depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 96, "patch_size": 4, "out_hidden_size": 64,
    "image_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
AUDIO = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 32,
    "initializer_range": 0.06,
}  # fmt: skip
# By the model's class: fields of its text's configuration, its tower's and its own, the number of tokens of an image,
# and the modules in its layers that run as they are.
Kind = tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, set[str]]
MODELS: dict[str, Kind] = {
    "Qwen2VL": (
        {"rope_parameters": MROPE},
        {"depth": 2, "num_heads": 2, "embed_dim": 64, "hidden_size": 64, "patch_size": 4, "mlp_ratio": 2},
        {},
        8,
        set(),
    ),
    "Qwen3VLMoe": (
        {"rope_parameters": MROPE, **EXPERTS},
        {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
        8,
        {"mlp"},
    ),
    "Qwen3_5": (
        {
            "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        {**QWEN, "num_position_embeddings": 16},
        {},
        8,
        {"linear_attn"},
    ),
    "Glm4v": ({"rope_parameters": GLM_ROPE}, GLM, {}, 8, set()),
    "Glm4vMoe": (
        {
            "rope_parameters": GLM_ROPE, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        GLM,
        {},
        8,
        {"mlp"},
    ),
    "GlmOcr": ({"rope_parameters": GLM_ROPE}, GLM, {}, 8, set()),
    "LlavaNext": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        {"image_grid_pinpoints": [[16, 16]], "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        36,
        set(),
    ),
    "Idefics2": (
        {"model_type": "mistral"},
        VISION,
        {"perceiver_config": {
            "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 32, "num_key_value_heads": 1,
        }},
        4,
        set(),
    ),
    "Lfm2Vl": (
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
        {**VISION, "num_patches": 16, "vision_use_head": False},
        {"projector_hidden_size": 64},
        4,
        {"conv"},
    ),
    "Voxtral": (
        {"model_type": "llama"},
        {**AUDIO, "intermediate_size": 256},
        {},
        8,
        set(),
    ),
    "Qwen2Audio": (
        {"model_type": "qwen2"},
        {**AUDIO, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96},
        {},
        16,
        set(),
    ),
}  # fmt: skip
HEARING = ("Voxtral", "Qwen2Audio")
IN_CI = ("Qwen3_5", "Glm4v", "Lfm2Vl", "Qwen2Audio")


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    text, vision, extra, *_ = MODELS[name]
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    ids = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_start_token_id": START, "video_token_id": 92}
    if name in HEARING:
        ids = {"audio_token_id": IMAGE, "audio_token_index": IMAGE}
    tower = "audio_config" if name in HEARING else "vision_config"
    config = cls.config_class(text_config={**TEXT, **text}, **{tower: vision}, **ids, **extra)
    return unevenly(cls(config).to(torch.bfloat16))


def make_batch(name: str) -> dict[str, Any]:
    """Two rows, with an image each after two tokens; labels for the text after it."""
    generator = torch.Generator().manual_seed(0)
    count = MODELS[name][3]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    ids = torch.randint(1, 80, (2, LENGTH + count), generator=generator)
    ids[:, 1], ids[:, 2 : 2 + count] = START, IMAGE
    labels = ids.clone()
    labels[:, : 2 + count] = -100
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    if name in HEARING:
        inputs["input_features"] = normal(2, 8, 64)
        if name == "Qwen2Audio":
            inputs["feature_attention_mask"] = torch.ones(2, 64, dtype=torch.int64)
    elif name.startswith(("Qwen", "Glm")):
        inputs["pixel_values"] = normal(64, 3 * 2 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 8], [1, 8, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    elif name == "Lfm2Vl":
        inputs["pixel_values"] = normal(2, 16, 3 * 4 * 4)
        inputs["pixel_attention_mask"] = torch.ones(2, 16, dtype=torch.int64)
        inputs["spatial_shapes"] = torch.tensor([[4, 4], [4, 4]])
    elif name == "LlavaNext":
        inputs["pixel_values"] = normal(2, 2, 3, 16, 16)
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    else:
        inputs["pixel_values"] = normal(2, 1, 3, 16, 16)
    return inputs


@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize("name", mostly_nightly(MODELS, IN_CI))
def test_a_step_with_images_is_that_of_the_model(name: str) -> None:
    model, inputs = make_model(name), make_batch(name)
    exact = trained(copy.deepcopy(model), {**inputs, "use_cache": False})
    report = overcoat.convert(model)
    assert not report.left_alone
    assert {path for paths in report.in_part.values() for path in paths} == MODELS[name][4]
    found = trained(model, {**inputs, "use_cache": False})
    assert {*report.running().values()} <= {"FP8", "loss without logits"}
    assert found.keys() == exact.keys()
    assert abs(found["loss"] - exact["loss"]) < 0.05
    for key, x in exact.items():
        if x.dim() > 1 and not key.endswith(("gate.weight", "router.weight")) and x.abs().max() > 0:
            assert torch.cosine_similarity(found[key].float().flatten(), x.float().flatten(), 0) > 0.95, key


def test_text_whose_rotation_differs_in_images_alone_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table's second half is of other positions, the same in text. The block reads the first half alone."""
    for module in (propose, verify):
        monkeypatch.setattr(module, "_found", {})
    model = make_model("Glm4v")
    rotary = type(model.get_submodule("model.language_model.rotary_emb"))
    own = rotary.forward

    def crossed(self: Any, x: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        pairs = zip(own(self, x, positions, *args, **kwargs), own(self, x, positions.flip(0), *args, **kwargs))
        return tuple(torch.cat((a.chunk(2, -1)[0], b.chunk(2, -1)[1]), -1) for a, b in pairs)

    monkeypatch.setattr(rotary, "forward", crossed)
    report = overcoat.convert(model)
    in_fp8 = [name for name in report.converted if name not in report.in_part]
    assert in_fp8 == ["model.visual.blocks.0", "model.visual.blocks.1"]


def test_a_rotation_of_other_columns_runs_the_original() -> None:
    """Of which GLM's own forward takes any number."""
    model: Any = make_model("Glm4v")
    overcoat.convert(model)
    layer, x = model.model.language_model.layers[0], torch.randn(1, 5, 64).bfloat16()
    tables = torch.rand(2, 1, 5, 24).bfloat16().unbind(0)
    with pytest.warns(UserWarning, match="24 columns"):
        layer(x, position_embeddings=tables)
    assert "24 columns" in layer.overcoat_ran
