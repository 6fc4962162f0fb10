"""A block eager and compiled in turns: whose time is the host's, on a host that has moods.

    python -m benchmarks.turns                              hidden 2048, 4 x 2048 tokens: two minutes on an H200
    python -m benchmarks.turns --shapes 7b-s2048 --turns 4 --only =eager "=torch.compile"

A small block takes the GPU about as long as the host needs to queue it, and a core that others share is up to twice as
slow, for seconds or for milliseconds: processes one after the other, as `overcoat bench layer` has them, say more about
the host than about the block. Here all are in one process, each is measured for a few windows, then the next, over and
over, every other turn backwards, and beginning with another. One row of results/turns.jsonl for each:

    ms        median over the turns of ms per step, in steady state; least_ms: of the turn with the least
    of_eager  median over the turns of ms by ms of the eager one, of the same recipe and turn: a slow second is both's
    host_ms   the same as ms of what the host takes to queue a step while the GPU is busy, and least_host_ms

"dispatcher": without the short way from an op to its kernel (overcoat/kernels/op.py). `--dynamic`: compiled for any
number of tokens, as a batch of another size is; all of a process, since blocks of one size share what is compiled.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import RESULTS, append_row
from overcoat.bench.blocks import make_block
from overcoat.bench.session import matches
from overcoat.bench.shapes import BLOCKS, BlockShape, build_block
from overcoat.bench.timing import host_ms, steady_ms
from overcoat.kernels import op as catalogue

TURNS, STEPS = 24, 10
Step = Callable[[], None]


class Contestant(NamedTuple):
    """A converted layer under a recipe of `bench layer`: eager or compiled, through the dispatcher or not.

    beside: the contestant whose times of the same turns its own are divided by.
    """

    recipe: str = "overcoat"
    compiled: bool = False
    dispatched: bool = False
    beside: str = "eager"


CONTESTANTS = {
    "eager": Contestant(),
    "torch.compile": Contestant(compiled=True),
    "leanest": Contestant("overcoat leanest", beside="leanest"),
    "leanest, torch.compile": Contestant("overcoat leanest", compiled=True, beside="leanest"),
    "eager, dispatcher": Contestant(dispatched=True),
    "torch.compile, dispatcher": Contestant(compiled=True, dispatched=True),
}


@contextmanager
def dispatched(through: bool) -> Iterator[None]:
    """Inside, ops go through PyTorch's dispatcher if asked to."""
    asked = catalogue._needs_no_dispatcher
    if through:
        catalogue._needs_no_dispatcher = lambda first: False
    try:
        yield
    finally:
        catalogue._needs_no_dispatcher = asked


def make_step(name: str, shape: BlockShape, device: str, dynamic: bool | None = None) -> Step:
    """Forward and backward of a contestant's block, weights and input its own; `dynamic` as torch.compile's."""
    model, tables = build_block(shape, torch.bfloat16, device)
    recipe, compiled = CONTESTANTS[name][:2]
    layer = make_block(recipe, model, tables, compiled=False, attention="default").module
    run = torch.compile(layer, fullgraph=True, dynamic=dynamic) if compiled else layer
    size = (shape.batch, shape.sequence, shape.model.hidden)
    x, dy = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        y = run(x, attention_mask=None, position_embeddings=tables)
        (y[0] if isinstance(y, tuple) else y).backward(dy)

    return step


def take_turns(steps: dict[str, Step], turns: int) -> dict[str, dict[str, float]]:
    """Figures of each contestant by name."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    hosts: dict[str, list[float]] = {name: [] for name in steps}
    # Waking autograd's own thread is paid once per step of a model, not once per block.
    with torch.autograd.set_multithreading_enabled(False):
        for turn in range(turns):
            first = turn // 2 % len(names)
            for name in (names[first:] + names[:first])[:: -1 if turn % 2 else 1]:
                with dispatched(CONTESTANTS[name].dispatched):
                    times[name].append(steady_ms(steps[name], 1, STEPS)["ms"])
                    hosts[name].append(host_ms(steps[name]))
    return {
        name: {
            "turns": turns,
            "ms": statistics.median(times[name]),
            "least_ms": min(times[name]),
            "of_eager": statistics.median(map(truediv, times[name], times[CONTESTANTS[name].beside])),
            "host_ms": statistics.median(hosts[name]),
            "least_host_ms": min(hosts[name]),
        }
        for name in steps
    }


def main() -> None:
    """Measure the shapes and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=BLOCKS, default=["1b-s2048"])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path, default=RESULTS / "turns.jsonl")
    parser.add_argument("--dynamic", action="store_true", help="compile for any number of tokens")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contestants with such a word; =WORD: so named")
    arguments = parser.parse_args()
    chosen = [name for name in CONTESTANTS if matches(name, arguments.only)]
    chosen += sorted({CONTESTANTS[name].beside for name in chosen}.difference(chosen))
    for shape in arguments.shapes:
        steps = {name: make_step(name, BLOCKS[shape], "cuda", arguments.dynamic or None) for name in chosen}
        found = take_turns(steps, arguments.turns)
        for name, figures in found.items():
            row = {"benchmark": "turns", "shape": shape, "name": name, "dynamic": arguments.dynamic, **figures}
            append_row(arguments.out, row)
            print(
                f"{shape:10s} {name:28s} {row['ms']:7.3f} ms (least {row['least_ms']:.3f}), "
                f"{row['of_eager']:.3f} of eager, host {row['host_ms']:.3f} (least {row['least_host_ms']:.3f})",
                flush=True,
            )
        torch.compiler.reset()


if __name__ == "__main__":
    main()
