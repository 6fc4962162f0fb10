"""Rotary embedding and head norm against FP64 autograd, and their kernels against them.

The tables are Gaussian numbers, not cosines and sines: the backward must be the transposed map, which for true angles
equals the inverse and would hide the difference (scaled RoPE variants fold a factor into cos and sin). The halves of a
row differ too.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, encode_groups
from overcoat.kernels import rope, rope_quantize
from overcoat.kernels import rope as ops
from overcoat.kernels.heads import rope_gradient
from tests import exact
from tests.exact import BF16_DB, E5M2_DB, assert_close, assert_close_float32, leaf
from tests.kernels.compare import DEVICE, FORMATS, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal

EPS = 1e-2  # large enough that a wrong one shows
# tokens, positions, query heads, key/value heads, width
SHAPES = [(1, 1, 1, 1, 8), (14, 7, 4, 2, 24), (61, 61, 6, 2, 16), (6, 2, 3, 3, 2)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
norms = pytest.mark.parametrize("norms", ["", "q", "k", "qk"])


def inputs(shape, norms, device):
    """qkv, cos, sin, q_weight, k_weight in FP32; and what every op takes last."""
    tokens, positions, num_q, num_kv, width = shape
    qkv = normal(tokens, (num_q + 2 * num_kv) * width).to(device)
    cos, sin = (normal(positions, width, seed=seed).to(device) for seed in (1, 2))
    q_weight, k_weight = (
        (1 + 0.5 * normal(width, seed=seed)).to(device) if name in norms else None
        for name, seed in (("q", 3), ("k", 4))
    )
    return qkv, cos, sin, q_weight, k_weight, EPS, num_q, num_kv


def split(x, num_q, num_kv, width):
    """The columns of q, k and v: views, whose rows lie apart."""
    return x.split((num_q * width, num_kv * width, num_kv * width), 1)


def doubles(arguments):
    return [leaf(x) if isinstance(x, torch.Tensor) else x for x in arguments]


# Rounding errors in a row: the mean of a head's squares, and the head norm's and the rotation's dozen operations.
def terms(shape):
    return shape[4] + 12


@shapes
@norms
def test_forward(shape, norms, device):
    arguments = inputs(shape, norms, device)
    expected = exact.rope(*doubles(arguments))
    assert_close_float32("rotated", expected, ops.qk_rope(*arguments)[0], terms(shape))
    got, _ = ops.qk_rope(arguments[0].bfloat16(), *arguments[1:])
    assert got.dtype == torch.bfloat16
    if shape[0] > 1:
        assert_close("rotated", exact.rope(arguments[0].bfloat16().double(), *doubles(arguments[1:])), got, BF16_DB)


@shapes
@norms
def test_backward(shape, norms, device):
    arguments = inputs(shape, norms, device)
    truth = doubles(arguments)
    dy = normal(*arguments[0].shape, seed=7).to(device)
    exact.rope(*truth).backward(dy.double())
    qkv = arguments[0] if norms else None
    dqkv, dq_weight, dk_weight = rope.qk_rope_backward(*split(dy, *shape[2:]), qkv, *arguments[1:-1])
    assert_close_float32("dqkv", truth[0].grad, dqkv, 3 * terms(shape))
    tokens, _, num_q, num_kv, _ = shape
    for name, weight, got, heads in (("q", truth[3], dq_weight, num_q), ("k", truth[4], dk_weight, num_kv)):
        if weight is None:
            assert got.numel() == 0
        else:
            assert_close_float32(f"d{name}_weight", weight.grad, got, tokens * heads + terms(shape))


@shapes
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize("centered", [False, True], ids=["", "centered"])
@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
def test_encode_and_decode(shape, norms, centered, code, device):
    """In place it is `qk_rope`; what is kept decodes to what was there, q and k bit for bit, v to 8 bits."""
    qkv, *rest = inputs(shape, norms, device)
    qkv = qkv.bfloat16()
    if shape[0] > 1:
        qkv[:, -shape[3] * shape[4] :] += 3.0  # what all tokens have in common
        qkv[:2, -shape[3] * shape[4] :] *= torch.tensor([[0.0], [2.0**-9]], device=device)
    before, (expected, same) = qkv.float(), ops.qk_rope(qkv, *rest)
    cos, sin, _, _, _, num_q, num_kv = rest
    cut = (num_q + num_kv) * shape[4]
    center = before[:, cut:].mean(0) if centered else None
    codes, lower, amax, bound = ops.qk_rope_encode12_(qkv, center, *rest, code)
    assert bound == same == before[:, cut:].abs().amax() * ops.MARGIN
    torch.testing.assert_close(qkv, expected, rtol=2.0**-8, atol=0)  # CPU: equal; a kernel may differ in the last bit
    kept = (codes, lower, amax, center)
    decoded = ops.qk_rope_decode12(*kept, None, None, num_q, num_kv, code, torch.float32)
    # With its center or without, whichever is smaller.
    v = before[:, cut:].unflatten(1, (num_kv, shape[4]))
    taken = torch.zeros_like(v) if center is None else center.view(num_kv, -1).expand_as(v)
    own, less = v.abs().amax(-1), (v - taken).abs().amax(-1)
    v_codes, v_amax = encode_groups(v - torch.where((own < less).unsqueeze(-1), 0, taken), code, shape[4])
    assert torch.equal(codes[:, cut:].contiguous().view(v_codes.dtype).float(), v_codes.flatten(1).float())
    assert torch.equal(amax[:, num_q + num_kv :].abs().clamp(min=2.0**-126), v_amax.view_as(own).clamp(min=2.0**-126))
    assert torch.equal(amax[:, num_q + num_kv :] < 0, own < less)
    error = (decoded[:, cut:].view_as(v) - v).abs().amax(-1)
    assert (error <= torch.minimum(own, less) * 2.0 ** (-3 if code == "e4m3" else -6) + 2.0**-20 * own).all()
    assert shape[0] == 1 or not decoded[0, cut:].any()
    x, found = (y[:, :cut].unflatten(1, (-1, shape[4])) for y in (before, decoded))
    small = x.abs() < 2.0**-14 * x.abs().amax(-1, keepdim=True)
    assert torch.equal(found[~small], x[~small])
    assert ((found - x).abs() <= 2.0**-22 * x.abs().amax(-1, keepdim=True)).all()
    rotated = ops.qk_rope_decode12(*kept, cos, sin, num_q, num_kv, code, torch.float32)
    truth = exact.rope(*doubles((decoded, cos, sin)), None, None, 0.0, num_q, num_kv)
    assert_close_float32("rotated", truth, rotated, terms(shape))


@shapes
def test_backward_straight_to_fp8(shape, device):
    qkv, cos, sin, _, _, _, num_q, num_kv = inputs(shape, "", device)
    tokens = shape[0]
    dy = normal(*qkv.shape, seed=7).to(device)
    truth = doubles((qkv, cos, sin))
    exact.rope(*truth, None, None, 0.0, num_q, num_kv).backward(dy.double())
    parts = split(dy, *shape[2:])
    largest, _ = rope_quantize.qk_rope_backward_amax(*parts, cos, sin, num_q, False)
    assert_close_float32("amax", truth[0].grad.abs().max(), largest, terms(shape))
    data, data_t, scale = rope_quantize.qk_rope_backward_quantize(*parts, cos, sin, largest, "e5m2", num_q)
    assert data.float().abs().max() == FLOAT8["e5m2"].max
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    if tokens > 1:
        assert_close("dqkv", truth[0].grad, data.double() * scale.double(), E5M2_DB)


# ---- kernels -----------------------------------------------------------------------------------------------------

# Bit for bit; with head norms, which are summed otherwise, nearly.

# Tokens, positions, query heads, key/value heads, head width.
# 16 heads of 80: a token a tile, halves of heads that are no power of 2.
CASES = [(1, 1, 1, 1, 16), (14, 7, 2, 2, 80), (35, 35, 4, 2, 128), (3, 3, 16, 16, 80), (40, 20, 3, 1, 64)]
CASES += [] if INTERPRETED else [(61, 61, 4, 2, 128), (2000, 1000, 32, 32, 128), (1000, 1000, 28, 4, 128)]
# Of the backward: no multiples of a tile's tokens or heads; head widths with odd halves, of one element, of several
# tiles.
BACKWARD_CASES = [*CASES, (5, 5, 28, 4, 12), (67, 67, 5, 1, 2), (3, 3, 1, 1, 384)]


def tables(positions, width, dtype=torch.bfloat16):
    """cos and sin; the halves differ, as the op's contract allows."""
    angle = torch.randn(positions, width, device=DEVICE) * 3
    return (1.3 * angle.cos()).to(dtype), (1.3 * angle.sin()).to(dtype)


