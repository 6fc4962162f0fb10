"""Arguments for every op of the catalogue, on the CPU: what `opcheck` and the compile tests run on.

`SAMPLES[op name]` is a list of argument tuples. The sizes are those that break kernels: one token, odd token counts,
widths that fit no tile and no group, BF16 and FP32, strided inputs. Add an op's samples here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import overcoat.models.convert  # noqa: F401, registers all ops of a block
from overcoat.formats import encode_groups, quantize_blocks, quantize_tensor
from overcoat.kernels.experts import gather_t
from overcoat.kernels.grouped import route
from overcoat.kernels.op import Op
from overcoat.kernels.rope import qk_rope_encode12_

# Files whose ops call PyTorch's own kernels on a GPU, or single instructions on FP32, and such ops of other files:
# nothing of ours is launched.
LIBRARY = ("attention", "gemm", "hardware")
LIBRARY_OPS = ("rms_norm", "rms_norm_backward")


def is_ours(op: Op) -> bool:
    """True if the op launches a Triton kernel of ours on a GPU."""
    name = op.reference.__name__
    return op.kernel is not None and name not in LIBRARY_OPS and op.reference.__module__.split(".")[-1] not in LIBRARY


# (tokens, columns, dtype)
SIZES = [(1, 24, torch.bfloat16), (7, 130, torch.float32), (61, 200, torch.bfloat16)]
SAMPLES: dict[str, list[tuple[Any, ...]]] = {}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gaussian values that depend on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amax(x: Tensor) -> Tensor:
    """max |x| as the ops want it: 0-d FP32."""
    return x.abs().amax().float()


def strided(x: Tensor) -> Tensor:
    """The same matrix, stored column by column."""
    return x.t().contiguous().t()


def column_by_column(x: Tensor) -> Tensor:
    """The same tensor with its last axis the slowest; a vector with holes."""
    if x.dim() == 1:
        return torch.stack((x, x), 1)[:, 0]
    return x.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def add(name: str, *arguments: Any) -> None:
    """Register one tuple of arguments."""
    SAMPLES.setdefault(name, []).append(arguments)


def _quantize() -> None:
    codes = ("sqrt8", "e4m3", "int8")
    for i, (tokens, columns, dtype) in enumerate(SIZES):
        x = normal(tokens, columns, dtype=dtype)
        weights = [normal(n, columns, dtype=dtype, seed=n) for n in (8, 3, 5)[: i + 1]]
        affine = normal(columns, dtype=dtype)
        for fmt in ("e4m3", "e5m2"):
            add("quantize", x, amax(x), fmt)
            add("quantize_both", x, amax(x), fmt)
            add("quantize_t", x, amax(x) / 448, fmt)
            add("quantize_rows", x, fmt)
        add("amax", x)
        counts, maxima = [len(weights), 2], [amax(weights[0]), amax(x)]
        add("quantize_operands", weights, counts[:1], [])
        add("quantize_operands", [*weights, x, x], counts, [])
        add("quantize_operands", [*weights, x, x], counts, maxima)
        for transposed in (False, True):
            add("stack_operands", [*weights, x, x], counts, maxima, transposed)
            add("stack_weights", weights, torch.stack([amax(w) for w in weights]).amax(), transposed)
            add("stack_codes", [w.to(torch.float8_e4m3fn) for w in weights], transposed)
        code, group_size = codes[i], (16, 128, 64)[i]
        add("token_center", x)
        kept = encode_groups(x, code, group_size)
        add("group_encode", x, code, group_size)
        add("group_decode", *kept, code, group_size, dtype)
        for weight, bias in ((affine, None), (None, None), (affine, affine)):
            add("requantize_t", *kept, weight, bias, amax(x) / 448, code, group_size)
    x = strided(normal(7, 48, dtype=torch.bfloat16))
    add("amax", torch.empty(0, 4))
    add("amax", x)
    add("quantize", x, amax(x), "e4m3")
    add("quantize_both", x, amax(x), "e5m2")
    add("quantize_t", x, amax(x) / 448, "e4m3")
    add("token_center", normal(700, 3))
    add("token_center", x)
    kept = encode_groups(x, "int8", 16)
    add("group_encode", x, "sqrt8", 16)
    add("group_decode", strided(kept.data), kept.scale, "int8", 16, torch.float32)


def _gemm() -> None:
    for (m, k, n), dtype in zip([(1, 24, 5), (7, 130, 48), (61, 200, 33)], (torch.bfloat16, torch.float32) * 2):
        a, b = quantize_tensor(normal(m, k)), quantize_tensor(normal(n, k, seed=1))
        for bias in (None, normal(n, dtype=dtype, seed=2)):
            add("gemm", a.data, b.data, a.scale, b.scale, bias, dtype, bias is None)


def _norm() -> None:
    for i, (tokens, columns, dtype) in enumerate(SIZES):
        x, dy = normal(tokens, columns, dtype=dtype), normal(tokens, columns, dtype=dtype, seed=1)
        weight, bias = normal(columns, dtype=dtype, seed=2), normal(columns, dtype=dtype, seed=3)
        rstd, mean = x.float().square().mean(1).rsqrt(), x.float().mean(1)
        code, group_size = ("sqrt8", "e4m3", "int8")[i], (16, 128, 64)[i]
        kept = encode_groups(x, code, group_size)
        add("rms_norm", x, weight, 1e-6)
        add("rms_norm_backward", dy, x, rstd, weight)
        for w, b, centered in ((weight, None, False), (weight, bias, True), (None, None, True)):
            add("add_norm_encode", x, dy, w, b, 1e-6, centered, code, group_size)
        for residual in (None, x):
            for w in (weight, None):
                add("norm_stats", dy, residual, w, None, 1e-6, False)
                for b in (bias, None):
                    add("norm_stats", dy, residual, w, b, 1e-5, True)
        for w in (weight, None):
            add("norm_backward", dy, *kept, rstd, w, None, False, False, code, group_size)
        add("norm_quantize", x, None, rstd, weight, None, amax(x) * 4, code, group_size)
        add("norm_quantize", x, mean, rstd, weight, bias, amax(x) * 4, code, group_size)
        add("norm_quantize", x, mean, rstd, None, None, amax(x) * 4, code, group_size)
        add("norm_backward", dy, *kept, rstd, weight, x, True, True, code, group_size)
    x = strided(normal(7, 48, dtype=torch.bfloat16))
    rstd = x.float().square().mean(1).rsqrt()
    kept = encode_groups(x, "sqrt8", 16)
    add("rms_norm", x, normal(48, dtype=x.dtype), 1e-6)
    add("rms_norm_backward", x, x, rstd, normal(48, dtype=x.dtype))
    for residual, centered in ((None, False), (None, True), (x, False), (x.float(), False), (x.float(), True)):
        add("norm_stats", x, residual, None, None, 1e-6, centered)
    add("norm_quantize", x, None, rstd, None, None, amax(x) * 4, "sqrt8", 16)
    add("norm_backward", x, *kept, rstd, None, x, False, False, "sqrt8", 16)
    add("norm_backward", x.contiguous(), *kept, rstd, None, x, False, False, "sqrt8", 16)


def _rope() -> None:
    for tokens, positions, (num_q, num_kv), width, dtype in (
        (1, 1, (1, 1), 8, torch.bfloat16),
        (14, 7, (4, 2), 24, torch.float32),
        (61, 61, (6, 2), 16, torch.bfloat16),
    ):
        qkv = normal(tokens, (num_q + 2 * num_kv) * width, dtype=dtype)
        cos, sin = normal(positions, width, dtype=dtype, seed=1), normal(positions, width, dtype=dtype, seed=2)
        weight = normal(width, dtype=dtype, seed=3)
        parts = qkv.flip(0).split((num_q * width, num_kv * width, num_kv * width), 1)
        for q_weight, k_weight in ((None, None), (weight, weight.neg())):
            shared = (cos, sin, q_weight, k_weight, 1e-6, num_q, num_kv)
            add("qk_rope", qkv, *shared)
            add("qk_rope_backward", *parts, None if q_weight is None else qkv, *shared[:-1])
            center = None if q_weight is None else parts[2].float().mean(0)
            add("qk_rope_encode12_", qkv, center, *shared, "sqrt8")
            kept = qk_rope_encode12_.reference(qkv.clone(), center, *shared, "int8")[:3]
            rotation = (cos, sin) if q_weight is None else (None, None)
            add("qk_rope_decode12", *kept, center, *rotation, num_q, num_kv, "int8", dtype)
        for want_sums in (False, True):
            add("qk_rope_backward_amax", *parts, cos, sin, num_q, want_sums)
        add("qk_rope_backward_quantize", *parts, cos, sin, amax(qkv) * 4, "e5m2", num_q)
        add("qk_rope_backward_blocks", *parts, cos, sin, "e4m3", num_q)
    add("qk_rope", strided(qkv), *shared)
    columns = tuple(map(strided, parts))
    add("qk_rope_backward", *columns, strided(qkv), *shared[:-1])
    add("qk_rope_backward_amax", *columns, cos, sin, num_q, True)
    add("qk_rope_backward_quantize", *columns, cos, sin, amax(qkv) * 4, "e5m2", num_q)
    add("qk_rope_backward_blocks", *columns, cos, sin, "e4m3", num_q)
    heads = normal(61, 512).split((256, 128, 128), 1)
    add("qk_rope_backward_blocks", *heads, normal(61, 128, seed=1), normal(61, 128, seed=2), "e4m3", 2)


def _activation() -> None:
    kinds = [("relu2", True), ("gelu", False), ("gelu_tanh", True), ("silu", True), ("quick_gelu", False)]
    for i, (tokens, columns, dtype) in enumerate([*SIZES, (130, 384, torch.bfloat16)]):
        activation, gated = kinds[i]
        z, dh = normal(tokens, (1 + gated) * columns, dtype=dtype), normal(tokens, columns, dtype=dtype, seed=1)
        code, group_size = ("sqrt8", "e4m3", "int8", "sqrt8")[i], (16, 128, 48, 64)[i]
        groups = encode_groups(z.view(-1, columns), code, group_size)
        kept = groups.data.view(tokens, -1), groups.scale.view(tokens, 1 + gated, -1)
        how, top = (activation, code, group_size), amax(z).square()
        add("activation_encode", z, activation, gated, code, group_size)
        add("activation_quantize", z, top, activation, gated)
        add("activation_block_quantize", z, activation, gated, code, group_size)
        add("activation_decode", *kept, *how, dtype)
        add("activation_gradient_bound", dh, kept[1], activation, group_size)
        add("activation_backward", dh, *kept, top / 448, None, None, False, *how)
        add("activation_backward", dh, *kept, None, None, None, False, *how)
        for has_bias in (True, False) if i % 2 else (False,):
            add("activation_backward", dh, *kept, top / 448, amax(dh) * 9, "e5m2", has_bias, *how)


def _gate() -> None:
    for tokens, columns, dtype in SIZES:
        dh, o, g = (normal(tokens, columns, dtype=dtype, seed=seed) for seed in range(3))
        add("gate", o, g)
        add("gate_backward", dh, o, g)
    x = strided(normal(7, 48, dtype=torch.bfloat16))
    add("gate", x, x.flip(0))
    add("gate_backward", x, x.flip(0), x.flip(1))


def _attention() -> None:
    for batch, sequence, (num_q, num_kv), width, dtype in (
        (1, 1, (1, 1), 8, torch.bfloat16),
        (2, 7, (4, 2), 24, torch.float32),
        (1, 61, (6, 2), 16, torch.bfloat16),
    ):
        tokens = batch * sequence
        qkv = normal(tokens, (num_q + 2 * num_kv) * width, dtype=dtype)
        do, o = (normal(tokens, num_q * width, dtype=dtype, seed=seed) for seed in (1, 2))
        lse = normal(batch, num_q, sequence, seed=3) + 8
        visible = torch.ones(batch, 1, sequence, sequence, dtype=torch.bool).tril()
        visible[0, :, 0] = False
        additive = torch.zeros(1, num_q, sequence, sequence, dtype=dtype).masked_fill(
            ~visible[:1], torch.finfo(dtype).min
        )
        starts = torch.tensor(sorted({0, *range(3, tokens, 5), *range(0, tokens, sequence), tokens}), dtype=torch.int32)
        for mask in (None, visible, additive, starts):
            shared = (mask, batch, num_q, num_kv, width**-0.5)
            add("attention", qkv, *shared)
            add("attention_backward", do, qkv, o, lse, *shared)
            add("attention", qkv, *shared, True, 1.5)
            add("attention_backward", do, qkv, o, lse, *shared, True, 1.5)
    add("attention", qkv, None, *shared[1:], False)
    add("attention_backward", do, qkv, o, lse, None, *shared[1:], False)
    add("attention", strided(qkv), None, *shared[1:])
    add("attention_backward", do, strided(qkv), o, lse, None, *shared[1:])


def _loss() -> None:
    for (tokens, columns, dtype), vocabulary in zip(SIZES, (33, 130, 1000)):
        logits = normal(tokens, vocabulary, dtype=dtype, seed=4)
        labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens))
        labels[: tokens // 3] = -100
        padded = torch.empty(tokens, vocabulary + 31, dtype=dtype)[:, :vocabulary].copy_(logits)
        for x, gradient in ((logits, True), (logits, False), (padded, True), (strided(logits), True)):
            add("cross_entropy_", x, labels, -100, 1e-3, gradient)
            add("multiply_", x, torch.tensor(1 / 3))
        add("cross_entropy_", logits, labels, -100, 1e-3, True, 2.0)
        bias = normal(vocabulary, dtype=dtype, seed=2)
        hidden, weight = normal(tokens, columns, dtype=dtype), normal(vocabulary, columns, dtype=dtype, seed=1)
        for fmt, chunk in ((None, None), (None, 16), ("e5m2", 16), ("e4m3", None)):
            add("linear_cross_entropy", hidden, weight, labels, -100, 0.0, fmt, chunk, True, True)
        add("linear_cross_entropy", hidden, weight, labels, -100, 1e-3, None, 5, False, tokens > 7)
        add("linear_cross_entropy", hidden, strided(weight), labels, -100, 0.0, "e5m2", 5, tokens > 7, False)
        for fmt, wanted in ((None, True), ("e5m2", True), (None, False)):
            add("linear_cross_entropy", hidden, weight, labels, -100, 0.0, fmt, 5, True, True, bias, wanted, 2.0)


def _blockwise() -> None:
    for i, (tokens, columns, dtype) in enumerate([*SIZES, (130, 384, torch.bfloat16)]):
        x = normal(tokens, columns, dtype=dtype)
        affine = normal(columns, dtype=dtype, seed=1)
        weights = [normal(n, columns, dtype=dtype, seed=n) for n in ((8,), (3, 5, 7), (128, 70), (128, 256, 2))[i]]
        code, group_size = ("sqrt8", "e4m3", "int8", "sqrt8")[i], (16, 128, 48, 64)[i]
        for fmt in ("e4m3", "e5m2"):
            for name in ("block_quantize", "block_quantize_both", "block_quantize_t"):
                add(name, x, fmt)
        for weight, bias in ((affine, None), (None, None), (affine, affine)):
            add("block_requantize_t", *encode_groups(x, code, group_size), weight, bias, code, group_size)
            add("norm_block_quantize", x, None, weight, bias, 1e-5, bias is not None, code, group_size)
            add("norm_block_quantize", x, x.flip(0), weight, bias, 1e-5, bias is not None, code, group_size)
        for transposed in (False, True):
            add("block_stack_weights", weights, transposed)
    for name in ("block_quantize", "block_quantize_both", "block_quantize_t"):
        add(name, strided(normal(7, 48, dtype=torch.bfloat16)), "e4m3")
    add("norm_block_quantize", strided(x), None, None, None, 1e-5, False, "sqrt8", 16)
    add("norm_block_quantize", strided(x), x, None, None, 1e-5, False, "sqrt8", 16)
    add("norm_block_quantize", x, strided(x.float()), None, None, 1e-5, False, "sqrt8", 16)


def _block_gemm() -> None:
    for (m, k, n), dtype in zip(
        [(1, 24, 5), (7, 130, 48), (61, 400, 200), (16, 256, 144)], (torch.bfloat16, torch.float32) * 2
    ):
        bias = normal(n, dtype=dtype, seed=2)
        for square in (False, True):
            a, b, *scales = block_operands(normal(m, k), normal(n, k, seed=1), square)
            add("block_gemm", a, b, *scales, square, None if square else bias, dtype)


def block_operands(a: Tensor, b: Tensor, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a in 1x128 blocks and b in 1x128 or 128x128, in E4M3, with their scales as `block_gemm` takes them."""
    left, right = quantize_blocks(a, (1, 128)), quantize_blocks(b, (128 if square else 1, 128))
    scale = F.pad(right.scale, (0, -right.scale.shape[1] % 4)) if square else right.scale.t().contiguous()
    return left.data, right.data, left.scale.t().contiguous(), scale


