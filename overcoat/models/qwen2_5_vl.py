"""Qwen 2.5 VL's text: Qwen 2 with rotation by time, row and column, which reaches the layers as cos and sin."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    layer="Qwen2_5_VLDecoderLayer",
    causal="",
    norm="Qwen2_5_VLRMSNorm",
    branches=branches,
    samples={},
)
