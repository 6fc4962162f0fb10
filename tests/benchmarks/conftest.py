"""Stand-ins that several tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.benchmarks.peers import module


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for torchao's float8 training; what it converted, and under which recipe."""
    given: list[Any] = []

    @dataclasses.dataclass
    class Config:
        recipe: str
        enable_fsdp_float8_all_gather: bool = False

    config = type("Float8LinearConfig", (), {"from_recipe_name": staticmethod(Config)})
    module(monkeypatch, "torchao")
    convert = lambda layer, config: given.append((layer, config))  # noqa: E731
    module(monkeypatch, "torchao.float8", Float8LinearConfig=config, convert_to_float8_training=convert)
    return given
