"""Vision-language models as a whole, tiny, with images: `pytest tests/models/test_vision_language.py`."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from overcoat.models.compiled import begin_pass, compile_layers, graph_layers
from overcoat.models.family import VISION_LANGUAGE, tower_path
from overcoat.models.output import NoLogits
from tests.emulation import emulate_fp8_gemms, sqnr
from tests.models.graphs import recorded, skipped
from tests.models.zoo import gradients
from tests.nightly import mostly_nightly

VOCAB, IMAGE, START, LENGTH = 96, 90, 91, 40
TEXT = dict(  # noqa: C408
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=128,
    pad_token_id=0,
)
VISION = dict(  # noqa: C408
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
QWEN = dict(  # noqa: C408
    depth=2, num_heads=2, hidden_size=64, intermediate_size=96, patch_size=4, out_hidden_size=64, temporal_patch_size=2
)
# By the model's class: its text and vision configurations, what else its own has, and how many tokens an image makes.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "Llava": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        {"vision_feature_select_strategy": "default", "vision_feature_layer": -1},
        16,
    ),
    "LlavaOnevision": (
        {"model_type": "qwen2"},
        {**VISION, "model_type": "siglip_vision_model"},
        {"image_grid_pinpoints": [[16, 16]], "vision_feature_layer": -1, "vision_aspect_ratio": "anyres_max_9"},
        36,
    ),
    "Qwen2_5_VL": ({"rope_parameters": MROPE}, {**QWEN, "fullatt_block_indexes": [1], "window_size": 16}, {}, 8),
    "Qwen3VL": (
        {"rope_parameters": MROPE},
        {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
        8,
    ),
    "Idefics3": ({"model_type": "llama"}, {**VISION}, {"scale_factor": 2}, 4),
    "SmolVLM": ({"model_type": "llama"}, {**VISION}, {"scale_factor": 2}, 4),
    "PaliGemma": (
        {"model_type": "gemma"},
        {**VISION, "model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
        {"projection_dim": 64, "hidden_size": 64},
        16,
    ),
    "Gemma3": (
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
        {**VISION, "vision_use_head": False},
        {"mm_tokens_per_image": 16},
        16,
    ),
    "InternVL": (
        {"model_type": "qwen2"},
        {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        {"downsample_ratio": 0.5},
        4,
    ),
    "Mistral3": (
        {"model_type": "mistral"},
        {**VISION, "model_type": "pixtral", "head_dim": 32},
        {"spatial_merge_size": 2, "vision_feature_layer": -1},
        6,
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """more: of the text's configuration."""
    torch.manual_seed(0)
    text, vision, extra, _ = MODELS[name]
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    ids = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_start_token_id": START, "video_token_id": 92}
    config = model_class.config_class(text_config={**TEXT, **text, **more}, vision_config=vision, **ids, **extra)
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "norm" in key or "lambda" in key:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif key.endswith("projection_weight"):  # Gemma 3's is zero
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.train()


def make_batch(name: str) -> dict[str, Any]:
    """One row with an image after two tokens, and labels for the text after it."""
    generator = torch.Generator().manual_seed(0)
    count = MODELS[name][3]
    ids = torch.randint(1, 80, (1, LENGTH + count), generator=generator)
    ids[0, 1], ids[0, 2 : 2 + count] = START, IMAGE
    labels = ids.clone()
    labels[0, : 2 + count] = -100
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    if name.startswith("Qwen"):
        inputs["pixel_values"] = torch.randn(32, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 8]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    elif name in ("Idefics3", "SmolVLM"):
        inputs["pixel_values"] = pixels[:, None]
    elif name == "LlavaOnevision":
        inputs["pixel_values"] = pixels[:, None].repeat(1, 2, 1, 1, 1)
        inputs["image_sizes"] = torch.tensor([[16, 16]])
    elif name == "Mistral3":
        inputs["pixel_values"] = torch.randn(1, 3, 16, 24, generator=generator)
        inputs["image_sizes"] = torch.tensor([[16, 24]])
    else:
        inputs["pixel_values"] = pixels
    if name == "PaliGemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    elif name == "Gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    return inputs


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_without_logits_is_that_of_the_model(name: str) -> None:
    """And every gradient, of the tower too; the result's other fields stay."""
    original, inputs = make_model(name), make_batch(name)
    model = copy.deepcopy(original)
    report = overcoat.convert(model, Recipe(fp8=False))
    assert report.head is not None
    assert report.head.converted, report.head.detail
    ours, theirs = model(**inputs), original(**inputs)
    assert isinstance(ours.logits, NoLogits)
    assert isinstance(ours, type(theirs))
    assert ours.keys() == theirs.keys() - {"logits"}
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
    ours.loss.backward()
    theirs.loss.backward()
    assert gradients(model).keys() == gradients(original).keys()
    for key, grad in gradients(original).items():
        if not key.endswith("k_proj.bias"):
            assert sqnr(grad, gradients(model)[key]) > 60, key
    assert inspect.signature(model.forward) == inspect.signature(original.forward)


