"""Mends Triton's interpreter before any kernel is defined."""

from __future__ import annotations

from tests.kernels.gpu import interpreter  # noqa: F401
