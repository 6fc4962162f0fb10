"""The linear grade: models that no block computes train with their large linear layers in FP8."""

from __future__ import annotations

import copy
import math
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import overcoat
from overcoat import Recipe
from overcoat.models import linear_layers
from overcoat.models.linear_layers import Fp8Linear, convert_linears, large_linears, restore_linears
from tests.emulation import sqnr
from tests.models.zoo import assert_equal, make_batch, make_model, trained

# hidden 256, so that projections have 2^16 weights.
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
UNKNOWN = {
    "deepseek_v3": LATENT,
    "qwen3_next": DELTA,
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 1, "expand": 2},
}


def unknown(kind: str) -> Any:
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(kind).to_dict()
    config = transformers.AutoConfig.for_model(
        kind, **{n: x for n, x in {**SIZES, **UNKNOWN[kind]}.items() if n in known}
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_layers_train_with_their_linear_layers_in_fp8(kind: str) -> None:
    model = unknown(kind)
    original, batch = copy.deepcopy(model), make_batch()
    report = overcoat.convert(model)
    assert report.in_linear_layers
    found = [name for name, module in model.named_modules() if type(module) is Fp8Linear]
    assert found
    assert not any(name.endswith((".gate", "lm_head")) for name in found)
    assert "linear layers in FP8" in str(report)
    exact, ours = trained(original.float(), batch), trained(model, batch)
    assert abs(float(exact["loss"]) - float(ours["loss"])) < 0.02 * float(exact["loss"])
    assert ours.keys() == exact.keys()
    names = [f"{name}.weight" for name in found]
    assert min(sqnr(exact[name], ours[name]) for name in names) > 6, {n: sqnr(exact[n], ours[n]) for n in names}


def test_eval_and_names_are_untouched() -> None:
    model = unknown("deepseek_v3")
    original = copy.deepcopy(model)
    overcoat.convert(model)
    assert model.state_dict().keys() == original.state_dict().keys()
    ids = make_batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, original.eval()(ids).logits)
    overcoat.convert(model, Recipe.bf16())
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert_equal(trained(model.train(), make_batch()), trained(original.train(), make_batch()))


def test_which_layers_are_large_enough() -> None:
    layer = nn.ModuleDict({
        "q_proj": nn.Linear(256, 256), "narrow": nn.Linear(4096, 64), "uneven": nn.Linear(256, 300),
        "gate": nn.Linear(256, 512), "conv": nn.Conv1d(256, 256, 1), "quantized": nn.Linear(256, 256),
    })  # fmt: skip
    layer["quantized"].weight = nn.Parameter(layer["quantized"].weight.to(torch.int8), requires_grad=False)
    assert list(large_linears(layer)) == ["q_proj"]


def test_inputs_that_layers_share_are_saved_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(256, 256, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x * 2)

    layer = Layer().bfloat16()
    assert len(convert_linears(layer, Recipe(), False)) == 3
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with overcoat.memory.record_kept(layer) as kept:
        layer(x)
    assert kept.by_tensor()["linear", "codes"] == 2 * x.numel()
    restore_linears(layer)
    assert type(layer.a) is nn.Linear
    assert "overcoat_recipe" not in vars(layer.a)


def test_inference_tensors_have_no_versions() -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(256, 256)})
    (linear,) = convert_linears(layer, Recipe(), True).values()
    with torch.inference_mode():
        x = torch.randn(3, 256)
        before = linear(x)
        x.mul_(2)
        assert sqnr(2 * before - linear.bias, linear(x)) > 25


