"""`overcoat eval`: measure perplexity and tasks of one or several models, side by side.

    overcoat eval runs/demo runs/demo/twin --text wiki.test.raw
    overcoat eval runs/llama-2-7b meta-llama/Llama-2-7b-hf --tasks paper --recipe bf16 --recipe default
    overcoat eval runs/demo/checkpoints/step-00000200 --text Salesforce/wikitext:wikitext-2-raw-v1:test --joined --json

A TARGET is a run directory (its export/, else its newest checkpoint), a checkpoint, an exported folder, or a Hugging
Face name; folders that Overcoat wrote are first compared with their manifest. Of LoRA adapters the model that they name
is loaded, too. Tasks are those of lm-evaluation-harness, by name or YAML file; "paper" stands for copa, arc_easy, sciq,
hellaswag and gsm8k.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import overcoat
from overcoat.extras import check_exists, load_extra, load_pretrained
from overcoat.train import checkpoint
from overcoat.train.adapters import base_of_adapters, load_adapters, new_adapters, num_trained_rows
from overcoat.train.build import load_model
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import ADAPTERS, DataConfig, error_context, require
from overcoat.train.configfile import load_config
from overcoat.train.evaluate import Tasks, perplexity, task_names
from overcoat.train.files import MANIFEST, RECORD, verify_directory
from overcoat.train.products import compute_in_fp32
from overcoat.train.quantized import is_known
from overcoat.train.rows import has_rows, text_of
from overcoat.train.sources import find_files, read_documents, rows
from overcoat.train.tokenizer import load_tokenizer
from overcoat.train.vocabulary import resize

RECIPES = ("bf16", "default", "paper", "leanest")
SETTINGS = {"dtype": "auto"}
WINDOW = 2048  # tokens, if the model takes as many
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="run, checkpoint, exported folder or hub name")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE|NAME[:CONFIG[:SPLIT]]",
        help="text, JSONL, parquet, or a name for datasets (split: test); again for more",
    )
    parser.add_argument("--text-key", default="text", help="field that holds the text (default text)")
    parser.add_argument("--joined", action="store_true", help="a text's documents as one, blank lines between them")
    parser.add_argument("--window", type=int, help=f"tokens at once (default: the model's most, up to {WINDOW})")
    parser.add_argument(
        "--stride", type=int, help="tokens from window to window; less than --window slides (default: side by side)"
    )
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help='names, YAML files, or "paper"')
    parser.add_argument("--limit", type=int, help="examples of a task, and documents of a text, at most")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="forward in BF16 (default) or FP8; again")
    parser.add_argument("--batch", type=int, default=8, help="rows at once (default 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that a model brings")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    """Evaluate every target with every recipe, after checking all inputs before any model is loaded."""
    load_extra("rich", "hf", "overcoat eval")
    require(bool(parsed.text or parsed.tasks), "nothing to evaluate: give --text or --tasks")
    for name in ("window", "stride", "limit", "batch"):
        value = getattr(parsed, name)
        require(value is None or value >= 1, f"--{name} {value}: must be at least 1")
    device = torch.device(parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    require(device.type == "cpu" or torch.cuda.is_available(), "--device cuda: PyTorch sees no CUDA GPU here")
    if device.type == "cpu":
        compute_in_fp32()
    targets = [find_target(name) for name in parsed.targets]
    with contextlib.redirect_stdout(sys.stderr):  # for notices of libraries (DeepSpeed)
        texts = {
            text: documents_of("--text", text, parsed.text_key, parsed.limit, parsed.joined) for text in parsed.text
        }
        tasks = Tasks(names) if (names := task_names(parsed.tasks)) else None
        recipes = list(dict.fromkeys(parsed.recipe or ["bf16"]))
        results = [_evaluate(target, recipe, device, texts, tasks, parsed) for target in targets for recipe in recipes]
    if parsed.json:
        print(json.dumps({"results": results}))
    else:
        _print_table(results)
    return 0


def documents_of(
    option: str, text: str, key: str = "text", limit: int | None = None, joined: bool = False
) -> list[str]:
    """Return the documents of a file or data set that an option names, at most `limit`; joined: as one."""
    with error_context(f"{option} {text}: "):
        found = itertools.islice(_read(text, key), limit)
        documents = [document for document in found if document.strip()]
    require(bool(documents), f"{option} {text}: there is no text")
    return ["\n\n".join(documents)] if joined else documents


def _read(text: str, key: str) -> Iterator[str]:
    if ":" not in text and (any(character in text for character in "*?[") or Path(text).suffix or Path(text).exists()):
        for path in find_files([text]):
            found = read_documents(path, key)
            yield from found if has_rows(path) else ["".join(found)]  # a long text comes in pieces
        return
    name, config, split = (text.split(":") + ["", ""])[:3]
    require(bool(name), "no NAME before the colon")
    dataset = DataConfig(dataset=name, dataset_config=config, split=split or "test")
    yield from (text_of(row, key, where) for where, row in rows(dataset))


def _evaluate(
    target: Target, recipe: str, device: torch.device, texts: dict[str, list[str]], tasks: Tasks | None,
    parsed: argparse.Namespace,
) -> Result:  # fmt: skip
    model, tokenizer = load_target(target, device, parsed.trust_remote_code)
    report = None
    if recipe != "bf16":
        report = overcoat.convert(model, overcoat.Recipe.from_name(recipe), strict=True, eval_fp8=True)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    window = parsed.window or min(most or WINDOW, WINDOW)
    stride = parsed.stride or window
    require(most is None or window <= most, f"--window {window}: {target.name} takes {most} tokens at most")
    require(stride <= window, f"--stride {stride}: must not be above --window {window}, or tokens would be left out")
    result: Result = {"target": target.name, "folder": target.place, "recipe": recipe, "text": {}, "tasks": {}}
    try:
        for text, documents in texts.items():
            found = perplexity(model, tokenizer, documents, window, stride, parsed.batch)
            about = {"window": window, "stride": stride, "ran": _ran(model, report)}
            result["text"][text] = {**found, **about}
        for task, figures in tasks.evaluate(model, tokenizer, parsed.batch, parsed.limit) if tasks else ():
            result["tasks"][task] = {**figures, "ran": _ran(model, report)}
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{target.name}: out of memory with --batch {parsed.batch}: fewer rows at once") from error
    finally:
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return result


def _ran(model: Any, report: overcoat.Report | None) -> str:
    """Return the precision in which the layers ran in the last forward."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if report is None:
        return dtype
    running = report.running()
    ran = Counter(running[name] for name in report.converted)
    others = "; ".join(reason for reason in ran if reason != "FP8")
    return f"FP8 in {ran['FP8']} of {len(report.layers)} layers" if ran["FP8"] else f"{dtype}, {others}"


