"""Experts in FP8 against their definition in FP64, and against the same with FP8 GEMMs alone."""

from __future__ import annotations

import math

import pytest
import torch

from overcoat.block.experts import Experts, Weights, experts_layer, plain_experts
from overcoat.memory import record_kept
from overcoat.recipe import Recipe
from tests.emulation import experts_alone, sqnr

GPT_OSS = Experts("quick_gelu", transposed=True, interleaved=True, limit=7.0, shift=1.0)
KINDS = [
    (Experts("silu"), False),
    (Experts("silu"), True),
    (GPT_OSS, True),
    (Experts("relu2", gated=False), False),
    (Experts("gelu_tanh", transposed=True), False),
]
TOKENS, HIDDEN, WIDTH, COUNT, CHOSEN = 256, 96, 80, 6, 2


def made(how, has_bias, seed, device="cpu", routes="some"):
    """Parameters, x, indices and weights, in FP32; expert 1 is empty, expert 2 has outliers."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    wide = WIDTH * (1 + how.gated)
    w1, w2 = normal(COUNT, wide, HIDDEN) / math.sqrt(HIDDEN), normal(COUNT, HIDDEN, WIDTH) / math.sqrt(WIDTH)
    w1[2, ::7] *= 8.0
    if how.transposed:
        w1, w2 = w1.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    biases = (normal(COUNT, wide), normal(COUNT, HIDDEN)) if has_bias else (None, None)
    scores = normal(TOKENS, COUNT)
    scores[:, 1] -= 99.0
    if routes == "one":
        scores[:, 0] += 99.0
    weights, index = scores.softmax(1).topk(CHOSEN)
    x, dy = normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN)
    parameters = Weights(*[None if each is None else each.to(device) for each in (w1, w2, *biases)])
    return parameters, x.to(device), index.to(device), weights.to(device), dy.to(device)


def gradients(function, parameters, x, index, weights, dy, dtype):
    """Result and gradients by name."""
    leaves = Weights(*[None if each is None else each.clone().to(dtype).requires_grad_() for each in parameters])
    x, weights = x.clone().to(dtype).requires_grad_(), weights.clone()
    weights = weights.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    y = function(x, index, weights, leaves)
    y.backward(dy.to(dtype))
    named = {f"d{name}": each.grad for name, each in leaves._asdict().items() if each is not None}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **named}


def compared(how, has_bias, seed, device="cpu", routes="some", recipe=None, dtype=torch.float32):
    """dB of each result, of ours and of FP8 GEMMs alone."""
    given, recipe = made(how, has_bias, seed, device, routes), recipe or Recipe()
    exact = gradients(lambda *args: plain_experts(*args, how), *given, torch.float64)
    ours = gradients(lambda *args: experts_layer(*args, how, recipe), *given, dtype)

    floor = gradients(lambda *args: experts_alone(*args, how, recipe.grad_format), *given, torch.float64)
    return {name: (sqnr(exact[name], ours[name]), sqnr(exact[name], floor[name])) for name in exact}


@pytest.mark.parametrize(("how", "has_bias"), KINDS)
@pytest.mark.parametrize("routes", ["some", "one"])
def test_gradients_lose_no_more_than_fp8_gemms(how, has_bias, routes, device):
    """In sum over the seeds: z in 8-bit groups, and one scale for all tokens, cost less than 1 dB."""
    found = [compared(how, has_bias, seed, device, routes) for seed in range(8)]
    for name in found[0]:
        ours, alone = (sum(10 ** (-each[name][i] / 10) for each in found) for i in (0, 1))
        lost = 10 * math.log10(max(ours, 1e-12) / max(alone, 1e-12))
        assert lost < 1.0, f"{name}: {lost:.2f} dB below FP8 GEMMs alone"


@pytest.mark.parametrize("recipe", [Recipe.paper(), Recipe(linear_scaling="block"), Recipe(grad_format="e4m3")])
def test_other_recipes(recipe, device):
    found = compared(Experts("silu"), False, 0, device, recipe=recipe, dtype=torch.bfloat16)
    for name, (ours, alone) in found.items():
        assert ours > alone - 1.5, (name, ours, alone)


def test_two_runs_have_the_same_bits_and_what_is_frozen_has_no_gradient(device):
    parameters, x, index, weights, dy = made(Experts("silu"), False, 3, device)
    first, second = (
        gradients(
            lambda *a: experts_layer(*a, Experts("silu"), Recipe()), parameters, x, index, weights, dy, torch.bfloat16
        )
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    frozen = Weights(*[None if each is None else each.to(torch.bfloat16) for each in parameters])
    x = x.to(torch.bfloat16).requires_grad_()
    with record_kept() as kept:
        y = experts_layer(x, index, weights, frozen, Experts("silu"), Recipe())
    assert ("experts", "x") not in kept.by_tensor()
    y.backward(dy.to(torch.bfloat16))
    assert torch.equal(x.grad, first["dx"])
    assert all(each.grad is None for each in frozen if each is not None)


def test_saves_a_token_once_and_8_bits_of_each_pair(device):
    parameters, x, index, weights, _ = made(Experts("silu"), False, 0, device)
    leaves = Weights(*[None if each is None else each.bfloat16().requires_grad_() for each in parameters])
    with record_kept() as kept:
        experts_layer(x.bfloat16(), index, weights, leaves, Experts("silu"), Recipe())
    sizes = kept.by_tensor()
    slots = sizes["experts", "codes"] / (2 * WIDTH)
    assert sizes["experts", "x"] == TOKENS * HIDDEN
    assert TOKENS * CHOSEN <= slots <= TOKENS * CHOSEN + COUNT * 63


def test_under_autocast_compiled_and_checkpointed(device):
    how = Experts("silu")
    parameters, x, index, weights, dy = made(how, False, 0, device)
    given = (parameters, x, index, weights, dy)
    expected = gradients(lambda *a: experts_layer(*a, how, Recipe()), *given, torch.bfloat16)

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(experts_layer, *args, how, Recipe(), use_reentrant=False)

    compiled = torch.compile(experts_layer, backend="aot_eager", fullgraph=True)
    for function in (checkpointed, lambda *a: compiled(*a, how, Recipe())):
        found = gradients(function, *given, torch.bfloat16)
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def lowered(*args):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return experts_layer(*args, how, Recipe())

    found = gradients(lowered, *given, torch.float32)
    assert found["y"].dtype == torch.float32
    assert found["dw1"].dtype == torch.float32
    assert sqnr(expected["dw1"], found["dw1"]) > 20


def test_one_token(device):
    parameters, x, index, weights, dy = made(Experts("silu"), False, 0, device)
    few = (parameters, x[:1], index[:1], weights[:1], dy[:1])
    ours = gradients(lambda *a: experts_layer(*a, Experts("silu"), Recipe()), *few, torch.float32)
    exact = gradients(lambda *a: plain_experts(*a, Experts("silu")), *few, torch.float64)
    assert all(sqnr(exact[name], ours[name]) > 15 for name in exact)


@pytest.mark.gpu
def test_a_cuda_graph_replays_for_other_routes():
    """Bit for bit what they compute without one: how many slots an expert has is read on the device alone."""
    how = Experts("silu")
    parameters, x, index, weights, dy = made(how, False, 0, "cuda")
    leaves = Weights(*[None if each is None else each.bfloat16().requires_grad_() for each in parameters])
    x, dy, weights = x.bfloat16().requires_grad_(), dy.bfloat16(), weights.requires_grad_()
    wanted = (x, weights, leaves.w1, leaves.w2)

    def step():
        y = experts_layer(x, index, weights, leaves, how, Recipe())
        return (y, *torch.autograd.grad(y, wanted, dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for routes in ("some", "one"):
        _, *other = made(how, False, 5, "cuda", routes)
        with torch.no_grad():
            for mine, new in zip((x, index, weights, dy), other, strict=True):
                mine.copy_(new)
        graph.replay()
        found = [each.clone() for each in results]
        assert all(torch.equal(mine, plain) for mine, plain in zip(found, step(), strict=True))
