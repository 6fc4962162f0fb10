"""Real pretrained weights: what FP8 costs a whole gradient and a fine-tuning, beside BF16.

    python -m benchmarks pretrained --model FOLDER --gguf FILE --text tinyshakespeare.txt

Before any training, against the same model in FP32, on the first held-out rows:

    cosine        of the whole gradient
    SQNR dB       of a parameter's gradient, their median
    + loss        the loss minus FP32's

After fine-tuning the same rows in the same order (`bf16` and `torchao`: BF16 autocast with FP32 weights and PyTorch's
AdamW; ours: BF16 weights with `overcoat.AdamW`), means over the seeds, which shuffle the rows:

    held out      loss of the last tenth of the text, in BF16
    + bf16        minus that of `bf16`

A GGUF file needs the package `gguf`; without --gguf the folder is one of transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overcoat
from benchmarks.contestants import ENGINES, OVERCOAT, PAPER
from benchmarks.rows import Column, Row, append_row, decimals, heading, line
from benchmarks.session import is_installed
from overcoat.extras import load_pretrained
from overcoat.train.tokenizer import LEAST_WHOLE, share_of_whole_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = {
    "bf16": "bf16 eager",
    "default": OVERCOAT,
    "block": "overcoat block scaling",
    "paper": PAPER,
    "torchao": "torchao tensorwise, compile",  # not compiled here
}
COLUMNS = (
    Column("cosine", "cosine", decimals(4)),
    Column("SQNR dB", "sqnr", decimals(1)),
    Column("+ loss", "loss_gap", decimals(4)),
    Column("held out", "held_out", decimals(4)),
    Column("+ bf16", "held_out_gap", decimals(4)),
)


def load(parsed: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model in FP32, and the text's rows, each begun as the tokenizer begins a text."""
    options = {"gguf_file": parsed.gguf} if parsed.gguf else {}
    tokenizer = load_pretrained("AutoTokenizer", "the tokenizer", parsed.model, False, **options)
    if share_of_whole_words(tokenizer) < LEAST_WHOLE:  # EOS, which `load_tokenizer` checks too, is not used
        raise ValueError("transformers misreads this tokenizer: pip install 'transformers>=5.23'")
    begin = tokenizer("").input_ids
    text = tokenizer(parsed.text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    length = parsed.length - len(begin)
    rows = torch.tensor(text)[: len(text) // length * length].split(length)
    if len(rows) < 10:
        raise ValueError(
            f"--text is {len(rows)} rows of {parsed.length} tokens: give a longer one, or a smaller --length"
        )
    ids = torch.stack([torch.cat([torch.tensor(begin, dtype=torch.int64), row]) for row in rows])
    model = load_pretrained("AutoModelForCausalLM", "--model", parsed.model, False, dtype=torch.float32, **options)
    if parsed.used_tokens:
        ids = keep_used_tokens(model, ids)
    return model.train(), ids.to(DEVICE)


def keep_used_tokens(model: Any, ids: Tensor) -> Tensor:
    """Leave the vocabulary the tokens of `ids`, which are numbered anew: the softmax is over these alone."""
    used, ids = ids.unique(return_inverse=True)
    parts = model.get_input_embeddings, model.get_output_embeddings
    weights = [part().weight.detach()[used] for part in parts]
    model.resize_token_embeddings(len(used))
    for part, weight in zip(parts, weights, strict=True):
        part().weight.data.copy_(weight)
    model.get_input_embeddings().padding_idx = None  # the number of another token now
    return ids


def loss_of(model: Any, ids: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model: Any, ids: Tensor, name: str | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a copy of `model`, in FP32 or under the recipe `name`."""
    model = copy.deepcopy(model).to(DEVICE, torch.bfloat16 if name else torch.float32)
    if name:
        ENGINES[RECIPES[name]].change(model)
    loss = loss_of(model, ids, False)
    loss.backward()
    return loss.item(), {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}


def compare(found: dict[str, Tensor], truth: dict[str, Tensor]) -> Row:
    """Cosine of the whole gradient, median SQNR of the parameters'."""
    errors = {key: (found[key] - of).square().sum(dtype=torch.float64) for key, of in truth.items()}
    squares = {key: of.square().sum(dtype=torch.float64) for key, of in truth.items()}
    dot = sum(float((found[key] * of).sum(dtype=torch.float64)) for key, of in truth.items())
    length = float(sum(of.square().sum(dtype=torch.float64) for of in found.values())) ** 0.5
    sqnr = [10 * float((squares[key] / errors[key]).log10()) for key in truth]
    return {"cosine": dot / length / float(sum(squares.values())) ** 0.5, "sqnr": statistics.median(sqnr)}


def fine_tune(
    model: Any, ids: Tensor, held_out: Tensor, name: str, seed: int, parsed: argparse.Namespace
) -> tuple[float, float]:
    """The held-out loss of a copy of `model` after its steps under the recipe `name`, and the mean loss of the last
    20 steps."""
    engine = ENGINES[RECIPES[name]]
    is_ours = engine.recipe is not None
    model = copy.deepcopy(model).to(DEVICE, torch.bfloat16 if is_ours else torch.float32)
    engine.change(model)
    make = overcoat.AdamW if is_ours else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=parsed.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-parsed.steps * parsed.batch // len(ids))
    order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(epochs)])
    trained = []
    for step in range(parsed.steps):
        optimizer.param_groups[0]["lr"] = parsed.lr * min((step + 1) / 20, 1 - step / parsed.steps)
        batch = ids[order[step * parsed.batch :][: parsed.batch].to(DEVICE)]
        loss = loss_of(model, batch, not is_ours)
        loss.backward()
        trained.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, part, not is_ours).item() * len(part) for part in held_out.split(parsed.batch)]
    return sum(losses) / len(held_out), torch.stack(trained[-20:]).mean().item()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--gguf", metavar="FILE", help="in that folder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--used-tokens", action="store_true", help="a vocabulary of the text's tokens alone")
    parser.add_argument("--steps", type=int, default=200, help="0: the gradients alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, and of the gradient")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--held-out", type=int, metavar="ROWS", help="instead of a tenth of them")
    parser.add_argument("--lr", type=float, default=1e-4, help="the highest: 20 steps of warmup, then linearly to 0")


