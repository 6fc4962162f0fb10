"""Files that hold kernels are imported, and their references run, where Triton is not installed."""

from __future__ import annotations

import subprocess
import sys


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
from overcoat.kernels import activation, activation_backward, launch
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
assert activation_backward.activation_gradient_bound(z, group_amax, "relu2", 16) >= 2
kept = (z, codes, group_amax, None, None, None, False, "relu2", "int8", 16)
assert activation_backward.activation_backward(*kept)[0].shape == z.shape
try:
    double_kernel[(1,)](torch.ones(2))
except ModuleNotFoundError as error:
    assert "Triton is not installed: pip install triton" in str(error)
else:
    raise AssertionError("launched")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
