"""Attention masks of transformers as Overcoat's attention takes them, and two internal marks in the place of a mask.

sdpa and eager give a layer a mask of all pairs, flex attention a BlockMask; kinds of flash attention give lengths,
padding or position ids. Two marks that only converted layers read avoid work and host syncs:

    causal              a mask without elements: every token sees all before it (`nothing_hidden`)
    packed documents    where documents begin, int32 (1, 1, N + 1, 1), which no other mask looks like: the `starts` of
                        kernels/attention.py, instead of a mask of S x S

Why. Without a mask transformers looks for packed documents in the position ids, a host sync, even where the model has
just made these ids itself. It is the only sync of a step: the GPU runs out of queued work, and idles while the host
queues the first layers, 2 ms of a 7B's 400. transformers passes masks of four dimensions on as they are, so the mark
avoids that. Finding the documents costs one sync, since their number is a shape, and one more in transformers if they
are too many for the mark; none if the caller gives them, as `cu_seq_lens_q`.

With either mark a layer adds its own sliding window, by FlashAttention: a mask of 2048 x 2048 pairs, 4 rows and heads
256 wide would cost 4.7 to 18 ms a layer.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from overcoat.kernels.attention import causal_pairs, dense_mask, document_starts, given_starts
from overcoat.models.family import original_class
from overcoat.models.fingerprint import HARMLESS_HOOKS, called_by_name, has_hooks

# Documents shorter than this on average (padding whose positions do not count, say) get transformers' mask: each costs
# FlashAttention's backward 128 more rows of dq in FP32, and a block of its grid for every 128 tokens of a row.
SHORTEST = 64
# What an estimate takes for a document's length, on the short side for text; it has no tokens to look at.
ESTIMATED = 256


def rows_of(x: Tensor, lengths: Optional[Tensor], longest: Any) -> tuple[int, int]:
    """(rows of the batch, images that are rows of it) of a layer's input x: (B, S, H), or (T, H) with `cu_seqlens`.

    Images of one length have the faster attention as rows of a batch, others share one row. Nobody reads the lengths,
    for which the host would wait: if none is longer than `longest` (transformers' `max_seqlen`), images * longest are
    all T tokens only where each is as long. Code that is being compiled sees it of one image alone; compiled layers ask
    before (`compiled.run_compiled`).
    """
    if lengths is None or x.dim() != 2:
        return x.shape[0], 0
    images = len(lengths) - 1
    is_known = not torch.compiler.is_compiling() and isinstance(longest, int)
    if images == 1 or (is_known and images * longest == x.shape[0]):
        return images, images
    return 1, 0


def window_of(attention: Any) -> int:
    """How many tokens up to its own a token sees in a transformers attention module; 0: all."""
    config = getattr(attention, "config", None)
    cls: Any = type(attention)
    if not _has_windows(cls):
        return 0
    if not getattr(attention, "is_sliding", True):  # Exaone 4 gives every layer a sliding_window
        return 0
    # Masks are made of what the configuration says by now, for layers that have a window.
    now = getattr(config, "sliding_window", getattr(attention, "sliding_window", None))
    return int(now or 0) if getattr(attention, "sliding_window", now) else 0


def reads_lengths(config: Any) -> bool:
    """True if transformers would compute attention by a kernel that takes lengths instead of a mask."""
    kind = getattr(config, "_attn_implementation", None)
    return kind is not None and "flash" in kind and not kind.startswith("paged|")


@torch.compiler.assume_constant_result
def _has_windows(cls: Any) -> bool:
    """True if the model of an attention's class makes masks of windows: Llama and OLMoE ignore a sliding_window in
    their configuration."""
    return _makes_windows(cls)


@functools.cache
def _makes_windows(cls: Any) -> bool:
    names = vars(sys.modules[original_class(cls).__module__])
    return any(name.startswith("create_") and "sliding_window" in name for name in names)


def mask_from(mask: Any, inputs: dict[str, Any], x: Tensor, causal: bool, window: int) -> Any:
    """Return the mask that flash and flex attention read, as `check_mask` takes it: lengths, padding (B, S), positions,
    a BlockMask."""
    batch, sequence = x.shape[:2]
    if type(mask).__name__ == "BlockMask":
        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], sequence, sequence, x.device)
    starts = inputs.get("cu_seq_lens_q")
    if starts is not None:
        return given_starts(starts, batch, sequence, x.device).view(1, 1, -1, 1)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        visible = mask.bool()[:, None, None].expand(batch, 1, sequence, sequence)
        return visible & causal_pairs(sequence, window, x.device) if causal else visible
    positions = inputs.get("position_ids")
    # Compiled code does not look for packed sequences, here as little as with sdpa.
    if mask is not None or not causal or positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return mask
    starts = document_starts(positions.expand(batch, -1), skips=True)
    return None if len(starts) == batch + 1 else starts.view(1, 1, -1, 1)


def mask_of_original(layer: nn.Module, starts: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Return the mask of a layer's original forward, in place of `causal_mask`'s, which converted layers alone read."""
    parts: list[Any] = list(layer.modules())
    if any(reads_lengths(part.config) for part in parts if hasattr(part, "config")):
        return None
    window = max([0, *[window_of(part) for part in parts if hasattr(part, "is_causal")]])
    if starts is not None:
        return dense_mask(starts, x.shape[0], x.shape[1], window=window)
    return causal_pairs(x.shape[1], window, x.device)[None, None] if 0 < window < x.shape[1] else None


def as_starts(mask: Any) -> Optional[Tensor]:
    """Return the document starts in a mask made by `causal_mask`, as attention takes them; None for other masks."""
    given = isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] > 1
    return mask.flatten() if given and mask.numel() == mask.shape[2] else None


