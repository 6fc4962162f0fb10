"""The library's fused kernels for attention behind one signature, and the rule that chooses among them (`chosen`).

cuDNN's on Hopper and newer where it takes the shape, heads up to 256 wide on Hopper and 128 on newer (1.7 times as fast
as FlashAttention there: B4 S2048 32 x 128 heads, forward 0.27 ms against 0.48, backward 0.83 against 1.39; with a mask
0.82 + 2.45 against the memory-efficient kernel's 2.20 + 5.68, of 16 x 256 heads 1.07 + 3.59 against 2.02 + 16.4); else
FlashAttention, with a mask the memory-efficient one; packed sequences FlashAttention's for lengths (0.27 + 0.63); and
cuDNN never when `torch.use_deterministic_algorithms` asks for one result each time (it adds up dq in any order).
Measured on an H200 (docs/research/measurements.md).

PyTorch has bindings of its own for the forward kernels, which take less of the host's time than `torch.ops`.

Legend: B batch, S sequence length, D head width; q (B, num_q, S, D), k and v (B, num_kv, S, D), which may be of another
length where nothing hides a key.
"""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.packed import Three, flash_packed, flash_packed_backward, is_starts

# What hides a key from cuDNN.
CUDNN_HIDDEN = -1e30


class Kernel(NamedTuple):
    """One of the library's fused kernels, mask as `attention` takes it.

    forward   ((q, k, v), mask, scale, causal) -> o (B, num_q, S, D), lse FP32 (B, num_q, S or more)
    backward  (do, (q, k, v), o, lse, mask, scale, causal) -> dq, dk, dv, with lse (B, num_q, S)
    packed    whether it takes `starts` (packed.py) as they are
    """

    forward: Callable[[Three, Optional[Tensor], float, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Three, Tensor, Tensor, Optional[Tensor], float, bool], Three]
    packed: bool = False


def additive(
    mask: Tensor, dtype: torch.dtype, batch: int, num_q: int, sequence: int, hidden: Optional[float] = None
) -> Tensor:
    """Mask as the library's kernels want it: additive, rows aligned to 16 bytes, expanded to all heads.

    Hidden keys get the dtype's most negative number, not -inf, so that an all-hidden row stays finite; or `hidden`,
    below which nothing is left then. A boolean mask is written in one pass: every layer makes it anew, twice.
    """
    padded = mask.new_zeros if sequence % 16 else mask.new_empty
    rows = padded((*mask.shape[:-1], sequence + -sequence % 16), dtype=dtype)[..., :sequence]
    if mask.dtype == torch.bool:
        lowest = torch.finfo(dtype).min if hidden is None else hidden
        torch.where(mask, rows.new_zeros(()), rows.new_full((), lowest), out=rows)
    else:
        rows.copy_(mask)
        if hidden is not None:
            rows.clamp_(min=hidden)
    return rows.expand(batch, num_q, sequence, sequence)


def _no_random_state(x: Tensor) -> Tensor:
    """Without dropout the kernels read no random state; their schemas want the tensors all the same."""
    return x.new_empty((), dtype=torch.int64)