def _print_table(results: list[Result]) -> None:
    """Print a table with a column for each target and recipe, a row for each figure."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(f"{result['target']}\n{result['recipe']}", justify="right", overflow="fold")
    for part in ("text", "tasks"):
        for name in dict.fromkeys(name for result in results for name in result[part]):
            table.add_section()
            table.add_row(f"[bold]{name if part == 'tasks' else Path(name).name}[/bold]")
            columns = [result[part].get(name, {}) for result in results]
            for key in dict.fromkeys(key for column in columns for key in column if "_stderr" not in key):
                table.add_row(
                    f"  {'forward in' if key == 'ran' else key.replace('_', ' ')}",
                    *(_written(column, key) for column in columns),
                )
    with console.capture() as written:  # rich handles a closed pipe differently
        console.print(table)
    print(written.get(), end="")


def _written(figures: dict[str, Any], key: str) -> str:
    value = figures.get(key, "")
    if isinstance(value, str):
        return value
    name, _, kind = key.partition(",")
    error = figures.get(f"{name}_stderr" + (f",{kind}" if kind else ""))
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


# ---- targets ---------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """name: as given. place: the folder with the weights, or a name on the Hugging Face hub. special_tokens: how the
    run treated special tokens that a text spells out."""

    name: str
    place: str
    special_tokens: str = "tokens"

    @property
    def holds_adapters(self) -> bool:
        """True for adapters without their model."""
        return (Path(self.place) / ADAPTERS).is_file()


def find_target(name: str) -> Target:
    """Return the folder of the weights. ValueError: it is a folder without a model, or damaged."""
    if not name.strip():
        raise ValueError("a TARGET is empty: give a run, a checkpoint, a folder or a Hugging Face name")
    folder = Path(name)
    if not folder.exists():
        check_exists(name)
        return Target(name, name)
    if (folder / "config.toml").exists():
        made = [folder / "export"] if (folder / "export").is_dir() else list_checkpoints(folder / "checkpoints")[-1:]
        if not made:
            raise ValueError(f"{name} is a run without a checkpoint: train it first")
        folder = made[0]
    if (folder / ADAPTERS).exists():
        base_of_adapters(str(folder), "TARGET")
    elif not (folder / "config.json").exists():
        raise ValueError(f"{name} is no run, checkpoint or model folder: it has no config.toml and no config.json")
    if (folder / MANIFEST).exists():
        verify_directory(folder)
    return Target(name, str(folder), _special_tokens(folder))


def _special_tokens(folder: Path) -> str:
    """Return `data.special_tokens` of the run that a folder belongs to; the default of another."""
    run = folder.absolute().parents[0 if folder.name == "export" else 1]
    with contextlib.suppress(ValueError):  # none, or another program's
        return load_config(run / "config.toml", is_recorded=True).data.special_tokens
    return DataConfig.special_tokens


def load_target(target: Target, device: torch.device, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model, in the dtype it was saved in, and its tokenizer."""
    load_extra("transformers", "hf", "overcoat eval").utils.logging.disable_progress_bar()
    is_beside = target.holds_adapters and not (Path(target.place) / "tokenizer_config.json").exists()
    place = base_of_adapters(target.place, "TARGET") if is_beside else target.place
    tokenizer = load_tokenizer(place, trust_remote_code, target.special_tokens)
    if target.holds_adapters:
        return _adapted(target, device, tokenizer, trust_remote_code), tokenizer
    return load_target_model(target, device, trust_remote_code), tokenizer


