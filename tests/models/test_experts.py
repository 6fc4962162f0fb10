"""Experts found by numbers, converted with the layers around them, and left alone where something has changed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

import overcoat
from overcoat import Recipe
from overcoat.block.experts import Experts
from overcoat.models import experts as module
from overcoat.models.experts import Fp8Experts, convert_experts, find_experts, restore_experts
from tests.sweep.tiny import tiny, tiny_config

FOUND = {
    "mixtral": Experts("silu"),
    "gpt_oss": Experts("quick_gelu", transposed=True, interleaved=True, limit=7.0, shift=1.0),
    "nemotron_h": Experts("relu2", gated=False),
    "deepseek_v3": Experts("silu"),
    "aria_text": Experts("silu", transposed=True),
}


def experts_of(model) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, Fp8Experts) or type(each).__name__.endswith("Experts")]


@pytest.fixture(scope="module")
def mixtral():
    return tiny("mixtral")


@pytest.mark.parametrize("kind", FOUND)
def test_what_they_compute_is_found(kind):
    assert find_experts(experts_of(tiny(kind))[0]) == FOUND[kind]


@pytest.mark.parametrize(
    "change",
    [
        lambda each: setattr(each, "act_fn", nn.Tanh()),
        lambda each: setattr(each, "forward", lambda *args: args[0]),
        lambda each: setattr(each, "scale", nn.Parameter(torch.ones(1))),
        lambda each: setattr(each, "down_proj", nn.Parameter(each.down_proj.detach()[:, :, ::2].contiguous())),
        lambda each: setattr(each, "_is_expert_parallel", True),
        lambda each: setattr(each, "act_fn", nn.Sequential(each.act_fn, nn.Dropout(0.5)).eval()),
        lambda each: setattr(each, "_apply_gate", lambda z: z.chunk(2, -1)[0]),
        lambda each: each.register_buffer("scale", torch.ones(1)),
    ],
)
def test_others_are_left_alone(mixtral, change):
    each = copy.deepcopy(experts_of(mixtral)[0])
    assert find_experts(each) == FOUND["mixtral"]
    change(each)
    assert find_experts(each) is None


def test_experts_that_compute_nothing_are_not_verified():
    """LongCat's: 1 of 129, which few tokens visit."""
    config = tiny_config("longcat_flash", n_routed_experts=128, zero_expert_num=1)[1]
    assert find_experts(LongcatFlashExperts(config)) is None
    config.zero_expert_num = 0
    assert find_experts(LongcatFlashExperts(config)) == Experts("silu")


def test_another_formula_is_not_verified(mixtral):
    each = copy.deepcopy(experts_of(mixtral)[0])
    each.act_fn = ACT2FN["gelu"]
    assert find_experts(each) == Experts("gelu")
    each.act_fn = nn.Sigmoid()
    assert find_experts(each) is None


def test_the_report_says_so_and_the_model_goes_back(mixtral):
    model = copy.deepcopy(mixtral).train()
    report = overcoat.convert(model, Recipe())
    assert "experts in FP8" in str(report)
    assert {row.grade for row in report.layers} == {"FP8"}
    assert all(isinstance(each, Fp8Experts) for each in experts_of(model))
    assert type(experts_of(model)[0]).__name__ == "MixtralExperts"
    ids = torch.arange(40)[None] % 90
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert experts_of(model)[0].gate_up_proj.grad.isfinite().all()
    plain = overcoat.convert(model, Recipe.bf16())
    assert not plain.converted
    assert not any(isinstance(each, Fp8Experts) for each in model.modules())
    assert not any(name.startswith("overcoat_") for each in experts_of(model) for name in vars(each))


