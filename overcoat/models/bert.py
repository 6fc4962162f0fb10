"""BERT: norms of the sums instead of before the branches, biases, attention of all tokens without rotation, GELU."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = norm(x + attention(x)); x = norm(x + dense(gelu(dense(x))))."""
    module, after, mlp, last = layer.attention.self, layer.attention.output, layer.intermediate, layer.output
    return (
        attention(
            module,
            batch,
            into=(module.query, module.key, module.value),
            out=after.dense,
            width=module.attention_head_size,
            post=after.LayerNorm,
        )._replace(outer=True, around=(layer.attention, after)),
        plain_mlp(mlp, mlp.dense, last.dense, module.config.hidden_act, post=last.LayerNorm)._replace(
            outer=True, around=(last,)
        ),
    )


FAMILY = Family(
    module="transformers.models.bert.modeling_bert",
    layer="BertLayer",
    causal="BertModel",
    norm=None,
    branches=branches,
    samples={"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
    encoder=True,
    rotary=False,
)
