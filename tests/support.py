"""python -m tests.support: run what combines with what, and write the tables of docs/support.md.

A cell is a training step of a tiny model on the CPU, with a recipe and one feature: the loss must be that of the step
without the feature. What raises ValueError is refused, what warns has a cost. The second table is of pairs of options
that `overcoat train` refuses. CUDA graphs need a GPU: tests/test_support.py runs their column there.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overcoat
from overcoat import Recipe
from overcoat.models.compiled import begin_pass, compile_layers
from overcoat.models.family import decoder_layers
from overcoat.train.configfile import build_config
from tests.models import test_vision_language as vision
from tests.models.zoo import VOCAB, make_model
from tests.processes import on_two

PAGE = Path(__file__).parents[1] / "docs/support.md"
BEGIN, END = "<!-- python -m tests.support -->\n", "<!-- end -->\n"
CLOSE = 0.02  # that losses may differ by: FP8 scales are of other rows in each process
RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    'linear_scaling="block"': Recipe(linear_scaling="block"),
    'head="fp8"': Recipe(head="fp8"),
    "bf16": Recipe.bf16(),
}


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def converted(recipe: Recipe, device: str = "cpu", layers: int = 1) -> Any:
    model = make_model(layers=layers).to(device)
    overcoat.convert(model, recipe, strict=True)
    return model


def stepped(model: Any, inputs: dict[str, Any]) -> float:
    """The loss of a step; every trained parameter has a finite gradient."""
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad and p.grad is not None)
    assert any(p.grad is not None for p in model.parameters())
    return float(loss)


@functools.cache
def plain(recipe: Recipe, layers: int = 1) -> float:
    return stepped(converted(recipe, layers=layers), batch())


def check(recipe: Recipe, loss: float, layers: int = 1) -> None:
    assert abs(loss - plain(recipe, layers)) < CLOSE, (recipe, loss, plain(recipe, layers))


# ---- features in one process: (recipe) -> what it costs, or "" ------------------------------------------------------


def with_compile(recipe: Recipe) -> str:
    """Of every layer as one graph; without a compiler, which the CPU's takes a minute for."""
    torch._dynamo.reset()
    model = converted(recipe)
    for layer in decoder_layers(model).values():
        layer.compile(fullgraph=True, backend="eager")
    check(recipe, stepped(model, batch()))
    return ""


def with_lora(recipe: Recipe) -> str:
    model = peft.get_peft_model(make_model(layers=1), peft.LoraConfig(r=4, target_modules="all-linear"))
    report = overcoat.convert(model.train(), recipe, strict=True)
    check(recipe, stepped(model, batch()))
    assert len(report.converted) == recipe.fp8
    return "GEMMs of adapters run in the model's dtype" if recipe.fp8 else ""


def with_offloaded_blocks(recipe: Recipe) -> str:
    layers = 4  # of which the last two stay
    model = converted(replace(recipe, offload_blocks="all"), layers=layers)
    check(recipe, stepped(model, batch()), layers)
    offloads = any(getattr(layer, "overcoat_offload", None) for layer in decoder_layers(model).values())
    return "saved activations cross PCIe twice" if offloads else "no effect: only converted blocks are offloaded"


def with_offloaded_states(recipe: Recipe) -> str:
    model = converted(recipe)
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-3, offload=True)
    check(recipe, stepped(model, batch()))
    optimizer.step()
    return "states cross PCIe twice a step"


def with_released_gradients(recipe: Recipe) -> str:
    model = converted(recipe)
    overcoat.release_gradients(model, overcoat.AdamW(model.parameters(), lr=1e-3))
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    check(recipe, float(loss))
    assert all(parameter.grad is None for parameter in model.parameters())
    return "no accumulation, no clipping by the norm of all gradients"


def with_images(recipe: Recipe) -> str:
    model = vision.make_model("Llava", torch.bfloat16)
    inputs = vision.make_batch("Llava")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    expected = stepped(model, inputs)
    overcoat.convert(model, recipe, strict=True)
    assert abs(stepped(model, inputs) - expected) < 3 * CLOSE
    return ""


