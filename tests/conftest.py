"""What all tests share: the `device` fixture, the GPU marker's meaning, threads, hypothesis profiles.

pytest                                    everything that this machine can run
pytest -m gpu                             the tests that need an FP8 GPU
pytest -m nightly                         full products of what the others check a part of: half an hour
pytest --hypothesis-profile explore       property tests with fresh random examples, many of them
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import; trying to reach it takes a minute

import pytest
import torch
from hypothesis import settings

# Tests run side by side (pytest -n): one thread each.
torch.set_num_threads(1)

# The same examples every time: a red test is red again when looked at.
settings.register_profile("default", deadline=None, max_examples=50, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000, database=None)
settings.load_profile("default")


class NamesFailures:
    """Says at once which test has failed, also without `-v` and with `-n`: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None and self.config.get_verbosity() < 1:
            reporter.write_line(f"\nfailed: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of -n report to the process that prints
        config.pluginmanager.register(NamesFailures(config))


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `overcoat train` asks of the CUDA allocator is forgotten after the test."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test's tensors live; the "cuda" variant carries the `gpu` marker."""
    return torch.device(request.param)


def pytest_collection_finish() -> None:
    """What is imported by now stays: garbage collections, which each training asks for, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _later_imports() -> Iterator[None]:
    """So does what a file's tests have imported."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `nightly` tests out unless -m names them. Skip `gpu` tests, with the reason, where no GPU has FP8 tensor
    cores."""
    if "nightly" not in config.getoption("markexpr"):
        late = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=late)
    reason = _why_no_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU; torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        name = torch.cuda.get_device_name()
        return f"needs FP8 tensor cores (sm_89 or newer); {name} is sm_{capability[0]}{capability[1]}"
    return ""
