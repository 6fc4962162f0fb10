"""What a profile is summed up to, on made-up kernels; on a GPU a tiny step."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import overcoat.kernels
from benchmarks import step
from benchmarks.step import Meter, Run, family, idle, short, summary
from overcoat.bench.shapes import ModelShape

GEMM = "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNN"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float*)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_traits<cutlass::bfloat16_t>>(Params)", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<>>(Params)", "attention"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128>(Params)", "products"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForwardGmem<4, float>(float*)", "PyTorch"),
        ("triton_poi_fused_add_0", "torch.compile"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        (ADD, "PyTorch"),
    ],
)
def test_families(name: str, expected: str) -> None:
    assert family(name) == expected


def test_every_kernel_of_ours_is_known_as_such() -> None:
    """By the functions' names, which Triton gives to the kernels."""
    triton = pytest.importorskip("triton")
    names = []
    for module in pkgutil.walk_packages(overcoat.kernels.__path__, "overcoat.kernels."):
        functions = vars(importlib.import_module(module.name)).values()
        names += [each.__name__ for each in functions if isinstance(each, triton.KernelInterface)]
    entries = [name for name in names if name.endswith("_kernel")]
    assert len(entries) > 40
    assert {family(name) for name in entries} == {"overcoat"}


def test_names_lose_their_arguments() -> None:
    assert short(ADD) == "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def test_idle_is_where_no_kernel_runs() -> None:
    runs = [Run("b", 5.0, 8.0), Run("a", 0.0, 6.0), Run("inside", 1.0, 2.0), Run("later", 10.0, 11.0)]
    assert idle(runs) == {"b > later": [2.0]}
    runs += [Run("long", 20.0, 30.0), Run("within(int)", 21.0, 22.0), Run("later", 33.0, 34.0)]
    assert idle(runs) == {"b > later": [2.0], "later > long": [9.0], "long > later": [3.0]}


def test_sums() -> None:
    """Two steps, 100 us of products and 20 of ours in each, 30 idle in all."""
    runs = [
        *(Run(GEMM, start, start + 50.0) for start in (0.0, 50.0, 150.0, 200.0)),
        Run("_norm_kernel", 100.0, 120.0),
        Run("_norm_kernel", 250.0, 270.0),
    ]
    found = summary(runs, steps=2)
    assert found["families"] == pytest.approx({"products": 0.1, "overcoat": 0.02})
    assert found["kernels"][GEMM] == pytest.approx({"ms": 0.1, "calls": 2.0, "us": 50.0})
    assert found["gaps"]["_norm_kernel > " + GEMM] == pytest.approx({"ms": 0.015, "calls": 0.5, "us": 30.0})
    assert (found["busy_ms"], found["idle_ms"]) == pytest.approx((0.12, 0.015))


def test_clock_and_power() -> None:
    meter = Meter("0")
    assert meter.figures() == {"clock_MHz": None, "power_W": None, "power_capped": None}
    told = (
        "1980, 310.5, Not Active",
        "1500, 698.0, Active",
        "1520, 700.0, Active",
        "[N/A], 1, x",
        "1980, [N/A], Active",
    )
    meter.lines = [f"{line}\n" for line in told]
    assert meter.figures() == {"clock_MHz": 1520, "power_W": 698.0, "power_capped": pytest.approx(2 / 3)}


def test_without_nvidia_smi_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Meter("0") as meter:
        pass
    assert meter.figures()["clock_MHz"] is None


@pytest.mark.gpu
def test_a_tiny_step() -> None:
    row = step.measure("overcoat", ModelShape(512, 1024, 2, 4, 2, 512), 2, 256)
    assert row["families"]["products"] > 0
    assert row["families"]["overcoat"] > 0
    assert "adamw_kernel" in row["kernels"]
    assert row["busy_ms"] > 0
    assert row["idle_ms"] >= 0
    assert "us a call" in step.text(row)
