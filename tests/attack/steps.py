"""Odd parameters, gradients, options and calls of overcoat.AdamW, beside torch.optim.AdamW with the same."""

from __future__ import annotations

import copy
import functools
import io
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import overcoat
from tests.attack.judge import Job, attempt, judge, refusal

STEPS = 4
Parameters = list[nn.Parameter]
# Changes the parameters before the optimizer exists.
ODD_PARAMETERS: dict[str, Callable[[Parameters], Any]] = {
    "nothing": lambda _: None,
    **{f"a parameter of shape {shape}": lambda of, shape=shape: of.append(nn.Parameter(torch.ones(shape)))
       for shape in ((), (0,), (1,), (0, 3), (129,), (1, 1, 1, 5), (300, 1))},
    **{f"a parameter in {dtype}": lambda of, dtype=dtype: of.append(nn.Parameter(torch.ones(40, dtype=dtype)))
       for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.complex64)},
    "a transposed parameter": lambda of: of.append(nn.Parameter(torch.ones(30, 20).t())),
    "an expanded parameter": lambda of: of.append(nn.Parameter(torch.ones(30, 1).expand(30, 4))),
    "every second element": lambda of: of.append(nn.Parameter(torch.ones(100)[::2])),
    "two views of one storage": lambda of: of.extend(map(nn.Parameter, torch.ones(2, 50))),
    "a frozen parameter": lambda of: of[0].requires_grad_(False),
    "a parameter twice": lambda of: of.append(of[0]),
    "no parameters": lambda of: of.clear(),
    "an integer tensor": lambda of: of.append(torch.ones(3, dtype=torch.int32)),
    "no tensor": lambda of: of.append("weight"),
    "no leaf": lambda of: of.append(of[0] * 2),
    "on the meta device": lambda of: of.append(nn.Parameter(torch.ones(3, device="meta"))),
    "NaN in a weight": lambda of: of[0].data[0].fill_(math.nan),
    "weights of 1e38": lambda of: of[0].data.fill_(1e38),
}  # fmt: skip
# Changes the gradients before the second step.
ODD_GRADIENTS: dict[str, Callable[[Parameters], Any]] = {
    "no gradients": lambda of: [setattr(p, "grad", None) for p in of],
    "a gradient less": lambda of: setattr(of[0], "grad", None),
    "gradients of zero": lambda of: [p.grad.zero_() for p in of],
    **{f"gradients of {value}": lambda of, value=value: [p.grad.fill_(value) for p in of] for value in (1e-30, 1e10, 1e-45)},
    "a transposed gradient": lambda of: setattr(of[0], "grad", of[0].grad.t().contiguous().t()),
    "an expanded gradient": lambda of: setattr(of[0], "grad", of[0].grad[:1].expand_as(of[0])),
    "a sparse gradient": lambda of: setattr(of[0], "grad", of[0].grad.to_sparse()),
    "a gradient with history": lambda of: setattr(of[0], "grad", (of[0] * 2).sum() * of[0].grad),
    "frozen since": lambda of: of[0].requires_grad_(False),
    "other storage": lambda of: setattr(of[0], "data", of[0].data.clone()),
    "data in BF16": lambda of: [setattr(p, "grad", None) or setattr(p, "data", p.data.bfloat16()) for p in of],
    "transposed data": lambda of: setattr(of[0], "data", of[0].data.t().contiguous().t()),
}  # fmt: skip
ODD_CALLS: dict[str, Callable[[Any], Any]] = {
    "a closure that returns None": lambda o: o.step(lambda: None),
    "a closure that returns text": lambda o: o.step(lambda: "loss"),
    "a closure that returns a vector": lambda o: o.step(lambda: torch.ones(3)),
    "a closure that fails": lambda o: o.step(lambda: 1 / 0),
    "a closure that is none": lambda o: o.step(3),
    "two steps": lambda o: (o.step(), o.step()),
    "a deep copy": lambda o: copy.deepcopy(o),
    "its own state loaded": lambda o: o.load_state_dict(o.state_dict()),
    "a saved state loaded": lambda o: o.load_state_dict(_saved(o.state_dict())),
    "an empty state loaded": lambda o: o.load_state_dict({}),
    "a state without groups loaded": lambda o: o.load_state_dict({**o.state_dict(), "param_groups": []}),
    "None loaded": lambda o: o.load_state_dict(None),
    "an empty group added": lambda o: o.add_param_group({"params": []}),
    "a parameter added again": lambda o: o.add_param_group({"params": [o.param_groups[0]["params"][0]]}),
    "text added": lambda o: o.add_param_group({"params": "weights"}),
    "a group removed": lambda o: o.param_groups.clear(),
    "the groups doubled": lambda o: o.param_groups.append(o.param_groups[0]),
    "lr as tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(1e-3)),
    "zero_grad(3)": lambda o: o.zero_grad(3),
}
# What a user may write into param_groups[0] between two steps: (key, value); those torch has, and those it has not.
ODD_OPTIONS: list[tuple[str, Any]] = [
    *[("lr", value) for value in (0.0, 1e-30, -1.0, math.nan, math.inf, "1e-3", None, torch.ones(2))],
    *[("betas", value) for value in ((0.0, 0.0), (0.5, 0.5), (0.9, 1.0), (1.5, 0.9), (math.nan, 0.9), 0.9, (0.9,), [0.9, 0.99], None)],
    *[("eps", value) for value in (0.0, 1.0, -1.0, math.nan, "x", None)],
    *[("weight_decay", value) for value in (0.0, 0.5, -0.5, math.nan, math.inf, None)],
    *[("params", value) for value in ([], None)],
]  # fmt: skip
OWN_OPTIONS: list[tuple[str, Any]] = [
    *[("moments", value) for value in ("fp32", "fp8", ("fp32", "fp32"), ("bf16", "log8"), ["e4m3x", "e4m3x"], "x", None, 8, ())],
    *[("master", value) for value in ("bf16", "bf16+8", "bf16+16", "fp32", "", None)],
    *[("group_size", value) for value in (16, 64, 128.0, 0, -1, 2**40, "128", None)],
    *[("seed", value) for value in (7, -1, 2**70, 0.5, "x", None, True)],
]  # fmt: skip


