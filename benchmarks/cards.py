"""Small cards: a 7B trains in the memory of a 24 GB card, a 1B in that of an 8 GB card; and what offloading costs.

    python -m benchmarks.cards                   everything, about 4 minutes on an H200
    python -m benchmarks.cards --only "24 GB"    one group

The card is a limit on what PyTorch's allocator may take (`torch.cuda.set_per_process_memory_fraction`): the card's GiB
less `RESERVED` for driver and display, less the predictor's margin for the CUDA context. The GPU's speed and its PCIe
are its own. Batches are the largest that `overcoat.estimate` says fit, up to a cap that keeps host memory small; what
does not fit is run at one row all the same and recorded with its error, the last of its group. Random tokens, clipping
at 1.0 except with released gradients; one row of results/cards.jsonl for each case, tokens/s from the median of 5 steps
after 2.

"price" has no limit: blocks offloaded of Llama-2-7B at 4 x 2048, gradients released. (Kept, they are what the peak
consists of in a single pass: when backward ends, no activation is left to be moved.)
"""

from __future__ import annotations

import argparse
import gc
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch

import overcoat
from benchmarks.common import RESULTS, allocator, append_row
from overcoat import Recipe
from overcoat.bench.shapes import MODELS, build_model
from overcoat.bench.timing import steady_ms
from overcoat.estimate.fit import Room
from overcoat.estimate.predict import CONTEXT, Predictor, Setup
from overcoat.memory import optimizer_bytes, use_expandable_segments
from overcoat.ops.offload import transfers

SEQUENCE = 2048
WARMUP, STEPS = 2, 5
# Of a card's memory, what driver and display take.
RESERVED = 2**29
DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Group:
    """Cases that share a model and an optimizer.

    Attributes:
        card: GiB of the card, None for the whole GPU.
        setup: all but the recipe.
        recipes: (recipe, most rows in a batch). What may not fit comes last: no step follows one that failed.
    """

    name: str
    model: str
    card: Optional[int]
    setup: Setup
    recipes: tuple[tuple[Recipe, int], ...]

    @property
    def limit(self) -> int:
        """Bytes of the card that a process can use, the CUDA context among them."""
        assert self.card is not None
        return self.card * 2**30 - RESERVED

    def batch(self, predictor: Predictor, setup: Setup, most: int) -> int:
        """The largest batch up to `most` that fits; 0 if none does."""
        if self.card is None:
            return most
        return min(Room(predictor, 1, SEQUENCE, 1, self.limit).largest_batch(setup), most)


LEANEST, FULL = Recipe.leanest(), Recipe(offload_blocks="all")
BOTH = replace(LEANEST, offload_blocks="all")
LEANER = (LEANEST, FULL, BOTH)
RELEASED = Setup(release_gradients=True)
OFFLOADED = Setup(offload=True)
GROUPS = (
    Group("price", "llama-2-7b", None, RELEASED, tuple((Recipe(offload_blocks=n), 4) for n in (0, 8, 16, "all"))),
    Group(
        "24 GB, released, states offloaded", "llama-2-7b", 24, replace(RELEASED, offload=True),
        ((LEANEST, 1), (FULL, 8), (BOTH, 64), (LEANEST, 64)),
    ),
    Group("8 GB", "olmo-1b", 8, Setup(), ((BOTH, 1),)),
    Group("8 GB, released", "olmo-1b", 8, RELEASED, tuple((recipe, 64) for recipe in (*LEANER, Recipe()))),
    Group("8 GB, states offloaded", "olmo-1b", 8, OFFLOADED, tuple((recipe, 64) for recipe in (Recipe(), *LEANER))),
    Group(
        "8 GB, released, states offloaded", "olmo-1b", 8, replace(RELEASED, offload=True),
        tuple((recipe, 64) for recipe in (Recipe(), *LEANER)),
    ),
)  # fmt: skip


