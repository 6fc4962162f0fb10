"""Masks of transformers' kinds of attention, as Overcoat's attention takes them.

sdpa and eager give the layer a mask of all pairs, flex attention a BlockMask; kinds of flash attention give lengths,
padding or position ids. models/causal.py gives where sequences begin.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from overcoat.kernels.packed import document_starts, given_starts


def reads_lengths(config: Any) -> bool:
    """Whether transformers would compute attention by a kernel that is given lengths instead of a mask."""
    kind = config._attn_implementation
    return kind is not None and "flash" in kind and not kind.startswith("paged|")


def mask_from(mask: Any, inputs: dict[str, Any], x: Tensor, causal: bool) -> Any:
    """What flash and flex attention read, as `check_mask` takes it: lengths, padding (B, S), positions, a BlockMask."""
    batch, sequence = x.shape[:2]
    if type(mask).__name__ == "BlockMask":
        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], sequence, sequence, x.device)
    starts = inputs.get("cu_seq_lens_q")
    if starts is not None:
        return given_starts(starts, batch, sequence, x.device).view(1, 1, -1, 1)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        visible = mask.bool()[:, None, None].expand(batch, 1, sequence, sequence)
        return visible.tril() if causal else visible
    positions = inputs.get("position_ids")
    # Compiled code does not look for packed sequences, here as little as with sdpa.
    if mask is not None or not causal or positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return mask
    starts = document_starts(positions.expand(batch, -1))
    return None if len(starts) == batch + 1 else starts.view(1, 1, -1, 1)


def as_starts(mask: Any) -> Optional[Tensor]:
    """What models/causal.py gives where sequences are packed, as attention takes it; None for other masks."""
    given = isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] > 1
    return mask.flatten() if given and mask.numel() == mask.shape[2] else None


def check_mask(mask: Any, sequence: int) -> Optional[Tensor]:
    """The mask a layer received, as attention takes it; ValueError for kinds that only other attention code reads."""
    if mask is None:
        return None
    starts = as_starts(mask)
    if starts is not None:
        return starts
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != (sequence, sequence):
        kind = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {kind}; Overcoat's attention takes None or (batch, heads or 1, {sequence}, {sequence})"
            '. Load the model with attn_implementation="sdpa" (or "eager").'
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {mask.dtype}; Overcoat's attention takes bool (True = visible) or an additive floating "
            "mask. Write mask.bool() for one of zeros and ones."
        )
    return mask
