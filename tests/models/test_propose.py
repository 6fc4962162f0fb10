"""Layers of classes without a family: what is found in them, and that nothing else is taken for it."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration

import overcoat
from overcoat import Recipe
from overcoat.block.mlp import Mlp
from overcoat.models import proposal, propose, verify
from overcoat.models.decoder import block_of
from overcoat.models.family import Family, decoder_layers, family_of
from tests.models.zoo import ENCODERS, VOCAB, assert_equal, every_kind, make_batch, make_encoder, make_model, trained
from tests.sweep.tiny import tiny

build = functools.partial(tiny, narrow=True)  # no linear layer is large enough for FP8 by itself

# By model type: the MLP's activation (None: it runs as it is), and what sets the wiring apart from Llama's.
FOUND: dict[str, tuple[Any, dict[str, Any]]] = {
    "stablelm": ("silu", {}),
    "nanochat": ("relu2", {"tables": proposal.backwards}),
    "phi": ("gelu_tanh", {"parallel": proposal.always, "rotated": 8}),
    "gptj": ("gelu_tanh", {"parallel": proposal.always, "tables": proposal.backwards, "rope_interleaved": True}),
    "falcon": ("gelu", {"parallel": proposal.always, "results": 2}),
    "nemotron": ("relu2", {"plus_one": True, "rotated": 8}),
    "biogpt": ("gelu", {"rotary": False}),
    "opt": ("relu", {"rotary": False}),
    "gpt_bigcode": ("gelu_tanh", {"rotary": False}),
    "jais2": ("relu2", {}),
    "vaultgemma": ("gelu_tanh", {"plus_one": True}),
    "hyperclovax": ("silu", {"post": True}),
    "granite_swa": ("silu", {"sinks": "self_attn.sinks"}),
    "apertus": (None, {}),
    "qwen2_moe": (None, {}),
    "granitemoe": (None, {}),
    "cohere2_moe": (None, {"parallel": proposal.always, "rope_repeated": True}),
    "flex_olmo": (None, {"full_norm": True, "post": True}),
    "roberta": ("gelu", {"rotary": False, "norm_after_residual": True}),
    "whisper": ("gelu", {"rotary": False}),
}
IN_CI = ("nanochat", "phi", "gptj", "falcon", "biogpt", "granitemoe", "roberta")
kinds = pytest.mark.parametrize("kind", FOUND)
some = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in IN_CI else pytest.mark.nightly) for kind in FOUND]
)


def layers(model: nn.Module) -> list[Any]:
    return list(decoder_layers(model).values())


def family(layer: Any) -> Family:
    found = family_of(layer)
    assert found is not None
    return found


@kinds
def test_layers_of_other_classes_are_found_and_verified(kind: str) -> None:
    model = build(kind)
    report = overcoat.convert(model)
    assert report.converted == list(decoder_layers(model))
    assert all(each.decibels is not None and each.decibels > verify.LIMIT_DB for each in report.verified.values())
    activation, expected = FOUND[kind]
    found = family(layers(model)[0])
    first, second = found.branches.parts  # type: ignore[attr-defined]
    assert getattr(second.mixer, "activation", None) == activation
    known = {**first._asdict(), **first.mixer.heads._asdict(), **found._asdict()}
    assert {name: bool(known[name]) if value is True else known[name] for name, value in expected.items()} == expected


@pytest.mark.parametrize("kind", every_kind())
def test_what_families_say_is_found_without_them(kind: str) -> None:
    model = make_model(kind)
    for name, layer in decoder_layers(model).items():
        found = propose.propose(model, name)
        if kind == "ministral3":  # a scale of q that grows with the position
            assert found.family is not None
            assert [part.mixer is None for part in found.family.branches.parts] == [True, False]  # type: ignore[attr-defined]
            continue
        assert found.family is not None, found.reason
        assert_same(layer, found.family, family(layer))


@pytest.mark.parametrize("kind", ["vit", "clip", "siglip", "bert"])
def test_encoders_are_found_without_their_families(kind: str) -> None:
    assert kind in ENCODERS
    model = make_encoder(kind)
    for name, layer in decoder_layers(model).items():
        found = propose.propose(model, name)
        assert found.family is not None, found.reason
        assert_same(layer, found.family, family(layer))


def assert_same(layer: Any, found: Family, known: Family) -> None:
    one, other = (block_of(each.branches(layer, 2), each, layer) for each in (found, known))
    assert one.parallel == other.parallel
    for a, b in zip(one.branches, other.branches, strict=True):
        assert isinstance(a.mixer, Mlp) == isinstance(b.mixer, Mlp)
        if a.mixer == b.mixer or a.mixer.heads.rotates:  # else the rows' order is of no matter
            assert (a.mixer, a.in_proj.orders or (), a.out_proj.scale) == (
                b.mixer,
                b.in_proj.orders or (),
                b.out_proj.scale,
            )
        assert (a.pre is None, a.post is None, a.norm_after_residual) == (
            b.pre is None,
            b.post is None,
            b.norm_after_residual,
        )


# ---- what must not be taken for it ------------------------------------------------------------------------------


def scaled(layer: Any) -> Any:
    own = type(layer).forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states + 0.5 * (own(self, hidden_states, *args, **kwargs) - hidden_states)

    return type(layer), forward


def more(layer: Any) -> Any:
    own = type(layer).forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states, *args, **kwargs) + 0.01 * hidden_states.tanh()

    return type(layer), forward


def warmer(layer: Any) -> Any:
    own = type(layer.self_attn).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        return own(self, *args, **{**kwargs, "position_embeddings": (1.01 * cos, 1.01 * sin)})

    return type(layer.self_attn), forward


CHANGES = {
    "scaled": (scaled, "no multiple"),
    "more": (more, "no multiple"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_compute_something_else_are_not_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers: rules that ask who wrote a forward have no say here."""
    monkeypatch.setattr(propose, "why_unsupported", lambda layer, family: None)
    model = build("stablelm")
    change, reason = CHANGES[name]
    owner, forward = change(layers(model)[0])
    monkeypatch.setattr(owner, "forward", forward)
    found = propose.propose(model, "model.layers.0")
    assert found.family is None
    assert reason in found.reason


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("stablelm", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("biogpt", {"activation_dropout": 0.1}, "activation_dropout is 0.1"),
        ("mamba", {}, "mixer"),
        ("big_bird", {}, "its own forward could not run"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2}, "no proposal was verified"),
        ("bart", {"add_cross_attention": True}, "reads what another model makes"),
    ],
)
def test_layers_that_stay_as_they_are_say_why(kind: str, fields: dict[str, Any], reason: str) -> None:
    model = build(kind, **fields)
    with pytest.warns(UserWarning, match="no decoder layer trains in FP8"):
        report = overcoat.convert(model)
    assert not report.converted
    assert all(reason in each for each in report.left_alone.values())
    assert not any("overcoat_family" in vars(layer) for layer in layers(model))


