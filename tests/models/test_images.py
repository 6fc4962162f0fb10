"""Images among a text's tokens, and the batches made for models that see: `pytest tests/models/test_images.py`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import overcoat
from overcoat.kernels import attention
from overcoat.models.dummy_batch import freeze_tower, images, model_class, patches, tokens
from overcoat.models.images import MISMATCH, ImageMask, add, multiply_patches, places, put
from tests.models.test_vision_language import MODELS, make_batch, make_model
from tests.models.zoo import make_model as make_text_model

SEEING, BATCH, LENGTH, SIDE = ("Llava", "Qwen3VL"), 2, 40, 16


def make_inputs(model: nn.Module) -> dict[str, Any]:
    given = images(model, BATCH, LENGTH, SIDE)
    return {**given, **tokens(model, BATCH, LENGTH, given)}


class Ops(TorchDispatchMode):
    """Names of the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# ---- places --------------------------------------------------------------------------------------------------------


def test_places_are_those_of_a_mask() -> None:
    mask = torch.rand(3, 17, generator=torch.Generator().manual_seed(0)) < 0.3
    expected = mask.flatten().nonzero().flatten()
    for count in (len(expected), len(expected) - 2):
        assert torch.equal(places(mask, count), expected[:count])
    assert torch.equal(places(mask, len(expected) + 1), torch.cat([expected, torch.zeros(1, dtype=torch.int64)]))


def test_features_are_put_and_added_as_by_a_mask() -> None:
    """Values and both gradients, bit for bit."""
    torch.manual_seed(0)
    mask = torch.rand(2, 9) < 0.4
    embeds, features = torch.randn(2, 9, 4), torch.randn(int(mask.sum()), 4)

    def scattered(x: Tensor, rows: Tensor) -> Tensor:
        return x.masked_scatter(mask[..., None], rows)

    def added(x: Tensor, rows: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = x[mask] + rows
        return x

    pairs = [
        (lambda x, rows: x.masked_scatter(mask[..., None].as_subclass(ImageMask), rows), scattered),
        (lambda x, rows: put(x, mask[..., None], rows), scattered),
        (lambda x, rows: add(x, mask, rows), added),
    ]
    for ours, theirs in pairs:
        results = []
        for function in (ours, theirs):
            inputs = [embeds.clone().requires_grad_(), features.clone().requires_grad_()]
            y = function(*inputs)
            assert type(y) is Tensor
            y.square().sum().backward()
            results.append([y.detach(), *(x.grad for x in inputs)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", [*SEEING, "InternVL"])
def test_nobody_waits_for_the_gpu(name: str) -> None:
    """On the meta device, where a value that the host asks for is an error, and no op has a shape of its data's."""
    model = make_model(name, torch.bfloat16)
    overcoat.convert(model)
    model = model.to("meta")
    inputs = make_inputs(model) if name in SEEING else {key: x.to("meta") for key, x in make_batch(name).items()}
    inputs.pop("attention_mask", None)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    with Ops() as ops:
        model(**inputs).loss.backward()
    assert not ops.seen & {"masked_scatter", "masked_scatter_backward", "masked_select", "nonzero", "index_put_"}
    assert {"index_copy", "index_fill"} & ops.seen
    assert all(p.grad is not None for p in model.model.language_model.parameters())


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL", "PaliGemma"])
def test_a_row_that_was_cut_is_an_error_in_every_pass(name: str) -> None:
    model, inputs = make_model(name), make_batch(name)
    overcoat.convert(model)
    model(**inputs)
    cut = copy.deepcopy(inputs)
    cut["input_ids"][0, 2] = 1
    with pytest.raises(ValueError, match=r"[Ii]mage features and image tokens do not match"):
        model(**cut)
    model(**inputs)
    text = model.get_submodule(model.overcoat_spec.text)
    assert not {"get_placeholder_mask", "_deepstack_process"} & {*vars(model.model), *vars(text)}
    assert not model.get_submodule(model.overcoat_spec.vision)._forward_pre_hooks


@pytest.mark.gpu
def test_on_a_gpu_a_cut_row_is_an_assertion(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: it takes the CUDA context with it."""
    from benchmarks.session import call_alone

    assert "assert" in call_alone(_cut_row, timeout=120)["error"].lower()


def _cut_row() -> dict[str, Any]:
    model = make_model("Llava").cuda()
    overcoat.convert(model)
    inputs = {key: x.cuda() for key, x in make_batch("Llava").items()}
    for _ in range(2):
        model(**inputs)
        inputs["input_ids"][0, 2] = 1
    torch.cuda.synchronize()
    return {"loss": MISMATCH}


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Grows by the rows that each layer's attention gets on a CPU, and whether it gets a mask; compiled, too."""
    seen: list[tuple[int, bool]] = []

    def plain(qkv: Any, mask: Any, *rest: Any) -> Any:
        seen.append((qkv[0].shape[0], mask is not None))
        return original(qkv, mask, *rest)

    original = attention._plain
    monkeypatch.setattr(attention, "_plain", plain)
    return seen


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("settings", [{}, {"padding": 1}, {"groups": 3}, {"dilation": (1, 1, 2)}, {"kernel_size": 1}])
def test_a_convolution_of_single_patches_is_a_product(settings: dict[str, Any], bias: bool) -> None:
    """Values and gradients; whatever is not one patch at one place is left to the convolution, bit for bit."""
    torch.manual_seed(0)
    size = settings.get("kernel_size", (2, 4, 4))
    convolution = nn.Conv3d(3, 6, **{"kernel_size": size, **settings}, stride=size, bias=bias).double()
    x = torch.randn(5, 3, 2, 4, 7 if "dilation" in settings else 4, dtype=torch.float64)
    results = []
    for wanted in (False, True):
        multiply_patches(convolution, ["layers.0"] * wanted, False)
        leaf = x.clone().requires_grad_()
        y = convolution(leaf)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *convolution.parameters()])])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs) or (not settings and torch.allclose(ours, theirs, rtol=1e-12))


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_tower_multiplies_its_patches_while_it_trains(name: str) -> None:
    """Recomputed in the backward, too; with `eval_fp8` in `eval()`; and not after another recipe."""
    model, batch = make_model(name), make_batch(name)
    embed = model.model.visual.patch_embed

    def convolves() -> bool:
        with Ops() as ops:
            loss = model(**batch).loss
            if model.training:
                loss.backward()
        return "convolution" in ops.seen

    overcoat.convert(model)
    assert not convolves()
    own, embed.forward = embed.forward, functools.partial(checkpoint, embed.forward, use_reentrant=False)
    assert not convolves()
    embed.forward = own
    model.eval()
    assert convolves()
    overcoat.convert(model, eval_fp8=True)
    assert not convolves()
    overcoat.convert(model.train(), filter_fn=lambda _, name: "visual" not in name)
    assert convolves()
    assert type(embed.proj) is nn.Conv3d
    overcoat.convert(model)
    embed.proj.__class__ = type("Wrapped", (type(embed.proj),), {})  # as FSDP2 does
    assert not convolves()
    overcoat.convert(model, overcoat.Recipe.bf16())
    assert convolves()


