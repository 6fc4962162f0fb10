"""Masks that only converted layers read: when a model gets them, that they change nothing, and that nobody waits."""

from __future__ import annotations

import itertools
from typing import Any, Optional

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import AttentionMaskInterface, find_packed_sequence_indices, or_masks, sdpa_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.models.llama import modeling_llama

import overcoat
from overcoat import Recipe
from overcoat.kernels.attention import causal_pairs, dense_mask, document_starts
from overcoat.models.masks import causal_mask, check_mask
from tests.models.zoo import KINDS as ZOO
from tests.models.zoo import assert_equal, every_kind, make_batch, make_model, trained
from tests.nightly import mostly_nightly
from tests.waits import waiting_is_an_error

KINDS = ["llama", "qwen2", "qwen3", "starcoder2"]
LENGTH = 61
# A window of 24 tokens; "eager" gets a mask in any case.
WINDOWED = [
    kind for kind, (_, extra) in ZOO.items() if extra.get("sliding_window") and "attn_implementation" not in extra
]


@pytest.fixture
def packing_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for packed sequences, which waits on a GPU, is an error."""

    def wait(*args: object, **kwargs: object) -> None:
        raise AssertionError("looked for packed sequences")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", wait)


def positions() -> torch.Tensor:
    return torch.arange(LENGTH).expand(2, -1)


def converted(kind: str = "llama") -> nn.Module:
    model = make_model(kind, layers=2)
    overcoat.convert(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_loss_and_gradients_without_looking(kind: str, request: pytest.FixtureRequest) -> None:
    model, inputs = converted(kind), make_batch(length=LENGTH)
    expected = trained(model, {**inputs, "position_ids": positions()})
    request.getfixturevalue("packing_unseen")
    assert_equal(trained(model, inputs), expected)


@pytest.mark.parametrize("place", ["the model's file", "the registry", "a subclass"])
def test_masks_that_others_make_are_read(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for prefixes that see each other."""

    def ahead(*index: Any) -> Any:
        return index[3] < 20

    model, inputs = converted(), make_batch(length=LENGTH)
    visible = causal_pairs(LENGTH, 0, torch.device("cpu")) | (torch.arange(LENGTH) < 20)
    expected = trained(model, {**inputs, "attention_mask": visible.expand(2, 1, -1, -1)})
    if place == "the registry":

        def made(*args: Any, **options: Any) -> Any:
            mask_function = or_masks(options["mask_function"], ahead)
            return sdpa_mask(*args, **{**options, "mask_function": mask_function, "allow_is_causal_skip": False})

        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", made)
    elif place == "a subclass":

        class Prefix(modeling_llama.LlamaModel):
            def forward(self, attention_mask: Any = None, **inputs: Any) -> Any:
                mask = visible.expand(2, 1, -1, -1) if attention_mask is None else attention_mask
                return super().forward(attention_mask=mask, **inputs)

        model.model.__class__ = Prefix
    else:
        create = modeling_llama.create_causal_mask
        monkeypatch.setattr(
            modeling_llama, "create_causal_mask", lambda *a, **options: create(*a, **options, or_mask_function=ahead)
        )
    assert_equal(trained(model, inputs), expected)


def test_who_gets_it() -> None:
    ids = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    model = converted()
    for inputs in (ids, {**ids, "use_cache": False}, {"inputs_embeds": torch.zeros(2, LENGTH, 8)}):
        assert causal_mask(model, inputs).shape == (1, 1, 0, 0)
    padding = torch.ones(2, LENGTH)
    assert causal_mask(model, {**ids, "attention_mask": padding}) is padding
    for name, value in (("cache", object()), ("past_key_values", object()), ("use_cache", True)):
        assert causal_mask(model, {**ids, name: value}) is None
    assert causal_mask(model, {**ids, "position_ids": positions()}).shape == (1, 1, 0, 0)
    assert causal_mask(model, {**ids, "position_ids": positions()[:1]}).shape == (1, 1, 0, 0)
    model.config._attn_implementation = "eager"
    assert causal_mask(model, ids) is None
    model.config._attn_implementation = "sdpa"
    for watch in (
        lambda model: model.model.register_forward_pre_hook(lambda *_: None),
        lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
        lambda model: model.model.layers.__setitem__(0, torch.compile(model.model.layers[0])),
        lambda model: setattr(model.model, "forward", model.model.forward),
        lambda model: setattr(model.model.layers[0], "forward", model.model.layers[0].forward),
    ):
        watched = converted()
        watch(watched)
        assert causal_mask(watched, ids) is None
    assert causal_mask(model, {}) is None
    partly = make_model("llama", layers=2)
    overcoat.convert(partly, filter_fn=lambda module, name: not name.endswith(".1"))
    assert causal_mask(partly, ids) is None


