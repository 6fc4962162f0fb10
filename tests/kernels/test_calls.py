"""How many functions of this package an eager block calls: its host time, which a clock on a busy machine cannot hold.

A small block's time is the host's: some 30 launches and 12 products, and the Python between them. Kernels, the
library's products and attention do nothing here; all that leads to them runs, on a CPU, for each of the block's ops.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat
from overcoat.kernels import attention, gemm, launch, op
from tests.kernels import variants

# Forward and backward, without biases and with. What needs more should be worth more.
MOST = {False: 705, True: 724}


def remember(kernel, grid, args, options):
    """What Triton's launch leaves behind."""
    kernel.pointers = next(i for i, arg in enumerate(args) if not isinstance(arg, Tensor))
    types = [pointer.dtype for pointer in args[: kernel.pointers]]
    kernel.entries[(-1, args[kernel.pointers :], tuple(options.values()), *types)] = (None, "".format, 0, None, ())


NO_ATTENTION = attention.Kernel(
    lambda qkv, *_: (torch.empty_like(qkv[0]), qkv[0].new_empty(qkv[0].shape[:3], dtype=torch.float32)),
    lambda do, qkv, *_: tuple(torch.empty_like(x) for x in qkv),
)


@pytest.fixture
def _gpu(monkeypatch):
    """CPU tensors pass for a GPU's, whose index is theirs, -1."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", functools.partial(int, -1), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
    monkeypatch.setattr(op, "_is_cuda", torch.is_tensor)
    monkeypatch.setattr(launch.Kernel, "_launch_by_triton", remember)
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, *_, out_dtype, **__: a.new_empty(len(a), b.shape[1], dtype=out_dtype)
    )
    monkeypatch.setattr(gemm.cublaslt, "plan", lambda *key: None)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", type(None), raising=False)
    monkeypatch.setattr(gemm, "has_float8_tensor_cores", lambda device: True)
    monkeypatch.setattr(attention, "chosen", lambda q, mask, window: NO_ATTENTION)


def calls_of(function) -> list[str]:
    """The functions of this package that are called, by name, one entry for each call."""
    found: list[str] = []
    package = overcoat.__path__[0]

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def block_step(recipe: overcoat.Recipe, biased: bool = False):
    """Forward and backward of a small converted layer."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=64, attention_bias=biased, mlp_bias=biased,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().train()
    overcoat.convert(model, recipe)
    layer, x = model.model.layers[0], torch.randn(1, 32, 256, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(32)[None])

    def step():
        y = layer(x, attention_mask=None, position_embeddings=tables)
        y.backward(torch.ones_like(y))

    return step


RECIPES = (
    overcoat.Recipe(),
    overcoat.Recipe.paper(),
    overcoat.Recipe.leanest(),
    overcoat.Recipe(linear_scaling="block"),
    overcoat.Recipe(kept_attention="bf16", grad_format="e4m3"),
)


@pytest.mark.usefixtures("_gpu")
def test_triton_accepts_what_a_block_launches(monkeypatch):
    """The interpreter runs what the compiler refuses: a pointer of another type after a branch, say. Most launches are
    those of several recipes, and compiled once."""
    seen: dict[tuple[Any, ...], variants.Variant] = {}

    def record(kernel, grid, args, options):
        variant = variants.Variant.of(kernel, args, options, True)
        seen[kernel, str((variant.types, variant.constants))] = variant
        remember(kernel, grid, args, options)

    for kernel in variants.entry_kernels().values():
        monkeypatch.setattr(kernel, "entries", {})  # of earlier tests
    monkeypatch.setattr(launch.Kernel, "_launch_by_triton", record)
    with torch.autograd.set_multithreading_enabled(False):
        for recipe in RECIPES:
            block_step(recipe)()

    assert len(seen) >= 40, f"{len(seen)} are not all launches of a block"
    for variant in seen.values():
        variant.ptx(ttir_alone=True)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("biased", MOST)
def test_an_eager_block_calls_few_functions(biased):
    step = block_step(overcoat.Recipe(), biased)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):  # launches and maxima of weights are remembered
            step()
        found = calls_of(step)
    assert found.count("launch") == (28 if biased else 26), "not the ops of a block"

    assert len(found) <= MOST[biased], len(found)
