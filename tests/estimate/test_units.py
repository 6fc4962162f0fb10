"""What one layer of a family keeps for its backward, in U = tokens x hidden x 2 bytes of its own hidden size.

Every family on the same shape, Llama-2-7B's proportions: an intermediate size of 2.6875 hidden ones (DINOv2's is four),
heads of 128 columns, as many key and value heads as query heads. Run on the meta device, as all estimates are.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from overcoat import Recipe
from overcoat.block.attention import Attention
from overcoat.block.norm import norm_forward
from overcoat.block.run import run_block
from overcoat.block.spec import Norm, Tables
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.dry_run import META
from overcoat.estimate.meter import LibraryAttention
from overcoat.memory import record_kept
from overcoat.models.decoder import block_of, norm_eps
from overcoat.models.family import decoder_layers, families
from overcoat.models.shapes import Model, sizes

TOKENS, HIDDEN, INTERMEDIATE, HEADS = 8192, 1024, 2752, 8
# The same under the names that the families' configurations have for it.
SIZES = {
    **dict.fromkeys(("hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "n_inner"), INTERMEDIATE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    "head_dim": HIDDEN // HEADS,
    "vocab_size": 128,
    "pad_token_id": 0,
    **dict.fromkeys(("attention_dropout", "residual_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
}


def layer_of(family, sample):
    """A layer in that shape without data; sample: one of the family's, whose other fields it has."""
    model_class = getattr(importlib.import_module(family.module), family.causal)
    fields = {name: value for name, value in family.samples[sample].items() if name not in SIZES}
    with META:
        model = model_class(model_class.config_class(**{"attn_implementation": "sdpa", **SIZES, **fields})).to(
            torch.bfloat16
        )
    return next(iter(decoder_layers(model.train()).values()))


def kept_units(family, sample, recipe=None):
    """U that a layer keeps under a recipe; of a mixture of experts without what its experts keep, which are left as
    they are."""
    layer, recipe = layer_of(family, sample), recipe or Recipe()
    branches = family.branches(layer, 1)
    heads = next(modules.core.heads for modules in branches if isinstance(modules.core, Attention))
    table = torch.empty((TOKENS, heads.rotated or heads.width), dtype=torch.bfloat16, device=META)
    x = torch.empty((1, TOKENS, HIDDEN), dtype=torch.bfloat16, device=META, requires_grad=True)
    with LibraryAttention(), record_kept(layer) as kept:
        y = run_block(x, block_of(branches, family, layer), Tables(table, table), recipe)
        norms = [modules.pre for modules in branches if modules.core is None]
        after = [norm_forward(y, Norm(norm.weight, None, norm_eps(norm)), recipe) for norm in norms]
    del after
    return sum(row.bytes for row in kept.rows if row.op != "block") / (2 * TOKENS * HIDDEN)


SAMPLES = [(family, sample) for family in families() for sample in family.samples]
KNOWN = {family.layer: (family, sample) for family, sample in reversed(SAMPLES)}


@pytest.mark.parametrize(("family", "sample"), SAMPLES, ids=[sample for _, sample in SAMPLES])
def test_no_family_keeps_more_than_seven_u(family, sample):
    """Two thirds of it is what every block needs: the inputs of its layers in 8 bits, attention, gate and up."""
    units = kept_units(family, sample)
    assert 2.9 < units <= 7.0
    assert kept_units(family, sample, Recipe.leanest()) < 1.1


def test_where_the_units_go():
    """Inputs 0.5 each, attention 2, gate and up 1.34 each (without gate one of them), a norm after 0.5, scales."""
    llama = 0.5 + 2.0 + 0.5 + 2 * INTERMEDIATE / HIDDEN / 2
    scales = 0.09
    for layer, more in (
        ("LlamaDecoderLayer", 0.0),
        ("Gemma2DecoderLayer", 1.0),  # norms after attention and MLP
        ("CLIPEncoderLayer", -INTERMEDIATE / HIDDEN / 2),  # no gate
        ("MixtralDecoderLayer", -INTERMEDIATE / HIDDEN),  # the experts' own
    ):
        assert kept_units(*KNOWN[layer]) == pytest.approx(llama + more + scales, abs=0.05), layer


@pytest.mark.parametrize("kind", ["LlamaConfig", "Olmo2Config", "Qwen3Config"])
def test_units_are_what_a_model_keeps_more_for_a_layer_more(kind):
    fields = sizes(HIDDEN, INTERMEDIATE, 1, HEADS, HEADS, 128, head_dim=HIDDEN // HEADS)
    totals = [
        Predictor(Model(kind, fields).changed(num_hidden_layers=count).config())
        .kept(4, 2048, Setup())
        .units(8192, HIDDEN)
        for count in (1, 2)
    ]
    family, sample = KNOWN[kind.removesuffix("Config") + "DecoderLayer"]
    assert totals[1] - totals[0] == pytest.approx(kept_units(family, sample), rel=0.002)
