"""OLMo 3: OLMo 2 with sliding windows in three layers of four, which arrive as the mask."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.olmo2 import branches

FAMILY = Family(
    module="transformers.models.olmo3.modeling_olmo3",
    layer="Olmo3DecoderLayer",
    causal="Olmo3ForCausalLM",
    norm="Olmo3RMSNorm",
    branches=branches,
    samples={"olmo3": {"sliding_window": 24}},
)
