"""Attention's functions as one op, against FP64 autograd: `pytest tests/block/test_attention.py`."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from torch import Tensor

import overcoat.block.attention as attention_ops
from overcoat import Recipe
from overcoat.block import reference
from overcoat.block.attention import (
    AttentionSaved,
    Heads,
    Rotary,
    attention_decode,
    attention_forward,
    qkv_gradient,
    rotated_gradients,
)
from overcoat.block.spec import Linear
from overcoat.kernels.quantize import amax, quantize
from overcoat.models.masks import check_mask
from tests.block.harness import EPS, FP32_DB, Case, Inputs, check, double, evaluate, run, tables_of
from tests.emulation import sqnr
from tests.exact import BF16_DB, KEPT_DB, combined_db
from tests.kernels.samples import normal

SEQUENCE = 31


def masks(batch=2, heads=4):
    """One of each kind that a model hands over; none hides a query's every key."""
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    eye = torch.eye(SEQUENCE, dtype=torch.bool)
    padded = torch.stack([causal & (torch.arange(SEQUENCE) >= 5 * row) for row in range(batch)])[:, None] | eye
    documents = torch.arange(SEQUENCE) // 9
    return {
        "padded": padded,
        "packed": (causal & (documents == documents[:, None]))[None, None],
        "additive": torch.zeros(padded.shape).masked_fill(~padded, torch.finfo(torch.bfloat16).min),
        "per head": (-0.2 * torch.arange(heads)[:, None, None] * (causal.sum(1)[:, None] - torch.arange(SEQUENCE)))
        .masked_fill(~causal, -torch.inf)[None],
    }  # fmt: skip


KEPT = len(AttentionSaved._fields)


