"""Packed sequences: several documents in a row, each attending to itself alone, without a mask of S x S.

A mask may be given as `starts`, int32 (N + 1,): the numbers, among the B * S tokens, at which documents begin, and the
end. Rows end documents: every multiple of S is among them. FlashAttention calls the same `cu_seqlens`.
"""

from __future__ import annotations

from typing import Any, Optional, TypeGuard

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]


def is_starts(mask: Optional[Tensor]) -> TypeGuard[Tensor]:
    """Whether a mask is `starts`."""
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