def laid_out(parts):
    """The same gradients as views of one buffer, as columns of wider ones, apart, and stored column by column."""
    wider = [torch.cat((part, part.neg()), 1)[:, : part.shape[1]] for part in parts]
    return parts, wider, [part.contiguous() for part in parts], [part.t().contiguous().t() for part in parts]


def head_weights(width, wanted):
    return tuple(torch.randn(width, device=DEVICE).bfloat16() if wanted else None for _ in range(2))


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_kernel(case, head_norm, dtype):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width, dtype)
    arguments = (qkv, *tables(positions, width, dtype), *head_weights(width, head_norm), 1e-6, num_q, num_kv)
    (got, bound), (expected, same) = ops.qk_rope.kernel(*arguments), ops.qk_rope.reference(*arguments)
    assert_equal(got, expected, exact=not head_norm)
    assert_equal(bound, same)


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("head_norm", "code"), [(False, "sqrt8"), (True, "sqrt8"), (False, "e4m3"), (True, "int8")])
def test_encode_and_decode_kernels(case, head_norm, code):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width)
    center = None if width == 80 else torch.randn(num_kv * width, device=DEVICE)
    arguments = (center, *tables(positions, width), *head_weights(width, head_norm), 1e-6, num_q, num_kv, code)
    ours, theirs = qkv.clone(), qkv.clone()
    *kept_reference, expected = ops.qk_rope_encode12_.reference(theirs, *arguments)
    *kept, bound = ops.qk_rope_encode12_.kernel(ours, *arguments)
    assert_equal(bound, expected, exact=True)
    assert_equal(ours, theirs, exact=not head_norm)
    whole = (center, None, None, num_q, num_kv, code, torch.float32)
    if INTERPRETED:  # maxima in BF16 are truncated there, E4M3 loses carries: other codes for nearly the same values
        found, true = (ops.qk_rope_decode12.reference(*each, *whole) for each in (kept, kept_reference))
        assert (found - true).abs().max() <= (0.5 if code == "e4m3" else 2.0**-5) * true.abs().max()
        assert_equal(kept[2], kept_reference[2])
    else:
        assert_equal(kept, kept_reference)
    for rotation in (arguments[1:3], (None, None)):
        last = (center, *rotation, num_q, num_kv, code, torch.bfloat16)
        decoded = ops.qk_rope_decode12.kernel(*kept_reference, *last)
        assert_equal(decoded, ops.qk_rope_decode12.reference(*kept_reference, *last))


