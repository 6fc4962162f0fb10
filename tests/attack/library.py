"""Odd inputs to overcoat.convert, to a converted model's forward, and to overcoat.AdamW (steps.py).

What transformers and torch do with the same input decides: where they succeed, so must this project, with their numbers,
or refuse in one line; where they refuse, so must it, with any exception of one line. A plain batch then still works.
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

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat
from overcoat.recipe import Recipe
from tests.attack import steps
from tests.attack.harness import Child, Finding, Ground
from tests.attack.judge import Job, attempt, judge, refusal

VOCAB = 64
ODD: list[Any] = [None, True, False, 0, -1, 3, 128, 128.0, 64.5, "128", "", "int8", "bf16", b"fp8", [], ["e4m3"], {}, math.nan,
                  math.inf, 10**30, 1e-300, torch.tensor(16), np.int64(16), np.float32(0.5), object]  # fmt: skip
Batch = dict[str, Any]
# Changes a model or a batch; the same for the plain and for the converted model.
Change = Callable[[nn.Module, Batch, random.Random], Any]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=64, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def make_batch() -> Batch:
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def put(name: str, make: Callable[[Tensor], Any]) -> Change:
    """The batch's `name` becomes what `make` makes of the ids."""
    return lambda _model, batch, _random: batch.__setitem__(name, make(batch["input_ids"]))


def both(make: Callable[[Tensor], Any]) -> Change:
    return lambda _model, batch, _random: batch.update({name: make(batch[name]) for name in ("input_ids", "labels")})


def one_label(value: int) -> Change:
    return lambda _model, batch, random: batch["labels"].__setitem__((0, random.randrange(1, 17)), value)


def embeddings(make: Callable[[Tensor], Tensor]) -> Change:
    def change(model: Any, batch: Batch, _random: random.Random) -> None:
        batch["inputs_embeds"] = make(model.get_input_embeddings()(batch.pop("input_ids")).detach())

    return change


def freeze(part: str) -> Change:
    return lambda model, _batch, _random: [
        parameter.requires_grad_(False) for name, parameter in model.named_parameters() if part in name
    ]


def on_model(change: Callable[[Any], Any]) -> Change:
    return lambda model, _batch, _random: change(model)


CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    **{f"a label of {value}": one_label(value) for value in (VOCAB, VOCAB + 500, -1, -99, -101, 2**40)},
    **{f"an id of {value}": lambda _m, b, _r, value=value: b["input_ids"].__setitem__((0, 3), value) for value in (VOCAB, -1, 2**40)},
    **{f"labels as {kind}": put("labels", lambda ids, kind=kind: ids.to(kind))
       for kind in (torch.int32, torch.int16, torch.uint8, torch.float32, torch.bfloat16, torch.bool)},
    **{f"ids as {kind}": put("input_ids", lambda ids, kind=kind: ids.to(kind)) for kind in (torch.int32, torch.int16, torch.float32)},
    "all labels ignored": put("labels", lambda ids: torch.full_like(ids, -100)),
    "one row of labels": put("labels", lambda ids: ids[:1]),
    "labels too short": put("labels", lambda ids: ids[:, :-2]),
    "labels of one dimension": put("labels", lambda ids: ids.flatten()),
    "labels as a list": put("labels", lambda ids: ids.tolist()),
    "labels on the meta device": put("labels", lambda ids: ids.to("meta")),
    "no labels": lambda _m, batch, _r: batch.pop("labels"),
    "no rows": both(lambda ids: ids[:0]),
    "no tokens": both(lambda ids: ids[:, :0]),
    "one token": both(lambda ids: ids[:, :1]),
    "one dimension": both(lambda ids: ids[0]),
    "three dimensions": both(lambda ids: ids[None]),
    "a transposed view": both(lambda ids: ids.t().contiguous().t()),
    "an expanded row": both(lambda ids: ids[:1].expand(3, -1)),
    "longer than max_position_embeddings": both(lambda ids: ids.repeat(1, 6)),
    "embeddings": embeddings(lambda x: x),
    "embeddings in FP32": embeddings(lambda x: x.float()),
    "embeddings in FP64": embeddings(lambda x: x.double()),
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
    "mask with a hole": put("attention_mask", lambda ids: (torch.arange(17) != 5).expand(2, -1).long()),
    "mask too short": put("attention_mask", lambda ids: torch.ones_like(ids)[:, :9]),
    "mask of four dimensions": put("attention_mask", lambda ids: torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()),
    "positions backwards": put("position_ids", lambda ids: torch.arange(16, -1, -1)[None]),
    "positions of 10**6": put("position_ids", lambda ids: torch.arange(17)[None] + 10**6),
    "positions of -5": put("position_ids", lambda ids: torch.arange(17)[None] - 5),
    "positions as float": put("position_ids", lambda ids: torch.arange(17.0)[None]),
    "positions too short": put("position_ids", lambda ids: torch.arange(9)[None]),
    "positions that restart": put("position_ids", lambda ids: (torch.arange(17) % 6).expand(2, -1)),
    **{f"num_items_in_batch={value}": put("num_items_in_batch", lambda ids, value=value: value) for value in (0, 7, -3, "x", torch.tensor(7))},
    **{f"{name}=True": put(name, lambda ids: True) for name in ("use_cache", "output_hidden_states", "output_attentions", "nonsense")},
    "return_dict=False": put("return_dict", lambda ids: False),
    "logits_to_keep=3": put("logits_to_keep", lambda ids: 3),
    "shift_labels": put("shift_labels", lambda ids: ids),
    "shift_labels too short": put("shift_labels", lambda ids: ids[:, :4]),
    "ignore_index=5": put("ignore_index", lambda ids: 5),
    **{f"no gradient for {part or 'anything'}": freeze(part) for part in ("", "norm", "embed", "lm_head", "proj", "layers.0", "q_proj")},
    "in FP16": on_model(lambda model: model.half()),
    "in FP32": on_model(lambda model: model.float()),
    "in FP64": on_model(lambda model: model.double()),
    "norms in FP32": on_model(lambda model: [module.float() for name, module in model.named_modules() if name.endswith("norm")]),
    "a weight of zeros": on_model(lambda model: model.model.layers[0].mlp.up_proj.weight.data.zero_()),
    "a weight of 1e3": on_model(lambda model: model.model.layers[0].mlp.up_proj.weight.data.fill_(1e3)),
    "a weight with NaN": on_model(lambda model: model.model.layers[0].mlp.up_proj.weight.data[0].fill_(math.nan)),
    "a transposed weight": on_model(lambda model: setattr(
        model.model.layers[0].mlp.up_proj.weight, "data", model.model.layers[0].mlp.up_proj.weight.data.t().contiguous().t())),
    "shared layers": on_model(lambda model: model.model.layers.__setitem__(1, model.model.layers[0])),
    "one layer in eval mode": on_model(lambda model: model.model.layers[0].eval()),
    "a layer less": on_model(lambda model: model.model.layers.__delitem__(1)),
    "gradient checkpointing": on_model(lambda model: model.gradient_checkpointing_enable()),
    "a dropout": on_model(lambda model: setattr(model.model.layers[0].self_attn, "attention_dropout", 0.0)),
    "eager attention": on_model(lambda model: model.set_attn_implementation("eager")),
    "resized embeddings": on_model(lambda model: model.resize_token_embeddings(VOCAB + 3)),
    "a hook": on_model(lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None)),
}  # fmt: skip


