"""`bench optimizer`: who takes part, and on a GPU what a tiny run measures."""

from __future__ import annotations

import pytest
import torch

from overcoat.bench.optimizer import OPTIMIZERS, measure


@pytest.mark.parametrize("name", [name for name, who in OPTIMIZERS.items() if not who.needs])
def test_whoever_needs_no_package_steps(name: str) -> None:
    contestant = OPTIMIZERS[name]
    before = torch.full((4, 128), 0.01, dtype=contestant.dtype)  # where a step of LR is more than half an ulp of BF16
    param = torch.nn.Parameter(before.clone())
    param.grad = torch.ones_like(param)
    contestant.make([param]).step()
    assert (param < before).all()


def test_only_checked_steps_are_credited_with_a_second_read_of_the_gradients() -> None:
    """Ours check unless told otherwise; no peer does."""
    for name, contestant in OPTIMIZERS.items():
        checks = False
        if not contestant.needs:
            made = contestant.make([torch.nn.Parameter(torch.ones(2, dtype=contestant.dtype))])
            checks = getattr(made, "check_finite", False)
        assert contestant.gradient_reads == 1 + checks, name


@pytest.mark.gpu
def test_a_tiny_run_measures_bytes_and_time() -> None:
    """torch's fused step in BF16: 4 bytes of state, 2 (2 + 4) + 2 of traffic; ours: README's state bytes."""
    figures = measure("torch fused BF16", 4, (1024, 1024), 3, 4e12)
    assert figures["state_bytes_per_parameter"] == pytest.approx(4.0, abs=0.01)
    assert figures["traffic_bytes_per_parameter"] == pytest.approx(14.0, abs=0.02)
    assert figures["all_in_bytes_per_parameter"] >= 8.0
    assert figures["ms"] > 0
    assert figures["share"] == pytest.approx(figures["TB_per_s"] / 4.0)
    ours = measure("overcoat 8bit, bf16+8, unchecked", 4, (1024, 1024), 3, 4e12)
    assert ours["state_bytes_per_parameter"] == pytest.approx(3.05, abs=0.2)
