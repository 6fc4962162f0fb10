"""The per-kernel report: `python -m benchmarks.kernels [--out FILE]`.

Every kernel of a decoder block on its shape in Llama-2-7B (B 4, S 2048): the bytes it must move, its time with cold
caches, and the share of the measured copy bandwidth that makes. Below 80% is a regression or has its reason written
beside it in docs/log-kernels.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import RESULTS, append_row, copy_bandwidth, time_ms
from overcoat.kernels import norm, quantize, rope, swiglu

T, H, I, HEADS, D = 8192, 4096, 11008, 32, 128  # noqa: E741
CODE, G = "sqrt8", 128


class Case(NamedTuple):
    """One kernel: its name, the tensors whose bytes it must read, and the call, which returns what it writes."""

    name: str
    reads: list[Tensor]
    call: Callable[[], Any]


def normal(*shape: int) -> Tensor:
    """Random BF16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def quantize_cases() -> Iterator[Case]:
    """Layouts, weights, groups."""
    x, w = normal(T, H), [normal(H, H) for _ in range(3)]
    top, center = quantize.amax(x), quantize.token_center(x)
    codes, group_amax = quantize.group_encode(x, center, CODE, G)
    scale, weight = torch.tensor(0.01, device="cuda"), normal(H)
    yield Case("amax", [x], lambda: quantize.amax(x))
    yield Case("quantize", [x], lambda: quantize.quantize(x, top, "e4m3"))
    yield Case("quantize_both", [x], lambda: quantize.quantize_both(x, top, "e5m2"))
    yield Case("stack_amax", w, lambda: quantize.stack_amax(w))
    yield Case("stack_weights", w, lambda: quantize.stack_weights(w, top, False))
    yield Case("stack_weights^T", w, lambda: quantize.stack_weights(w, top, True))
    yield Case("group_encode_amax", [x], lambda: quantize.group_encode_amax(x, center, CODE, G))
    yield Case(
        "group_decode", [codes, group_amax], lambda: quantize.group_decode(codes, group_amax, center, CODE, G, x.dtype)
    )
    yield Case(
        "requantize_t",
        [codes, group_amax],
        lambda: quantize.requantize_t(codes, group_amax, weight, None, scale, CODE, G),
    )


def norm_cases() -> Iterator[Case]:
    """RMSNorm forward and backward."""
    x, dy, dresidual, weight = normal(T, H), normal(T, H), normal(T, H), normal(H)
    rstd, row_amax = norm.rmsnorm_stats(x, weight, 1e-5)
    top = quantize.amax(row_amax)
    _, _, codes, group_amax = norm.norm_quantize(x, None, rstd, weight, None, top, CODE, G)
    yield Case("rmsnorm_stats", [x], lambda: norm.rmsnorm_stats(x, weight, 1e-5))
    yield Case("norm_quantize", [x], lambda: norm.norm_quantize(x, None, rstd, weight, None, top, CODE, G))
    yield Case(
        "norm_backward",
        [dy, dresidual, codes, group_amax],
        lambda: norm.norm_backward(dy, codes, group_amax, rstd, weight, dresidual, False, CODE, G),
    )


def rope_cases() -> Iterator[Case]:
    """Rotation, forward and backward. In place, v is read but not written."""
    qkv, (cos, sin) = normal(T, 3 * H), (normal(T // 4, D), normal(T // 4, D))
    center = quantize.token_center(qkv)
    codes, amax = rope.qk_rope_encode_(qkv, center, cos, sin, None, None, 0.0, HEADS, HEADS, CODE)
    parts = [normal(T, H) for _ in range(3)]
    top = rope.qk_rope_backward_amax(*parts, cos, sin, HEADS)
    yield Case(
        "qk_rope_encode_",
        [qkv, *parts[:2]],
        lambda: rope.qk_rope_encode_(qkv, center, cos, sin, None, None, 0.0, HEADS, HEADS, CODE),
    )
    yield Case(
        "qk_rope_decode",
        [codes, amax],
        lambda: rope.qk_rope_decode(codes, amax, center, cos, sin, None, None, 0.0, HEADS, HEADS, CODE, torch.bfloat16),
    )
    yield Case("rope_backward_amax", parts, lambda: rope.qk_rope_backward_amax(*parts, cos, sin, HEADS))
    yield Case(
        "rope_backward_quantize",
        parts,
        lambda: rope.qk_rope_backward_quantize(*parts, cos, sin, top, "e5m2", HEADS),
    )


def swiglu_cases() -> Iterator[Case]:
    """SwiGLU forward and backward."""
    gate_up, dh = normal(T, 2 * I), normal(T, I)
    codes, group_amax, row_amax = swiglu.swiglu_encode(gate_up, CODE, G)
    top = quantize.amax(row_amax)
    kept = [dh, codes, group_amax]
    yield Case("swiglu_encode", [gate_up], lambda: swiglu.swiglu_encode(gate_up, CODE, G))
    yield Case("swiglu_quantize", [gate_up], lambda: swiglu.swiglu_quantize(gate_up, top))
    yield Case("swiglu_backward", kept, lambda: swiglu.swiglu_backward(dh, codes, group_amax, top, CODE, G))
    yield Case("swiglu_backward_amax", kept, lambda: swiglu.swiglu_backward_amax(dh, codes, group_amax, top, CODE, G))
    yield Case(
        "swiglu_backward_quantize",
        kept,
        lambda: swiglu.swiglu_backward_quantize(dh, codes, group_amax, top, "e5m2", CODE, G),
    )


def main() -> None:
    """Measure, print the table, append a row to benchmarks/results/kernels.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.jsonl")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"device copy {bandwidth / 1e12:.2f} TB/s\n{'kernel':26s} {'MB':>8s} {'ms':>8s} {'TB/s':>6s} {'share':>6s}")
    rows = {}
    for cases in (quantize_cases, norm_cases, rope_cases, swiglu_cases):
        for case in cases():
            written = case.call()
            outputs = [written] if isinstance(written, Tensor) else list(written)
            size = sum(t.nbytes for t in [*case.reads, *outputs])
            timing = time_ms(case.call)
            rate = size / timing["ms"] * 1e3
            rows[case.name] = {"bytes": size, **timing, "share": rate / bandwidth}
            print(
                f"{case.name:26s} {size / 1e6:8.1f} {timing['ms']:8.4f} {rate / 1e12:6.2f} {rate / bandwidth:6.0%}",
                flush=True,
            )
    append_row(arguments.out, {"copy_bandwidth": bandwidth, "kernels": rows})


if __name__ == "__main__":
    main()
