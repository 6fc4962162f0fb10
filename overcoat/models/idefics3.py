"""Idefics 3: SigLIP's layers under its own names."""

from __future__ import annotations

from overcoat.models.clip import branches
from overcoat.models.family import Family

FAMILY = Family(
    module="transformers.models.idefics3.modeling_idefics3",
    layer="Idefics3EncoderLayer",
    causal="Idefics3VisionTransformer",
    norm=None,
    branches=branches,
    samples={"idefics3": {}},
    encoder=True,
    rotary=False,
)
