"""SigLIP: CLIP's layers with GELU by tanh; PaliGemma's and LLaVA-OneVision's tower."""

from __future__ import annotations

from overcoat.models.clip import branches
from overcoat.models.family import Family

FAMILY = Family(
    module="transformers.models.siglip.modeling_siglip",
    layer="SiglipEncoderLayer",
    causal="SiglipVisionModel",
    norm=None,
    branches=branches,
    samples={"siglip": {}},
    encoder=True,
    rotary=False,
)
