"""Tokenize conversations; labels are the assistant's tokens ("messages") or the completion's ("prompt-completion").

The chat template marks the assistant's tokens ({% generation %}); for known templates without marks TRL has marked
versions. Tokens and labels equal those of TRL's SFTTrainer, with `assistant_only_loss` for messages. Text that the
template leaves out is refused or counted (rendering.py). A token is a uint32: its id, plus the flag TRAINED if it is a
label.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.extras import load_extra
from overcoat.train.config import DataConfig, error_context, require
from overcoat.train.conversations import fill
from overcoat.train.encoding import begin, encode
from overcoat.train.images import read_image
from overcoat.train.rendering import Losses, Shown

TRAINED = 1 << 31


def training_template(tokenizer: Any) -> str | None:
    """Return a chat template that marks the assistant's tokens; None if the tokenizer's own does. ValueError: there is
    no template, or no version of it that marks them."""
    require(
        bool(tokenizer.chat_template),
        "data.format = 'messages': the tokenizer has no chat template: set tokenizer.chat_template to a file, or to a "
        "tokenizer that has one",
    )
    template, trl = None, load_extra("trl.chat_template_utils", "hf", "data.format = 'messages'")
    if not trl.has_generation_markers(tokenizer.chat_template):
        try:
            template = trl.get_training_chat_template(tokenizer)
        except ValueError as error:
            raise ValueError(
                "the tokenizer's chat template does not mark the assistant's tokens ({% generation %}), and TRL has no "
                "version of it that does: mark them in a copy, and set tokenizer.chat_template to its file"
            ) from error
    if not trl.is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        warnings.warn(
            "the chat template leaves the token that ends the assistant's turn out of what is trained on: the model "
            "may not learn to stop. Put it before {% endgeneration %}",
            stacklevel=2,
        )
    return template


class Encoder:
    """Turns conversations into tokens; `losses` counts what the template left out. processor: for data with images."""

    def __init__(self, data: DataConfig, tokenizer: Any, processor: Any = None):
        self.tokenizer, self.processor, self.folder = tokenizer, processor, Path(data.images)
        self.template = training_template(processor or tokenizer) if data.format == "messages" else None
        self.marks = tokenizer.convert_ids_to_tokens(processor.image_token_ids) if processor else []
        self.losses = Losses(data.on_lost)
        self.shown = Shown(functools.partial(self._apply, tokenize=False), self.losses)

    def __call__(self, example: dict[str, Any], where: str) -> tuple[np.ndarray, int]:
        """Return the conversation's tokens, uint32 with TRAINED flags, and how many of them must be kept to keep one
        label and all images. ValueError: the template refuses it or leaves something out, or it has no label."""
        self.losses.fields |= dict.fromkeys(example.get("unread", ()))
        said = {name: example[name] for name in ("messages", "prompt", "completion") if name in example}
        with error_context(f"{where}: "):
            if all(isinstance(messages, list) for messages in said.values()):
                together = [message for messages in said.values() for message in messages]
                form = self.shown.form(together, example, where)
                example = {**example, **{name: form(messages) for name, messages in said.items()}}
            ids, is_trained = self._tokens(example)
        tokens = np.asarray(ids, dtype=np.uint32) | np.asarray(is_trained, dtype=np.uint32) * np.uint32(TRAINED)
        labels = np.flatnonzero(tokens[1:] & TRAINED)
        require(bool(len(labels)), f"{where}: nothing in it to train on, such as an assistant's turn: remove the row")
        needed = int(labels[0]) + 2
        if example.get("images"):  # all that is left of each
            needed = max(needed, 1 + int(np.flatnonzero(np.isin(ids, self.processor.image_token_ids))[-1]))
        return tokens, needed

    def _tokens(self, example: dict[str, Any]) -> tuple[list[int], list[int]]:
        if "images" in example:
            return self._with_images(example)
        if "messages" in example:
            found = self._apply(example["messages"], example, return_assistant_tokens_mask=True)
            return found["input_ids"], found["assistant_masks"]
        prompt, ids = self._prompt_and_all(example)
        shared = load_extra("trl.data_utils", "hf", "data.format").common_prefix_length(prompt, ids)
        return ids, [0] * shared + [1] * (len(ids) - shared)

    def _with_images(self, example: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Return tokens and labels of a conversation with images; each image takes as many tokens as its size needs."""
        messages = copy.deepcopy(example["messages"])
        for part in (part for message in messages for part in message.get("content") or []):
            held = [mark for mark in self.marks if mark in part.get("text", "")]
            require(not held, f"the text holds {', '.join(held)}, which stands for an image: correct the row")
            if part["type"] == "image":
                part["image"] = read_image(self.folder / part["image"])
        options = {"add_special_tokens": False}
        found = self._apply(messages, example, return_assistant_tokens_mask=True, processor_kwargs=options)
        unknown = sorted(found.keys() & {"token_type_ids", "cross_attention_mask"})
        require(not unknown, f"{type(self.processor).__name__} makes {unknown}, which rows do not hold: not supported")
        return found["input_ids"][0], found["assistant_masks"][0]

    def _prompt_and_all(self, example: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, list):
            begun = self._apply(prompt, example, add_generation_prompt=True)
            return begun["input_ids"], self._apply(prompt + completion, example)["input_ids"]
        return begin(self.tokenizer, prompt), encode(self.tokenizer, [prompt + completion])[0]

    def _apply(self, messages: list[dict[str, Any]], example: dict[str, Any], **options: Any) -> Any:
        given = {"tools": example.get("tools"), "chat_template": self.template, **example.get("options", {})}
        with error_context("the chat template cannot render it: ", Exception):  # a template is a program
            return apply_template(self.processor or self.tokenizer, messages, **given, **options)


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Return the rendered messages as tokens; special tokens are read as such, since templates consist of them."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    before, inner.split_special_tokens = inner.split_special_tokens, False
    try:
        return tokenizer.apply_chat_template(messages, **{"tokenize": True, "return_dict": True, **options})
    finally:
        inner.split_special_tokens = before


def prompt_ids(data: DataConfig, tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids with which `prompt` is asked, in the form that the model was trained on."""
    if data.format == "messages":
        parts: Any = [{"type": "text", "text": prompt}]
        asked = [{"role": "user", "content": parts if data.images else prompt}]
        return list(apply_template(tokenizer, asked, add_generation_prompt=True)["input_ids"])
    return begin(tokenizer, fill(data.prompt_template, prompt, None, ""))
