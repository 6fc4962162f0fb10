"""`overcoat doctor`: what it says of machines made up, and of this one."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

from overcoat import cli
from overcoat.doctor import command
from overcoat.doctor.command import GIBI, Gpu, Host, describe, measure, unsupported

VERSIONS: dict[str, Any] = {
    "torch": "2.13.0",
    "triton": "3.7.0",
    "transformers": "5.24.0",
    "accelerate": "1.1",
    "peft": None,
}
HOPPER = Gpu("H200", (9, 0), 139 * GIBI, None, None, 680e12, 1330e12, 960e12, 52e9, 50e9)
HOST = Host(500 * GIBI, 400 * GIBI, None, 5.0)


def test_a_good_machine_takes_ten_lines() -> None:
    lines, works = describe(VERSIONS, [HOPPER], HOST)
    assert works
    assert len(lines) <= 10
    text = "\n".join(lines)
    for figure in ("peft is missing", "sm_90", "1,330 TFLOP/s, 960 with", "1.96 times", "52 GB/s", "500 GiB", "5.0 us"):
        assert figure in text
    assert "note" not in text
    assert lines[-1].split() == ["FP8", "works"]


@pytest.mark.parametrize(
    ("gpu", "host", "said", "works"),
    [
        (HOPPER._replace(capability=(8, 0), reason="no tensor cores", fp8=None), HOST, "Recipe.bf16()", False),
        (HOPPER._replace(fp8=700e12), HOST, "not time", True),
        (HOPPER._replace(no_blocks="on Hopper alone", blocks=None), HOST, "linear_scaling='block' is refused", True),
        (HOPPER._replace(to_device=3e9), HOST, "offloading is slow", True),
        (HOPPER._replace(to_device=0.0, refused="CUDA error 2"), HOST, "offloading is refused", True),
        (HOPPER, HOST._replace(launch=30.0), "train.compile=graphs", True),
        (None, HOST, "slow reference", False),
    ],
)
def test_what_is_slow_or_refused_is_said(gpu: Gpu | None, host: Host, said: str, works: bool) -> None:
    lines, found = describe(VERSIONS, [HOPPER, gpu] if gpu else [], host)
    assert found == works
    assert said in "\n".join(lines[-2:])


def test_versions_that_the_package_does_not_ask_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=2.11,<2.14", 'transformers>=5.17,<6; extra == "hf"', "numpy"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)
    assert not [*unsupported(VERSIONS)]
    (line,) = unsupported({**VERSIONS, "torch": "2.20.0+cu130"})
    assert line.startswith("torch 2.20.0")


def test_gemms_are_tried_and_wrong_ones_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the references, on a CPU."""
    unknown, cpu = Gpu("CPU", (9, 0), 0, None), torch.device("cpu")
    found = measure(unknown, cpu, 256, 2**16)
    assert found.reason is None
    assert min(found.bf16, found.fp8, found.blocks, found.to_device, found.to_host) > 0
    real = command.gemm
    monkeypatch.setattr(command, "gemm", lambda *args: 2 * real(*args))
    assert "off by 100%" in measure(unknown, cpu, 256, 2**16).reason
    monkeypatch.setattr(command, "gemm", None)
    assert "failed" in measure(unknown, cpu, 256, 2**16).reason


def test_the_command_ends_with_status_1_where_fp8_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    works = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    assert cli.main(["doctor"]) == (0 if works else 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("overcoat")
    assert lines[-1].startswith("FP8")
