"""A training configuration as `overcoat.estimate` takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overcoat.estimate.predict import Setup
from overcoat.models.shapes import load_model_config
from overcoat.train.build import inline_config
from overcoat.train.config import Config
from overcoat.train.fit import Fit, recipe_of


def training_setup(config: Config, fit: Fit) -> Setup:
    """What a training configuration says about memory, with micro-batches and recipe as `fit` has them."""
    optimizer = config.optimizer
    moments = optimizer.moments if isinstance(optimizer.moments, str) else (optimizer.moments[0], optimizer.moments[1])
    return Setup(
        recipe=recipe_of(config, fit),
        moments=moments,
        master=optimizer.master,
        group_size=optimizer.group_size,
        release_gradients=optimizer.release_gradients,
        offload=optimizer.offload,
        accumulation=config.train.rows_per_step // fit.micro_batch,
        dtype=config.model.dtype,
        document_mask=config.data.document_mask,
    )


def model_config(config: Config, tokenizer: Any | None = None) -> Any:
    """The transformers configuration of the model that is trained.

    Raises:
        ValueError: the vocabulary is that of a tokenizer which is not given.
    """
    model, size = config.model, config.tokenizer.vocab_size
    if model.name:
        return load_model_config(model.name)
    if tokenizer is None and "vocab_size" not in model.config:
        if not size:
            raise ValueError(
                "the size of the vocabulary is known only once the tokenizer is read: pass model.config.vocab_size=N"
            )
        model = replace(model, config={**model.config, "vocab_size": size})
    return inline_config(model, tokenizer, config.data.sequence_length)
