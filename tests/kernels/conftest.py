"""Which tests run where: those of kernels (marked `kernel`) on a GPU, or under Triton's interpreter in a process of
their own, `TRITON_INTERPRET=1 pytest tests/kernels`; all others in every other process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import interpreter  # noqa: F401  mends Triton's interpreter before any kernel is defined
from tests.kernels.compare import INTERPRETED


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files without tests of kernels need not be imported to be interpreted: half of what collecting takes."""
    if not INTERPRETED or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    return None if "NEEDS_GPU" in text or "mark.kernel" in text else True


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py skips what needs a GPU
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items:
        if item.get_closest_marker("kernel"):
            if not INTERPRETED:
                item.add_marker(pytest.mark.gpu)
            elif item.get_closest_marker("alternate") and sum(_places(item)) % 2:
                item.add_marker(pytest.mark.nightly)
        elif INTERPRETED and Path(__file__).parent in item.path.parents:
            left_out.append(item)
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def _places(item: pytest.Item) -> list[int]:
    """Of its values in the list of each `parametrize`: of two lists every value stays, with half of the others."""
    params, places = item.callspec.params, []  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        places.append(values.index(params[names] if isinstance(names, str) else tuple(params[name] for name in names)))
    return places
