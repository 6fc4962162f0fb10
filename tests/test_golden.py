"""Every number is the one that was recorded, bit for bit: tests/golden.py."""

from __future__ import annotations

from typing import Optional

import pytest
import torch

from tests import golden
from tests.models.zoo import DISTINCT
from tests.nightly import mostly_nightly

CI = (
    [f"{kind}, default" for kind in DISTINCT]
    + [f"llama, {title}" for title in golden.RECIPES]
    + ["AdamW 8bit, bfloat16"]
)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    found: Optional[dict[str, str]] = golden.recorded()
    if found is None:
        pytest.skip(f"golden.json has no record for {golden.environment()}: python -m tests.golden --write")
    return found


@pytest.mark.parametrize("name", mostly_nightly(golden.cases(), CI))
def test_bits_are_the_recorded_ones(name: str, expected: dict[str, str]) -> None:
    assert list(golden.compute([name])) == [(name, expected[name])], "python -m tests.golden shows all that differ"


def test_a_changed_bit_changes_the_hash() -> None:
    x = torch.linspace(-1, 1, 64).bfloat16()
    changed = x.clone()
    changed.view(torch.int16)[17] ^= 1
    assert golden.digest([x]) == golden.digest([x.clone()]) != golden.digest([changed])
    assert golden.digest([x]) != golden.digest([x.view(8, 8)])
