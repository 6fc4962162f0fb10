"""What must hold in the corner cases of the optimizer's states, for every code, on a CPU and on a GPU.

Each test steps `overcoat.AdamW` itself and decodes what it stored. Tensors of more than 2^31 elements:
tests/kernels/gpu/test_adamw.py; shards of several processes: test_shards.py.
"""

import math

import pytest
import torch

from overcoat import AdamW, release_gradients
from overcoat.formats import from_groups, to_groups
from overcoat.formats.moments import MOMENT_CODES, Encoded, decode_first, decode_second
from tests.optim.harness import SHAPES, assert_same_bits, make_params, set_grads, snapshot, train

# Every code of m and every code of v at least once.
PAIRS = [
    ("sqrt8", "log8"),
    ("e4m3x", "e4m3x"),
    ("e4m3", "e4m3"),
    ("e5m2x", "e5m2x"),
    ("e5m2", "e5m2"),
    ("de8x", "de8x"),
    ("de8", "de8"),
    ("sqrt8", "sqrt8"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
]
K_ONE, K_MOST = 16, 255  # stored exponents, in sixteenths


def stepped(grad, device, moments, steps=1, dtype=torch.float32, **options):
    """A parameter of ones after some steps by one gradient, and its optimizer."""
    param = torch.nn.Parameter(torch.ones(grad.shape, device=device, dtype=dtype))
    optimizer = AdamW([param], lr=1e-2, moments=moments, **{"weight_decay": 0.0, **options})
    for _ in range(steps):
        param.grad = grad.to(device, dtype)
        optimizer.step()
    return param, optimizer


def decoded(param, optimizer):
    """(m, v) as FP32 in the parameter's shape."""
    state, group = optimizer.state[param], optimizer.param_groups[0]
    m_code, v_code = (MOMENT_CODES[name] for name in group["moments"])

    def groups(codes):
        codes = codes.reshape(1, -1) if codes.dim() < 2 else codes.flatten(1)
        raw = codes.view(torch.uint8) if codes.element_size() == 1 else codes
        return to_groups(raw, group["group_size"]).view(codes.dtype)

    def metadata(name, like):
        return state[name].view(like.shape[:2]) if name in state else None

    first, second = groups(state["exp_avg"]), groups(state["exp_avg_sq"])
    amax, exponent = metadata("exp_avg_amax", first), metadata("exp_avg_exponent", first)
    m = decode_first(Encoded(first, amax, exponent), m_code)
    v = decode_second(Encoded(second, metadata("exp_avg_sq_scale", second)), v_code)
    rows = (1, param.numel()) if param.dim() < 2 else (len(param), param.numel() // len(param))
    return from_groups(m, rows).view(param.shape), from_groups(v, rows).view(param.shape)


def exponents(param, optimizer):
    """Stored exponents of m and v, of expanded codes."""
    state, (m, v) = optimizer.state[param], optimizer.param_groups[0]["moments"]
    found = [state["exp_avg_exponent"].int()] if MOMENT_CODES[m].expanded else []
    return found + ([state["exp_avg_sq_scale"] & 0xFF] if MOMENT_CODES[v].expanded else [])


def tolerance(moments):
    """Of a group's maximum after three steps: BF16's rounding up or down, 2^-7 each time. The last counts in full, the
    ones before 0.9 * 0.19 / 0.271 and 0.81 * 0.1 / 0.271, 1.93 * 2^-7 in all; the 8-bit tree adds 0.007 each time: it
    has no -1, its nearest value is -0.993.
    """
    return 2**-5 if "de8" in moments[0] else 2**-6


# ---- groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", PAIRS)
def test_all_zero_groups_stay_zero_with_k_one(moments, device):
    grad = torch.zeros(3, 300)
    grad[1] = torch.randn(300, generator=torch.Generator().manual_seed(0))
    param, optimizer = stepped(grad, device, moments, steps=2)
    m, v = decoded(param, optimizer)
    for values in (m, v):
        assert values[0].count_nonzero() == values[2].count_nonzero() == 0
        assert values[1].count_nonzero() == 300
    for k in exponents(param, optimizer):
        assert (k.view(3, -1)[[0, 2]] == K_ONE).all()
        assert (k.view(3, -1)[1] > 0).all()
    assert torch.equal(param[[0, 2]], torch.ones_like(param[[0, 2]]))
    assert (param[1] != 1).all()


@pytest.mark.parametrize("moments", PAIRS)
def test_constant_groups_and_tails_of_one_element_are_exact(moments, device):
    """All elements of a group equal: each decodes to the stored maximum, with the largest exponent."""
    grad = torch.full((2, 257), 0.375)
    grad[1] = -3.0
    param, optimizer = stepped(grad, device, moments, steps=3)
    m, v = decoded(param, optimizer)
    for values, expected in ((m, 0.271 * grad), (v, (1 - 0.999**3) * grad.square())):
        assert all((group == group[:, :1]).all() for group in values.split(128, 1))
        torch.testing.assert_close(values.cpu(), expected, rtol=tolerance(moments), atol=0)
    for k in exponents(param, optimizer):
        assert (k == K_MOST).all()
    state = optimizer.state[param]
    if "exp_avg_amax" in state and "de8" not in moments[0]:
        stored = state["exp_avg_amax"].view(2, 3).float().repeat_interleave(128, 1)[:, :257]
        torch.testing.assert_close(m.abs(), stored, rtol=2e-6, atol=0)


@pytest.mark.parametrize("moments", PAIRS)
def test_a_positive_second_moment_is_never_stored_as_zero(moments, device):
    """Else the next step would divide by eps. Gradients over 16 decades in one group."""
    grad = 10.0 ** -torch.linspace(0, 16, 256).view(2, 128).flip(0)
    param, optimizer = stepped(grad, device, moments, eps=1e-20)
    _, v = decoded(param, optimizer)
    assert v.isfinite().all()
    assert (v > 0).all()
    before = param.detach().clone()
    param.grad = grad.to(device)
    optimizer.step()
    assert ((param - before).abs() < 0.1).all()


# ---- gradients that are not finite -----------------------------------------------------------------------


@pytest.mark.parametrize("moments", PAIRS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
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
    assert all(value.isfinite().all() for param in params for value in decoded_or_empty(param, optimizer))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_whose_sum_of_squares_overflows_are_stepped(dtype, clip, device):
    """1e18 in 10,000 elements: each square fits into FP32, their sum, 1e40, does not."""
    grads = [torch.full((50, 100), 1e18), torch.full((5000,), -1e18)]
    params = [torch.nn.Parameter(torch.ones_like(g, device=device, dtype=dtype)) for g in grads]
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.0)
    for p, g in zip(params, grads):
        p.grad = g.to(device, dtype)
    optimizer.step(clip_grad_norm=clip)
    assert optimizer.skipped_steps.item() == 0
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(1e20), rtol=2**-8, atol=0)
    for p, sign in zip(params, (-1, 1)):
        torch.testing.assert_close(p.float(), torch.full_like(p, 1 + sign * 1e-2).float(), rtol=2**-8, atol=0)
        m, v = decoded(p, optimizer)
        g = -sign * (1e18 if clip is None else 1e-2)
        torch.testing.assert_close(m, torch.full_like(m, 0.1 * g), rtol=2e-2, atol=0)
        torch.testing.assert_close(v, torch.full_like(v, 1e-3 * g * g), rtol=2e-2, atol=0)


def test_released_large_gradients_are_stepped(device):
    layer = torch.nn.Linear(100, 50, bias=False).to(device)
    optimizer = AdamW(layer.parameters())
    release_gradients(layer, optimizer)
    for _ in range(2):
        (layer(torch.ones(1, 100, device=device)) * 1e18).sum().backward()
        optimizer.step()
    assert optimizer.skipped_steps.item() == 0
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(5000**0.5 * 1e18), rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_own_square_overflows_is_skipped(clip, device):
    """v could not hold it: it would be inf ever after, and the weight stand still."""
    param, optimizer = stepped(torch.ones(4, 200), device, ("sqrt8", "log8"))
    before = snapshot([param], optimizer)
    param.grad = torch.ones(4, 200, device=device)
    param.grad[2, 3] = 2.0**64
    optimizer.step(clip_grad_norm=clip)
    assert_same_bits(before, snapshot([param], optimizer))
    assert optimizer.skipped_steps.item() == 1


def decoded_or_empty(param, optimizer):
    return decoded(param, optimizer) if param.numel() else ()


# ---- shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tails_scalars_and_empty_parameters_follow_torch(dtype, device):
    assert {(), (0, 7), (2, 0), (300,), (4, 200), (6, 3, 3, 5)} <= set(SHAPES)
    ours, theirs = make_params(dtype, device=device), make_params(device=device)
    for p, q in zip(ours, theirs):
        q.data.copy_(p)
    first = AdamW(ours, lr=1e-2, moments="fp32", master="bf16+16")
    second = torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(20):
        set_grads(ours, step)
        for p, q in zip(ours, theirs):
            q.grad = p.grad.float()
        first.step()
        second.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.float(), q, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=4e-6)


