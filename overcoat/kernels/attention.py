"""Softmax attention on the fused q/k/v buffer, forward and backward from (q, k, v, o, log-sum-exp).

    S = scale * q k^T + mask,  P = softmax(S),  o = P v,  lse = log sum exp S

The backward needs neither S nor P: with D = sum_d(do * o) per query,

    P = exp(S - lse),  dv = P^T do,  dS = P * (do v^T - D),  dq = scale * dS k,  dk = scale * dS^T q

so q, k, v, o and lse are enough for it, and the caller may pass them decoded from 8 bits. Grouped-query heads: query
head i reads key/value head i // (num_q / num_kv).

Packed sequences. Several documents in a row, each attending only to itself, need no S x S mask: a mask may be `starts`,
int32 (N + 1,): the positions among the B * S tokens at which documents begin, and the end. Documents do not cross rows:
every multiple of S is among them. FlashAttention calls the same tensor `cu_seqlens`.

The reference forms S in FP32. On CUDA one of PyTorch's fused kernels runs (`chosen`):

* cuDNN's on Hopper and newer, for heads up to 256 wide on Hopper and 128 on newer. It is 1.7 times as fast as
  FlashAttention: B4 S2048 32 x 128 heads, forward 0.27 ms against 0.48, backward 0.83 against 1.39; with a mask 0.82 +
  2.45 against the memory-efficient kernel's 2.20 + 5.68; 16 x 256 heads 1.07 + 3.59 against 2.02 + 16.4. Never under
  `torch.use_deterministic_algorithms`, since it sums dq in any order;
* else FlashAttention; with a mask the memory-efficient kernel;
* for packed sequences FlashAttention's variable-length kernel (0.27 + 0.63).

Measured on an H200 (docs/research/measurements.md). The forward kernels are called through PyTorch's own bindings,
which take less host time than `torch.ops`.

No fused kernel has both a cap of scores and a backward, so capped scores use the reference everywhere, one row of the
batch at a time:

    S = cap * tanh(scale * q k^T / cap) + mask,  dS is times (1 - tanh^2)

Legend: B batch, S sequence length, D head width, T = B * S; q (B, num_q, S, D), k and v (B, num_kv, S, D); k and v may
have another length if nothing is masked. Columns of a fused buffer: [q heads | k | v].
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
    """Return a caller's `starts` as int32 on `device`, checked.

    ValueError: not an int32 or int64 tensor (N + 1,) with N at least `batch`; or, if it is on the CPU, its numbers are
    not starts. On a GPU the numbers are not checked, since the host would wait, nor in compiled code, which cannot.
    """
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
    """Return `starts` from position ids (B, S), which count the tokens of each document.

    A document begins where they do not rise by one, as in transformers' masks; or with `skips`, as in its flash
    attention, where they return to the row's smallest. The host waits for the device, since the number of documents is
    the result's shape.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    later = position_ids[:, 1:] == position_ids.amin(-1, keepdim=True) if skips else position_ids.diff(dim=-1) != 1
    begins[:, 1:] = later
    (found,) = begins.flatten().nonzero(as_tuple=True)
    return torch.nn.functional.pad(found, (0, 1), value=position_ids.numel()).int()


def dense_mask(starts: Tensor, batch: int, sequence: int, causal: bool = True, window: int = 0) -> Tensor:
    """Return `starts` as a mask, bool (B, 1, S, S), True where a query sees a key: in its document, and if `causal` by
    `causal_pairs`."""
    tokens = torch.arange(batch * sequence, dtype=torch.int32, device=starts.device)
    document = torch.searchsorted(starts, tokens, right=True, out_int32=True).view(batch, sequence)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & causal_pairs(sequence, window, starts.device) if causal else same


def causal_pairs(sequence: int, window: int, device: torch.device) -> Tensor:
    """Return bool (S, S), True where the key is among the last `window` tokens up to the query; 0: all up to it."""
    visible = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible


# ---- CUDA: FlashAttention over documents, or rows, and windows of them -----------------------------------------------
# The row length serves as the longest document's length, which bounds the grid: the true one would make the host wait
# in every layer. Blocks beyond a document's end return at once.

# Rows between documents in the backward's FP32 dq, so that a tile may write past a document's end.
ROWS_BETWEEN = 128


