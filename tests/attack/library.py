"""Odd inputs to overcoat.convert, to a converted model's forward, and to overcoat.AdamW (steps.py).

What transformers and torch do with the same input decides: where they succeed, so must this project, with their
numbers, or refuse; where they refuse, so must it. A plain batch then works as before.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import overcoat
from overcoat.recipe import Recipe
from tests.attack import steps
from tests.attack.harness import Child, Finding, Ground
from tests.attack.judge import Job, attempt, judge, refusal
from tests.models import zoo

VOCAB = zoo.VOCAB
LENGTH = 17
ODD: list[Any] = [None, True, False, 0, -1, 3, 128, 128.0, 64.5, "128", "", "int8", "bf16", b"fp8", [], {}, math.nan,
                  math.inf, 10**30, 1e-300, torch.tensor(16), object]  # fmt: skip
# Changes a model and a batch in place, the plain ones and the converted ones alike.
Change = Callable[[Any, dict[str, Any]], Any]


def put(name: str, make: Callable[[Tensor], Any]) -> Change:
    """The batch's `name` becomes what `make` makes of the ids."""
    return lambda _, batch: batch.__setitem__(name, make(batch["input_ids"]))


def give(**values: Any) -> Change:
    return lambda _, batch: batch.update(values)


def ids_and_labels(make: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, batch: batch.update({name: make(batch[name]) for name in ("input_ids", "labels")})


def element(name: str, value: int) -> Change:
    return lambda _, batch: batch[name].__setitem__((0, 5), value)


def embeddings(make: Callable[[Tensor], Tensor]) -> Change:
    def change(model: Any, batch: dict[str, Any]) -> None:
        batch["inputs_embeds"] = make(model.get_input_embeddings()(batch.pop("input_ids")).detach())

    return change


def on_model(change: Callable[[Any], Any]) -> Change:
    return lambda model, _: change(model)


def on_weight(change: Callable[[Tensor], Any]) -> Change:
    return lambda model, _: change(model.model.layers[0].mlp.up_proj.weight.data)


def freeze(part: str) -> Change:
    return lambda model, _: [p.requires_grad_(False) for name, p in model.named_parameters() if part in name]


LABEL_TYPES = (torch.int32, torch.int16, torch.uint8, torch.float32, torch.bfloat16, torch.bool)
FROZEN = ("", "norm", "embed", "proj", "layers.0", "q_proj")
CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    **{f"a label of {value}": element("labels", value) for value in (VOCAB, VOCAB + 500, -1, -99, -101, 2**40)},
    **{f"an id of {value}": element("input_ids", value) for value in (VOCAB, -1, 2**40)},
    **{f"labels as {kind}": put("labels", lambda ids, kind=kind: ids.to(kind)) for kind in LABEL_TYPES},  # type: ignore[misc]
    "ids as torch.int32": put("input_ids", lambda ids: ids.int()),
    "ids as torch.float32": put("input_ids", lambda ids: ids.float()),
    "all labels ignored": put("labels", lambda ids: torch.full_like(ids, -100)),
    "one row of labels": put("labels", lambda ids: ids[:1]),
    "labels too short": put("labels", lambda ids: ids[:, :-2]),
    "labels of one dimension": put("labels", lambda ids: ids.flatten()),
    "labels as a list": put("labels", lambda ids: ids.tolist()),
    "labels on the meta device": put("labels", lambda ids: ids.to("meta")),
    "no labels": lambda _, batch: batch.pop("labels"),
    "no rows": ids_and_labels(lambda ids: ids[:0]),
    "no tokens": ids_and_labels(lambda ids: ids[:, :0]),
    "one token": ids_and_labels(lambda ids: ids[:, :1]),
    "one dimension": ids_and_labels(lambda ids: ids[0]),
    "three dimensions": ids_and_labels(lambda ids: ids[None]),
    "a transposed view": ids_and_labels(lambda ids: ids.t().contiguous().t()),
    "an expanded row": ids_and_labels(lambda ids: ids[:1].expand(3, -1)),
    "longer than max_position_embeddings": ids_and_labels(lambda ids: ids.repeat(1, 16)),
    "embeddings": embeddings(lambda x: x),
    "embeddings in FP32": embeddings(lambda x: x.float()),
    "embeddings, transposed": embeddings(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "embeddings with gradient": embeddings(lambda x: x.requires_grad_()),
    "embeddings of another width": embeddings(lambda x: x[..., :32]),
    "embeddings of zero": embeddings(torch.zeros_like),
    "embeddings of 1e30": embeddings(lambda x: x * 1e32),
    "embeddings with NaN": embeddings(lambda x: x * math.nan),
    "ids and embeddings": put("inputs_embeds", lambda ids: torch.zeros(*ids.shape, 64)),
    "mask of bool": put("attention_mask", lambda ids: ids >= 0),
    "mask of float": put("attention_mask", lambda ids: (ids >= 0).float()),
    "mask of zeros": put("attention_mask", torch.zeros_like),
    "mask with a row of zeros": put("attention_mask", lambda ids: torch.ones_like(ids) * torch.tensor([[0], [1]])),
    "mask with a hole": put("attention_mask", lambda ids: (torch.arange(LENGTH) != 5).expand(2, -1).long()),
    "mask too short": put("attention_mask", lambda ids: torch.ones_like(ids)[:, :9]),
    "mask of four dimensions": give(attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()),
    "positions backwards": give(position_ids=torch.arange(LENGTH - 1, -1, -1)[None]),
    "positions of 10**6": give(position_ids=torch.arange(LENGTH)[None] + 10**6),
    "positions of -5": give(position_ids=torch.arange(LENGTH)[None] - 5),
    "positions as float": give(position_ids=torch.arange(float(LENGTH))[None]),
    "positions too short": give(position_ids=torch.arange(9)[None]),
    "positions that restart": give(position_ids=(torch.arange(LENGTH) % 6).expand(2, -1)),
    **{f"num_items_in_batch={n}": give(num_items_in_batch=n) for n in (0, 7, -3, "x", torch.tensor(7))},
    **{f"{name}=True": give(**{name: True}) for name in ("use_cache", "output_hidden_states", "output_attentions")},
    "an unknown argument": give(nonsense=3),
    "return_dict=False": give(return_dict=False),
    "logits_to_keep=3": give(logits_to_keep=3),
    "shift_labels": put("shift_labels", lambda ids: ids),
    "shift_labels too short": put("shift_labels", lambda ids: ids[:, :4]),
    "ignore_index=5": give(ignore_index=5),
    **{f"no gradient for {part or 'anything'}": freeze(part) for part in FROZEN},
    "in FP16": on_model(lambda model: model.half()),
    "in FP32": on_model(lambda model: model.float()),
    "in FP64": on_model(lambda model: model.double()),
    "norms in FP32": on_model(lambda model: [m.float() for n, m in model.named_modules() if n.endswith("norm")]),
    "a weight of zeros": on_weight(lambda weight: weight.zero_()),
    "a weight 1000 times as large": on_weight(lambda weight: weight.mul_(1000)),
    "a weight with NaN": on_weight(lambda weight: weight[0].fill_(math.nan)),
    "a transposed weight": on_weight(lambda weight: weight.set_(weight.t().contiguous().t())),
    "shared layers": on_model(lambda model: model.model.layers.__setitem__(1, model.model.layers[0])),
    "one layer in eval mode": on_model(lambda model: model.model.layers[0].eval()),
    "a layer less": on_model(lambda model: model.model.layers.__delitem__(1)),
    "gradient checkpointing": on_model(lambda model: model.gradient_checkpointing_enable()),
    "eager attention": on_model(lambda model: model.set_attn_implementation("eager")),
    "resized embeddings": on_model(lambda model: model.resize_token_embeddings(VOCAB + 3)),
    "a hook": on_model(lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None)),
}


