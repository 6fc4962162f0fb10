"""Tables 3 and 4 and the loss curves: the same training under several recipes, side by side.

    python -m benchmarks paper table3 --size full --arms bf16 --seeds 0 --dir runs/olmo --json olmo.jsonl    an arm
    python -m benchmarks paper table3 --size full --config configs/olmo-124m.toml

A run that was cut off goes on, one that has ended is read: the same command shows all that --dir holds.

Real text: the Python source of what is installed on the machine, each document once. Mathematics: made-up word problems
(problems.py) in place of MetaMathQA, and of GSM8K those that no model was trained on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper.arms import ARMS, BASELINE, TINY, completions, number_of, share, train
from benchmarks.paper.problems import Problem, problems, write
from benchmarks.paper.result import Options, Result
from benchmarks.rows import Row
from overcoat.eval.command import find_target, load_target
from overcoat.models.shapes import MODELS
from overcoat.train.configfile import load_config
from overcoat.train.evaluate import Tasks, task_names
from overcoat.train.process import choose_device

# The paper's training of OLMo-1B, on this machine's text and with a shorter warm-up.
OLMO_1B: dict[str, Any] = {
    "model": {"config": {"model_type": "olmo", **MODELS["olmo-1b"].fields}},
    "tokenizer": {"vocab_size": 50304},
    "data": {"files": ["site-packages", "stdlib"], "dedupe": True, "sequence_length": 2048},
    "optimizer": {"lr": 4e-4, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
    "schedule": {"warmup_steps": 100},
    "train": {"steps": 1000, "batch_size": 32},
    "eval": {"every": 100},
}
# Fine-tuning: arms and what they set. Adapters take a larger step than the weights themselves.
_LORA = ["lora.rank=16", "lora.merge=true", "optimizer.lr=2e-3"]
TUNED = {BASELINE: ARMS[BASELINE], "default": [], "lora": _LORA, "lora-bf16": [*ARMS[BASELINE], *_LORA]}
# Problems to train on, to ask, and the rest of the configuration.
_TUNING: dict[str, Any] = {"optimizer": {"lr": 2e-4, "betas": [0.9, 0.99]}, "eval": {"every": 100}}
FULL_MATH = 50_000, 2000, {
    **_TUNING,
    "data": {"format": "prompt-completion", "sequence_length": 512},
    "schedule": {"warmup_steps": 20},
    "train": {"steps": 400, "batch_size": 32},
}  # fmt: skip
SMALL_MATH = 200, 20, {
    **_TUNING,
    "data": {"format": "prompt-completion", "sequence_length": 128, "held_out": 0.1},
    "schedule": {"warmup_steps": 1},
    "train": {"steps": 6, "batch_size": 2},
}  # fmt: skip
PAPER_LOSS = {BASELINE: 2.551, "default": 2.568, "paper": 2.568}


@contextlib.contextmanager
def folder_of(options: Options) -> Iterator[Path]:
    """Return the folder of the runs: --dir, else a temporary one."""
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        yield options.dir
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def pretrained(options: Options, folder: Path, files: list[str]) -> list[Row]:
    """A row for each arm and seed of pretraining, with `files` beside the corpus."""
    if options.size == "small":
        model = {"config": {**TINY["model"]["config"], "model_type": "olmo"}}
        values = {**TINY, "model": model, "eval": {"every": 10}}
    elif options.config is not None:
        values = asdict(load_config(options.config))
    else:
        values = OLMO_1B
    values = {**values, "data": {**values["data"], "files": [*values["data"].get("files", []), *files]}}
    return [
        {**row, "run_dir": run_dir, "perplexity": math.exp(row["held_out_loss"]), "paper": PAPER_LOSS.get(row["arm"])}
        for run_dir, row in trained(options, values, folder, "")
    ]


def trained(
    options: Options, values: dict[str, Any], folder: Path, name: str, arms: Mapping[str, list[str]] = ARMS,
    usual: Sequence[str] = (BASELINE, "default", "paper"), settings: Sequence[str] = (),
) -> Iterator[tuple[Path, Row]]:  # fmt: skip
    """The directory and the row of a run of each seed and arm, of --arms or the usual ones; directories in `folder`,
    that of their tokens, too, begin with `name`."""
    for arm in options.arms or ():
        if arm not in arms:
            raise ValueError(f"--arms {arm}: choose of {', '.join(arms)}")
    for seed, arm in itertools.product(options.seeds, options.arms or usual):
        own = [f"train.seed={seed}", f"data.cache_dir={folder / f'{name}data'}", *settings, *options.set]
        run_dir = folder / f"{name}{arm}-{seed}"
        yield (
            run_dir,
            {**train(values, [*arms[arm], *own], run_dir), "name": f"{arm}, seed {seed}", "arm": arm, "seed": seed},
        )


def with_gaps(rows: list[Row]) -> tuple[list[Row], tuple[str, ...]]:
    """The rows with their gaps to the baseline of the same seed, and how far its seeds lie apart."""
    base = {row["seed"]: row["held_out_loss"] for row in rows if row["arm"] == BASELINE}
    for row in rows:
        row["gap"] = row["held_out_loss"] - base[row["seed"]] if row["seed"] in base else None
    if len(base) < 2:
        return rows, (f"One seed of {BASELINE}: a gap has nothing to be compared with; give --seeds 0 1.",)
    return rows, (f"Standard deviation of {BASELINE} over {len(base)} seeds: {statistics.stdev(base.values()):.4f}",)


def curves_of(rows: list[Row]) -> dict[str, dict[float, float]]:
    return {
        f"{row['name']}, {kind}": {float(step): loss for step, loss in row[key].items()}
        for row in rows
        for kind, key in (("training", "train_losses"), ("held out", "held_out_losses"))
    }


def table3(options: Options) -> Result:
    """Held-out loss, perplexity and, with --tasks, lm-evaluation-harness' tasks of every arm."""
    columns: tuple[str, ...] = ("paper", "held_out_loss", "gap", "perplexity", "tokens_per_second", "peak GB")
    tasks = Tasks(names) if (names := task_names(options.tasks)) else None
    with folder_of(options) as folder:
        rows, notes = with_gaps(pretrained(options, folder, []))
        for row in rows:
            row["peak GB"] = row["peak_bytes"] / 1e9
            if tasks is not None:
                model, tokenizer = load_target(find_target(str(row["run_dir"])), choose_device("auto"))
                for task, figures in tasks.evaluate(model, tokenizer, 8, None):
                    row |= {f"{task} {key}": value for key, value in figures.items()}
                    columns += tuple(f"{task} {key}" for key in figures if f"{task} {key}" not in columns)
            del row["run_dir"]
    same = (
        "the same tokens, of one seed in the same order"
        if len({row["data"] for row in rows}) == 1
        else "DIFFERENT TOKENS"
    )
    notes = (*notes, f"All arms: {same} ({rows[0]['data'][:12]}). Paper: OLMo-1B after 300 B tokens, COAT +0.017.")
    return Result("Table 3: pretraining", columns, rows, notes, curves_of(rows))


