"""Small models of every family in the registry, and batches of every kind of mask. Random weights, no downloads."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.models.family import Family, families

VOCAB = 512
# By name: the family, and what the configuration has beside the fields below.
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    name: (family, extra) for family in families() for name, extra in family.samples.items()
}


def make_model(kind: str = "llama", layers: int = 4, seed: int = 0, **overrides: object) -> nn.Module:
    """A BF16 model with grouped-query heads, uneven norm weights and non-zero biases."""
    torch.manual_seed(seed)
    family, extra = KINDS[kind]
    model_class = getattr(importlib.import_module(family.module), family.causal)
    values = dict(  # noqa: C408
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    model = model_class(model_class.config_class(**{**values, **extra, **overrides})).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model.train()


def make_batch(kind: str = "causal", batch: int = 2, length: int = 61, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels; `kind` is causal, left-padded, right-padded or packed (position_ids that restart)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind.endswith("padded"):
        mask = torch.ones_like(ids)
        for row in range(batch):
            pad = 5 + 8 * row
            mask[row, slice(0, pad) if kind.startswith("left") else slice(length - pad, None)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
    elif kind == "packed":
        cuts = torch.tensor([0, length // 4, length // 2 + 3, length])
        positions = torch.cat([torch.arange(int(n)) for n in cuts.diff()])
        inputs["position_ids"] = positions.expand(batch, -1).contiguous()
    elif kind != "causal":
        raise ValueError(f"unknown batch kind {kind!r}")
    return inputs
