"""One optimizer step: ours and every installed peer in one run on one GPU. `python -m benchmarks.optimizer --help`.

Each optimizer gets the same BF16 parameters and gradients, is warmed up, and stepped; a step is timed by events on the
stream, the median reported. Beside the time: bytes of state per parameter (allocated, not summed on paper), the peak of
temporary memory during a step, and the bandwidth that the step's necessary traffic amounts to, next to a plain copy's.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

# Name: (tensors, shape of each)
SIZES = {"64x16M": (64, (4096, 4096)), "1000x1M": (1000, (1024, 1024)), "1x1G": (1, (262144, 4096))}

Factory = Callable[[list[torch.nn.Parameter]], Any]


def ours() -> dict[str, tuple[Factory, float | None]]:
    """Name: (constructor, bytes of traffic per parameter that a step cannot avoid)."""
    from overcoat.optim.adamw import AdamW

    def make(**options: Any) -> Factory:
        return lambda params: AdamW(params, lr=1e-4, **options)

    check = 2.0  # reading the gradients once more, to skip a step that is not finite
    return {
        "overcoat 8bit bf16+8": (make(), 12.1 + check),
        "overcoat 8bit bf16+8 unchecked": (make(check_finite=False), 12.1),
        "overcoat fp8 bf16+8": (make(moments="fp8"), 12.1 + check),
        "overcoat fp8 bf16+8 unchecked": (make(moments="fp8", check_finite=False), 12.1),
        "overcoat 8bit bf16+16 unchecked": (make(master="bf16+16", check_finite=False), 14.1),
        "overcoat 8bit bf16 unchecked": (make(master="bf16", check_finite=False), 10.1),
        "overcoat 8bit bf16": (make(master="bf16"), 10.1 + check),
    }


def peers() -> dict[str, tuple[Factory, float | None]]:
    """The peers that can be imported here."""
    found: dict[str, tuple[Factory, float | None]] = {
        "torch fused bf16": (lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True), 14.0),
    }
    try:
        from flashoptim import FlashAdamW

        found["flashoptim 24-bit"] = (lambda params: FlashAdamW(params, lr=1e-4, master_weight_bits=24), None)
        found["flashoptim no master"] = (lambda params: FlashAdamW(params, lr=1e-4, master_weight_bits=None), None)
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit, AdamWFp8

        found["torchao AdamWFp8"] = (lambda params: AdamWFp8(params, lr=1e-4), None)
        found["torchao AdamW8bit"] = (lambda params: AdamW8bit(params, lr=1e-4), None)
    except ImportError:
        pass
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = (lambda params: bitsandbytes.optim.AdamW8bit(params, lr=1e-4), None)
    except ImportError:
        pass
    return found


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes per second of a device-to-device copy, read plus write."""
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source), 10) * 1e-3)


def median_ms(step: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a step between two events on the stream, the host running ahead as in training."""
    for _ in range(3):
        step()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def measure(make: Factory, size: str, repeats: int) -> dict[str, float]:
    """Time and memory of one optimizer on fresh parameters of `size`."""
    count, shape = SIZES[size]
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    total = sum(p.numel() for p in params)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = make(params)
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    temporary = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    milliseconds = median_ms(optimizer.step, repeats)
    assert all(p.isfinite().all() for p in params)
    return {
        "ms": round(milliseconds, 3),
        "state_bytes_per_parameter": round((held - before) / total, 4),
        "temporary_bytes_per_parameter": round(temporary / total, 4),
    }


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "none"


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result per optimizer and size."""
    bandwidth = copy_bandwidth()
    environment = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "command": " ".join(["python", "-m", "benchmarks.optimizer", *sys.argv[1:]]),
        "copy_TB_per_s": round(bandwidth / 1e12, 3),
    }
    candidates = {**ours(), **peers()}
    for size in arguments.sizes:
        parameters = SIZES[size][0] * torch.Size(SIZES[size][1]).numel()
        for name, (make, traffic) in candidates.items():
            if arguments.only and not any(word in name for word in arguments.only):
                continue
            try:
                figures: dict[str, Any] = measure(make, size, arguments.repeats)
            except Exception as error:  # a peer that fails must not hide the others
                figures = {"error": f"{type(error).__name__}: {error}"[:200]}
            gc.collect()
            torch.cuda.empty_cache()
            if traffic and "ms" in figures:
                figures["TB_per_s"] = round(traffic * parameters / figures["ms"] / 1e9, 3)
            yield {"benchmark": "optimizer", "size": size, "optimizer": name, **figures, **environment}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["64x16M"], choices=SIZES)
    parser.add_argument("--only", nargs="*", default=[], help="run only optimizers whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append one JSON line per result")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    for row in rows(arguments):
        print(
            f"{row['size']:8s} {row['optimizer']:34s} "
            + (
                row["error"]
                if "error" in row
                else f"{row['ms']:8.3f} ms  state {row['state_bytes_per_parameter']:.3f} B  "
                f"temporary {row['temporary_bytes_per_parameter']:.4f} B  {row.get('TB_per_s', '')}"
            ),
            flush=True,
        )
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