def check_mask(mask: Any, sequence: int) -> Optional[Tensor]:
    """Return the mask a layer received, as attention takes it; ValueError if only other attention code reads it."""
    if mask is None:
        return None
    starts = as_starts(mask)
    if starts is not None:
        return starts
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-2:] == (1, sequence):  # padding, for all queries
        mask = mask.expand(-1, -1, sequence, -1)
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


def cache_of(arguments: dict[str, Any]) -> Any:
    """Return the key/value cache among named arguments, or None: transformers 5.24's name, that before, GPT-2's."""
    return arguments.get("cache", arguments.get("past_key_values", arguments.get("layer_past")))


def nothing_hidden(device: torch.device) -> Tensor:
    """Return the mark of rows whose tokens see all before them, or those in a layer's window: bool (1, 1, 0, 0)."""
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)


def causal_mask(causal: Any, inputs: dict[str, Any]) -> Optional[Tensor]:
    """Return the `attention_mask` for a causal model's `model`: `inputs`' own, or one of this module's marks.

    A mark if every token sees all before it, in its row or its document and a layer's own window (`window_of`), and
    every layer was verified with such marks.

    Raises:
        ValueError: `cu_seq_lens_q` that cannot be where documents begin, or without position_ids that restart there.
    """
    mask: Optional[Tensor] = inputs.get("attention_mask")
    if mask is not None or cache_of(inputs) is not None or inputs.get("use_cache"):
        return mask
    owners = owners_of(causal)
    model, config = owners[-1], owners[-1].config
    layers, by_lengths = getattr(model, causal.overcoat_spec.stack), reads_lengths(config)
    tokens = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    # Compiled code does not look for packed sequences; "eager" attention needs a mask to be causal.
    if torch.compiler.is_compiling() or not (by_lengths or config._attn_implementation == "sdpa"):
        return None
    if tokens is None or causal.overcoat_mask_makers != mask_makers(owners):
        return None
    position_ids = inputs.get("position_ids")
    if position_ids is not None and position_ids.dim() == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]  # in the text; the others are Qwen-VL's in time, height and width
    if any(map(_is_watched, (*owners, *layers))):
        if by_lengths and any(hasattr(layer, "_orig_mod") for layer in layers):
            inputs.update(_told(position_ids, inputs.get("cu_seq_lens_q"), *tokens.shape[:2]))
        return mask
    if not all(getattr(layer, "overcoat_starts", False) for layer in layers):  # verified with such masks, too
        return mask
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    if getattr(config, "sliding_window", None) and not all(map(_knows_its_window, layers, kinds)):
        return mask
    if position_ids is None:
        if inputs.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seq_lens_q without position_ids: give position_ids that restart where documents begin")
        return nothing_hidden(tokens.device)
    batch, sequence = tokens.shape[:2]
    # Layers in their original precision would each make the mask anew.
    if not model.training or position_ids.dim() != 2 or position_ids.shape[1] != sequence:
        return mask
    starts = _starts(position_ids.expand(batch, -1), inputs.get("cu_seq_lens_q"), by_lengths)
    num_documents = len(starts) - 1
    if num_documents == batch:
        return nothing_hidden(tokens.device)
    is_short = num_documents * SHORTEST > batch * sequence and not by_lengths
    return mask if is_short else starts.view(1, 1, -1, 1)


