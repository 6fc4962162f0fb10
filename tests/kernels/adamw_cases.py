"""Inputs for the optimizer's kernel tests: awkward shapes, every code and master, states that have already moved."""

import copy

import torch

from overcoat.formats.masters import REMAINDER_DTYPE
from overcoat.kernels.adamw import Hyper
from overcoat.kernels.adamw_step import Counters, Plan, StepTensors, reference_step
from overcoat.kernels.multi_tensor import Gradients
from overcoat.optim.state import init_state, state_fields
from tests.kernels.compare import INTERPRETED

# Whole groups, ragged rows (aligned to 16 and not), 0-d, 1-d with a tail, empty, one element per row, a convolution,
# experts.
SHAPES = ((4, 256), (3, 144), (5, 130), (), (300,), (128,), (0, 7), (6, 1), (2, 3, 5, 7), (2, 3, 144))
SKIP = 5  # the place of `skip` among the arguments


def arguments(
    moments=("ratio8", "log8"), master="bf16+8", shapes=SHAPES, grad_dtype=None, device="cpu", group_size=128, seed=0
):
    """Arguments of `reference`, positional, for fresh states."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    group = {"moments": moments, "group_size": group_size, "master": "auto" if master == "fp32" else master}
    states = [init_state(p, group) for p in params]
    assert ("remainder" in states[0]) == (REMAINDER_DTYPE[master] is not None)
    tensors = [state[name] for name in states[0] for state in states]
    scalars = (torch.tensor(1e-2, device=device), torch.tensor(0.5, device=device), torch.tensor(False, device=device))
    grads = gradients(params, 0, grad_dtype)
    keys, firsts = list(range(7, 7 + len(shapes))), [3 * i for i in range(len(shapes))]
    return [params, grads, tensors, *scalars, 0.9, 0.95, 1e-8, 0.1, *moments, master, group_size, keys, firsts]


def gradients(params, step, dtype=None):
    """Gradients over many octaves, with zeros, a constant group, an all-zero row and values too small to square."""
    generator = torch.Generator().manual_seed(100 + step)
    result = []
    for p in params:
        g = torch.randn(p.shape, generator=generator) * torch.exp2(torch.randint(-12, 4, p.shape, generator=generator))
        if g.dim() > 1 and g.numel():
            g[0] = 0.0
            g[-1, ..., -1] = 0.0
            g.view(g.shape[0], -1)[1, :4] *= 1e-22
        if g.shape == (128,):
            g[:] = 0.25
        result.append(g.to(p.device, dtype or p.dtype))
    return result


def run(implementation, args, steps=2 if INTERPRETED else 3):
    """Step copies of the arguments a few times; returns every mutated tensor."""
    args = copy.deepcopy(args)
    dtype = args[1][0].dtype
    for step in range(steps):
        args[1] = gradients(args[0], step, dtype)
        implementation(*args)
    return [*args[0], *args[2]]


def tensors_of(args):
    """(all that stays from step to step, hyperparameters)."""
    params, states, hyper = args[0], args[2], Hyper(*args[6:14])
    master = "auto" if hyper.master == "fp32" else hyper.master
    group = {"moments": (hyper.m_code, hyper.v_code), "group_size": hyper.group_size, "master": master}
    lists = {name: states[i * len(params) :][: len(params)] for i, name in enumerate(state_fields(params[0], group))}
    return StepTensors(params, lists, *args[14:], hyper.group_size), hyper


def reference(*args):
    tensors, hyper = tensors_of(args)
    reference_step(tensors, args[1], *args[3:6], hyper)


def by_kernel(*args):
    step_one_by_one(args, args[SKIP])


def nothing(*args):
    """Instead of a step."""


def step_one_by_one(args, skip):
    """One step by the kernel, `skip` (T,) or 0-d."""
    (params, grads, _, lr, factor), (tensors, hyper) = args[:SKIP], tensors_of(args)
    table = Gradients([p.numel() for p in params], params[0].device)
    table.set([g.contiguous() for g in grads])
    scalars = Counters(tensors.states["step"]).take_step(lr, skip, hyper)
    Plan(tensors).launch(table.addresses, table.dtype, scalars, factor, skip, hyper)


def differing_bytes(left, right):
    """How many bytes differ, over all tensors."""
    total = 0
    for a, b in zip(left, right):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = (x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b))
        total += int((a != b).sum())
    return total
