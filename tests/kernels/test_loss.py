"""Cross-entropy without logits against FP64, and its kernels against it.

Where the products run in BF16 the truth starts from the same BF16 logits; what is left is the rounding of dx, of the
result and of what dW accumulates. FP8 has its own limit, from its operands.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overcoat.kernels import loss as ops
from tests.exact import BF16_DB, assert_close, assert_close_float32, combined_db
from tests.kernels.compare import DEVICE, DTYPES, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal

HIDDEN = 96
VOCABULARIES = (33, 512, 1001)
Z = 1e-2


def make(tokens, vocabulary, dtype=torch.bfloat16, device="cpu"):
    """hidden, weight and labels with some ignored; logits of about +-3."""
    hidden = normal(tokens, HIDDEN, dtype=dtype).to(device)
    weight = (normal(vocabulary, HIDDEN, seed=1) * (3 / HIDDEN**0.5)).to(device, dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(device)
    labels[tokens // 2 : tokens // 2 + tokens // 5] = -100
    return hidden, weight, labels


def head(hidden, weight, labels, z_loss=0.0, fmt=None, chunk_tokens=None, wanted=(True, True)):
    return ops.linear_cross_entropy(hidden, weight, labels, -100, z_loss, fmt, chunk_tokens, *wanted)[:3]


def logits(hidden, weight, chunk_tokens):
    """The head's logits: the same products, so the same roundings."""
    size = chunk_tokens or len(hidden)
    products = ops._Head(hidden, weight, None, size)
    rows = [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
    return torch.cat([products.logits(part).clone() for part in rows])


def truth(x, labels, z_loss=0.0, softcap=0.0):
    """Losses and the gradient of their sum, by torch's own functions in FP64."""
    x = x.detach().double().requires_grad_()
    y = softcap * torch.tanh(x / softcap) if softcap else x
    losses = F.cross_entropy(y, labels, reduction="none") + z_loss * y.logsumexp(1).square() * (labels != -100)
    losses.sum().backward()
    return losses.detach(), x.grad


@pytest.mark.parametrize("tokens", [1, 7, 61])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, 0.0), (Z, 0.0), (0.0, 4.0), (Z, 30.0)])
def test_loss_and_gradient_in_place(tokens, vocabulary, z_loss, softcap, device):
    hidden, weight, labels = make(tokens, vocabulary, torch.float32, device)
    x = hidden @ weight.t()
    expected, dx = truth(x, labels, z_loss, softcap)
    alone, nothing = ops.cross_entropy_(x, labels, -100, z_loss, False, softcap)
    losses, largest = ops.cross_entropy_(x, labels, -100, z_loss, True, softcap)
    assert torch.equal(alone, losses)
    assert nothing.numel() == 0
    assert torch.equal(largest, x.abs().amax(1))
    assert_close_float32("losses", expected, losses, 32)
    assert_close_float32("dx", dx, x, 64)
    assert x[labels == -100].count_nonzero() == 0


@pytest.mark.parametrize("label", [512, -1])
def test_a_label_outside_the_vocabulary_is_nan(label, device):
    hidden, weight, labels = make(7, 512, device=device)
    labels[2] = label
    total, dhidden, dweight = head(hidden, weight, labels)
    assert total.isnan()
    assert dhidden.isnan().any(1).tolist() == [index == 2 for index in range(7)]
    assert dweight.isnan().all()


def test_scale_is_rounded_once(device):
    """A third in BF16 is off by 2^-10: products with it would be, all in one direction."""
    x = normal(50, 40, dtype=torch.bfloat16).to(device)
    factor = torch.tensor(1 / 3, device=device)
    expected = (x.double() * factor.double()).bfloat16()
    ops.scale_(x, factor)
    assert torch.equal(x, expected)
    assert not torch.equal(expected, normal(50, 40, dtype=torch.bfloat16).to(device) * factor.bfloat16())


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(1, 2), (61, 77), (3, 4096)])
@pytest.mark.parametrize("factor", [1 / 3, 1e30, float("nan")])
def test_multiply_kernel(shape, factor):
    for dtype in DTYPES:
        x, scale = awkward(*shape, dtype), torch.tensor(factor)
        expected, scale = x.clone(), scale.to(x.device)
        ops.multiply_.reference(expected, scale)
        ops.multiply_.kernel(x, scale)
        assert_equal(x, expected)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 16, 60])
