"""Inputs for the optimizer's kernel tests: awkward shapes, every code and master, states that have already moved."""

import copy

import torch

from overcoat.formats.masters import REMAINDER_DTYPE
from overcoat.kernels.adamw import Hyper, adamw_step_, find_weight_amax_
from overcoat.optim.state import init_state

# Whole groups, ragged rows (aligned to 16 and not), 0-d, 1-d with a tail, empty, one element per row.
SHAPES = ((4, 256), (3, 144), (5, 130), (), (300,), (128,), (0, 7), (6, 1), (2, 3, 5, 7))
LISTS = ("exp_avg", "exp_avg_amax", "exp_avg_exponent", "exp_avg_sq", "exp_avg_sq_scale", "remainder", "step")


def arguments(
    moments=("sqrt8", "log8"), master="bf16+8", shapes=SHAPES, grad_dtype=None, device="cpu", group_size=128, seed=0
):
    """Arguments of `adamw_step_`, positional, for fresh states."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    group = {"moments": moments, "group_size": group_size, "master": "auto" if master == "fp32" else master}
    states = [init_state(p, group) for p in params]
    assert ("remainder" in states[0]) == (REMAINDER_DTYPE[master] is not None)
    lists = [[state[name] for state in states if name in state] for name in LISTS]
    scalars = (torch.tensor(1e-2, device=device), torch.tensor(0.5, device=device), torch.tensor(False, device=device))
    grads = gradients(params, 0, grad_dtype)
    keys, firsts = list(range(7, 7 + len(shapes))), [3 * i for i in range(len(shapes))]
    return [params, grads, *lists, *scalars, 0.9, 0.95, 1e-8, 0.1, *moments, master, group_size, keys, firsts]


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


def run(implementation, args, steps=3):
    """Step copies of the arguments a few times; returns every mutated tensor."""
    args = copy.deepcopy(args)
    dtype = args[1][0].dtype
    for step in range(steps):
        args[1] = gradients(args[0], step, dtype)
        implementation(*args)
    return [tensor for tensors in (args[0], *args[2:9]) for tensor in tensors]


def reference(*args):
    adamw_step_.reference(*args)


def step_and_find(args, skip, tops):
    """One step by the kernel that finds the maxima of the parameters numbered in `tops`; returns the parameters."""
    from overcoat.kernels.gpu import adamw_launch, sum_squares

    params, grads, *lists = args[:9]
    tensors = dict(zip(("exp_avg", "amax", "exponent", "exp_avg_sq", "scale", "remainder", "step"), lists))
    plan = adamw_launch.Plan({"param": params, **tensors}, args[19], args[20], args[21], tops)
    gradients = sum_squares.Gradients([p.numel() for p in params], params[0].device)
    gradients.set([g.contiguous() for g in grads])
    plan.step(gradients, args[9], args[10], skip, Hyper(*args[12:20]))
    return params


def check_weight_amax(device):
    """The kernel finds what `find_weight_amax_` finds, in every kind of parameter, and steps as without it."""
    many_tiles = (16 if device == "cpu" else 96, 1024)  # on a GPU at once: they raise one maximum
    for moments, master, shapes in (
        (("sqrt8", "log8"), "bf16+8", (*SHAPES, many_tiles)),
        (("fp32", "fp32"), "fp32", SHAPES),
        (("e4m3x", "e4m3x"), "bf16", SHAPES),
    ):
        args = arguments(moments, master, shapes=shapes, device=device)
        expected = step_and_find(copy.deepcopy(args), args[11], {})
        numbers = [i for i, p in enumerate(args[0]) if i != 1]
        tops = {i: torch.full((), 1e9, device=device) for i in numbers}
        for round_ in range(2):
            stepped = step_and_find(args, args[11], tops)
            if round_ == 0:
                assert differing_bytes(stepped, expected) == 0
            for i in numbers:
                top = torch.zeros((), device=device)
                find_weight_amax_(top, stepped[i], args[11])
                assert torch.equal(tops[i], top), (moments, master, i, tops[i], top)
        # Skipped together, or one by one: what was known stays.
        known = {i: torch.full((), 5.0, device=device) for i in numbers}
        step_and_find(args, torch.tensor(True, device=device), known)
        assert all(top == 5.0 for top in known.values())
        skips = torch.arange(len(shapes), device=device) % 2 == 0
        stepped = step_and_find(args, skips, known)
        for i in numbers:
            expected_top = 5.0 if i % 2 == 0 else float(stepped[i].abs().max())
            assert float(known[i]) == expected_top, (i, known[i])
    # Not finite: as torch.amax has it.
    for bad in (torch.nan, torch.inf):
        args = arguments(device=device)
        args[0][0][1, 3] = bad
        tops = {0: torch.zeros((), device=device)}
        stepped = step_and_find(args, args[11], tops)
        torch.testing.assert_close(tops[0], stepped[0].abs().amax().float(), rtol=0, atol=0, equal_nan=True)


def differing_bytes(left, right):
    """How many bytes differ, over all tensors."""
    total = 0
    for a, b in zip(left, right):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = (x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b))
        total += int((a != b).sum())
    return total


def make(count=6, dtype=torch.bfloat16):
    params = [torch.nn.Parameter(torch.randn(64, 256, device="cuda", dtype=dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params
