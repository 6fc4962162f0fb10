"""Propose where a causal model's layers and head lie, and what it makes of its logits (head.py).

For a model whose class is not known its own forward runs with stand-ins: a layers' owner that returns made-up hidden
states, a head whose result is known, a loss function that writes down what it gets. The loss without logits is believed
only if the model makes nothing else of its head's result than a multiple or a soft cap that its configuration names,
and hands that to its loss function, whose result it returns; or computes a loss by itself, which is then compared.

A model with several lists of layers (images, audio) runs with text alone: its text is the list that this runs through,
or the part that holds all of these.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.models import calls, verify
from overcoat.models.clone import Cloner, UnverifiableError, stand_in, with_parts
from overcoat.models.family import Family, ModelSpec, decoder_layers, logit_cap, original_class
from overcoat.models.masks import nothing_hidden
from overcoat.models.propose import MULTIPLIERS, MissError, Proposal
from overcoat.models.verify import LIMIT_DB, decibels
from overcoat.models.verify_loss import VOCAB, with_vocabulary

CAPPED = re.compile("cap")  # names of soft caps


@dataclass(frozen=True)
class Multiplier:
    """`Family.logit_scale` of a proposed family: a number of the model or of its configuration, or one by it."""

    name: str = ""
    inverse: bool = False

    def __call__(self, model: Any) -> float:
        if not self.name:
            return 1.0
        place = model if hasattr(model, self.name) else model.config.get_text_config()
        value = float(getattr(place, self.name))
        return 1 / value if self.inverse else value


class End(NamedTuple):
    """A causal model's end: where its parts are (spec) and what its logits are multiplied by (family); or the reason
    why these are not known."""

    spec: Optional[ModelSpec] = None
    family: Optional[Family] = None
    reason: str = ""


class _Outputs(dict[str, Any]):
    """Result of a layers' owner; any other name that a model may look for is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, name: Any) -> Any:
        return self["last_hidden_state"] if name == 0 else super().__getitem__(name)


def propose_end(causal: nn.Module) -> End:
    """Return where a causal model's layers and head are if it ends as all do: its loss function's of a multiple of what
    its head makes, or of that with a soft cap. Its own forward runs with a layers' owner, a head and a loss function
    made up."""
    try:
        with verify.undisturbed():
            return _propose_end(causal)
    except MissError as error:
        return End(reason=str(error))
    except Exception as error:  # a trial must not stop the conversion
        return End(reason=f"its end could not be tried ({error!r:.80})")


def _propose_end(causal: Any) -> End:
    original = original_class(causal)
    stacks = list(dict.fromkeys(name.rpartition(".")[0] for name in decoder_layers(causal)))
    embeddings = causal.get_output_embeddings()
    head = next((name for name, part in causal.named_modules() if part is embeddings), None)
    if embeddings is None or head is None or not isinstance(embeddings, nn.Linear):
        raise MissError("its last linear layer is not known")
    trial = _Trial(causal, head)
    text, stack = trial.text_of(stacks)
    labeled = trial.run(text)
    shifts = bool(labeled.given)
    plain = labeled if shifts else trial.run(text, with_labels=False)
    if shifts and not torch.equal(labeled.given["labels"], trial.ids):
        raise MissError("its loss function is not given logits and labels")
    if shifts and not torch.equal(labeled.result.loss, labeled.given["loss"]):
        raise MissError("its loss is not what its loss function returns")
    if not shifts and not _equal(labeled.owner.given, plain.owner.given):
        raise MissError("it computes its loss by itself, and makes more of labels")
    logits = plain.given["logits"] if shifts else plain.result.logits
    scale, cap = _named_end(causal, logits.float(), plain.made.float())
    mask = trial.mask
    is_handed = any(value is mask for value in labeled.owner.given)
    reads_mask = not (trial.is_plain and is_handed and _hands_on(causal, text, stack, mask))
    spec = ModelSpec(
        original.__module__, original.__name__, text, head, stack=stack, reads_mask=reads_mask, shifts=shifts, cap=cap
    )
    # The loss instead of logits goes the same way.
    single = trial.run(text, with_labels=shifts, loss=torch.tensor(3.0))
    last = single.result.loss if shifts else single.result.logits
    expected, limit = 3.0 * scale(causal), logit_cap(causal, spec)
    expected = limit * math.tanh(expected / limit) if limit else expected
    if last.numel() != 1 or abs(float(last) - expected) > 1e-5:
        raise MissError("its forward does more with logits than its loss function gets")
    blank = Family(original.__module__, "", original.__name__, None, Proposal(()), {}, rotary=False)
    return End(spec, blank._replace(logit_scale=scale, proposed=True))


class _Ran(NamedTuple):
    """A trial's result, what the head made, what the loss function was given and returned, and the stand-in for the
    layers' owner."""

    result: Any
    made: Tensor
    given: dict[str, Tensor]
    owner: Any


