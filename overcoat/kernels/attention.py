"""Softmax attention on the fused q/k/v buffer, forward and backward from (q, k, v, o, log-sum-exp).

    S = scale * q k^T + mask,  P = softmax(S),  o = P v,  lse = log sum exp S

The backward needs neither S nor P: with D = sum_d(do * o) per query,

    P = exp(S - lse),  dv = P^T do,  dS = P * (do v^T - D),  dq = scale * dS k,  dk = scale * dS^T q

so attention saves q, k, v, o and lse, and the caller may pass them decoded from 8 bits. Grouped-query heads: query
head i reads key/value head i // (num_q / num_kv).

Packed sequences. Several documents in a row, each attending to itself alone, need no S x S mask: a mask may be
`starts`, int32 (N + 1,): the positions among the B * S tokens at which documents begin, and the end. Rows end
documents: every multiple of S is among them. FlashAttention calls the same tensor `cu_seqlens`.

The reference forms S in FP32. On CUDA one of the library's fused kernels runs (`chosen`): cuDNN's on Hopper and newer
where it takes the shape, heads up to 256 wide on Hopper and 128 on newer (1.7 times as fast as FlashAttention there: B4
S2048 32 x 128 heads, forward 0.27 ms against 0.48, backward 0.83 against 1.39; with a mask 0.82 + 2.45 against the
memory-efficient kernel's 2.20 + 5.68; 16 x 256 heads 1.07 + 3.59 against 2.02 + 16.4); else FlashAttention; with a mask
the memory-efficient kernel; packed sequences FlashAttention's variable-length kernel (0.27 + 0.63). cuDNN is never used
under `torch.use_deterministic_algorithms`, since it sums dq in any order. Measured on an H200
(docs/research/measurements.md). PyTorch's own bindings of the forward kernels take less host time than `torch.ops`.

No fused kernel has a cap of scores with a backward, so capped scores use the reference everywhere, one row of the
batch at a time:

    S = cap * tanh(scale * q k^T / cap) + mask,  dS is times (1 - tanh^2)

Legend: B batch, S sequence length, D head width, T = B * S; q (B, num_q, S, D), k and v (B, num_kv, S, D), which may
have another length where nothing hides a key. Columns of a fused buffer: [q heads | k | v].
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, TypeGuard

import torch
from torch import Tensor

from overcoat.kernels.op import op

Three = tuple[Tensor, Tensor, Tensor]


def is_starts(mask: Optional[Tensor]) -> TypeGuard[Tensor]:
    """True if a mask is `starts`."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 1


def given_starts(given: Any, batch: int, sequence: int, device: torch.device) -> Tensor:
    """`starts` that a caller gives, on `device`. ValueError: not a whole-numbered tensor (N + 1,) with N at least
    `batch`; or, where it lies on the CPU, numbers that are no starts. On a GPU they are not looked at, as the host
    would wait, nor in compiled code, which cannot."""
    asked = f"cu_seq_lens_q must say where the N documents of {batch} rows of {sequence} tokens begin, and the end"
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
        kind = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{asked}, int32 (N + 1,); it is {kind}. Leave it out to have them found in position_ids")
    if len(given) <= batch:
        raise ValueError(f"{asked}; it has {len(given)} numbers, and rows end documents, so N is {batch} or more")
    if given.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = torch.arange(0, batch * sequence + 1, sequence)
        rises = given[0] == 0 and given[-1] == batch * sequence and not (given.diff() < 0).any()
        if not rises or not torch.isin(rows, given).all():
            raise ValueError(
                f"{asked}: from 0 up to {batch * sequence}, every multiple of {sequence} among them; it begins with "
                f"{given[:6].tolist()} and ends with {given[-3:].tolist()}"
            )
    starts = given.int()
    if starts.device == device or device.type != "cuda":
        return starts.to(device)
    return starts.pin_memory().to(device, non_blocking=True)