@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize("name", MODELS)
def test_tower_and_text_train_in_fp8(name: str) -> None:
    original, inputs = make_model(name), make_batch(name)
    model = copy.deepcopy(original)
    report = overcoat.convert(model, Recipe())
    assert [part.split(" ")[0] for part in report.parts] == ["vision", "connector", "text"]
    assert report.parts[0].endswith("2 of 2 layers in FP8"), str(report)
    assert report.parts[1].endswith("float32")
    assert report.parts[2].endswith("2 of 2 layers in FP8"), str(report)
    assert all(part in str(report) for part in report.parts)
    exact, emulated = original.double(), emulate_fp8_gemms(original)
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    for each in (exact, emulated):
        each(**wide).loss.backward()
    model(**inputs).loss.backward()
    assert gradients(model).keys() == gradients(exact).keys()
    weights = {key: x for key, x in gradients(exact).items() if x.dim() > 1 and x.count_nonzero()}
    noise, floor = (
        sum(10 ** (-sqnr(x, gradients(each)[key]) / 10) for key, x in weights.items()) for each in (model, emulated)
    )
    assert noise < 1.26 * floor, "1 dB below FP8 GEMMs alone, over all weights"


@pytest.mark.parametrize("by_hook", [False, True])
def test_masks_made_on_the_way_to_the_text_are_read(by_hook: bool) -> None:
    model, inputs, seen = make_model("Llava"), make_batch("Llava"), []
    overcoat.convert(model)
    del inputs["attention_mask"]
    if by_hook:
        look = lambda module, args, given: seen.append(given.get("attention_mask"))  # noqa: E731
        model.model.register_forward_pre_hook(look, with_kwargs=True)
    else:

        class Watched(transformers.LlavaModel):
            def forward(self, attention_mask: Any = None, **given: Any) -> Any:
                seen.append(attention_mask)
                return super().forward(attention_mask=attention_mask, **given)

        model.model.__class__ = Watched
    model(**inputs)
    assert seen == [None]


@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize("packed", [False, True])
def test_text_that_sees_all_tokens_is_transformers_own(packed: bool) -> None:
    """PaliGemma's, whose masks hide what comes after the prefix; without a mask nothing is hidden."""
    text = {**TEXT, "use_bidirectional_attention": True}
    original = transformers.GemmaForCausalLM(transformers.GemmaConfig(**text)).train()
    inputs: dict[str, Any] = {"labels": torch.arange(40)[None], "use_cache": False}
    if packed:
        inputs["position_ids"] = torch.arange(40).remainder(25)[None]
    model = copy.deepcopy(original)
    assert "not causal" in overcoat.convert(model).layers[0].detail
    seen = []
    for each in (original, model):
        embeds = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        hidden = each(**inputs, inputs_embeds=embeds, output_hidden_states=True).hidden_states[-1]
        hidden[0, 15].sum().backward()
        seen.append(embeds.grad[0].abs().sum(-1) > 0)
    assert torch.equal(*seen)
    assert seen[0][20] != packed


@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_of_one_image_see_each_other(padded: bool) -> None:
    """Gemma 3's, in both directions, also beyond a window's first token; no image sees a later one."""
    original = make_model("Gemma3")
    model = copy.deepcopy(original)
    report = overcoat.convert(model)
    kinds = torch.zeros(1, 64, dtype=torch.int32)
    kinds[0, 4:24], kinds[0, 30:50] = 1, 1
    mask = (torch.arange(64) > 1).long()[None] if padded else None
    for first, token, last in ((4, 8, 23), (30, 33, 49), (50, 55, 55)):
        seen = []
        for each in (original, model):
            embeds = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
            hidden = each.model(inputs_embeds=embeds, token_type_ids=kinds, attention_mask=mask).last_hidden_state
            hidden[0, token].sum().backward()
            seen.append(embeds.grad[0].abs().sum(-1) > 0)
        assert torch.equal(*seen)
        assert seen[0][first : last + 1].all()
        assert seen[0].nonzero().max() == last
        assert bool(seen[0][0]) != padded
    assert [report.running()[f"model.language_model.layers.{place}"] for place in (0, 1)] == ["FP8"] * 2


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_text_layers_are_offloaded_before_a_towers(name: str) -> None:
    """A frozen tower's layers keep nothing."""
    model = make_model(name, num_hidden_layers=5)
    for frozen, count, of_text, of_tower in (
        (False, 2, 2, 0), (False, 4, 3, 1), (False, "all", 3, 2), (True, 4, 3, 0), (True, "all", 3, 0)
    ):  # fmt: skip
        model.get_submodule(tower_path(model)[:-1]).requires_grad_(not frozen)
        report = overcoat.convert(model, Recipe(offload_blocks=count))
        moved = [row.name.startswith(tower_path(model)) for row in report.layers if "in host memory" in row.detail]
        assert (moved.count(False), moved.count(True)) == (of_text, of_tower)


