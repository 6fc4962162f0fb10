"""A block's parameters as a list: `pytest tests/ops/test_parameters.py`."""

from __future__ import annotations

import torch

from overcoat.ops.attention import Rotary
from overcoat.ops.linear import Norm
from overcoat.ops.parameters import Block, Linear, from_parameters, parameters_of


def test_parameters_there_and_back():
    """`parameters_of` and `from_parameters` agree on the order: 20 different tensors come back in their places."""
    tensors = iter([torch.tensor(float(i)) for i in range(18)])
    norms = [Norm(next(tensors), next(tensors), 0.1 + i, bool(i)) for i in range(2)]
    block = Block(*norms, *(Linear(next(tensors), next(tensors)) for _ in range(7)))
    rotary = Rotary(torch.zeros(1), torch.zeros(1), None, torch.tensor(100.0), torch.tensor(101.0))
    flat = parameters_of(block, rotary)
    assert flat[4:6] == [rotary.q_weight, rotary.k_weight]
    assert len(flat) == 20
    constants = tuple(norm._replace(weight=None, bias=None) for norm in norms)
    assert from_parameters(tuple(flat), constants) == block
    without_gate = block._replace(gate=None, gelu="tanh")
    flat = parameters_of(without_gate, rotary)
    assert len(flat) == 20
    assert from_parameters(tuple(flat), constants, "tanh") == without_gate