@pytest.mark.kernel
@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_backward_kernels(case):
    """Wherever attention leaves the gradients of q, k and v."""
    tokens, positions, num_q, num_kv, width = case
    parts = split(awkward(tokens, (num_q + 2 * num_kv) * width), num_q, num_kv, width)
    cos, sin = tables(positions, width)
    arguments = (None, cos, sin, None, None, 0.0, num_q)
    theirs = rope.qk_rope_backward.reference(*parts, *arguments)
    top, _ = rope_quantize.qk_rope_backward_amax.reference(*parts, cos, sin, num_q, True)
    quantized = {
        fmt: rope_quantize.qk_rope_backward_quantize.reference(*parts, cos, sin, top, fmt, num_q) for fmt in FORMATS
    }
    values = rope_gradient(*parts, cos, sin, num_q).double()
    for i, inputs in enumerate(laid_out(parts) if case in CASES[:2] else [parts]):
        assert_equal(rope.qk_rope_backward.kernel(*inputs, *arguments), theirs)
        (largest, sums), (without, nothing) = (
            rope_quantize.qk_rope_backward_amax.kernel(*inputs, cos, sin, num_q, want) for want in (True, False)
        )
        assert_equal((largest, without), (top, top))
        assert nothing.numel() == 0
        assert_sums(sums, values)
        for fmt in FORMATS if i == 0 else FORMATS[:1]:
            ours = rope_quantize.qk_rope_backward_quantize.kernel(*inputs, cos, sin, top, fmt, num_q)
            assert_equal(ours, quantized[fmt])
            blocks = (*inputs, cos, sin, fmt, num_q)
            ours = rope_quantize.qk_rope_backward_blocks.kernel(*blocks)
            assert_equal(ours, rope_quantize.qk_rope_backward_blocks.reference(*blocks))


def assert_sums(sums, values):
    """A program's steps, fewer than 24 here, then at most 9 additions of its tokens, 9 and one for every 512 programs:
    each may round."""
    assert ((sums - values.sum(0)).abs() <= 48 * 2.0**-24 * values.abs().sum(0)).all()


