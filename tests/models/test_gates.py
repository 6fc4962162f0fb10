"""Models whose attention has an output gate, o * sigmoid(g): what is fused, and that no other gate is taken for it."""

from __future__ import annotations

import collections
import copy
import inspect
import math
import textwrap
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5

import overcoat
from overcoat import Recipe
from overcoat.estimate.dry_run import kept_tensors
from overcoat.estimate.setup import Setup
from overcoat.models import propose, verify
from overcoat.models.compiled import compile_layers, forget
from overcoat.models.family import decoder_layers, family_of
from tests.emulation import emulate_fp8_gemms
from tests.models.test_numerics import relative_noise
from tests.models.zoo import assert_equal, make_batch, trained
from tests.sweep.tiny import tiny

# By model type: layers whose attention has a gate, what else runs as it is in them, and whether q's layer makes it.
KINDS: dict[str, tuple[dict[str, tuple[str, ...]], bool]] = {
    "qwen3_5_text": ({"model.layers.1": ()}, True),
    "qwen3_next": ({"model.layers.1": ("mlp",)}, True),
    "afmoe": ({"model.layers.0": (), "model.layers.1": ("mlp",)}, False),
}
# As Qwen3.5 has them: heads of 256 columns, of which 64 rotate.
WIDE = {
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]
    },
}  # fmt: skip
LIMIT_DB, SEEDS = 1.0, 3


def qwen(seed: int = 0, **fields: Any) -> Any:
    """A small Qwen3.5 of layers with attention alone."""
    return tiny("qwen3_5_text", seed=seed, narrow=True, layer_types=["full_attention"] * 2, **fields)


def batch(kind: str = "left-padded", seed: int = 0) -> dict[str, Any]:
    return {**make_batch(kind, length=40, seed=seed), "use_cache": False}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_a_gate_is_fused(kind: str) -> None:
    model = tiny(kind, narrow=True)
    report = overcoat.convert(model)
    layers, interleaved = KINDS[kind]
    rows = {row.name: row for row in report.layers}
    for name, own in layers.items():
        assert rows[name].own == own
        assert rows[name].grade == ("FP8 in part" if own else "FP8")
        assert "output gate" in rows[name].detail
        assert report.verified[name].decibels > verify.LIMIT_DB
        family: Any = family_of(model.get_submodule(name))
        part = family.branches.parts[0]
        assert (part.mixer.heads.gated, part.gate_interleaved) == (True, interleaved)


