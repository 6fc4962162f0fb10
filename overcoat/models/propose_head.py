"""Propose where a causal model's layers and head lie, and what its logits are multiplied by (head.py).

For a model whose class is not known its own forward runs with stand-ins: a layers' owner that returns made-up hidden
states, a head whose result is known, a loss function that writes down what it gets. The loss without logits is believed
only if the model makes nothing else of its head's result than a multiple that its configuration names, hands that to
its loss function, and returns what this returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.models import verify
from overcoat.models.clone import Cloner, UnverifiableError, with_parts
from overcoat.models.family import Family, ModelSpec, decoder_layers, original_class
from overcoat.models.masks import nothing_hidden
from overcoat.models.propose import MULTIPLIERS, MissError, Proposal
from overcoat.models.verify import LIMIT_DB, decibels


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
    """Places of a causal model's parts, and its family, for what logits are multiplied by; or the reason why these are
    not known."""

    spec: Optional[ModelSpec] = None
    family: Optional[Family] = None
    reason: str = ""


SMALL = 32  # a head's outputs


class _Standin(nn.Module):
    """In the place of a model's part: notes what it is given, and returns `result` of it."""

    def __init__(self, result: Callable[..., Any]) -> None:
        super().__init__()
        self.result = result
        self.given: list[Any] = []
        self.weight = nn.Parameter(torch.zeros(SMALL, 1), requires_grad=False)  # models ask for its dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the part's own takes."""
        self.given = [*args, *kwargs.values()]
        return self.result(*args, **kwargs)


class _Outputs(dict[str, Any]):
    """Result of a layers' owner; any other name that a model may look for is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, name: Any) -> Any:
        return self["last_hidden_state"] if name == 0 else super().__getitem__(name)


def propose_end(causal: nn.Module) -> End:
    """Return where a causal model's layers and head are if it ends as all do: its loss function's of a multiple of what
    its head makes. Its own forward runs with a layers' owner, a head and a loss function made up."""
    try:
        with verify.undisturbed():
            return _propose_end(causal)
    except MissError as error:
        return End(reason=str(error))
    except Exception as error:  # a trial must not stop the conversion
        return End(reason=f"its end could not be tried ({error!r:.80})")


def _propose_end(causal: Any) -> End:
    original = original_class(causal)
    names = {name.rpartition(".")[0] for name in decoder_layers(causal)}
    if len(names) != 1:
        raise MissError("its decoder layers are in several lists")
    text, _, stack = names.pop().rpartition(".")
    embeddings = causal.get_output_embeddings()
    head = next((name for name, part in causal.named_modules() if part is embeddings), None)
    if embeddings is None or head is None or not isinstance(embeddings, nn.Linear):
        raise MissError("its last linear layer is not known")
    ids, width = torch.arange(12).view(2, 6), embeddings.in_features
    hidden = torch.randn((2, 6, width), generator=torch.Generator().manual_seed(3))
    weight = torch.randn((SMALL, width), generator=torch.Generator().manual_seed(4)) * width**-0.5
    mask = nothing_hidden(torch.device("cpu"))
    result, given, owner = _run_end(causal, text, head, hidden, lambda x: x @ weight.t(), ids, mask)
    if not given or not torch.equal(given["labels"], ids):
        raise MissError("its loss function is not given logits and labels")
    if not torch.equal(result, given["loss"]):
        raise MissError("its loss is not what its loss function returns")
    logits, made = given["logits"].float(), given["made"]
    factor = float((logits * made).sum() / made.square().sum())
    if decibels(logits, factor * made) < LIMIT_DB:
        raise MissError("its logits are no multiple of what its head makes")
    scale = _named_scale(causal, factor)
    # The loss instead of logits goes the same way.
    loss = torch.tensor(3.0)
    result, *_ = _run_end(causal, text, head, hidden, lambda x: loss, ids, mask)
    if abs(float(result) - 3.0 * scale(causal)) > 1e-5:
        raise MissError("its forward does more with logits than its loss function gets")
    reads_mask = not any(value is mask for value in owner.given) or not _hands_on(causal, text, stack, mask)
    spec = ModelSpec(original.__module__, original.__name__, text, head, stack=stack, reads_mask=reads_mask)
    blank = Family(original.__module__, "", original.__name__, None, Proposal(()), {}, rotary=False)
    return End(spec, blank._replace(logit_scale=scale, proposed=True))


def _run_end(
    causal: Any, text: str, head: str, hidden: Tensor, multiply: Callable[[Tensor], Tensor], ids: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor], _Standin]:
    """Return the loss of a model's own forward, what its loss function was given and made of it, and the stand-in for
    its layers' owner."""
    made: list[Tensor] = []
    given: dict[str, Tensor] = {}

    def result_of_head(x: Tensor) -> Tensor:
        made.append(multiply(x))
        return made[-1]

    def loss_function(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        given.update(logits=logits, labels=labels, made=made[-1], loss=logits.float().mean())
        return given["loss"]

    owner = _Standin(lambda *_, **__: _Outputs(last_hidden_state=hidden))
    clone = with_parts(Cloner(torch.device("cpu"), {}), causal, {text: owner, head: _Standin(result_of_head)})
    vars(clone)["_loss_function"] = loss_function
    result = original_class(causal).forward(clone, input_ids=ids, labels=ids, attention_mask=mask)
    return result.loss, given, owner


def _named_scale(causal: Any, factor: float) -> Multiplier:
    if abs(factor - 1) < 1e-6:
        return Multiplier()
    for place in (causal, causal.config.get_text_config()):
        for name, value in vars(place).items():
            if MULTIPLIERS.search(name) and isinstance(value, (int, float)) and value:
                for inverse in (False, True):
                    if abs(factor * value ** (1 if inverse else -1) - 1) < 1e-5:
                        return Multiplier(name, inverse)
    raise MissError(f"its logits are multiplied by {factor:.4g}, which nothing in its configuration says")


def _hands_on(causal: Any, text: str, stack: str, mask: Tensor) -> bool:
    """True if the layers' owner gives layers of each kind the mask that it is given, and else what they get without."""
    owner = causal.get_submodule(text)
    cls = original_class(owner)
    blank = Family(cls.__module__, "", "", None, Proposal(()), {}, rotary=False)
    scenes = [verify.Scene(1, given, torch.ones(1, verify.LENGTH).bool()) for given in ({}, {"attention_mask": mask})]
    layers = list(getattr(owner, stack))
    kinds = getattr(owner.config, "layer_types", None) or [None] * len(layers)
    places = {
        (original_class(layer), kind): place for place, (layer, kind) in enumerate(zip(layers, kinds, strict=False))
    }
    for place in places.values():
        try:
            plain, masked = (
                verify.caught_call(owner, blank, stack, place, scene, torch.device("cpu"), {}) for scene in scenes
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
