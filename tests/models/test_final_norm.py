"""The fused norm at a converted model's end: what it computes, when, and that it leaves no trace."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import overcoat
from overcoat import Recipe
from overcoat.models import final_norm
from overcoat.models.final_norm import FinalNorm, fused_final_norm
from tests.emulation import sqnr
from tests.models.zoo import make_batch, make_model

RMS_KINDS = ["llama", "mistral", "qwen2", "qwen3"]
ONLY_HEAD = Recipe(fp8=False)


def final(model: nn.Module) -> nn.Module:
    return model.get_submodule("model.norm")


@pytest.mark.parametrize("kind", RMS_KINDS)
def test_it_is_fused_for_the_lean_loss_alone(kind: str) -> None:
    original = make_model(kind, layers=1)
    model = copy.deepcopy(original)
    overcoat.convert(model, ONLY_HEAD)
    results = []
    final(model).register_forward_hook(lambda _module, inputs, result: results.append((inputs[0], result)))
    inputs = make_batch()
    model(**inputs)
    model(**inputs, output_logits=True)
    model.eval()(**inputs)
    exact = final(copy.deepcopy(original).double())(results[0][0].double())
    twice_rounded = final(original)(results[0][0])
    assert sqnr(exact, results[0][1]) > sqnr(exact, twice_rounded) + 1
    assert torch.equal(results[1][1], twice_rounded)
    assert torch.equal(results[2][1], twice_rounded)


def test_an_eps_that_is_an_integer_is_taken_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, ONLY_HEAD)
    final(model).variance_epsilon = 1
    given: list[float] = []
    plain = final_norm.final_norm
    monkeypatch.setattr(final_norm, "final_norm", lambda x, weight, eps: (given.append(eps), plain(x, weight, eps))[1])
    model(**make_batch())
    assert [type(eps) for eps in given] == [float]


def test_it_is_switched_off_after_an_error() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, ONLY_HEAD)
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))
    assert not final(model).overcoat_fused


def test_it_keeps_its_input_and_a_number_for_each_token() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, ONLY_HEAD)
    with overcoat.memory.record_kept(model) as kept:
        model(**make_batch())
    rows = {row.name: (row.shape, row.dtype) for row in kept.rows if row.op == "final_norm"}
    tokens, hidden = make_batch()["input_ids"].numel(), final(model).weight.shape[0]
    assert rows == {"x": ((tokens, hidden), torch.bfloat16), "rstd": ((tokens,), torch.float32)}


def test_it_goes_with_the_lean_loss() -> None:
    model = make_model("llama", layers=1)
    before = type(final(model))
    overcoat.convert(model)
    assert isinstance(final(model), FinalNorm)
    overcoat.convert(model, Recipe(head=None))
    assert type(final(model)) is before


@pytest.mark.parametrize("kind", ["starcoder2", "llama"])
def test_what_is_not_transformers_own_stays(kind: str) -> None:
    """LayerNorm, and a norm whose forward somebody has replaced."""
    model = make_model(kind, layers=1)
    norm = final(model)
    if kind == "llama":
        norm.forward = norm.forward
    before = type(norm)
    overcoat.convert(model)
    assert type(norm) is before


def test_a_weight_of_another_dtype_takes_the_original_way() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, ONLY_HEAD)
    norm = final(model).float()
    with fused_final_norm(model):
        assert norm(torch.ones(1, 2, norm.weight.shape[0], dtype=torch.bfloat16)).dtype == torch.float32


def test_hooks_see_it_and_it_can_be_pickled() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, ONLY_HEAD)
    norm = pickle.loads(pickle.dumps(final(model)))
    assert isinstance(norm, FinalNorm)
    seen = []
    norm.register_forward_hook(lambda _module, _inputs, result: seen.append(result))
    result = norm(torch.ones(1, 2, norm.weight.shape[0], dtype=torch.bfloat16))
    assert seen[0] is result
