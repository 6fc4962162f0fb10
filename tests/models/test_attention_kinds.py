"""Models configured for flash or flex attention compute what those with sdpa do: Overcoat's attention is its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from overcoat.kernels.packed import document_starts
from overcoat.models.family import family_of, original_class
from overcoat.models.refusals import why_replaced
from tests.models.zoo import make_batch, make_encoder, make_inputs, make_model

CASES = [
    *(
        ("flash_attention_2", batch, head)
        for batch in ("causal", "packed", "right-padded", "lengths")
        for head in (("bf16", None) if batch == "packed" else ("bf16",))
    ),
    ("flash_attention_3", "packed", None),
    ("flex_attention", "packed", None),
    ("flex_attention", "right-padded", "bf16"),
]


def results(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this layer trains in its original precision")
        loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize(("kind", "batch", "head"), CASES)
def test_the_same_as_with_sdpa(kind: str, batch: str, head: Any) -> None:
    """With the lean head, which finds the documents once, and without, where each layer does."""
    found = []
    for implementation in ("sdpa", kind):
        model = make_model("llama", layers=2)
        model.config._attn_implementation = implementation
        report = overcoat.convert(model, Recipe(head=head))
        assert len(report.converted) == 2, str(report)
        inputs: dict[str, Any] = make_batch("packed" if batch == "lengths" else batch, length=96)
        if batch == "lengths":
            inputs["cu_seq_lens_q"] = document_starts(inputs["position_ids"])
        found.append(results(model, inputs))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-3, atol=1e-6, msg=name)


def test_a_layer_that_falls_back_gets_no_mask_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention would take it for padding; it reads the positions itself."""
    model, given = make_model("llama", layers=1), []
    model.config._attn_implementation = "flash_attention_2"
    overcoat.convert(model)
    layer = model.model.layers[0]
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)

    def forward(self: Any, hidden_states: Tensor, **inputs: Any) -> Tensor:
        given.append(inputs["attention_mask"])
        return hidden_states

    monkeypatch.setattr(original_class(layer), "forward", forward)
    with pytest.warns(UserWarning, match="up_proj is a Sequential"):
        model(**make_batch("packed", length=96))
    assert given == [None]


def test_documents_do_not_see_each_other() -> None:
    model = make_model("llama", layers=2)
    model.config._attn_implementation = "flash_attention_2"
    overcoat.convert(model)
    whole, packed = make_batch("causal", length=96), make_batch("packed", length=96)
    assert abs(model(**whole).loss - model(**packed).loss) > 1e-3


@pytest.mark.parametrize("kind", ["siglip2", "pixtral", "qwen2.5-vl-vision", "bert"])
def test_encoders_by_lengths_and_padding(kind: str) -> None:
    """Of SigLIP 2 and BERT the padding's own results do not count."""
    found = []
    for implementation in ("sdpa", "flash_attention_2"):
        model, inputs = make_encoder(kind), make_inputs(kind)
        model.config._attn_implementation = implementation
        assert len(overcoat.convert(model).converted) == 2
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="this layer trains in its original precision")
            result = model(**inputs).last_hidden_state
        real = inputs.get("attention_mask", inputs.get("pixel_attention_mask"))
        found.append(result if real is None else result[real.bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_the_hubs_kernels_are_taken_and_others_are_not() -> None:
    model = make_model("llama", layers=1)
    layer = model.model.layers[0]
    for kind, reason in (
        ("kernels-community/vllm-flash-attn3", None),
        ("paged|flash_attention_2", "attn_implementation is 'paged|flash_attention_2'; only sdpa, eager"),
        ("kernels-community/other", "attn_implementation is 'kernels-community/other'"),
    ):
        model.config._attn_implementation = kind
        found = why_replaced(layer, family_of(layer))
        assert (found is None) if reason is None else found is not None and found.startswith(reason)


def test_windows_without_a_mask_are_refused() -> None:
    model = make_model("starcoder2", layers=1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"no mask for sliding_window = 24: use sdpa"):
        overcoat.convert(model, strict=True)