def _for_all_heads(qkv: Three, mask: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    q, k, v = qkv
    batch, num_q, sequence, _ = q.shape
    if num_q > k.shape[1]:
        k, v = (x.repeat_interleave(num_q // k.shape[1], dim=1) for x in (k, v))
    return q, k, v, None if mask is None else additive(mask, q.dtype, batch, num_q, sequence)


def _efficient(qkv: Three, mask: Optional[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    causal = causal and mask is None
    o, lse, _, _ = torch._scaled_dot_product_efficient_attention(
        *_for_all_heads(qkv, mask), True, 0.0, causal, scale=scale
    )
    return o, lse


def _efficient_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Three:
    num_q, num_kv = qkv[0].shape[1], qkv[1].shape[1]
    lse, unused = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)), _no_random_state(do)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        do, *_for_all_heads(qkv, mask), o, lse, unused, unused, 0.0, [True, True, True, False],
        causal and mask is None, scale=scale,
    )  # fmt: skip
    if num_q > num_kv:
        dk, dv = (x.unflatten(1, (num_kv, num_q // num_kv)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _cudnn_bias(q: Tensor, mask: Optional[Tensor]) -> Optional[Tensor]:
    """An additive mask of one head or all. What hides a key is finite in FP32 also times log2(e): -inf would make NaN
    of a query that sees nothing."""
    if mask is None:
        return None
    batch, _, sequence, _ = q.shape
    return additive(mask, q.dtype, batch, mask.shape[1], sequence, hidden=CUDNN_HIDDEN)


def _cudnn(qkv: Three, mask: Optional[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch._scaled_dot_product_cudnn_attention(
        *qkv, _cudnn_bias(qkv[0], mask), True, 0.0, causal and mask is None, False, scale=scale
    )
    return o, lse.squeeze(-1)


def _cudnn_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Three:
    unused = _no_random_state(do)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        do, *qkv, o, lse.unsqueeze(-1), unused, unused, _cudnn_bias(qkv[0], mask), None, None, do.shape[2],
        qkv[1].shape[2], 0.0,
        causal and mask is None, scale=scale,
    )  # fmt: skip


def _flash(qkv: Three, mask: Optional[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    assert mask is None
    o, lse, *_ = torch._scaled_dot_product_flash_attention(*qkv, 0.0, causal, scale=scale)
    return o, lse


def _flash_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Three:
    assert mask is None
    rng = do.new_zeros(2, dtype=torch.uint64)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        do, *qkv, o, lse, None, None, do.shape[2], qkv[1].shape[2], 0.0, causal, rng, _no_random_state(do), scale=scale
    )


EFFICIENT = Kernel(_efficient, _efficient_backward)
CUDNN = Kernel(_cudnn, _cudnn_backward)
FLASH = Kernel(_flash, _flash_backward)
PACKED = Kernel(flash_packed, flash_packed_backward, packed=True)


@functools.cache
def windowed(window: int) -> Kernel:
    """FlashAttention among the last `window` tokens of a row or document."""
    forward = functools.partial(flash_packed, window=window)
    return Kernel(forward, functools.partial(flash_packed_backward, window=window), packed=True)


@functools.cache
def _cudnn_width(device: torch.device) -> int:
    """How wide a head cuDNN's attention takes on a GPU: 256 on Hopper, 128 on newer, as PyTorch's own rule for it says
    (`check_cudnn_tensor_shapes`); 0 before, where FlashAttention is faster."""
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000:
        return 256
    return 128 if capability >= (9, 0) else 0


def _cudnn_takes(device: torch.device, sequence: int, width: int) -> bool:
    """Where cuDNN's attention runs, and runs faster than FlashAttention."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return sequence > 1 and width <= _cudnn_width(device)


def chosen(q: Tensor, mask: Optional[Tensor], window: int = 0) -> Optional[Kernel]:
    """The rule: the kernel for q (B, num_q, S, D) on a GPU; None where the reference serves.

    window: as `attention` takes it, shorter than S and where the mask does not hold it.

    The fused kernels take heads up to 256 wide, a multiple of 8. FP32 is for the memory-efficient one, and masks that
    cuDNN does not take. With a mask its backward on Hopper gives NaN for sequences of 64 tokens more than a multiple of
    128 (log-sum-exp below -88; PyTorch 2.11 to 2.13, pytorch issue 196678), so it gets none but multiples; and none in
    FP16, which has no number that hides a key and is finite.
    """
    sequence, width = q.shape[2:]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or width % 8 or width > 256:
        return None
    if q.dtype == torch.float32:
        return EFFICIENT
    if window:
        return windowed(window)
    if is_starts(mask):
        # Asked for sequences of one token, FlashAttention takes a path for decoding, whose backward is wrong (dv).
        return PACKED if sequence > 1 else EFFICIENT
    if mask is None:
        return CUDNN if _cudnn_takes(q.device, sequence, width) else FLASH
    takes = sequence % 128 == 0 and q.dtype == torch.bfloat16 and _cudnn_takes(q.device, sequence, width)
    return CUDNN if takes else EFFICIENT
