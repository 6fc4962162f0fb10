"""Whether a model keeps the documents of a packed row apart."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import overcoat
from overcoat import Recipe
from overcoat.train.documents import warn_if_documents_mix
from tests.sweep.tiny import tiny


@pytest.mark.parametrize(
    ("kind", "recipe", "mixes"),
    [
        ("llama", Recipe(), False),
        ("llama", Recipe.bf16(), False),
        ("gpt_oss", Recipe(), False),  # experts as they are
        ("diffllama", Recipe(), False),  # attention as it is, which reads the mask
        ("lfm2", Recipe(), True),  # convolutions
        ("bamba", Recipe(), True),  # states
        ("mamba", Recipe(), True),
    ],
)
def test_mixers_that_carry_a_state_over_are_named(kind: str, recipe: Recipe, mixes: bool) -> None:
    fields: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    model = tiny(kind, narrow=True, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overcoat.convert(model, recipe, strict=False)
    state = torch.random.get_rng_state()
    expected: Any = pytest.warns(UserWarning, match="not kept apart") if mixes else contextlib.nullcontext()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with expected:
            warn_if_documents_mix(model, 320, torch.device("cpu"))
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_package_that_is_missing_is_named() -> None:
    model = tiny("qwen3_5_text", narrow=True, layer_types=["linear_attention", "full_attention"])
    overcoat.convert(model)
    with pytest.raises(ValueError, match="flash-linear-attention"):
        warn_if_documents_mix(model, 320, torch.device("cpu"))
    assert model.training
