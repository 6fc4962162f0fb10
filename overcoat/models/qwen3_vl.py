"""Qwen 3 VL's text: Qwen 3 with rotation by time, row and column, which reaches the layers as cos and sin."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.qwen3_vl.modeling_qwen3_vl",
    layer="Qwen3VLTextDecoderLayer",
    causal="",
    norm="Qwen3VLTextRMSNorm",
    branches=branches,
    samples={},
)
