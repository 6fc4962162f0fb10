"""Attention forward and backward against FP64 autograd: `pytest tests/kernels/test_attention.py`.

Causal, boolean and additive masks, grouped-query heads, queries that see nothing. FP32 inputs run the reference and are
held to FP32 rounding; BF16 inputs run the library's fused kernels on CUDA and are held to BF16's noise. Without a GPU
the rule that chooses among them is tested, and what they are called with as far as shapes tell.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import attention as fused
from overcoat.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    attention,
    attention_backward,
    backward_by,
    forward_by,
    heads_of,
)
from tests import exact
from tests.exact import BF16_DB, assert_close, assert_close_float32, combined_db, leaf
from tests.kernels.samples import normal

# batch, sequence, query heads, key/value heads, width
SHAPES = [(1, 1, 1, 1, 8), (2, 7, 4, 2, 24), (1, 61, 6, 1, 16), (3, 20, 2, 2, 32)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
MASKS = ["causal", "all", "window", "padded", "packed", "per head", "additive", "additive min", "bias"]
masks = pytest.mark.parametrize("kind", MASKS)


def make_mask(kind, shape, device, dtype=torch.float32):
    """None, or (B or 1, 1 or num_q, S, S). "padded" and its additive forms hide every key from some queries."""
    batch, sequence, num_q, _, _ = shape
    causal = torch.ones(sequence, sequence, dtype=torch.bool).tril()
    if kind == "causal":
        return None
    if kind == "all":
        return torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device)
    if kind == "window":
        mask = (causal & causal.t().roll(3, 0).logical_or(torch.eye(sequence, dtype=torch.bool)))[None, None]
    elif kind == "packed":
        document = torch.arange(sequence) // 5
        mask = (causal & (document[:, None] == document))[None, None]
    elif kind == "per head":
        random = torch.rand(batch, num_q, sequence, sequence, generator=torch.Generator().manual_seed(0)) < 0.5
        mask = random | torch.eye(sequence, dtype=torch.bool)
    else:
        # Left padding: row b hides its first b + 1 keys, so its first queries see nothing (with 1 token: all).
        start = torch.arange(batch)[:, None, None] + 1
        mask = (causal & (torch.arange(sequence) >= start)).unsqueeze(1)
        if kind == "additive":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        elif kind == "additive min":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        elif kind == "bias":
            distance = torch.arange(sequence)[:, None] - torch.arange(sequence)
            mask = (-0.3 * distance.abs()).to(dtype)[None, None]
    return mask.to(device)


def run(shape, kind, dtype, device):
    """(truth, got), each o, lse, dqkv by name."""
    batch, sequence, num_q, num_kv, width = shape
    scale = 0.7 * width**-0.5  # not the default
    qkv = (2 * normal(batch * sequence, (num_q + 2 * num_kv) * width)).to(device, dtype)
    do = normal(batch * sequence, num_q * width, seed=1).to(device, dtype)
    mask = make_mask(kind, shape, device, dtype)
    arguments = (mask, batch, num_q, num_kv, scale)

    truth = leaf(qkv)
    o = exact.attention(truth, *arguments)
    o.backward(do.double())
    if kind == "all":
        arguments = (None, *arguments[1:], False)
    got_o, got_lse = attention(qkv, *arguments)
    got = torch.cat(attention_backward(do, qkv, got_o, got_lse, *arguments), 1)
    assert got_o.dtype == got.dtype == dtype
    assert got_lse.dtype == torch.float32
    assert got_lse.shape == (batch, num_q, sequence)
    sizes = (num_q * width, num_kv * width, num_kv * width)
    names = ("o", "dq", "dk", "dv")
    return dict(zip(names, (o.detach(), *truth.grad.split(sizes, 1)))), dict(zip(names, (got_o, *got.split(sizes, 1))))


@shapes
@masks
def test_fp32_equals_fp64_autograd(shape, kind, device):
    truth, got = run(shape, kind, torch.float32, device)
    _, sequence, num_q, num_kv, width = shape
    # A score is a sum of `width` products (an error counts in the exponent, times the score, at most 2 * 2 * 4 * sqrt D
    # here), a probability's normaliser and o sums over `sequence`, dk and dv over the heads that share them as well.
    terms = 16 * width + 4 * sequence * num_q // num_kv
    largest = max(float(x.abs().max()) for name, x in truth.items() if name != "o")
    for name, x in truth.items():
        if float(x.abs().max()) < 1e-9 * largest or not x.any():  # one visible key: no gradient reaches q and k
            assert float(got[name].abs().max()) <= terms * 2.0**-24 * max(largest, 1.0), name
        else:
            assert_close_float32(name, x, got[name], terms)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: "-".join(map(str, s)))
@masks
def test_bf16_equals_fp64_autograd(shape, kind, device):
    """BF16 results: one rounding on the CPU; the fused kernels also round P, dS, o and P dP (4 more).

    o, rounded to BF16, enters dS = P (dP - D) through D, a difference that can be small against its terms: 6 dB.
    """
    truth, got = run(shape, kind, torch.bfloat16, device)
    for name, x in truth.items():
        sources = [BF16_DB] * (1 if name in ("o", "dv") and device.type == "cpu" else 5)
        batch, sequence = shape[:2]
        visible = x
        value = got[name]
        if kind in ("padded", "additive", "additive min") and device.type == "cuda" and name == "o":
            # The fused kernel gives padding's own rows the mean of v: nobody reads them.
            real = (torch.arange(sequence)[None] > torch.arange(batch)[:, None]).flatten()
            visible, value = x[real.to(device)], value[real.to(device)]
        assert_close(name, visible, value, combined_db(*sources) - (0 if name in ("o", "dv") else 6))


@pytest.mark.parametrize("kind", ["padded", "additive", "additive min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_query_that_sees_nothing_gets_zeros_and_gives_none(kind, dtype):
    """Not the sum of all values (which a max over tokens would then see), not NaN. CPU: CUDA's kernels differ."""
    shape = (2, 7, 4, 2, 24)
    truth, got = run(shape, kind, dtype, torch.device("cpu"))
    padding = [0, 7, 8]  # the first query of row 0, the first two of row 1
    for name in ("o", "dq"):
        assert truth[name][padding].count_nonzero() == 0
        assert got[name][padding].count_nonzero() == 0