def with_graphs(recipe: Recipe) -> str:
    """On a GPU."""
    model = converted(recipe, "cuda")
    expected = stepped(model, batch("cuda"))
    compile_layers(model, graphs=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        begin_pass()
        loss = stepped(model, batch("cuda"))
    assert abs(loss - expected) < CLOSE
    return ""


# ---- features in two processes --------------------------------------------------------------------------------------


def sharded(recipe: Recipe) -> Any:
    """Return a converted model, sharded layer by layer."""
    model = converted(recipe)
    for layer in decoder_layers(model).values():
        fully_shard(layer)
    fully_shard(model)
    return model


def with_fsdp2(recipe: Recipe) -> str:
    model = sharded(recipe)
    check(recipe, stepped(model, batch()))
    return ""


def with_fp8_all_gather(recipe: Recipe) -> str:
    model = sharded(recipe)
    overcoat.fp8_all_gather(model)
    check(recipe, stepped(model, batch()))
    return ""


def with_context_parallel(recipe: Recipe) -> str:
    model = converted(recipe)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    overcoat.context_parallel(model, mesh)
    check(recipe, stepped(model, batch()))
    return "keys and values of whole rows are gathered in each layer"


ALONE: dict[str, Callable[[Recipe], str]] = {
    "`torch.compile` of layers": with_compile,
    "LoRA (peft)": with_lora,
    '`offload_blocks="all"`': with_offloaded_blocks,
    "`AdamW(offload=True)`": with_offloaded_states,
    "`release_gradients`": with_released_gradients,
    "images (LLaVA)": with_images,
}
TOGETHER: dict[str, Callable[[Recipe], str]] = {
    "FSDP2": with_fsdp2,
    "`fp8_all_gather`": with_fp8_all_gather,
    "`context_parallel`": with_context_parallel,
}
GRAPHS = "CUDA graphs"


def outcome(feature: Callable[[Recipe], str], recipe: Recipe) -> tuple[str, str]:
    """("works", ""), ("works", what it costs) or ("refused", the message)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "works", feature(recipe)
        except ValueError as error:
            return "refused", str(error)


def _in_process(rank: int, target: str) -> None:
    found = {name: [outcome(feature, each) for each in RECIPES.values()] for name, feature in TOGETHER.items()}
    if rank == 0:
        Path(target).write_text(json.dumps(found))


def cells() -> dict[str, list[tuple[str, str]]]:
    """The outcome of each feature with each recipe; of CUDA graphs as the GPU's test demands it."""
    torch.set_num_threads(1)
    found = {name: [outcome(feature, each) for each in RECIPES.values()] for name, feature in ALONE.items()}
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/found.json"
        on_two(_in_process, "cpu", target)
        found |= {name: [(how, why) for how, why in row] for name, row in json.loads(Path(target).read_text()).items()}
    return {**found, GRAPHS: [("works", "shapes must stay the same from step to step")] * len(RECIPES)}


# ---- options of `overcoat train` ------------------------------------------------------------------------------------

OPTIONS = {
    'train.compile = "layers"': ["train.compile=layers"],
    'train.compile = "graphs"': ["train.compile=graphs"],
    'train.batch_size = "auto"': ["train.batch_size=auto", "train.global_batch_size=64"],
    "train.accumulation": ["train.accumulation=2"],
    "train.epochs": ["train.epochs=3"],
    "train.fp8_every": ["train.fp8_every=10"],
    "lora.rank": ["lora.rank=8"],
    "lora.merge": ["lora.rank=8", "lora.merge=true"],
    "model.freeze": ["model.freeze=vision_tower"],
    "model.dequantize": ["model.dequantize=true"],
    "tokenizer.add_tokens": ["tokenizer.add_tokens=<tool>"],
    "recipe.offload_blocks": ["recipe.offload_blocks=all"],
    "optimizer.offload": ["optimizer.offload=true"],
    "optimizer.release_gradients": ["optimizer.release_gradients=true", "optimizer.clip=0"],
    "parallel.context": ["parallel.context=2"],
    'parallel.accumulate = "whole"': ["parallel.accumulate=whole"],
    "memory.report": ["memory.report=true"],
    'data.format = "messages"': ["data.format=messages"],
    "data.images": ["data.format=messages", "data.images=folder"],
    "data.document_mask": ["data.document_mask=true"],
    "data.streaming": ["data.streaming=true"],
    "data.dedupe": ["data.dedupe=true"],
    'data.special_tokens = "text"': ["data.special_tokens=text"],
}


def refused_pairs() -> list[tuple[str, str, str]]:
    """(option, option, why) of the pairs that are refused, each alone accepted."""

    def why_not(words: list[str]) -> str:
        try:
            build_config({"model": {"name": "model"}, "data": {"files": ["data.txt"]}}, words)
        except ValueError as error:
            return str(error)
        return ""

    assert not any(map(why_not, OPTIONS.values())), [why_not(words) for words in OPTIONS.values()]
    found = []
    for (one, mine), (other, theirs) in itertools.combinations(OPTIONS.items(), 2):
        sets = [{word.partition("=")[0]: word for word in words} for words in (mine, theirs)]
        is_twice = any(sets[0][key] != sets[1][key] for key in sets[0].keys() & sets[1].keys())
        if not is_twice and (why := why_not([*mine, *theirs])):
            found.append((one, other, why))
    return found


# ---- the page -------------------------------------------------------------------------------------------------------


def tables() -> str:
    """Both tables in Markdown, with what cells cost or why they are refused as numbered notes."""
    notes: dict[str, int] = {}

    def cell(how: str, why: str) -> str:
        word = {"works": "yes", "refused": "no"}[how]
        return f"{word} ({notes.setdefault(why, len(notes) + 1)})" if why else word

    heads = ["", *(f"`{name}`" for name in RECIPES)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *itertools.starmap(cell, row)] for name, row in cells().items()]
    parts = ["".join(f"| {' | '.join(line)} |\n" for line in lines)]
    parts.append("".join(f"{number}. {_escaped(why)}\n" for why, number in notes.items()))
    pairs = "".join(f"| `{one}` | `{other}` | {_escaped(why)} |\n" for one, other, why in refused_pairs())
    return f"{parts[0]}\n{parts[1]}\n## Options of overcoat train\n\n{PAIRS}\n\n| | with | |\n|---|---|---|\n{pairs}"


PAIRS = textwrap.fill(
    f"Of the options {', '.join(f'`{name}`' for name in OPTIONS)} these pairs are refused before anything is read; all "
    "others are accepted.",
    120,
    break_long_words=False,
)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def page(text: str) -> str:
    """The page with its generated part made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
