"""Verify by numbers that a causal model's own loss is the cross-entropy of its head's result (head.py computes that
without logits): the mean and the sum by `num_items_in_batch`; loss and gradient of the hidden states."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.models.calls import LENGTH, ROWS
from overcoat.models.clone import Cloner, stand_in, with_parts
from overcoat.models.family import ModelSpec, original_class
from overcoat.models.verify import Verified, decibels, undisturbed

VOCAB = 61


class _Outputs:
    """The result of a model's text in place of the real one: hidden states, and None by any other name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


def verify_loss(model: Any, spec: ModelSpec, scale: float, cap: float) -> Verified:
    """Return how closely a causal model's own loss agrees with the cross-entropy of scale * lm_head(hidden), capped and
    shifted as `spec` has it: the mean over tokens with labels, and the sum by `num_items_in_batch`; loss and gradient
    of what lm_head gets."""
    try:
        with undisturbed():
            return _verify_loss(model, spec, scale, cap)
    except Exception as error:
        return Verified(reason=f"{error!r:.100}")


def with_vocabulary(config: Any, size: int) -> dict[int, Any]:
    """Return the configuration's copy of another vocabulary, by its id, for a `Cloner`."""
    made = copy.copy(config)
    text = config.get_text_config()
    for name in [name for name, value in vars(config).items() if value is text]:
        setattr(made, name, copy.copy(text))
    made.get_text_config().vocab_size = made.vocab_size = size
    return {id(config): made}


def _verify_loss(model: Any, spec: ModelSpec, scale: float, cap: float) -> Verified:
    generator = torch.Generator().manual_seed(3)
    own_head, configs = model.get_submodule(spec.head), with_vocabulary(model.config, VOCAB)
    width = own_head.in_features
    leaf = torch.randn((ROWS, LENGTH, width), generator=generator).requires_grad_()
    # Logits of a standard deviation of 6, of any width.
    weight = torch.randn((VOCAB, width), generator=generator) * (32 / width) ** 0.5
    bias = None if own_head.bias is None else torch.randn(VOCAB, generator=generator)
    head, taken = nn.Linear(1, VOCAB, bias=False), []
    head.weight = nn.Parameter(weight, requires_grad=False)
    head.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def result_of_head(x: Tensor) -> Tensor:
        taken.append(x)
        return nn.Linear.forward(head, x)  # it may be patched

    vars(head)["forward"] = result_of_head
    top, *path = spec.text.split(".")
    stub = stand_in(model.get_submodule(top), configs, lambda *_, **__: _Outputs(leaf))
    stub._modules.update(dict.fromkeys(path, stub))  # the model may call what is inside
    cloner = Cloner(torch.device("cpu"), configs)
    cloner.made[id(own_head)] = head
    clone = with_parts(cloner, model, {top: stub, spec.head: head})
    vars(clone)["vocab_size"] = VOCAB
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(ids < 9, -100)
    targets = (labels[:, 1:] if spec.shifts else labels).flatten()
    worst, compared = math.inf, ""
    for title, given in {"mean": {}, "sum": {"num_items_in_batch": 17}}.items():
        own = original_class(model).forward(clone, input_ids=ids, labels=labels, return_dict=True, **given).loss
        x = taken[-1]
        logits = scale * (x @ weight.t() + (0.0 if bias is None else bias))
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logits = (logits[:, :-1] if spec.shifts else logits).reshape(-1, VOCAB)
        nll = (logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0])[targets >= 0]
        expected = nll.sum() / 17 if given and spec.shifts else nll.mean()
        gradients = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in (expected, own)]
        for what, (ours, theirs) in {"loss": (expected, own), "gradient": gradients}.items():
            if not (found := decibels(theirs, ours)) >= worst:
                worst, compared = found, f"{what}, {title}"
    return Verified(worst, None, compared)