def document_starts(position_ids: Tensor, skips: bool = False) -> Tensor:
    """`starts` of position ids (B, S), which count the tokens of each document.

    A document begins where they do not rise by one, as in transformers' masks; or with `skips`, as in its flash
    attention, where they come back to the row's smallest. Waits for the device: how many there are is the shape of the
    result.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    later = position_ids[:, 1:] == position_ids.amin(-1, keepdim=True) if skips else position_ids.diff(dim=-1) != 1
    begins[:, 1:] = later
    (found,) = begins.flatten().nonzero(as_tuple=True)
    return torch.nn.functional.pad(found, (0, 1), value=position_ids.numel()).int()


def dense_mask(starts: Tensor, batch: int, sequence: int, causal: bool = True, window: int = 0) -> Tensor:
    """The same as bool (B, 1, S, S), True where a query sees a key: within its document, and if `causal` as
    `causal_pairs` says."""
    tokens = torch.arange(batch * sequence, dtype=torch.int32, device=starts.device)
    document = torch.searchsorted(starts, tokens, right=True, out_int32=True).view(batch, sequence)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & causal_pairs(sequence, window, starts.device) if causal else same


def causal_pairs(sequence: int, window: int, device: torch.device) -> Tensor:
    """bool (S, S), True where the key is one of the last `window` tokens up to the query (0: of all)."""
    visible = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible


# ---- CUDA: FlashAttention over documents, or rows, and windows of them -----------------------------------------------
# Nothing is longer than a row, and that bounds the grid: asking for the longest document would make the host wait in
# every layer. Blocks beyond a document's end return at once.

# The backward holds dq in FP32 with so many rows between documents, so that a tile may write past a document's end.
ROWS_BETWEEN = 128


def flash_packed(
    qkv: Three, mask: Optional[Tensor], scale: float, causal: bool, window: int = 0
) -> tuple[Tensor, Tensor]:
    """o and lse as in `attention_fused.Kernel`; mask: `starts`, or None: rows are documents."""
    rows, starts = (qkv[0].shape[0], qkv[0].shape[2]), _starts(qkv[0], mask)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_by_token(*qkv), starts, starts, rows[1], rows[1], 0.0, causal, False, scale=scale, **_limits(window)
    )
    return o.unflatten(0, rows).transpose(1, 2), lse.unflatten(1, rows).transpose(0, 1)


def flash_packed_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool, window: int = 0
) -> Three:
    """dq, dk, dv as in `attention_fused.Kernel`; mask as in `flash_packed`."""
    rows, starts = (do.shape[0], do.shape[2]), _starts(do, mask)
    # Without dropout it reads no random state; its schema wants the tensors all the same.
    state, offset = do.new_zeros(2, dtype=torch.uint64), do.new_zeros((), dtype=torch.int64)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *_by_token(do, *qkv, o), lse.transpose(0, 1).flatten(1), starts, starts, rows[1], rows[1], 0.0, causal,
        state, offset, scale=scale, **_limits(window),
    )  # fmt: skip
    dq, dk, dv = (x.unflatten(0, rows).transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def _starts(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """`starts` as given, or of the rows of x (B, heads, S, D)."""
    batch, sequence = x.shape[0], x.shape[2]
    if mask is not None:
        return mask.contiguous()
    return torch.arange(0, batch * sequence + 1, sequence, dtype=torch.int32, device=x.device)


def _limits(window: int) -> dict[str, int]:
    """FlashAttention counts the tokens before a query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _by_token(*heads: Tensor) -> list[Tensor]:
    """(B, heads, S, D), each as a view (T, heads, D)."""
    return [x.transpose(1, 2).flatten(0, 1) for x in heads]


# What hides a key from cuDNN.
CUDNN_HIDDEN = -1e30


class Kernel(NamedTuple):
    """One of the library's fused kernels, mask as `attention` takes it.

    forward   ((q, k, v), mask, scale, causal) -> o (B, num_q, S, D), lse FP32 (B, num_q, S or more)
    backward  (do, (q, k, v), o, lse, mask, scale, causal) -> dq, dk, dv, with lse (B, num_q, S)
    packed    True if it takes `starts` as they are
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
    """True if cuDNN's attention takes these inputs and is faster than FlashAttention."""
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