class _Trial:
    """Runs of a model's own forward with stand-ins; `is_plain`: with the mask of a row whose tokens see all before."""

    def __init__(self, causal: Any, head: str) -> None:
        self.causal, self.head = causal, head
        self.ids, self.is_plain = torch.arange(12).view(2, 6), True
        self.mask = nothing_hidden(torch.device("cpu"))
        width = causal.get_submodule(head).in_features
        self.hidden = torch.randn((2, 6, width), generator=torch.Generator().manual_seed(3))
        self.weight = torch.randn((VOCAB, width), generator=torch.Generator().manual_seed(4)) * width**-0.5

    def text_of(self, stacks: list[str]) -> tuple[str, str]:
        """Return the owner of the layers that text runs through, and what it calls them, "" if these are several."""
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in stacks))
        if len(owners) > 1:  # of whose images and audio a trial without them shows nothing
            self.is_plain, self.mask = False, torch.ones_like(self.ids).index_fill(1, torch.tensor([0]), 0)
            outer = [name for name in owners if not any(name.startswith(f"{other}.") for other in owners)]
            parts = {name: self._owner(name) for name in outer}
            self._forward(parts, self.ids, lambda x: x @ self.weight.t())
            owners = [name for name, part in parts.items() if part.given]
        steps = zip(*(name.split(".") for name in owners), strict=False)
        text = ".".join(step[0] for step in itertools.takewhile(_is_one, steps))
        if not text:
            raise MissError("its decoder layers are in several lists, of which none is known as its text")
        names = [name.rpartition(".")[2] for name in stacks if name.rpartition(".")[0] == text]
        return text, names[0] if len(names) == 1 else ""

    def run(self, text: str, with_labels: bool = True, loss: Optional[Tensor] = None) -> _Ran:
        """Run it; `loss`: what the head returns in place of logits."""
        owner = self._owner(text)
        labels = self.ids if with_labels else None
        result, made, given = self._forward(
            {text: owner}, labels, lambda x: x @ self.weight.t() if loss is None else loss
        )
        if not made or not owner.given:
            raise MissError(f"its {'head' if owner.given else 'layers'} did not run")
        return _Ran(result, made[-1], given, owner)

    def _forward(
        self, parts: dict[str, Any], labels: Optional[Tensor], multiply: Callable[[Tensor], Tensor]
    ) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
        made: list[Tensor] = []
        given: dict[str, Tensor] = {}

        def result_of_head(x: Tensor) -> Tensor:
            made.append(multiply(x))
            return made[-1]

        def loss_function(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
            given.update(logits=logits, labels=labels, loss=logits.float().mean())
            return given["loss"]

        causal, cpu = self.causal, torch.device("cpu")
        configs = with_vocabulary(causal.config, VOCAB)
        head = stand_in(causal.get_submodule(self.head), configs, result_of_head)
        vars(head)["_parameters"] = {"weight": nn.Parameter(torch.zeros(VOCAB, 1), requires_grad=False)}
        vars(head)["out_features"] = VOCAB
        # What may lie between hidden states and the head has random weights, all else takes no memory.
        between, tops = Cloner(cpu, configs), {name.partition(".")[0] for name in parts}
        between.made[id(causal.get_submodule(self.head))] = head
        for name, part in causal.named_children():
            if name not in tops:
                between.layer(part)
        cloner = Cloner(cpu, configs, zeros=True)
        cloner.made.update(between.made)
        clone = with_parts(cloner, causal, {**parts, self.head: head})
        vars(clone).update(_loss_function=loss_function, vocab_size=VOCAB)
        inputs = {"input_ids": self.ids, "attention_mask": self.mask}
        return original_class(causal).forward(clone, **inputs, labels=labels, return_dict=True), made, given

    def _owner(self, name: str) -> Any:
        configs = with_vocabulary(self.causal.config, VOCAB)
        result = _Outputs(last_hidden_state=self.hidden)
        return stand_in(self.causal.get_submodule(name), configs, lambda *_, **__: result)


def _is_one(values: tuple[str, ...]) -> bool:
    return len(set(values)) == 1


def _named_end(causal: Any, logits: Tensor, made: Tensor) -> tuple[Multiplier, str]:
    """Return what logits are multiples of what the head made by, and the name of their soft cap."""
    text = causal.config.get_text_config()
    caps = {name: x for name, x in vars(text).items() if CAPPED.search(name) and _is_factor(x)}
    for name, cap in ("", 0.0), *caps.items():
        inside = logits if not cap else cap * torch.atanh((logits.double() / cap).clamp(-1, 1))
        factor = float((inside * made).sum() / made.square().sum())
        again = factor * made if not cap else cap * torch.tanh(factor * made / cap)
        if decibels(logits, again) >= LIMIT_DB:
            default = ModelSpec._field_defaults["cap"]
            return _named_scale(causal, factor), name or ("" if getattr(text, default, None) else default)
    raise MissError("its logits are no multiple of what its head makes")


def _named_scale(causal: Any, factor: float) -> Multiplier:
    if abs(factor - 1) < 1e-6:
        return Multiplier()
    for place in (causal, causal.config.get_text_config()):
        for name, value in vars(place).items():
            if MULTIPLIERS.search(name) and _is_factor(value):
                for inverse in (False, True):
                    if abs(factor * value ** (1 if inverse else -1) - 1) < 1e-5:
                        return Multiplier(name, inverse)
    raise MissError(f"its logits are multiplied by {factor:.4g}, which nothing in its configuration says")


def _is_factor(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0


def _hands_on(causal: Any, text: str, stack: str, mask: Tensor) -> bool:
    """True if the layers' owner gives layers of each kind the mask that it is given, and else what they get without."""
    owner = causal.get_submodule(text)
    cls = original_class(owner)
    blank = Family(cls.__module__, "", "", None, Proposal(()), {}, rotary=False)
    scenes = [calls.Scene(1, given, torch.ones(1, calls.LENGTH).bool()) for given in ({}, {"attention_mask": mask})]
    layers = list(getattr(owner, stack))
    kinds = getattr(owner.config, "layer_types", None) or [None] * len(layers)
    places = {
        (original_class(layer), kind): place for place, (layer, kind) in enumerate(zip(layers, kinds, strict=False))
    }
    for place in places.values():
        try:
            plain, masked = (
                calls.caught_call(owner, blank, stack, place, scene, torch.device("cpu"), {}) for scene in scenes
            )
        except UnverifiableError:
            return False
        given = masked.pop("attention_mask", None)
        if not isinstance(given, Tensor) or given.numel() or not _equal(plain, {**plain, **masked}):
            return False
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor)
