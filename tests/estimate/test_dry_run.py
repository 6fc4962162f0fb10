"""The dry run on the meta device: what it is given, leaves as it was, and cannot tell."""

from __future__ import annotations

import pytest
import torch

from overcoat.estimate.dry_run import dry_run
from overcoat.estimate.setup import Setup
from overcoat.models.shapes import Model, sizes

SHAPE = Model("LlamaConfig", sizes(64, 96, 2, 4, 2, 128))


def test_shapes_that_depend_on_data_are_refused():
    def loss(model, batch, sequence):
        return model(input_ids=torch.empty((1, 8), dtype=torch.int64, device="meta").nonzero()).logits.sum()

    with pytest.raises(ValueError, match="a llama model computes shapes from its data"):
        dry_run(SHAPE.config(), 1, 8, Setup(), loss_of=loss)
