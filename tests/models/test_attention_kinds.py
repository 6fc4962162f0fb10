"""Models configured for flash or flex attention compute what those with sdpa do: Overcoat's attention is its own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from overcoat.kernels.attention import document_starts
from overcoat.kernels.gemm import why_no_block_gemm
from overcoat.models.decoder import block_of
from overcoat.models.family import family_of, original_class
from tests.models.zoo import make_batch, make_encoder, make_inputs, make_model
from tests.nightly import mostly_nightly
from tests.waits import waiting_is_an_error

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
@torch.compiler.set_stance("force_eager")  # transformers compiles the masks of flex attention
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


@pytest.mark.parametrize("given", [True, False])
def test_layers_wrapped_by_torch_compile_are_told_where_documents_begin(given: bool) -> None:
    """They took a packed row for one document; and what the caller says could not be checked in the graph."""
    losses, inputs = [], make_batch("packed", length=96)
    if given:
        inputs["cu_seq_lens_q"] = document_starts(inputs["position_ids"])
    for wrapped in (False, True):
        model = make_model("llama", layers=2)
        model.config._attn_implementation = "flash_attention_2"
        overcoat.convert(model)
        if wrapped:
            layers = [torch.compile(layer, backend="eager", fullgraph=True) for layer in model.model.layers]
            model.model.layers = nn.ModuleList(layers)
        losses.append(model(**inputs).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 192])  # 96 is none of them
    with pytest.raises(ValueError, match="every multiple of 96 among them"):
        model(**inputs)


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


# But packed documents of gpt_oss, which see each other through transformers' own masks.
WINDOWED = [
    *itertools.product(("mistral", "gemma3"), ("causal", "packed", "right-padded")),
    *(("gpt_oss", batch) for batch in ("causal", "right-padded")),
]


@pytest.mark.parametrize(("kind", "batch"), mostly_nightly(WINDOWED, WINDOWED[::2]))
def test_windows_of_layers_that_get_lengths(kind: str, batch: str) -> None:
    found = []
    for implementation in (None, "flash_attention_2"):
        model = make_model(kind, layers=2)
        model.config._attn_implementation = implementation or model.config._attn_implementation
        overcoat.convert(model, Recipe(head=None), strict=True)
        found.append(results(model, make_batch(batch, length=96)))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-3, atol=1e-6, msg=name)


def test_windows_to_both_sides_without_a_mask_are_refused() -> None:
    model = make_encoder("modernbert")
    model.config._attn_implementation = "flash_attention_2"
    rows = [row for row in overcoat.convert(model).layers if not row.converted]
    assert rows
    assert rows[0].detail.endswith("no mask for their window: use sdpa")


# ---- Converted decoder layers do not make the host wait for the GPU -------------------------------------------------


BATCH, LENGTH = 2, 61
# By what is different: the kind of model, the recipe, and the dtype of a mask.
WAITS = {
    "default": ("llama", Recipe(), None),
    "leanest": ("llama", Recipe.leanest(), None),
    "paper": ("llama", Recipe.paper(), None),
    "block scales": ("llama", Recipe(linear_scaling="block"), None),
    "attention in 16 bits": ("llama", Recipe(kept_attention="bf16"), None),
    "norms after": ("olmo2", Recipe(), None),
    "biases of q, k, v": ("qwen2", Recipe(), None),
    "biases, block scales": ("qwen2", Recipe(linear_scaling="block"), None),
    "head norms": ("qwen3", Recipe(), None),
    "head norms, leanest": ("qwen3", Recipe.leanest(), None),
    "layer norm, gelu": ("starcoder2", Recipe(), None),
    "layer norm, gelu, leanest": ("starcoder2", Recipe.leanest(), None),
    "layer norm, gelu, block scales": ("starcoder2", Recipe(linear_scaling="block"), None),
    "boolean mask": ("llama", Recipe(), torch.bool),
    "additive mask": ("llama", Recipe(), torch.bfloat16),
}


def padded_mask(dtype: torch.dtype) -> torch.Tensor:
    """Causal, the second row padded on the left: (B, 1, S, S), True or 0 where visible."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().repeat(BATCH, 1, 1, 1)
    visible[1, :, :, :5] = False
    hidden = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(~visible, torch.finfo(torch.bfloat16).min)
    return visible if dtype == torch.bool else hidden


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize(("kind", "recipe", "mask_dtype"), WAITS.values(), ids=WAITS)
def test_the_host_does_not_wait_for_a_block(kind: str, recipe: Recipe, mask_dtype: torch.dtype | None) -> None:
    """Forward and backward of the blocks alone: what transformers does around them is its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    if recipe.linear_scaling == "block" and why_no_block_gemm(device):
        pytest.skip(why_no_block_gemm(device))
    model = make_model(kind, layers=2).to(device)
    assert len(overcoat.convert(model, recipe).converted) == 2
    layers, ids = model.model.layers, make_batch(batch=BATCH, length=LENGTH)["input_ids"].to(device)
    x = model.model.embed_tokens(ids).detach().requires_grad_()
    embeddings = model.model.rotary_emb(x, torch.arange(LENGTH, device=device)[None])
    mask = None if mask_dtype is None else padded_mask(mask_dtype).to(device)

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y, position_embeddings=embeddings, attention_mask=mask)
        y.backward(torch.ones_like(y))

    for _ in range(2):  # kernels are compiled and tuned, libraries make their workspaces
        step()
    with waiting_is_an_error():
        step()  # the weights' maxima are known
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.mul_(0.5)
        step()  # and looked for again
    assert all(parameter.grad.isfinite().all() for parameter in layers.parameters())


@pytest.mark.gpu
def test_a_wait_would_be_seen() -> None:
    """On the thread that calls and on autograd's, which runs the backward."""
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient.mul(gradient.sum().item()))
    with waiting_is_an_error():
        with pytest.raises(RuntimeError, match="synchronizing"):
            y.sum().item()
        with pytest.raises(RuntimeError, match="synchronizing"):
            y.sum().backward()
    y.sum().item()


def test_an_eps_that_is_an_integer_is_taken_as_a_number() -> None:
    """Launches that are remembered do not tell 0 from 0.0, kernels do."""
    model = make_model("qwen3", layers=1)
    layer = model.model.layers[0]
    for norm in (layer.input_layernorm, layer.self_attn.q_norm):
        norm.variance_epsilon = 0
    attention, mlp = block_of(family_of(layer).branches(layer, 1), family_of(layer), layer).branches
    assert [type(eps) for eps in (attention.mixer.heads.eps, attention.pre.eps, mlp.pre.eps)] == [float] * 3


def test_a_batch_of_another_shape_is_refused() -> None:
    """(1, B, S) would be taken for one sequence of B * S tokens, each row seeing the rows before it."""
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    ids = make_batch()["input_ids"]
    with pytest.raises(ValueError, match=r"shape \(1, 2, 61, 256\): a decoder layer takes \(batch, sequence, hidden\)"):
        model(input_ids=ids[None], labels=ids[None])
