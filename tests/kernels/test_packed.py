"""Where documents begin, and attention within them, against masks of all pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

from overcoat.estimate.workspaces import workspace
from overcoat.kernels.attention import (
    EFFICIENT,
    PACKED,
    _kernel_and_mask,
    attention,
    attention_backward,
    backward_by,
    chosen,
    dense_mask,
    document_starts,
    forward_by,
    heads_of,
    is_starts,
    windowed,
)
from tests import exact
from tests.exact import BF16_DB, assert_close, assert_close_float32, combined_db
from tests.kernels.samples import normal
from tests.nightly import mostly_nightly

# Lengths of documents by row: one only, of one token, many, whole rows.
ROWS = [[61], [1, 60], [5, 1, 1, 20, 34], [30, 31]]


def position_ids(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def test_starts_of_position_ids():
    starts = document_starts(position_ids(ROWS))
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 61, 62, 122, 127, 128, 129, 149, 183, 213, 244]
    assert is_starts(starts)
    assert document_starts(torch.arange(7, 12).repeat(2, 1)).tolist() == [0, 5, 10]  # rows that begin elsewhere


def test_the_mask_of_all_pairs():
    mask = dense_mask(document_starts(position_ids(ROWS)), 4, 61)
    for row, lengths in enumerate(ROWS):
        expected = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
        assert torch.equal(mask[row, 0], expected)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_within_documents_equals_attention_of_each(causal):
    """And its gradients: on the reference."""
    num_q, num_kv, width = 4, 2, 16
    qkv = normal(244, (num_q + 2 * num_kv) * width)
    do = normal(244, num_q * width, seed=1)
    starts = document_starts(position_ids(ROWS))
    o, lse = attention(qkv, starts, 4, num_q, num_kv, 0.3, causal)
    gradients = torch.cat(attention_backward(do, qkv, o, lse, starts, 4, num_q, num_kv, 0.3, causal), 1)
    for start, end in zip(starts.tolist(), starts[1:].tolist()):
        alone, its_lse = attention(qkv[start:end], None, 1, num_q, num_kv, 0.3, causal)
        torch.testing.assert_close(o[start:end], alone)
        backward = (do[start:end], qkv[start:end], alone, its_lse, None, 1, num_q, num_kv, 0.3, causal)
        torch.testing.assert_close(gradients[start:end], torch.cat(attention_backward(*backward), 1))


def test_the_rule():
    starts = document_starts(position_ids(ROWS))
    q = torch.empty(4, 32, 61, 128, dtype=torch.bfloat16, device="meta")
    assert chosen(q, starts) is PACKED
    assert chosen(q.half(), starts) is PACKED
    assert chosen(q.float(), starts) is EFFICIENT
    assert chosen(q[..., :20], starts) is None
    assert chosen(q[:, :, :1], starts) is EFFICIENT


def test_heads_of_a_token_lie_together(monkeypatch):
    """What the library's kernel is handed: (T, heads, D) over the fused buffer, log-sum-exp (heads, T)."""
    num_q, num_kv, width, tokens = 4, 2, 16, 244
    qkv, do = normal(tokens, (num_q + 2 * num_kv) * width), normal(tokens, num_q * width, seed=1)
    handed = {}

    def forward(q, k, v, *rest, scale):
        return q.clone(), torch.arange(num_q * tokens).view(num_q, tokens).float(), None, None, None

    def backward(do, q, k, v, o, lse, *rest, scale):
        handed.update(do=do, lse=lse, starts=rest[:2], longest=rest[2:4], causal=rest[5])
        return q.clone(), k.clone(), v.clone()

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    starts = document_starts(position_ids(ROWS))
    o, lse = forward_by(PACKED, heads_of(qkv, 4, num_q, num_kv), starts, 0.5)
    gradients = backward_by(PACKED, do, heads_of(qkv, 4, num_q, num_kv), o, lse, starts, 0.5, False)
    assert torch.equal(o, qkv[:, : num_q * width])
    assert torch.equal(torch.cat(gradients, 1), qkv)
    assert torch.equal(lse, torch.arange(num_q * tokens).view(num_q, 4, -1).transpose(0, 1).float())
    assert torch.equal(handed["do"].flatten(1), do)
    assert torch.equal(handed["lse"], torch.arange(num_q * tokens).view(num_q, tokens).float())
    assert all(each is starts for each in handed["starts"])
    assert handed["longest"] == (61, 61)
    assert handed["causal"] is False


# ---- against FP64, and on a GPU against the masked kernels -----------------------------------------------------------

