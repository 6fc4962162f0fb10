"""The sweep of transformers' kinds finds no fault, and would find one: `pytest tests/sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overcoat.models import linear_layers
from tests.nightly import mostly_nightly
from tests.sweep import page, tiny
from tests.sweep.compare import Row, row

# A block, experts in a block, linear layers alone, a hybrid, images, an encoder.
IN_CI = (
    ("llama", tiny.CAUSAL),
    ("mixtral", tiny.CAUSAL),
    ("deepseek_v3", tiny.CAUSAL),
    ("lfm2", tiny.CAUSAL),
    ("qwen3_vl", tiny.IMAGE_TEXT),
    ("roberta", tiny.ENCODERS),
)
EVERY = [(kind, mapping) for mapping in tiny.MAPPINGS for kind in tiny.kinds(mapping)]


@pytest.mark.parametrize(("kind", "mapping"), mostly_nightly(EVERY, IN_CI))
def test_no_kind_is_wrong_silent_or_fails(kind: str, mapping: str) -> None:
    found = row(kind, mapping)
    assert not found.faults, found
    assert (kind, mapping) not in IN_CI or found.ours is not None, found


def test_a_wrong_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with 512 rows alone: half of it."""
    own: Any = linear_layers.linear_layer
    half = lambda x, weight, *rest: own(x, weight, *rest) * (0.5 if len(weight) == 512 else 1.0)  # noqa: E731
    monkeypatch.setattr(linear_layers, "linear_layer", half)
    assert any(fault.startswith("wrong: gradients") for fault in row("deepseek_v3").faults)


def test_a_layer_that_runs_its_own_forward_unsaid_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers.Fp8Linear, "forward", torch.nn.Linear.forward)
    assert "silent: its gradients are FP32's" in row("bitnet").faults


def test_a_table_keeps_the_lines_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "models.md"
    path.write_text("before\n<!-- sweep: causal -->\n<!-- end -->\nafter\n")
    first = Row("llama", "LlamaForCausalLM", "whole", head="yes", ours=16.0, alone=16.1)
    second = Row("bamba", "BambaForCausalLM", "1 of 2 in blocks", ("a | b",), faults=("wrong: x",))
    page.write({"causal": [first]}, whole=True, page=path)
    page.write({"causal": [second]}, whole=False, page=path)
    text = path.read_text()
    assert text.startswith("before\n<!-- sweep: causal -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| `llama` | `LlamaForCausalLM` | whole | yes | 16.0 / 16.1 |\n" in text
    assert r"1 of 2 in blocks: a \| b" in text
    assert "* `bamba`: wrong: x\n" in text
    page.write({"causal": [second]}, whole=True, page=path)
    assert "llama" not in path.read_text()
    with pytest.raises(ValueError, match="image-text"):
        page.write({"image-text": [second]}, whole=True, page=path)
