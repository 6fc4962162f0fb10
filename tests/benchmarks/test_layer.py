"""`benchmarks.layer`: everyone computes the same block, under the same names; on a GPU, what a tiny run measures."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import overcoat
from benchmarks.contestants import ENGINES
from benchmarks.experts import WAYS, grouped_calls, make_branch, product_size, torchs
from benchmarks.kernels import Call
from benchmarks.layer import RESULTS, accuracy, measure, measure_experts
from benchmarks.session import attempt
from benchmarks.shapes import SHORT, BlockShape, block_shape, build_block
from overcoat.models.shapes import MODELS, Model, sizes
from tests.benchmarks.peers import SHAPE, model_of, sqnr
from tests.models.zoo import KINDS

EAGER = [name for name, engine in ENGINES.items() if not engine.needs and not engine.compile]
WIDE = BlockShape(Model("LlamaConfig", sizes(512, 1024, 1, 4, 2, 32)), 2, 256)


@pytest.mark.parametrize("name", EAGER)
def test_everyone_computes_the_same_block(name: str) -> None:
    """A wrong weight or a wrong name leaves no signal at all."""
    found = accuracy(name, SHAPE, 4, "cpu")
    assert found.pop("draws") == 4
    errors = {key: found.pop(f"{key}_error") for key in RESULTS.values()}
    assert set(found) == set(RESULTS.values())
    for key, decibels in found.items():
        assert decibels > (30 if name == "bf16 eager" else 15), key
        assert 0 <= errors[key] < 5, key


def test_planted_outliers_cost_signal() -> None:
    usual, planted = (accuracy("overcoat", SHAPE, 2, "cpu", each)["dx"] for each in (False, True))
    assert usual - 3 > planted > 5


# transformers' experts do not run in FP64, which is the truth here.
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("llama", *EXPERTS)])
def test_every_family_of_the_registry_has_a_block(kind: str) -> None:
    found = accuracy("overcoat", SHAPE._replace(model=model_of(kind)), 2, "cpu")
    assert {"output", "dx"} < found.keys()
    assert any(key.endswith(".weight") for key in found)
    for key, decibels in found.items():
        if "error" not in key and "k_proj.bias" not in key and key != "draws":  # softmax does not see k's bias
            assert decibels > 12, key


def experts_of(kind: str, wide: int = 64) -> BlockShape:
    """A tiny layer of one of transformers' mixtures: 8 experts, of which a token takes 2. wide: of experts, in FP8
    from 256 on."""
    count = "num_experts" if kind in ("OlmoeConfig", "Qwen3MoeConfig") else "num_local_experts"
    more: dict[str, Any] = {"GptOssConfig": {"attn_implementation": "eager", "head_dim": 32}}.get(kind, {})
    fields = sizes(2 * wide, wide, 1, 4, 2, 320, num_experts_per_tok=2, pad_token_id=None, eos_token_id=None, **more)
    return BlockShape(Model(kind, {**fields, count: 8, "moe_intermediate_size": wide}), 2, 64)


WITH_EXPERTS = ("OlmoeConfig", "Qwen3MoeConfig", "MixtralConfig", "GptOssConfig")


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_a_branch_of_experts_is_what_its_layer_adds_after_attention(kind: str) -> None:
    """Of transformers and of ours: with attention's output at zero, the layer is its experts."""
    found = []
    for name in ("bf16 grouped_mm", "overcoat"):
        model, inputs = build_block(experts_of(kind), torch.bfloat16, "cpu")
        layer = model.layers[0]
        for parameter in layer.self_attn.o_proj.parameters():
            torch.nn.init.zeros_(parameter)
        block = make_branch(name, model)
        x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y, whole = block.call(x), layer(x, **inputs)
        assert torch.equal(y, whole[0] if isinstance(whole, tuple) else whole)
        y.sum().backward()
        assert {key.split(".")[0] for key in block.gradients()} == {"norm", "experts"}
        found.append((y - x).detach())
    assert sqnr(*found) > 15


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if not way.needs and not way.is_compiled])
def test_a_branch_of_experts_is_timed_under_uneven_loads(name: str) -> None:
    figures = measure_experts(name, experts_of("OlmoeConfig"), "cpu")
    assert figures["total_ms"] > figures["forward_ms"] > 0
    assert figures["largest_load"] > 1.2


@pytest.mark.parametrize(("shape", "said"), [(SHAPE, "no branch of experts"), (experts_of("OlmoeConfig"), "kernels")])
def test_why_a_branch_of_experts_is_not_timed(shape: BlockShape, said: str) -> None:
    """A dense model has none; a peer's kernels cannot be loaded."""
    assert said in attempt(measure_experts, "bf16 sonicmoe", shape, "cpu")["error"]


def products_of(kind: str, device: str) -> dict[str, Call]:
    model, _ = build_block(experts_of(kind, 256), torch.bfloat16, device)
    x, dy = (torch.randn(2, 64, 512, device=device, dtype=torch.bfloat16) for _ in range(2))
    return grouped_calls(make_branch("overcoat", model), x.requires_grad_(), dy)


def test_grouped_gemms_of_a_step_are_known_by_what_they_are_for() -> None:
    pairs, hidden, wide = 2 * 64 * 2, 512, 256
    for name, call in products_of("OlmoeConfig", "cpu").items():
        assert product_size(call) == (pairs, 2 * pairs * hidden * wide * (2 if "gate" in name else 1)), name