# Sequence, documents' lengths by row: no tile's multiple, one token, many of them, whole tiles, one row of 1.
PACKINGS = {
    "ragged": (61, ROWS),
    "tiles": (512, [[400, 1, 111], [512], [7] * 73 + [1], [256, 256]]),
    "one row": (300, [[128, 1, 42, 129]]),
    "single tokens": (5, [[1] * 5, [2, 3]]),
    "rows of one token": (1, [[1], [1], [1]]),
}
packings = pytest.mark.parametrize("packing", PACKINGS)
# query heads, key/value heads, width: each that the kernels are compiled for (32, 64, 96, 128, 192, 256), some between
HEADS = [(4, 4, 128), (4, 2, 64), (8, 2, 256), (3, 1, 8), (2, 2, 72), (6, 2, 192), (4, 1, 96)]
heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))


def compare(packing, heads, dtype, device):
    """(truth, got), each o, dq, dk, dv by name; FP64 autograd of attention under the mask of all pairs."""
    sequence, rows = PACKINGS[packing]
    num_q, num_kv, width = heads
    tokens, scale = sequence * len(rows), 0.7 * width**-0.5
    qkv = (2 * normal(tokens, (num_q + 2 * num_kv) * width)).to(device, dtype)
    do = normal(tokens, num_q * width, seed=1).to(device, dtype)
    starts = document_starts(position_ids(rows)).to(device)
    shape = (len(rows), num_q, num_kv, scale)
    truth = exact.leaf(qkv)
    o = exact.attention(truth, dense_mask(starts, len(rows), sequence), *shape)
    o.backward(do.double())
    got_o, lse = attention(qkv, starts, *shape)
    assert (lse.dtype, lse.shape) == (torch.float32, (len(rows), num_q, sequence))
    got = attention_backward(do, qkv, got_o, lse, starts, *shape)
    assert all(x.dtype == dtype and x.is_contiguous() for x in (got_o, *got))
    sizes = (num_q * width, num_kv * width, num_kv * width)
    names = ("o", "dq", "dk", "dv")
    return dict(zip(names, (o.detach(), *truth.grad.split(sizes, 1)))), dict(zip(names, (got_o, *got)))


def held(truth, got, noise, width):
    """To `noise` (dB) of several roundings, of which those of probabilities and their gradients move a whole head.

    Where one key is visible no gradient reaches q and k.
    """
    largest = max(float(x.abs().max()) for name, x in truth.items() if name != "o")
    for name, x in truth.items():
        if float(x.abs().max()) < 1e-9 * largest:
            assert float(got[name].abs().max()) <= 0.02 * largest, name
        else:
            assert_close(name, x, got[name], combined_db(*[noise] * 5) - (0 if name in ("o", "dv") else 6), 0, width)


@pytest.mark.parametrize(
    ("packing", "heads"),
    mostly_nightly(  # on a CPU all widths are one code, and large ones take seconds
        itertools.product(PACKINGS, HEADS),
        [(packing, heads) for packing in PACKINGS for heads in HEADS if packing != "tiles" or heads[2] <= 72],
    ),
    ids=str,
)
def test_documents_equal_fp64_autograd(packing, heads, device):
    held(*compare(packing, heads, torch.bfloat16, device), BF16_DB, heads[2])


@packings
@pytest.mark.parametrize("heads", [(4, 2, 16), (2, 2, 20)], ids=str)  # of 20: no fused kernel takes it
def test_fp32_documents_equal_fp64_autograd(packing, heads, device):
    truth, got = compare(packing, heads, torch.float32, device)
    terms = 16 * heads[2] + 4 * PACKINGS[packing][0] * heads[0] // heads[1]
    largest = max(float(x.abs().max()) for x in truth.values())
    for name, x in truth.items():
        if float(x.abs().max()) < 1e-9 * largest:
            assert float(got[name].abs().max()) <= terms * 2.0**-24 * largest, name
        else:
            assert_close_float32(name, x, got[name], terms)


@pytest.mark.gpu
@packings
def test_fp16_documents_equal_fp64_autograd(packing):
    held(*compare(packing, (4, 2, 64), torch.float16, torch.device("cuda")), BF16_DB, 64)


def on_gpu(num_q, num_kv, width, rows=PACKINGS["tiles"][1]):
    """qkv, do, starts, and (batch, num_q, num_kv, scale)."""
    tokens = sum(map(sum, rows))
    qkv = normal(tokens, (num_q + 2 * num_kv) * width).to("cuda", torch.bfloat16)
    do = normal(tokens, num_q * width, seed=1).to("cuda", torch.bfloat16)
    return qkv, do, document_starts(position_ids(rows)).cuda(), (len(rows), num_q, num_kv, width**-0.5)


@pytest.mark.gpu
@heads
def test_documents_equal_the_masked_kernel(heads):
    """Log-sum-exp too, which the backward of one kernel may get from another's forward."""
    qkv, do, starts, shape = on_gpu(*heads)
    parts, scale = heads_of(qkv, *shape[:3]), shape[3]
    mask = dense_mask(starts, *parts[0].shape[::2])
    o, lse = forward_by(PACKED, parts, starts, scale)
    expected_o, expected_lse = forward_by(EFFICIENT, parts, mask, scale)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    assert_close("o", expected_o, o, combined_db(*[BF16_DB] * 6))
    got = backward_by(PACKED, do, parts, expected_o, expected_lse, starts, scale)
    expected = backward_by(EFFICIENT, do, parts, expected_o, expected_lse, mask, scale)
    for name, truth, value in zip(("dq", "dk", "dv"), expected, got):
        assert_close(name, truth, value, combined_db(*[BF16_DB] * 8) - 6)