MODES = ("train", "packed", "leanest", "eval", "in its original precision")
# A kind whose layers all have the window in every mode, and of two layers one: the others differ in names.
WINDOWS_IN_CI = [*(("mistral", mode) for mode in MODES), ("gemma3", "train"), ("gemma3", "packed")]


@pytest.mark.filterwarnings("ignore:this layer")
@pytest.mark.parametrize(("kind", "mode"), mostly_nightly(itertools.product(WINDOWED, MODES), WINDOWS_IN_CI))
def test_a_sliding_window_is_kept(kind: str, mode: str) -> None:
    """Without a mask of S x S, as with transformers' own, which it makes where somebody watches; in one layer of two
    where a model can have both kinds."""
    mixed = hasattr(make_model(kind, layers=1).config, "layer_types")
    model = make_model(kind, layers=2, **({"layer_types": ["sliding_attention", "full_attention"]} if mixed else {}))
    overcoat.convert(model, Recipe.leanest() if mode == "leanest" else None)
    if mode == "in its original precision":
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.train(mode != "eval")
    inputs = packed_batch(200) if mode == "packed" else make_batch(length=LENGTH)
    given = causal_mask(model, inputs)
    assert given.numel() == (7 if mode == "packed" else 0)
    inputs["output_logits"] = False  # with logits `eval()` is transformers' own
    got = trained(model, inputs)
    place, without = ("layer_types", ["full_attention"] * 2) if mixed else ("sliding_window", None)
    own = getattr(model.config, place)
    setattr(model.config, place, without)
    assert not torch.equal(got["loss"], trained(model, inputs)["loss"])
    setattr(model.config, place, own)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    assert causal_mask(model, inputs) is None
    assert_equal(got, trained(model, inputs))


@pytest.mark.parametrize("kind", every_kind(("llama", "mixtral", "olmoe", "qwen3_moe")))
def test_a_window_that_only_the_configuration_names(kind: str) -> None:
    """It counts where transformers reads it: a Mistral saved as a Llama keeps the name, and sees all tokens."""
    model, inputs = make_model(kind, layers=2, sliding_window=8), make_batch(length=LENGTH)
    overcoat.convert(model)
    got = trained(model, inputs)
    model.get_submodule(model.overcoat_spec.text).register_forward_pre_hook(lambda *_: None)
    assert causal_mask(model, inputs) is None
    assert_equal(got, trained(model, inputs))


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
def test_a_window_that_the_configuration_changes_later(kind: str) -> None:
    """transformers makes its masks of it; some layers also keep what it was."""
    model, inputs = converted(kind), make_batch(length=LENGTH)
    model.config.sliding_window = 8
    got = trained(model, inputs)
    model.model.register_forward_pre_hook(lambda *_: None)  # so that it gets transformers' mask
    assert causal_mask(model, inputs) is None
    assert_equal(got, trained(model, inputs))


@pytest.mark.parametrize("kind", mostly_nightly(["cohere2", "cwm", "exaone4", "ministral"], ["cohere2", "ministral"]))
def test_kinds_of_layers_that_change_later(kind: str) -> None:
    """Layers keep whether they had a window; masks have it by their place and the configuration."""
    for change in (
        lambda model: setattr(model.config, "layer_types", ["full_attention"] * 2),
        lambda model: setattr(model.config, "layer_types", model.config.layer_types[::-1]),
        lambda model: model.model.layers.__delitem__(0),
    ):
        model, inputs = converted(kind), make_batch(length=LENGTH)
        change(model)
        got = trained(model, inputs)
        model.model.register_forward_pre_hook(lambda *_: None)  # so that it gets transformers' mask
        assert_equal(got, trained(model, inputs))


