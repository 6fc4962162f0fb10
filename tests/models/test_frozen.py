"""`Recipe.frozen_weights = "fp8"`: same numbers, 1 byte a weight: `pytest tests/models/test_frozen.py`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from overcoat.models.frozen import FrozenWeight
from tests.models.zoo import make_batch, make_model

peft = pytest.importorskip("peft")


def adapted(kind: str = "llama", **overrides: Any) -> Any:
    model = make_model(kind, layers=2, **{"intermediate_size": 384, **overrides})
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def held(model: nn.Module) -> dict[str, FrozenWeight]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, FrozenWeight)}


def gradients(model: Any) -> dict[str, Tensor]:
    model(**make_batch()).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def through_a_file(what: Any, weights_only: bool = False) -> Any:
    torch.save(what, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(linear_scaling="block"), Recipe.leanest()])
@pytest.mark.parametrize(
    ("kind", "tensor", "block"),
    [
        ("llama", 14, 14),
        ("qwen2", 14, 14),
        ("mixtral", 8, 8),  # experts stay, 2 stacks in each layer
        ("cohere2", 14, 8),  # rows of q and k are reordered
        ("gpt2", 8, 0),  # weights are (K, N)
    ],
)
def test_no_bit_of_the_training_changes(kind: str, tensor: int, block: int, recipe: Recipe) -> None:
    count = block if recipe.linear_scaling == "block" else tensor
    frozen = Recipe(**{**vars(recipe), "frozen_weights": "fp8"})
    model, plain = adapted(kind), adapted(kind)
    if not count:
        with pytest.raises(ValueError, match="rows are taken in another order"):
            overcoat.convert(model, frozen)
        return
    overcoat.convert(plain, recipe)
    report = overcoat.convert(model, frozen)
    assert report.weights[0].startswith(f"{count} frozen weights held in FP8")
    stay = [line for line in report.weights if "stay in 16 bits" in line]
    assert len(stay) == len(report.weights) - 1 == (count < tensor) + (kind == "mixtral")
    assert kind != "mixtral" or stay[-1].startswith("4 frozen weights")
    found, expected = gradients(model), gradients(plain)
    assert set(report.running().values()) <= {"FP8", "loss without logits"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    assert len(held(model)) == count
    assert {weight.held.dtype for weight in held(model).values()} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_layers_that_run_their_own_forward_hold_theirs_too(scaling: Any) -> None:
    model, plain = adapted(attention_dropout=0.1), adapted(attention_dropout=0.1)
    overcoat.convert(plain, Recipe(linear_scaling=scaling))
    report = overcoat.convert(model, Recipe(linear_scaling=scaling, frozen_weights="fp8"))
    assert {row.grade for row in report.layers} == {"linear layers in FP8"}
    torch.manual_seed(3)
    found = gradients(model)
    torch.manual_seed(3)
    expected = gradients(plain)
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    assert held(model)


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_everything_else_reads_decoded_weights(scaling: Any) -> None:
    model = adapted()
    before = dict(model.state_dict())
    overcoat.convert(model, Recipe(linear_scaling=scaling, frozen_weights="fp8"))
    decoded = {name: weight.decoded() for name, weight in held(model).items()}
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert {type(each) for each in after.values()} == {Tensor}
    assert all(torch.equal(after[name], decoded.get(name, each)) for name, each in before.items())
    for name, weight in decoded.items():
        torch.testing.assert_close(weight, before[name], rtol=0.07, atol=1e-4)
    assert through_a_file(after, True).keys() == before.keys()
    assert model.state_dict(keep_vars=True)[name] is dict(model.named_parameters())[name]

    other = adapted().eval()
    other.load_state_dict(after)
    ids = make_batch()["input_ids"]
    copies = (model.eval(), copy.deepcopy(model), through_a_file(model))
    with torch.no_grad():
        expected = other(ids).logits
        assert all(torch.equal(each(ids).logits, expected) for each in copies)
    assert model.generate(input_ids=ids[:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)
    assert all(len(held(each)) == len(decoded) for each in copies)
    # Codes move; the dtype is that of what is decoded.
    assert {weight.dtype for weight in held(model.float()).values()} == {torch.float32}

    overcoat.convert(model.bfloat16().train(), Recipe(linear_scaling=scaling))
    assert not held(model)
    assert all(torch.equal(each, after[name]) for name, each in model.state_dict().items())


def test_a_stack_is_held_whole_or_not_at_all() -> None:
    model = adapted()
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.base_layer.weight.requires_grad_(True)
    report = overcoat.convert(model, Recipe(frozen_weights="fp8"))
    assert report.weights[0].startswith("8 ")
    assert report.weights[1].startswith("4 ")  # q and v of two layers
    found = gradients(model)
    assert sum(name.endswith("k_proj.base_layer.weight") for name in found) == 2


def test_what_would_write_is_refused() -> None:
    model = adapted()
    overcoat.convert(model, Recipe(frozen_weights="fp8"))
    weight = next(iter(held(model).values()))
    with pytest.raises(RuntimeError, match="frozen_weights"):
        weight.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="frozen_weights"):
        model.merge_adapter()
    with pytest.raises(RuntimeError, match="frozen_weights"):
        model.load_state_dict(adapted().state_dict())
    with pytest.raises(ValueError, match="held in FP8"):
        overcoat.stream(model, overcoat.AdamW([each for each in model.parameters() if each.requires_grad]))
    with pytest.raises(ValueError, match="linear_scaling='block'"):
        overcoat.convert(model, Recipe(linear_scaling="block"))
    with pytest.raises(ValueError, match="none is frozen"):
        overcoat.convert(make_model("llama", layers=1), Recipe(frozen_weights="fp8"))
    report = overcoat.convert(model, Recipe.leanest())  # again, in 16 bits
    assert not report.weights
    assert not held(model)
    model.merge_adapter()


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_rows_are_views_that_mean_the_same(scaling: Any) -> None:
    """As FSDP2 cuts them: 100 rows do not end where a block of 128 does."""
    model = adapted()
    overcoat.convert(model, Recipe(linear_scaling=scaling, frozen_weights="fp8"))
    for weight in held(model).values():
        parts, whole = torch.split(weight, 100), weight.decoded()
        assert {type(part) for part in parts} == {FrozenWeight}
        assert torch.equal(torch.cat([part.decoded() for part in parts]), whole)
        assert parts[-1].held.data_ptr() == weight.held.data_ptr() + (len(parts) - 1) * 100 * weight.shape[1]
        assert torch.equal(weight[3:150][100:].decoded(), whole[103:150])
        for rows in (slice(1, None), slice(-100, None), slice(-100, -1), slice(9, 5)):
            assert torch.equal(weight[rows].decoded(), whole[rows])
        for size in ((-1, 4), (2, -1), (2, len(whole) // 2, whole.shape[1])):
            assert torch.equal(weight.view(size), whole.view(size))
        with pytest.raises(RuntimeError, match=r"decoded\(\)"):
            weight.view(-1).sum()
