"""What one layer of a family keeps for its backward, in U = tokens x hidden x 2 bytes of its own hidden size.

Every family on the same shape, Llama-2-7B's proportions: an intermediate size of 2.6875 hidden ones (DINOv2's is four),
heads of 128 columns, as many key and value heads as query heads. Run on the meta device, as all estimates are.
"""

from __future__ import annotations

import importlib
from typing import Any, Optional

import torch

from overcoat.block.attention import Attention
from overcoat.block.norm import norm_forward
from overcoat.block.run import run_block
from overcoat.block.spec import Norm, Tables
from overcoat.estimate.dry_run import META
from overcoat.estimate.workspaces import LibraryAttention
from overcoat.memory import record_kept
from overcoat.models.decoder import block_of, norm_eps
from overcoat.models.family import Family, decoder_layers
from overcoat.recipe import Recipe

TOKENS, HIDDEN, INTERMEDIATE, HEADS = 8192, 1024, 2752, 8
# The same under the names that the families' configurations have for it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "n_inner"), INTERMEDIATE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    "head_dim": HIDDEN // HEADS,
    "vocab_size": 128,
    "pad_token_id": 0,
    **dict.fromkeys(("attention_dropout", "residual_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
}


def layer_of(family: Family, sample: str) -> Any:
    """A layer in that shape without data; sample: one of the family's, whose other fields it has."""
    model_class = getattr(importlib.import_module(family.module), family.causal)
    fields = {name: value for name, value in family.samples[sample].items() if name not in SIZES}
    with META:
        model = model_class(model_class.config_class(**{"attn_implementation": "sdpa", **SIZES, **fields})).to(
            torch.bfloat16
        )
    return next(iter(decoder_layers(model.train()).values()))


def kept_units(family: Family, sample: str, recipe: Optional[Recipe] = None) -> float:
    """U that a layer keeps under a recipe; of a mixture of experts without what its router and experts keep, which
    run beside the block."""
    layer, recipe = layer_of(family, sample), recipe or Recipe()
    branches = family.branches(layer, 1)
    heads = next(modules.mixer.heads for modules in branches if isinstance(modules.mixer, Attention))
    table = torch.empty((TOKENS, heads.rotated or heads.width), dtype=torch.bfloat16, device=META)
    x = torch.empty((1, TOKENS, HIDDEN), dtype=torch.bfloat16, device=META, requires_grad=True)
    with LibraryAttention(), record_kept(layer) as kept:
        y = run_block(x, block_of(branches, family, layer), Tables(table, table), recipe)
        norms = [modules.pre for modules in branches if modules.mixer is None]
        after = [norm_forward(y, Norm(norm.weight, None, norm_eps(norm)), recipe) for norm in norms]
    del after
    return sum(row.bytes for row in kept.rows if row.op != "block") / (2 * TOKENS * HIDDEN)
