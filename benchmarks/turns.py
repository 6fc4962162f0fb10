"""The working tree beside another commit: GPU and host time, kept bytes, peaks.

    python -m benchmarks turns --against 9683458 --only block 2048      cases with both words in their name

Processes started minutes apart differ by more than the changes that matter: GPUs change their clock, and a host core
can be twice as slow for seconds. So both revisions run in one process, a few steps each in turn, every other turn in
reverse order, and the ratio is the median over turns. The other revision is extracted from git and imported under
another name. A row is a case:

    ms, host_ms    medians of new and old: GPU time of a step in steady state, host time to queue it
    ratio          median over turns of new ms by old ms; host_ratio the same for the host
    kept, peak     bytes held between forward and backward, and the most above the start of the step
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import overcoat
from benchmarks.rows import ROOT, append_row
from benchmarks.timing import host_ms, steady_ms

RECIPES: dict[str, dict[str, str]] = {
    **{name: {"name": name} for name in ("default", "paper", "leanest")},
    "block scales": {"name": "default", "linear_scaling": "block"},
}


@dataclass(frozen=True)
class Step:
    """A training step in two halves; what is allocated between them is kept for the second."""

    forward: Callable[[], Any]
    finish: Callable[[Any], None]

    def __call__(self) -> None:
        self.finish(self.forward())


def load_revision(revision: str, folder: Path, name: str = "overcoat_old") -> ModuleType:
    """The package as it was at a git revision, or in a folder that holds overcoat/, imported as `name`, so that it and
    `overcoat` do not collide."""
    if (Path(revision) / "overcoat").is_dir():
        shutil.copytree(Path(revision) / "overcoat", folder / "overcoat")
    else:
        command = ["git", "archive", revision, "overcoat"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            # Debian's Python 3.11.2 has no filters; git's own archive needs none.
            options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            files.extractall(folder, **options)
    (folder / "overcoat").rename(folder / name)
    for path in (folder / name).rglob("*.py"):
        path.write_text(re.sub(r"\bovercoat\b", name, path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def llama(hidden: int, intermediate: int, layers: int, heads: int, device: str) -> Any:
    """A Llama with random weights, the same in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=heads, vocab_size=32000)
    with torch.device(device):
        return LlamaForCausalLM(config).bfloat16().train()


def block_step(
    package: Any, recipe: str, hidden: int, device: str = "cuda", batch: int = 4, length: int = 2048
) -> Step:
    """Forward and backward of one decoder block."""
    model = llama(hidden, hidden * 43 // 16, 1, hidden // 128, device)
    package.convert(model, package.Recipe.from_name(**RECIPES[recipe]))
    layer = model.model.layers[0]
    x, dy = (torch.randn(batch, length, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    tables = model.model.rotary_emb(x, torch.arange(length, device=device)[None])

    def forward() -> Any:
        x.grad = None
        layer.zero_grad()
        y = layer(x, attention_mask=None, position_embeddings=tables)
        return y[0] if isinstance(y, tuple) else y

    return Step(forward, lambda y: y.backward(dy))


def model_step(package: Any, layers: int, batch: int, device: str = "cuda") -> Step:
    """A whole training step of a Llama-2-7B, with fewer layers if wanted."""
    model = llama(4096, 11008, layers, 32, device)
    package.convert(model)
    optimizer = package.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(32000, (batch, 2048), device=device)

    def finish(loss: Any) -> None:
        loss.backward()
        del loss
        optimizer.step(clip_grad_norm=1.0)
        optimizer.zero_grad()

    return Step(lambda: model(input_ids=ids, labels=ids).loss, finish)


def adamw_step(package: Any, count: int, size: int, device: str = "cuda") -> Step:
    """An optimizer step, gradients clipped."""
    weights = [torch.nn.Parameter(torch.randn(size // 1024, 1024, device=device).bfloat16()) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = package.AdamW(weights, lr=1e-5)
    return Step(lambda: None, lambda _: optimizer.step(clip_grad_norm=1.0))


def cases(layers: int) -> dict[str, Callable[[Any], Step]]:
    """What is measured, by name."""
    blocks, steps = itertools.product((2048, 4096), RECIPES), ((64, 1 << 24), (1000, 1 << 20))
    return {
        **{f"block {width} {recipe}": partial(block_step, recipe=recipe, hidden=width) for width, recipe in blocks},
        **{f"adamw {n} x {size >> 20}M": partial(adamw_step, count=n, size=size) for n, size in steps},
        **{f"model 7b, {layers} layers, batch {n}": partial(model_step, layers=layers, batch=n) for n in (4, 1)},
    }


def memory_of(step: Step) -> dict[str, int]:
    """Bytes kept between the halves of a step, and its peak, both above what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step.forward()
    kept = torch.cuda.memory_allocated() - before
    step.finish(result)
    torch.cuda.synchronize()
    return {"kept": kept, "peak": torch.cuda.max_memory_allocated() - before}


def take_turns(steps: dict[str, Step], turns: int, windows: int) -> dict[str, Any]:
    """Times of "new" and "old" and their ratios; `windows` steps in a turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    hosts: dict[str, list[float]] = {name: [] for name in steps}
    # Waking autograd's own thread is paid once per step of a model, not once per block.
    with torch.autograd.set_multithreading_enabled(False):
        for turn in range(turns):
            for name in list(steps)[:: -1 if turn % 2 else 1]:
                times[name].append(steady_ms(steps[name], 1, windows)["ms"])
                hosts[name].append(host_ms(steps[name], 5))
    return {
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "host_ms": {name: statistics.median(values) for name, values in hosts.items()},
        "ratio": statistics.median(map(truediv, times["new"], times["old"])),
        "host_ratio": statistics.median(map(truediv, hosts["new"], hosts["old"])),
    }


def measure(make: Callable[[Any], Step], packages: dict[str, Any], turns: int, windows: int) -> dict[str, Any]:
    """The figures of a case."""
    steps = {name: make(package) for name, package in packages.items()}
    memory = {}
    for name, step in steps.items():
        for _ in range(2):  # allocates what lasts: states, workspaces
            step()
        memory[name] = memory_of(step)
    return {**take_turns(steps, turns, windows), "memory": memory}


def line(name: str, found: dict[str, Any]) -> str:
    """The figures of a case as text."""
    new, old = found["memory"]["new"], found["memory"]["old"]
    bytes_of = (f"{key} {new[key] / 2**20:.1f} MiB ({new[key] - old[key]:+d} B)" for key in ("kept", "peak"))
    times = (f"{found[key]['new']:8.3f}" for key in ("ms", "host_ms"))
    ratios = (f"({found[key]:.3f} of old)" for key in ("ratio", "host_ratio"))
    return "  ".join([f"{name:28s}", *(f"{a} ms {b}" for a, b in zip(times, ratios, strict=True)), *bytes_of])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, metavar="REVISION", help="git revision, or folder, to compare with")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold all these words")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="steps of each in a turn")
    parser.add_argument("--layers", type=int, default=32, help="of the 7B; two of 32 need 110 GB")


def run(parsed: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        packages = {"new": overcoat, "old": load_revision(parsed.against, Path(folder))}
        for name, make in cases(parsed.layers).items():
            if all(word in name for word in parsed.only):
                found = measure(make, packages, parsed.turns, parsed.steps)
                append_row(parsed.json, {"benchmark": "turns", "case": name, "against": parsed.against, **found})
                print(line(name, found), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    return 0
