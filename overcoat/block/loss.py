"""The end of a model: the final norm, and a causal model's loss without logits.

The forward computes a chunk of tokens at a time (kernels/loss.py): logits, loss, the logits' gradient in place, and two
GEMMs that turn it into the gradients of hidden and weight. The backward only multiplies these by the incoming gradient.
Peak memory above the inputs: one chunk of logits (about 256 MiB) and the gradients.
"""

from __future__ import annotations

from typing import Any, Literal, Optional

import torch
from torch import Tensor

from overcoat.kernels import loss as kernels
from overcoat.kernels.norm import rms_norm, rms_norm_backward
from overcoat.kernels.op import check_no_transforms, first_order
from overcoat.memory import keep
from overcoat.recipe import GradFormat

# True if the running backward was called with retain_graph=True.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses; saves the gradients, which the backward scales in place and returns."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], labels: Tensor, softcap: float,
        wanted: tuple[bool, bool, bool], *options: Any,
    ) -> Tensor:  # fmt: skip
        total, *made = kernels.linear_cross_entropy(
            hidden, weight, labels, *options, *wanted[:2], bias, wanted[2], softcap
        )
        grads = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
        keep(ctx, "linear_cross_entropy", **dict(zip(("dhidden", "dweight", "dbias"), grads, strict=True)))
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Optional[Tensor], ...]:
        # Scaled in place, but cloned if the graph is retained: another backward reads the saved ones again.
        retained = not torch.compiler.is_compiling() and _keeps_graph()
        grads = [None if grad is None else grad.clone() if retained else grad for grad in ctx.saved_tensors]
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
    bias: Optional[Tensor] = None,
    softcap: float = 0.0,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against labels (not shifted here), as `F.cross_entropy` defines it.

    Args:
        hidden: (..., H); weight: (V, H) of the same dtype. Under autocast all three are cast to its dtype.
        labels: (...), int64, the class of each hidden state, or `ignore_index`.
        reduction: "mean" over the labels that are not ignored, or "sum". If all are ignored the mean is NaN and its
            gradients are zero, as in PyTorch.
        z_loss: weight of an additional log(sum exp)^2 per label (PaLM: 1e-4), which holds the logits near zero.
        fp8: the format ("e5m2", "e4m3") of the logits' gradient, to run all three GEMMs in FP8; None: 16 bits.
        chunk_tokens: tokens at a time; None: as many as 256 MiB of logits hold, at least 2048.
        bias: (V,) of the same dtype, added to the logits; None: nothing.
        softcap: c of c * tanh(x / c), which the loss takes instead of logits x (Gemma 2); 0: the logits themselves.

    Returns:
        the loss, 0-d FP32.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on a CPU a label is neither in [0, V) nor `ignore_index`.
            On a GPU such a label is a device-side assert, as in `F.cross_entropy`: the host does not wait.
    """
    check_no_transforms()
    # `is_autocast_enabled` raises for the meta device, on which overcoat.estimate runs models.
    if hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    _check(hidden, weight, bias, labels)
    learns = torch.is_grad_enabled()
    labels = labels.reshape(-1)
    _check_labels(labels, weight.shape[0], ignore_index)
    wanted = tuple(learns and x is not None and x.requires_grad for x in (hidden, weight, bias))
    total = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels, softcap, wanted,
        ignore_index, z_loss, fp8, chunk_tokens,
    )  # fmt: skip
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _check(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], labels: Tensor) -> None:
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
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}: expected {weight.dtype}, one for each of the {len(weight)} "
            "rows of weight"
        )


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    if labels.is_meta:
        return
    valid = ((labels >= 0) & (labels < vocabulary)) | (labels == ignore_index)
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(valid.all(), "a label is neither a token of the vocabulary nor ignore_index")
    elif not valid.all():
        raise ValueError(
            f"label {int(labels[~valid][0])} is neither a token of the vocabulary of {vocabulary} nor "
            f"ignore_index = {ignore_index}"
        )


class _FinalNorm(torch.autograd.Function):
    """RMSNorm that saves its input in 16 bits, and rstd (T,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm(x, weight, eps)
        keep(ctx, "final_norm", x=x, rstd=rstd, weight=weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        x, rstd, weight = ctx.saved_tensors
        return *rms_norm_backward(dy, x, rstd, weight), None


def final_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x * (mean(x^2) + eps)^(-1/2) * weight over the last dimension, rounded once.

    x (..., H) and weight (H,) have one dtype. The same as `F.rms_norm` on a GPU; but on the meta device, where memory
    is estimated, `F.rms_norm` would count FP32 copies.
    """
    check_no_transforms()
    return _FinalNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
