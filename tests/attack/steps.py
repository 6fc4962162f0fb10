"""Odd parameters, gradients, options and calls of overcoat.AdamW, beside torch.optim.AdamW with the same."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import overcoat
from tests.attack.judge import Job, attempt, judge, refusal

STEPS = 4
Parameters = list[Any]


def added(make: Callable[[], Any]) -> Callable[[Parameters], Any]:
    return lambda of: of.append(make())


def parameter(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype, device=device))


def first_gradient(change: Callable[[Tensor], Any]) -> Callable[[Parameters], Any]:
    return lambda of: setattr(of[0], "grad", change(of[0].grad))


def all_gradients(value: float) -> Callable[[Parameters], Any]:
    return lambda of: [p.grad.fill_(value) for p in of]


SHAPES = ((), (0,), (1,), (0, 3), (129,), (1, 1, 1, 5), (300, 1))
DTYPES = (torch.float16, torch.float64, torch.bfloat16, torch.complex64)
# Changes the parameters before the optimizer exists.
PARAMETERS: dict[str, Callable[[Parameters], Any]] = {
    **{f"a parameter of shape {shape}": added(functools.partial(parameter, *shape)) for shape in SHAPES},
    **{f"a parameter in {dtype}": added(functools.partial(parameter, 40, dtype=dtype)) for dtype in DTYPES},
    "a transposed parameter": added(lambda: nn.Parameter(torch.ones(30, 20).t())),
    "an expanded parameter": added(lambda: nn.Parameter(torch.ones(30, 1).expand(30, 4))),
    "every second element": added(lambda: nn.Parameter(torch.ones(100)[::2])),
    "a parameter on the meta device": added(functools.partial(parameter, 3, device="meta")),
    "an integer tensor": added(lambda: torch.ones(3, dtype=torch.int32)),
    "text": added(lambda: "weight"),
    "no leaf": lambda of: of.append(of[0] * 2),
    "a parameter twice": lambda of: of.append(of[0]),
    "a frozen parameter": lambda of: of[0].requires_grad_(False),
    "no parameters": lambda of: of.clear(),
    "NaN in a weight": lambda of: of[0].data[0].fill_(math.nan),
    "weights of 1e38": lambda of: of[0].data.fill_(1e38),
}
# Changes the gradients, or the parameters, before the second step.
GRADIENTS: dict[str, Callable[[Parameters], Any]] = {
    "no gradients": lambda of: [setattr(p, "grad", None) for p in of],
    **{f"gradients of {value}": all_gradients(value) for value in (0.0, 1e-45, 1e-30, 1e10)},
    "a gradient less": first_gradient(lambda _: None),
    "a transposed gradient": first_gradient(lambda grad: grad.t().contiguous().t()),
    "an expanded gradient": first_gradient(lambda grad: grad[:1].expand_as(grad)),
    "a sparse gradient": first_gradient(lambda grad: grad.to_sparse()),
    "a gradient with history": first_gradient(lambda grad: grad.clone().requires_grad_() * 2),
    "frozen since": lambda of: of[0].requires_grad_(False),
    "other storage": lambda of: setattr(of[0], "data", of[0].data.clone()),
    "transposed data": lambda of: setattr(of[0], "data", of[0].data.t().contiguous().t()),
    "data in BF16": lambda of: [setattr(p, "grad", None) or setattr(p, "data", p.data.bfloat16()) for p in of],
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "a closure that returns None": lambda o: o.step(lambda: None),
    "a closure that returns text": lambda o: o.step(lambda: "loss"),
    "a closure that fails": lambda o: o.step(lambda: 1 / 0),
    "a closure that is none": lambda o: o.step(3),
    "a deep copy": lambda o: copy.deepcopy(o),
    "its own state loaded": lambda o: o.load_state_dict(o.state_dict()),
    "an empty state loaded": lambda o: o.load_state_dict({}),
    "a state without groups loaded": lambda o: o.load_state_dict({**o.state_dict(), "param_groups": []}),
    "None loaded": lambda o: o.load_state_dict(None),
    "an empty group added": lambda o: o.add_param_group({"params": []}),
    "a parameter added again": lambda o: o.add_param_group({"params": [o.param_groups[0]["params"][0]]}),
    "text added": lambda o: o.add_param_group({"params": "weights"}),
    "the groups removed": lambda o: o.param_groups.clear(),
    "lr as tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(1e-3)),
}
# Given at the start, or written into a group between two steps.
OPTIONS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-30, -1.0, math.nan, math.inf, "1e-3", None, torch.ones(2)],
    "betas": [(0.0, 0.0), (0.9, 1.0), (1.5, 0.9), (math.nan, 0.9), 0.9, (0.9,), [0.9, 0.99], None],
    "eps": [0.0, 1.0, -1.0, math.nan, "x", None],
    "weight_decay": [0.0, 0.5, -0.5, math.nan, math.inf, None],
}
OWN_OPTIONS: dict[str, list[Any]] = {
    "moments": ["fp32", "fp8", ("fp32", "fp32"), ("bf16", "log8"), ["e4m3x", "e4m3x"], "x", None, 8, ()],
    "master": ["bf16", "bf16+8", "bf16+16", "fp32", "", None],
    "group_size": [16, 64, 128.0, 0, -1, 2**40, "128", None],
    "seed": [7, -1, 2**70, 0.5, "x", None, True],
}


def give_gradients(of: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in of:
        if isinstance(p, Tensor) and p.requires_grad and p.is_leaf and not p.is_meta:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def nothing(_: Any) -> None:
    pass


def train(
    make: Callable[[Parameters], Any],
    before: Callable[[Parameters], Any] = nothing,
    between: Callable[[Parameters], Any] = nothing,
    call: Callable[[Any], Any] = nothing,
) -> Tensor:
    """How far STEPS steps have moved all weights, as one vector."""
    generator = torch.Generator().manual_seed(0)
    of: Parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (70,))]
    before(of)
    start = [p.detach().clone() for p in of]
    optimizer = make(of)
    for step in range(STEPS):
        give_gradients(of, step)
        if step == 1:
            between(of)
            call(optimizer)
        optimizer.step()
    moved = [(p.detach().to(torch.complex128) - s.to(torch.complex128)).flatten() for p, s in zip(of, start)]
    return torch.view_as_real(torch.cat(moved)).flatten()


def compare(options: dict[str, Any], **odd: Callable[[Any], Any]) -> str:
    """The same steps by torch and by us."""
    makes = [functools.partial(kind, **options) for kind in (torch.optim.AdamW, overcoat.AdamW)]
    return judge(*[attempt(functools.partial(train, make, **odd)) for make in makes])


def odd_steps(random: random.Random) -> Job:
    """One odd thing: parameters, gradients, or a call between two steps."""
    which, table = random.choice([("before", PARAMETERS), ("between", GRADIENTS), ("call", CALLS)])
    name = random.choice(list(table))
    return f"AdamW, {name}", lambda: compare({"lr": 1e-2}, **{which: table[name]})


def odd_options(random: random.Random) -> Job:
    """As torch does, where torch has the option; or refused; or, where torch has it not, without effect on the sums."""
    table = random.choice([OPTIONS, OWN_OPTIONS])
    name = random.choice(list(table))
    value = random.choice(table[name])
    if random.random() < 0.5:
        return f"AdamW, param_groups[0][{name!r}] = {value!r} after a step", lambda: compare(
            {"lr": 1e-2}, call=lambda optimizer: optimizer.param_groups[0].update({name: value})
        )
    case = f"AdamW({name}={value!r})"
    if table is OPTIONS:
        return case, lambda: compare({name: value})
    make = functools.partial(overcoat.AdamW, **{name: value})
    return case, lambda: refusal(attempt(lambda: train(make))[1])