def make_model() -> Any:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return zoo.make_model("llama", layers=2, use_cache=False, **small)


def forward_and_backward(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Loss and gradients as one vector."""
    model.zero_grad()
    result = model(**batch)
    loss = result[0] if isinstance(result, tuple) else result.loss
    if loss is None:
        loss = result.logits.float().logsumexp(-1).mean()
    if loss.requires_grad:
        loss.backward()
    grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().double().flatten(), *grads])


def odd_forward(random: random.Random) -> Job:
    """One to three changes of model and batch, before or after `convert`."""
    name, head = random.choice(["default", "paper", "leanest"]), random.choice(["bf16", "fp8", None])
    changes = random.sample(list(CHANGES), random.choice([1, 1, 1, 2, 3]))
    is_late = random.random() < 0.5

    def run() -> str:
        models, batches = [make_model(), make_model()], [zoo.make_batch(length=LENGTH) for _ in range(2)]

        def work(own: int) -> Tensor:
            convert = functools.partial(overcoat.convert, models[own], Recipe.from_name(name, head=head))
            if own and is_late:
                convert()
            for change in changes:
                CHANGES[change](models[own], batches[own])
            if own and not is_late:
                convert()
            return forward_and_backward(models[own], batches[own])

        if fault := judge(*[attempt(functools.partial(work, own)) for own in (0, 1)]):
            return fault
        plain = [functools.partial(forward_and_backward, model, zoo.make_batch(length=LENGTH)) for model in models]
        return (fault := judge(*map(attempt, plain))) and f"a plain batch after it: {fault}"

    return f"{', '.join(changes)} {'after' if is_late else 'before'} convert, Recipe {name}, head={head!r}", run


def odd_recipe(random: random.Random) -> Job:
    """Odd values in a recipe: refused, or the model trains."""
    changes = {random.choice(fields(Recipe)).name: random.choice(ODD) for _ in range(random.choice([1, 1, 2]))}

    def run() -> str:
        recipe, error = attempt(lambda: Recipe(**changes))
        if error is not None:
            return refusal(error)
        plain = attempt(lambda: forward_and_backward(make_model(), zoo.make_batch(length=LENGTH)))
        own = attempt(lambda: forward_and_backward(converted(make_model(), recipe), zoo.make_batch(length=LENGTH)))
        return judge(plain, own, tolerance=math.inf)

    return f"Recipe({', '.join(f'{name}={value!r}' for name, value in changes.items())})", run


def converted(model: Any, recipe: Recipe | None = None) -> Any:
    overcoat.convert(model, recipe)
    return model


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **{f"convert({odd!r})": lambda _, odd=odd: overcoat.convert(odd) for odd in (None, "gpt2", LlamaForCausalLM)},  # type: ignore[misc]
    **{f"convert(model, {odd!r})": lambda model, odd=odd: overcoat.convert(model, odd)  # type: ignore[misc]
       for odd in ("paper", {"group_size": 16}, Recipe, 3)},
    "convert(model, filter_fn=3)": lambda model: overcoat.convert(model, filter_fn=3),  # type: ignore[arg-type]
    "convert(nn.Linear(2, 2))": lambda _: overcoat.convert(nn.Linear(2, 2)),
    "convert(a decoder layer)": lambda model: overcoat.convert(model.model.layers[0]),
    "pickle": lambda model: pickle.dumps(converted(model)),
    "a deep copy": lambda model: forward_and_backward(copy.deepcopy(converted(model)), zoo.make_batch()),
}  # fmt: skip


def odd_conversion(random: random.Random) -> Job:
    name = random.choice(list(CONVERSIONS))
    return name, lambda: refusal(attempt(lambda: CONVERSIONS[name](make_model()))[1])


def attack(_ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    kinds = [odd_forward, steps.odd_steps, odd_recipe, steps.odd_options, odd_forward, steps.odd_steps, odd_conversion]
    case, run = kinds[index % len(kinds)](random)

    def work() -> int:
        print(run(), end="")
        return 0

    ended = Child(work, folder).wait()
    return Finding(case, ended.fault() or ended.output)