def test_an_unknown_activation_runs_as_it_is() -> None:
    model = build("stablelm")
    for layer in layers(model):
        layer.mlp.act_fn = nn.Tanh()
    report = overcoat.convert(model)
    assert "StableLmMLP as it is" in report.layers[0].detail


# ---- a proposed model in use ------------------------------------------------------------------------------------


@some
def test_a_proposed_model_trains_like_its_original(kind: str) -> None:
    model = build(kind)
    inputs = make_batch("left-padded", length=40)
    exact = trained(copy.deepcopy(model), inputs)
    report = overcoat.convert(model)
    found = trained(model, inputs)
    assert {*report.running().values()} <= {"FP8", "loss without logits"}
    assert found.keys() == exact.keys()
    assert abs(found["loss"] - exact["loss"]) < 0.05
    for name, x in exact.items():
        if x.dim() > 1 and not any(part in name for part in ("router", "gate")):
            cosine = torch.cosine_similarity(found[name].float().flatten(), x.float().flatten(), 0)
            assert cosine > 0.95, name


@some
def test_eval_copies_and_the_way_back(kind: str) -> None:
    model = build(kind)
    original, keys = copy.deepcopy(model), list(model.state_dict())
    overcoat.convert(model)
    inputs = make_batch(length=20)
    ids = inputs["input_ids"]
    expected = model(**inputs).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).loss, expected)
    assert list(model.state_dict()) == keys
    assert torch.equal(model.eval()(input_ids=ids).logits, original.eval()(input_ids=ids).logits)
    tokens = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids[:, :7], **tokens), original.generate(ids[:, :7], **tokens))
    assert not overcoat.convert(model.train(), Recipe.bf16()).converted
    assert torch.equal(model(**inputs).loss, original.train()(**inputs).loss)
    assert not any({"overcoat_family", "overcoat_spec"} & set(vars(module)) for module in model.modules())