@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL"])
def test_a_frozen_tower_keeps_nothing(name: str) -> None:
    model = make_model(name, torch.bfloat16)
    whole = next(each for each in VISION_LANGUAGE if each.name.startswith(name))
    inputs = make_batch(name)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    model.get_submodule(whole.vision).requires_grad_(False)
    report = overcoat.convert(model)
    assert report.parts[0].endswith("2 of 2 layers in FP8, frozen")
    with overcoat.memory.record_kept(model) as kept:
        model(**inputs).loss.backward()
    assert not [row for row in kept.rows if row.op.startswith(whole.vision)]
    assert {row.kind[-12:] for row in report.measure(model, inputs)} == {"DecoderLayer"}  # of the text
    of_blocks = sum(size for op, size in kept.by_op().items() if op.split(" ")[0] in ("attention", "mlp"))
    model.get_submodule(whole.text).requires_grad_(False)
    assert of_blocks > 0


@pytest.mark.parametrize("drop", [lambda inner: delattr(inner, "visual"), lambda inner: setattr(inner, "visual", None)])
def test_a_model_whose_tower_was_dropped_trains_its_text(drop: Callable[[Any], None]) -> None:
    model, inputs = make_model("Qwen3VL"), make_batch("Qwen3VL")
    drop(model.model)
    report = overcoat.convert(model)
    assert report.parts == ["text (model.language_model): 2 of 2 layers in FP8"]
    model(input_ids=inputs["input_ids"].clamp(max=79), labels=inputs["labels"]).loss.backward()
    assert set(report.running().values()) == {"FP8", "loss without logits"}


def steps(name: str, graphs: bool, device: str) -> list[dict[str, Tensor]]:
    """Loss and gradients of each of four steps, the tower's layers compiled if `graphs`."""
    model, inputs = make_model(name, torch.bfloat16).to(device), make_batch(name)
    inputs = {key: x.to(device, torch.bfloat16 if x.is_floating_point() else x.dtype) for key, x in inputs.items()}
    overcoat.convert(model)
    if graphs:
        assert [path.split(".")[1] for path in graph_layers(model)] == [TOWERS[name]] * 2
        compile_layers(model, graphs=device == "cuda")
    found = []
    for _ in range(4 if device == "cuda" else 1):
        begin_pass()
        loss = model(**inputs).loss
        loss.backward()
        found.append({"loss": loss.detach().clone(), **{key: x.clone() for key, x in gradients(model).items()}})
        model.zero_grad()
    return found


TOWERS = {"Llava": "vision_tower", "Qwen3VL": "visual"}


@pytest.mark.parametrize("name", mostly_nightly(TOWERS, ["Qwen3VL"]))
def test_a_tower_as_graphs_gives_the_eager_gradients(name: str, device: torch.device) -> None:
    """Text layers stay eager; two towers, of a fixed size and of any, by lengths. On a CPU compiled, not recorded.

    Attention's backward by lengths adds in any order on a GPU: bits that two eager runs share are the graphs' too.
    Elsewhere eight times their distance is allowed: of as few as 4 (6) independent errors each, one distance is that
    much larger than another by chance in 0.07% (0.004%) of cases (F distribution).
    """
    torch.compiler.reset()
    before = skipped()
    with torch.compiler.set_stance(force_backend="aot_eager") if device.type == "cpu" else contextlib.nullcontext():
        runs = [steps(name, graphs, device.type) for graphs in (False, False, True)]
    for eager, again, replayed in zip(*runs, strict=True):
        assert eager.keys() == replayed.keys()
        noise = {key: torch.dist(x.float(), again[key].float()) for key, x in eager.items()}
        assert device.type == "cuda" or not any(noise.values())
        assert not [key for key, x in eager.items() if torch.dist(x.float(), replayed[key].float()) > 8 * noise[key]]
    if device.type == "cuda":
        assert recorded() > 0
        assert skipped() == before
    torch.compiler.reset()
