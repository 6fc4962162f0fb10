"""`linear_cross_entropy` against PyTorch's cross-entropy in FP64: `pytest tests/block/test_loss.py`.

Besides the rounding of gradients (tests/kernels/test_loss.py) there is that of the logits, to BF16 or of their FP8
operands: an error e in a logit changes its probability by the factor 1 + e.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overcoat.block.loss import linear_cross_entropy
from tests.emulation import sqnr
from tests.kernels.samples import normal

HIDDEN = 256


def make(tokens=200, vocabulary=1000, dtype=torch.bfloat16, device="cpu", spread=2.0):
    """hidden, weight (leaves), labels: logits of standard deviation `spread`, some labels ignored, the rest likely."""
    hidden = normal(tokens, HIDDEN).to(device)
    weight = (normal(vocabulary, HIDDEN, seed=1) * (spread / HIDDEN**0.5)).to(device)
    generator = torch.Generator().manual_seed(2)
    probabilities = torch.softmax((hidden @ weight.t()).cpu(), 1)
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(device)
    labels[tokens // 2 : tokens // 2 + tokens // 5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def truth(hidden, weight, labels, z_loss=0.0, reduction="mean", bias=None, softcap=0.0):
    """Loss and the gradients of hidden and weight, and of a bias, in FP64."""
    h, w, *b = (x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None)
    x = h @ w.t() + sum(b)
    x = softcap * torch.tanh(x / softcap) if softcap else x
    loss = F.cross_entropy(x, labels, reduction="sum") + z_loss * (x.logsumexp(1).square() * (labels != -100)).sum()
    loss = loss / (labels != -100).sum() if reduction == "mean" else loss
    return loss.detach(), *torch.autograd.grad(loss, (h, w, *b))


def run(hidden, weight, labels, **options):
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


# Measured on the CPU: 48.6, 28.3 and 29.6 dB. Most of a gradient's power is in p - 1 at the label, which FP8 logits
# hardly touch: it is better than its operands (31.5 dB each; E5M2 25.5). The loss is off by the logits' noise, which is
# 28.5 dB below them: 0.08 a token.
@pytest.mark.parametrize(("fp8", "db", "off"), [(None, 46, 0.003), ("e5m2", 27, 0.02), ("e4m3", 28, 0.02)])
@pytest.mark.parametrize("vocabulary", [1000, 1001])
def test_error_of_each_precision(fp8, db, off, vocabulary, device):
    inputs = make(vocabulary=vocabulary, device=device)
    loss, dhidden, dweight = run(*inputs, fp8=fp8, chunk_tokens=64)
    exact_loss, exact_dhidden, exact_dweight = truth(*inputs)
    assert abs(loss - exact_loss) < off
    measured = sqnr(exact_dhidden, dhidden), sqnr(exact_dweight, dweight)
    assert min(measured) > db, measured


@pytest.mark.parametrize(
    ("dtype", "fp8", "db", "off"),
    [(torch.float32, None, 120, 1e-6), (torch.bfloat16, None, 42, 0.003), (torch.bfloat16, "e5m2", 24, 0.02)],
)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk_tokens", [None, 64])
def test_a_bias_and_a_cap(dtype, fp8, db, off, softcap, chunk_tokens, device):
    hidden, weight, labels = make(vocabulary=1001, dtype=dtype, device=device)
    bias = normal(1001, seed=3).to(device, dtype).requires_grad_()
    options = {"bias": bias, "softcap": softcap}
    loss = linear_cross_entropy(hidden, weight, labels, fp8=fp8, chunk_tokens=chunk_tokens, **options)
    exact_loss, *exact = truth(hidden, weight, labels, **options)
    assert abs(loss - exact_loss) < off
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    measured = [sqnr(*pair) for pair in zip(exact, found, strict=True)]
    assert min(measured) > db, measured
    frozen = hidden.detach(), weight.detach()
    alone = linear_cross_entropy(*frozen, labels, chunk_tokens=chunk_tokens, fp8=fp8, **options)
    assert torch.equal(torch.autograd.grad(alone, bias)[0], found[2])


def test_no_labels_at_all(device):
    """As PyTorch has it: the mean over nothing is NaN, the sum 0, and the gradients are zero."""
    hidden, weight, labels = make(device=device)
    labels.fill_(-100)
    loss, dhidden, dweight = run(hidden, weight, labels)
    assert loss.isnan()
    assert F.cross_entropy((hidden @ weight.t()).float(), labels).isnan()
    assert dhidden.count_nonzero() == dweight.count_nonzero() == 0
    assert run(hidden, weight, labels, reduction="sum")[0] == 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("fp8", [None, "e5m2"])
def test_non_finite_reaches_loss_and_gradients(bad, fp8, device):
    hidden, weight, labels = make(device=device)
    with torch.no_grad():
        hidden[3, 5] = bad
    loss, dhidden, dweight = run(hidden, weight, labels, fp8=fp8, chunk_tokens=64)
    assert not loss.isfinite()
    assert not dhidden[3].isfinite().all()
    assert not dweight.isfinite().all()


def test_upstream_factors_and_accumulation(device):
    """A loss scale, a division, and two micro-batches: factors in FP32, gradients summed."""
    hidden, weight, labels = make(dtype=torch.float32, device=device)
    _, dhidden, dweight = run(hidden, weight, labels, reduction="sum")
    for half in (slice(0, 100), slice(100, 200)):
        loss = linear_cross_entropy(hidden[half], weight, labels[half], reduction="sum")
        (loss * 65536 / 160).backward()
    torch.testing.assert_close(hidden.grad, dhidden * (65536 / 160), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(weight.grad, dweight * (65536 / 160), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("frozen", "kept"), [(0, "weight"), (1, "hidden")])
def test_frozen_inputs(frozen, kept, device):
    inputs = make(device=device)
    expected = run(*inputs)
    inputs[frozen].requires_grad_(False)
    loss = linear_cross_entropy(*inputs)
    loss.backward()
    assert torch.equal(loss, expected[0])
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, expected[2 - frozen]), kept
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*inputs), expected[0])


def test_the_gradient_of_the_weight_is_not_copied(device):
    """What the forward made becomes `.grad` itself: no second (V, H) at the moment of the most memory."""
    hidden, weight, labels = make(device=device)
    made = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (made.append(x.data_ptr()), x)[1], lambda x: x):
        loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert weight.grad.data_ptr() in made
    assert hidden.grad.data_ptr() in made


def test_a_retained_graph_gives_the_same_gradients_again(device):
    hidden, weight, labels = make(device=device)
    loss = 3 * linear_cross_entropy(hidden, weight, labels)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    last = torch.autograd.grad(loss, (hidden, weight))
    for again in (second, last):
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("label", [-1, 10**6])
def test_a_label_outside_of_the_vocabulary_is_refused(label):
    hidden, weight, labels = make()
    labels[3] = label
    with pytest.raises(ValueError, match=f"label {label} is neither a token of the vocabulary of {len(weight)} nor"):
        linear_cross_entropy(hidden, weight, labels)
    if label == -1:
        assert linear_cross_entropy(hidden, weight, labels.clamp(min=-1), ignore_index=-1).isfinite()
    with pytest.raises(RuntimeError, match="neither a token"):
        torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)(hidden, weight, labels)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [None, "e5m2"])
def test_peak_memory_is_one_chunk_and_the_gradients(fp8):
    """In FP8 the operands besides, of a chunk as large as its logits, which are gone when dW is there twice."""
    tokens, vocabulary = 4096, 64000
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    linear_cross_entropy(hidden[:64], weight, labels[:64], fp8=fp8).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=512, fp8=fp8).backward()
    peak = torch.cuda.max_memory_allocated() - before
    needed = 2 * (512 * vocabulary + tokens * HIDDEN + vocabulary * HIDDEN)
    if fp8:
        needed += 2 * (512 * vocabulary + vocabulary * HIDDEN)
    assert peak < needed + 8 * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, y: (h[:, 1:], w, y), "do not fit"),
        (lambda h, w, y: (h, w[0], y), "do not fit"),
        (lambda h, w, y: (h, w, y[1:]), "one label for each hidden state"),
        (lambda h, w, y: (h, w, y.int()), "torch.int64"),
        (lambda h, w, y: (h.float(), w, y), "under torch.autocast"),
        (lambda h, w, y: (h, w, y, w[:, 0].float()), "bias is torch.float32"),
        (lambda h, w, y: (h, w, y, w[0]), "one for each of the 1000 rows"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    hidden, weight, labels, *bias = change(*make())
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, labels, bias=bias[0] if bias else None)


def test_autocast(device):
    """FP32 parameters under autocast: products in BF16, gradients in FP32."""
    hidden, weight, labels = make(dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss, dhidden, dweight = run(hidden, weight, labels)
        plain = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-4, atol=0)
    assert dhidden.dtype == dweight.dtype == torch.float32
    assert sqnr(truth(hidden, weight, labels)[2], dweight) > 40
