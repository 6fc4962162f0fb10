"""The parameters of a decoder block: by name, as the ops read them, and as the flat list that autograd wants.

An `autograd.Function` knows tensors among its own arguments alone, so a block's parameters go in one by one and are put
together again inside, and their gradients come back in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from torch import Tensor

from overcoat.ops.attention import Rotary
from overcoat.ops.linear import Norm


class Linear(NamedTuple):
    """A linear layer's parameters: weight (N, K), bias (N,) or None."""

    weight: Tensor
    bias: Optional[Tensor]


class Block(NamedTuple):
    """The parameters of a Llama-shaped block, or of one whose MLP has no gate.

    gate: None without; gelu: then the `approximate` of the GELU between up and down, else None (SwiGLU).
    """

    attention_norm: Norm
    mlp_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Optional[Linear]
    up: Linear
    down: Linear
    gelu: Optional[str] = None

    @property
    def qkv(self) -> tuple[list[Tensor], list[Optional[Tensor]]]:
        """Weights and biases that read the attention norm's output."""
        return _unzip(self.q, self.k, self.v)

    @property
    def gate_up(self) -> tuple[list[Tensor], list[Optional[Tensor]]]:
        """Weights and biases that read the MLP norm's output."""
        return _unzip(self.up) if self.gate is None else _unzip(self.gate, self.up)


def _unzip(*layers: Linear) -> tuple[list[Tensor], list[Optional[Tensor]]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers]


def parameters_of(block: Block, rotary: Rotary) -> list[Optional[Tensor]]:
    """All parameters as one flat list: norms, q/k norms, weights, biases."""
    linears = [layer or (None, None) for layer in block[2:9]]
    norms = [block.attention_norm, block.mlp_norm]
    flat = [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
    weights, biases = zip(*linears, strict=True)
    return [*flat, rotary.q_weight, rotary.k_weight, *weights, *biases]


def from_parameters(flat: tuple[Any, ...], norms: tuple[Norm, Norm], gelu: Optional[str] = None) -> Block:
    """Undo `parameters_of` with the tensors that autograd hands back; `norms` gives the norms' constants."""
    first, second = norms[0]._replace(weight=flat[0], bias=flat[1]), norms[1]._replace(weight=flat[2], bias=flat[3])
    layers: list[Any] = [None if w is None else Linear(w, b) for w, b in zip(flat[6:13], flat[13:20], strict=True)]
    return Block(first, second, *layers)._replace(gelu=gelu)
