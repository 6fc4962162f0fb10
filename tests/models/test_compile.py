"""A converted model compiled as a whole is not compiled again for each shape: `pytest tests/models/test_compile.py`."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import overcoat
from overcoat import Recipe
from tests.models.zoo import make_batch, make_model

# Rows and their length. torch.compile takes each for a constant, until it sees another.
FIRST = [(2, 80), (3, 80), (3, 96)]
LATER = [(5, 96), (2, 93), (4, 61), (3, 128), (6, 127)]


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
