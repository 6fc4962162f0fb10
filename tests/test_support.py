"""docs/support.md says what tests/support.py finds."""

from __future__ import annotations

import pytest

from tests import support


def test_the_page_is_what_a_run_finds() -> None:
    """If not: python -m tests.support, and read what has changed."""
    text = support.PAGE.read_text(encoding="utf-8")
    assert support.page(text) == text


def test_errors_other_than_refusals_are_no_cells() -> None:
    def fails(_: object) -> str:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        support.outcome(fails, support.PLAIN["default"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", support.PLAIN)
def test_recipes_work_in_cuda_graphs(name: str) -> None:
    """The row that a CPU cannot run."""
    support.with_graphs(support.PLAIN[name])
