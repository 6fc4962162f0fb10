"""The check at `convert`: layers that are right agree with their block, faults are found, the model stays as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import overcoat
from overcoat.models import convert, verify
from overcoat.models.families import llama
from overcoat.models.family import Family, decoder_layers, family_of
from tests.models.zoo import ENCODERS, every_kind, make_encoder, make_model

# Its owner is given the rotation from outside.
NOT_CAUGHT = ("pixtral",)
LAYER = "model.layers.0"


def family(model: nn.Module, name: str = LAYER) -> Family:
    found = family_of(model.get_submodule(name))
    assert found is not None
    return found


def result(model: nn.Module, name: str = LAYER, **changes: Any) -> verify.Verified:
    return verify.verify(model, name, family(model, name)._replace(**changes))


@pytest.mark.parametrize("kind", every_kind())
def test_layers_of_every_kind_agree(kind: str) -> None:
    model = make_model(kind)
    for name in decoder_layers(model):
        found = result(model, name)
        assert found.reason is None
        assert found.decibels is not None
        assert found.decibels > 115, found


@pytest.mark.parametrize("kind", ENCODERS)
def test_layers_of_encoders_agree(kind: str) -> None:
    model = make_encoder(kind)
    for name in decoder_layers(model):
        found = result(model, name)
        assert found.made_up == (kind in NOT_CAUGHT), found
        assert found.decibels is not None
        assert found.decibels > 115


# ---- faults ------------------------------------------------------------------------------------------------------

Change = Callable[[Any, pytest.MonkeyPatch], Any]
LLAMA = "transformers.models.llama.modeling_llama"


def scaled(target: str, name: str, factor: float) -> Change:
    """Make a function of a library return `factor` times its result."""

    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        owner: Any = F if target == "F" else __import__(target, fromlist=[""])
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        last = name.rpartition(".")[2]
        original = getattr(owner, last)

        def times(*args: Any, **kwargs: Any) -> Any:
            y = original(*args, **kwargs)
            return tuple(factor * each for each in y) if isinstance(y, tuple) else factor * y

        patch.setattr(owner, last, times)

    return change


def attribute(path: str, value: Any) -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, value)

    return change


def rope_interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def other_norm(layer: Any, patch: pytest.MonkeyPatch) -> None:
    norm = layer.input_layernorm
    norm.forward = lambda x: F.layer_norm(x, (256,)) * norm.weight


def wrapped(layer: Any, patch: pytest.MonkeyPatch) -> None:
    linear = layer.self_attn.q_proj
    linear.forward = lambda x: 0.9 * F.linear(x, linear.weight)


def other_attention(layer: Any, patch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    kinds = AttentionInterface._global_mapping
    original = kinds["sdpa"]
    patch.setitem(kinds, "sdpa", lambda *a, **k: (1.2 * original(*a, **k)[0], None))


FAULTS: dict[str, Change] = {
    "is_causal": attribute("self_attn.is_causal", False),
    "dropout 0.5": attribute("self_attn.attention_dropout", 0.5),
    "dropout 0.1": attribute("self_attn.attention_dropout", 0.1),
    "dropout 0.02": attribute("self_attn.attention_dropout", 0.02),
    "forward hook": lambda layer, patch: layer.mlp.register_forward_hook(lambda m, a, y: 0.9 * y),
    "backward hook": lambda layer, patch: layer.mlp.register_full_backward_hook(lambda m, dx, dy: (0.5 * dx[0],)),
    "tanh": attribute("mlp.act_fn", nn.Tanh()),
    "gelu": attribute("mlp.act_fn", nn.GELU()),
    "eps": lambda layer, patch: setattr(layer.input_layernorm, "variance_epsilon", 1e-3),
    "LayerNorm": other_norm,
    "rotation x 1.1": scaled(LLAMA, "apply_rotary_pos_emb", 1.1),
    "rotation of neighbours": lambda layer, patch: patch.setattr(f"{LLAMA}.rotate_half", rope_interleaved),
    "F.linear x 0.95": scaled("F", "linear", 0.95),
    "F.linear x 0.99": scaled("F", "linear", 0.99),
    "F.silu": lambda layer, patch: patch.setattr(F, "silu", lambda x, inplace=False: F.relu(x)),
    "attention x 1.2": other_attention,
    "LlamaMLP x 2": scaled(LLAMA, "LlamaMLP.forward", 2.0),
    "q_proj x 0.9": wrapped,
    "a norm left out": lambda layer, patch: setattr(layer.post_attention_layernorm, "forward", lambda x: x),
    "another scale of scores": lambda layer, patch: patch.setattr(
        type(layer), "forward", _with(type(layer).forward, layer.self_attn)
    ),
}


def _with(forward: Any, attention: Any) -> Any:
    """A layer's forward that scales what enters attention's queries: what a new release might do."""

    def changed(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        return forward(self, hidden_states, *args, **{**kwargs, "position_embeddings": (1.01 * cos, 1.01 * sin)})

    return changed


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(layers=1)
    # The proposal is of the layer as it was: rules that read the layer's attributes have no say here.
    branches = family(model).branches(model.get_submodule(LAYER), 1)
    eps, norms = branches[0].pre.variance_epsilon, family(model)
    FAULTS[fault](model.get_submodule(LAYER), monkeypatch)
    proposed = norms.branches if fault not in ("eps", "is_causal") else _as_before(norms, eps)
    found = result(model, branches=proposed)
    assert found.difference is not None, found
    assert found.decibels is not None
    assert found.decibels < 90


def _as_before(family: Family, eps: float) -> Callable[[Any, int], Any]:
    """Branches of a layer with the eps and the causal attention that it had."""

    def branches(layer: Any, batch: int) -> Any:
        first, *rest = family.branches(layer, batch)
        norm = mock.Mock(spec=["weight", "variance_epsilon"], weight=first.pre.weight, variance_epsilon=eps)
        mixer = first.mixer._replace(heads=first.mixer.heads._replace(causal=True))
        return (first._replace(pre=norm, mixer=mixer), *rest)

    return branches


class Halved(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 0.5 * y if func is F.linear else y


def test_a_mode_of_the_moment_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a forward it has: there layers look for modes themselves."""
    monkeypatch.setattr(verify, "_found", {})
    model = make_model(layers=1)
    with Halved(), torch.device("meta"):
        found = result(model)
    assert found.decibels is not None
    assert found.difference is None


MISREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "multipliers": ("granite", {"branches": llama.branches}),
    "no rotation": ("smollm3", {"branches": llama.branches}),
    "neighbours": ("helium", {"branches": llama.branches}),
    "clip": ("olmo", {"branches": llama.branches}),
    "plus one": ("gemma", {"plus_one": False}),
    "q's scale": ("ministral3", {"q_scale": None}),
    "mean": ("olmo", {"centered": False}),
}


@pytest.mark.parametrize("name", MISREAD)
def test_families_that_are_read_wrongly_are_found(name: str) -> None:
    kind, changes = MISREAD[name]
    # SmolLM3 leaves the rotation out in every fourth layer.
    place = "model.layers.3" if kind == "smollm3" else LAYER
    assert result(make_model(kind), place, **changes).difference is not None


def test_erf_computed_as_tanh_is_found() -> None:
    model = make_model("starcoder2", layers=1)
    model.get_submodule(LAYER).mlp.act = nn.GELU()
    found = result(model)
    assert found.difference is not None
    assert found.decibels is not None
    assert 40 < found.decibels < 90


def test_a_window_that_is_read_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "window_of", lambda owner: 0)
    monkeypatch.setattr(verify, "_found", {})
    found = result(make_model("mistral", layers=1))
    assert found.difference is not None
    assert "starts" in found.compared


def test_what_changes_no_number_passes() -> None:
    model = make_model(layers=1)
    model.get_submodule(LAYER).mlp.register_forward_hook(lambda *a: None)
    assert result(model).difference is None


# ---- around it ---------------------------------------------------------------------------------------------------


@pytest.fixture
def misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite is proposed as Llama."""
    monkeypatch.setattr(convert, "family_of", lambda layer: family_of(layer)._replace(branches=llama.branches))


@pytest.mark.usefixtures("misread")
def test_a_layer_that_differs_keeps_its_own_forward() -> None:
    model = make_model("granite", layers=2)
    with pytest.warns(UserWarning, match=r"its own forward in FP32 agrees with the proposed block only to -?\d+ dB"):
        report = overcoat.convert(model)
    assert report.converted == []
    assert len(report.in_linear_layers) == 2
    assert type(model.get_submodule(LAYER)).__module__.startswith("transformers")


def test_the_report_says_it() -> None:
    report = overcoat.convert(make_model("olmo3"))
    decibels = min(each.decibels or 0.0 for each in report.verified.values())
    assert f"4 layers verified to {decibels:.0f} dB\n" in str(report)
    assert "2 layers verified to 128 dB on made-up arguments\n" in str(overcoat.convert(make_encoder("pixtral")))


def test_a_kind_is_verified_once() -> None:
    result(make_model(seed=3))
    with mock.patch.object(verify, "_verify", side_effect=AssertionError("again")):
        assert result(make_model(seed=4), "model.layers.1").decibels is not None


def test_nothing_of_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_found", {})
    model = make_model("gemma3", layers=2).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config.to_dict())
    with torch.inference_mode():
        assert result(model).decibels is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, before[name])
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_weights_that_are_not_there_are_not_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_found", {})
    with torch.device("meta"):
        model = make_model(kind, layers=2)
    found = [result(model, name) for name in decoder_layers(model)]
    assert all(each.decibels is not None and not each.twin for each in found), found


@pytest.mark.parametrize("kind", every_kind(("llama", "gemma2", "gpt_oss", "gpt2")))
def test_a_large_layer_is_verified_on_a_small_twin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_found", {})
    monkeypatch.setattr(verify, "LARGE", 0)
    model = make_model(kind, layers=2)
    for name in decoder_layers(model):
        found = result(model, name)
        assert found.twin, found
        assert found.decibels is not None
        assert found.decibels > 110, found


def test_zeros_and_ones_hide_nothing() -> None:
    """Gemma's norms multiply by 1 + 0 when they are fresh, and o_proj may begin at zero."""
    model = make_model("gemma", layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert result(model, plus_one=False).difference is not None


def test_decibels() -> None:
    x = torch.ones(100)
    assert verify.decibels(x, x * 1.1) == pytest.approx(20)
    assert verify.decibels(x, x) == 200
    assert verify.decibels(x, x * math.nan) == verify.decibels(0 * x, x) == -math.inf
