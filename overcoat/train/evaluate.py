"""Evaluate a model in memory: perplexity on text, and the tasks of lm-evaluation-harness.

Every token of a text is predicted, the first one from the begin-of-text token (or end-of-text if there is none), as in
training:

    token perplexity = exp(nll / tokens)        bits per byte = nll / (ln 2 * bytes of UTF-8)

nll in nats, over all texts. Only bits per byte compare between tokenizers.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from overcoat.extras import load_extra, reason
from overcoat.train.build import summed_loss
from overcoat.train.data import IGNORED, Batch
from overcoat.train.encoding import begin, edges

# The paper's tasks without further training, and its mathematics (gsm8k).
SETS = {"paper": ("copa", "arc_easy", "sciq", "hellaswag", "gsm8k")}
GENERATES = "generate_until"
SEED = 1234  # of few-shot examples: the harness' own
BOOTSTRAPS = 100  # for errors that have no formula


def windows(ids: list[int], length: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs and labels, each at most `length`, that predict every id but the first exactly once.

    With stride = length windows do not overlap. With a smaller stride each window begins `stride` later, its already
    predicted tokens are context only, and every predicted token has at least length - stride tokens before it.
    """
    end = 0
    while end < len(ids) - 1:
        begin = max(0, end + stride - length) if end else 0
        stop = min(begin + length, len(ids) - 1)
        yield ids[begin:stop], [IGNORED] * (end - begin) + ids[end + 1 : stop + 1]
        end = stop


@torch.no_grad()
def perplexity(
    model: Any, tokenizer: Any, texts: Iterable[str], length: int, stride: int, rows: int
) -> dict[str, float]:
    """Return perplexity, bits per byte, and the counts of tokens and bytes of `texts`, in windows of `length` tokens,
    `rows` at once. The model must be in eval mode. ValueError: there is no text."""
    device, num_bytes = next(model.parameters()).device, 0
    pieces: list[tuple[list[int], list[int]]] = []
    before = edges(tokenizer)[0]
    for text in texts:
        num_bytes += len(text.encode())
        ids = begin(tokenizer, text)
        found = list(windows(ids if before else [tokenizer.eos_token_id, *ids], length, stride))
        for _, first in found[:1]:  # of several tokens before the text, all but the first would be predicted
            first[: len(before[1:])] = [IGNORED] * len(before[1 : 1 + len(first)])
        pieces += found
    if not pieces:
        raise ValueError("there is no text to evaluate on")
    pieces.sort(key=lambda piece: len(piece[0]))  # little padding; the longest pieces run out of memory last
    nll, num_tokens = 0.0, 0
    for start in range(0, len(pieces), rows):
        group = pieces[start : start + rows]
        width = max(len(inputs) for inputs, _ in group)
        # What follows a causal model's tokens does not move them.
        inputs = torch.tensor([inputs + [0] * (width - len(inputs)) for inputs, _ in group], device=device)
        labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in group], device=device)
        nll += float(summed_loss(model, Batch(inputs, labels, None)))
        num_tokens += sum(label != IGNORED for _, trained in group for label in trained)
    return {
        "perplexity": math.exp(min(700.0, nll / num_tokens)),
        "bits_per_byte": nll / math.log(2) / num_bytes,
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


# ---- tasks ----------------------------------------------------------------------------------------------------------


def task_names(asked: Iterable[str]) -> list[str]:
    """Return task names and YAML files without duplicates, with the SETS expanded."""
    return list(dict.fromkeys(name for word in asked for name in SETS.get(word, (word,))))


class Tasks:
    """Tasks of lm-evaluation-harness with their data, by name or YAML file. ValueError: lm-eval, a task, or its data
    are missing."""

    def __init__(self, names: list[str]) -> None:
        load_extra("lm_eval", "eval", f"evaluating {', '.join(names)}")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        is_own = all(name.endswith((".yaml", ".yml")) for name in names)
        # The harness has thousands, which take seconds to list.
        manager = load_extra("lm_eval.tasks", "eval", "tasks").TaskManager(include_defaults=not is_own)
        self.loaded: dict[str, Any] = {}  # by name: what `TaskManager.load` returns
        for name in names:
            try:
                self.loaded[name] = manager.load(name)
            except Exception as error:  # of any kind: YAML, a data set, the network
                unknown = isinstance(error, KeyError) and "not a registered" in str(error)
                why = "no task of lm-eval, and no YAML file of one" if unknown else f"cannot be loaded: {reason(error)}"
                raise ValueError(f"task {name!r}: {why}") from error
            for task in self.loaded[name]["tasks"].values():
                task.set_fewshot_seed(seed=SEED)

    @property
    def generating(self) -> list[str]:
        """Return the names of the tasks that generate text."""
        return [
            name
            for name, found in self.loaded.items()
            if any(task.OUTPUT_TYPE == GENERATES for task in found["tasks"].values())
        ]

    def evaluate(
        self, model: Any, tokenizer: Any, rows: int, limit: int | None
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield each task (and sub-task) with its figures once it has run: "sciq", {"acc": 0.5, "acc_stderr": 0.01}.

        rows: examples at once; limit: examples of each task (None: all). The model goes to eval mode, and the global
        generators are reseeded. Several processes compute the same, in step.
        """
        harness = load_extra("lm_eval.models.huggingface", "eval", "tasks")
        # It gives the tokenizer a padding token.
        wrapped = harness.HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=rows)
        for kind in ("loglikelihood", "loglikelihood_rolling", GENERATES):
            setattr(wrapped, kind, functools.partial(getattr(wrapped, kind), disable_tqdm=True))
        evaluator = load_extra("lm_eval.evaluator", "eval", "tasks")
        options = {"limit": limit, "bootstrap_iters": BOOTSTRAPS, "log_samples": False}
        for found in self.loaded.values():
            results = evaluator.evaluate(lm=wrapped, task_dict=found, **options)["results"]
            yield from ((task, _plain(figures)) for task, figures in results.items())


def _plain(figures: dict[str, Any]) -> dict[str, float]:
    """Return the numeric figures under short names: "acc,none" becomes "acc", "exact_match,strict-match" stays."""
    return {
        key.replace(",none", ""): float(value)
        for key, value in figures.items()
        if "," in key and isinstance(value, (int, float)) and not math.isnan(value)
    }
