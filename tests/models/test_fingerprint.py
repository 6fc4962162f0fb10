"""What changes after the conversion is noticed at the next forward: the numbers are verified again, and stay right."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

import overcoat
from overcoat.models import verify
from overcoat.models.family import original_class
from overcoat.models.fingerprint import Fingerprint
from tests.models.zoo import assert_equal, make_batch, make_encoder, make_inputs, make_model, trained

Change = Callable[[Any, pytest.MonkeyPatch], Any]
KINDS = AttentionInterface._global_mapping


def a_linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256)).bfloat16()


def replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Change:
    """Replace a library's function by one made of it."""
    return lambda layer, patch: patch.setattr(owner, name, by(getattr(owner, name)))


def twice(function: Any) -> Any:
    return lambda *args, **options: 2 * function(*args, **options)


def both_twice(function: Any) -> Any:
    return lambda *args, **options: tuple(2 * x for x in function(*args, **options))


def the_same(function: Any) -> Any:
    return lambda *args, **options: function(*args, **options)


def tripled(self: Any, x: Tensor) -> Tensor:
    return 3 * nn.Module.__call__(self, x)


class Louder:
    """In the place of transformers' table of attention functions."""

    @staticmethod
    def get_interface(*args: Any) -> Any:
        return louder(KINDS["sdpa"])


REPEATED = {"use_gqa_in_sdpa": lambda *args: False, "repeat_kv": lambda x, n: 2 * x.repeat_interleave(n, 1)}


def louder(function: Any) -> Any:
    return lambda *args, **options: (1.2 * function(*args, **options)[0], None)


def set_on(path: str, value: Any) -> Change:
    owner, _, name = path.rpartition(".")
    return lambda layer, patch: setattr(layer.get_submodule(owner), name, value)


def act_function(layer: Any, patch: pytest.MonkeyPatch) -> None:
    del layer.mlp.act_fn
    layer.mlp.act_fn = F.tanh


def forward_on(path: str) -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        module = layer.get_submodule(path)
        vars(module)["forward"] = module.forward

    return change


def wrapped(layer: Any, patch: pytest.MonkeyPatch) -> None:
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)


# What is done to a converted layer that makes another one of it, and a word that the warning has.
CHANGES: dict[str, tuple[Change, str]] = {
    "dropout": (set_on("self_attn.attention_dropout", 0.1), "attention_dropout is 0.1"),
    "hook": (lambda layer, patch: layer.self_attn.register_forward_hook(lambda *a: None), "self_attn has hooks"),
    "backward hook": (lambda layer, patch: layer.mlp.register_full_backward_hook(lambda *a: None), "mlp has hooks"),
    "activation's hook": (lambda layer, patch: layer.mlp.act_fn.register_forward_hook(lambda *a: None), "act_fn"),
    "Tanh": (set_on("mlp.act_fn", nn.Tanh()), "act_fn"),
    "a function": (act_function, "act_fn"),
    "no eps": (set_on("input_layernorm", nn.RMSNorm(256).bfloat16()), "LlamaDecoderLayer"),
    "an MLP": (set_on("mlp", a_linear()), "gate_proj"),
    "a linear layer": (set_on("self_attn.q_proj", a_linear()), "weight"),
    "wrapped": (wrapped, "up_proj"),
    "forward on object": (forward_on("mlp"), "forward of mlp"),
    "forward on q_proj": (forward_on("self_attn.q_proj"), "forward of self_attn.q_proj"),
    "rotation": (replaced(modeling_llama, "apply_rotary_pos_emb", both_twice), "apply_rotary_pos_emb"),
    "rotate_half": (replaced(modeling_llama, "rotate_half", twice), "rotate_half"),
    "LlamaMLP": (replaced(modeling_llama.LlamaMLP, "forward", twice), "LlamaMLP"),
    "the layer's class": (replaced(modeling_llama.LlamaDecoderLayer, "forward", twice), "LlamaDecoderLayer"),
    "a call": (lambda layer, patch: patch.setattr(modeling_llama.LlamaMLP, "__call__", tripled), "__call__"),
    "attention's table": (replaced(modeling_llama, "ALL_ATTENTION_FUNCTIONS", lambda table: Louder), "ALL_ATTENTION"),
    "F.linear": (replaced(F, "linear", twice), "F.linear"),
    "F.silu": (replaced(F, "silu", twice), "F.silu"),
    "torch.cat": (replaced(torch, "cat", twice), "torch.cat"),
    "of attention": (
        lambda layer, patch: [patch.setattr(sdpa_attention, name, by) for name, by in REPEATED.items()],
        "has changed",
    ),
    "sdpa": (lambda layer, patch: patch.setitem(KINDS, "sdpa", louder(KINDS["sdpa"])), "sdpa"),
    "attention": (
        lambda layer, patch: setattr(layer.self_attn.config, "_attn_implementation", "paged|sdpa"),
        "attn_implementation is 'paged|sdpa'",
    ),
}


@pytest.mark.filterwarnings("ignore:the loss is computed")
@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_another_layer_runs_the_layers_own_forward(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(layers=1)
    overcoat.convert(model)
    (layer,) = model.model.layers
    model(**make_batch())
    does, word = CHANGES[change]
    does(layer, monkeypatch)
    assert not layer.overcoat_checked.fingerprint.holds(layer)
    x = torch.randn(2, 16, 256, dtype=torch.bfloat16)
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(16)[None])}
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="original precision") as told:
        found = layer(x, **given)
    assert any(word in str(each.message) for each in told), [str(each.message) for each in told]
    assert "original precision" in layer.overcoat_ran
    torch.manual_seed(1)
    assert torch.equal(found, original_class(layer).forward(layer, x, **given))
    # And whoever converts now is told the same.
    assert overcoat.convert(model).converted == []