def test_the_estimate_counts_what_a_gate_keeps() -> None:
    """A byte for each of its columns, and a maximum of two for each 128, in both layers."""
    config = qwen().config
    columns = config.num_attention_heads * config.head_dim
    found = kept_tensors(config, 2, 96, Setup()).by_op()
    assert found["attention gate"] == 2 * 2 * 96 * (columns + 2 * -(-columns // 128))


# ---- other gates ----------------------------------------------------------------------------------------------------

GATE = "attn_output = attn_output * torch.sigmoid(gate)"
TURN = "cos, sin = position_embeddings"
OTHERS: dict[str, dict[str, str]] = {
    "the same": {},
    "SiLU": {GATE: "attn_output = attn_output * F.silu(gate)"},
    "of q, before the softmax": {
        GATE: "", TURN: f"query_states = query_states * torch.sigmoid(gate.view(hidden_shape)).transpose(1, 2); {TURN}"
    },
    "no gate": {GATE: ""},
    "of a third": {GATE: "attn_output = attn_output * torch.sigmoid(gate / 3)"},
    "of the head before": {GATE: "attn_output = attn_output * torch.sigmoid(gate.roll(self.head_dim, -1))"},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_gate_is_not_taken_for_it(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its numbers; the module then runs as it is. The first is written again as it was."""
    monkeypatch.setattr(propose, "why_unsupported", lambda layer, family: None)
    owner: Any = modeling_qwen3_5.Qwen3_5Attention
    source = textwrap.dedent(inspect.getsource(owner.forward))
    for old, new in OTHERS[other].items():
        assert old in source
        source = source.replace(old, new)
    names: dict[str, Any] = {**vars(modeling_qwen3_5)}
    exec(source, names)
    monkeypatch.setattr(owner, "forward", names["forward"])
    report = overcoat.convert(qwen())
    own = () if other == "the same" else ("self_attn",)
    assert [row.own for row in report.layers if row.name.startswith("model.layers")] == [own] * 2


# ---- training -------------------------------------------------------------------------------------------------------

RECIPES = {
    "default": Recipe(),
    "leanest": Recipe.leanest(),
    "attention bf16": Recipe(kept_attention="bf16"),
    "attention bf16, blocks": Recipe(kept_attention="bf16", linear_scaling="block"),
}


def with_families(model: Any) -> Any:
    """A model whose layers know what is proposed for them, as `emulate_fp8_gemms` wants it."""
    for name, layer in decoder_layers(model).items():
        layer.overcoat_family = propose.propose(model, name).family  # type: ignore[assignment]
    return model


def lost(make: Any, recipe: Recipe) -> dict[str, float]:
    """dB of every gradient's error above that of FP8 GEMMs alone, layers and seeds together."""
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for seed in range(SEEDS):
        model, inputs = make(seed), batch(seed=seed)
        exact = trained(copy.deepcopy(model).double(), inputs)
        in_blocks = recipe.linear_scaling == "block"
        floor = trained(emulate_fp8_gemms(with_families(copy.deepcopy(model)), in_blocks=in_blocks), inputs)
        report = overcoat.convert(model, recipe)
        found = trained(model, inputs)
        assert [report.running()[name] for name in report.converted] == ["FP8"] * 2
        assert not report.in_part
        assert found.keys() == exact.keys()
        for name, truth in exact.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            for place, other in enumerate((floor, found)):
                totals[kind][place] += relative_noise(truth.double(), other[name].double())
    return {name: 10 * math.log10(ours / floor) for name, (floor, ours) in totals.items() if name != "loss"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_are_as_good_as_with_fp8_gemms_alone(recipe: Recipe) -> None:
    found = lost(lambda seed: qwen(seed, **WIDE), recipe)
    assert len(found) > 8
    assert not {name: round(db, 2) for name, db in found.items() if not db <= LIMIT_DB}


def test_adapters_of_gated_attention_are_as_good_as_with_fp8_gemms_alone() -> None:
    """Of q's layer, whose rows are q's and the gates' in turn, and of the output layer, which reads what is gated."""
    from tests.models.test_lora import adapted

    found = lost(lambda seed: adapted(qwen(seed), ["q_proj", "v_proj", "o_proj"], seed=seed), Recipe())
    assert all("lora_" in name for name in found)
    assert not {name: round(db, 2) for name, db in found.items() if not db <= LIMIT_DB}


@pytest.mark.parametrize("kind", ["qwen3_5_text", "afmoe"])
def test_frozen_layers_leave_the_other_gradients_as_they_are(kind: str) -> None:
    model: Any = tiny(kind, narrow=True)
    overcoat.convert(model)
    whole = trained(model, batch())
    names = [name for name in whole if name.endswith(("q_proj.weight", "gate_proj.weight")) and "attn" in name]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    assert_equal(trained(model, batch()), {name: x for name, x in whole.items() if name not in names})


def test_eval_is_the_original() -> None:
    model = qwen()
    original, inputs = copy.deepcopy(model).eval(), batch()
    overcoat.convert(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, original(**inputs).logits)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])
def test_compiled_layers_give_the_eager_gradients(recipe: Recipe) -> None:
    plain: Any = qwen()
    model: nn.Module = copy.deepcopy(plain)
    overcoat.convert(plain, recipe)
    overcoat.convert(model, recipe)
    try:
        compile_layers(model, graphs=False)
        with torch.compiler.set_stance(force_backend="aot_eager"):
            found = trained(model, batch())
        assert_equal(found, trained(plain, batch()))
    finally:
        forget()
