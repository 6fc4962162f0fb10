"""Figures of a step's routers, of models that return their logits (`output_router_logits` in the configuration):

    aux_loss       transformers' load-balancing loss, mean over the micro-batches; 1 k if all experts get the same
    expert_load    tokens of the busiest expert over the mean of its layer; the largest of all layers

They stay on the device until the log reads them. k: experts that a token visits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overcoat.train import process

FIGURES = ("aux_loss", "expert_load")


class Routing:
    """Choices of the routers in a step's micro-batches."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._counts: Tensor | None = None  # (layers, experts) fp32: tokens

    def add(self, outputs: Any, config: Any) -> None:
        """Count a forward pass. outputs: the model's, with `router_logits` of (tokens, experts) for each layer."""
        self._losses.append(outputs.aux_loss.detach().float())
        with torch.no_grad():
            chosen = [each.topk(config.num_experts_per_tok, dim=-1).indices.flatten() for each in outputs.router_logits]
            counts = torch.zeros(len(chosen), outputs.router_logits[0].shape[-1], device=chosen[0].device)
            index = torch.stack(chosen)
            counts.scatter_add_(1, index, torch.ones_like(index, dtype=counts.dtype))
        self._counts = counts if self._counts is None else self._counts + counts

    def figures(self) -> Tensor | None:
        """Return FIGURES of all processes, (2,) fp32; None if nothing was counted."""
        if self._counts is None:
            return None
        counts = process.sum_of(self._counts)
        loss = process.sum_of(torch.stack(self._losses).mean()) / process.count()
        return torch.stack((loss, (counts.amax(1) / counts.mean(1)).max()))
