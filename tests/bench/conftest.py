"""Stand-ins that several tests share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bench.peers import FakeRotary, FakeTransformerLayer, module


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


@pytest.fixture(params=["autocast", "fp8_autocast"])
def transformer_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for Transformer Engine of a new or an old release; "reset" and recipes' names as it was used."""
    used: list[Any] = []
    for variable, value in (("NVTE_UNFUSED_ATTN", "0"), ("CUDNN_HOME", "")):  # the block sets them: here for a test
        monkeypatch.setenv(variable, value)
    keyword = {"autocast": "recipe", "fp8_autocast": "fp8_recipe"}[request.param]

    @contextlib.contextmanager
    def autocast(enabled: bool, **options: Any) -> Iterator[None]:
        assert enabled
        used.append(type(options[keyword]).__name__)
        yield

    recipes = {name: type(name, (), {}) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}
    manager = type("FP8GlobalStateManager", (), {"reset": staticmethod(lambda: used.append("reset"))})
    place = {"autocast": "quantization", "fp8_autocast": "fp8"}[request.param]
    module(monkeypatch, "transformer_engine")
    module(monkeypatch, "transformer_engine.common")
    module(monkeypatch, "transformer_engine.common.recipe", **recipes)
    pytorch = {"TransformerLayer": FakeTransformerLayer, request.param: autocast}
    module(monkeypatch, "transformer_engine.pytorch", **pytorch)
    module(monkeypatch, "transformer_engine.pytorch.attention", RotaryPositionEmbedding=FakeRotary)
    module(monkeypatch, f"transformer_engine.pytorch.{place}", FP8GlobalStateManager=manager)
    return used
