"""Gradient release: each parameter takes its step inside the backward pass and its gradient is freed at once.

    handle = overcoat.release_gradients(model, optimizer)
    for batch in batches:
        model(**batch).loss.backward()    # the weights move here
        optimizer.step()                  # marks the end of the step; learning rate schedules go on as ever
        scheduler.step()

Gradients of a whole model cost 2 bytes per BF16 parameter; released, only the gradient that is being worked on
exists. In a layer that `convert` made, all gradients of one decoder block are born together, so there it is those of
one block. What moves is bit for bit what the ordinary step without clipping moves, with one difference:

    ordinary    a gradient that is not finite skips the whole step         skipped_steps counts steps
    released    it skips its own parameter's step: the others have moved   skipped_steps counts parameters' steps

`optimizer.grad_norm` is the norm over all parameters after `step()`, for logging.

What cannot work is refused with a ValueError:

    accumulation        the second micro-batch would find weights that have moved. Refused at the second forward pass of
                        the model, or, if only backward is repeated, at the first gradient that comes a second time;
                        a parameter is never stepped twice.
    global clipping     needs all gradients at once. `torch.nn.utils.clip_grad_norm_` cannot be refused: it would see no
                        gradients and do nothing.
    GradScaler          needs all gradients at once to decide. float16 autocast is refused at the forward pass, a scaler
                        at `optimizer.step()`.
    DistributedDataParallel   averages gradients after the hooks used here; FSDP2 (`fully_shard`) calls them at the
                        right time.

Gradient checkpointing works, tied weights work. One combination does not: reentrant checkpointing runs a backward pass
of its own per segment, so the gradient of a weight shared between segments arrives in parts; the second is refused.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from overcoat.optim.adamw import AdamW


def release_gradients(model: nn.Module, optimizer: AdamW) -> GradientRelease:
    """Step every parameter of `optimizer` inside the backward pass from now on; see the module's text.

    Args:
        model: owns all parameters of the optimizer; its forward pass is watched for gradient accumulation.
        optimizer: an `overcoat.AdamW` whose parameters have no gradients yet.

    Returns:
        A handle; `handle.remove()` goes back to ordinary steps.

    Raises:
        ValueError: what was passed cannot work; nothing has been changed.
    """
    return GradientRelease(model, optimizer)


class GradientRelease:
    """The handle of `release_gradients`: the hooks, and what has happened since the last `optimizer.step()`."""

    def __init__(self, model: nn.Module, optimizer: AdamW) -> None:
        _check(model, optimizer)
        self.optimizer = optimizer
        self.stepped: set[int] = set()  # indices of the parameters that have moved in this step
        self.norms: list[Tensor] = []
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.handles = [model.register_forward_pre_hook(self._before_forward)]
        for number, index, param in optimizer.indexed_parameters():
            if param.requires_grad:
                self.handles.append(param.register_post_accumulate_grad_hook(self._hook(number, index)))
        optimizer.release = self

    def remove(self) -> None:
        """Take the hooks away: `optimizer.step()` does the whole step again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.optimizer.release is self:
            self.optimizer.release = None

    # ---- called by the optimizer ----------------------------------------------------------------------

    def check_step(self, clip_grad_norm: Optional[float]) -> None:
        """Refuse what `optimizer.step` cannot do once gradients are released."""
        if clip_grad_norm is not None:
            raise ValueError(
                "step(clip_grad_norm=...) cannot work with release_gradients: clipping by the global norm needs all "
                "gradients at once, and each has been applied and freed in the backward pass; call step() without "
                "clip_grad_norm, or handle.remove()"
            )
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise ValueError(
                "GradScaler cannot work with release_gradients: it decides from all gradients whether to step, and "
                "each has been applied, scaled, in the backward pass; train in bfloat16, which needs no scaling, or "
                "call handle.remove()"
            )

    def end_step(self) -> None:
        """The mark between two steps, set by `optimizer.step` and `zero_grad`."""
        if self.norms:
            norms = [norm.to(self.norms[0].device) for norm in self.norms]
            self.optimizer.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        self.stepped, self.norms = set(), []

    # ---- hooks ----------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        # Not in inference, and not when checkpointing recomputes the model inside its backward pass.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self.stepped:
            raise ValueError(
                "release_gradients: the model runs forward again before optimizer.step(). Gradient accumulation "
                "cannot work: the first backward pass has already moved the weights. Call optimizer.step() after every "
                "backward(), use larger batches, or call handle.remove(); evaluate under torch.no_grad()"
            )
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise ValueError(
                "release_gradients: float16 autocast needs GradScaler, which needs all gradients at once; autocast to "
                "bfloat16, which needs no scaling, or call handle.remove()"
            )

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        def step_and_free(param: Tensor) -> None:
            if index in self.stepped:
                param.grad = None  # no later step must use a part of a gradient
                raise ValueError(
                    f"release_gradients: a second gradient for {self.names[id(param)]!r} before optimizer.step(). Two "
                    "backward passes cannot be accumulated: the first has already moved the weights. Call "
                    "optimizer.step() after every backward(), or add the losses and call backward() once. (If there "
                    "was one pass: segments under reentrant checkpointing share this weight; use_reentrant=False)"
                )
            self.stepped.add(index)
            norm = self.optimizer.step_parameter(number, index, param)
            if norm is not None:
                self.norms.append(norm)
            param.grad = None

        return step_and_free


def _check(model: nn.Module, optimizer: AdamW) -> None:
    """ValueError for what can be told before the first backward pass."""
    if not isinstance(optimizer, AdamW):
        raise ValueError(f"release_gradients steps an overcoat.AdamW, got {type(optimizer).__name__}")
    if optimizer.release is not None:
        raise ValueError("release_gradients: this optimizer's gradients are released already; remove() the old handle")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "release_gradients: DistributedDataParallel averages gradients only after each would have been applied; "
            "use torch.distributed.fsdp.fully_shard"
        )
    owned = {id(param) for param in model.parameters()}
    for _, index, param in optimizer.indexed_parameters():
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
