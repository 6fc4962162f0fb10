"""Corner cases of AdamW's step, on a CPU and on a GPU: gradients that are not finite or huge, first steps, layouts.

Corner cases of codes: tests/formats; of the kernel: tests/kernels/test_adamw_step.py; of shards: test_sharding.py.
"""

import math

import pytest
import torch

from overcoat import AdamW
from overcoat.formats.moments import MOMENT_CODES
from tests.optim.harness import assert_same_bits, make_params, set_grads, snapshot, train

# Every code of m and every code of v.
PAIRS = [("sqrt8" if name == "log8" else name, name) for name in MOMENT_CODES]


@pytest.mark.parametrize("moments", PAIRS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_non_finite_gradient_is_counted_and_leaves_no_trace(moments, bad, device):
    params = make_params(torch.bfloat16, device=device)
    optimizer = AdamW(params, moments=moments)
    train(params, optimizer, 2)
    before = snapshot(params, optimizer)
    set_grads(params, 2)
    params[4].grad[1, 77] = bad
    optimizer.step(clip_grad_norm=1.0)
    assert_same_bits(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps.item() == 1
    train(params, optimizer, 1, first=3)
    assert optimizer.skipped_steps.item() == 1
    assert optimizer.state[params[4]]["step"].item() == 3
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("moments", ["8bit", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_whose_sum_of_squares_overflows_are_stepped(dtype, moments, clip, device):
    """1e18 in 10,000 elements: each square fits into FP32, their sum, 1e40, does not."""
    grads = [torch.full((50, 100), 1e18), torch.full((5000,), -1e18)]
    params = [torch.nn.Parameter(torch.ones_like(g, device=device, dtype=dtype)) for g in grads]
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.0, moments=moments)
    for _ in range(2):
        for p, g in zip(params, grads):
            p.grad = g.to(device, dtype)
        optimizer.step(clip_grad_norm=clip)
    assert optimizer.skipped_steps.item() == 0
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(1e20), rtol=2**-8, atol=0)
    for p, sign in zip(params, (-1, 1)):
        torch.testing.assert_close(p.float(), torch.full_like(p, 1 + sign * 2e-2).float(), rtol=2**-7, atol=0)
        if moments == "fp32":
            m, v, g = *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")), 1e18 if clip is None else 1e-2
            torch.testing.assert_close(m, torch.full_like(m, -sign * 0.19 * g), rtol=2e-2, atol=0)
            torch.testing.assert_close(v, torch.full_like(v, 0.001999 * g * g), rtol=2e-2, atol=0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_own_square_overflows_is_skipped(clip, device):
    """v could not hold it: it would be inf ever after, and the weight stand still."""
    (param,) = params = make_params(shapes=[(4, 200)], device=device)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    before = snapshot(params, optimizer)
    param.grad[2, 3] = 2.0**64
    optimizer.step(clip_grad_norm=clip)
    assert_same_bits(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("moments", PAIRS)
def test_first_steps_are_those_of_fp32_moments_whatever_codes_shapes_and_layouts(moments, device):
    """From zero states all take the same step, bit for bit: only what is stored is quantized. Every element is stepped,
    none twice: against plain vectors of the same numbers."""
    params = [*make_params(device=device), torch.nn.Parameter(make_params(shapes=[(200, 72)], device=device)[0].t())]
    assert not params[-1].is_contiguous()
    rows = [torch.nn.Parameter(p.detach().reshape(-1).clone()) for p in params]
    set_grads(params, 0)
    for p, row in zip(params, rows):
        row.grad = p.grad.reshape(-1)
    AdamW(params, lr=1e-2, moments=moments).step()
    AdamW(rows, lr=1e-2, moments="fp32").step()
    assert_same_bits([p.detach().reshape(-1) for p in params], [row.detach() for row in rows])
