"""Odd inputs to overcoat.convert, to a converted model's forward, and to overcoat.AdamW.

What transformers and torch do with the same input decides: where they succeed, so must this project, with their
numbers, or refuse; where they refuse, so must it. A plain batch then works as before.
"""

from __future__ import annotations

import copy  # noqa: F401 (statements below use it)
import functools
import math
import pickle  # noqa: F401
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overcoat
from overcoat.recipe import Recipe
from tests.attack.harness import Child, Finding, Ground
from tests.models import zoo

Outcome = tuple[Any, Exception | None]
Job = tuple[str, Callable[[], str]]  # a case, and what finds out what is wrong with it
V, T, STEPS = zoo.VOCAB, 17, 4


def attempt(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except Exception as error:
        return None, error


def refusal(error: Exception | None) -> str:
    """What is wrong with an error, "" if it is a clear one."""
    clear = error is None or (isinstance(error, (ValueError, TypeError)) and str(error).strip())
    return "" if clear else f"fails with {type(error).__name__}: {str(error)[:300]!r}, which is no clear refusal"


def judge(plain: Outcome, own: Outcome, tolerance: float = 0.3) -> str:
    """What is wrong with our outcome beside the plain one; values are vectors."""
    (expected, plain_error), (found, error) = plain, own
    if error is not None:
        return refusal(error) if plain_error is None or not str(error).strip() else ""
    if plain_error is not None:
        return f"accepted in silence; torch: {type(plain_error).__name__}: {str(plain_error)[:150]!r}"
    if found.shape != expected.shape:
        return f"{found.numel()} numbers, torch has {expected.numel()}"
    if not bool(expected.isfinite().all()):
        return ""
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return "" if distance < tolerance else f"other numbers than torch's: relative distance {distance:.3g}"


# ---- models and batches: statements on `model`, and on the batch, whose entries are their variables ------------------

CHANGES = [
    "pass", "del labels",
    *[f"labels[0, 5] = {n}" for n in (V, V + 500, -1, -99, -101, 2**40)],
    *[f"input_ids[0, 5] = {n}" for n in (V, -1, 2**40)],
    *[f"labels = labels.{kind}()" for kind in (
        "int", "short", "byte", "float", "bfloat16", "bool", "tolist", "flatten")],
    "labels = labels.to('meta')", "labels[:] = -100", "labels = labels[:1]", "labels = labels[:, :-2]",
    "input_ids = input_ids.int()", "input_ids = input_ids.float()",
    *[f"input_ids, labels = (x{how} for x in (input_ids, labels))" for how in (
        "[:0]", "[:, :0]", "[:, :1]", "[0]", "[None]", "[:1].expand(3, -1)",
        ".t().contiguous().t()", ".repeat(1, 16)")],
    *[f"inputs_embeds = embed(input_ids).detach(){how}; del input_ids" for how in (
        "", ".float()", ".transpose(1, 2).contiguous().transpose(1, 2)", ".requires_grad_()", "[..., :32]", " * 0",
        " * 1e32", " * math.nan")],
    "inputs_embeds = torch.zeros(2, T, 64)",
    *[f"attention_mask = {mask}" for mask in (
        "input_ids >= 0", "torch.ones(2, T)", "torch.zeros_like(input_ids)", "torch.ones(2, 9)",
        "torch.tensor([[0], [1]]).repeat(1, T)", "(torch.arange(T) != 5).repeat(2, 1).long()",
        "torch.ones(2, 1, T, T, dtype=torch.bool).tril()")],
    *[f"position_ids = {positions}" for positions in (
        "torch.arange(T).flip(0)[None]", "torch.arange(T)[None] + 10**6", "torch.arange(T)[None] - 5",
        "torch.arange(float(T))[None]", "torch.arange(9)[None]", "(torch.arange(T) % 6).repeat(2, 1)")],
    *[f"num_items_in_batch = {n}" for n in ("0", "7", "-3", "'x'", "torch.tensor(7)")],
    "use_cache = True", "output_hidden_states = True", "output_attentions = True", "nonsense = True",
    "return_dict = False", "logits_to_keep = 3", "ignore_index = 5", "shift_labels = labels",
    *[f"[p.requires_grad_(False) for n, p in model.named_parameters() if {part!r} in n]" for part in (
        "", "norm", "embed", "proj", "layers.0", "q_proj")],
    "model.half()", "model.float()", "model.double()", "[m.float() for n, m in model.named_modules() if 'norm' in n]",
    "weight.zero_()", "weight.mul_(1000)", "weight[0].fill_(math.nan)", "weight.set_(weight.t().contiguous().t())",
    "layers[1] = layers[0]", "layers[0].eval()", "del layers[1]",
    "layers[0].mlp.register_forward_hook(lambda *_: None)",
    "model.gradient_checkpointing_enable()", "model.set_attn_implementation('eager')",
    f"model.resize_token_embeddings({V + 3})", "shift_labels = labels[:, :4]",
    *[f"nn.utils.{how}(layers[0].{part})" for part in ("self_attn.q_proj", "mlp.down_proj") for how in (
        "parametrizations.weight_norm", "parametrizations.spectral_norm", "weight_norm")],
    "model.load_state_dict({name: 2 * of for name, of in model.state_dict().items()}, assign=True)",
    "layers.append(copy.deepcopy(layers[0]))", "layers[0].self_attn.scaling = 0.5",
    "layers[0].input_layernorm.variance_epsilon = 0.5", "model.lm_head.weight = embed.weight",
    "layers[1].self_attn.v_proj.bias = nn.Parameter(torch.ones(32, dtype=weight.dtype))",
]  # fmt: skip


def change(model: Any, batch: dict[str, Any], statement: str) -> None:
    parts = {"layers": model.model.layers, "weight": model.model.layers[0].mlp.up_proj.weight.data}
    exec(statement, {**globals(), **parts, "model": model, "embed": model.get_input_embeddings()}, batch)


def make_model(recipe: Any = None, convert: bool = False) -> Any:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = zoo.make_model("llama", layers=2, use_cache=False, **small)
    if convert:
        overcoat.convert(model, recipe)
    return model


def step(model: Any, batch: dict[str, Any] | None = None) -> Tensor:
    """Loss and gradients of a batch, or the plain one, as one vector."""
    model.zero_grad()
    result = model(**(batch or zoo.make_batch(length=T)))
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
    changes = random.sample(CHANGES, random.choice([1, 1, 1, 2, 3]))
    is_late, recipe = random.random() < 0.5, Recipe.from_name(name, head=head)

    def run() -> str:
        models = [make_model(), make_model(recipe, convert=is_late)]

        def odd(own: int) -> Tensor:
            batch = zoo.make_batch(length=T)
            for statement in changes:
                change(models[own], batch, statement)
            if own and not is_late:
                overcoat.convert(models[1], recipe)
            return step(models[own], batch)

        if fault := judge(*[attempt(functools.partial(odd, own)) for own in (0, 1)]):
            return fault
        plain = [attempt(functools.partial(step, model)) for model in models]
        return (fault := judge(*plain)) and f"a plain batch after it: {fault}"

    return f"{'; '.join(changes)} {'after' if is_late else 'before'} convert, Recipe {name}, head={head!r}", run


ODD = [None, True, False, 0, -1, 3, 128, 128.0, 64.5, "128", "", "int8", "bf16", b"fp8", [], {}, math.nan, math.inf,
       10**30, torch.tensor(16), object]  # fmt: skip


def odd_recipe(random: random.Random) -> Job:
    """Odd values in a recipe: refused, or the model trains."""
    changes = {random.choice(fields(Recipe)).name: random.choice(ODD) for _ in range(random.choice([1, 1, 2]))}

    def run() -> str:
        recipe, error = attempt(lambda: Recipe(**changes))
        if error is not None:
            return refusal(error)
        return judge(attempt(lambda: step(make_model())), attempt(lambda: step(make_model(recipe, True))), math.inf)

    return f"Recipe({changes})", run


CONVERSIONS = [
    "convert(None)", "convert('gpt2')", "convert(type(model))", "convert(model, 'paper')", "convert(model, 3)",
    "convert(model, {'group_size': 16})", "convert(model, Recipe)", "convert(model, filter_fn=3)",
    "convert(nn.Linear(2, 2))", "convert(model.model.layers[0])", "pickle.dumps(model)", "step(copy.deepcopy(model))",
]  # fmt: skip


def odd_conversion(random: random.Random) -> Job:
    call = random.choice(CONVERSIONS)
    names = {**globals(), "convert": overcoat.convert}
    return call, lambda: refusal(attempt(lambda: eval(call, {**names, "model": make_model(None, True)}))[1])


# ---- AdamW: statements on its parameters `of` before it exists; on their gradients, or on it, `o`, between two steps -

ODD_STEPS = {
    "before": [
        *[f"of.append(nn.Parameter(torch.ones({what})))" for what in (
            "()", "0", "1", "0, 3", "129", "1, 1, 1, 5", "300, 1", "40, dtype=torch.float16", "40, dtype=torch.float64",
            "40, dtype=torch.bfloat16", "40, dtype=torch.complex64", "3, device='meta'")],
        *[f"of.append({what})" for what in (
            "nn.Parameter(torch.ones(30, 20).t())", "nn.Parameter(torch.ones(30, 1).expand(30, 4))", "of[0]",
            "nn.Parameter(torch.ones(100)[::2])", "torch.ones(3, dtype=torch.int32)", "'weight'", "of[0] * 2")],
        "of[0].requires_grad_(False)", "of.clear()", "of[0].data[0].fill_(math.nan)", "of[0].data.fill_(1e38)",
    ],
    "between": [
        *[f"[p.grad.fill_({n}) for p in of]" for n in (0.0, 1e-45, 1e-30, 1e10)],
        *[f"of[0].grad = {what}" for what in (
            "None", "of[0].grad.t().contiguous().t()", "of[0].grad[:1].expand(40, -1)", "of[0].grad.to_sparse()",
            "of[0].grad.clone().requires_grad_() * 2")],
        *[f"of[0].data = of[0].data{how}" for how in (".clone()", ".t().contiguous().t()")],
        "of[0].requires_grad_(False)", "[setattr(p, 'grad', None) for p in of]",
        "[(setattr(p, 'grad', None), setattr(p, 'data', p.data.bfloat16())) for p in of]",
        *[f"o.step({closure})" for closure in ("lambda: None", "lambda: 'loss'", "lambda: 1 / 0", "3")],
        *[f"o.load_state_dict({state})" for state in (
            "o.state_dict()", "{}", "None", "{**o.state_dict(), 'param_groups': []}")],
        *[f"o.add_param_group({{'params': {params}}})" for params in ("[]", "'weights'", "of[:1]")],
        "copy.deepcopy(o)", "o.param_groups.clear()", "o.param_groups[0]['lr'] = torch.tensor(1e-3)",
    ],
}  # fmt: skip
# Given at the start, or written into a group between two steps.
OPTIONS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-30, -1.0, math.nan, math.inf, "1e-3", None, torch.ones(2)],
    "eps": [0.0, 1.0, -1.0, math.nan, "x", None],
    "betas": [(0.0, 0.0), (0.9, 1.0), (1.5, 0.9), (math.nan, 0.9), 0.9, (0.9,), [0.9, 0.99], None],
    "weight_decay": [0.0, 0.5, -0.5, math.nan, math.inf, None], "seed": [7, -1, 2**70, 0.5, "x", None, True],
    "moments": ["fp32", "fp8", ("fp32", "fp32"), ("bf16", "log8"), ["e4m3x", "e4m3x"], "x", None, 8, ()],
    "master": ["bf16", "bf16+8", "bf16+16", "fp32", "", None], "group_size": [16, 64, 128.0, 0, -1, 2**40, "128", None],
}  # fmt: skip


