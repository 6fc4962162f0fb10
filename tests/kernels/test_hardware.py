"""The functions that a GPU has as one instruction: how near they are, one rounding where one is promised, shapes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from overcoat.kernels import hardware

EXACT = {"log2": torch.log2, "exp2": torch.exp2, "sqrt": torch.sqrt, "reciprocal": torch.reciprocal}


@pytest.mark.parametrize("name", EXACT)
def test_results_are_within_few_units_of_the_last_place(name, device):
    """As the PTX manual bounds them; of log2 near 1 the error is absolute. The ends of the range are PyTorch's."""
    x = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 20 + 0.01
    x = torch.cat((x, torch.tensor([0.0, 1.0, math.inf, -math.inf, math.nan]))).to(device)
    found = getattr(hardware, name)(x)
    assert found.dtype == torch.float32
    exact, atol = EXACT[name](x.double()), 2**-22 if name == "log2" else 0
    torch.testing.assert_close(found.double(), exact, rtol=2**-21.5, atol=atol, equal_nan=True)


def test_fma_by_hand_and_of_shapes_that_broadcast(device):
    """Denormals, which count on a CPU; half of the smallest is a tie, and rounds to zero."""
    x, y, z, expected = torch.tensor(
        [
            (2.0, 3.0, 4.0, 10.0),
            (0.0, math.inf, 1.0, math.nan),
            (math.inf, 2.0, -math.inf, math.nan),
            (3e38, 2.0, 0.0, math.inf),
            (2.0**-140, 2.0**-9, 2.0**-149, 2.0**-148),
            (2.0**-100, 2.0**-50, 0.0, 0.0),
        ]
    ).t()
    torch.testing.assert_close(hardware.fma(x, y, z), expected, rtol=0, atol=0, equal_nan=True)
    for shapes in ((), (), ()), ((3, 1), (4,), ()), ((2, 1, 5), (3, 1), (1,)), ((0, 1), (7,), (1, 1)):
        x, y, z = (torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device) for shape in shapes)
        torch.testing.assert_close(hardware.fma(x, y, z), x * y + z, rtol=1e-5, atol=1e-6)


# ---- Files that hold kernels are imported, and their references run, where Triton is not installed ------------------


def test_without_triton_files_import_and_launches_say_what_is_missing():
    code = """
import sys
sys.modules["triton"] = None  # what `import triton` then finds
import torch
from overcoat.kernels import hardware
import importlib, pkgutil
import overcoat.kernels
for module in pkgutil.iter_modules(overcoat.kernels.__path__, "overcoat.kernels."):
    if not module.ispkg:
        importlib.import_module(module.name)
from overcoat.kernels import activation, activation, launch
from overcoat.kernels.language import INTERPRETED, triton
assert not triton and not INTERPRETED

@launch.kernel
def double_kernel(x_ptr):
    pass

assert hardware.fma(torch.ones(2), torch.ones(2), torch.ones(2)).tolist() == [2, 2]
assert hardware.fma.kernel is None  # on a GPU the reference runs
z = torch.ones(2, 32)
codes, group_amax, top = activation.activation_encode(z, "relu2", False, "int8", 16)
assert top == 1
assert activation.activation_gradient_bound(z, group_amax, "relu2", 16) >= 2
kept = (z, codes, group_amax, None, None, None, False, "relu2", "int8", 16)
assert activation.activation_backward(*kept)[0].shape == z.shape
try:
    double_kernel[(1,)](torch.ones(2))
except ModuleNotFoundError as error:
    assert "Triton is not installed: pip install triton" in str(error)
else:
    raise AssertionError("launched")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
