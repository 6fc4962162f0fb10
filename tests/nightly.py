"""Products of parameters of which CI runs a part."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def mostly_nightly(cases: Iterable[Any], in_ci: Container[Any]) -> list[Any]:
    """All cases as parameters of a test, tuples as several; others than `in_ci` are for `make nightly`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in in_ci else [pytest.mark.nightly]
        )
        for case in cases
    ]