@pytest.mark.parametrize(
    "kind",
    ["biogpt", pytest.param("falcon", marks=pytest.mark.nightly), pytest.param("phi", marks=pytest.mark.nightly)],
)
def test_compiles_without_graph_breaks(kind: str) -> None:
    """Linear layers without a module of their own; a tuple as the result; one LayerNorm for two branches."""
    model = build(kind)
    overcoat.convert(model)
    inputs, compiled = make_batch(length=24), copy.deepcopy(model)
    for layer in layers(compiled):
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_equal(trained(compiled, inputs), trained(model, inputs))


def test_what_changes_later_is_noticed() -> None:
    model = build("stablelm")
    overcoat.convert(model)
    model.get_submodule("model.layers.0").mlp.act_fn = nn.GELU()
    model.get_submodule("model.layers.1").self_attn.scaling = 0.3
    assert model.get_submodule("model.layers.0").overcoat_ran is None
    inputs = make_batch(length=20)
    with pytest.warns(UserWarning, match="mlp.act_fn has changed"):
        model(**inputs, output_logits=True)
    with pytest.warns(UserWarning, match="self_attn.scaling has changed"):
        model(**inputs, output_logits=True)
    report = overcoat.convert(model, Recipe.paper())
    assert "gelu" in report.layers[0].detail
    assert family(layers(model)[1]).branches.parts[0].mixer.heads.scale == 0.3  # type: ignore[attr-defined]
    model(**inputs)
    assert {*report.running().values()} == {"FP8", "loss without logits"}


def test_arguments_that_were_not_verified_run_the_original() -> None:
    model = build("whisper")
    overcoat.convert(model)
    layer = layers(model)[0]
    states = torch.randn(2, 5, 64).bfloat16()
    with pytest.warns(UserWarning, match="encoder_hidden_states was given"):
        layer(states, encoder_hidden_states=states)
    assert "encoder_hidden_states" in layer.overcoat_ran


@pytest.mark.parametrize("kind", ["phi", "nanochat", "cohere2_moe"])
def test_large_layers_and_weights_that_are_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LARGE", 0)
    for module in (propose, verify):
        monkeypatch.setattr(module, "_found", {})
    with torch.device("meta"):
        model = build(kind)
    report = overcoat.convert(model)
    assert report.converted
    assert all(each.twin for each in report.verified.values())


# ---- the model's end --------------------------------------------------------------------------------------------


ENDS = (
    "granite_swa",  # divides logits
    "cohere2_moe",
    "biogpt",
    "gpt_bigcode",
    "nanochat",  # caps logits
    "recurrent_gemma",  # by another name
    "phi",  # a bias
    "modernbert-decoder",  # a part between hidden states and the linear layer, which has a bias
    "bart",  # its own cross-entropy, of labels that are not shifted
    "opt",  # calls what is inside of its `model`
    "big_bird",  # calls a method of its layers' owner
    "got_ocr2",  # a tower beside the text
    "phi4_multimodal",  # towers inside of it
)
SCALES = {"granite_swa": {"logits_scaling": 0.7}, "cohere2_moe": {"logit_scale": 0.7}}


@pytest.mark.parametrize("kind", ENDS)
def test_the_loss_without_logits_is_the_models_own(kind: str) -> None:
    """In FP32, beside the model's own forward, whatever its signature takes."""
    original: Any = build(kind, **SCALES.get(kind, {})).float()
    model = copy.deepcopy(original)
    report = overcoat.convert(model, Recipe(fp8=False))
    assert report.head is not None
    assert report.head.converted, report.head.detail
    parameters = inspect.signature(type(original).forward).parameters
    options = [{}, {"num_items_in_batch": 9}, {"shift_labels": torch.randint(VOCAB, (2, 20))}]
    for rows in ("causal", "left-padded", "packed")[: 3 if "position_ids" in parameters else 2]:
        for option in options[: 3 if "kwargs" in parameters else 1]:
            inputs = {**make_batch(rows, length=20), **option, "use_cache": False}
            inputs["labels"][:, 3:6] = -100
            expected, found = (trained(each, inputs) for each in (original, model))
            assert model.overcoat_ran == "loss without logits"
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
            assert found.keys() == expected.keys()
            largest = max(float(grad.norm()) for grad in expected.values())
            far = {name: float((found[name] - grad).norm() / largest) for name, grad in expected.items()}
            assert max(far.values()) < 1e-5, max(far, key=far.__getitem__)


