"""Whether a trained model's own answers are right: exact match, with its standard error."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUMBER = re.compile(r"answer is (-?\d+)")


def completions(
    model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int, rows: int, pixels: Tensor | None = None
) -> list[str]:
    """What the model writes after each prompt, greedily, at most `tokens` tokens; `rows` prompts at once.

    pixels: (prompts, C, height, width), the image of each.
    """
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))  # little padding
    found: dict[int, str] = {}
    stop = tokenizer.eos_token_id
    for first in range(0, len(order), rows):
        places = order[first : first + rows]
        ids = [tokenizer(prompts[place]).input_ids for place in places]
        width = max(map(len, ids))
        padded = torch.tensor([[stop] * (width - len(row)) + row for row in ids], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
        with torch.no_grad():
            seen = {} if pixels is None else {"pixel_values": pixels[places]}
            made = model.generate(
                padded,
                attention_mask=mask,
                **seen,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=stop,
                eos_token_id=stop,
            )
        texts = tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        found |= dict(zip(places, texts, strict=True))
    return [found[place] for place in range(len(prompts))]


def number_of(text: str) -> int | None:
    """The number that a solution ends in; None: it names none."""
    found = NUMBER.findall(text)
    return int(found[0]) if found else None  # what comes after the first is another problem, which the model made up


def share(right: Sequence[bool]) -> tuple[float, float]:
    """The share of True in per cent, and its standard error."""
    mean = sum(right) / len(right)
    return 100 * mean, 100 * math.sqrt(mean * (1 - mean) / len(right))