@shapes
def test_log_sum_exp(shape, device):
    batch, sequence, num_q, num_kv, width = shape
    qkv = normal(batch * sequence, (num_q + 2 * num_kv) * width).to(device)
    _, lse = attention(qkv, None, batch, num_q, num_kv, 0.5)
    heads = qkv.double().view(batch, sequence, -1, width).transpose(1, 2)
    k = heads[:, num_q : num_q + num_kv].repeat_interleave(num_q // num_kv, 1)
    scores = 0.5 * heads[:, :num_q] @ k.transpose(-1, -2)
    future = torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)
    expected = scores.masked_fill(future, -torch.inf).logsumexp(-1)
    assert_close_float32("lse", expected, lse, width + sequence)


@pytest.mark.parametrize("kind", ["causal", "padded"])
def test_non_finite_input_reaches_the_output(kind, device):
    qkv = normal(7, 3 * 16).to(device)
    qkv[3, -1] = torch.nan
    o, _ = attention(qkv, make_mask(kind, (1, 7, 1, 1, 16), device), 1, 1, 1, 0.25)
    assert o[3:, -1].isnan().all()


# ---- the library's kernels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [16, 21])
@pytest.mark.parametrize("kind", ["padded", "per head", "additive", "bias", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_additive_mask(kind, sequence, dtype):
    """The values, rows that the memory-efficient kernel can read 16 bytes at a time, one copy for all heads."""
    batch, num_q = 2, 4
    mask = make_mask("per head" if kind == "transposed" else kind, (batch, sequence, num_q, 2, 8), "cpu")
    mask = mask.transpose(-1, -2) if kind == "transposed" else mask
    rows = fused.additive(mask, dtype, batch, num_q, sequence)
    if mask.dtype == torch.bool:
        expected = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    else:
        expected = mask.to(dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows, expected.expand(batch, num_q, sequence, sequence))
    assert rows.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in rows.stride()[:-1])
    assert mask.shape[1] != 1 or rows.stride(1) == 0
    everything = rows.untyped_storage().nbytes() // dtype.itemsize
    assert everything == mask.numel() // sequence * (sequence + -sequence % 16)
    padding = rows.as_strided((everything // rows.stride(-2), -sequence % 16), (rows.stride(-2), 1), sequence)
    assert padding.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["padded", "additive", "additive min", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_hides_a_key_from_cudnn_is_finite(kind, dtype):
    mask = make_mask(kind, (2, 16, 4, 2, 8), "cpu", dtype)
    rows = fused.additive(mask, torch.bfloat16, 2, 1, 16, hidden=fused.CUDNN_HIDDEN)
    visible = mask if mask.dtype == torch.bool else mask > fused.CUDNN_HIDDEN
    assert (rows[~visible.expand_as(rows)] == torch.tensor(fused.CUDNN_HIDDEN).bfloat16()).all()
    values = torch.zeros(()) if mask.dtype == torch.bool else mask
    assert torch.equal(rows[visible.expand_as(rows)], values.bfloat16().expand_as(rows)[visible.expand_as(rows)])
    assert (rows.float() * 1.4427).isfinite().all()


HOPPER, ADA, BLACKWELL = (9, 0), (8, 9), (10, 0)


@pytest.mark.parametrize(
    ("expected", "dtype", "sequence", "width", "masked", "capability"),
    [
        (CUDNN, torch.bfloat16, 2048, 128, False, HOPPER),
        (CUDNN, torch.float16, 2048, 64, False, HOPPER),
        (FLASH, torch.bfloat16, 2048, 128, False, ADA),
        (CUDNN, torch.bfloat16, 2048, 256, False, HOPPER),
        (CUDNN, torch.bfloat16, 2048, 256, True, HOPPER),
        (FLASH, torch.bfloat16, 2048, 256, False, BLACKWELL),
        (CUDNN, torch.bfloat16, 2048, 128, False, BLACKWELL),
        (FLASH, torch.bfloat16, 1, 128, False, HOPPER),
        (CUDNN, torch.bfloat16, 2048, 128, True, HOPPER),
        (EFFICIENT, torch.bfloat16, 2048, 128, True, ADA),
        (EFFICIENT, torch.bfloat16, 2048 + 64, 128, True, HOPPER),
        (EFFICIENT, torch.bfloat16, 2048 + 1, 128, True, HOPPER),
        (EFFICIENT, torch.float32, 2048, 128, True, HOPPER),
        (EFFICIENT, torch.float16, 2048, 128, True, HOPPER),
        (EFFICIENT, torch.float32, 2048, 128, False, HOPPER),
        (None, torch.bfloat16, 2048, 100, False, HOPPER),
        (None, torch.bfloat16, 2048, 264, False, HOPPER),
        (None, torch.float64, 2048, 128, False, HOPPER),
    ],
)
def test_the_rule(expected, dtype, sequence, width, masked, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(fused, "_cudnn_width", fused._cudnn_width.__wrapped__)
    q = torch.empty(4, 32, sequence, width, dtype=dtype, device="meta")
    mask = torch.empty(4, 1, sequence, sequence, dtype=torch.bool, device="meta") if masked else None
    assert fused.chosen(q, mask) is expected


def test_the_rule_where_one_result_each_time_is_asked_for(monkeypatch):
    monkeypatch.setattr(fused, "_cudnn_width", lambda device: 256)
    q = torch.empty(4, 32, 2048, 128, dtype=torch.bfloat16, device="meta")
    torch.use_deterministic_algorithms(True)
    try:
        assert fused.chosen(q, None) is FLASH
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert fused.chosen(q, None) is FLASH


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "kind", "shape"),
    [
        *((CUDNN, kind, (2, 256, 4, 4, 128)) for kind in ("causal", "packed", "per head", "bias")),
        *((CUDNN, kind, (2, 384, 4, 2, 64)) for kind in ("packed", "bias")),
        *((CUDNN, kind, (2, 256, 4, 2, 256)) for kind in ("causal", "packed", "per head", "bias")),
        (CUDNN, "causal", (2, 192, 4, 2, 192)),
        *((kernel, "causal", (2, 192, 4, 2, 64)) for kernel in (CUDNN, FLASH, EFFICIENT)),
        *((kernel, "causal", (2, 256, 4, 4, 128)) for kernel in (FLASH, EFFICIENT)),
        *((kernel, "all", (2, 257, 4, 4, 72)) for kernel in (CUDNN, FLASH, EFFICIENT)),
        *((EFFICIENT, kind, (2, 192, 4, 2, 64)) for kind in ("packed", "per head")),
        *((EFFICIENT, kind, (2, 256, 4, 4, 128)) for kind in ("packed", "per head")),
    ],
    ids=lambda value: {id(CUDNN): "cudnn", id(FLASH): "flash", id(EFFICIENT): "efficient"}.get(id(value), str(value)),
)
def test_every_library_kernel_equals_the_reference(kernel, kind, shape):
    if kernel is CUDNN and torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("cuDNN's kernel is chosen on Hopper and newer")
    batch, sequence, num_q, num_kv, width = shape
    qkv = normal(batch * sequence, (num_q + 2 * num_kv) * width).to("cuda", torch.bfloat16)
    do = normal(batch * sequence, num_q * width, seed=1).to("cuda", torch.bfloat16)
    heads = (make_mask(kind, shape, "cuda", torch.bfloat16), batch, num_q, num_kv, width**-0.5)
    if kind == "all":
        heads = (None, *heads[1:], False)
    parts, rest = heads_of(qkv, batch, num_q, num_kv), (heads[0], *heads[4:])
    o, lse = forward_by(kernel, parts, *rest)
    expected_o, expected_lse = attention.reference(qkv, *heads)
    assert_close("o", expected_o, o, combined_db(*[BF16_DB] * 5))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    expected = attention_backward.reference(do, qkv, expected_o, expected_lse, *heads)
    for name, truth, value in zip(("dq", "dk", "dv"), expected, backward_by(kernel, do, parts, o, lse, *rest)):
        assert_close(name, truth, value, combined_db(*[BF16_DB] * 5) - 6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["padded", "additive", "additive min"])
def test_a_query_that_sees_nothing_leaves_the_others_alone(kind):
    """By the rule's kernel, in a row whose loss does not count: finite, and no gradient from it nor to it."""
    shape = batch, sequence, num_q, num_kv, width = 3, 256, 4, 2, 64
    qkv = normal(batch * sequence, (num_q + 2 * num_kv) * width).to("cuda", torch.bfloat16)
    do = normal(batch * sequence, num_q * width, seed=1).to("cuda", torch.bfloat16)
    unseen = (torch.arange(sequence)[None] <= torch.arange(batch)[:, None]).flatten().cuda()
    do[unseen] = 0
    heads = (make_mask(kind, shape, "cuda", torch.bfloat16), batch, num_q, num_kv, width**-0.5)
    o, lse = attention(qkv, *heads)
    if torch.cuda.get_device_capability() >= HOPPER:
        assert fused.chosen(qkv.view(batch, sequence, -1, width).transpose(1, 2), heads[0]) is CUDNN
    expected_o, expected_lse = attention.reference(qkv, *heads)
    assert o.isfinite().all()
    assert_close("o", expected_o[~unseen], o[~unseen], combined_db(*[BF16_DB] * 5))
    expected = attention_backward.reference(do, qkv, expected_o, expected_lse, *heads)
    for name, truth, value in zip(("dq", "dk", "dv"), expected, attention_backward(do, qkv, o, lse, *heads)):
        assert_close(name, truth, value, combined_db(*[BF16_DB] * 5) - 6)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [(CUDNN, "causal"), (FLASH, "causal"), (EFFICIENT, "causal"), (EFFICIENT, "padded"), (EFFICIENT, "per head")],
    ids=["cudnn", "flash", "efficient", "efficient padded", "efficient per head"],
)
def test_shapes_of_the_library_kernels(kernel, kind, shape):
    batch, sequence, num_q, num_kv, width = shape
    mask = make_mask(kind, shape, "meta")
    qkv = torch.empty(batch * sequence, (num_q + 2 * num_kv) * width, dtype=torch.bfloat16, device="meta")
    heads = heads_of(qkv, batch, num_q, num_kv)
    o, lse = forward_by(kernel, heads, mask, 0.5)
    assert (o.shape, o.dtype) == ((batch * sequence, num_q * width), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((batch, num_q, sequence), torch.float32)
    gradients = backward_by(kernel, torch.empty_like(o), heads, o, lse, mask, 0.5)
    assert [x.shape for x in gradients] == [(batch * sequence, n * width) for n in (num_q, num_kv, num_kv)]
    assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in gradients)