@pytest.mark.parametrize("images", [0, 2])
def test_the_loss_without_logits_beside_a_tower(images: int) -> None:
    """Of a kind that is on no list: its text is found by running it."""
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AyaVisionConfig(
        vision_config={**vision, "image_size": 56, "patch_size": 14, "model_type": "siglip_vision_model"},
        text_config={**text, "model_type": "cohere2"},
        image_token_index=7,
    )
    original = AyaVisionForConditionalGeneration(config).train()
    model: Any = copy.deepcopy(original)
    report = overcoat.convert(model, Recipe(fp8=False))
    assert report.head is not None
    assert report.head.converted, report.head.detail
    assert model.overcoat_spec.text == "model.language_model"
    inputs = make_batch("left-padded", length=30)
    inputs["input_ids"][inputs["input_ids"] == 7] = 8
    if images:
        inputs["input_ids"][:, 20:24] = 7
        inputs["pixel_values"] = torch.randn(images, 3, 56, 56)
    expected, found = (trained(each, inputs) for each in (original, model))
    assert model.overcoat_ran == "loss without logits"
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    assert any("vision" in name for name in found) == bool(images)
    largest = max(float(grad.norm()) for grad in expected.values())
    assert max(float((found[name] - grad).norm()) for name, grad in expected.items()) < 1e-5 * largest


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("inkling_text", "its end could not be tried"),  # drops logits of a padded vocabulary
        ("dory", "not nn.Linear"),
    ],
)
def test_other_ends_keep_their_logits(kind: str, reason: str) -> None:
    report = overcoat.convert(build(kind))
    assert report.head is not None
    assert not report.head.converted
    assert reason in report.head.detail


def test_a_model_that_makes_other_labels_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some do where there are images."""
    model: Any = build("stablelm")
    own = type(model).forward

    def forward(self: Any, *args: Any, labels: Any = None, **options: Any) -> Any:
        return own(self, *args, labels=labels.clone() if hasattr(self, "masks_labels") else labels, **options)

    monkeypatch.setattr(type(model), "forward", forward)
    overcoat.convert(model)
    inputs = make_batch(length=20)
    model(**inputs)
    model.masks_labels = True
    with pytest.raises(ValueError, match="made other labels of those that it was given"):
        model(**inputs)
    assert model(**inputs, output_logits=True).loss.isfinite()


def test_checkpoints_and_later_numbers_of_the_layer_itself() -> None:
    model = build("granitemoe")
    overcoat.convert(model)
    inputs = make_batch(length=20)
    expected = model(**inputs).loss
    model.gradient_checkpointing_enable()
    assert torch.equal(model(**inputs).loss, expected)
    assert layers(model)[0].overcoat_ran == "FP8"
    layers(model)[0].residual_multiplier = 0.3
    with pytest.warns(
        UserWarning, match="residual_multiplier has changed since it was converted, and its own forward in FP32"
    ):
        model(**inputs)


# ---- mixers that run as they are ----------------------------------------------------------------------------------

# By model type: what the first layer's mixer is, and fields of the configuration.
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("linear_attn", {"layer_types": ["linear_attention", "full_attention"]}),
    "olmo_hybrid": ("linear_attn", {}),
    "lfm2": ("conv", {"layer_types": ["conv", "full_attention"]}),
    "diffllama": ("self_attn", {}),
    "hunyuan_v1_dense": ("self_attn", {}),
    "bamba": ("mamba", {}),
}
mixers = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("qwen3_5_text", "diffllama") else pytest.mark.nightly) for kind in MIXERS],
)


@mixers
@pytest.mark.parametrize("batch", ["left-padded", "packed"])
def test_an_mlp_is_fused_beside_a_mixer_as_it_is(kind: str, batch: str) -> None:
    mixer, fields = MIXERS[kind]
    model = build(kind, **fields)
    inputs = make_batch(batch, length=40)
    exact = trained(copy.deepcopy(model), {**inputs, "use_cache": False})
    report = overcoat.convert(model)
    assert report.layers[0].own == (mixer.partition(".")[0],)
    assert report.layers[0].grade == "FP8 in part"
    found = trained(model, inputs)
    assert {*report.running().values()} <= {"FP8", "loss without logits"}
    assert abs(found["loss"] - exact["loss"]) < 0.05
    for name, x in exact.items():
        if x.dim() == 2:
            assert torch.cosine_similarity(found[name].float().flatten(), x.float().flatten(), 0) > 0.9, name


def test_a_mixer_that_differs_from_attention_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("stablelm")
    owner, forward = warmer(layers(model)[0])
    monkeypatch.setattr(owner, "forward", forward)
    report = overcoat.convert(model)
    assert report.in_part == dict.fromkeys(report.converted, ("self_attn",))


def by_place(attn: Any, x: Any, tables: Any, mask: Any) -> Any:
    return attn(x, tables, mask)[0]


def by_another_name(attn: Any, x: Any, tables: Any, mask: Any) -> Any:
    return attn(x, tables, mask=mask)[0]


@pytest.mark.filterwarnings("ignore:no decoder layer")
@pytest.mark.parametrize(("call", "in_part"), [(by_place, True), (by_another_name, False)])
def test_a_mask_reaches_a_mixer_whatever_its_place_and_name(
    call: Any, in_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace's own rows have no mask: where None went says nothing by itself."""
    model = build("diffllama")
    layer = type(layers(model)[0])
    own = type(layers(model)[0].self_attn).forward

    def attend(self: Any, x: Any, position_embeddings: Any, attention_mask: Any = None, mask: Any = None) -> Any:
        return own(self, x, position_embeddings, mask if attention_mask is None else attention_mask)

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None, position_embeddings: Any = None, **_: Any):  # type: ignore[no-untyped-def]
        x = hidden_states + call(
            self.self_attn, self.input_layernorm(hidden_states), position_embeddings, attention_mask
        )
        return x + self.mlp(self.post_attention_layernorm(x))

    monkeypatch.setattr(type(layers(model)[0].self_attn), "forward", attend)
    monkeypatch.setattr(layer, "forward", forward)
    inputs = {**make_batch("left-padded", length=40), "use_cache": False}
    exact = trained(copy.deepcopy(model), inputs)
    report = overcoat.convert(model)
    assert bool(report.in_part) == in_part
    found = trained(model, inputs)
    for name, x in exact.items():
        if x.dim() == 2:
            assert torch.cosine_similarity(found[name].float().flatten(), x.float().flatten(), 0) > 0.9, name


