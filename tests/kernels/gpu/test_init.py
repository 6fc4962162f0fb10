"""Kernels are imported when they are asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from overcoat.kernels import gpu


def test_triton_is_not_imported_before_a_kernel_is_asked_for() -> None:
    code = (
        "import sys, overcoat.kernels.norm; assert 'overcoat.kernels.gpu.norm' not in sys.modules;"
        " from overcoat.kernels import gpu; gpu.norm.stats; assert 'triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_type_checkers_know_is_what_ops_ask_for() -> None:
    """A module that is missing in the list would be of no known type, silently."""
    here = Path(gpu.__file__)
    asked = {name for path in here.parents[1].glob("*.py") for name in re.findall(r"\bgpu\.(\w+)\.", path.read_text())}
    listed = here.read_text().partition("if TYPE_CHECKING:")[2].partition("    )\n")[0]
    assert len(asked) > 10
    assert set(re.findall(r"^        (\w+),$", listed, re.MULTILINE)) == asked


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"module 'overcoat.kernels.gpu' has no attribute 'gelly'"):
        gpu.gelly  # noqa: B018