@pytest.mark.gpu
def test_pytorchs_grouped_gemms_give_what_ours_give() -> None:
    calls = products_of("OlmoeConfig", "cuda")
    assert len(calls) == 6
    for name, call in calls.items():
        ours, theirs = call.run(), torchs(call)()
        used = slice(None) if "wgrad" in name else (ours != 0).any(1)
        assert sqnr(ours[used], theirs[used]) > 30, name


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_torchaos_experts_are_the_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their groups filled up, and what lies beyond them undefined; its kernels need a GPU."""

    def grouped(a: Tensor, b: Tensor, ends: Tensor, **_: Any) -> Tensor:
        begins = [0, *ends.tolist()]
        parts = [a[i:j] @ each for i, j, each in zip(begins[:-1], begins[1:], b, strict=True)]
        return torch.cat([*parts, a.new_full((len(a) - begins[-1], b.shape[2]), math.nan)])

    module = SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=grouped)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.fp8_grouped_mm", module)
    found = []
    for name in ("bf16 eager", "torchao fp8 rowwise"):
        model, _ = build_block(experts_of(kind), torch.float32, "cpu")
        x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block = make_branch(name, model)
        block.call(x).square().sum().backward()
        found.append(torch.cat([grad.flatten() for _, grad in sorted(block.gradients().items())]))
    assert sqnr(*found) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["overcoat", "overcoat leanest", "bf16 eager", "bf16 compile"])
def test_a_tiny_run_measures_time_and_bytes(name: str) -> None:
    figures = measure(name, WIDE)
    unit = WIDE.batch * WIDE.sequence * 512 * 2
    assert figures["total_ms"] > figures["forward_ms"] > 0
    assert 0 < figures["host_ms"] < 20.0  # it never waits for the device, which is busy that long
    assert figures["backward_ms"] == pytest.approx(figures["total_ms"] - figures["forward_ms"])
    assert figures["kept_units"] == pytest.approx(figures["kept_bytes"] / unit)
    assert figures["peak_bytes"] > figures["kept_bytes"] > 0
    if name == "overcoat leanest":
        assert figures["kept_units"] < 1.0
    if name == "bf16 eager":
        assert figures["kept_units"] > 10.0


@pytest.mark.gpu
def test_of_graphs_the_total_and_the_host_are_measured() -> None:
    figures = measure("overcoat compile, graphs", WIDE)
    assert set(figures) == {"total_ms", "host_ms"}
    assert figures["total_ms"] > 0


# ---- Decoder blocks by name, and models of random weights -----------------------------------------------------------


def test_blocks_by_name() -> None:
    """Every model is one, and the short names stay."""
    assert block_shape("7b-s4096") == block_shape("llama-2-7b-s4096") == (MODELS["llama-2-7b"], 4, 4096, "")
    assert block_shape("30b") == (MODELS["llama-30b"], 2, 2048, "")
    shapes = map(block_shape, [*MODELS, *SHORT])
    assert {shape.batch * shape.sequence for shape in shapes} == {4096, 8192, 16384}
    for name in ("8b", "7b-s", "7b-s0", ""):
        with pytest.raises(ValueError, match=rf"unknown shape '{name}'; choose MODEL\[.KIND\]\[-sTOKENS\] of 124m, "):
            block_shape(name)
    for name, kinds in (("qwen3.5-9b", "linear_attention, full_attention"), ("7b", "one kind")):
        with pytest.raises(ValueError, match=f"unknown shape '{name}.local_attention': {name} has layers of {kinds}"):
            block_shape(f"{name}.local_attention")


# Sizes that only these configurations have.
NARROW: dict[str, dict[str, Any]] = {
    "Qwen3_5TextConfig": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "OlmoHybridConfig": {"num_key_value_heads": 4, "pad_token_id": None},
    "Gemma4TextConfig": {"global_head_dim": 64, "num_global_key_value_heads": 1, "vocab_size_per_layer_input": 64},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 64},
    "Llama4TextConfig": {"num_local_experts": 2, "intermediate_size_mlp": 256},
}
# Layers with embeddings of their own, and of experts, which run as they are.
UNCONVERTED = ("gemma-4-e", "llama-4")
# Beside each model's first layer.
OTHERS = ("qwen3.5-9b", "olmo-hybrid-7b", "gemma-4-e4b", "gemma-4-12b", "gemma-4-31b", "llama-4-scout")


@pytest.mark.parametrize("name", [*MODELS, *(f"{name}.full_attention" for name in OTHERS)])
def test_every_model_has_a_block_of_its_family(name: str) -> None:
    """Of the text, where a model sees; narrow, but with its own heads."""
    shape = block_shape(name)
    model = shape.model.changed(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    model = model.changed(head_dim=32, vocab_size=64).changed(**NARROW.get(model.kind, {}))
    built, inputs = build_block(shape._replace(model=model, batch=1, sequence=8), torch.bfloat16, "cpu")
    if shape.kind:
        assert (built.config.layer_types, len(built.layers)) == ([shape.kind], 1)
        assert [*dict.fromkeys(model.config().layer_types)][1] == shape.kind
    assert name.startswith(UNCONVERTED) or not overcoat.convert(built).left_alone
    x = torch.randn(1, 8, 128).bfloat16().requires_grad_()
    built.layers[0](x, **inputs).sum().backward()
    assert x.grad is not None