def _adapted(target: Target, device: torch.device, tokenizer: Any, trust_remote_code: bool) -> Any:
    """Return the model of a folder or a checkpoint of adapters, with these inside its layers; quantized weights are
    dequantized, as for training."""
    base, what = base_of_adapters(target.place, "TARGET"), f"{target.name}: its base_model_name_or_path ="
    kind = load_pretrained("AutoConfig", what, base, trust_remote_code)
    model = load_model(base, device, SETTINGS, trust_remote_code, what, dequantize=is_known(kind, base))
    resize(model, tokenizer, num_trained_rows(target.place), 0)
    if not (Path(target.place) / RECORD).exists():
        return load_adapters(model, target.place, what="TARGET").eval()
    model = new_adapters(model, target.place).to(device)
    checkpoint.read_model(Path(target.place), model)
    return model.eval()


def load_target_model(target: Target, device: torch.device, trust_remote_code: bool = False) -> Any:
    """The model, in the dtype it was saved in, in eval mode."""
    load_extra("transformers", "hf", "overcoat eval").utils.logging.disable_progress_bar()
    if (Path(target.place) / RECORD).exists():
        return checkpoint.load_model(Path(target.place), device, trust_remote_code).eval()
    return load_model(target.place, device, SETTINGS, trust_remote_code, "the model").eval()