def right_answers(run_dir: Path, asked: list[Problem]) -> list[bool]:
    """Return flags of the problems that a run's model answers right."""
    model, tokenizer = load_target(find_target(str(run_dir)), choose_device("auto"))
    found = completions(model, tokenizer, [problem.prompt for problem in asked], 96, 1024)
    return [number_of(text) == problem.answer for text, problem in zip(found, asked, strict=True)]


def table4(options: Options) -> Result:
    """Pretrain in BF16 on text and easy problems, or start from --model; fine-tune; ask what is held out."""
    many, count, rest = SMALL_MATH if options.size == "small" else FULL_MATH
    new = count // 5
    asked = [*problems("numbers", count - new), *problems("templates", new)]
    rows: list[Row] = []
    with folder_of(options) as folder:
        model = options.model
        if model is None:
            easy = write(folder / "easy.jsonl", problems("easy", many), as_text=True)
            one = Options(**{**vars(options), "arms": [BASELINE], "seeds": [0]})
            model = str(pretrained(one, folder, [str(easy)])[0]["run_dir"] / "export")
        data = str(write(folder / "train.jsonl", problems("train", many)))
        values = {**rest, "model": {"name": model}, "data": {**rest["data"], "files": [data]}}
        for run_dir, row in trained(options, values, folder, "math-", TUNED, [*TUNED]):
            right = right_answers(run_dir, asked)
            parts = {"right %": right, "new numbers %": right[:-new], "new templates %": right[-new:]}
            for name, part in parts.items():
                row[name], row[f"+- {name}"] = share(part)
            rows.append(row)
    rows, notes = with_gaps(rows)
    columns = ("held_out_loss", "gap", "right %", "+- right %", "new numbers %", "new templates %", "tokens_per_second")
    notes = (
        *notes,
        f"{count} problems that no model was trained on, a fifth of them of templates neither; greedy answers.",
    )
    return Result("Table 4: fine-tuning on mathematics", columns, rows, notes, curves_of(rows))
