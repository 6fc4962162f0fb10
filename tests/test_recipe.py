"""`Recipe`: names, validation, immutability. `pytest tests/test_recipe.py`."""

from __future__ import annotations

import pytest

from overcoat import Recipe


def test_names_are_what_the_documents_say():
    assert Recipe() == Recipe("sqrt8", 128, "8bit", None, "tensor", "e5m2", True)
    assert Recipe.paper() == Recipe(kept_format="e4m3", group_size=16, kept_attention="bf16")
    assert Recipe.leanest() == Recipe(checkpoint="block")
    assert Recipe.bf16() == Recipe(fp8=False, head=None)


@pytest.mark.parametrize("name", ["default", "paper", "leanest", "bf16"])
def test_from_name_gives_the_same_recipe(name):
    expected = Recipe() if name == "default" else getattr(Recipe, name)()
    assert Recipe.from_name(name) == expected


def test_overrides_replace_only_their_fields():
    recipe = Recipe.from_name("paper", group_size=32, grad_format="e4m3")
    assert recipe == Recipe(kept_format="e4m3", group_size=32, kept_attention="bf16", grad_format="e4m3")


def test_gradients_with_block_scales_are_e4m3():
    assert Recipe(linear_scaling="block").grad_format == "e4m3"
    assert Recipe.from_name("leanest", linear_scaling="block").grad_format == "e4m3"
    with pytest.raises(ValueError, match="e5m2"):
        Recipe(linear_scaling="block", grad_format="e5m2")


@pytest.mark.parametrize("value", [-1e-4, float("inf"), float("nan"), "1e-4", True])
def test_a_z_loss_is_a_weight(value):
    with pytest.raises(ValueError, match=r"Recipe.z_loss = .* 0 \(off\), a weight above"):
        Recipe(z_loss=value)


def test_a_z_loss_needs_the_loss_that_computes_it():
    assert Recipe(z_loss=1e-4).z_loss == 1e-4
    with pytest.raises(ValueError, match=r"z_loss = 0.0001 is part of the loss that Recipe.head computes"):
        Recipe(z_loss=1e-4, head=None)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("kept_format", "fp4", "'sqrt8', 'e4m3', 'int8'"),
        ("group_size", 0, "16, 32, 64, 128"),
        ("group_size", 256, "16, 32, 64, 128"),
        ("kept_attention", "fp8", "'8bit', 'bf16'"),
        ("checkpoint", "layer", "None, 'block'"),
        ("checkpoint", False, "None, 'block'"),
        ("linear_scaling", "row", "'tensor', 'block'"),
        ("grad_format", "bf16", "'e5m2', 'e4m3'"),
        ("fp8", "no", "True, False"),
        ("offload_blocks", -1, "'all'"),
        ("offload_blocks", True, "'all'"),
        ("offload_blocks", "most", "'all'"),
    ],
)
def test_wrong_values_are_named_with_the_remedy(field, value, remedy):
    with pytest.raises(ValueError, match=rf"Recipe\.{field} = {value!r} .*{remedy}"):
        Recipe(**{field: value})


def test_unknown_names_are_errors_that_list_the_known():
    with pytest.raises(ValueError, match=r"'coat'.*default, paper, leanest, bf16"):
        Recipe.from_name("coat")
    with pytest.raises(ValueError, match=r"'groupsize'.*group_size"):
        Recipe.from_name("paper", groupsize=16)