def flash_packed(
    qkv: Three, mask: Optional[Tensor], scale: float, causal: bool, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Return o and lse as `Kernel.forward` does; mask: `starts`, or None: each row is a document."""
    rows, starts = (qkv[0].shape[0], qkv[0].shape[2]), _starts(qkv[0], mask)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_by_token(*qkv), starts, starts, rows[1], rows[1], 0.0, causal, False, scale=scale, **_limits(window)
    )
    return o.unflatten(0, rows).transpose(1, 2), lse.unflatten(1, rows).transpose(0, 1)


def flash_packed_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool, window: int = 0
) -> Three:
    """Return dq, dk, dv as `Kernel.backward` does; mask as in `flash_packed`."""
    rows, starts = (do.shape[0], do.shape[2]), _starts(do, mask)
    # Without dropout the random state is not read, but the schema requires it.
    state, offset = do.new_zeros(2, dtype=torch.uint64), do.new_zeros((), dtype=torch.int64)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *_by_token(do, *qkv, o), lse.transpose(0, 1).flatten(1), starts, starts, rows[1], rows[1], 0.0, causal,
        state, offset, scale=scale, **_limits(window),
    )  # fmt: skip
    dq, dk, dv = (x.unflatten(0, rows).transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def _starts(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return `starts` as given, or those of the rows of x (B, heads, S, D)."""
    batch, sequence = x.shape[0], x.shape[2]
    if mask is not None:
        return mask.contiguous()
    return torch.arange(0, batch * sequence + 1, sequence, dtype=torch.int32, device=x.device)


def _limits(window: int) -> dict[str, int]:
    """Return the window as FlashAttention's arguments, which count the tokens before a query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _by_token(*heads: Tensor) -> list[Tensor]:
    """Return each (B, heads, S, D) as a view (T, heads, D)."""
    return [x.transpose(1, 2).flatten(0, 1) for x in heads]


# What an additive mask adds to hide a key, for cuDNN.
CUDNN_HIDDEN = -1e30


class Kernel(NamedTuple):
    """One of PyTorch's fused kernels; mask as in `attention`.

    forward   ((q, k, v), mask, scale, causal) -> o (B, num_q, S, D), lse FP32 (B, num_q, S or more)
    backward  (do, (q, k, v), o, lse, mask, scale, causal) -> dq, dk, dv, with lse (B, num_q, S)
    packed    True if its mask may be `starts`
    """

    forward: Callable[[Three, Optional[Tensor], float, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Three, Tensor, Tensor, Optional[Tensor], float, bool], Three]
    packed: bool = False


def additive(
    mask: Tensor, dtype: torch.dtype, batch: int, num_q: int, sequence: int, hidden: Optional[float] = None
) -> Tensor:
    """Return a mask as the fused kernels need it: additive, rows padded to 16 elements, expanded to all heads.

    Hidden keys get the dtype's most negative number, not -inf, so that an all-hidden row stays finite; or `hidden`, to
    which lower values are raised. A boolean mask is written in one pass: every layer writes it, twice.
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
    """Return a placeholder: without dropout the kernels read no random state, but their schemas require it."""
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
    """Return the mask as additive, of one head or all. Hidden keys get a number that stays finite times log2(e): with
    -inf a query that sees no key would become NaN."""
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
    """Return FlashAttention limited to the last `window` tokens of a row or document."""
    forward = functools.partial(flash_packed, window=window)
    return Kernel(forward, functools.partial(flash_packed_backward, window=window), packed=True)


@functools.cache
def _cudnn_width(device: torch.device) -> int:
    """Return the widest head of cuDNN's attention on a GPU, by PyTorch's own rule (`check_cudnn_tensor_shapes`).

    256 on Hopper, 128 on newer; 0 on older ones, where FlashAttention is faster.
    """
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
    """Return the fused kernel for q (B, num_q, S, D) on a GPU; None: use the reference.

    window: as in `attention`; 0 if it is S or longer, or if the mask contains it.

    The fused kernels take heads up to 256 wide, a multiple of 8. The memory-efficient one runs FP32, and masks that
    cuDNN does not take. cuDNN's backward with a mask on Hopper returns NaN for sequences of 128 n + 64 tokens
    (log-sum-exp below -88; PyTorch 2.11 to 2.13, pytorch issue 196678), so with a mask it gets multiples of 128 only;
    and no FP16, in which no finite number hides a key.
    """
    sequence, width = q.shape[2:]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or width % 8 or width > 256:
        return None
    if q.dtype == torch.float32:
        return EFFICIENT
    if window:
        return windowed(window)
    if is_starts(mask):
        # For sequences of one token FlashAttention uses a decoding path whose backward has a wrong dv.
        return PACKED if sequence > 1 else EFFICIENT
    if mask is None:
        return CUDNN if _cudnn_takes(q.device, sequence, width) else FLASH
    takes = sequence % 128 == 0 and q.dtype == torch.bfloat16 and _cudnn_takes(q.device, sequence, width)
    return CUDNN if takes else EFFICIENT


def heads_of(qkv: Tensor, batch: int, num_q: int, num_kv: int) -> Three:
    """Split (T, (num_q + 2 num_kv) * D) into views q (B, num_q, S, D), k and v (B, num_kv, S, D)."""
    heads = qkv.reshape(batch, qkv.shape[0] // batch, num_q + 2 * num_kv, -1).transpose(1, 2)
    q, k, v = heads.split_with_sizes((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _tokens_first(x: Tensor) -> Tensor:
    """Reshape (B, heads, S, D) to (T, heads * D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def token_rows(dtype: torch.dtype, *parts: Tensor) -> Three:
    """Return each part (B, heads, S, D) as (T, heads * D) contiguous; a view if the kernel wrote tokens first."""
    dq, dk, dv = (_tokens_first(part).to(dtype) for part in parts)
    return dq, dk, dv


def _scores(
    q: Tensor, k: Tensor, mask: Optional[Tensor], scale: float, causal: bool, cap: float, window: int
) -> Tuple[Tensor, Optional[Tensor]]:
    """Return FP32 scores (B, num_kv, R, S, S), R = num_q / num_kv, masked; and with a cap the tanh inside."""
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


# A query with a log-sum-exp below this sees no key: its mask is -inf, or the most negative BF16 or FP32 number.
NOTHING_VISIBLE = -1e30


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(S - lse); zeros for a query that sees no key (all padding)."""
    return torch.exp(scores - lse.masked_fill(lse < NOTHING_VISIBLE, 0.0))


def _plain(
    qkv: Three, mask: Optional[Tensor], scale: float, causal: bool, cap: float = 0.0, window: int = 0
) -> Tuple[Tensor, Tensor]:
    """Reference of `Kernel.forward`, in plain PyTorch."""
    q, k, v = qkv
    scores, _ = _scores(q, k, mask, scale, causal, cap, window)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = _probabilities(scores, lse) @ v.float().unsqueeze(2)
    return o.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool,
    cap: float = 0.0, window: int = 0,
) -> Three:  # fmt: skip
    """Reference of `Kernel.backward`, in plain PyTorch; gradients are FP32."""
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
    """Return the mask of each row of the batch."""
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
    """Compute attention over rotated q, k, v.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        mask: None; or (B or 1, 1 or num_q, S, S), bool (True = visible) or additive; or `starts`, int32 (N + 1,).
        causal: True if a token sees only itself and earlier ones; ignored with a (..., S, S) mask.
        cap: scores are cap * tanh(score / cap) (Gemma 2); 0: not.
        window: with `causal`, a token sees the last `window` tokens, itself included; 0: no limit; ignored with a
            (..., S, S) mask.

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
    """Return the gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
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
    """Run `attention` with a fused kernel; qkv: `heads_of` a contiguous buffer; mask: one that the kernel takes."""
    o, lse = kernel.forward(qkv, mask, scale, causal)
    sequence = qkv[0].shape[2]
    return _tokens_first(o), (lse if lse.shape[2] == sequence else lse[..., :sequence]).contiguous()


def backward_by(
    kernel: Kernel, do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float,
    causal: bool = True,
) -> Three:  # fmt: skip
    """Run `attention_backward` with a fused kernel; do, o and lse contiguous, qkv as in `forward_by`."""
    q = qkv[0]
    do, o = (x.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2) for x in (do, o))
    return token_rows(q.dtype, *kernel.backward(do, qkv, o, lse, mask, scale, causal))


@attention.cuda
def _(qkv, mask, batch, num_q, num_kv, scale, causal=True, cap=0.0, window=0):
    # cuDNN takes strided heads, but crashes if a head's elements are strided.
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
    """Return the kernel, None for the reference, and its mask: `starts` or a window as (..., S, S) if it needs that."""
    batch, _, sequence, _ = q.shape
    if not causal or window >= sequence or not (mask is None or is_starts(mask)):
        window = 0
    kernel = None if cap else chosen(q, mask, window)
    if kernel is None or kernel.packed or (mask is None and not window):
        return kernel, mask
    if mask is None:
        return kernel, causal_pairs(sequence, window, q.device)[None, None]
    return kernel, dense_mask(mask, batch, sequence, causal, window) if is_starts(mask) else mask
