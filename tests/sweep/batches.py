"""Batches that small models of every kind take: plain, padded (left and right), and packed rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tests.models.zoo import VOCAB

ROWS, LENGTH = 2, 48
PLAIN, PADDED, PACKED = "plain", "padded", "packed"


def batches(model: nn.Module, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return the batches that a model's forward has arguments for, by name."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCAB, (ROWS, LENGTH), generator=generator)
    plain = {"input_ids": ids, "labels": ids.clone()}
    takes = inspect.signature(type(model).forward).parameters
    found = {PLAIN: plain}
    if "attention_mask" in takes:
        mask = torch.ones_like(ids)
        mask[0, :7], mask[1, -11:] = 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 7] = -100  # what padding predicts is nobody's
        found[PADDED] = {**plain, "attention_mask": mask, "labels": labels}
    if "position_ids" in takes:
        positions = torch.cat([torch.arange(13), torch.arange(20), torch.arange(LENGTH - 33)])
        found[PACKED] = {**plain, "position_ids": positions.expand(ROWS, -1).contiguous()}
    if "use_cache" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        found = {name: {**inputs, "use_cache": False} for name, inputs in found.items()}
    return found
