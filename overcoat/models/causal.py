"""Masks that only converted layers read: "plainly causal", which makes nobody wait, and packed sequences.

Without a mask transformers looks into the position ids for packed sequences, and the host waits for the answer, also
where the model has made these ids itself a moment before. It is the one wait in a step: until then the GPU has worked
off all that was queued, and afterwards it idles while the host queues the first layers, 2 ms of a 7B's 400. A mask of
four dimensions passes transformers' mask code as it is; so one without elements goes in, and converted layers take it
for none.

Where position ids are given, the wait is needed: how many documents there are decides about shapes. Instead of a mask
of S x S, layers then get where documents begin, `kernels/packed.py`'s `starts` as int32 (1, 1, 1, N + 1).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.kernels.packed import document_starts
from overcoat.models.llama import HARMLESS_HOOKS, Fp8DecoderLayer, has_hooks


def causal_mask(causal: nn.Module, inputs: dict[str, Any]) -> Optional[Tensor]:
    """The `attention_mask` to call a causal model's `model` with: `inputs`' own, or one of this module's.

    The latter where every token sees all before it, in its row or its document, and every layer knows such masks.
    """
    mask: Optional[Tensor] = inputs.get("attention_mask")
    named = ("attention_mask", "past_key_values", "use_cache")
    if any(inputs.get(name) is not None and inputs[name] is not False for name in named):
        return mask
    model: Any = causal.get_submodule("model")
    tokens = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    if tokens is None:
        return mask
    window = getattr(model.config, "sliding_window", None)
    # Compiled code does not look for packed sequences; "eager" attention needs a mask to be causal.
    if torch.compiler.is_compiling() or model.config._attn_implementation != "sdpa":
        return mask
    if window is not None and window < tokens.shape[1]:
        return mask
    if _is_watched(model) or any(_is_watched(layer) for layer in model.layers):
        return mask
    if not all(isinstance(layer, Fp8DecoderLayer) for layer in model.layers):
        return mask
    position_ids = inputs.get("position_ids")
    if position_ids is not None:
        if position_ids.dim() != 2:
            return mask
        if position_ids.device.type == "meta":  # an estimate: some documents, which weigh nothing
            return position_ids.new_empty((1, 1, 1, len(tokens) + 2), dtype=torch.int32)
        starts = document_starts(position_ids.expand(tokens.shape[0], -1))
        if len(starts) > tokens.shape[0] + 1:
            return starts.view(1, 1, 1, -1)
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody else sees the module's arguments, who may read the mask: by its forward, or by a hook."""
    return "forward" in vars(module) or has_hooks(module, HARMLESS_HOOKS, ("_forward_pre_hooks", "_forward_hooks"))
