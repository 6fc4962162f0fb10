"""The kernels of kernels/gpu/loss.py against their references: `scale_` bit for bit, cross-entropy to FP32 rounding."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import loss as ops
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal

pytestmark = NEEDS_GPU

# Rows of one tile, of several and of part of one; vocabularies of GPT-2, Llama 3 and Qwen on a GPU.
SHAPES = [(1, 1), (3, 33), (7, 130), (5, 4097), (2, 4096)]
SHAPES += [] if INTERPRETED else [(300, 50257), (1024, 128256), (777, 151936)]
# One step between neighbouring numbers, relative; and the smallest step of all.
STEP = {torch.bfloat16: (2.0**-7, 0.0), torch.float16: (2.0**-10, 2.0**-24), torch.float32: (2.0**-22, 0.0)}


def logits(tokens: int, vocabulary: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    """(tokens, vocabulary), rows `extra` elements apart, with values that a running maximum must survive."""
    generator = torch.Generator().manual_seed(tokens)
    x = 3 * torch.randn(tokens, vocabulary, generator=generator)
    x[:, ::7] += torch.arange(x[:, ::7].shape[1]) * (20.0 / vocabulary)  # the maximum moves on and on
    x[-1] -= 100.0
    x[0, 1:] -= torch.inf
    return torch.nn.functional.pad(x, (0, extra)).to(DEVICE, dtype)[:, :vocabulary]


def labels(tokens: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    y = torch.randint(0, vocabulary, (tokens,), generator=generator)
    y[0] = 0  # the only finite logit
    y[tokens // 2 : tokens // 2 + tokens // 4] = -100
    return y.to(DEVICE)


def assert_same(ours, theirs, y):
    """Losses and gradients of both agree: log-sum-exp to a few roundings of |x| <= 130, p to the same relatively."""
    noise = (8 + 4 * 130) * 2.0**-23
    (losses, dx), (expected, expected_dx) = ours, theirs
    torch.testing.assert_close(losses, expected, rtol=noise, atol=noise)
    relative, smallest = STEP[dx.dtype]
    a, b = dx.float(), expected_dx.float()
    p = b.scatter_add(1, y.clamp(min=0)[:, None], torch.ones_like(b[:, :1]))
    wrong = (a - b).abs() > relative * b.abs() + noise * p.abs() + smallest
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} gradients differ, by {(a - b).abs().max()}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("z_loss", "extra"), [(0.0, 0), (1e-3, 31)])
def test_loss_and_gradient(shape, dtype, z_loss, extra):
    y = labels(*shape)
    ours, theirs = logits(*shape, dtype, extra), logits(*shape, dtype)
    losses = ops.cross_entropy_.kernel(ours, y, -100, z_loss, True)
    expected = ops.cross_entropy_.reference(theirs, y, -100, z_loss, True)
    assert_same((losses, ours), (expected, theirs), y)
    assert ours[y == -100].count_nonzero() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_alone_leaves_the_logits(shape):
    y = labels(*shape)
    x = logits(*shape, torch.bfloat16)
    before = x.clone()
    losses = ops.cross_entropy_.kernel(x, y, -100, 0.0, False)
    assert torch.equal(x, before)
    assert torch.equal(losses, ops.cross_entropy_.kernel(x, y, -100, 0.0, True))


def test_small_losses_keep_their_digits():
    """A probability of nearly one: what is left of lse - x is the sum of the others, to FP32's rounding of lse."""
    x = torch.full((4, 5000), -20.0, device=DEVICE)
    x[:, 7] = torch.tensor([0.0, 5.0, 20.0, 60.0])
    y = torch.full((4,), 7, device=DEVICE)
    expected = torch.log1p(4999 * torch.exp(-20.0 - x[:, 7].double()))
    losses = ops.cross_entropy_.kernel(x, y, -100, 0.0, False)
    assert ((losses.double() - expected).abs() <= 2.0**-21 * x[:, 7].double().clamp(min=1.0)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 4999])
def test_not_finite_reaches_loss_and_gradient(bad, place):
    x = logits(4, 5000, torch.bfloat16)
    x[2, place] = bad
    y = torch.tensor([0, 1, 3, 2], device=DEVICE)
    losses = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    assert not losses[2].isfinite()
    assert not x[2].isfinite().all()
    assert losses[3].isfinite()


@pytest.mark.parametrize("label", [5000, -1, 2**40])
def test_a_label_outside_the_vocabulary_is_nan_and_reads_nothing(label):
    x = logits(4, 5000, torch.bfloat16)
    y = torch.tensor([0, 1, label, 2], device=DEVICE)
    losses = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    assert losses.isnan().tolist() == [False, False, True, False]
    assert x[2].isnan().all()


@pytest.mark.parametrize("shape", SHAPES[:5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale(shape, dtype):
    x = logits(*shape, dtype)[:, : max(shape[1] // 2, 1)].clone()
    expected, factor = x.clone(), torch.tensor(1 / 3, device=DEVICE)
    ops.scale_.reference(expected, factor)
    ops.scale_.kernel(x, factor)
    assert_equal(x, expected)


@pytest.mark.skipif(INTERPRETED, reason="17 GB")
def test_more_than_two_to_the_31_logits():
    """Offsets beyond 32 bits: the last row of a chunk of 2^31 and some logits."""
    tokens, vocabulary = 16900, 128256
    x = torch.zeros(tokens, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    x[-1, 3] = 10.0
    y = torch.full((tokens,), -100, device=DEVICE)
    y[-1] = 3
    expected = x[-1:].clone()
    losses = ops.cross_entropy_.kernel(x, y, -100, 0.0, True)
    theirs = ops.cross_entropy_.reference(expected, y[-1:], -100, 0.0, True)
    assert_same((losses[-1:], x[-1:]), (theirs, expected), y[-1:])
    assert losses[:-1].count_nonzero() == 0