@pytest.mark.kernel
def test_programs_walk_along_the_tokens(monkeypatch):
    """Few programs, of which the last have a step less, and tokens that fit no tile."""
    tokens, num_q, num_kv, width = 205, 5, 3, 72
    monkeypatch.setattr(rope_quantize, "AMAX_TILES", {False: (2048, 2, 40), True: (4096, 4, 40)})
    parts = split(awkward(tokens, (num_q + 2 * num_kv) * width), num_q, num_kv, width)
    cos, sin = tables(tokens, width)
    values = rope_gradient(*parts, cos, sin, num_q).double()
    for want_sums in (False, True):
        top, sums = rope_quantize.qk_rope_backward_amax.kernel(*parts, cos, sin, num_q, want_sums)
        assert top == values.abs().max()
        if want_sums:
            assert_sums(sums, values)


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("want_sums", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (20, 239), (36, 300), (36, 399)])  # of q, q, k, v
def test_not_finite_reaches_maximum_and_sums(place, bad, want_sums, monkeypatch):
    """In few programs: what follows in a program does not hide it."""
    monkeypatch.setattr(rope_quantize, "AMAX_TILES", {False: (2048, 2, 8), True: (4096, 4, 8)})
    x = awkward(37, 400)
    x[place] = bad
    arguments = (*split(x, 3, 1, 80), *tables(37, 80), 3, want_sums)
    top, sums = rope_quantize.qk_rope_backward_amax.kernel(*arguments)
    expected, true = rope_quantize.qk_rope_backward_amax.reference(*arguments)
    assert not expected.isfinite()
    assert torch.equal(top.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert sums.isfinite().tolist() == true.isfinite().tolist()


def norm_backward_arguments(case, norms, dtype=torch.bfloat16, eps=1e-6):
    tokens, positions, num_q, num_kv, width = case
    qkv = awkward(tokens, (num_q + 2 * num_kv) * width, dtype)
    if eps == 0:
        qkv = torch.randn_like(qkv)
    weights = (weight if name in norms else None for name, weight in zip("qk", head_weights(width, True)))
    gradients = split(torch.randn_like(qkv), num_q, num_kv, width)
    return *gradients, qkv, *tables(positions, width, dtype), *weights, eps, num_q


def assert_norm_gradient(ours, arguments, norms, case):
    """Heads with a norm are as near as another order of summation allows, all others equal bit for bit."""
    theirs = rope.qk_rope_backward.reference(*arguments)
    assert not any(part.isnan().any() for part in theirs)
    for name, a, b in zip("qkv", split(ours[0], *case[2:]), split(theirs[0], *case[2:])):
        assert_equal(a.contiguous(), b.contiguous(), exact=name not in norms)
    for a, b, heads in zip(ours[1:], theirs[1:], case[2:4]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * (heads * len(ours[0])) ** 0.5)


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("case", BACKWARD_CASES)
@pytest.mark.parametrize(
    ("norms", "dtype", "programs"),
    [("qk", torch.bfloat16, None), ("q", torch.float32, None), ("k", torch.bfloat16, None), ("qk", torch.bfloat16, 3)],
)
def test_backward_kernel_with_head_norms(case, norms, dtype, programs, monkeypatch):
    """Wherever attention leaves the gradients of q, k and v, the same bits.

    In few programs, which walk along many tiles, with eps = 0: the rows past the end must not divide by zero.
    """
    if programs:
        monkeypatch.setattr(rope, "RESIDENT", programs)
    dq, dk, dv, *rest = arguments = norm_backward_arguments(case, norms, dtype, 0.0 if programs else 1e-6)
    layouts = laid_out((dq, dk, dv)) if case in CASES[1:3] and norms == "qk" and not programs else [(dq, dk, dv)]
    first, *others = [rope.qk_rope_backward.kernel(*inputs, *rest) for inputs in layouts]
    assert_norm_gradient(first, arguments, norms, case)
    assert all(torch.equal(a, b) for ours in others for a, b in zip(ours, first))


@pytest.mark.kernel
@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_head_norm_gradients_are_deterministic():
    case = (5000, 5000, 32, 8, 128)
    arguments = norm_backward_arguments(case, "qk")
    runs = [rope.qk_rope_backward.kernel(*arguments) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
    assert_norm_gradient(runs[0], arguments, "qk", case)
