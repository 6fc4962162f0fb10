"""How the Triton kernels are tested: launcher against reference, byte for byte.

On a GPU (`pytest -m gpu`) the reference runs on the same GPU and every byte must agree, NaN counting as equal to NaN.
Under Triton's interpreter (`TRITON_INTERPRET=1 pytest tests/kernels`) the same tests run the kernels' logic on the
CPU; there approximate instructions and the FP8 conversion round differently, so a few codes may be one step off.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Of a test module of kernels alone (tests/kernels/conftest.py).
NEEDS_GPU: list[Any] = [pytest.mark.kernel]

# Of a matrix: one token, ragged tokens and columns, more columns than a tile; on a GPU several tiles both ways.
AWKWARD_SHAPES = [(1, 16), (7, 100), (37 if INTERPRETED else 61, 688), (9, 2560) if INTERPRETED else (1000, 5120)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


def awkward(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values with planted zeros, ties, outliers, denormals and an all-zero row."""
    generator = torch.Generator().manual_seed(seed + 7919 * rows + columns)
    x = torch.randn(rows, columns, generator=generator)
    special = torch.tensor([0.0, -0.0, 0.5, 1.5, 2.5, -2.5, 240.0, 300.0, 1e-30, -1e-38, 3.0e4])
    where = torch.rand(rows, columns, generator=generator) < 0.05
    x[where] = special[torch.randint(len(special), (int(where.sum()),), generator=generator)]
    if rows > 2:
        x[rows // 2] = 0.0
    return x.to(device=DEVICE, dtype=dtype)


# Of gradients.
FORMATS = ("e5m2", "e4m3")


def assert_equal(kernel: Any, reference: Any, exact: bool = True, steps: int = 1) -> None:
    """Each tensor of `kernel` equals its reference, bit for bit if `exact`, else within `steps` codes or BF16 steps."""
    if isinstance(kernel, Tensor):
        kernel, reference = (kernel,), (reference,)
    assert len(kernel) == len(reference)
    for index, (ours, theirs) in enumerate(zip(kernel, reference)):
        assert ours.shape == theirs.shape, f"output {index}: shape {tuple(ours.shape)} != {tuple(theirs.shape)}"
        assert ours.dtype == theirs.dtype, f"output {index}: {ours.dtype} != {theirs.dtype}"
        assert ours.is_contiguous(), f"output {index} is not contiguous"
        _assert_one(index, ours.cpu(), theirs.cpu(), exact and not INTERPRETED, steps)


def _assert_one(index: int, ours: Tensor, theirs: Tensor, exact: bool, steps: int) -> None:
    a, b = ours.float(), theirs.float()
    if not (INTERPRETED and ours.dtype in SMALLEST_NORMAL):  # its FP8 conversion knows no NaN
        assert torch.equal(a.isnan(), b.isnan()), f"output {index}: NaN in other places"
    infinite = a.isinf() | b.isinf()
    assert torch.equal(a[infinite], b[infinite]), f"output {index}: infinity in other places"  # no tolerance holds it
    unknown = a.isnan() | b.isnan() | infinite
    a, b = a.masked_fill(unknown, 0.0), b.masked_fill(unknown, 0.0)
    wrong = a != b
    if exact:
        first = wrong.nonzero()[:1].tolist()
        assert not wrong.any(), f"output {index}: {int(wrong.sum())} of {a.numel()} differ, first at {first}"
        return
    if ours.dtype == torch.int8:
        assert (ours.int() - theirs.int()).abs().max() <= steps, f"output {index}: codes too far apart"
        return
    if ours.dtype in SMALLEST_NORMAL:
        # The interpreter drops the carry of a mantissa that rounds up to the next octave, and flushes denormals.
        bound = steps * b.abs() / 2 + SMALLEST_NORMAL[ours.dtype]
        assert ((a - b).abs() <= bound).all(), f"output {index}: off by {(a - b).abs().max()}"
        return
    tolerance = 2.0**-7 if ours.dtype == torch.bfloat16 else 2e-6
    bound = tolerance * steps * torch.maximum(a.abs(), b.abs()) + tolerance * b.abs().mean()
    assert ((a - b).abs() <= bound)[wrong].all(), f"output {index}: off by {(a - b).abs().max()}"
