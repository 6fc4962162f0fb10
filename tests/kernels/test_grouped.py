"""Slots of tokens and their experts, and the GEMMs over them against FP64."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.kernels import grouped
from overcoat.kernels.experts import gather_t
from overcoat.kernels.grouped import Routing
from tests.kernels.compare import DEVICE, INTERPRETED
from tests.kernels.samples import normal


def routed(tokens, chosen, experts, rows, device="cpu", seed=0):
    """Uneven: expert 1 gets no token, expert 0 all tokens."""
    scores = normal(tokens, experts, seed=seed)
    scores[:, 0] += 99.0
    scores[:, 1] -= 99.0
    index = scores.topk(chosen).indices.to(device)
    return index, Routing(*grouped.route(index, experts, rows))


@pytest.mark.parametrize(("tokens", "chosen", "experts", "rows"), [(1, 1, 2, 64), (50, 3, 9, 64), (300, 2, 4, 128)])
def test_each_pair_has_a_slot_of_its_expert(tokens, chosen, experts, rows, device):
    index, routing = routed(tokens, chosen, experts, rows, device)
    assert len(routing.tokens) == grouped.tile_count(tokens * chosen, experts, rows) * rows
    assert routing.slots.unique().numel() == tokens * chosen
    assert torch.equal(
        routing.tokens[routing.slots.long()], torch.arange(tokens, device=device)[:, None].expand_as(index).int()
    )
    assert torch.equal(routing.experts[(routing.slots // rows).long()].long(), index)
    assert (routing.tokens >= 0).sum() == tokens * chosen
    first = routing.bounds.tolist()
    for e in range(experts):
        tiles = -(-int((index == e).sum()) // rows)
        assert first[e + 1] - first[e] == tiles
        assert (routing.experts[first[e] : first[e + 1]] == e).all()
    assert (routing.experts[first[-1] :] == experts).all()


def test_most_tiles_are_enough():
    """All tokens one, or each expert one more than full tiles."""
    for counts in ([0, 640, 0], [65, 65, 65], [1, 1, 1], [64, 1, 129]):
        index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
        routing = Routing(*grouped.route(index, len(counts), 64))
        assert int(routing.bounds[-1]) == sum(-(-n // 64) for n in counts) <= len(routing.experts)


@pytest.mark.parametrize(("experts", "rows"), [(3, 64), (64, 64), (128, 128), (130, 64)])
def test_pairs_of_tiles(experts, rows):
    for pairs in range(1000):
        found = grouped.pair_count(grouped.tile_count(pairs, experts, rows), experts, rows)
        assert found == pairs if pairs < experts or pairs % rows == 0 else abs(found - pairs) < rows


def products(tokens, chosen, experts, rows, n, k, fmt):
    """Operands of a GEMM over slots, and its result in FP64."""
    _, routing = routed(tokens, chosen, experts, rows)
    a = quantize_tensor(normal(tokens, k, seed=3), FLOAT8[fmt])
    b = torch.stack([quantize_tensor(normal(n, k, seed=10 + e)).data.view(torch.uint8) for e in range(experts)])
    b, scales = b.view(torch.float8_e4m3fn), normal(experts, seed=4).abs()
    token, rows_of = routing.tokens.long(), routing.experts.repeat_interleave(routing.rows).long()
    wide = torch.where(token[:, None] >= 0, a.data.double()[token.clamp(min=0)], 0.0)
    weight = torch.cat((b.double() * scales[:, None, None], b.new_zeros(1, n, k).double()))
    expected = torch.stack([weight[e] @ row for e, row in zip(rows_of.tolist(), wide)]) * a.scale.double()
    return routing, a, b, scales, expected


SIZES = [(1, 1, 2, 64, 16, 16), (40, 2, 4, 64, 48, 144), (140, 2, 3, 128, 272, 256)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.kernel
def test_grouped_gemm(size, fmt):
    """Products of FP8 numbers are exact: what differs is the order of sums, and on a GPU the accumulators' 14 bits."""
    routing, a, b, scales, expected = products(*size, fmt)
    routing = Routing(*[x.to(DEVICE) for x in routing])
    rest = routing.experts, a.scale.to(DEVICE), scales.to(DEVICE), torch.float32
    found = grouped.grouped_gemm.kernel(a.data.to(DEVICE), routing.tokens, b.to(DEVICE), *rest)
    close(found, expected)
    assert (found[routing.tokens < 0] == 0).all()
    scale = torch.rand(len(a.data), generator=torch.Generator().manual_seed(1)) + 0.5
    each = grouped.grouped_gemm.kernel(
        a.data.to(DEVICE), routing.tokens, b.to(DEVICE), rest[0], scale.to(DEVICE), *rest[2:]
    )
    close(each, expected / a.scale * torch.cat((scale, scale[:1] * 0))[routing.tokens.long().cpu()][:, None])
    straight = gather_t(a.data.to(DEVICE), routing.tokens, None, None, fmt)[0].view(torch.uint8).t().contiguous()
    again = grouped.grouped_gemm.kernel(straight.view(a.data.dtype), None, b.to(DEVICE), *rest)
    assert torch.equal(found, again)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.kernel
def test_grouped_wgrad(size):
    tokens, chosen, experts, rows, n, k = size
    _, routing = routed(tokens, chosen, experts, rows)
    a, b = (quantize_tensor(normal(tokens, c, seed=c), FLOAT8[fmt]) for c, fmt in ((n, "e5m2"), (k, "e4m3")))
    a_t, b_t = (gather_t(x.data, routing.tokens, None, None, fmt)[0] for x, fmt in ((a, "e5m2"), (b, "e4m3")))
    of = routing.experts.repeat_interleave(rows)
    expected = torch.stack([a_t.double()[:, of == e] @ b_t.double()[:, of == e].t() for e in range(experts)])
    found = grouped.grouped_wgrad.kernel(
        a_t.to(DEVICE),
        b_t.to(DEVICE),
        routing.bounds.to(DEVICE),
        rows,
        torch.tensor(1.0, device=DEVICE),
        torch.float32,
        chosen > 1,
    )
    close(found, expected)
    assert (found[1] == 0).all()


def close(found, expected):
    """To the bits of accumulation: on a GPU 14 of a partial sum's; the interpreter's products are rounded to FP16."""
    error = (found.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < (2.0**-10 if not INTERPRETED else 2.0**-9), float(error)