def _saved(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (70,))]


def give_gradients(of: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in of:
        if isinstance(parameter, Tensor) and parameter.requires_grad and parameter.is_leaf and not parameter.is_meta:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)


def train(make: Callable[[Parameters], Any], before: Callable, between: Callable, call: Callable) -> Tensor:
    """How far STEPS steps have moved all weights, as one vector."""
    of = parameters()
    before(of)
    start = [parameter.detach().clone() for parameter in of]
    optimizer = make(of)
    for step in range(STEPS):
        give_gradients(of, step)
        if step == 1:
            between(of)
            call(optimizer)
        optimizer.step()
    moved = [(p.detach().to(torch.complex128) - s.to(torch.complex128)).flatten() for p, s in zip(of, start)]
    return torch.view_as_real(torch.cat(moved)).flatten()


def compare(**odd: Callable) -> str:
    """The same four steps by torch and by us."""
    plain, own = (functools.partial(kind, lr=1e-2) for kind in (torch.optim.AdamW, overcoat.AdamW))
    return judge(*[attempt(functools.partial(train, make, **odd)) for make in (plain, own)])


def nothing(_: Any) -> None:
    pass


def odd_steps(random: random.Random) -> Job:
    """One odd thing: parameters, gradients, or a call between two steps."""
    which, table = random.choice([("before", ODD_PARAMETERS), ("between", ODD_GRADIENTS), ("call", ODD_CALLS)])
    name = random.choice(list(table))
    odd = {"before": nothing, "between": nothing, "call": nothing, which: table[name]}
    return f"AdamW, {name}", lambda: compare(**odd)


def odd_options(random: random.Random) -> Job:
    """An option given at the start, or written into a group between two steps: as torch, or refused, or without effect."""
    is_own = random.random() < 0.5
    name, value = random.choice(OWN_OPTIONS if is_own else ODD_OPTIONS)
    if random.random() < 0.4:

        def run() -> str:
            make = functools.partial(overcoat.AdamW, **{name: value})
            own = attempt(lambda: train(make, nothing, nothing, nothing))
            if is_own:
                return refusal(own[1])
            plain = functools.partial(torch.optim.AdamW, **{name: value})
            return judge(attempt(lambda: train(plain, nothing, nothing, nothing)), own)

        return f"AdamW({name}={value!r})", run
    change = functools.partial(_set_option, name=name, value=value)
    return f"AdamW, param_groups[0][{name!r}] = {value!r} after a step", lambda: compare(
        before=nothing, between=nothing, call=change
    )


def _set_option(optimizer: Any, name: str, value: Any) -> None:
    optimizer.param_groups[0][name] = value
