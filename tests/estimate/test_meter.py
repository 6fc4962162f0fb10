"""Living bytes, op by op: what is counted, when it is freed, by which name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overcoat.block.loss import linear_cross_entropy
from overcoat.estimate.meter import ALIGNMENT, LibraryAttention, Meter, aligned, workspace
from overcoat.kernels.attention import attention_backward

KIB = 256  # FP32 elements


def totals(meter):
    return meter.account(["all"] * meter.count).values[:, 0].tolist()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_allocations_and_frees_in_their_order(device):
    with Meter() as meter:
        a = torch.empty(KIB, device=device)
        b = a + a
        del a
        c = b.view(16, 16)[2:]  # no storage of its own
        b.mul_(2.0)
        del b, c
    assert totals(meter) == [0, 1024, 2048, 1024, 0]
    assert meter.alive() == set()


def test_sizes_are_the_allocators():
    assert [aligned(size) for size in (0, 1, 512, 513)] == [0, ALIGNMENT, 512, 1024]
    with Meter() as meter:
        kept = torch.empty((), device="meta")
    assert totals(meter) == [0, 512]
    del kept


def test_what_was_there_before_is_left_out():
    weight = torch.empty(KIB, device="meta")
    with Meter() as meter:
        meter.leave_out([weight])
        view = weight.view(2, -1)
        result = view.t().contiguous()
    assert totals(meter) == [0, 1024]
    del result


def test_resized_storages():
    """As FSDP2 frees and takes the memory of gathered parameters, those of an earlier step too."""
    earlier, left_out = torch.empty(KIB), torch.empty(KIB)
    earlier.untyped_storage().resize_(0)
    meter = Meter()
    meter.leave_out([left_out])
    with meter.watch_resizes(), meter:
        tensor = torch.empty(KIB)
        tensor.untyped_storage().resize_(0)
        earlier.untyped_storage().resize_(2048)
        tensor.untyped_storage().resize_(1024)
        left_out.untyped_storage().resize_(0)
        del tensor, earlier
    assert totals(meter) == [0, 1024, 0, 2048, 3072, 2048, 0]
    torch.empty(KIB).untyped_storage().resize_(0)  # watched no more
    assert meter.count == 3


def test_what_autograd_keeps_lives_until_the_backward():
    x = torch.empty(KIB, device="meta", requires_grad=True)
    with Meter() as meter:
        meter.leave_out([x])
        y = (x * 2).exp().sum()
        waiting = meter.alive()
        y.backward()
        del y
    sizes = totals(meter)
    assert len(waiting) == 2  # exp's result, and y
    assert sizes[-1] == 1024  # x.grad
    forward = [0, 1024, 2048, 1024, 1536]  # x * 2 is let go once exp has its own result
    assert sizes[: len(forward)] == forward


def test_phases_and_the_fullest_moment():
    with Meter() as meter:
        meter.mark("first")
        a = torch.empty(4 * KIB, device="meta")
        del a
        meter.mark("second")
        b = torch.empty(KIB, device="meta")
        meter.tag(b, "kept")
    names = [meter.tags.get(number, "other") for number in range(meter.count)]
    account = meter.account(names)
    assert account.phases() == [("first", 4096, 0), ("second", 1024, 1024)]
    assert account.at_peak() == ("first", {"kept": 0, "other": 4096})
    assert meter.place(1) == "second"
    del b


def test_a_meter_that_is_stopped_counts_no_more():
    with Meter() as meter:
        a = torch.empty(KIB, device="meta")
    meter.stop()
    del a
    assert totals(meter) == [0, 1024]


@pytest.mark.parametrize("answer", [True, False])
def test_values_of_meta_tensors_are_answered(answer):
    x = torch.empty(3, device="meta")
    with Meter(answer):
        assert bool((x == 0).all()) is answer


def test_the_loss_is_seen_from_inside():
    """A chunk of logits, the largest thing that the head's op allocates, is no result of it."""
    tokens, hidden, vocabulary, chunk = 64, 32, 512, 16
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Meter() as meter:
        meter.leave_out([x, weight, labels])
        loss = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk)
    results = tokens * hidden * 2 + vocabulary * hidden * 2
    assert max(totals(meter)) >= results + chunk * vocabulary * 2
    assert max(totals(meter)) < results + 2 * chunk * vocabulary * 2
    del loss


def test_workspace_of_attentions_backward():
    """FP32 dq and one number per query and head; what an H200 allocated for cuDNN at B4 S4096 32 x 128 heads."""
    tokens, heads, width = 4 * 4096, 32, 128
    do = torch.empty(tokens, heads * width, dtype=torch.bfloat16, device="meta")
    args = (do, None, None, None, None, 4, heads, heads, 0.1)
    assert workspace(attention_backward.overload, args) == 270_532_608
    mask = torch.empty(4, 1, 256, 256, dtype=torch.bool, device="meta")
    assert workspace(attention_backward.overload, (*args[:4], mask, *args[5:])) == 270_532_608 + mask.numel() * 2
    assert workspace(torch.ops.aten.add.Tensor, args) == 0


def test_grouped_query_heads_take_more():
    """What an H200 allocated at B4 S2048 for Llama-3-8B's heads, and for Qwen2.5-7B's, to 2 MiB."""
    for heads, kv_heads, measured in ((32, 8, 270_533_120), (28, 4, 235_799_552)):
        do = torch.empty(4 * 2048, heads * 128, dtype=torch.bfloat16, device="meta")
        args = (do, None, None, None, None, 4, heads, kv_heads, 0.1)
        assert workspace(attention_backward.overload, args) == pytest.approx(measured, abs=2**21)


def test_packed_sequences_leave_rows_between_documents():
    """What an H200 allocated at B4 S2048 for 27 documents (attention.jsonl), to 2 MiB; in FP32 a mask is made."""
    starts = torch.empty(28, dtype=torch.int32, device="meta")
    for kv_heads, measured in ((32, 193_987_584), (8, 327_599_104)):
        do = torch.empty(4 * 2048, 32 * 128, dtype=torch.bfloat16, device="meta")
        args = (do, None, None, None, starts, 4, 32, kv_heads, 0.1)
        assert workspace(attention_backward.overload, args) == pytest.approx(measured, abs=2**21)
    args = (do.float(), None, None, None, starts, 4, 32, 32, 0.1)
    pairs = 4 * 2048 * 2048
    accumulators = 4 * do.numel() + 4 * do.shape[0] * 32
    assert workspace(attention_backward.overload, args) == accumulators + pairs + 4 * pairs


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_does_not_hold_the_scores(masked):
    batch, heads, sequence, width = 2, 4, 1024, 64
    q, k, v = (
        torch.empty(batch, heads, sequence, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    mask = torch.empty(batch, 1, sequence, sequence, dtype=torch.bool, device="meta") if masked else None
    with Meter() as meter, LibraryAttention():
        meter.leave_out([q, k, v])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    kept = sum(meter._sizes[number] for number in meter.alive())
    bias = 2 * mask.numel() if masked else 0
    assert o.shape == q.shape
    # o, log-sum-exp (padded in rows of 32 for the masked kernel) and a few bytes of random state.
    assert kept - bias - o.nbytes == pytest.approx(batch * heads * sequence * 4, abs=4096)
    assert batch * heads * sequence**2 * 2 > 3 * kept


def test_attention_of_real_tensors_is_left_alone():
    q = torch.randn(1, 2, 8, 16)
    with LibraryAttention():
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(o, F.scaled_dot_product_attention(q, q, q, is_causal=True))
