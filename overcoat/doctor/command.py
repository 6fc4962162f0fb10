"""`overcoat doctor`: versions, GPUs, FP8 GEMMs tried and timed, memory, link and host speed, in about ten lines.

    overcoat doctor

Exit status: 0 if every GPU trains in FP8, 1 if one cannot or there is none. What will be slow or refused is on lines of
its own, with the reason and the remedy.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from overcoat.extras import one_line
from overcoat.kernels.blockwise import block_quantize
from overcoat.kernels.gemm import block_gemm, gemm, has_float8_tensor_cores, why_no_block_gemm
from overcoat.kernels.quantize import amax, quantize
from overcoat.kernels.weights import block_stack_weights
from overcoat.pinned_memory import host_buffer
from overcoat.train.process import host_bytes_free, memory_of
from overcoat.version import VERSION

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft")
SIZE = 8192  # of the GEMMs: M = N = K
COPIED = 2**28  # bytes over the link
LEAST_GAIN = 1.2  # times as fast as BF16, below which FP8 saves memory only
# An H200's FP8 GEMM differs from the exact product by 4% of its norm.
MOST_ERROR = 0.06
# Microseconds of the host for a small op; in the median of machines it takes 5.
SLOW_HOST = 10.0
GIBI = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    """Measure this machine, and print the findings."""
    gpus = [examine(place) for place in range(torch.cuda.device_count())]
    lines, works = describe(find_versions(), gpus, examine_host())
    print("\n".join(lines))
    return 0 if works else 1


class Gpu(NamedTuple):
    """A GPU. Rates of GEMMs are operations a second; None where the GEMM did not run. reason: why FP8 cannot work, or
    None; no_blocks: why GEMMs with block scales do not. Rates of copies are bytes a second."""

    name: str
    capability: tuple[int, int]
    memory: int
    reason: str | None
    no_blocks: str | None = None
    bf16: float | None = None
    fp8: float | None = None
    blocks: float | None = None
    to_device: float = 0.0
    to_host: float = 0.0
    refused: str | None = None  # why memory could not be page-locked


class Host(NamedTuple):
    """The host: bytes in all and free, the limit of locked memory (None: none), microseconds of a small op."""

    memory: int
    free: int
    locked: int | None
    launch: float


def find_versions() -> dict[str, str | None]:
    """Return the version of each of PACKAGES, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def unsupported(versions: dict[str, str | None]) -> Iterator[str]:
    """Yield a line for each package whose version this one's metadata do not name."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(text) for text in importlib.metadata.requires("overcoat") or []]
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        return
    for wanted in asked:
        found = versions.get(wanted.name)
        if found is not None and not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} {found} is not tested: {wanted.name} {wanted.specifier} is"


# ---- measurements ---------------------------------------------------------------------------------------------------


def examine(place: int) -> Gpu:
    """Try and time a GPU's GEMMs and copies."""
    device, properties = torch.device("cuda", place), torch.cuda.get_device_properties(place)
    found = Gpu(properties.name, (properties.major, properties.minor), properties.total_memory, None)
    if not has_float8_tensor_cores(device):
        return found._replace(reason="it has no FP8 tensor cores, which Ada (sm_89), Hopper (sm_90) and newer have")
    with torch.cuda.device(place):
        return measure(found, device)


def measure(gpu: Gpu, device: torch.device, size: int = SIZE, copied: int = COPIED) -> Gpu:
    """Return the findings with the rates of GEMMs of `size` and of copies of `copied` bytes."""
    try:
        gpu = gpu._replace(**_gemms(device, size))
    except Exception as error:  # of any kind: of the driver, Triton, cuBLAS
        return gpu._replace(reason=f"its FP8 GEMM failed: {one_line(str(error)):.200}")
    try:
        buffer = host_buffer(copied, device.type == "cuda", "the measurement", "no offloading")
    except RuntimeError as error:
        return gpu._replace(refused=str(error))
    there = torch.empty(copied, dtype=torch.uint8, device=device)
    to_device = _seconds(lambda: there.copy_(buffer, non_blocking=True), device)
    to_host = _seconds(lambda: buffer.copy_(there, non_blocking=True), device)
    return gpu._replace(to_device=copied / to_device, to_host=copied / to_host)


