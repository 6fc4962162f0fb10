"""Bits of the whole package, as hashes: logits, loss and gradients of every model and recipe, AdamW's state.

    python -m tests.golden                        compare with what was recorded for this environment
    python -m tests.golden --write                record: after a commit that changes bits and says why
    python -m tests.golden --against REVISION     compare with another commit: no record needed

Bits depend on PyTorch, transformers and the CPU (its instructions choose the order of sums), so records are kept by
environment in golden.json. One thread; about two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import transformers
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from tests.models.zoo import ENCODERS, KINDS, make_batch, make_encoder, make_inputs, make_model

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "golden.json"
RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    "blocks": Recipe(linear_scaling="block"),
    "bf16": Recipe.bf16(),
}
MASKS = ("causal", "packed", "left-padded", "right-padded")
# What `overcoat.AdamW` is made with: every kind of moments and of master weights.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "8bit": {},
    "fp8": {"moments": "fp8"},
    "bf16": {"moments": "bf16"},
    "fp32": {"moments": "fp32"},
    "groups of 32": {"group_size": 32},
    "master bf16+16": {"master": "bf16+16"},
    "master bf16": {"master": "bf16"},
}
SHAPES = [(), (5,), (300,), (3, 128), (4, 200), (6, 3, 3, 5)]


def environment() -> str:
    """Return what bits depend on beside this repository: versions, the CPU's name and its instructions."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {capability}, {cpu}"


def digest(tensors: Sequence[Tensor]) -> str:
    """Return 12 hexadecimal digits of the tensors' dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def cases() -> dict[str, Callable[[], str]]:
    """Return functions that compute a case's hashes, by the case's name."""
    found: dict[str, Callable[[], str]] = {}
    for place, kind in enumerate(KINDS):
        for title, recipe in RECIPES.items():
            found[f"{kind}, {title}"] = lambda kind=kind, recipe=recipe, mask=MASKS[place % 4]: _causal(
                kind, recipe, mask
            )
    for kind in ENCODERS:
        for title, recipe in RECIPES.items():
            found[f"encoder {kind}, {title}"] = lambda kind=kind, recipe=recipe: _encoder(kind, recipe)
    for title, options in OPTIMIZERS.items():
        for dtype in (torch.bfloat16, torch.float32):
            name = f"AdamW {title}, {str(dtype).removeprefix('torch.')}"
            found[name] = lambda options=options, dtype=dtype: _adamw(options, dtype)
    return found


def _causal(kind: str, recipe: Recipe, mask: str) -> str:
    """Return hashes of logits, loss and gradients of a model of two layers."""
    model: Any = make_model(kind, layers=2)
    overcoat.convert(model, recipe)
    inputs = make_batch(mask)
    with torch.no_grad():
        logits = model(**{**inputs, "labels": None}, use_cache=False).logits
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return f"{digest([logits])} {digest([loss])} {digest(_gradients(model))}"


def _encoder(kind: str, recipe: Recipe) -> str:
    """Return hashes of the last hidden states and of the gradients."""
    model: Any = make_encoder(kind).bfloat16()
    overcoat.convert(model, recipe)
    inputs = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in make_inputs(kind).items()
    }
    hidden = model(**inputs).last_hidden_state
    hidden.float().square().mean().backward()
    return f"{digest([hidden])} {digest(_gradients(model))}"


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for _, parameter in sorted(model.named_parameters()) if parameter.grad is not None]


def _adamw(options: dict[str, Any], dtype: torch.dtype) -> str:
    """Return hashes of parameters and state after three steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = overcoat.AdamW(parameters, lr=1e-2, **options)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * (1 + step)).to(dtype)
        optimizer.step(clip_grad_norm=20.0)
    states = optimizer.state_dict()["state"]
    kept = [value for index in sorted(states) for _, value in sorted(states[index].items())]
    return f"{digest(parameters)} {digest([value for value in kept if isinstance(value, Tensor)])}"


def recorded() -> Optional[dict[str, str]]:
    """Return what was recorded for this environment, None if nothing was."""
    found: Optional[dict[str, str]] = json.loads(FILE.read_text()).get(environment()) if FILE.exists() else None
    return found


def compute(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names of cases and their hashes, computed on one thread."""
    torch.set_num_threads(1)
    of_name = cases()
    for name in names:
        yield name, of_name[name]()


def _compute_at(revision: str) -> dict[str, str]:
    """Return the hashes that another commit computes, with this file and in an environment like this one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", tree, revision], check=True)
        try:
            shutil.copy(__file__, tree / "tests" / "golden.py")
            command = [sys.executable, "-W", "ignore", "-m", "tests.golden", "--print"]
            shown = subprocess.run(
                command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, stdout=subprocess.PIPE
            )
            return dict(json.loads(shown.stdout))
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", tree], check=True)


def main() -> int:
    """Compare or record; return 1 if bits differ, 2 if there is nothing to compare with."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="record this environment's hashes")
    parser.add_argument("--against", metavar="REVISION", help="compare with the hashes that this commit computes")
    parser.add_argument("--print", action="store_true", help="print the hashes as JSON")
    options = parser.parse_args()
    expected = recorded()
    if options.against is not None:
        expected = _compute_at(options.against)
    if expected is None and not (options.write or options.print):
        print(f"nothing was recorded for {environment()}: compare with --against REVISION, or record with --write")
        return 2
    found = dict(compute(list(cases())))
    if options.print:
        print(json.dumps(found))
        return 0
    if options.write:
        records = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**records, environment(): found}, indent=1) + "\n")
        print(f"recorded {len(found)} cases for {environment()}")
        return 0
    assert expected is not None
    differing = [name for name in found if found[name] != expected.get(name)]
    print(
        "\n".join([*(f"differs: {name}" for name in differing), f"{len(found) - len(differing)} of {len(found)} equal"])
    )
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