def forward_and_backward(model: nn.Module, batch: Batch) -> Tensor:
    """(loss, gradients of the norms and the first projections...) as one FP64 vector."""
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
    recipe = Recipe.from_name(name, head=head)
    names = random.sample(list(CHANGES), random.choice([1, 1, 1, 2, 3]))
    seed, is_late = random.random(), random.random() < 0.5

    def run() -> str:
        models, batches = [make_model(), make_model()], [make_batch(), make_batch()]
        if is_late:
            overcoat.convert(models[1], recipe)

        def work(own: int) -> Tensor:
            for name in names:
                CHANGES[name](models[own], batches[own], type(random)(seed))
            if own and not is_late:
                overcoat.convert(models[1], recipe)
            return forward_and_backward(models[own], batches[own])

        if fault := judge(*[attempt(functools.partial(work, own)) for own in (0, 1)]):
            return fault
        after = [attempt(functools.partial(forward_and_backward, model, make_batch())) for model in models]
        return (fault := judge(*after)) and f"a plain batch after it: {fault}"

    return f"{', '.join(names)} {'after' if is_late else 'before'} convert, Recipe {name}, head={head!r}", run


def odd_recipe(random: random.Random) -> Job:
    """Odd values in a recipe: refused, or the model trains."""
    changes = {random.choice(fields(Recipe)).name: random.choice(ODD) for _ in range(random.choice([1, 1, 2]))}

    def run() -> str:
        recipe, error = attempt(lambda: Recipe(**changes))
        if error is not None:
            return refusal(error)
        model = make_model()
        own = attempt(lambda: overcoat.convert(model, recipe) and forward_and_backward(model, make_batch()))
        return judge(attempt(lambda: forward_and_backward(make_model(), make_batch())), own, tolerance=math.inf)

    return f"Recipe({', '.join(f'{name}={value!r}' for name, value in changes.items())})", run


def converted(model: nn.Module) -> nn.Module:
    overcoat.convert(model)
    return model


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "convert(None)": lambda _: overcoat.convert(None),  # type: ignore[arg-type]
    "convert('gpt2')": lambda _: overcoat.convert("gpt2"),  # type: ignore[arg-type]
    "convert(LlamaForCausalLM)": lambda _: overcoat.convert(LlamaForCausalLM),  # type: ignore[arg-type]
    "convert(nn.Linear(2, 2))": lambda _: overcoat.convert(nn.Linear(2, 2)),
    "convert(model, {'group_size': 16})": lambda model: overcoat.convert(model, {"group_size": 16}),  # type: ignore[arg-type]
    "convert(model, 'paper')": lambda model: overcoat.convert(model, "paper"),  # type: ignore[arg-type]
    "convert(model, Recipe)": lambda model: overcoat.convert(model, Recipe),  # type: ignore[arg-type]
    "convert(model, filter_fn=3)": lambda model: overcoat.convert(model, filter_fn=3),  # type: ignore[arg-type]
    "convert(a decoder layer)": lambda model: overcoat.convert(model.model.layers[0]),
    "a converted model on the meta device": lambda model: converted(model.to("meta"))(**make_batch()),
    "pickle.dumps(a converted model)": lambda model: pickle.dumps(converted(model)),
    "a deep copy of a converted model": lambda model: forward_and_backward(copy.deepcopy(converted(model)), make_batch()),
    "torch.jit.trace": lambda model: torch.jit.trace(converted(model), make_batch()["input_ids"], strict=False),
}


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