def test_head_in_bf16(vocabulary, chunk_tokens, device):
    hidden, weight, labels = make(61, vocabulary, device=device)
    total, dhidden, dweight = head(hidden, weight, labels, chunk_tokens=chunk_tokens)
    expected, dx = truth(logits(hidden, weight, chunk_tokens), labels)
    assert_close_float32("loss", expected.sum(), total, 256)
    noise = combined_db(BF16_DB, BF16_DB)  # of dx and of the result
    # The rounding of one large element of dx, p - 1 at the label, is in a whole row of either gradient.
    assert_close("dhidden", dx @ weight.double(), dhidden, noise, sharing=HIDDEN)
    chunks = -(-61 // (chunk_tokens or 61))
    # One rounding a chunk, half of them on average of sums that are smaller than the last.
    noise = combined_db(BF16_DB, *[BF16_DB] * ((chunks + 1) // 2))
    assert_close("dweight", dx.t() @ hidden.double(), dweight, noise, sharing=HIDDEN)


def test_head_in_fp32_is_exact(device):
    hidden, weight, labels = make(61, 1001, torch.float32, device)
    total, dhidden, dweight = head(hidden, weight, labels, Z, chunk_tokens=16)
    expected, dx = truth(hidden.double() @ weight.double().t(), labels, Z)
    assert_close_float32("loss", expected.sum(), total, 256)
    assert_close_float32("dhidden", dx @ weight.double(), dhidden, 256)
    assert_close_float32("dweight", dx.t() @ hidden.double(), dweight, 256)


@pytest.mark.parametrize("fmt", [None, "e5m2"])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_gradients_not_asked_for_change_nothing_else(fmt, chunk_tokens, device):
    hidden, weight, labels = make(61, 1001, device=device)
    arguments = (hidden, weight, labels, 0.0, fmt, chunk_tokens)
    total, dhidden, dweight = head(*arguments)
    for want_hidden, want_weight in ((True, False), (False, True), (False, False)):
        part = head(*arguments, (want_hidden, want_weight))
        assert torch.equal(part[0], total)
        assert torch.equal(part[1], dhidden) if want_hidden else part[1].shape == (0,)
        assert torch.equal(part[2], dweight) if want_weight else part[2].shape == (0,)


def test_no_tokens(device):
    hidden, weight, labels = make(8, 33, device=device)
    total, dhidden, dweight = head(hidden[:0], weight, labels[:0])
    assert total == 0
    assert dhidden.shape == (0, HIDDEN)
    assert dweight.count_nonzero() == 0
    assert dweight.shape == weight.shape


# ---- kernels -----------------------------------------------------------------------------------------------------

# Cross-entropy to FP32 rounding.

# Rows of one tile, of several and of part of one; vocabularies of GPT-2, Llama 3 and Qwen on a GPU.
SHAPES = [(1, 1), (3, 33), (7, 130), (5, 4097), (2, 4096)]
SHAPES += [] if INTERPRETED else [(300, 50257), (1024, 128256), (777, 151936)]
# One step between neighbouring numbers, relative; and the smallest step of all.
STEP = {torch.bfloat16: (2.0**-7, 0.0), torch.float16: (2.0**-10, 2.0**-24), torch.float32: (2.0**-22, 0.0)}


def row_logits(tokens: int, vocabulary: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    """(tokens, vocabulary), rows `extra` elements apart, with values that a running maximum must survive."""
    generator = torch.Generator().manual_seed(tokens)
    x = 3 * torch.randn(tokens, vocabulary, generator=generator)
    x[:, ::7] += torch.arange(x[:, ::7].shape[1]) * (20.0 / vocabulary)  # the maximum moves on and on
    x[-1] -= 100.0
    x[0, 1:] -= torch.inf
    return torch.nn.functional.pad(x, (0, extra)).to(DEVICE, dtype)[:, :vocabulary]


def row_labels(tokens: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    y = torch.randint(0, vocabulary, (tokens,), generator=generator)
    y[0] = 0  # the only finite logit
    y[tokens // 2 : tokens // 2 + tokens // 4] = -100
    return y.to(DEVICE)


def assert_same(ours, theirs, y, softcap=0.0):
    """Losses and gradients of both agree: log-sum-exp to a few roundings of |x| <= 130, p to the same relatively.

    With a soft cap p is multiplied by 1 - tanh(x / cap)^2, whose error is a few roundings of 1, however small it is.
    """
    noise = (8 + 4 * 130) * 2.0**-23
    (losses, dx), (expected, expected_dx) = ours, theirs
    torch.testing.assert_close(losses, expected, rtol=noise, atol=noise)
    relative, smallest = STEP[dx.dtype]
    smallest += 2.0**-21 if softcap else 0.0
    a, b = dx.float(), expected_dx.float()
    p = b.scatter_add(1, y.clamp(min=0)[:, None], torch.ones_like(b[:, :1]))
    wrong = (a - b).abs() > relative * b.abs() + noise * p.abs() + smallest
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} gradients differ, by {(a - b).abs().max()}"


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "z_loss", "extra"), [(torch.bfloat16, 0.0, 0), (torch.float32, 1e-3, 31), (torch.float16, 1e-3, 0)]
)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_loss_and_gradient_kernel(shape, dtype, z_loss, extra, softcap):
    y = row_labels(*shape)
    ours, theirs = row_logits(*shape, dtype, extra), row_logits(*shape, dtype)
    alone, nothing = ops.cross_entropy_.kernel(ours, y, -100, z_loss, False, softcap)
    assert nothing.numel() == 0
    assert torch.equal(ours, theirs), "without a gradient the logits stay"
    losses, largest = ops.cross_entropy_.kernel(ours, y, -100, z_loss, True, softcap)
    expected, _ = ops.cross_entropy_.reference(theirs, y, -100, z_loss, True, softcap)
    assert torch.equal(alone, losses)
    assert torch.equal(largest, ours.abs().amax(1).float())
    assert_same((losses, ours), (expected, theirs), y, softcap)
    assert ours[y == -100].count_nonzero() == 0


@pytest.mark.kernel
def test_small_losses_keep_their_digits():
    """A probability of nearly one: what is left of lse - x is the sum of the others, to FP32's rounding of lse."""
    x = torch.full((4, 5000), -20.0, device=DEVICE)
    x[:, 7] = torch.tensor([0.0, 5.0, 20.0, 60.0])
    y = torch.full((4,), 7, device=DEVICE)
    expected = torch.log1p(4999 * torch.exp(-20.0 - x[:, 7].double()))
    losses, _ = ops.cross_entropy_.kernel(x, y, -100, 0.0, False)
    assert ((losses.double() - expected).abs() <= 2.0**-21 * x[:, 7].double().clamp(min=1.0)).all()


@pytest.mark.kernel
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 4999])
def test_not_finite_reaches_loss_and_gradient(bad, place):
    x = row_logits(4, 5000, torch.bfloat16)
    x[2, place] = bad
    y = torch.tensor([0, 1, 3, 2], device=DEVICE)
    losses, largest = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    assert not losses[2].isfinite()
    assert not x[2].isfinite().all()
    assert losses[3].isfinite()
    assert largest.isfinite().tolist() == [True, True, False, True]


@pytest.mark.kernel
@pytest.mark.parametrize("label", [5000, -1, 2**40])
def test_a_label_outside_the_vocabulary_is_nan_and_reads_nothing(label):
    x = row_logits(4, 5000, torch.bfloat16)
    y = torch.tensor([0, 1, label, 2], device=DEVICE)
    losses, largest = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    assert losses.isnan().tolist() == [False, False, True, False]
    assert x[2].isnan().all()
    assert largest.isnan().tolist() == [False, False, True, False]


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="4 GB, and a minute")
def test_more_than_two_to_the_31_logits():
    """Offsets beyond 32 bits: the last row of a chunk of 2^31 and some logits."""
    tokens, vocabulary = 16900, 128256
    x = torch.zeros(tokens, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    x[-1, 3] = 10.0
    y = torch.full((tokens,), -100, device=DEVICE)
    y[-1] = 3
    expected = x[-1:].clone()
    losses, largest = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    theirs, _ = ops.cross_entropy_.reference(expected, y[-1:], -100, 0.0, True)
    assert_same((losses[-1:], x[-1:]), (theirs, expected), y[-1:])
    assert losses[:-1].count_nonzero() == 0
    assert largest[:-1].count_nonzero() == 0
    assert largest[-1] == x[-1].abs().max()
