"""The error of coded states: against a plain computation, and its bookkeeping by type."""

import pytest
import torch
from torch import nn

from benchmarks.state_codes import flash_second, product_first, product_second, regrouped
from benchmarks.state_errors import (
    CANDIDATES,
    INSTALLED,
    analyse,
    error_table,
    fixed_pairs,
    groups_by_type,
    parameter_type,
    sum_errors,
)
from benchmarks.state_variations import vary_first, vary_second
from tests.benchmarks.samples import moments

EPS = 1e-8


def ratio(m, v):
    return m.double() / (v.double().sqrt() + EPS)


@pytest.fixture(scope="module")
def table():
    m, v = moments()
    return error_table({"q": sum_errors(m, v, EPS)})


@pytest.mark.parametrize("pair", [("e4m3x", "e4m3x"), ("sqrt8", "log8"), ("de8x", "e5m2")])
def test_error_is_the_relative_square_error_of_the_ratio(table, pair):
    m, v = moments()
    exact = ratio(m, v)
    decoded = ratio(product_first(m, pair[0]), product_second(v, pair[1]))
    expected = 1e4 * (decoded - exact).square().sum() / exact.square().sum()
    assert table["errors"]["|".join(pair)]["q"] == pytest.approx(float(expected), rel=2e-3)
    assert table["mean_square"]["q"] == pytest.approx(float(exact[v > 0].square().mean()), rel=1e-3)


def test_every_pair_of_the_tables_is_measured(table):
    m, v = moments()
    varied = [(name, "log8") for name in vary_first(m, v, lambda x: x)]
    varied += [("sqrt8", name) for name in vary_second(v, torch.sqrt)]
    wanted = [pair for pair in fixed_pairs() if pair != INSTALLED] + varied
    assert {"|".join(pair) for pair in wanted} <= set(table["errors"])
    assert {candidate.pair for candidate in CANDIDATES} <= set(fixed_pairs())
    assert table["errors"]["exact|exact"]["all"] < 1e-8  # the rounding of FP32


def test_lost_elements_are_counted_and_left_out():
    m, v = moments()
    v[0, 0, 0], m[0, 0, 0] = 1e-6 * v[0, 0, 1], 1e-3 * v[0, 0, 1].sqrt()
    table = error_table({"q": sum_errors(m, v, EPS)})
    lost = (v > 0) & (regrouped(v, 32, flash_second) == 0)
    assert lost[0, 0, 0]
    assert table["lost"]["flash32"]["q"] == pytest.approx(float(lost.sum() / (v > 0).sum()), rel=1e-3)
    assert table["kept_errors"]["flash32|flash32"]["q"] < 0.5 * table["errors"]["flash32|flash32"]["q"]
    assert not {"log8", "e4m3", "e4m3x", "de8", "e5m2"} & set(table["lost"])


def test_sums_add_up():
    m, v = moments()
    whole = sum_errors(m, v, EPS)
    halves = [sum_errors(m[:, part], v[:, part], EPS) for part in (slice(0, 20), slice(20, None))]
    pooled = error_table({"q": halves[0], "mlp": halves[1]})
    for pair, error in error_table({"all": whole})["errors"].items():
        assert pooled["errors"][pair]["all"] == pytest.approx(error["all"], rel=2e-3, abs=1e-12)
    assert pooled["elements"]["all"] == int((v > 0).sum())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.3.self_attn.q_proj.weight", "q"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("model.layers.3.self_attn.o_proj.bias", "o"),
        ("model.layers.3.mlp.gate_proj.weight", "mlp"),
        ("model.layers.3.post_attention_layernorm.weight", "norm"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
    ],
)
def test_parameter_type(name, kind):
    assert parameter_type(name) == kind


def test_unknown_parameter_is_named():
    with pytest.raises(ValueError, match=r"'transformer\.wte\.weight' is of no known type"):
        parameter_type("transformer.wte.weight")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(200, 3, bias=True)
        self.norm = nn.LayerNorm(200, bias=False)


def stepped(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_groups_by_type_keeps_every_element_in_rows():
    model = Tiny()
    optimizer = stepped(model)
    groups = groups_by_type(model, optimizer)
    assert list(groups) == ["q", "norm"]
    m, v = groups["q"]
    assert m.shape == v.shape == (1, 3 * 2 + 1, 128)  # two groups in each row of 200, one in the bias
    weight = optimizer.state[model.q_proj.weight]["exp_avg"]
    assert torch.equal(m[0, 2:4].flatten()[:200], weight[1])
    assert not m[0, 3, 72:].any()


def test_only_fp32_states_are_analysed():
    model = Tiny()
    with pytest.raises(ValueError, match=r"the state of q_proj\.weight is torch\.bfloat16"):
        groups_by_type(model, stepped(model, torch.bfloat16))


def test_analysis_does_not_depend_on_the_chunks(monkeypatch):
    model = Tiny()
    optimizer = stepped(model)
    whole = analyse(model, optimizer, EPS)
    monkeypatch.setattr("benchmarks.state_errors.CHUNK_GROUPS", 2)
    parts = analyse(model, optimizer, EPS)
    assert parts["histograms"] == whole["histograms"]
    assert parts["errors"]["sqrt8|log8"] == pytest.approx(whole["errors"]["sqrt8|log8"], rel=2e-3)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_errors():
    m, v = moments()
    there = error_table({"q": sum_errors(m.cuda(), v.cuda(), EPS)})
    for pair, error in error_table({"q": sum_errors(m, v, EPS)})["errors"].items():
        # A code may differ in a near tie; a search may then choose otherwise.
        assert there["errors"][pair]["q"] == pytest.approx(error["q"], rel=0.02, abs=1e-4), pair