def test_an_adapter_on_top_trains() -> None:
    model = unknown("deepseek_v3")
    overcoat.convert(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj", "kv_b_proj"]))
    found = trained(model, make_batch())
    assert all("lora_" in name for name in found.keys() - {"loss"})
    assert any(type(module) is Fp8Linear for module in model.modules())


def test_a_layer_with_dropout_has_its_linear_layers_in_fp8() -> None:
    """It was left in BF16 whole: GPT-2 comes with dropout. Its projections are Conv1D, Llama's are linear."""
    report = overcoat.convert(make_model("llama", layers=2, attention_dropout=0.1))
    assert report.converted == []
    assert list(report.in_linear_layers) == ["model.layers.0", "model.layers.1"]
    assert "attention_dropout is 0.1" in report.in_linear_layers["model.layers.0"]


def test_what_replaces_functions_of_pytorch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(256, 256)})
    monkeypatch.setattr(F, "linear", lambda x, w, b=None, own=F.linear: 2 * own(x, w, b))
    assert convert_linears(layer, Recipe(), False) == {}
    monkeypatch.undo()
    (linear,) = convert_linears(layer, Recipe(), False).values()
    x = torch.randn(3, 256)
    before = linear(x)
    monkeypatch.setattr(F, "linear", lambda x, w, b=None, own=F.linear: 2 * own(x, w, b))
    assert sqnr(2 * before, linear(x)) > 25
    assert linear_layers._OWN[0] is not F.linear


@pytest.mark.parametrize("kind", ["deepseek_v3"])
def test_compiles_without_graph_breaks(kind: str) -> None:
    model = unknown(kind)
    overcoat.convert(model)
    layer = model.model.layers[0].self_attn.q_a_proj
    x = torch.randn(2, 8, 256, dtype=torch.bfloat16, requires_grad=True)
    eager = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(eager, compiled)


def test_sharded_weights_give_the_same() -> None:
    import torch.distributed as dist

    plain, model = unknown("deepseek_v3"), unknown("deepseek_v3")
    for each in (plain, model):
        overcoat.convert(each)
    expected = trained(plain, make_batch())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(**make_batch()).loss
        loss.backward()
        assert math.isclose(float(loss), float(expected["loss"]), rel_tol=1e-6)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad.full_tensor(), expected[name]), name
    finally:
        dist.destroy_process_group()


def test_results_may_be_changed_in_place() -> None:
    """As Llama 4's rotation and residuals do."""
    (linear,) = convert_linears(nn.ModuleDict({"q_proj": nn.Linear(256, 256)}), Recipe(), False).values()
    y = linear(torch.randn(2, 3, 256, requires_grad=True))
    y.mul_(2).sum().backward()
    assert linear.weight.grad is not None


# ---- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])  # weight, and 1 + weight
def test_wide_norms_save_their_input_in_8_bits(kind: str) -> None:
    model = unknown(kind)
    layer = model.model.layers[-1]
    norm = layer.input_layernorm
    own, x, dy = copy.deepcopy(norm).double(), *(torch.randn(2, 40, 256, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        norm.weight.uniform_(0.2, 1.8)
        own.weight.copy_(norm.weight)
    convert_linears(layer, Recipe(), eval_fp8=False)
    assert isinstance(norm, linear_layers.SavingNorm)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = norm(x.requires_grad_())
    assert sum(t.nbytes for t in saved) < 0.6 * x.nbytes
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    expected = own(exact)
    expected.backward(dy.double())
    assert sqnr(expected, y) > 45  # BF16
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert sqnr(exact.grad, x.grad) > 30
    assert sqnr(own.weight.grad, norm.weight.grad) > 30
    assert torch.equal(norm.eval()(x), type(own).forward(norm, x))
    restore_linears(layer)
    assert type(norm) is type(own)


def test_a_norm_whose_class_is_patched_later_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unknown("deepseek_v3")
    layer = model.model.layers[-1]
    norm, original = layer.input_layernorm, type(layer.input_layernorm)
    convert_linears(layer, Recipe(), eval_fp8=False)
    monkeypatch.setattr(original, "forward", lambda self, x: 2 * x)
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(norm(x), 2 * x)


def test_lists_of_layers_that_are_none_by_their_class() -> None:
    model = make_model("llama")
    others = nn.ModuleList(nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(3))) for _ in "ab")
    model.resampler = others
    report = overcoat.convert(model, filter_fn=lambda layer, name: name != "resampler.1")
    assert {row.name: row.linears for row in report.layers if row.name.startswith("resampler")} == {
        "resampler.0": 3,
        "resampler.1": 0,
    }
    assert "resampler.1" in report.left_alone
    overcoat.convert(model, Recipe.bf16())
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
