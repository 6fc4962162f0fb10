"""Shapes and workspaces of a GPU's fused attention kernels, and copies that kernels of experts make of their weights,
for dry runs on the meta device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from overcoat.kernels.attention import ROWS_BETWEEN, attention, attention_backward, is_starts
from overcoat.kernels.experts import expert_amax, quantize_experts

# CUDA's caching allocator hands out multiples of this many bytes.
ALIGNMENT = 512

_aten = torch.ops.aten


def aligned(size: int) -> int:
    """Return the bytes that an allocation of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def workspace(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes that an op allocates on a GPU and frees before it returns.

    Experts' weights that are transposed are copied. The fused backward of attention (cuDNN's and FlashAttention's) adds
    up dq in FP32 and keeps sum(do * o) per query. With grouped-query heads it holds dk and dv of every query head
    before it adds them up. Both as measured on an H200 with cuDNN, to 1 MiB (benchmarks/results/memory.jsonl). With
    a mask there is an additive copy of it; the memory-efficient kernel, which runs where cuDNN takes none, repeats k
    and v. Packed sequences leave rows of dq between documents.
    """
    if func is attention_backward:
        do, _, _, _, mask, batch, num_q, num_kv, *last = args
        mask, made = _all_pairs(mask, do, batch)
        grouped = 2 * aligned(do.nbytes) if _is_grouped(mask) and num_q != num_kv else 0
        documents = len(mask) - 1 if is_starts(mask) else batch if mask is None and any(last[3:]) else 0  # a window
        rows = do.shape[0] + ROWS_BETWEEN * documents
        return _accumulators(rows * do.shape[1], rows * num_q) + grouped + _masked(do, mask, num_q, num_kv) + made
    if func is attention:
        qkv, mask, batch, num_q, num_kv, *_ = args
        q_columns = qkv.shape[1] * num_q // (num_q + 2 * num_kv)
        mask, made = _all_pairs(mask, qkv, batch)
        return _masked(qkv[:, :q_columns], mask, num_q, num_kv) + made
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        q, k = args[1], args[2]  # (B, heads, S, D)
        repeated = 2 * q.nbytes if k.shape[1] != q.shape[1] else 0
        return _accumulators(q.numel(), math.prod(q.shape[:3])) + repeated
    return aligned(copied(func, args))


def copied(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the contiguous copy that a kernel makes of experts' weights (gpt-oss stores their
    transpose)."""
    return args[0].nbytes if func in (expert_amax, quantize_experts) and not args[0].is_contiguous() else 0


def _accumulators(elements: int, queries: int) -> int:
    return aligned(4 * elements) + aligned(4 * queries)


def _all_pairs(mask: Tensor | None, x: Tensor, batch: int) -> tuple[Tensor | None, int]:
    """Return the mask that a kernel gets for x (T, columns), and its bytes if made for it (from `starts`, in FP32)."""
    if not is_starts(mask) or x.dtype != torch.float32:
        return mask, 0
    sequence = x.shape[0] // batch
    dense = torch.empty((batch, 1, sequence, sequence), dtype=torch.bool, device="meta")
    return dense, aligned(dense.nbytes)


def _is_grouped(mask: Tensor | None) -> bool:
    """True if the kernel takes grouped k and v without repeating them: cuDNN's (`kernels.attention.chosen`)."""
    return mask is None or is_starts(mask) or mask.shape[-1] % 128 == 0


def _masked(x: Tensor, mask: Tensor | None, num_q: int, num_kv: int) -> int:
    """For `x` (T, num_q * D), one of q, o and their gradients."""
    if mask is None or is_starts(mask):
        return 0
    repeated = 2 * aligned(x.nbytes) if num_q != num_kv and not _is_grouped(mask) else 0
    sequence = mask.shape[-1]
    rows = mask.numel() // sequence * (sequence + -sequence % 16)
    return aligned(rows * x.element_size()) + repeated


class LibraryAttention(TorchFunctionMode):
    """Replaces `F.scaled_dot_product_attention` on the meta device, where it would store all scores, by the shapes of
    the fused kernels that run on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or args[0].device.type != "meta":
            return func(*args, **kwargs)
        mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
        if mask is None:
            causal = kwargs.get("is_causal", False)
            return _aten._scaled_dot_product_flash_attention(*args[:3], 0.0, causal, scale=scale)[0]
        q = args[0]
        bias = mask if mask.dtype == q.dtype else torch.empty_like(mask, dtype=q.dtype)
        bias = bias.expand(q.shape[0], q.shape[1], *mask.shape[-2:])
        return _aten._scaled_dot_product_efficient_attention(*args[:3], bias, True, scale=scale)[0]