@pytest.mark.gpu
def test_deterministic_algorithms_give_the_same_twice():
    qkv, do, starts, shape = on_gpu(4, 2, 128)
    torch.use_deterministic_algorithms(True)
    try:
        o, lse = attention(qkv, starts, *shape)
        first, second = (attention_backward(do, qkv, o, lse, starts, *shape) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv", [32, 8])
@pytest.mark.parametrize("length", [64, 300, 2048])
def test_what_the_backward_allocates_is_what_an_estimate_says(num_kv, length):
    rows = [[length] * (2048 // length) + [2048 % length] * (2048 % length > 0)] * 4
    qkv, do, starts, shape = on_gpu(32, num_kv, 128, rows)
    o, lse = attention(qkv, starts, *shape)
    attention_backward(do, qkv, o, lse, starts, *shape)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = attention_backward(do, qkv, o, lse, starts, *shape)
    measured = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in gradients)
    expected = workspace(attention_backward, (do, qkv, o, lse, starts, *shape))
    assert expected == pytest.approx(measured, abs=8 * 2**20)  # a copy of lse, and what the allocator does not split


def test_only_causal_attention_has_a_window():
    """FlashAttention's bounds would hide what comes after a query, which the reference shows."""
    starts, q = document_starts(position_ids(ROWS)), torch.empty(4, 32, 61, 128, dtype=torch.bfloat16, device="meta")
    assert _kernel_and_mask(q, starts, True, 0.0, 24) == (windowed(24), starts)
    assert _kernel_and_mask(q, starts, False, 0.0, 24) == (PACKED, starts)
    assert _kernel_and_mask(q, starts, True, 0.0, 61) == (PACKED, starts)
    for causal in (True, False):  # kernels of FP32 know no `starts`
        kernel, mask = _kernel_and_mask(torch.empty(4, 2, 61, 64), starts, causal, 0.0, 0)
        assert kernel is EFFICIENT
        assert torch.equal(mask, dense_mask(starts, 4, 61, causal))


WINDOWS = [(4, 2, 64, 24), (4, 2, 128, 1), (4, 1, 256, 130), (16, 16, 72, 64), (4, 2, 128, 5000)]


def test_the_reference_sees_a_window_as_the_mask_that_holds_it():
    """In rows and in documents; and where a mask of all pairs comes, a window changes nothing."""
    rows = PACKINGS["tiles"][1]
    qkv, do = normal(sum(map(sum, rows)), 8 * 16), normal(sum(map(sum, rows)), 4 * 16, seed=1)
    starts, shape = document_starts(position_ids(rows)), (len(rows), 4, 2, 0.25)
    sequence = len(qkv) // len(rows)
    for mask in (starts, None):
        same = starts if mask is not None else torch.arange(0, len(qkv) + 1, sequence, dtype=torch.int32)
        seen = dense_mask(same, len(rows), sequence)
        seen &= torch.arange(sequence)[:, None] - torch.arange(sequence) < 24
        o, lse = attention(qkv, seen, *shape)
        gradients = attention_backward(do, qkv, o, lse, seen, *shape)
        for given in (mask, seen):
            again = attention(qkv, given, *shape, True, 0.0, 24)
            assert all(torch.equal(*pair) for pair in zip((o, lse), again))
            again = attention_backward(do, qkv, o, lse, given, *shape, True, 0.0, 24)
            assert all(torch.equal(*pair) for pair in zip(gradients, again))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_q", "num_kv", "width", "window"), WINDOWS)
def test_windows_equal_the_reference(num_q, num_kv, width, window, dtype, packed):
    qkv, do, starts, shape = on_gpu(num_q, num_kv, width)
    (qkv, do), last = (qkv.to(dtype), do.to(dtype)), (True, 0.0, window)
    mask = starts if packed else None
    o, lse = attention(qkv, mask, *shape, *last)
    expected_o, expected_lse = attention.reference(qkv, mask, *shape, *last)
    assert_close("o", expected_o, o, combined_db(*[BF16_DB] * 5))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    expected = attention_backward.reference(do, qkv, expected_o, expected_lse, mask, *shape, *last)
    got = attention_backward(do, qkv, o, lse, mask, *shape, *last)
    for name, truth, value in zip(("dq", "dk", "dv"), expected, got):
        if window == 1 and name != "dv":  # its probability is 1, whatever q and k are: nothing but rounding
            assert value.float().norm() <= 1e-2 * do.float().norm()
        else:
            assert_close(name, truth, value, combined_db(*[BF16_DB] * 5) - 6)
