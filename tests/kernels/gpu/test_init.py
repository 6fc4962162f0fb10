"""Kernels are imported when they are asked for."""

import subprocess
import sys

import pytest

from overcoat.kernels import gpu


def test_triton_is_not_imported_before_a_kernel_is_asked_for() -> None:
    code = (
        "import sys, overcoat.kernels.norm; assert 'overcoat.kernels.gpu.norm' not in sys.modules;"
        " from overcoat.kernels import gpu; gpu.norm.stats; assert 'triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"module 'overcoat.kernels.gpu' has no attribute 'gelly'"):
        gpu.gelly  # noqa: B018
