"""A training configuration as `overcoat.estimate` takes it: for `overcoat estimate --config` and `memory.report`."""

from __future__ import annotations

from typing import Any, NamedTuple

from overcoat.estimate.models import load_model_config
from overcoat.estimate.predict import Setup
from overcoat.train.build import check_inline, make_recipe
from overcoat.train.config import Config
from overcoat.train.extras import load_extra


class Training(NamedTuple):
    """A training configuration as far as memory is concerned."""

    model: Any  # transformers configuration
    batch: int
    sequence: int
    setup: Setup


def training(config: Config) -> Training:
    """Model, batch and setup of a training configuration."""
    return Training(_model_config(config), config.train.batch_size, config.data.sequence_length, training_setup(config))


def training_setup(config: Config) -> Setup:
    """What a training configuration says about memory."""
    optimizer = config.optimizer
    moments = optimizer.moments if isinstance(optimizer.moments, str) else (optimizer.moments[0], optimizer.moments[1])
    return Setup(
        recipe=make_recipe(config.recipe),
        moments=moments,
        master=optimizer.master,
        group_size=optimizer.group_size,
        release_gradients=optimizer.release_gradients,
        offload=optimizer.offload,
        accumulation=config.train.accumulation,
        dtype=config.model.dtype,
        document_mask=config.data.document_mask,
    )


def _model_config(config: Config) -> Any:
    if config.model.name:
        return load_model_config(config.model.name)
    transformers = load_extra("transformers", "hf", "overcoat estimate")
    model_type = check_inline(config.model)
    values = {key: value for key, value in config.model.config.items() if key != "model_type"}
    if "vocab_size" not in values and not config.tokenizer.vocab_size:
        raise ValueError(
            "the size of the vocabulary is known only once the tokenizer is read: pass model.config.vocab_size=N"
        )
    values.setdefault("vocab_size", config.tokenizer.vocab_size)
    return transformers.AutoConfig.for_model(model_type, **values)
