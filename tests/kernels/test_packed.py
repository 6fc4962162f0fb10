"""Where documents begin, and attention within them, against masks of all pairs."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import attention as module
from overcoat.kernels.attention import PACKED, attention, attention_backward
from overcoat.kernels.packed import dense_mask, document_starts, is_starts
from tests.exact import BF16_DB, assert_close, combined_db
from tests.kernels.samples import normal

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


def test_attention_within_documents_equals_attention_of_each():
    """And its gradients: on the reference."""
    num_q, num_kv, width = 4, 2, 16
    qkv = normal(244, (num_q + 2 * num_kv) * width)
    do = normal(244, num_q * width, seed=1)
    starts = document_starts(position_ids(ROWS))
    o, lse = attention(qkv, starts, 4, num_q, num_kv, 0.3)
    gradients = torch.cat(attention_backward(do, qkv, o, lse, starts, 4, num_q, num_kv, 0.3), 1)
    for start, end in zip(starts.tolist(), starts[1:].tolist()):
        alone, its_lse = attention(qkv[start:end], None, 1, num_q, num_kv, 0.3)
        torch.testing.assert_close(o[start:end], alone)
        backward = (do[start:end], qkv[start:end], alone, its_lse, None, 1, num_q, num_kv, 0.3)
        torch.testing.assert_close(gradients[start:end], torch.cat(attention_backward(*backward), 1))


def test_the_rule():
    starts = document_starts(position_ids(ROWS))
    q = torch.empty(4, 32, 61, 128, dtype=torch.bfloat16, device="meta")
    assert module.chosen(q, starts) is PACKED
    assert module.chosen(q.half(), starts) is PACKED
    assert module.chosen(q.float(), starts) is module.EFFICIENT
    assert module.chosen(q[..., :20], starts) is None


def test_heads_of_a_token_lie_together(monkeypatch):
    """What the library's kernel is handed: (T, heads, D) over the fused buffer, log-sum-exp (heads, T)."""
    num_q, num_kv, width, tokens = 4, 2, 16, 244
    qkv, do = normal(tokens, (num_q + 2 * num_kv) * width), normal(tokens, num_q * width, seed=1)
    handed = {}

    def forward(q, k, v, *rest, scale):
        return q.clone(), torch.arange(num_q * tokens).view(num_q, tokens).float(), None, None, None

    def backward(do, q, k, v, o, lse, *rest, scale):
        handed.update(do=do, lse=lse, starts=rest[:2], longest=rest[2:4])
        return q.clone(), k.clone(), v.clone()

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    starts = document_starts(position_ids(ROWS))
    o, lse = module.forward_by(PACKED, qkv, starts, 4, num_q, num_kv, 0.5)
    gradients = module.backward_by(PACKED, do, qkv, o, lse, starts, 4, num_q, num_kv, 0.5)
    assert torch.equal(o, qkv[:, : num_q * width])
    assert torch.equal(torch.cat(gradients, 1), qkv)
    assert torch.equal(lse, torch.arange(num_q * tokens).view(num_q, 4, -1).transpose(0, 1).float())
    assert torch.equal(handed["do"].flatten(1), do)
    assert torch.equal(handed["lse"], torch.arange(num_q * tokens).view(num_q, tokens).float())
    assert all(each is starts for each in handed["starts"])
    assert handed["longest"] == (61, 61)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_q", "num_kv", "width"), [(4, 4, 128), (4, 2, 64), (8, 2, 256)])
def test_documents_on_a_gpu_equal_the_reference(num_q, num_kv, width):
    rows = [[400, 1, 111], [512], [7] * 73 + [1], [256, 256]]
    starts = document_starts(position_ids(rows)).cuda()
    qkv = normal(2048, (num_q + 2 * num_kv) * width).to("cuda", torch.bfloat16)
    do = normal(2048, num_q * width, seed=1).to("cuda", torch.bfloat16)
    heads = (starts, 4, num_q, num_kv, width**-0.5)
    o, lse = attention(qkv, *heads)
    expected_o, expected_lse = attention.reference(qkv, *heads)
    assert_close("o", expected_o, o, combined_db(*[BF16_DB] * 5))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    expected = attention_backward.reference(do, qkv, expected_o, expected_lse, *heads)
    for name, truth, value in zip(("dq", "dk", "dv"), expected, attention_backward(do, qkv, o, lse, *heads)):
        assert_close(name, truth, value, combined_db(*[BF16_DB] * 5) - 6)


@pytest.mark.gpu
def test_fp32_documents_on_a_gpu_take_the_mask_of_all_pairs():
    starts = document_starts(position_ids(ROWS)).cuda()
    qkv = normal(244, 8 * 16).cuda()
    o, _ = attention(qkv, starts, 4, 4, 2, 0.3)
    expected, _ = attention(qkv, dense_mask(starts, 4, 61), 4, 4, 2, 0.3)
    assert torch.equal(o, expected)
