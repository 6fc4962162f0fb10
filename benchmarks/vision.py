"""Which part of FP8 changes when a tiny vision-language model learns to count: many seeds of many arms, side by side.

    python -m benchmarks.vision                                 all arms, 8 seeds, 350 steps
    python -m benchmarks.vision --workers 14 --longer 1050      on a GPU, and three arms for 1,050 steps, too

The model, scenes, optimizer and schedule are those of `overcoat paper table5`, one scene a row, padded at its end, so
that a step is small and many processes share a GPU. A seed draws the weights, the stage before (BF16, tower frozen) and
the order of scenes, which all its arms share. One row of results/vision.jsonl per run: held-out loss and accuracy by
kind of question on the way, and at the end; `fp8_loss` is the loss of the same scenes computed as in training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import overcoat
from benchmarks.common import RESULTS, append_row
from overcoat import Recipe
from overcoat.extras import load_extra
from overcoat.formats import E4M3, E5M2, Float8, dequantize_tensor, quantize_tensor
from overcoat.models.family import decoder_layers
from overcoat.paper.scenes import KINDS, render, scene
from overcoat.paper.training import device
from overcoat.paper.vision import PROMPT, build
from overcoat.train.build import make_optimizer, summed_loss
from overcoat.train.config import OptimizerConfig, ScheduleConfig
from overcoat.train.data import IGNORED, Batch
from overcoat.train.loop import multiplier

HIDDEN, LAYERS, HEADS, WIDTH = 128, 2, 2, 96
TRAINED, ASKED, ON_THE_WAY, ROWS = 12_000, 1000, 250, 24
EXACT: dict[str, Any] = {"moments": "fp32", "master": "bf16+16"}


class Arm(NamedTuple):
    """recipe: of the converted layers, those whose name `where` is in. products: the formats of forward and backward,
    for models whose layers round the operands of their products and nothing else."""

    recipe: Recipe = Recipe.bf16()
    optimizer: dict[str, Any] = EXACT
    where: str = ""
    products: tuple[Float8 | None, Float8 | None] | None = None


ARMS = {
    "bf16": Arm(),
    "default": Arm(Recipe(), {}),
    "layers": Arm(Recipe()),  # with an exact optimizer
    "optimizer": Arm(optimizer={}),  # with layers in BF16
    "moments": Arm(optimizer={"master": "bf16+16"}),
    "master": Arm(optimizer={"moments": "fp32"}),
    "products": Arm(products=(E4M3, E5M2)),
    "forward": Arm(products=(E4M3, None)),
    "backward": Arm(products=(None, E5M2)),
    "tower": Arm(Recipe(), where="vision_tower"),
    "text": Arm(Recipe(), where="language_model"),
    "paper": Arm(Recipe.paper(), {"moments": "fp8"}),
    "e4m3": Arm(Recipe(grad_format="e4m3"), {}),
    "block": Arm(Recipe(linear_scaling="block"), {}),
}
LONGER = ("bf16", "default", "layers")


def rounded(x: Tensor, fmt: Float8 | None) -> Tensor:
    return x if fmt is None else dequantize_tensor(quantize_tensor(x, fmt), x.dtype)


class Product(torch.autograd.Function):
    """x W^T of rounded operands, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, formats: tuple[Float8 | None, Float8 | None]) -> Tensor:
        x, weight = rounded(x, formats[0]), rounded(weight, formats[0])
        ctx.save_for_backward(x, weight)
        ctx.format = formats[1]
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, rounded(gradients[0], ctx.format)
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), None


def convert_as(model: nn.Module, arm: Arm) -> None:
    """Convert the arm's layers, or round the operands of every linear layer in blocks, in `train()` mode."""
    if arm.products is None:
        overcoat.convert(model, arm.recipe, lambda _, path: arm.where in path)
        return
    for layer in decoder_layers(model).values():
        for linear in layer.modules():
            if isinstance(linear, nn.Linear):
                linear.forward = _product_of(linear, arm.products)  # type: ignore[method-assign, assignment]


