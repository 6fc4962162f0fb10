"""GPT-NeoX, Pythia: attention and MLP side by side, each with its LayerNorm; q, k, v of each head in one layer."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)) + mlp(norm(x)), or with use_parallel_residual = False one after the other."""
    of_scores, mlp = layer.attention, layer.mlp
    width = of_scores.head_size
    rotated = 0 if of_scores.rotary_ndims == width else of_scores.rotary_ndims
    into, out, activation = mlp.dense_h_to_4h, mlp.dense_4h_to_h, of_scores.config.hidden_act
    return (
        attention(
            of_scores,
            batch,
            pre=layer.input_layernorm,
            into=(of_scores.query_key_value,),
            by_head=True,
            out=of_scores.dense,
            width=width,
            rotated=rotated,
        ),
        plain_mlp(mlp, into, out, activation, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.gpt_neox.modeling_gpt_neox",
    layer="GPTNeoXLayer",
    causal="GPTNeoXForCausalLM",
    norm=None,
    parallel=lambda layer: bool(layer.use_parallel_residual),
    branches=branches,
    trunk="gpt_neox",
    samples={"gpt_neox": {}, "gpt_neox-sequential": {"use_parallel_residual": False}},
)
