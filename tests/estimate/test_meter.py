"""Living bytes, op by op: what is counted, when it is freed, by which name."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from overcoat import Recipe
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.meter import Meter
from overcoat.estimate.times import Work
from overcoat.estimate.workspaces import LibraryAttention, aligned, workspace
from overcoat.kernels.attention import attention_backward
from overcoat.kernels.experts import quantize_experts
from overcoat.models.shapes import Model, sizes

KIB = 256  # FP32 elements


def totals(meter):
    return list(itertools.accumulate((size for _, size in meter.events), initial=0))


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_allocations_and_frees_in_their_order(device):
    """Until the meter is stopped; without what was there before."""
    weight = torch.empty(KIB, device=device)
    with Meter() as meter:
        meter.leave_out([weight])
        a = torch.empty(KIB, device=device)
        b = a + weight.view(2, -1).view(-1)
        del a
        c = b.view(16, 16)[2:]  # no storage of its own
        b.mul_(2.0)
        del b, c
        assert meter.alive() == set()
        scalar = torch.empty((), device=device)
        meter.stop()
        del scalar
    assert totals(meter) == [0, 1024, 2048, 1024, 0, 512]
    assert [aligned(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_what_is_remembered_of_ops_changes_nothing():
    """Twice the same ops: those that write, return views or change shapes run again, or as if they did."""

    def step():
        a = meta(16, 32)
        b = a.t().contiguous().mul_(2.0).add_(a.t())
        c = torch.zeros_like(b).unsqueeze_(0).copy_(b)
        d, e = torch.empty(16, device="meta").resize_(8), torch.ones(3)
        largest, _ = c.max(-1)
        return [a, b, c, d, e * 2, largest, *b.split(16), a.expand(2, 16, 32) + 1]

    counted = []
    for work in (None, Work(), Work()):
        with Meter(work=work) as meter:
            found = step()
        counted.append((totals(meter), [(x.shape, x.stride(), x.dtype, x.device) for x in found], work))
        storages = {x.untyped_storage()._cdata for x in found}
        assert len(storages) == len(found) - 2  # the halves are b
        meter.stop()
    assert counted[0][:2] == counted[1][:2]
    assert counted[1] == counted[2]


def test_the_gradient_of_an_indexed_tensor_is_made_once():
    """Under a dispatch mode autograd makes it twice."""
    x = meta(KIB, dtype=torch.float32, requires_grad=True)
    index = meta(2 * KIB, dtype=torch.int64)
    with Meter() as meter:
        y = x[index]
        meter.mark("backward")
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert dx.shape == x.shape
        meter.stop()
    assert max(totals(meter)) == 2 * 2048 + 1024


def test_ops_inside_ops_are_not_counted():
    """One calls another in its reference, the first time it runs; what is remembered of others changes nothing."""
    config = Model("LlamaConfig", sizes(128, 256, 2, 4, 2, 512)).config()
    setup = Setup(Recipe(head="fp8"))

    def predictions():
        return [Predictor(config).predict(batch, length, setup).phases for batch in (1, 2) for length in (100, 512)]

    assert predictions() == predictions()


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


# ---- attention's workspaces, as an H200 allocated them at 4 rows, head width 128 ------------------------------------


def attention_workspace(do, mask, heads, kv_heads):
    return workspace(attention_backward, (do, None, None, None, mask, 4, heads, kv_heads, 0.1))


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "documents", "measured", "tolerance"),
    [
        (4096, 32, 32, 0, 270_532_608, 0),  # FP32 dq and one number per query and head
        (2048, 32, 8, 0, 270_533_120, 2**21),  # Llama-3-8B's heads
        (2048, 28, 4, 0, 235_799_552, 2**21),  # Qwen2.5-7B's
        (2048, 32, 32, 27, 193_987_584, 2**21),  # rows between documents (attention.jsonl)
        (2048, 32, 8, 27, 327_599_104, 2**21),
    ],
)
def test_workspace_of_attentions_backward(length, heads, kv_heads, documents, measured, tolerance):
    starts = meta(documents + 1, dtype=torch.int32) if documents else None
    found = attention_workspace(meta(4 * length, heads * 128), starts, heads, kv_heads)
    assert found == pytest.approx(measured, abs=tolerance)


def test_workspace_of_masks():
    """An additive copy of a mask; in FP32 one is made of documents."""
    do, mask = meta(4 * 4096, 32 * 128), meta(4, 1, 256, 256, dtype=torch.bool)
    assert attention_workspace(do, mask, 32, 32) == attention_workspace(do, None, 32, 32) + mask.numel() * 2
    do, pairs = meta(4 * 2048, 32 * 128, dtype=torch.float32), 4 * 2048 * 2048
    accumulators = 4 * do.numel() + 4 * do.shape[0] * 32
    assert attention_workspace(do, meta(28, dtype=torch.int32), 32, 32) == accumulators + pairs + 4 * pairs
    assert workspace(torch.ops.aten.add.Tensor, ()) == 0


def test_transposed_weights_of_experts_are_copied():
    w, amax = meta(8, 256, 512), meta(8, dtype=torch.float32)
    counted = []
    for weight in (w, w.transpose(1, 2)):
        with Meter(work=(work := Work())) as meter:
            meter.leave_out([w, amax])
            quantize_experts(weight, amax, True)
            meter.stop()
        counted.append((max(totals(meter)), work[False, "bytes"]))
    (plain, moved), (transposed, more) = counted
    assert (transposed - plain, more - moved) == (w.nbytes, 2 * w.nbytes)


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_does_not_hold_the_scores(masked):
    batch, heads, sequence, width = 2, 4, 1024, 64
    q, k, v = (meta(batch, heads, sequence, width, requires_grad=True) for _ in range(3))
    mask = meta(batch, 1, sequence, sequence, dtype=torch.bool) if masked else None
    with Meter() as meter, LibraryAttention():
        meter.leave_out([q, k, v])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    kept = totals(meter)[-1]
    bias = 2 * mask.numel() if masked else 0
    assert o.shape == q.shape
    # o, log-sum-exp (padded in rows of 32 for the masked kernel) and a few bytes of random state.
    assert kept - bias - o.nbytes == pytest.approx(batch * heads * sequence * 4, abs=4096)
    assert batch * heads * sequence**2 * 2 > 3 * kept
