"""python -m tests.support: run what combines with what, and write the tables of docs/support.md.

A cell is a training step of a tiny model on the CPU, with a recipe, or adapters, and one feature: the loss must be that
of the step without the feature, and of new adapters that of the model without them. What raises ValueError is refused,
what warns has a cost. The last table is of pairs of options that `overcoat train` refuses. CUDA graphs need a GPU:
tests/test_support.py runs their row there.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    """adapters: of peft, "lora" or "dora", of all linear layers of the model, of which then they alone train; or ""."""

    recipe: Recipe
    adapters: str = ""


FROZEN = replace(Recipe(), frozen_weights="fp8")
PLAIN = {name: Case(recipe) for name, recipe in RECIPES.items()}
ADAPTED = {
    "LoRA": Case(Recipe(), "lora"),
    "DoRA": Case(Recipe(), "dora"),
    'LoRA, frozen_weights="fp8"': Case(FROZEN, "lora"),
    'DoRA, frozen_weights="fp8"': Case(FROZEN, "dora"),
}


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def adapted(model: Any, adapters: str) -> Any:
    """The model with new adapters, which add nothing yet, or without."""
    if not adapters:
        return model
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=adapters == "dora")
    return peft.get_peft_model(model, config).train()


def converted(case: Case, device: str = "cpu", layers: int = 1) -> Any:
    model = adapted(make_model(layers=layers).to(device), case.adapters)
    overcoat.convert(model, case.recipe, strict=True)
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
    return stepped(converted(Case(recipe), layers=layers), batch())


def check(case: Case, loss: float, layers: int = 1) -> None:
    expected = plain(replace(case.recipe, frozen_weights="bf16"), layers)
    assert abs(loss - expected) < CLOSE, (case, loss, expected)


# ---- features in one process: (case) -> what it costs, or "" --------------------------------------------------------


def with_compile(case: Case) -> str:
    """Of every layer as one graph; without a compiler, which the CPU's takes a minute for."""
    torch._dynamo.reset()
    model = converted(case)
    for layer in decoder_layers(model).values():
        layer.compile(fullgraph=True, backend="eager")
    check(case, stepped(model, batch()))
    return ""


def with_lora(case: Case) -> str:
    return _with_adapters(case._replace(adapters="lora"))


def with_dora(case: Case) -> str:
    return _with_adapters(case._replace(adapters="dora"))


def with_frozen_weights(case: Case) -> str:
    """Of the base of LoRA."""
    recipe = replace(case.recipe, frozen_weights="fp8")
    model = adapted(make_model(layers=1), "lora")
    report = overcoat.convert(model, recipe, strict=True)
    check(case, stepped(model, batch()))
    held = sum(hasattr(weight, "decoded") for weight in model.parameters())
    assert (held > 0) == recipe.fp8, report
    return "of the base of adapters, here LoRA" if held else "no effect: no weight is quantized"


def _with_adapters(case: Case) -> str:
    model = adapted(make_model(layers=1), case.adapters)
    report = overcoat.convert(model, case.recipe, strict=True)
    check(case, stepped(model, batch()))
    assert len(report.converted) == case.recipe.fp8
    return "GEMMs of adapters run in the model's dtype" if case.recipe.fp8 else ""


def with_offloaded_blocks(case: Case) -> str:
    layers = 4  # of which the last two stay
    model = converted(case._replace(recipe=replace(case.recipe, offload_blocks="all")), layers=layers)
    check(case, stepped(model, batch()), layers)
    offloads = any(getattr(layer, "overcoat_offload", None) for layer in decoder_layers(model).values())
    return "saved activations cross PCIe twice" if offloads else "no effect: only converted blocks are offloaded"


def with_offloaded_states(case: Case) -> str:
    model = converted(case)
    optimizer = overcoat.AdamW(trained(model), lr=1e-3, offload=True)
    check(case, stepped(model, batch()))
    optimizer.step()
    return "states cross PCIe twice a step"


def with_released_gradients(case: Case) -> str:
    model = converted(case)
    overcoat.release_gradients(model, overcoat.AdamW(trained(model), lr=1e-3))
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    check(case, float(loss))
    assert all(parameter.grad is None for parameter in model.parameters())
    return "no accumulation, no clipping by the norm of all gradients"


def with_streaming(case: Case) -> str:
    """On the CPU, which "streams" from and to the same memory."""
    model = converted(case, layers=2)
    overcoat.stream(model, overcoat.AdamW(trained(model), lr=1e-3))
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    check(case, float(loss), 2)
    return "codes cross the link twice a step, weights and states that train both ways"


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_images(case: Case) -> str:
    model = vision.make_model("Llava", torch.bfloat16)
    inputs = vision.make_batch("Llava")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    expected = stepped(model, inputs)
    model = adapted(model, case.adapters)
    overcoat.convert(model, case.recipe, strict=True)
    assert abs(stepped(model, inputs) - expected) < 3 * CLOSE
    return ""