@pytest.mark.filterwarnings("ignore:the loss is computed")
@pytest.mark.parametrize("change", ["method", "partial"])
def test_methods_and_partial_functions_are_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's forward calls its `_norm`; an activation holds F.gelu with its arguments."""
    model: Any = make_model("gemma2", layers=1)
    report = overcoat.convert(model)
    (layer,) = model.model.layers
    if change == "method":
        norm = original_class(layer.input_layernorm)
        monkeypatch.setattr(norm, "_norm", twice(norm._norm))
    else:
        layer.mlp.act_fn.act = functools.partial(F.gelu, approximate="none")
    word = "_norm of all" if change == "method" else "mlp.act_fn.act"
    with pytest.warns(UserWarning, match=f"{word}.* has changed"):
        model(**make_batch())
    assert "original precision" in report.running()["model.layers.0"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama.LlamaDecoderLayer, "forward"),
        (modeling_llama.LlamaForCausalLM, "forward"),
        (F, "linear"),
        (F, "scaled_dot_product_attention"),
        (loss_utils, "fixed_cross_entropy"),
    ],
)
def test_what_computes_the_same_goes_on_in_fp8(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries patch transformers with faster kernels: numbers decide, not whose function it is."""
    model = make_model(layers=2)
    report = overcoat.convert(model)
    expected = trained(model, make_batch())
    monkeypatch.setattr(owner, name, functools.wraps(getattr(owner, name))(the_same(getattr(owner, name))))
    assert_equal(trained(model, make_batch()), expected)
    assert set(report.running().values()) == {"FP8", "loss without logits"}
    again = overcoat.convert(copy.deepcopy(model))
    assert len(again.converted) == 2
    assert again.head is not None
    assert again.head.converted


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mlp.act_fn", nn.SiLU()),
        ("self_attn.scaling", 0.2),
        ("self_attn.is_causal", False),
        ("input_layernorm", nn.LayerNorm(256).bfloat16()),
    ],
)
def test_what_the_block_reads_goes_on_in_fp8(path: str, value: Any) -> None:
    model = make_model(layers=1)
    report = overcoat.convert(model)
    set_on(path, value)(model.model.layers[0], pytest.MonkeyPatch())
    model(**make_batch())
    assert report.running()["model.layers.0"] == "FP8"


@pytest.mark.filterwarnings("ignore:this layer")
@pytest.mark.parametrize("name", ["linear", "silu", "scaled_dot_product_attention"])
def test_compiled_code_is_traced_with_what_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As quantizers and PyTorch's context parallelism do: a process would attend to its own tokens alone."""
    model = make_model(layers=1)
    original = copy.deepcopy(model)
    overcoat.convert(model)
    monkeypatch.setattr(F, name, twice(getattr(F, name)))
    torch.compiler.reset()
    model.model.layers[0].compile(backend="eager")
    inputs = {**make_batch(), "output_logits": True}
    found = model(**inputs).loss
    del inputs["output_logits"]
    torch.testing.assert_close(found, original(**inputs).loss, rtol=2e-3, atol=0)


def test_compiled_code_notices_an_activation_that_became_a_function() -> None:
    model: Any = make_model(layers=1)
    overcoat.convert(model)
    layer = model.model.layers[0]
    act_function(layer, pytest.MonkeyPatch())
    torch.compiler.reset()
    layer.compile(backend="eager")
    with pytest.warns(UserWarning, match="act_fn has changed since it was converted"):
        model(**make_batch())


def test_a_layer_is_verified_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(layers=1)
    overcoat.convert(model)
    (layer,) = model.model.layers
    calls: list[Any] = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return verify.verify_again(*args)

    layer.overcoat_verify = counted
    layer.mlp.act_fn = nn.SiLU()
    for _ in range(3):
        model(**make_batch())
    assert len(calls) == 1


def test_copies_are_verified_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(layers=1)
    overcoat.convert(model)
    other = copy.deepcopy(model)
    monkeypatch.setattr(verify, "_verify", None)  # what was found for the kind holds
    assert_equal(trained(other, make_batch()), trained(model, make_batch()))
    monkeypatch.setattr(verify, "_found", {})  # another process
    monkeypatch.undo()
    assert other.model.layers[0].overcoat_ran == "FP8"


@pytest.mark.parametrize("kind", ["qwen2.5-vl-vision", "pixtral", "clip"])
def test_towers_are_verified_again(kind: str) -> None:
    model = make_encoder(kind)
    report = overcoat.convert(model)
    norms = [part for part in model.modules() if hasattr(part, "variance_epsilon") or isinstance(part, nn.LayerNorm)]
    model(**make_inputs(kind))
    assert set(report.running().values()) == {"FP8"}
    for norm in norms:
        vars(norm)["variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"] = 1e-3
    model(**make_inputs(kind))
    assert set(report.running().values()) == {"FP8"}  # the block reads eps from the module


def test_a_fingerprint_names_what_has_changed() -> None:
    layer = make_model(layers=1).model.layers[0]
    fingerprint = Fingerprint(layer)
    assert fingerprint.holds(layer)
    assert fingerprint.difference(layer) is None
    layer.mlp.act_fn = nn.Tanh()
    assert fingerprint.difference(layer) == "mlp.act_fn"


def test_a_hook_on_a_layer_is_no_change() -> None:
    """It runs around the converted layer, as FSDP2's do."""
    model = make_model(layers=1)
    report = overcoat.convert(model)
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, y: seen.append(y))
    model(**make_batch())
    assert seen
    assert report.running()["model.layers.0"] == "FP8"