def _gemms(device: torch.device, size: int) -> dict[str, Any]:
    """Return the rates of `Gpu`, and its reasons. The FP8 products are compared with BF16's."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).bfloat16() for _ in range(2))
    a8, b8 = (quantize(each, amax(each), "e4m3") for each in (a, b))
    exact = a @ b.t()
    rates: dict[str, Any] = {"no_blocks": why_no_block_gemm(device) if device.type == "cuda" else None}
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: gemm(a8[0], b8[0], a8[1], b8[1], None, torch.bfloat16, True),
    }
    if rates["no_blocks"] is None:
        a1, b1 = block_quantize(a, "e4m3"), block_stack_weights([b], False)
        ways["blocks"] = lambda: block_gemm(a1[0], b1[0], a1[1], b1[1], True, None, torch.bfloat16)
    for name, product in ways.items():
        error = float((product().float() - exact.float()).norm() / exact.float().norm())
        if not error < MOST_ERROR:
            what = "FP8" if name == "fp8" else "block-scaled FP8"
            rates["reason"] = f"its {what} GEMM is off by {error:.0%}: the driver or cuBLAS is broken"
        rates[name] = 2 * size**3 / _seconds(product, device)
    return rates


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Return the median time of `work` on a device."""
    times = []
    for turn in range(repeats + 2):  # two to warm up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def examine_host() -> Host:
    """Return the host's memory and how long it takes to launch an op."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, spans = torch.zeros(1, device=device), []
    for _ in range(20):  # the best: other work only adds
        start = time.perf_counter()
        for _ in range(100):
            x.add_(1.0)
        spans.append((time.perf_counter() - start) / 100)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = None if soft == resource.RLIM_INFINITY else soft
    return Host(memory_of(torch.device("cpu")), host_bytes_free(), locked, 1e6 * min(spans))


# ---- the text -------------------------------------------------------------------------------------------------------


def describe(versions: dict[str, str | None], gpus: list[Gpu], host: Host) -> tuple[list[str], bool]:
    """Return the lines to print, and whether every GPU trains in FP8."""
    found = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    lines = [f"overcoat      {VERSION}, Python {platform.python_version()}", f"packages      {found}"]
    for place, gpu in enumerate(gpus):
        major, minor = gpu.capability
        cuda = f"CUDA {torch.version.cuda}"
        lines.append(f"GPU {place}         {gpu.name}, sm_{major}{minor}, {gpu.memory / GIBI:.0f} GiB, {cuda}")
        lines += _rates(gpu)
    if not gpus:
        lines.append("GPU           none that PyTorch sees")
    locked = "unlimited" if host.locked is None else f"{host.locked / GIBI:.2f} GiB"
    free = f"{host.memory / GIBI:.0f} GiB, {host.free / GIBI:.0f} free"
    lines.append(f"host memory   {free}; limit of locked memory {locked}")
    lines.append(f"host speed    {host.launch:.1f} us for a small op, {os.cpu_count()} CPU cores")
    lines += [f"note          {line}" for line in _notes(versions, gpus, host)]
    reasons = [f"GPU {place}: {gpu.reason}" for place, gpu in enumerate(gpus) if gpu.reason]
    if not gpus:
        what = "there is no NVIDIA GPU" if torch.version.cuda else "this PyTorch is built without CUDA"
        reasons = [f"{what}; the same code runs here as a slow reference, without tensor cores"]
    lines.append(f"FP8           {'; '.join(reasons) if reasons else 'works'}")
    return lines, not reasons


def _rates(gpu: Gpu) -> Iterator[str]:
    if gpu.fp8 and gpu.bf16:
        blocks = f", {gpu.blocks / 1e12:,.0f} with block scales" if gpu.blocks else ""
        yield (
            f"  GEMMs       FP8 {gpu.fp8 / 1e12:,.0f} TFLOP/s{blocks}, BF16 {gpu.bf16 / 1e12:,.0f}: "
            f"{gpu.fp8 / gpu.bf16:.2f} times as fast"
        )
    if gpu.to_device:
        yield f"  host link   {gpu.to_device / 1e9:.0f} GB/s to the GPU, {gpu.to_host / 1e9:.0f} back"


def _notes(versions: dict[str, str | None], gpus: list[Gpu], host: Host) -> Iterator[str]:
    """Yield what will be slow or refused, and why."""
    yield from unsupported(versions)
    if gpus and versions["triton"] is None:
        yield "triton is missing: the kernels do not run; install PyTorch from a CUDA build"
    if versions["transformers"] is None:
        yield "transformers is missing: overcoat train and most models need it; pip install 'overcoat[hf]'"
    for place, gpu in enumerate(gpus):
        if gpu.reason:
            yield f"GPU {place} trains with Recipe.bf16(), and with overcoat.AdamW, whose 8-bit states need no FP8"
        elif gpu.fp8 and gpu.bf16 and gpu.fp8 < LEAST_GAIN * gpu.bf16:
            yield f"GPU {place}: FP8 GEMMs are hardly faster than BF16's: FP8 saves memory there, not time"
        if gpu.no_blocks:
            yield f"Recipe.linear_scaling='block' is refused on GPU {place}: {gpu.no_blocks}"
        if gpu.refused:
            yield f"offloading is refused: {gpu.refused}"
        elif 0 < gpu.to_device < 10e9:
            yield f"GPU {place}: offloading is slow over this link; x16 PCIe 4 has 25 GB/s"
    if gpus and host.launch > SLOW_HOST:
        yield "this host is slow: it bounds small models and batches; train.compile=graphs replays layers without it"
    if not gpus and torch.backends.cpu.get_cpu_capability() == "AVX2":
        yield "without AVX-512 PyTorch's BF16 GEMMs on the CPU are slow; overcoat's commands compute them in FP32"
