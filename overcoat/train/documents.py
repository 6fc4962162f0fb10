"""Check by numbers that a model keeps the documents of a packed row apart.

Fused attention does, by `document_starts`. Mixers that run as they are may not read where documents begin: state-space
layers and convolutions of transformers carry their state over. So two rows are compared whose first document alone
differs: the loss of the second one must not.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

from overcoat.models.decoder import Fp8DecoderLayer, attention_of
from overcoat.models.family import decoder_layers
from overcoat.train import process
from overcoat.train.build import summed_loss
from overcoat.train.data import Batch, document_starts

FIRST, TOKENS = 16, 24  # tokens of the first document, and of both
SHARE = 0.01  # of what the first document does to the second's loss where nothing keeps them apart


def warn_if_documents_mix(model: Any, num_ids: int, device: torch.device) -> None:
    """Warn if a token sees the documents before its own; for models with layers whose mixer runs as it is.

    model: converted, perhaps sharded; every process calls this. num_ids: of the vocabulary.

    Raises:
        ValueError: transformers' own, if the model cannot keep documents apart without a package.
    """
    names = [name for name, layer in decoder_layers(model).items() if not _is_fused(layer)]
    if not names:
        return
    is_training = model.training
    model.eval()
    try:
        apart, together = (_effect(model, num_ids, device, cuts) for cuts in ((0, FIRST, TOKENS), (0, TOKENS)))
    finally:
        model.train(is_training)
    if apart > SHARE * together and process.is_first():
        warnings.warn(
            "documents and conversations that share a row are not kept apart (data.document_mask, data.format): "
            f"{len(names)} layers run mixers of their own, {names[0]} the first, which do not read where one begins",
            stacklevel=2,
        )


def _is_fused(layer: Any) -> bool:
    """True if the layer's attention is the FP8 block's, or nothing in it is a mixer of its own."""
    if not isinstance(layer, Fp8DecoderLayer):
        return False
    branches = layer.overcoat_family.branches(layer, 1)
    return attention_of(branches) is not None or all(branch.mixer is not None for branch in branches)


@torch.no_grad()
def _effect(model: Any, num_ids: int, device: torch.device, cuts: tuple[int, ...]) -> float:
    """Return how much the loss of the last tokens changes with the first ones, of a row of documents that begin and end
    at `cuts`."""
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(cuts)])[None]
    places, losses = torch.arange(TOKENS), []
    for factor in (3, 5):
        ids = torch.where(places < FIRST, factor * places + factor, 7 * places)[None] % num_ids
        labels = ids.roll(-1, 1).masked_fill((places < FIRST) | (places == TOKENS - 1), -100)
        batch = Batch(ids, labels, positions, document_starts(positions))
        losses.append(float(summed_loss(model, batch.to(device))))
    return abs(losses[0] - losses[1])