def test_in_eval_they_are_their_own_and_a_change_is_told(mixtral, monkeypatch):
    model = copy.deepcopy(mixtral)
    (name, each), *_ = convert_experts(model, Recipe(), False).items()
    assert name.endswith("experts")
    x, index = torch.randn(9, 256).bfloat16(), torch.tensor([[0, 2]] * 9)
    weights = torch.full((9, 2), 0.5).bfloat16()
    own = copy.deepcopy(mixtral).get_submodule(name)(x, index, weights)
    each.eval()
    assert torch.equal(each(x, index, weights), own)
    each.train()
    assert not torch.equal(each(x, index, weights), own)
    each.act_fn = ACT2FN["gelu"]
    with pytest.warns(UserWarning, match="original precision"):
        changed = each(x, index, weights)
    each.act_fn, each.added = copy.deepcopy(mixtral.get_submodule(name).act_fn), nn.Parameter(torch.ones(1))
    with pytest.warns(UserWarning, match="other parameters"):
        assert torch.equal(each(x, index, weights), own)
    del each.added
    each.act_fn = ACT2FN["gelu"]
    restore_experts(model)
    assert torch.equal(each(x, index, weights), changed)
    convert_experts(model, Recipe(), True)
    each.eval()
    assert not torch.equal(each(x, index, weights), changed)


def use_own(each):
    each.config = copy.copy(each.config)
    each.config._experts_implementation = "own"


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.act_fn.register_forward_hook(lambda module, given, result: result * 2),
        lambda each: setattr(each.act_fn, "forward", torch.tanh),
        use_own,
    ],
)
def test_changes_inside_them_and_other_implementations_are_told(mixtral, monkeypatch, change):
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "own", lambda module, x, index, weights: x * 3)
    each = convert_experts(copy.deepcopy(mixtral), Recipe(), False).popitem()[1].train()
    own = copy.deepcopy(experts_of(mixtral)[-1])
    given = torch.randn(9, 256).bfloat16(), torch.tensor([[0, 2]] * 9), torch.full((9, 2), 0.5).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        each(*given)
    change(each)
    change(own)
    with pytest.warns(UserWarning, match="has changed"):
        assert torch.equal(each(*given), own(*given))


def test_another_implementation_is_left_alone(mixtral, monkeypatch):
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "own", lambda module, x, index, weights: x * 3)
    each = copy.deepcopy(experts_of(mixtral)[0])
    use_own(each)
    assert find_experts(each) is None


def test_what_changed_before_code_is_compiled_is_told(mixtral):
    model = copy.deepcopy(mixtral).train()
    each, *_ = convert_experts(model, Recipe(), False).values()
    x, index, weights = torch.randn(9, 256).bfloat16(), torch.tensor([[0, 2]] * 9), torch.ones(9, 2).bfloat16()
    compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, index, weights), each(x, index, weights))
    torch._dynamo.reset()
    each.act_fn = ACT2FN["gelu"]
    each.config._experts_implementation = "grouped_mm"  # eager's loop has as many turns as data say
    with pytest.warns(UserWarning, match="original precision"):
        found = torch.compile(each, backend="aot_eager", fullgraph=True)(x, index, weights)
    restore_experts(model)
    assert torch.equal(found, each(x, index, weights))


def test_a_limit_without_end_is_none(mixtral):
    each = copy.deepcopy(experts_of(mixtral)[0])
    each.limit = float("inf")
    assert find_experts(each) == FOUND["mixtral"]


def test_small_ones_are_left_alone(mixtral, monkeypatch):
    monkeypatch.setattr(module, "NARROW", 4096)
    assert find_experts(experts_of(mixtral)[0]) is None


@pytest.mark.parametrize("kind", ["olmoe", "gpt_oss"])
def test_twenty_steps_have_the_losses_of_bf16(kind):
    """Their mean within 1%, the router trained too, of a model that learns its rows by heart."""
    ids = torch.randint(0, 90, (2, 64), generator=torch.Generator().manual_seed(1))
    losses: list[list[float]] = []
    for convert in (False, True):
        model = tiny(kind).float().train()
        if convert:
            assert len(convert_experts(model, Recipe(), False)) > 0
        optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
        losses.append([])
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss))
    assert losses[0][-1] < 0.8 * losses[0][0], "it has learned nothing"
    plain, ours = map(sum, losses)
    assert abs(ours / plain - 1) < 0.01, losses


def test_layers_of_one_kind_are_searched_once(monkeypatch):
    searched, plain = [], module._verified
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "_verified", lambda *given: searched.append(given) or plain(*given))
    model = tiny("mixtral")
    overcoat.convert(model)
    assert sum(isinstance(each, Fp8Experts) for each in model.modules()) > 1
    assert len(searched) == 1
