"""Stop tokens of a trained model.

For text it is EOS. For conversations it is the last trained token of each, white space aside, as the chat template
rendered it. A base model's EOS differs from the token that ends a turn, so `generation_config.eos_token_id` gets both,
and an exported tokenizer's EOS is the token that ends a turn.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np

from overcoat.train.chat import TRAINED

LOOKED_AT = 1000  # conversations, spread over all


def turn_ends(tokens: np.ndarray, ranges: np.ndarray, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end training targets, most frequent first; [] if they end in plain text.

    tokens: uint32 with TRAINED flags; ranges: (N, 2), the begin and end of each conversation.
    """
    added = {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}
    special = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    last, tails = Counter[int](), list[set[int]]()
    for begin, end in ranges[:: max(1, len(ranges) // LOOKED_AT)]:
        held = tokens[begin:end]
        trained = (held[(held & TRAINED) != 0] & (TRAINED - 1)).tolist()
        tail = list[int]()
        for token in reversed(trained):
            if token in special or (token in added and not tail):
                tail.append(token)
            elif tokenizer.decode([token]).strip():
                break
        if tail:
            last[tail[0]] += 1
        tails.append(set(tail))
    always = set.intersection(*tails) if tails else set()  # Phi-3's <|end|> before its end-of-text
    return [token for token, _ in last.most_common()] + sorted(always - last.keys())


def turn_end_of(tokenizer: Any) -> int | None:
    """Return the id of the special token with which a tokenizer's chat template ends the assistant's turn, or None."""
    mark = "ANSWER"
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    if not tokenizer.chat_template:
        return None
    _, found, tail = tokenizer.apply_chat_template(conversation, tokenize=False).rpartition(mark)
    special = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    ids = tokenizer(tail, add_special_tokens=False).input_ids if found else []
    return next((token for token in ids if token in special), None)


def stop_at(model: Any, stops: list[int]) -> None:
    """Add `stops` to the token ids at which the model's `generate` stops."""
    found = model.generation_config
    if found is None:
        from transformers import GenerationConfig

        found = model.generation_config = GenerationConfig.from_model_config(model.config)
    # Texts of vision-language models (Qwen3-VL's) have none.
    own = found.eos_token_id
    own = getattr(model.config.get_text_config(), "eos_token_id", None) if own is None else own
    own = [own] if isinstance(own, int) else list(own or [])
    if new := [token for token in stops if token not in own]:
        all_stops = own + new
        found.eos_token_id = all_stops if len(all_stops) > 1 else all_stops[0]


def ending_with(tokenizer: Any, stops: list[int]) -> Any:
    """Return the tokenizer or processor to export, with the first of `stops` as its EOS; unchanged if its chat template
    writes EOS, which would then be another token."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not stops or stops[0] == inner.eos_token_id or "eos_token" in str(tokenizer.chat_template):
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    inner = getattr(changed, "tokenizer", changed)
    inner.eos_token = inner.convert_ids_to_tokens(stops[0])
    return changed
