"""New tokens (`tokenizer.add_tokens`): special tokens of the tokenizer, and rows of the embedding and the head.

The tables grow to a multiple of 128 rows, which GEMMs like, unless they have room already. transformers draws the new
rows from the mean and the covariance of the old ones. Beside adapters, peft trains the rows of the new tokens alone and
saves them with the adapters; the head is then peft's, and computes logits.
"""

from __future__ import annotations

from typing import Any

import torch

from overcoat.extras import load_extra

MULTIPLE = 128


def add_tokens(tokenizer: Any, names: list[str]) -> None:
    """Add special tokens to a tokenizer; those that it has keep their ids."""
    if names:
        added = load_extra("tokenizers", "hf", "tokenizer.add_tokens").AddedToken
        tokenizer.add_tokens([added(name, special=True, normalized=False) for name in names], special_tokens=True)


def num_ids(tokenizer: Any) -> int:
    """Return the largest token id plus 1 (a vocabulary with gaps has fewer tokens)."""
    return 1 + max(tokenizer.get_vocab().values())


def embedding_of(model: Any) -> Any:
    """Return the embedding of the tokens, also if peft trains rows of it."""
    found = model.get_input_embeddings()
    return found.token_adapter.base_layer if hasattr(found, "token_adapter") else found


def padded(rows: int) -> int:
    """Return the rows of a table that grows to hold `rows`."""
    return -(-rows // MULTIPLE) * MULTIPLE


def resize(model: Any, tokenizer: Any, added: int, seed: int) -> None:
    """Give the embedding and the head of a transformers model a row for each token of the tokenizer, unless more than
    `added` are missing: it is another model's then."""
    rows = model.get_input_embeddings().num_embeddings
    if rows < num_ids(tokenizer) <= rows + added:
        torch.manual_seed(seed)
        model.resize_token_embeddings(padded(num_ids(tokenizer)))


def rows_of(model: Any, tokenizer: Any, names: list[str]) -> dict[str, list[int]]:
    """Return the rows of these tokens in the embedding and in a head of its own, by the modules' names, for peft."""
    tables, ids = [model.get_input_embeddings()], sorted(tokenizer.convert_tokens_to_ids(names))
    head = model.get_output_embeddings()
    tables += [head] if head is not None and head.weight is not tables[0].weight else []
    return {
        name.rpartition(".")[2]: ids for name, module in model.named_modules() if any(module is each for each in tables)
    }
