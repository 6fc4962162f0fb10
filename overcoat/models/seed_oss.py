"""Seed-OSS: Llama with biases of q, k and v, and heads whose width is given."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.seed_oss.modeling_seed_oss",
    layer="SeedOssDecoderLayer",
    causal="SeedOssForCausalLM",
    norm="SeedOssRMSNorm",
    branches=branches,
    samples={"seed_oss": {"head_dim": 64, "residual_dropout": 0.0}},
)
