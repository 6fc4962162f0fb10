"""`linear_cross_entropy`: a causal model's loss from its last hidden states, without the logits.

Tokens pass in chunks (kernels/loss.py): logits, loss, gradient of the logits in their place, and the two products that
turn it into the gradients of hidden and weight. Those are ready when the forward ends; the backward only multiplies
them by the factor that arrives. Peak memory above the inputs: one chunk of logits (256 MiB or so) and the gradients.
"""

from __future__ import annotations

from typing import Any, Literal, Optional, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.kernels import loss as kernels
from overcoat.memory import keep
from overcoat.recipe import GradFormat


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses; keeps the gradients, which the backward scales in place and hands on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        z_loss: float,
        fmt: Optional[str],
        chunk_tokens: Optional[int],
        want_hidden: bool,
        want_weight: bool,
    ) -> Tensor:
        total, dhidden, dweight = kernels.linear_cross_entropy(
            hidden, weight, labels, ignore_index, z_loss, fmt, chunk_tokens, want_hidden, want_weight
        )
        keep(
            ctx,
            "linear_cross_entropy",
            dhidden=dhidden if want_hidden else None,
            dweight=dweight if want_weight else None,
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Optional[Tensor], ...]:
        grads = ctx.saved_tensors
        for grad in grads:
            if grad is not None:
                kernels.scale_(grad, dtotal)
        return (*grads, *(None,) * 7)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    z_loss: float = 0.0,
    fp8: Optional[GradFormat] = None,
    chunk_tokens: Optional[int] = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against labels (not shifted here), as `F.cross_entropy` defines it.

    Args:
        hidden: (..., H); weight: (V, H) of the same dtype (or whatever, under autocast: its dtype then).
        labels: (...), int64, the class of each hidden state, or `ignore_index`. Others outside [0, V) give NaN.
        reduction: "mean" over the labels that are not ignored, or "sum". Without any label the mean is NaN and its
            gradients are zero, as in PyTorch.
        z_loss: weight of an additional log(sum exp)^2 per label (PaLM: 1e-4), which holds the logits near zero.
        fp8: None, or the format ("e5m2", "e4m3") of the logits' gradient when all three products run in FP8.
        chunk_tokens: tokens at a time; None takes what 256 MiB of logits hold, at least 2048.

    Returns:
        the loss, 0-d FP32. A backward consumes the gradients that the forward made: one per forward.

    Raises:
        ValueError: shapes or dtypes do not fit together, or an option has a value not listed above.
    """
    # The meta device, on which overcoat.estimate runs models, has no autocast to ask for.
    if hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    _check_tensors(hidden, weight, labels)
    _check_options(reduction, fp8, chunk_tokens)
    learns = torch.is_grad_enabled()
    labels = labels.reshape(-1)
    total = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        ignore_index,
        z_loss,
        fp8,
        chunk_tokens,
        learns and hidden.requires_grad,
        learns and weight.requires_grad,
    )
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: expected (..., H) and (V, H)"
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}, hidden {tuple(hidden.shape)}; expected torch.int64, one "
            "label for each hidden state"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: convert one, or run under torch.autocast"
        )


def _check_options(reduction: str, fp8: Optional[str], chunk_tokens: Optional[int]) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction = {reduction!r}; choose 'mean' or 'sum'")
    if fp8 not in (None, *get_args(GradFormat)):
        raise ValueError(f"fp8 = {fp8!r}; choose None or one of {', '.join(map(repr, get_args(GradFormat)))}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}; at least 1, or None")