def measure_group(group: Group, out: Path) -> None:
    """Build the model and the optimizer, then measure every recipe."""
    predictor = Predictor(MODELS[group.model].config())
    allowed = 1.0 if group.card is None else (group.limit - CONTEXT) / torch.cuda.mem_get_info(DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction(allowed, DEVICE)
    model: Any = build_model(MODELS[group.model], torch.bfloat16, "cuda")
    setup = group.setup
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-5, offload=setup.offload, **setup.group)
    if setup.release_gradients:
        overcoat.release_gradients(model, optimizer)
    for recipe, most in group.recipes:
        chosen = replace(setup, recipe=recipe)
        fits = group.batch(predictor, chosen, most)
        row = describe(group, predictor, chosen, max(fits, 1))
        try:
            row |= measure(model, optimizer, chosen, row["batch"])
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        print(line(row), flush=True)
        append_row(out, {**row, **allocator()})
        if "error" in row:
            return
        torch.cuda.empty_cache()


def describe(group: Group, predictor: Predictor, setup: Setup, batch: int) -> dict[str, Any]:
    """What is measured, and what was predicted of it."""
    prediction = predictor.predict(batch, SEQUENCE, setup)
    return {
        "case": group.name,
        "model": group.model,
        "card_GiB": group.card,
        "allocator_limit": None if group.card is None else group.limit - CONTEXT,
        "batch": batch,
        "sequence": SEQUENCE,
        "recipe": asdict(setup.recipe),
        "release_gradients": setup.release_gradients,
        "clip": None if setup.release_gradients else 1.0,
        "states_offloaded": setup.offload,
        "predicted_peak": prediction.peak_bytes,
        "predicted_total": prediction.total_bytes,
        "predicted_host": prediction.host_bytes,
    }


def measure(model: Any, optimizer: Any, setup: Setup, batch: int) -> dict[str, Any]:
    """Speed and memory of some steps.

    Raises:
        torch.OutOfMemoryError: the card is too small.
        FloatingPointError: the loss is not finite.
    """
    overcoat.convert(model, setup.recipe)
    loss = torch.zeros((), device=DEVICE)
    clip = None if setup.release_gradients else 1.0

    def step() -> None:
        ids = torch.randint(model.config.vocab_size, (batch, SEQUENCE), device=DEVICE)
        value = model(input_ids=ids, labels=ids, use_cache=False).loss
        value.backward()
        optimizer.step(clip_grad_norm=clip)
        optimizer.zero_grad()
        loss.copy_(value.detach())

    torch.cuda.reset_peak_memory_stats(DEVICE)
    timing = steady_ms(step, STEPS, warmup=WARMUP)
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"the loss is {loss.item()} after {WARMUP + STEPS} steps")
    free, total = torch.cuda.mem_get_info(DEVICE)
    return {
        **timing,
        "tokens_per_second": batch * SEQUENCE / timing["ms"] * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated(DEVICE),
        "reserved_bytes": torch.cuda.max_memory_reserved(DEVICE),
        "outside_bytes": total - free - torch.cuda.memory_reserved(DEVICE),
        "host_states": optimizer_bytes(optimizer, "cpu"),
        "host_activations": transfers(DEVICE).pool.total_bytes,
        "loss": loss.item(),
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    recipe = row["recipe"]
    name = f"checkpoint {recipe['checkpoint']}, offload_blocks {recipe['offload_blocks']}"
    text = f"{row['model']:11s} {row['case']:34s} {name:38s} B{row['batch']:<3d}"
    if "error" in row:
        return f"{text} predicted {row['predicted_total'] / 2**30:.2f} GiB: {row['error']}"
    return (
        f"{text} {row['tokens_per_second']:8,.0f} tok/s, peak {row['peak_bytes'] / 2**30:6.2f} GiB (predicted "
        f"{row['predicted_peak'] / 2**30:6.2f}), reserved {row['reserved_bytes'] / 2**30:6.2f}, outside "
        f"{row['outside_bytes'] / 2**30:5.2f}, host {(row['host_states'] + row['host_activations']) / 2**30:6.2f}"
    )


def main() -> None:
    """Measure the groups and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose names begin so")
    parser.add_argument("--out", type=Path, default=RESULTS / "cards.jsonl")
    arguments = parser.parse_args()
    use_expandable_segments()  # as `overcoat train` does
    for group in GROUPS:
        if group.name.startswith(arguments.only):
            measure_group(group, arguments.out)
            gc.collect()  # model, hook and released optimizer hold each other
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