def with_graphs(case: Case) -> str:
    """On a GPU."""
    model = converted(case, "cuda")
    expected = stepped(model, batch("cuda"))
    compile_layers(model, graphs=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        begin_pass()
        loss = stepped(model, batch("cuda"))
    assert abs(loss - expected) < CLOSE
    return ""


# ---- features in two processes --------------------------------------------------------------------------------------


def sharded(case: Case) -> Any:
    """Return a converted model, sharded layer by layer."""
    model = converted(case)
    for layer in decoder_layers(model).values():
        fully_shard(layer)
    fully_shard(model)
    return model


def with_fsdp2(case: Case) -> str:
    model = sharded(case)
    check(case, stepped(model, batch()))
    return ""


def with_fp8_all_gather(case: Case) -> str:
    model = sharded(case)
    overcoat.fp8_all_gather(model)
    check(case, stepped(model, batch()))
    return ""


def with_sharded_streaming(case: Case) -> str:
    model = sharded(case)
    overcoat.stream(model, overcoat.AdamW(trained(model), lr=1e-3))
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    check(case, float(loss))
    return "no clipping by the norm of all gradients; codes, weights and states cross PCIe"


def with_context_parallel(case: Case) -> str:
    model = converted(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    overcoat.context_parallel(model, mesh)
    check(case, stepped(model, batch()))
    return "keys and values of whole rows are gathered in each layer"


Feature = Callable[[Case], str]
OF_ADAPTERS: dict[str, Feature] = {
    "LoRA (peft)": with_lora,
    "DoRA (peft)": with_dora,
    '`frozen_weights="fp8"`': with_frozen_weights,
}
ALONE: dict[str, Feature] = {
    "`torch.compile` of layers": with_compile,
    '`offload_blocks="all"`': with_offloaded_blocks,
    "`AdamW(offload=True)`": with_offloaded_states,
    "`release_gradients`": with_released_gradients,
    "`stream`": with_streaming,
    "images (LLaVA)": with_images,
}
TOGETHER: dict[str, Feature] = {
    "FSDP2": with_fsdp2,
    "`fp8_all_gather`": with_fp8_all_gather,
    "`stream` with FSDP2": with_sharded_streaming,
    "`context_parallel`": with_context_parallel,
}
GRAPHS = "CUDA graphs"


def outcome(feature: Feature, case: Case) -> tuple[str, str]:
    """("works", ""), ("works", what it costs) or ("refused", the message)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "works", feature(case)
        except ValueError as error:
            return "refused", str(error)


def _in_process(rank: int, target: str) -> None:
    cases = [*PLAIN.values(), *ADAPTED.values()]
    found = {name: [outcome(feature, each) for each in cases] for name, feature in TOGETHER.items()}
    if rank == 0:
        Path(target).write_text(json.dumps(found))


Cells = dict[str, list[tuple[str, str]]]


def cells() -> tuple[Cells, Cells]:
    """The outcome of each feature with each recipe, of CUDA graphs as the GPU's test demands it; and with each kind of
    adapters, without CUDA graphs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/found.json"
        on_two(_in_process, "cpu", target)
        together = {
            name: [(how, why) for how, why in row] for name, row in json.loads(Path(target).read_text()).items()
        }
    found: list[Cells] = []
    for cases, features, part in (
        (PLAIN, OF_ADAPTERS | ALONE, slice(len(PLAIN))),
        (ADAPTED, ALONE, slice(len(PLAIN), None)),
    ):
        alone = {name: [outcome(feature, each) for each in cases.values()] for name, feature in features.items()}
        found.append(alone | {name: row[part] for name, row in together.items()})
    graphs = {GRAPHS: [("works", "shapes must stay the same from step to step")] * len(PLAIN)}
    return found[0] | graphs, found[1]


# ---- options of `overcoat train` ------------------------------------------------------------------------------------

OPTIONS = {
    'train.compile = "layers"': ["train.compile=layers"],
    'train.compile = "graphs"': ["train.compile=graphs"],
    'train.batch_size = "auto"': ["train.batch_size=auto", "train.global_batch_size=64"],
    "train.accumulation": ["train.accumulation=2"],
    "train.epochs": ["train.epochs=3"],
    "train.fp8_every": ["train.fp8_every=10"],
    "lora.rank": ["lora.rank=8"],
    "lora.dora": ["lora.rank=8", "lora.dora=true"],
    "recipe.frozen_weights": ["lora.rank=8", "recipe.frozen_weights=fp8"],
    "lora.merge": ["lora.rank=8", "lora.merge=true"],
    "model.freeze": ["model.freeze=vision_tower"],
    "model.dequantize": ["model.dequantize=true"],
    "tokenizer.add_tokens": ["tokenizer.add_tokens=<tool>"],
    "recipe.offload_blocks": ["recipe.offload_blocks=all"],
    "train.stream": ["train.stream=true", "optimizer.clip=0"],
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
    """All tables in Markdown, with what cells cost or why they are refused as numbered notes."""
    notes: dict[str, int] = {}

    def cell(how: str, why: str) -> str:
        word = {"works": "yes", "refused": "no"}[how]
        return f"{word} ({notes.setdefault(why, len(notes) + 1)})" if why else word

    def table(names: Iterable[str], found: Cells) -> str:
        heads = ["", *names]
        lines = [heads, ["---"] * len(heads)]
        lines += [[name, *itertools.starmap(cell, row)] for name, row in found.items()]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    of_recipes, of_adapters = cells()
    parts = [
        table([f"`{name}`" for name in PLAIN], of_recipes),
        "With adapters, and the default recipe:\n",
        table([_code(name) for name in ADAPTED], of_adapters),
        "".join(f"{number}. {_escaped(why)}\n" for why, number in notes.items()),
        "## Options of overcoat train\n",
        f"{PAIRS}\n",
        "| | with | |\n|---|---|---|\n"
        + "".join(f"| `{one}` | `{other}` | {_escaped(why)} |\n" for one, other, why in refused_pairs()),
    ]
    return "\n".join(parts)


def _code(name: str) -> str:
    kind, comma, setting = name.partition(", ")
    return f"{kind}, `{setting}`" if comma else kind


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