class _Attention(torch.autograd.Function):
    """What a block does around attention, for these tests."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, mask, q_weight, k_weight, heads, recipe):
        rotary = Rotary(cos, sin, mask, q_weight, k_weight)
        o, _, kept = attention_forward(qkv.clone(), rotary, heads, recipe)
        ctx.heads, ctx.recipe = heads, recipe
        ctx.save_for_backward(*kept, *rotary)
        return o

    @staticmethod
    def backward(ctx, do):
        kept, rotary = AttentionSaved(*ctx.saved_tensors[:KEPT]), Rotary(*ctx.saved_tensors[KEPT:])
        decoded = attention_decode(kept, rotary, ctx.heads, ctx.recipe, do.dtype)
        gradients = rotated_gradients(do, decoded, rotary, ctx.heads)
        dqkv, dq_weight, dk_weight = qkv_gradient(gradients, decoded.inputs, rotary, ctx.heads)
        return dqkv, None, None, None, dq_weight, dk_weight, None, None


def attention_case(
    batch: int = 2,
    sequence: int = SEQUENCE,
    num_q: int = 4,
    num_kv: int = 2,
    width: int = 64,
    head_norm: bool = False,
    mask: Optional[Tensor] = None,
    shared_positions: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    full_norm: bool = False,
) -> Case:
    """Inputs q, k, v apart, so that the gradient of each is held on its own."""
    tokens = batch * sequence
    heads = Heads(batch, num_q, num_kv, width, width**-0.5, EPS, full_norm)
    cos, sin = tables_of(sequence, width)
    if not shared_positions:
        cos, sin = torch.cat((cos, cos.roll(1, 0))), torch.cat((sin, sin.roll(1, 0)))
    sizes = (num_q * width, num_kv * width) if full_norm else (width, width)
    inputs: Inputs = {
        "q": normal(tokens, num_q * width),
        "k": normal(tokens, num_kv * width, seed=1),
        "v": normal(tokens, num_kv * width, seed=2),
        "q_weight": 1 + 0.3 * normal(sizes[0], seed=3) if head_norm or full_norm else None,
        "k_weight": 1 + 0.3 * normal(sizes[1], seed=4) if head_norm or full_norm else None,
        "cos": cos,
        "sin": sin,
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    inputs["mask"] = mask if mask is None else mask.to(device)

    def op(inputs: Inputs, recipe: Recipe) -> Tensor:
        qkv = torch.cat((inputs["q"], inputs["k"], inputs["v"]), 1)
        rotary = [inputs[name] for name in ("cos", "sin", "mask", "q_weight", "k_weight")]
        return _Attention.apply(qkv, *rotary, heads, recipe)

    def truth(inputs: Inputs) -> Tensor:
        qkv = torch.cat((inputs["q"], inputs["k"], inputs["v"]), 1)
        rotary = Rotary(*[inputs[name] for name in ("cos", "sin", "mask", "q_weight", "k_weight")])
        return reference.attention(qkv, rotary, heads)

    def limits(recipe: Recipe) -> dict[str, float]:
        # q, k, v, o and the probabilities made of q and k each bring a kept tensor's noise; in dS = P (dP - D) the
        # terms cancel in part, which raises it by up to 3 dB. Exact and kept in 16 bits: the same count of roundings.
        exactly = BF16_DB if dtype == torch.bfloat16 else FP32_DB
        kept = exactly if recipe.kept_attention == "bf16" else KEPT_DB[recipe.kept_format]
        score = combined_db(*[kept] * 5) - 3
        dbs = {"out": combined_db(*[exactly] * 5), "v": combined_db(*[kept] * 3)}
        return dbs | dict.fromkeys(("q", "k", "q_weight", "k_weight"), score)

    return Case(inputs, op, truth, limits, sharing=width)


SETTINGS = {
    "": {},
    "head norm": {"head_norm": True},
    "full norm": {"full_norm": True},
    "one head": {"num_q": 1, "num_kv": 1, "width": 32},
    "multi-query": {"num_q": 8, "num_kv": 1, "width": 32, "shared_positions": False},
} | {kind: {"mask": mask, "head_norm": True} for kind, mask in masks().items()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_exact_where_nothing_is_rounded(settings, device):
    """FP32 kept as it is: forward and backward equal FP64 to FP32 rounding, so no term is left out or mis-scaled."""
    check(attention_case(dtype=torch.float32, device=device, **settings), Recipe(kept_attention="bf16"))
    if not settings:
        check(attention_case(device=device), Recipe())


@pytest.mark.parametrize("kind", ["causal", "starts", *masks()])
@pytest.mark.parametrize("bias", [0.0, 30.0], ids=["", "bias"])
@pytest.mark.parametrize("sink", [None, 13.0], ids=["", "sinks"])
def test_the_output_is_quantized_as_well_as_with_its_own_maximum(kind, bias, sink, device):
    """By a bound that the first token of a row or document, which attends to itself alone, makes nearly tight; where
    sinks take nearly all of the attention, by that maximum."""
    starts = torch.tensor([0, 20, 31, 40, 62], dtype=torch.int32)
    mask = ({"causal": None, "starts": starts} | masks())[kind]
    inputs = attention_case(device=device).inputs
    qkv, cos, sin = torch.cat([inputs[name] for name in "qkv"], 1), inputs["cos"], inputs["sin"]
    mask = mask if mask is None else mask.to(device)
    qkv[:, -2 * 64 :] += bias * normal(2 * 64, seed=9).to(qkv)
    sinks = None if sink is None else qkv.new_full((4,), sink)
    heads = Heads(2, 4, 2, 64, 0.125)
    o, bound, _ = attention_forward(qkv, Rotary(cos, sin, mask, sinks=sinks), heads, Recipe())
    top = amax(o)
    assert top <= bound <= 1.5 * top
    quantized = [quantize(o, each, "e4m3") for each in (bound, top)]
    found, best = (sqnr(o.double(), data.double() * scale.double()) for data, scale in quantized)
    assert found >= best - 1.0


def test_a_bias_of_v_costs_nothing():
    """Its mean is taken out before encoding: with it no gradient is worse (to 1 dB: other numbers)."""
    found = []
    for sigmas in (0, 30):
        case = attention_case(dtype=torch.float32)  # FP32: adding the vector does not itself round
        case.inputs["v"] = case.inputs["v"] + sigmas * normal(case.inputs["v"].shape[1], seed=9)
        _, truth = evaluate(case.truth, double(case.inputs), case.names(), case.grad)
        found.append({name: sqnr(truth[name], run(case, Recipe())[1][name]) for name in "qkv"})
    assert all(found[1][name] >= found[0][name] - 1.0 for name in "qkv"), found


# ---- wrong masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 31), r"shape \(2, 31\).*attn_implementation=\"sdpa\""),
        (torch.ones(2, 1, 7, 31), r"shape \(2, 1, 7, 31\)"),
        ("block", "is str"),
        (torch.ones(2, 1, 31, 31, dtype=torch.int64), r"torch.int64.*mask.bool\(\)"),
    ],
    ids=["two axes", "seven queries", "not a tensor", "integers"],
)
def test_wrong_masks_are_named_with_the_remedy(mask, message):
    with pytest.raises(ValueError, match=message):
        check_mask(mask, 31)


def test_a_mask_of_one_query_is_that_of_all():
    mask = torch.rand(2, 1, 1, 31) < 0.5
    assert torch.equal(check_mask(mask, 31), mask.expand(2, 1, 31, 31))


@pytest.mark.parametrize("which", ["", "q", "k", "v", "qkv"])
def test_the_gradient_is_summed_for_whoever_has_a_bias(which, device):
    """Whichever that is, over all tokens, before it is quantized."""
    sizes = {"q": 64, "k": 32, "v": 32}
    gradients = tuple(normal(10, n, seed=n + i).to(device) for i, n in enumerate(sizes.values()))
    biases = tuple(normal(n).to(device) if name in which else None for name, n in sizes.items())
    cos, sin = (normal(5, 32, seed=seed).to(device) for seed in (1, 2))
    heads = attention_ops.Heads(batch=2, num_q=2, num_kv=1, width=32, scale=1.0)
    rotary = attention_ops.Rotary(cos, sin)
    found = attention_ops.qkv_gradient_quantized(gradients, rotary, heads, Linear((), biases), Recipe()).sums
    if not which:
        assert found is None
        return
    parts = tuple(part.double() for part in gradients)
    exact = attention_ops.qkv_gradient(parts, None, attention_ops.Rotary(cos.double(), sin.double()), heads)[0]
    assert ((found - exact.sum(0)).abs() <= 2.0**-8 * exact.abs().sum(0)).all()