def test_a_mixer_gets_flags_by_their_own_names() -> None:
    model: Any = build("gpt_neo")
    overcoat.convert(model)
    layer, got = model.transformer.h[0], {}
    layer.attn.register_forward_pre_hook(lambda _, args, named: got.update(named), with_kwargs=True)
    layer(torch.randn(2, 5, 64).bfloat16(), use_cache=True, output_attentions=False)
    assert layer.overcoat_ran == "FP8"
    assert got["use_cache"] is True
    assert got["output_attentions"] is False


def gemma4(**fields: Any) -> Any:
    """A small dense Gemma 4: heads of 16 and of 32 columns, windows, a factor at the end of each layer."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=0, head_dim=16,
        sliding_window=13, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        per_layer_config={"2": {"head_dim": 32}}, max_position_embeddings=256, **fields,
    )  # fmt: skip
    model = transformers.Gemma4ForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    for place, layer in enumerate(layers(model)):
        layer.layer_scalar.fill_(0.6 + 0.2 * place)
    return model


def test_gemma_4_has_a_factor_and_heads_of_several_widths() -> None:
    model = gemma4()
    inputs = make_batch("packed", length=40)
    exact = trained(copy.deepcopy(model), {**inputs, "use_cache": False})
    report = overcoat.convert(model)
    assert report.in_part == dict.fromkeys(report.converted, ("self_attn",))
    assert len(report.converted) == 3
    assert family(layers(model)[0]).factor == "layer_scalar"
    found = trained(model, inputs)
    assert {*report.running().values()} == {"FP8", "loss without logits"}
    assert abs(found["loss"] - exact["loss"]) < 0.05
    for name, x in exact.items():
        if x.dim() > 1:  # the MLP's linear layers alone in FP8 leave 0.90: norms after them amplify
            assert torch.cosine_similarity(found[name].float().flatten(), x.float().flatten(), 0) > 0.8, name
            assert abs(found[name].float().norm() / x.float().norm() - 1) < 0.2, name
