"""`bench kernels` on a GPU: what a tiny run measures, and `--only`."""

from __future__ import annotations

import pytest

from overcoat.bench.kernel_cases import FAMILIES
from overcoat.bench.kernels import measure_family
from overcoat.bench.shapes import BlockShape, ModelShape

SHAPE = BlockShape(ModelShape(256, 384, 1, 2, 1, 96), 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_run_measures_every_kernel(family: str) -> None:
    for name, figures in measure_family(family, SHAPE, None, 3, 4e12).items():
        assert "error" not in figures, (name, figures)
        assert figures["ms"] > 0
        assert figures["share"] == pytest.approx(figures["bytes"] / figures["ms"] * 1e3 / 4e12)
        # A launch and what its events take: the copy's and the kernel's are alike at this size.
        assert 0.02 < figures["share_of_same_size"] < 5


@pytest.mark.gpu
def test_only_picks_kernels() -> None:
    assert set(measure_family("quantize", SHAPE, ["stack"], 2, 4e12)) == {
        "stack_amax",
        "stack_weights",
        "stack_weights^T",
        "stack_weights_guessed",
    }