@pytest.mark.parametrize("name", SEEING)
def test_a_batch_is_what_the_model_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it would find out itself, it computes the same; converted too, images of one length as rows."""
    model = make_model(name)
    inputs = make_inputs(model)
    count = MODELS[name][3] if name == "Llava" else 4
    is_image = inputs["input_ids"] == model.config.image_token_id
    assert is_image.sum(1).tolist() == [count] * BATCH
    assert torch.equal(inputs["labels"] == -100, is_image)
    few = {key: inputs[key] for key in ("input_ids", "labels", "pixel_values", "image_grid_thw") if key in inputs}
    kinds = {"mm_token_type_ids": is_image.int()} if name == "Qwen3VL" else {}
    assert torch.equal(model(**inputs).loss, model(**few, **kinds).loss)
    seen: list[int] = []
    tower = model.model.visual.blocks if name == "Qwen3VL" else model.model.vision_tower.encoder.layers
    tower[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].numel() // args[0].shape[-1]))
    model(**inputs)
    assert seen == [patches(inputs, model.config)[0]]
    overcoat.convert(model := make_model(name))
    rows = seen_rows(monkeypatch)
    assert torch.equal(model(**inputs).loss, model(**few, **kinds).loss)
    assert rows == [(BATCH, False)] * 2 * (2 + 2)


def test_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no vision tower to freeze"):
        freeze_tower(make_text_model(layers=1))
    with pytest.raises(ValueError, match="an image of 16 tokens does not fit into a row of 16"):
        images(make_model("Llava"), BATCH, 16)
    with pytest.raises(ValueError, match="image side 12 must be a multiple of 8 for Qwen3-VL"):
        images(make_model("Qwen3VL"), BATCH, LENGTH, 12)
    with pytest.raises(ValueError, match=r"paligemma is no causal language model .* \(llava, qwen3_vl\)"):
        model_class(make_model("PaliGemma").config)


def test_a_tower_that_was_dropped_is_not_missed() -> None:
    """As after the conversion, to train the text alone."""
    model = make_model("Llava")
    overcoat.convert(model)
    model.model.vision_tower = None
    ids = torch.randint(5, 50, (2, 8))
    assert model(input_ids=ids, labels=ids).loss.isfinite()
