"""`Report.measure`: the bytes that branches save, beside `record_kept` of the model before and after `convert`."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import overcoat
from overcoat import Recipe, memory
from overcoat.models.family import decoder_layers
from tests.models.test_linear_layers import unknown
from tests.models.test_lora import adapted
from tests.models.zoo import assert_equal, make_batch, make_encoder, make_inputs, make_model, trained
from tests.sweep.tiny import tiny

FUSED = {"self_attn": "fused", "mlp": "fused"}
ENCODER = ("attention.self", "intermediate")


def half_frozen() -> Any:
    """Nothing is saved in the first two layers: nothing in them or before them is trained."""
    model: Any = make_model("llama", layers=4)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


llama = functools.partial(make_model, "llama", layers=2)
# A model, a recipe, the state of each branch, whatever the layers.
CASES: dict[str, tuple[Callable[[], Any], Recipe, dict[str, str]]] = {
    "llama": (llama, Recipe(), FUSED),
    "bf16": (llama, Recipe.bf16(), {**dict.fromkeys((*FUSED, "input_layernorm", "post_attention_layernorm"), "own")}),
    "leanest": (llama, Recipe.leanest(), {"self_attn + mlp": "fused"}),
    "in blocks": (llama, Recipe(linear_scaling="block", kept_attention="bf16"), FUSED),
    "offloaded": (functools.partial(make_model, "llama"), Recipe(offload_blocks="all"), FUSED),
    "sandwich": (functools.partial(make_model, "gemma2", layers=2), Recipe(), FUSED),
    "parallel": (functools.partial(make_model, "gpt_neox", layers=2), Recipe(), {"attention": "fused", "mlp": "fused"}),
    "eager attention": (functools.partial(make_model, "llama", attn_implementation="eager"), Recipe(), FUSED),
    "lora": (lambda: adapted(llama()), Recipe(), FUSED),
    "window": (functools.partial(make_model, "mistral", layers=2), Recipe(), FUSED),
    "encoder": (lambda: make_encoder("bert").to(torch.bfloat16), Recipe(), dict.fromkeys(ENCODER, "fused")),
    "held in fp8": (lambda: adapted(llama()), Recipe(frozen_weights="fp8"), FUSED),
    "half frozen": (half_frozen, Recipe(), FUSED),
    "experts": (lambda: tiny("mixtral").to(torch.bfloat16), Recipe(), {"self_attn": "fused", "mlp": "linear"}),
    "linear attention": (lambda: unknown("qwen3_next"), Recipe(), {"linear_attn": "linear", "self_attn": "fused"}),
    "latent attention": (lambda: unknown("deepseek_v3"), Recipe(), {"self_attn": "linear"}),
    "state space": (lambda: unknown("mamba2"), Recipe(), {"mixer": "linear"}),
}


def whole(model: Any, batch: dict[str, Any]) -> int:
    """Return the bytes that all layers save in one forward of the model, without what they are given and share."""
    layers = decoder_layers(model)

    def leave_out(_layer: Any, args: Any, kwargs: Any) -> None:
        given = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor)]
        memory._active[-1].inputs |= {memory._storage(each) for each in given}

    for layer in layers.values():
        layer.register_forward_pre_hook(leave_out, with_kwargs=True)
    with memory.record_kept(model) as kept:
        model(**batch)
    inside = tuple(f"{name}." for name in layers)
    return sum(row.bytes for row in kept.rows if f"{row.module}.".startswith(inside))


@pytest.mark.parametrize("case", CASES)
def test_branches_add_up_to_what_the_model_saves(case: str) -> None:
    make, recipe, states = CASES[case]
    model = make().train()
    rows = 1 if case == "window" else 12  # of more, transformers makes the mask once for each
    batch = make_inputs("bert") if case == "encoder" else {**make_batch(batch=rows), "use_cache": False}
    original = copy.deepcopy(model)
    report = overcoat.convert(model, recipe)
    found = report.measure(model, batch)
    assert {*states.items()} <= {(row.branch, row.state) for row in found}
    tokens = batch["input_ids"].numel()
    assert sum(row.layers * row.before for row in found) * tokens == pytest.approx(whole(original, batch))
    assert sum(row.layers * row.after for row in found) * tokens == pytest.approx(whole(model, batch))
    assert all(row.after < row.before for row in found if row.state == "fused")
    assert all(f"{row.after:,.0f}" in str(report) for row in found)


@pytest.mark.parametrize("options", [{}, {"eval_fp8": True}, {"recipe": Recipe(frozen_weights="fp8")}])
def test_measuring_changes_nothing(options: dict[str, Any]) -> None:
    results, running = [], []
    for is_measured in (False, True):
        torch.manual_seed(3)
        model: Any = adapted(llama()).train()  # with dropout before LoRA's A
        report = overcoat.convert(model, **options)
        if is_measured:
            held = [type(each) for each in model.parameters()]
            report.measure(model, make_batch())
            assert held == [type(each) for each in model.parameters()]
            assert all(row.after < row.before for row in report.saved)
        results.append(trained(model, make_batch()))
        running.append(report.running())
    assert_equal(*results)
    assert running[0] == running[1]


def test_a_layers_tensors_are_freed_behind_it() -> None:
    model: Any = llama().train()
    report, seen, alive = overcoat.convert(model, Recipe.bf16()), [], []
    first, second = model.model.layers
    first.mlp.act_fn.register_forward_hook(lambda _module, _args, y: seen.append(weakref.ref(y.untyped_storage())))
    second.register_forward_pre_hook(lambda *_: alive.append(seen[-1]() is not None))
    report.measure(model, make_batch())
    assert alive == [False, False]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda m: m.eval(), "train"),
        (lambda m: m.gradient_checkpointing_enable(), "disable"),
        (lambda m: delattr(m.model, "layers"), "that was converted"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: Callable[[Any], None], remedy: str) -> None:
    model: Any = llama().train()
    report = overcoat.convert(model)
    change(model)
    with pytest.raises(ValueError, match=remedy):
        report.measure(model, make_batch())
