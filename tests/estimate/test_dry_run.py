"""The dry run on the meta device: what it is given, leaves as it was, and cannot tell."""

from __future__ import annotations

import pytest
import torch

from overcoat.estimate.dry_run import GRADIENTS, KEPT, dry_run, meta_model
from overcoat.estimate.setup import Setup
from overcoat.models.shapes import Model, sizes

SHAPE = Model("LlamaConfig", sizes(64, 96, 2, 4, 2, 128))


def at_the_end(setup, phase):
    """Bytes by category when a phase ends."""
    account = dry_run(SHAPE.config(), 1, 8, setup).account
    labels = [label for label, _ in account.marks]
    begin = account.marks[labels.index(phase) + 1][1]
    return dict(zip(account.categories, account.values[begin].tolist()))


def test_the_model_has_no_data_and_the_configuration_stays():
    config = SHAPE.config()
    before = config.to_dict()
    model = meta_model(config, torch.float32)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.float32)}
    assert model.training
    assert config.to_dict() == before


def test_gradients_are_there_at_the_end_unless_released():
    sizes = [parameter.nbytes for parameter in meta_model(SHAPE.config(), torch.bfloat16).parameters()]
    kept = at_the_end(Setup(), "embedding backward")
    assert kept[GRADIENTS] == sum(-(-size // 512) * 512 for size in sizes)
    assert kept[KEPT] == 0
    assert at_the_end(Setup(release_gradients=True), "embedding backward").get(GRADIENTS, 0) == 0


def test_shapes_that_depend_on_data_are_refused():
    def loss(model, batch, sequence):
        return model(input_ids=torch.empty((1, 8), dtype=torch.int64, device="meta").nonzero()).logits.sum()

    with pytest.raises(ValueError, match="a llama model computes shapes from its data"):
        dry_run(SHAPE.config(), 1, 8, Setup(), loss_of=loss)
