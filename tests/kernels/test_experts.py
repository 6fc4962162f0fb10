"""Kernels around the GEMMs of experts against their references, and what these promise."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import encode_groups
from overcoat.kernels import experts as ops
from overcoat.kernels.grouped import Routing, route
from tests.kernels.compare import DEVICE, DTYPES, FORMATS, assert_equal, awkward
from tests.kernels.samples import amax, normal

SHAPES = [(2, 16, 16), (3, 130, 48), (5, 176, 144), (2, 18, 528)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.kernel
def test_weights(shape, dtype):
    """One scale for each expert, one of which is all zeros; the operand of dgrad holds the same codes."""
    w = awkward(shape[0] * shape[1], shape[2], dtype).view(shape)
    w[0] = 0.0
    top = ops.expert_amax.reference(w)
    assert torch.equal(ops.expert_amax.kernel(w), top)
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    for how in ((False,), (True,), (False, True), (True, True)):
        expected = ops.quantize_experts.reference(w, top, *how)
        assert_equal(ops.quantize_experts.kernel(w, top, *how), expected)
        assert_equal(ops.quantize_experts.kernel(turned, top, *how), expected)


@pytest.mark.kernel
def test_transposed_codes_are_the_codes():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2, 32, 1)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    turned = ops.transpose_experts(codes.view(torch.float8_e4m3fn)).view(torch.uint8)
    assert torch.equal(turned.transpose(1, 2), codes)


def slots_of(tokens, chosen, experts):
    index = normal(tokens, experts - 1, seed=2).topk(chosen).indices.to(DEVICE) + 1
    return Routing(*route(index, experts, 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "biased", "limit", "shift"), [(True, True, 0.5, 1.0), (False, False, 2.0, 0.0), (True, True, 0.0, 1.0)]
)
@pytest.mark.kernel
def test_limits(gated, biased, limit, shift, dtype):
    """In place, with a bit for what was cut, whose gradient is zero then; values that are not finite stay so."""
    routing = slots_of(70, 2, 4)
    z = awkward(len(routing.tokens), 272, dtype)
    z[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    bias = awkward(4, 272, dtype) if biased else None
    given = (bias, routing.experts, routing.tokens, gated, limit, shift)
    ours, theirs = z.clone(), z.clone()
    bits, expected = ops.limit_.kernel(ours, *given), ops.limit_.reference(theirs, *given)
    assert_equal((ours, bits), (theirs, expected))
    assert (ours[routing.tokens < 0] == 0).all()
    if limit:
        dz = torch.ones_like(z)
        ops.mask_.kernel(dz, bits)
        assert 0 < dz.mean() < 1
        wanted = torch.ones_like(z)
        ops.mask_.reference(wanted, bits)
        assert torch.equal(dz, wanted)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (7, 100), (70, 272)])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES[::2])
@pytest.mark.kernel
def test_gather_t(tokens, columns, fmt, dtype):
    routing, x = slots_of(tokens, 2, 4), awkward(tokens, columns, dtype)
    weights = torch.where(
        routing.tokens < 0, 0.0, awkward(len(routing.tokens), 1, torch.float32)[:, 0].abs().clamp(max=9)
    )
    top = amax(x) * weights.amax()
    given = (x, routing.tokens, weights, top, fmt)
    assert_equal(ops.gather_t.kernel(*given), ops.gather_t.reference(*given))
    codes = x.float().clamp(-400, 400).to(torch.float8_e4m3fn)
    given = (codes, routing.tokens, None, None, "e4m3")
    assert_equal(ops.gather_t.kernel(*given), ops.gather_t.reference(*given))


@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (7, 100), (70, 2500)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.kernel
def test_combine(tokens, columns, dtype):
    routing = slots_of(tokens, 3, 5)
    y = awkward(len(routing.tokens), columns, dtype)
    for weights in (None, normal(tokens, 3, seed=6).to(DEVICE)):
        assert_equal(ops.combine.kernel(y, routing.slots, weights), ops.combine.reference(y, routing.slots, weights))


@pytest.mark.parametrize(("code", "group_size", "parts"), [("sqrt8", 128, 2), ("e4m3", 16, 2), ("int8", 64, 1)])
@pytest.mark.parametrize(("slots", "width"), [(64, 100), (70, 688)])
@pytest.mark.kernel
def test_expert_gradient(slots, width, code, group_size, parts):
    kept = encode_groups(normal(slots * parts, width).to(DEVICE, torch.bfloat16), code, group_size)
    codes, maxima = kept.data.view(slots, -1), kept.scale.view(slots, parts, -1)
    g, weights = normal(slots, width, seed=1).to(DEVICE, torch.bfloat16), normal(slots, seed=2).to(DEVICE)
    given = (g, codes, maxima, weights, "silu" if parts == 2 else "relu2", code, group_size)
    (dh, sums), (expected, expected_sums) = ops.expert_gradient.kernel(*given), ops.expert_gradient.reference(*given)
    assert_equal(dh, expected)
    assert ((sums - expected_sums).abs() <= 1e-5 * expected_sums.abs().mean() * width**0.5).all()
