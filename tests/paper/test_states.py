"""Errors of moment codes: a checkpoint with known moments from file to table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from overcoat.paper.states import analyse, errors, table1


def moments(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v (rows, 200) FP32 with log-normal scales; 200 leaves a padded group."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(2 * torch.randn(rows, 1, generator=generator) - 9)
    root = scale * torch.exp(0.7 * torch.randn(rows, 200, generator=generator))
    return root * (0.25 * torch.randn(rows, 200, generator=generator)).clamp(-1, 1), root.square()


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    m, v = moments(16)
    state = {0: {"exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}, 1: {"exp_avg": m[0], "exp_avg_sq": v[0]}}
    torch.save({"optimizer": {"state": state}}, folder / "training.pt")
    return folder


def test_from_checkpoint_to_table(tmp_path: Path) -> None:
    found = analyse(save(tmp_path), 1e-8, "cpu")
    assert found["fp32 fp32"] < 1e-9
    assert 0 < found["sqrt8 log8"] < found["e4m3x e4m3x"] < found["e4m3 e4m3"]
    assert found["fp32 log8"] < found["sqrt8 log8"]
    rows = {row["name"]: row for row in table1(Namespace(size="full", checkpoint=tmp_path)).rows}
    assert rows["m e4m3x, v e4m3x"]["ours"] == pytest.approx(found["e4m3x e4m3x"])
    assert rows["m e4m3x, v e4m3x"]["paper / E4M3"] == pytest.approx(12.31 / 20.10)


def test_what_is_no_run_with_fp32_moments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory or checkpoint"):
        table1(Namespace(size="full", checkpoint=tmp_path))
    with pytest.raises(ValueError, match=r"moments are torch\.bfloat16; train with optimizer\.moments=fp32"):
        analyse(save(tmp_path, torch.bfloat16), 1e-8, "cpu")


def test_the_error_is_that_of_the_update() -> None:
    """BF16 moments, computed here in the same way without the codes."""
    m, v = (x.view(1, -1, 200) for x in moments(4))
    ratio = m / (v.sqrt() + 1e-8)
    coded = m.bfloat16().float() / (v.bfloat16().float().sqrt() + 1e-8)
    reference, found = errors(m, v, 1e-8)
    torch.testing.assert_close(reference, ratio.square().sum(dtype=torch.float64))
    torch.testing.assert_close(found["bf16 bf16"], (coded - ratio).square().sum(dtype=torch.float64), rtol=1e-3, atol=0)
