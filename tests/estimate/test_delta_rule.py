"""Gated DeltaNet in dry runs: what flash-linear-attention would hold, not what PyTorch's loops over chunks do."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from overcoat import cli
from overcoat.estimate.delta_rule import RULE, library_delta_rule
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.models.shapes import MODELS

HYBRID = MODELS["qwen3.5-9b"].changed(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)


def operands(device, tokens=100):
    def made(*shape, dtype=torch.bfloat16):
        return torch.rand(2, tokens, *shape, dtype=dtype, device=device).requires_grad_()

    return made(2, 16), made(2, 16), made(4, 32), made(4, dtype=torch.float32), made(4)


@pytest.fixture
def model():
    with torch.device("meta"):
        return Qwen3_5ForCausalLM(HYBRID.config())


def test_it_saves_what_the_kernel_saves(model):
    """q and k normed, with their norms; v; decays; beta; the inverse of each chunk (64 x 64)."""
    saved = []
    given = operands("meta")

    def note(x):
        saved.append(x)
        return x

    with library_delta_rule(model), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output, _ = getattr(modeling_qwen3_5, RULE)(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True)
    rows = 2 * 100
    assert sum(x.nbytes for x in saved) == rows * (2 * 2 * (16 * 2 + 4) + 4 * 32 * 2 + 4 * 4 + 4 * 2 + 4 * 64 * 2)
    assert (output.shape, output.dtype) == (given[2].shape, torch.bfloat16)
    output.backward(torch.empty_like(output))
    assert [x.grad.shape for x in given] == [x.shape for x in given]


def test_real_tensors_are_computed(model):
    rule, given = getattr(modeling_qwen3_5, RULE), operands("cpu")
    with library_delta_rule(model):
        found = getattr(modeling_qwen3_5, RULE)
        assert found is not rule
        assert found == rule  # to a fingerprint of layers
        torch.testing.assert_close(found(*given)[0], rule(*given)[0], rtol=0, atol=0)
    assert getattr(modeling_qwen3_5, RULE) is rule


def test_layers_stay_converted_and_chunks_cost_no_ops():
    """More tokens are no more launches."""
    predictor = Predictor(HYBRID.config())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of layers that changed
        launches = [predictor.times(1, tokens, Setup()).host for tokens in (1024, 2048)]
    assert launches[0] == launches[1] > 0
    assert len(predictor.predict(1, 1024).report.in_part) == 3  # the fourth, of full attention, is fused


@pytest.mark.parametrize("model", [HYBRID, MODELS["124m"].changed(num_hidden_layers=1)], ids=["hybrid", "llama"])
def test_the_assumption_is_printed(model, capsys, tmp_path):
    model.config().save_pretrained(tmp_path)
    words = ["estimate", "--model", str(tmp_path), "--seq", "256"]
    assert cli.main(words) == cli.main([*words, "--json"]) == 0
    *text, data = capsys.readouterr().out.splitlines()
    assert any("flash-linear-attention" in line for line in text) == (model is HYBRID)
    assert json.loads(data)["has_delta_rule"] == (model is HYBRID)
