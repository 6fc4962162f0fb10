"""Checks for `release_gradients`: refuse what cannot work with it, and find trainers that would clip gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, Optional

from torch import Tensor, nn

from overcoat.optim.adamw import AdamW
from overcoat.optim.sharding import check_sharding


def numbered(optimizer: AdamW) -> list[tuple[int, int, Tensor]]:
    """Return (index over all groups, number of the group, parameter) of each parameter."""
    of_groups = [(number, param) for number, group in enumerate(optimizer.param_groups) for param in group["params"]]
    return [(index, number, param) for index, (number, param) in enumerate(of_groups)]


def trainers_clipping() -> str:
    """Return the calling Trainer's option that clips gradients, with its value; "" if there is none.

    Hugging Face's and Lightning's Trainers clip through functions that find no gradients and do not report it.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        path = _CLIPPING.get(frame.f_globals.get("__name__", ""), "")
        if path and (value := functools.reduce(_attribute, path.split("."), frame.f_locals)):
            return f"the Trainer's {path.split('.')[-1]}={value}"
        frame = frame.f_back
    return ""


# Where a frame of these modules has it.
_CLIPPING = {
    "transformers.trainer": "self.args.max_grad_norm",
    "lightning.pytorch.trainer.trainer": "self.gradient_clip_val",
    "pytorch_lightning.trainer.trainer": "self.gradient_clip_val",
}


def _attribute(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def check_clipping(clip_grad_norm: Optional[float]) -> None:
    if clip_grad_norm is not None:
        raise ValueError(
            f"clip_grad_norm={clip_grad_norm!r} cannot work with release_gradients: clipping by the global norm needs "
            "all gradients at once, and each is applied and freed in backward; leave it out, or call handle.remove()"
        )


def check_replicas(model: Optional[nn.Module]) -> None:
    """Raise ValueError if model, the released one or one that wraps it, is DistributedDataParallel."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "release_gradients: DistributedDataParallel averages gradients only after each would have been applied; "
            "use torch.distributed.fsdp.fully_shard, or call handle.remove()"
        )


def check_release(model: nn.Module, optimizer: AdamW, batch_bytes: int) -> None:
    """Raise ValueError for mistakes that can be found before the first backward pass."""
    if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, int) or batch_bytes < 1:
        raise ValueError(
            f"release_gradients: batch_bytes {batch_bytes!r} must be a number of bytes, for example {32 * 2**20}"
        )
    if not isinstance(optimizer, AdamW):
        raise ValueError(f"release_gradients steps an overcoat.AdamW, got {type(optimizer).__name__}")
    if optimizer.release is not None:
        raise ValueError("release_gradients: this optimizer's gradients are released already; remove() the old handle")
    check_clipping(optimizer.clip_grad_norm)
    check_replicas(model)
    check_sharding(model.parameters())
    owned = {id(param) for param in model.parameters()}
    for index, _, param in numbered(optimizer):
        if id(param) not in owned:
            raise ValueError(
                f"release_gradients: parameter {index} of the optimizer, of shape {tuple(param.shape)}, is not in the "
                "model; pass the model that holds all of them"
            )
        if param.grad is not None:
            raise ValueError(
                "release_gradients: there are gradients already, to which the next would be added; call "
                "optimizer.step() or zero_grad() first"
            )