def heads_of(qkv: Tensor, batch: int, num_q: int, num_kv: int) -> Three:
    """(T, (num_q + 2 num_kv) * D) -> views q (B, num_q, S, D), k and v (B, num_kv, S, D)."""
    heads = qkv.reshape(batch, qkv.shape[0] // batch, num_q + 2 * num_kv, -1).transpose(1, 2)
    q, k, v = heads.split_with_sizes((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _tokens_first(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (T, heads * D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def token_rows(dtype: torch.dtype, *parts: Tensor) -> Three:
    """Parts (B, heads, S, D), each as (T, heads * D) contiguous; a view where the kernel wrote tokens first."""
    dq, dk, dv = (_tokens_first(part).to(dtype) for part in parts)
    return dq, dk, dv


def _scores(
    q: Tensor, k: Tensor, mask: Optional[Tensor], scale: float, causal: bool, cap: float, window: int
) -> Tuple[Tensor, Optional[Tensor]]:
    """FP32 scores (B, num_kv, R, S, S), R = num_q / num_kv; without a mask causal, or of all pairs. With a cap also the
    tanh inside."""
    if mask is not None and is_starts(mask):
        mask = dense_mask(mask, q.shape[0], q.shape[2], causal, window)
    scores = q.float().unflatten(1, (k.shape[1], -1)) @ k.float().unsqueeze(2).transpose(-1, -2)
    inside = torch.tanh(scores * (scale / cap)) if cap else None
    scores = scale * scores if inside is None else cap * inside
    if mask is None and not causal:
        return scores, inside
    if mask is None:
        mask = causal_pairs(scores.shape[-1], window, q.device)
    else:
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, scores.shape[1:3])
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float(), inside


# A query whose log-sum-exp lies below this sees no key: its mask is -inf, or the most negative BF16 or FP32 number.
NOTHING_VISIBLE = -1e30


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(S - lse); a query that may see no key (all padding) gets zeros."""
    return torch.exp(scores - lse.masked_fill(lse < NOTHING_VISIBLE, 0.0))


def _plain(
    qkv: Three, mask: Optional[Tensor], scale: float, causal: bool, cap: float = 0.0, window: int = 0
) -> Tuple[Tensor, Tensor]:
    """`Kernel.forward` in plain PyTorch: the reference."""
    q, k, v = qkv
    scores, _ = _scores(q, k, mask, scale, causal, cap, window)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = _probabilities(scores, lse) @ v.float().unsqueeze(2)
    return o.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool,
    cap: float = 0.0, window: int = 0,
) -> Three:  # fmt: skip
    """`Kernel.backward` likewise; gradients in FP32."""
    q, k, v = qkv
    groups = (k.shape[1], -1)
    do_, o_ = do.float().unflatten(1, groups), o.float().unflatten(1, groups)
    scores, inside = _scores(q, k, mask, scale, causal, cap, window)
    p = _probabilities(scores, lse.unflatten(1, groups).unsqueeze(-1))
    ds = p * (do_ @ v.float().unsqueeze(2).transpose(-1, -2) - (do_ * o_).sum(-1, keepdim=True))
    ds = (ds if inside is None else ds * (1 - inside.square())) * scale
    dq = (ds @ k.float().unsqueeze(2)).flatten(1, 2)
    dk = (ds.transpose(-1, -2) @ q.float().unflatten(1, groups)).sum(2)
    return dq, dk, (p.transpose(-1, -2) @ do_).sum(2)


PLAIN = Kernel(_plain, _plain_backward)


def _by_row(mask: Optional[Tensor], batch: int, sequence: int, causal: bool, window: int) -> Sequence[Optional[Tensor]]:
    """The mask of each row of the batch."""
    if mask is None:
        return [None] * batch
    if is_starts(mask):
        mask = dense_mask(mask, batch, sequence, causal, window)
    return mask.expand(batch, *mask.shape[1:]).split(1)


@op
def attention(
    qkv: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int, scale: float, causal: bool = True,
    cap: float = 0.0, window: int = 0,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over rotated q, k, v.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        mask: None; or (B or 1, 1 or num_q, S, S), bool (True = visible) or additive; or where documents begin, int32
            (N + 1,).
        causal: whether a token sees only those before it, where the mask is not of all pairs.
        cap: scores are cap * tanh(score / cap) (Gemma 2); 0: as they are.
        window: causal attention among the last `window` tokens up to a query's own; 0: all. A mask of all pairs holds
            it already, and then it changes nothing.

    Returns:
        o (T, num_q * D) of qkv's dtype; lse FP32 (B, num_q, S).
    """
    if cap and batch > 1:
        sequence, last = qkv.shape[0] // batch, (1, num_q, num_kv, scale, causal, cap, window)
        rows = zip(qkv.contiguous().split(sequence), _by_row(mask, batch, sequence, causal, window), strict=True)
        o, lse = (torch.cat(parts) for parts in zip(*[attention.reference(*row, *last) for row in rows], strict=True))
        return o, lse
    o, lse = _plain(heads_of(qkv, batch, num_q, num_kv), mask, scale, causal, cap, window)
    return _tokens_first(o), lse


@attention.fake
def _(qkv, mask, batch, num_q, num_kv, *_):
    width = qkv.shape[1] // (num_q + 2 * num_kv)
    lse = qkv.new_empty(batch, num_q, qkv.shape[0] // batch, dtype=torch.float32)
    return qkv.new_empty(qkv.shape[0], num_q * width), lse


@op
def attention_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int,
    scale: float, causal: bool = True, cap: float = 0.0, window: int = 0,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
    sequence, last = qkv.shape[0] // batch, (num_q, num_kv, scale, causal, cap, window)
    if cap and batch > 1:
        parts = [x.contiguous().split(sequence) for x in (do, qkv, o)]
        masks = _by_row(mask, batch, sequence, causal, window)
        rows = zip(*parts, lse.contiguous().split(1), masks, strict=True)
        gradients = [attention_backward.reference(*row, 1, *last) for row in rows]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        return dq, dk, dv
    do, o = (x.reshape(batch, sequence, num_q, -1).transpose(1, 2) for x in (do, o))
    whole = heads_of(qkv, batch, num_q, num_kv)
    return token_rows(qkv.dtype, *_plain_backward(do, whole, o, lse, mask, scale, causal, cap, window))


@attention_backward.fake
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, *_):
    tokens, width = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
    return tuple(qkv.new_empty(tokens, heads * width) for heads in (num_q, num_kv, num_kv))


def forward_by(
    kernel: Kernel, qkv: Three, mask: Optional[Tensor], scale: float, causal: bool = True
) -> Tuple[Tensor, Tensor]:
    """`attention` by one of the library's kernels, from `heads_of` a contiguous buffer and a mask that it takes."""
    o, lse = kernel.forward(qkv, mask, scale, causal)
    sequence = qkv[0].shape[2]
    return _tokens_first(o), (lse if lse.shape[2] == sequence else lse[..., :sequence]).contiguous()


def backward_by(
    kernel: Kernel, do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float,
    causal: bool = True,
) -> Three:  # fmt: skip
    """`attention_backward` by one of the library's kernels; do, o and lse contiguous, qkv as in `forward_by`."""
    q = qkv[0]
    do, o = (x.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2) for x in (do, o))
    return token_rows(q.dtype, *kernel.backward(do, qkv, o, lse, mask, scale, causal))


@attention.cuda
def _(qkv, mask, batch, num_q, num_kv, scale, causal=True, cap=0.0, window=0):
    # cuDNN takes heads that lie apart, but crashes on elements that do.
    parts = heads_of(qkv.contiguous(), batch, num_q, num_kv)
    kernel, taken = _kernel_and_mask(parts[0], mask, causal, cap, window)
    if kernel is None:
        return attention.reference(qkv, mask, batch, num_q, num_kv, scale, causal, cap, window)
    return forward_by(kernel, parts, taken, scale, causal)


@attention_backward.cuda
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal=True, cap=0.0, window=0):
    parts = heads_of(qkv.contiguous(), batch, num_q, num_kv)
    kernel, taken = _kernel_and_mask(parts[0], mask, causal, cap, window)
    if kernel is None:
        return attention_backward.reference(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal, cap, window)
    return backward_by(kernel, do.contiguous(), parts, o.contiguous(), lse.contiguous(), taken, scale, causal)


def _kernel_and_mask(
    q: Tensor, mask: Optional[Tensor], causal: bool, cap: float, window: int
) -> Tuple[Optional[Kernel], Optional[Tensor]]:
    """The kernel, None for the reference, and the mask that it gets: one of all pairs where it knows neither window nor
    `starts`."""
    batch, _, sequence, _ = q.shape
    if not causal or window >= sequence or not (mask is None or is_starts(mask)):
        window = 0
    kernel = None if cap else chosen(q, mask, window)
    if kernel is None or kernel.packed or (mask is None and not window):
        return kernel, mask
    if mask is None:
        return kernel, causal_pairs(sequence, window, q.device)[None, None]
    return kernel, dense_mask(mask, batch, sequence, causal, window) if is_starts(mask) else mask