def _experts() -> None:
    for (tokens, chosen, experts), (rows, columns), dtype in (
        ((1, 1, 3), (16, 16), torch.bfloat16),
        ((9, 2, 4), (48, 32), torch.float32),
        ((70, 3, 5), (80, 176), torch.bfloat16),
    ):
        x, w = normal(tokens, columns, dtype=dtype), normal(experts, rows, columns, dtype=dtype, seed=1)
        index = normal(tokens, experts - 1, seed=2).topk(chosen).indices + 1  # none for the first
        add("route", index, experts, 64)
        slots, owner, of_tile, bounds = route(index, experts, 64)
        x8, w8 = quantize_tensor(x), quantize_tensor(w.flatten(0, 1)).data.view(w.shape)
        top, scales = w.abs().amax((1, 2)).float(), normal(experts, seed=3).abs()
        add("expert_amax", w)
        for transposed in (False, True):
            for interleaved in (False, True):
                add("quantize_experts", w, top, transposed, interleaved)
        gathered = gather_t(x8.data, owner, None, None, "e4m3")[0]
        weights = torch.where(owner < 0, 0.0, normal(len(owner), seed=4).abs())
        add("gather_t", x8.data, owner, None, None, "e4m3")
        add("gather_t", x, owner, weights, amax(x) * 4, "e5m2")
        add("grouped_gemm", x8.data, owner, w8, of_tile, x8.scale, scales, dtype)
        plain = gathered.view(torch.uint8).t().contiguous().view(gathered.dtype)
        rows = normal(tokens, seed=8).abs()
        add("grouped_gemm", x8.data, owner, w8, of_tile, rows, scales, dtype)
        add("grouped_gemm", plain, None, w8, of_tile, x8.scale, scales, dtype)
        add("grouped_wgrad", gathered[: columns // 2], gathered, bounds, 64, x8.scale, dtype, tokens > 9)
        y = normal(len(owner), columns, dtype=dtype, seed=5)
        for bias, limit, shift in ((None, 0.5, 1.0), (normal(experts, columns, seed=9), 0.5, 0.0), (w[:, 0], 0.0, 0.0)):
            add("limit_", y, bias, of_tile, owner, limit > 0, limit, shift)
        add("mask_", y, torch.randint(0, 256, (len(owner), columns // 8)).to(torch.uint8))
        for each in (None, normal(tokens, chosen, seed=6)):
            add("combine", y, slots, each)
        for activation, code, parts in (("silu", "sqrt8", 2), ("relu2", "int8", 1)):
            kept = encode_groups(normal(len(owner) * parts, columns, dtype=dtype, seed=7), code, 64)
            codes, maxima = kept.data.view(len(owner), -1), kept.scale.view(len(owner), parts, -1)
            add("expert_gradient", y, codes, maxima, weights, activation, code, 64)


def _hardware() -> None:
    x = normal(7, 24).abs() + 0.5
    for name in ("log2", "exp2", "sqrt", "rsqrt", "reciprocal"):
        add(name, x)
    add("fma", x, x[0], x[:, :1])
    add("fma", x, x + 1, x - 1)


MAKERS = (_quantize, _gemm, _norm, _rope, _activation, _gate, _attention, _loss, _blockwise, _block_gemm, _experts)
for make in (*MAKERS, _hardware):
    make()