def owners_of(causal: Any) -> list[Any]:
    """The modules in a causal model that hand on a mask, the layers' owner last."""
    names = causal.overcoat_spec.text.split(".")
    return [causal.get_submodule(".".join(names[:count])) for count in range(1, len(names) + 1)]


def mask_makers(owners: list[Any]) -> tuple[Any, ...]:
    """Return the functions that decide which masks the layers get: their owners' forwards and what these call by name,
    and transformers' function for the owner's kind of attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = getattr(owners[-1], "config", None)
    kind = getattr(config, "_attn_implementation", None)
    maker = ALL_MASK_ATTENTION_FUNCTIONS.get(kind) if isinstance(kind, str) else None
    called = [place for owner in owners for place in called_by_name(type(owner).forward)]
    return (*(type(owner).forward for owner in owners), *(names.get(name) for names, name in called), maker)


def _told(position_ids: Optional[Tensor], lengths: Any, batch: int, sequence: int) -> dict[str, Tensor]:
    """Return the arguments that layers wrapped by torch.compile need under flash attention: they get no mask, and
    cannot find the document starts."""
    if position_ids is None or position_ids.shape[1:] != (sequence,):
        return {}
    starts = _starts(position_ids.expand(batch, -1), lengths, skips=True)
    return {"cu_seq_lens_q": starts} if len(starts) > batch + 1 else {}


def _starts(position_ids: Tensor, lengths: Any, skips: bool) -> Tensor:
    """Return the document starts: the caller's, those of position ids (B, S), or a guess on the meta device."""
    batch, sequence = position_ids.shape
    if lengths is not None:
        return given_starts(lengths, batch, sequence, position_ids.device)
    if position_ids.device.type == "meta":
        return position_ids.new_empty((batch * (1 + -(-sequence // ESTIMATED)) + 1,), dtype=torch.int32)
    return document_starts(position_ids, skips)


def _knows_its_window(layer: nn.Module, kind: Optional[str]) -> bool:
    """True if the layer's attention is the model's own class, whose window `window_of` reads, and has a window where
    the configuration's layer type has one, from which transformers makes masks."""
    own = original_class(layer).__module__
    parts = [part for part in layer.modules() if hasattr(part, "is_causal") and original_class(part).__module__ == own]
    return any(kind is None or (window_of(part) > 0) == (kind == "sliding_attention") for part in parts)


def _is_watched(module: nn.Module) -> bool:
    """True if a replaced forward or a hook sees the module's arguments and may read the mask. So does torch.compile's
    wrapper (not `layer.compile()`), which would recompile for each number of `starts`."""
    return "forward" in vars(module) or has_hooks(module, HARMLESS_HOOKS, ("_forward_pre_hooks", "_forward_hooks"))
