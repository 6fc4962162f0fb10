"""`bench kernels` on a GPU: what a tiny run measures, and `--only`."""

from __future__ import annotations

import pytest
import torch

from overcoat.bench import kernels
from overcoat.bench.kernel_cases import FAMILIES, KernelCase
from overcoat.bench.kernels import measure_family
from overcoat.bench.shapes import BlockShape
from overcoat.kernels.quantize import quantize_t
from overcoat.models.shapes import Model, sizes

SHAPE = BlockShape(Model("LlamaConfig", sizes(256, 384, 1, 2, 1, 96)), 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_run_measures_every_kernel(family: str) -> None:
    for name, figures in measure_family(family, SHAPE, None, 3, 4e12).items():
        assert "error" not in figures, (name, figures)
        assert figures["ms"] > 0
        assert figures["share"] == pytest.approx(figures["bytes"] / figures["ms"] * 1e3 / 4e12)
        assert figures["share_of_same_size"] > 0


def test_shares_of_a_copys_rate_and_of_a_copy_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that moves 12 KB in 4 us, where a copy of as much takes 3 us and a large one moves 6 GB a second."""
    monkeypatch.setattr(kernels, "time_ms", lambda call, repeats: {"ms": 4e-3, "p20": 3e-3, "p80": 5e-3})
    monkeypatch.setattr(kernels, "copy_ms", lambda moved, repeats: {12_000: 3e-3}[moved])
    case = KernelCase(quantize_t, (torch.zeros(16, 250, dtype=torch.bfloat16), torch.tensor(1.0), "e4m3"), untouched=4)
    figures = kernels.measure(case, 5, 6e9)
    assert (figures["bytes"], figures["share_of_same_size"]) == (12_000, 0.75)
    assert figures["TB_per_s"] == pytest.approx(3e-3)
    assert figures["share"] == pytest.approx(0.5)
