"""The numbers of runs beside answers that do not come from the project's code.

    recorded    numbers in recorded.json: bit for bit on the PyTorch and CPU that made them, close
                to them elsewhere (recorded.py)
    exact       a run in FP32 with the plain recipe, its options drawn anew, beside `reference.train` in FP64
    fp8         the same with FP8 layers and 8-bit moments, as close as FP8's rounding lets it be
    family      a converted model of some family beside transformers' own in FP64
    optimizers  AdamW beside torch's in FP64

The limits: FP32 rounds to 6e-8; of a loss of 6 and a gradient's norm that leaves an error below 1e-5 after a few
steps; where a gradient is nearly zero AdamW turns its rounding into a step, so that the way of all weights is held to
1e-3 of its length. FP8's operands have an error of 2.7% (31.5 dB, tests/exact.py); a few of them add up to less than
0.2 of any gradient, and to less than a sixteenth in its direction.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import overcoat
from overcoat.recipe import Recipe
from tests.attack import recorded, reference
from tests.attack.harness import BASE, Child, Finding, Ground, start, toml
from tests.attack.reference import Options
from tests.models import zoo

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "größer",
    "return",
    "import",
    "x = 1",
    "(",
    ")",
    "print",
    "🧥",
    "\n",
    "  ",
    "<|endoftext|",
]
LIMITS = {"exact": {"loss": 1e-5, "norm": 1e-4, "way": 1e-3}, "fp8": {"loss": 0.03, "norm": 0.1, "way": 0.4}}


def draw(random: random.Random) -> Options:
    """Options of a run; every way of clipping, decaying and scheduling has its share."""
    layers, heads = random.choice([1, 2]), random.choice([2, 4])
    return Options(
        layers=layers, heads=heads, kv_heads=random.choice([1, 2]), steps=random.choice([5, 8]),
        batch=random.choice([1, 2, 3]), accumulation=random.choice([1, 2]), seed=random.randrange(1000),
        mask=random.random() < 0.5, lr=random.choice([1e-3, 4e-3]), betas=random.choice([(0.9, 0.95), (0.8, 0.99)]),
        eps=random.choice([1e-8, 1e-4]), decay=random.choice([0.0, 0.1, 2.0]), clip=random.choice([0.0, 0.01, 0.5, 1e3]),  # noqa: E501
        kind=random.choice(["cosine", "linear", "wsd", "constant"]), warmup=random.choice([0, 2, 4]),
        final=random.choice([0.0, 0.1]),
    )  # fmt: skip


def texts(random: random.Random) -> list[str]:
    return [f"file {number} " + "".join(f"{word} " for word in random.choices(WORDS, k=30)) for number in range(14)]


def keys_of(options: Options, kind: str) -> dict[str, str]:
    """The options as keys of a configuration."""
    precise = {"recipe.name": '"bf16"', "model.dtype": '"float32"', "optimizer.moments": '"fp32"'}
    return {
        **{key: value for key, value in BASE.items() if not key.startswith(("model.", "data.cache", "data.files"))},
        **(precise if kind == "exact" else {}),
        "tokenizer.vocab_size": "280", "data.sequence_length": str(options.length),
        "data.held_out": str(options.held_out), "data.document_mask": json.dumps(options.mask),
        "optimizer.lr": str(options.lr), "optimizer.betas": json.dumps(options.betas),
        "optimizer.eps": str(options.eps), "optimizer.weight_decay": str(options.decay),
        "optimizer.clip": str(options.clip), "schedule.kind": f'"{options.kind}"',
        "schedule.warmup_steps": str(options.warmup), "schedule.final_ratio": str(options.final),
        "train.steps": str(options.steps), "train.batch_size": str(options.batch), "train.seed": str(options.seed),
        "train.accumulation": str(options.accumulation), "eval.rows": str(options.eval_rows),
    }  # fmt: skip


def compared(random: random.Random, folder: Path, kind: str) -> Finding:
    """A run with options drawn anew beside the same in FP64."""
    options, tied = draw(random), random.random() < 0.5
    weights, written = reference.begin(options, tied, random.randrange(1000)), texts(random)
    case = f"{kind}, tied: {tied}, {options}"
    (folder / "text").mkdir()
    reference.write_model(folder / "model", weights, options)
    for number, text in enumerate(written):
        (folder / f"text/{number}.txt").write_bytes(text.encode())
    places = {"model.name": f'"{folder / "model"}"', "data.files": f'["{folder}/text/*.txt"]'}
    (folder / "run.toml").write_text(toml({**keys_of(options, kind), **places}))
    ended = start(["train", str(folder / "run.toml"), f"train.run_dir={folder / 'run'}"], folder).wait()
    if ended.status:
        return case, ended.fault() or ended.last_line()
    return case, judged(folder / "run", weights, written, options, LIMITS[kind])


def judged(run_dir: Path, weights: reference.Weights, written: list[str], options: Options, limits: Any) -> str:
    """Describe how far a run is from the reference, "" if within the limits."""
    cache = next((run_dir / "data/tokens").glob("[!.]*"))
    tokenizer = Tokenizer.from_file(str(cache / "tokenizer/tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    stored = reference.documents(np.fromfile(cache / "tokens.bin", dtype=np.uint16).astype(np.int64), eos)
    if fault := reference.lost_text(tokenizer, eos, stored, written):
        return fault
    known = {tokenizer.decode(ids[:-1]): ids for ids in stored}
    in_order = sorted(written, key=lambda text: stored.index(known[text]))
    training, held_out = reference.split(stored, in_order, options)
    right = reference.train(weights, training, held_out, eos, options)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    if [row["step"] for row in steps] != list(range(1, options.steps + 1)):
        return f"steps {[row['step'] for row in steps]}"
    for key, name, limit in (
        ("lr", "lr", 1e-12),
        ("loss", "loss", limits["loss"]),
        ("norm", "gradient_norm", limits["norm"]),
    ):
        found = np.array([row[name] for row in steps])
        far = np.abs(found / np.array(right[key]) - 1)
        if not far.max() <= limit:
            return f"{name} is {far.max():.2g} from FP64's: {found.tolist()}, right: {right[key]}"
    held = [row["loss"] for row in rows if row["kind"] == "eval"][-1]
    if not abs(held / right["held_out"] - 1) <= limits["loss"]:
        return f"the held-out loss is {held}, right: {right['held_out']}"
    made, ways = load_file(run_dir / "export/model.safetensors"), []
    if made.keys() != weights.keys():
        return f"exported are {sorted(made.keys() ^ weights.keys())}"
    for name, old in weights.items():
        ways.append(((made[name].double() - old).flatten(), (right["weights"][name] - old).flatten()))
    own, other = (torch.cat([way[side] for way in ways]) for side in (0, 1))
    distance = float((own - other).norm() / other.norm())
    return "" if distance <= limits["way"] else f"the way of all weights is {distance:.2g} from FP64's"


def family(random: random.Random, folder: Path) -> Finding:
    """One step of a converted model beside transformers' own in FP64 (of experts, which have no FP64, in FP32)."""
    kind, batch = random.choice(list(zoo.KINDS)), random.choice(["causal", "packed", "right-padded"])
    seed = random.randrange(1000)

    def work() -> int:
        model, inputs = (
            zoo.make_model(kind, layers=1, seed=seed, use_cache=False),
            zoo.make_batch(batch, length=21, seed=seed),
        )
        wide = copy.deepcopy(model)
        has_experts = any("experts" in name for name, _ in model.named_parameters())
        right = zoo.trained(wide.float() if has_experts else wide.double(), inputs)
        overcoat.convert(model, Recipe())
        print(close(zoo.trained(model, inputs), right), end="")
        return 0

    ended = Child(work, folder).wait()
    return f"a {kind} layer, {batch}, seed {seed}", ended.fault() or ended.output


