"""The layers of a decoder block in plain differentiable PyTorch, and how close FP8 must come to them.

The layers are block/reference.py's, which calls no kernel's reference and is held against transformers' own layers
(models/test_verify.py). In FP64 they are the truth that every op and its backward is measured against.

Limits in dB come from the formats. An operand rounded to a format carries relative noise of a known power; noises of
independent operands add, and a product or a sum over many terms passes relative noise on unchanged:

    E4M3  3 mantissa bits, one scale   31.5 dB    (Gaussian data; tests/formats measures these)
    E5M2  2 mantissa bits              25.5 dB
    sqrt8 43.4, int8 43.8, e4m3 31.8 dB in groups of 128

Besides the noise's size its direction is held: the projection of a result on the truth ("slope") differs from 1 by no
more than the noise power itself (a rounded value is the centre of its cell: E[error * x] = -E[error^2]) plus six
standard deviations of what independent noise projects on the truth, sqrt(noise / N). A term scaled wrongly by a few
percent shows there, however small its share of the noise.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from overcoat.block import reference
from overcoat.block.attention import Heads, Rotary
from overcoat.block.spec import Norm
from tests.emulation import sqnr

E4M3_DB = 31.5
E5M2_DB = 25.5
BF16_DB = 53.0  # 8 bits: 6 dB a bit above E4M3's 4, less 2.5 for the values' distribution
FLOAT8_DB = {"e4m3": E4M3_DB, "e5m2": E5M2_DB}
KEPT_DB = {"sqrt8": 43.4, "int8": 43.8, "e4m3": 31.8}


# ---- the layers --------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, centered: bool) -> Tensor:
    """RMSNorm or LayerNorm over the last axis."""
    return reference.norm(x, Norm(weight, bias, eps, centered))


def rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
) -> Tensor:
    """Per-head RMSNorm of q and k where weights are given, and their rotation, of the fused buffer."""
    heads = Heads(1, num_q, num_kv, qkv.shape[1] // (num_q + 2 * num_kv), 1.0, eps)
    parts = reference.split(qkv, Rotary(cos, sin, None, q_weight, k_weight), heads)
    return torch.cat(parts, 1)[0].transpose(0, 1).flatten(1)


def attention(qkv: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int, scale: float) -> Tensor:
    """Softmax attention on the fused buffer, rotated; a query that sees no key gets zeros."""
    width = qkv.shape[1] // (num_q + 2 * num_kv)
    no_angle = Rotary(qkv.new_ones(1, width), qkv.new_zeros(1, width), mask)
    return reference.attention(qkv, no_angle, Heads(batch, num_q, num_kv, width, scale))


# ---- how close ---------------------------------------------------------------------------------------------------


def combined_db(*sources: float) -> float:
    """SQNR of a result whose independent noise sources have these SQNRs: their noise powers add."""
    return -10 * math.log10(sum(10 ** (-db / 10) for db in sources))


def assert_close(
    name: str, exact: Tensor, value: Optional[Tensor], db: float, extra: float = 0.0, sharing: int = 1
) -> None:
    """Hold `value` to an expected SQNR of `db` and to the slope limit.

    N elements estimate a ratio of two powers to 4.34 * sqrt(4 / N) dB: three of those are allowed, half a dB for what
    the derivation of `db` leaves out, and `extra` where the caller knows of more (heavy tails). `sharing`: how many
    elements share one error (a wrong probability moves a whole head), which leaves N / sharing independent ones.
    """
    assert value is not None, f"{name}: no gradient"
    assert exact.shape == value.shape, f"{name}: shape {tuple(value.shape)} instead of {tuple(exact.shape)}"
    exact, value = exact.detach().double().flatten(), value.detach().double().flatten()
    assert value.isfinite().all(), f"{name}: {int((~value.isfinite()).sum())} non-finite elements"
    count = max(1.0, exact.numel() / sharing)
    measured, limit = sqnr(exact, value), db - 0.5 - 26 / math.sqrt(count) - extra
    assert measured >= limit, f"{name}: SQNR {measured:.1f} dB, below {limit:.1f}"
    noise = 10 ** (-limit / 10)
    slope = float(exact @ value / (exact @ exact))
    allowed = noise + 6 * math.sqrt(noise / count)
    assert abs(slope - 1) <= allowed, f"{name}: scaled by {slope:.4f}, allowed 1 +- {allowed:.4f}"


def assert_close_float32(name: str, exact: Tensor, value: Tensor, terms: int) -> None:
    """Hold FP32 arithmetic to `terms` rounding errors in a row, each 2^-24 of the largest value, all of one sign."""
    assert exact.shape == value.shape, f"{name}: shape {tuple(value.shape)} instead of {tuple(exact.shape)}"
    exact, value = exact.detach().double(), value.detach().double()
    assert value.isfinite().all(), f"{name}: {int((~value.isfinite()).sum())} non-finite elements"
    error, allowed = float((exact - value).abs().max()), terms * 2.0**-24 * float(exact.abs().max())
    if value.numel():
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def leaf(x: Tensor) -> Tensor:
    """An FP64 copy that takes gradients."""
    return x.detach().double().requires_grad_()
