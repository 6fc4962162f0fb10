"""A converted model compiled as a whole is not compiled again for each shape, and its layers run as CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import overcoat
from overcoat import Recipe
from tests.models.graphs import recorded, skipped
from tests.models.zoo import make_batch, make_model

# Rows and their length. torch.compile takes each for a constant, until it sees another.
FIRST = [(2, 80), (3, 80), (3, 96)]
LATER = [(5, 96), (2, 93), (4, 61), (3, 128), (6, 127)]
BIASES_OF_QKV = ("q_proj.bias", "k_proj.bias", "v_proj.bias")


@pytest.mark.nightly  # CI counts the graphs of layers: test_compiled.py
@pytest.mark.parametrize(
    ("kind", "recipe", "masks"),
    [
        ("llama", Recipe(), "causal"),
        ("qwen3", Recipe.leanest(), "left-padded"),
        # More than 128 tokens, as above: a single block of them is a shape of its own.
        ("starcoder2", Recipe(linear_scaling="block", head="fp8"), "causal"),
    ],
    ids=["default", "leanest", "block scales"],
)
def test_other_shapes_compile_no_other_graph(kind: str, recipe: Recipe, masks: str) -> None:
    torch.compiler.reset()
    model = make_model(kind, layers=1)
    assert len(overcoat.convert(model, recipe).converted) == 1
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    counts = []
    for batch, length in FIRST + LATER:
        loss = compiled(**make_batch(masks, batch, length), use_cache=False).loss
        loss.backward()
        assert loss.isfinite()
        counts.append(graphs.frame_count)
    # One of constants, then with free rows, then with free length too.
    assert 1 <= counts[len(FIRST) - 1] <= 3, counts
    assert counts[-1] == counts[len(FIRST) - 1], counts


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", Recipe()),
        ("qwen2", Recipe(kept_attention="bf16")),
        ("qwen3", Recipe.leanest()),
        ("starcoder2", Recipe.paper()),
    ],
    ids=["default", "attention bf16", "leanest", "paper"],
)
def test_layers_replayed_as_cuda_graphs_give_the_eager_gradients(kind: str, recipe: Recipe) -> None:
    """Bit for bit, for new tokens and new weights: nothing of the first run may be left in a graph.

    But for gradients of the biases of q, k and v, which PyTorch sums, compiled in another order: each to two units of
    BF16, and where the tokens' terms cancel, to 2^-14 of the largest.
    """
    torch.compiler.reset()
    skipped_before = skipped()
    model = make_model(kind, layers=2).cuda()
    overcoat.convert(model, recipe)
    eager = list(model.model.layers)
    captured = [torch.compile(layer, mode="reduce-overhead", fullgraph=True) for layer in eager]

    def run(layers: list[Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for index, layer in enumerate(layers):
            model.model.layers[index] = layer
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        found = {name.replace("._orig_mod", ""): p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return {"loss": loss.detach().clone(), **found}

    for step in range(5):  # two to warm up, one to capture, two replays
        inputs = {name: value.cuda() for name, value in make_batch(length=64, seed=step).items()}
        expected = run(eager, inputs)
        for name, result in run(captured, inputs).items():
            wanted = expected[name]
            if kind == "qwen2" and name.endswith(BIASES_OF_QKV):
                wanted, limit = wanted.float(), 2**-7 * wanted.float().abs() + 2**-14 * wanted.abs().max()
                assert ((result.float() - wanted).abs() <= limit).all(), (step, name)
            else:
                assert torch.equal(result, wanted), (step, name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.1 * step)
    assert recorded() >= 2 * len(eager)
    assert skipped() == skipped_before
