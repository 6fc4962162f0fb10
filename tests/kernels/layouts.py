"""How every op's results lie, recorded: compiled code that users' caches hold takes it for granted.

    python -m tests.kernels.layouts        writes tests/kernels/layouts.json anew

torch.compile finds code in its caches by the names of ops, not by what they do, and that code does not look at our
results again (overcoat/catalogue.py). Where an op's results are to have another shape, dtype or order in memory for the
same arguments, rename the op. New ops and samples are recorded as they are; what is known is not overwritten.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from overcoat.catalogue import CATALOGUE
from tests.kernels.samples import SAMPLES

PATH = Path(__file__).with_suffix(".json")


def layouts() -> dict[str, dict[str, str]]:
    """By op: a hash of each sample's arguments, and one of its results' layout."""
    with FakeTensorMode() as mode:
        return {
            name: {
                _hash(sample): _hash(CATALOGUE[name](*tree_map_only(torch.Tensor, mode.from_tensor, sample)))
                for sample in samples
            }
            for name, samples in SAMPLES.items()
        }


def recorded() -> dict[str, dict[str, str]]:
    """The file's."""
    found: dict[str, dict[str, str]] = json.loads(PATH.read_text())
    return found


def _hash(values: Any) -> str:
    told = [_layout(x) if isinstance(x, torch.Tensor) else x for x in tree_leaves(values)]
    return hashlib.sha256(str(told).encode()).hexdigest()[:8]


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return str(x.dtype), *zip(x.shape, x.stride())


if __name__ == "__main__":
    now, then = layouts(), recorded()
    changed = [
        name for name in now for key in now[name] if then.get(name, {}).get(key, now[name][key]) != now[name][key]
    ]
    if changed:
        raise SystemExit(f"results of {', '.join(sorted(set(changed)))} lie otherwise: rename the ops")
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(now.items()))
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
