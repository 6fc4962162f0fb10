"""The training loss of a batch: real, and on the meta device as `overcoat.estimate` runs it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.estimate.dry_run import META, LossOf
from overcoat.models.head import LeanLossModel
from overcoat.train.build import base_model
from overcoat.train.data import Batch


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """Sum of the cross-entropy over the batch's labels, () fp32; without logits where the model can.

    While training, a recipe's z-loss is in it.
    """
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False, **batch.images}
    model = base_model(model)
    if isinstance(model, LeanLossModel):
        # The labels are shifted already; divided by one item, the loss is the sum.
        labels = {"labels": batch.labels, "shift_labels": batch.labels, "num_items_in_batch": 1}
        return model(**inputs, **labels, cu_seq_lens_q=batch.document_starts, output_logits=False).loss
    logits = model(**inputs).logits  # (B, T, V)
    log_probabilities = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities, batch.labels.flatten(), reduction="sum")


def loss_for_estimates(document_mask: bool) -> LossOf:
    """The loss of a step for `overcoat.estimate.Predictor`: mean over token ids without values."""
    return functools.partial(_meta_loss, document_mask)


def _meta_loss(document_mask: bool, model: Any, batch: int, sequence: int) -> Tensor:
    ids = torch.empty((batch, sequence), dtype=torch.int64, device=META)
    places = torch.empty_like(ids) if document_mask else None
    return summed_loss(model, Batch(ids, torch.empty_like(ids), places, ids.numel())) / ids.numel()