def _product_of(linear: nn.Linear, formats: tuple[Float8 | None, Float8 | None]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not linear.training:
            return nn.functional.linear(x, linear.weight, linear.bias)
        y = Product.apply(x, linear.weight, formats)
        return y if linear.bias is None else y + linear.bias

    return forward


# ---- data --------------------------------------------------------------------------------------------------------


def write_scenes(folder: Path, split: str, count: int) -> None:
    """Pixels uint8 (N, 64, 64, 3), token ids and labels (N, T) of scenes, the places of answers, and kinds."""
    tokenizer = load_extra("transformers", "hf", "benchmarks.vision").AutoTokenizer.from_pretrained(folder / "model")
    made = [scene(f"{split} {number}") for number in range(count)]
    texts = [tokenizer(PROMPT.format(each.question) + each.answer + " <eos>").input_ids for each in made]
    ids = np.zeros((count, WIDTH + 1), dtype=np.int64)
    labels = np.full((count, WIDTH + 1), IGNORED, dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        labels[row, len(text) - 2 : len(text)] = text[-2:]  # the answer, and the end
    answers = np.array([len(text) - 3 for text in texts])
    pixels = np.stack([np.asarray(render(each)) for each in made])
    kinds = np.array([KINDS.index(each.kind) for each in made])
    place = folder / f"{split}.npz"
    np.savez_compressed(place, ids=ids[:, :-1], labels=labels[:, 1:], pixels=pixels, answers=answers, kinds=kinds)


class Scenes:
    """All scenes of a split on the device."""

    def __init__(self, folder: Path, split: str):
        with np.load(folder / f"{split}.npz") as arrays:
            loaded = {name: torch.from_numpy(arrays[name]).to(device()) for name in arrays.files}
        self.ids, self.labels, self.pixels = loaded["ids"], loaded["labels"], loaded["pixels"]
        self.answers, self.kinds = loaded["answers"], loaded["kinds"]

    def batch(self, rows: Tensor) -> Batch:
        pixels = (self.pixels[rows].permute(0, 3, 1, 2) / 127.5 - 1).bfloat16()
        return Batch(self.ids[rows], self.labels[rows], None, 2 * len(rows), None, {"pixel_values": pixels})


@torch.no_grad()
def asked(model: Any, scenes: Scenes, count: int) -> dict[str, Any]:
    """Held-out loss per label, in `eval()` and as in training, and the share of right answers by kind, in per cent."""
    every = torch.arange(min(count, len(scenes.ids)), device=device())
    found, losses, trained = [], [], []
    for rows in every.split(250):
        batch = scenes.batch(rows)
        model.train()
        trained.append(summed_loss(model, batch).item())
        model.eval()
        logits = model(input_ids=batch.input_ids, use_cache=False, **batch.images).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        losses.append(loss.item())
        place = torch.arange(len(rows), device=device()), scenes.answers[rows]
        found.append(logits[place].argmax(-1) == batch.labels[place])
    model.train()
    right, labels = torch.cat(found), 2 * len(every)
    shares = {
        kind: 100 * right[scenes.kinds[: len(every)] == place].double().mean().item()
        for place, kind in enumerate(KINDS)
    }
    return {"loss": sum(losses) / labels, "fp8_loss": sum(trained) / labels, **shares}


# ---- runs --------------------------------------------------------------------------------------------------------


def train(model: Any, scenes: Scenes, held_out: Scenes, seed: int, steps: int, section: OptimizerConfig) -> list[Any]:
    """Train to the end; what `asked` finds after every 50 steps."""
    schedule = ScheduleConfig(warmup_steps=steps // 10)
    optimizer = make_optimizer(model, section, seed)
    generator = np.random.default_rng(seed)
    count = len(scenes.ids)
    order = np.concatenate([generator.permutation(count) for _ in range(-(-steps * ROWS // count))])
    rows = torch.from_numpy(order[: steps * ROWS]).view(steps, ROWS).to(device())
    found = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = section.lr * multiplier(schedule, step, steps)
        batch = scenes.batch(rows[step])
        (summed_loss(model, batch) / batch.num_labels).backward()
        optimizer.step(clip_grad_norm=section.clip)
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            questions = len(held_out.ids) if step + 1 == steps else ON_THE_WAY
            found.append({"step": step + 1, **asked(model, held_out, questions)})
    return found


def run(folder: Path, name: str, seed: int, steps: int, lr: float = 5e-4) -> dict[str, Any]:
    """One arm of one seed; the arm "" is the stage before, which all others of the seed begin with."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    transformers = load_extra("transformers", "hf", "benchmarks.vision")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    scenes, held_out = Scenes(folder, "train"), Scenes(folder, "test")
    section = OptimizerConfig(lr=lr, betas=[0.9, 0.99], **EXACT)
    if not name:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(folder / "model")
        model = transformers.LlavaForConditionalGeneration(config).bfloat16().to(device()).train()
        model.model.vision_tower.requires_grad_(False)
        found = train(model, scenes, held_out, seed, steps, replace(section, lr=1e-3))
        model.save_pretrained(folder / f"seed-{seed}")
    else:
        arm = ARMS[name]
        kind = transformers.LlavaForConditionalGeneration
        model = kind.from_pretrained(folder / f"seed-{seed}", dtype=torch.bfloat16).to(device()).train()
        convert_as(model, arm)
        chosen = OptimizerConfig(lr=lr, betas=[0.9, 0.99], **arm.optimizer)
        found = train(model, scenes, held_out, seed + 1000, steps, chosen)
    figures = {"benchmark": "vision", "arm": name or "stage 1", "seed": seed, "steps": steps, "lr": lr}
    return {**figures, "seconds": time.perf_counter() - begun, "found": found}


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Means over seeds with standard errors, and of the differences to BF16 of the same seed."""
    by_length: dict[int, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if row["arm"] != "stage 1":
            by_length.setdefault(row["steps"], {}).setdefault(row["arm"], {})[row["seed"]] = row["found"][-1]
    lines = []
    for steps, arms in sorted(by_length.items()):
        lines += [
            "",
            f"| {steps} steps | seeds | loss | minus BF16's | as trained | count % | all % |",
            "|---|" + "---:|" * 6,
        ]
        base = arms.get("bf16", {})
        for name in [each for each in ARMS if each in arms]:
            found = arms[name]
            gaps = [found[seed]["loss"] - base[seed]["loss"] for seed in found if seed in base]
            every = [statistics.fmean(each[kind] for kind in KINDS) for each in found.values()]
            cells = [_mean([each[key] for each in found.values()], digits) for key, digits in COLUMNS]
            gap = _mean(gaps, 4) if name != "bf16" and gaps else ""
            lines.append(
                f"| {name} | {len(found)} | {cells[0]} | {gap} | {cells[1]} | {cells[2]} | {_mean(every, 1)} |"
            )
    return "\n".join(lines)


COLUMNS = (("loss", 4), ("fp8_loss", 4), ("count", 1))


def _mean(values: list[float], digits: int) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.{digits}f} +- {error:.{digits}f}"


def main(argv: list[str] | None = None) -> None:
    """Run all arms, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--longer", type=int, default=0, help="also train some arms for this many steps")
    parser.add_argument("--trained", type=int, default=TRAINED, help="scenes to train on")
    parser.add_argument("--asked", type=int, default=ASKED, help="scenes to ask")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--out", type=Path, default=RESULTS / "vision.jsonl")
    parser.add_argument("--data", type=Path, help="folder for the scenes, made once; default: temporary")
    parser.add_argument("--report", action="store_true", help="train nothing, report what --out holds")
    arguments = parser.parse_args(argv)
    if not arguments.report:
        with tempfile.TemporaryDirectory() as folder:
            _run_all(arguments, arguments.data or Path(folder))
    print(summary(json.loads(line) for line in arguments.out.read_text().splitlines()))


def _run_all(arguments: argparse.Namespace, folder: Path) -> None:
    steps, longer = arguments.steps, [name for name in LONGER if name in arguments.arms]
    jobs: list[tuple[str, int, int]] = []
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for part in (seeds[first : first + 4] for first in range(0, len(seeds), 4)):
        jobs += [(name, seed, steps) for seed in part for name in arguments.arms]
        jobs += [(name, seed, arguments.longer) for seed in part for name in longer if arguments.longer]
    if not (folder / "model").exists():
        build(folder / "model", HIDDEN, LAYERS, HEADS)
    for split, count in (("train", arguments.trained), ("test", arguments.asked)):
        if not (folder / f"{split}.npz").exists():
            write_scenes(folder, split, count)
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        _collect([pool.submit(run, folder, "", seed, steps) for seed in seeds], arguments.out)
        _collect([pool.submit(run, folder, *job) for job in jobs], arguments.out)


def _collect(futures: list[Future[dict[str, Any]]], out: Path) -> None:
    for each in as_completed(futures):
        if each.exception() is not None:
            print(f"failed: {each.exception()!r:.500}", flush=True)
            continue
        row = each.result()
        append_row(out, row)
        last, name = row["found"][-1], f"{row['arm']} {row['seed']} {row['steps']}"
        print(f"{name}: loss {last['loss']:.4f}, count {last['count']:.1f}, {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
