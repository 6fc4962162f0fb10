"""Where what was trained stops writing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig, LlamaConfig

from overcoat.train.chat import TRAINED
from overcoat.train.stopping import ending_with, stop_at, turn_end_of, turn_ends
from tests.train.test_encoding import BOS, EOS, TURN, tokenizer_of


def ends_of(*conversations: list[tuple[list[int], bool]]) -> list[int]:
    """Of parts with whether they are trained on."""
    flat = [[token | TRAINED * is_trained for ids, is_trained in parts for token in ids] for parts in conversations]
    ends = np.cumsum([len(each) for each in flat])
    ranges = np.stack([ends - [len(each) for each in flat], ends], axis=1)
    return turn_ends(
        np.asarray([token for each in flat for token in each], dtype=np.uint32), ranges, tokenizer_of("none")
    )


def ids(text: str) -> list[int]:
    return list(tokenizer_of("none")(text).input_ids)


def test_the_last_trained_token_ends_a_turn() -> None:
    ask = (ids("ask"), False)
    assert ends_of([ask, (ids("yes<|im_end|>\n"), True), (ids("<s>"), False)]) == [TURN]
    assert ends_of([ask, (ids("yes<|im_end|>\n</s>"), True)]) == [EOS, TURN]  # as Phi-3's
    assert ends_of([ask, (ids("yes"), True), (ids("<|im_end|>"), False)]) == []  # the template leaves it out
    # Of an empty answer what comes before it is no end.
    assert ends_of([ask, (ids("<s>yes<|im_end|>"), True)], [ask, (ids("<s><|im_end|>"), True)]) == [TURN]
    call, say = [ask, (ids("f()<s>"), True)], [ask, (ids("yes<|im_end|>"), True)]
    assert ends_of(call, say, say) == [TURN, BOS]


@pytest.mark.parametrize(("own", "expected"), [(EOS, [EOS, TURN]), (None, [7, TURN]), ([9, TURN], [9, TURN])])
def test_generation_stops_at_the_models_own_end_and_the_turns(own: Any, expected: list[int]) -> None:
    model = SimpleNamespace(config=LlamaConfig(eos_token_id=7), generation_config=GenerationConfig(eos_token_id=own))
    stop_at(model, [TURN])
    assert model.generation_config.eos_token_id == expected
    model.generation_config = None
    stop_at(model, [TURN, 7])
    assert model.generation_config.eos_token_id == [7, TURN]


def test_a_model_that_stops_there_already_is_left_alone() -> None:
    model = SimpleNamespace(config=LlamaConfig(eos_token_id=7), generation_config=GenerationConfig(eos_token_id=TURN))
    stop_at(model, [TURN])
    assert model.generation_config.eos_token_id == TURN


def test_the_exported_tokenizer_ends_where_a_turn_does() -> None:
    tokenizer = tokenizer_of("none")
    tokenizer.chat_template = "{{ messages }}<|im_end|>"
    changed = ending_with(tokenizer, [TURN, EOS])
    assert (changed.eos_token_id, tokenizer.eos_token_id) == (TURN, EOS)
    assert ending_with(tokenizer, [EOS, TURN]) is tokenizer
    tokenizer.chat_template = "{{ messages }}<|im_end|>{{ eos_token }}"  # which would write another token
    assert ending_with(tokenizer, [TURN]) is tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[1].content }}<|im_end|>\n</s>", TURN),
        ("{{ messages[1].content }} end{{ eos_token }}", EOS),
        ("{{ messages[1].content }} end", None),
        ("<|im_end|>", None),  # it leaves the answer out
        (None, None),
    ],
)
def test_the_chat_template_says_what_ends_a_turn(template: str | None, expected: int | None) -> None:
    tokenizer = tokenizer_of("begin")
    tokenizer.chat_template = template
    assert turn_end_of(tokenizer) == expected
