"""SmolVLM: SigLIP's layers under its own names."""

from __future__ import annotations

from overcoat.models.clip import branches
from overcoat.models.family import Family

FAMILY = Family(
    module="transformers.models.smolvlm.modeling_smolvlm",
    layer="SmolVLMEncoderLayer",
    causal="SmolVLMVisionTransformer",
    norm=None,
    branches=branches,
    samples={"smolvlm": {}},
    encoder=True,
    rotary=False,
)