def run(parsed: argparse.Namespace) -> int:
    model, ids = load(parsed)
    ids, held_out = ids[: -(len(ids) // 10)], ids[-(len(ids) // 10) :][: parsed.held_out]
    exact, truth = gradients(model, held_out[: parsed.batch])
    names = ("gguf", "used_tokens", "steps", "seeds", "batch", "length", "lr", "held_out")
    told = {"model": Path(parsed.model).name, "text": parsed.text.name, **{key: getattr(parsed, key) for key in names}}
    print(heading(f"{parsed.gguf or parsed.model}, FP32's loss {exact:.4f}", COLUMNS), flush=True)
    base = None
    for name in parsed.recipes:
        row: Row = {"benchmark": "pretrained", "name": name, **told, "fp32_loss": exact}
        if missing := [package for package in ENGINES[RECIPES[name]].needs if not is_installed(package)]:
            row["absent"] = f"not installed: {', '.join(missing)}"
        else:
            loss, found = gradients(model, held_out[: parsed.batch], name)
            row |= {"loss_gap": loss - exact, **compare(found, truth)}
        if parsed.steps and "absent" not in row:
            ends = [fine_tune(model, ids, held_out, name, seed, parsed) for seed in range(parsed.seeds)]
            losses, trained = map(list, zip(*ends, strict=True))
            row |= {"losses": losses, "held_out": statistics.fmean(losses), "train_losses": trained}
            base = row["held_out"] if name == "bf16" else base
            row["held_out_gap"] = None if base is None else row["held_out"] - base
        append_row(parsed.json, row)
        print(line(row, COLUMNS), flush=True)
    return 0