def close(found: reference.Weights, right: reference.Weights) -> str:
    """Describe where a loss and gradients are not within FP8's noise, "" if nowhere."""
    loss = abs(float(found.pop("loss")) / float(right.pop("loss")) - 1)
    if not loss < 3e-3 or found.keys() != right.keys():
        return f"the loss is {loss:.2g} from the right one, gradients: {sorted(found.keys() ^ right.keys())}"
    for name, truth in right.items():
        own, other = found[name].double().flatten(), truth.double().flatten()
        distance, slope = float((own - other).norm() / other.norm()), float(own @ other / (other @ other))
        if not (distance < 0.3 and abs(slope - 1) < 0.12):
            return f"the gradient of {name} is {distance:.2g} from the right one, its projection {slope:.3f}"
    return ""


def optimizers(random: random.Random, folder: Path) -> Finding:
    """Steps of AdamW with options, gradients that are lacking and steps that are not finite, beside torch's in FP64."""

    def work() -> int:
        faults = [fault for _ in range(12) if (fault := optimizer(random))]
        print((faults or [""])[0], end="")
        return 0

    ended = Child(work, folder).wait()
    return "AdamW", ended.fault() or ended.output


def optimizer(random: random.Random) -> str:
    generator = torch.Generator().manual_seed(random.randrange(1000))
    options = {
        "lr": random.choice([1e-3, 1e-2]), "betas": random.choice([(0.9, 0.95), (0.5, 0.999)]),
        "eps": random.choice([1e-8, 1e-2]), "weight_decay": random.choice([0.0, 1.0]),
    }  # fmt: skip
    clip, bad, late = random.choice([None, 0.05, 1e4]), random.choice([None, 1, 3]), random.choice([0, 1, 2])
    begun = [torch.randn(shape, generator=generator) for shape in ((24, 40), (70,), (3, 150))]
    own, other = ([torch.nn.Parameter(p.to(kind, copy=True)) for p in begun] for kind in (torch.float32, torch.float64))
    mine = overcoat.AdamW(own, moments="fp32", **options)
    theirs = torch.optim.AdamW(other, **options)
    for step in range(5):
        grads = [torch.randn(p.shape, generator=generator) * 3 for p in begun]
        if step == bad:
            grads[1][0] = math.inf
        if step < late:
            grads[2] = None
        length = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
        share = min(1.0, clip / length) if clip else 1.0
        for p, q, grad in zip(own, other, grads):
            p.grad, q.grad = grad, None if grad is None else grad.double() * share
        mine.step(clip_grad_norm=clip)
        if step != bad:
            theirs.step()
    ways = [torch.cat([(p.detach().double() - b).flatten() for p, b in zip(each, begun)]) for each in (own, other)]
    distance = float((ways[0] - ways[1]).norm() / ways[1].norm())
    case = f"{options}, clip {clip}, not finite: {bad}, a gradient from step {late} on"
    return "" if distance < 1e-3 else f"{distance:.2g} from FP64's: {case}"


OTHERS: tuple[Callable[[random.Random, Path], Finding], ...] = (
    optimizers, functools.partial(compared, kind="exact"), family, functools.partial(compared, kind="fp8"),
)  # fmt: skip


def truth(_ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    """Recorded runs first, then the others in turn."""
    if index < len(recorded.RUNS):
        return recorded.compare(list(recorded.RUNS)[index], folder)
    return OTHERS[(index - len(recorded.RUNS)) % len(OTHERS)](random, folder)
