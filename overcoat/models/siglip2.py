"""SigLIP 2: SigLIP on images of different sizes, padded to one length: a mask of all pairs hides the padding."""

from __future__ import annotations

from overcoat.models.clip import branches
from overcoat.models.family import Family

FAMILY = Family(
    module="transformers.models.siglip2.modeling_siglip2",
    layer="Siglip2EncoderLayer",
    causal="Siglip2VisionModel",
    norm=None,
    branches=branches,
    samples={"siglip2": {}},
    encoder=True,
    rotary=False,
)