@pytest.mark.parametrize("moments", PAIRS)
def test_awkward_shapes_step_like_the_same_elements_in_one_row(moments, device):
    """Every element of every shape is stepped, none twice: against a plain vector of the same numbers, code FP32."""
    params = make_params(torch.float32, device=device)
    optimizer = AdamW(params, lr=1e-2, moments=moments, weight_decay=0.0)
    rows = [torch.nn.Parameter(p.detach().reshape(-1).clone()) for p in params]
    exact = AdamW(rows, lr=1e-2, moments="fp32", weight_decay=0.0)
    set_grads(params, 0)
    for p, row in zip(params, rows):
        row.grad = p.grad.reshape(-1)
    optimizer.step()
    exact.step()
    # From zero states the first update is exact, whatever the codes.
    assert_same_bits([p.detach().reshape(-1) for p in params], [row.detach() for row in rows])


@pytest.mark.parametrize("moments", PAIRS)
def test_non_contiguous_parameters_step_like_contiguous_ones(moments, device):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(72, 200, generator=generator).to(device)
    runs = []
    for layout in (lambda x: x.clone(), lambda x: x.t().contiguous().t()):
        param = torch.nn.Parameter(layout(start))
        optimizer = AdamW([param], lr=1e-2, moments=moments)
        for step in range(3):
            grad = torch.randn(72, 200, generator=torch.Generator().manual_seed(step)).to(device)
            param.grad = layout(grad)
            optimizer.step()
        runs.append(snapshot([param], optimizer))
    assert not param.is_contiguous()
    assert_same_bits(*runs)


# ---- the update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_uses_fresh_moments_and_decays_the_old_weight(decay, device):
    """From zero states all codes take the same first step, bit for bit: only what is stored is quantized."""
    grad = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    results = [stepped(grad, device, moments, weight_decay=decay)[0].detach() for moments in PAIRS]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    expected = torch.nn.Parameter(torch.ones(5, 300))
    reference = torch.optim.AdamW([expected], lr=1e-2, weight_decay=decay)
    expected.grad = grad
    reference.step()
    torch.testing.assert_close(results[0].cpu(), expected.detach(), rtol=1e-6, atol=1e-7)