def train(make: Callable[[list[Any]], Any], before: str = "", between: str = "", **options: Any) -> Tensor:
    """How far STEPS steps have moved all weights, as one vector."""
    generator = torch.Generator().manual_seed(0)
    of: list[Any] = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (70,))]
    names = {**globals(), "of": of}
    exec(before, names)
    begun = [p.detach().clone() for p in of]
    names["o"] = optimizer = make(of)
    for number in range(STEPS):
        for p in of:
            if isinstance(p, Tensor) and p.requires_grad and p.is_leaf and not p.is_meta:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if number == 1:
            exec(between, names)
            for group in optimizer.param_groups[:1]:
                group.update(options)
        optimizer.step()
    moved = [(p.detach().to(torch.complex128) - old.to(torch.complex128)).flatten() for p, old in zip(of, begun)]
    return torch.view_as_real(torch.cat(moved)).flatten()


def compare(options: dict[str, Any], **odd: Any) -> str:
    """The same steps by torch and by us."""
    kinds = torch.optim.AdamW, overcoat.AdamW
    return judge(*[attempt(lambda: train(functools.partial(kind, **options), **odd)) for kind in kinds])  # noqa: B023


def odd_steps(random: random.Random) -> Job:
    """One odd thing: parameters, gradients, or a call between two steps."""
    when = random.choice(["before", "between", "between"])
    statement = random.choice(ODD_STEPS[when])
    return f"AdamW, {when}: {statement}", lambda: compare({"lr": 1e-2}, **{when: statement})


def odd_options(random: random.Random) -> Job:
    """As torch does, where torch has the option; or refused; or, where torch has it not, without effect on the sums."""
    name = random.choice(list(OPTIONS))
    value = random.choice(OPTIONS[name])
    if random.random() < 0.5:
        return f"param_groups[0][{name!r}] = {value!r} after a step", lambda: compare({"lr": 1e-2}, **{name: value})
    if name in torch.optim.AdamW([torch.zeros(1)]).defaults:
        return f"AdamW({name}={value!r})", lambda: compare({name: value})
    make = functools.partial(overcoat.AdamW, **{name: value})
    return f"AdamW({name}={value!r})", lambda: refusal(attempt(lambda: train(make))[1])


def library(_ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    kinds = [odd_forward, odd_steps, odd_recipe, odd_options, odd_forward, odd_steps, odd_conversion]
    case, run = kinds[index % len(kinds)](random)
    ended = Child(lambda: print(run(), end="") or 0, folder).wait()
    return case, ended.fault() or ended.output