def test_an_attention_of_others_gets_the_mask_that_holds_the_window() -> None:
    """What window it keeps to nobody can know."""

    class Mine(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = [inner]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner[0](*args, **kwargs)

    model, inputs = converted("mistral"), make_batch(length=LENGTH)
    assert causal_mask(model, inputs) is not None
    expected = make_model("mistral", layers=2).eval()(**inputs).loss
    model.model.layers[0].self_attn = Mine(model.model.layers[0].self_attn)
    assert causal_mask(model, inputs) is None
    torch.testing.assert_close(model.eval()(**inputs, output_logits=False).loss, expected, rtol=1e-3, atol=0)


# ---- packed sequences ------------------------------------------------------------------------------------------------

PACKED_LENGTH = 400  # documents in make_batch: 100, 103 and 197 tokens


def packed_batch(length: int = PACKED_LENGTH) -> dict[str, torch.Tensor]:
    """From 192 tokens in a row on documents are long enough to be told by where they begin."""
    return make_batch("packed", length=length)


def wide(kind: str = "llama", recipe: Optional[Recipe] = None, **overrides: Any) -> nn.Module:
    model = make_model(kind, layers=2, **overrides)
    overcoat.convert(model, recipe)
    return model


def test_who_gets_starts() -> None:
    model, inputs = wide(), packed_batch()
    mask = causal_mask(model, inputs)
    assert (mask.dtype, mask.shape) == (torch.int32, (1, 1, 7, 1))
    assert mask.flatten().tolist() == [0, 100, 203, 400, 500, 603, 800]
    one_row = inputs["position_ids"][:1]
    assert torch.equal(causal_mask(model, {**inputs, "position_ids": one_row}), mask)
    guess = causal_mask(model, {**inputs, "position_ids": one_row.to("meta")})
    assert (guess.device.type, guess.shape) == ("meta", (1, 1, 7, 1))  # 2 * 3 of at most 256 tokens

    often = torch.arange(PACKED_LENGTH).remainder(50)[None]
    for other in (
        {"position_ids": often},  # so many documents that a mask costs less
        {"position_ids": inputs["position_ids"][:, :-1]},  # the model will refuse them
        {"position_ids": inputs["position_ids"].expand(3, -1, -1)},
    ):
        assert causal_mask(model, {**inputs, **other}) is None
    padding = torch.ones(2, PACKED_LENGTH)
    assert causal_mask(model, {**inputs, "attention_mask": padding}) is padding  # transformers' rule: no documents then
    for name, value in (("cache", object()), ("past_key_values", object()), ("use_cache", True)):
        assert causal_mask(model, {**inputs, name: value}) is None
    assert causal_mask(model.eval(), inputs) is None


def test_documents_begin_where_transformers_says() -> None:
    """Whatever the positions: they skip, repeat, fall, or begin anywhere. Its flash attention has a rule of its own."""
    every = torch.cartesian_prod(*[torch.arange(-1, 3)] * 5)
    for positions in (every, *every.split(1)):
        mask = dense_mask(document_starts(positions), *positions.shape)[:, 0]
        indices = find_packed_sequence_indices(positions)
        indices = torch.zeros_like(positions) if indices is None else indices
        assert torch.equal(mask, (indices[:, :, None] == indices[:, None]).tril())
        if len(positions) == 1 and positions[0, 0] == positions.min():  # otherwise it leaves the first tokens out
            (starts, _), _ = prepare_fa_kwargs_from_position_ids(positions)
            assert document_starts(positions, skips=True).tolist() == starts.tolist()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_positions_that_skip_inside_a_document(implementation: str) -> None:
    """PoSE. The remedy where they are read as two documents is a mask of ones."""
    model, inputs = wide(), make_batch(batch=1, length=200)
    inputs["position_ids"] = torch.cat([torch.arange(100), torch.arange(500, 600)])[None]
    whole = model(**inputs, attention_mask=torch.ones(1, 200)).loss
    model.config._attn_implementation = implementation
    assert (abs(model(**inputs).loss - whole) < 1e-4) == (implementation == "flash_attention_2")
    torch.testing.assert_close(model(**inputs, attention_mask=torch.ones(1, 200)).loss, whole, rtol=1e-4, atol=0)


def test_lengths_that_the_caller_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' name, as its DataCollatorWithFlattening gives them: nobody looks into the position ids."""
    model = wide()
    features = [{"input_ids": list(range(length))} for length in (100, 130, 170)]
    inputs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    inputs = {name: inputs[name] for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q")}
    known = inputs.pop("cu_seq_lens_q")
    expected = model(**inputs).loss

    def wait(*args: object) -> None:
        raise AssertionError("looked for documents")

    monkeypatch.setattr("overcoat.models.masks.document_starts", wait)
    assert torch.equal(model(**inputs, cu_seq_lens_q=known).loss, expected)
    one = torch.tensor([0, PACKED_LENGTH], dtype=torch.int32)
    assert causal_mask(model, {**inputs, "cu_seq_lens_q": one}).shape == (1, 1, 0, 0)
    assert torch.equal(model(**inputs, cu_seq_lens_q=known.long()).loss, expected)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([0, 5, 10], r"from 0 up to 800.*ends with \[0, 5, 10\]"),
        ([3, 400, 800], r"from 0 up to 800.*begins with \[3, 400, 800\]"),
        ([0, 300, 800], "every multiple of 400"),
        ([0, 400, 1600], "from 0 up to 800"),
        ([0, 100, 90, 400, 800], "from 0 up to 800"),
        ([0, 800], "N is 2 or more"),
        ([[0, 400, 800]], r"int64 \(1, 3\)"),
        ([0.0, 400.0, 800.0], "it is torch.float32"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: list, told: str) -> None:
    """Before anything is computed: the tokens of no document, or of one over two rows, would be quietly wrong."""
    model = wide()
    tokens = torch.zeros(2, 400, dtype=torch.int64)
    positions = torch.cat([torch.arange(100), torch.arange(300)]).repeat(2, 1)
    inputs = {"input_ids": tokens, "labels": tokens, "cu_seq_lens_q": torch.tensor(lengths)}
    with pytest.raises(ValueError, match=told):
        model(**inputs, position_ids=positions)


def test_lengths_without_positions_are_refused() -> None:
    tokens = torch.zeros(1, PACKED_LENGTH, dtype=torch.int64)
    with pytest.raises(ValueError, match="without position_ids"):
        wide()(input_ids=tokens, labels=tokens, cu_seq_lens_q=torch.tensor([0, 100, PACKED_LENGTH]))


RECIPES = {
    "default": Recipe(),
    "blocks kept": Recipe(checkpoint="block"),
    "blocks offloaded": Recipe(offload_blocks=1),
    "block scales": Recipe(linear_scaling="block"),
    "attention in 16 bits": Recipe(kept_attention="bf16"),
}


PACKED = [
    *((kind, "default", "fp8") for kind in (*KINDS, "mistral")),
    *(("llama", recipe, "fp8") for recipe in RECIPES if recipe != "default"),
    *(("llama", "default", layer) for layer in ("hooked", "in eval", "reentrant", "not reentrant")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "recipe", "layer"), mostly_nightly(PACKED, PACKED[::2]))
def test_packed_sequences_give_the_same(kind: str, recipe: str, layer: str) -> None:
    """As with transformers' own mask, which it makes where somebody watches; a layer in its original precision too."""
    model, inputs = wide(kind, RECIPES[recipe]), packed_batch(200)
    if layer == "hooked":
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    elif layer == "in eval":
        model.model.layers[1].eval()
    elif layer != "fp8":
        model.gradient_checkpointing_enable({"use_reentrant": layer == "reentrant"})
    assert causal_mask(model, inputs).dtype == torch.int32
    got = trained(model, inputs)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert causal_mask(model, inputs) is None
    assert_equal(got, trained(model, inputs))


def test_packed_sequences_in_eval_mode_are_masked_once_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by each layer: with and without logits the loss is the original model's."""
    monkeypatch.setattr("overcoat.models.masks.dense_mask", None)
    inputs = {**packed_batch(), "use_cache": False}
    expected = make_model("llama", layers=2).eval()(**inputs).loss
    model = wide().eval()
    assert torch.equal(model(**inputs).loss, expected)
    torch.testing.assert_close(model(**inputs, output_logits=False).loss, expected, rtol=1e-5, atol=0)
    del inputs["position_ids"]
    assert abs(model(**inputs).loss - expected) > 1e-4 * expected


def test_starts_are_not_taken_for_another_mask() -> None:
    for shape in ((1, 1, 1, 8), (2, 1, 8, 1), (1, 1, 1, 1), (1, 1, 8)):
        with pytest.raises(ValueError, match="attention_mask is "):
            check_mask(torch.ones(shape, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match=r"attention_mask is torch.int32; .* Write mask.bool\(\)"):
        check_mask(torch.ones(1, 1, 8, 8, dtype=torch.int32), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_not_wait_for_a_model(kind: str, packed: bool) -> None:
    model = (wide if packed else converted)(kind).cuda()
    batch = packed_batch() if packed else make_batch(length=LENGTH)
    if packed:
        batch["cu_seq_lens_q"] = document_starts(batch["position_ids"])
    inputs = {name: value.cuda() for name, value in batch.items()}
    optimizer = overcoat.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step(clip_grad_norm=1.0)
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with waiting_is_an_error():
        step()
    assert model(**inputs).loss.isfinite()
