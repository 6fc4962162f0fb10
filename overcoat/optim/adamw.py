"""`AdamW`: torch.optim.AdamW with moments in 8 bits and 24-bit weights, one fused step (COAT, section 4).

    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)

A BF16 parameter costs 2 bytes of weight, 2 of gradient, 2.05 of moments and 1 of remainder: 7.05 in all,
where BF16 training with FP32 masters and moments costs 16. How moments are coded is `overcoat.moments`, how
weights keep more than BF16's bits is `overcoat.masters`, the maths is `overcoat.kernels.adamw`; here is only
what makes it a `torch.optim.Optimizer`.

The step never waits for the GPU: learning rate, step count, gradient scale, clipping and the decision to skip
a step whose gradients are not finite are tensors on the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Optional, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overcoat.masters import resolve_master
from overcoat.moments import resolve_moments
from overcoat.optim.bucket import Bucket
from overcoat.optim.shards import check_gradient_placements, check_placements, layout_of
from overcoat.optim.state import check_state, init_state, restore_state, state_bytes
from overcoat.recipe import GROUP_SIZES

if TYPE_CHECKING:
    from overcoat.optim.release import GradientRelease

# Options that decide the layout of the state: a saved state can only be loaded under the same.
LAYOUT_OPTIONS = ("moments", "master", "group_size")


class AdamW(torch.optim.Optimizer):
    """AdamW with quantized moments.

    Args:
        params: parameters or parameter groups, BF16 or FP32; a group may override any option below.
        lr: learning rate, a float or a 0-d tensor (then schedules can change it inside a CUDA graph).
        betas: decay of the two moments.
        eps: added to sqrt(v).
        weight_decay: decoupled, as in torch.optim.AdamW.
        moments: "8bit" (default), "fp8" (the paper's), "bf16", "fp32", or a pair of codes (m, v): `overcoat.moments`.
        master: what is kept beside BF16 parameters: "bf16+8" ("auto"), "bf16+16" or "bf16": `overcoat.masters`.
        group_size: elements that share one maximum: 128, 64, 32 or 16.
        seed: of stochastic rounding; the same seed repeats a run bit for bit.
        check_finite: skip a step if any gradient is inf or NaN: costs one more read of the gradients, which clipping
            (`step(clip_grad_norm=...)`) needs anyway. False trusts the gradients, or GradScaler's own check.

    Attributes:
        skipped_steps: 0-d int32 tensor on the device of the parameters: steps skipped so far.
        grad_norm: 0-d FP32 tensor: norm of all gradients at the last step, unscaled, before clipping; None if unknown.
        release: the handle of `overcoat.release_gradients` while it is in force, else None.

    Raises:
        ValueError: an option is out of range, a parameter is neither BF16 nor FP32, a gradient is sparse.
    """

    # torch.amp.GradScaler then hands over `grad_scale` and `found_inf` instead of unscaling and synchronizing itself.
    _step_supports_amp_scaling = True
    # On the class: a copied or unpickled optimizer is not released, the hooks stay with the original.
    release: Optional[GradientRelease] = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Union[str, tuple[str, str]] = "8bit",
        master: str = "auto",
        group_size: int = 128,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "master": master,
            "group_size": group_size,
            "seed": seed,
        }
        self.check_finite = check_finite
        self.skipped_steps: Optional[Tensor] = None
        self.grad_norm: Optional[Tensor] = None
        self._kept_buckets: dict[Any, Bucket] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; torch's own keeps only defaults, state and groups."""
        extra = {name: getattr(self, name) for name in ("check_finite", "skipped_steps", "grad_norm")}
        return {**super().__getstate__(), **extra, "_kept_buckets": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its options and its parameters."""
        if self.release is not None:
            raise ValueError("add_param_group: release_gradients would not see the new parameters; remove() its handle")
        group = {**self.defaults, **param_group}
        _check_hyperparameters(group)
        param_group["moments"] = resolve_moments(group["moments"])
        if isinstance(param_group["params"], Tensor):
            param_group["params"] = [param_group["params"]]
        param_group["params"] = list(param_group["params"])
        for entry in param_group["params"]:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, Tensor):
                resolve_master(group["master"], param.dtype)
                check_placements(param)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, *, clip_grad_norm: Optional[float] = None) -> Any:
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss.
            clip_grad_norm: scale all gradients together so that their norm is at most this, inside the step; the
                gradients themselves stay as they are.

        Returns:
            The closure's loss, or None.
        """
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm {clip_grad_norm!r} must be positive; pass None for no clipping")
        if self.release is not None:
            self.release.check_step(clip_grad_norm)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = self._buckets()
        if buckets:
            factor, skip = self._gradient_factor([bucket for _, bucket in buckets], clip_grad_norm)
            for group, bucket in buckets:
                bucket.step(group, factor, skip)
        if self.release is not None:
            self.release.end_step()
        return loss

    @torch.no_grad()
    def step_parameter(self, number: int, index: int, param: Tensor) -> Optional[Tensor]:
        """Step one parameter by its gradient, for `release_gradients`; returns the gradient's norm if it was needed."""
        assert param.grad is not None
        _check_gradient(param, param.grad)
        group = self.param_groups[number]
        state = self._state_of(group, param)
        bucket = self._bucket(("alone", index), group, [param], [index], [state], [param.grad])
        factor, skip = self._gradient_factor([bucket], None)
        bucket.step(group, factor, skip)
        return self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients; with released gradients also a mark between two steps, as `step` is."""
        super().zero_grad(set_to_none)
        if self.release is not None:
            self.release.end_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved under the same moments, master and group size, bit for bit.

        torch's own loading casts every state tensor to the dtype of its parameter, which would destroy the codes.
        """
        saved_groups = state_dict["param_groups"]
        for group, saved in zip(self.param_groups, saved_groups, strict=False):
            for option in LAYOUT_OPTIONS:
                if option not in saved:
                    raise ValueError(
                        f"the state has no {option!r} in its parameter groups: another optimizer saved it. Start "
                        "overcoat.AdamW without a state, or go on with the optimizer that saved it"
                    )
                old, new = saved[option], group[option]
                if (tuple(old) if option == "moments" else old) != new:
                    raise ValueError(
                        f"the state was saved with {option}={old!r}, this optimizer has {option}={new!r}; "
                        f"build overcoat.AdamW(..., {option}={old!r}) to load it"
                    )
        indices = [index for saved in saved_groups for index in saved["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        owners = [group for group in self.param_groups for _ in group["params"]]
        saved_state = state_dict["state"]
        for index, param, group in zip(indices, params, owners, strict=False):
            if index in saved_state:
                check_state(saved_state[index], param, group, index)
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            group["moments"] = tuple(group["moments"])
        for index, param in zip(indices, params, strict=True):
            if index in saved_state:
                self.state[param] = restore_state(saved_state[index], param)

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(state_bytes(state) for state in self.state.values())

    # ---- inside a step --------------------------------------------------------------------------------

    def indexed_parameters(self) -> Iterator[tuple[int, int, Tensor]]:
        """(number of the group, index, parameter): the index counts through all groups, as in a state dict."""
        index = 0
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                yield number, index, param
                index += 1

    def _state_of(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state.update(init_state(param, group))
        return state

    def _bucket(
        self,
        key: Any,
        group: dict[str, Any],
        params: list[Tensor],
        indices: list[int],
        states: list[Any],
        grads: list[Tensor],
    ) -> Bucket:
        """The bucket kept under `key`, renewed if it does not serve any more, with the gradients of this step."""
        bucket = self._kept_buckets.get(key)
        if bucket is None or not bucket.serves(params, states):
            bucket = self._kept_buckets[key] = Bucket(group, params, indices, states)
        bucket.take_gradients(grads)
        return bucket

    def _buckets(self) -> list[tuple[dict[str, Any], Bucket]]:
        """Parameters that have gradients, by group, device and dtypes; their states exist afterwards."""
        result: list[tuple[dict[str, Any], Bucket]] = []
        first = 0
        for number, group in enumerate(self.param_groups):
            found: dict[Any, tuple[list[Tensor], list[int], list[Any], list[Tensor]]] = {}
            # No call for a plain parameter with a state: with a thousand of them each one costs the host 0.1 ms.
            for index, param in enumerate(group["params"], start=first):
                grad = param.grad
                if grad is None:
                    continue
                layout = None
                if isinstance(param, DTensor) or grad.layout != torch.strided:
                    _check_gradient(param, grad)
                    layout = layout_of(param)
                kind = (number, param.device, param.dtype, grad.dtype, layout)
                lists = found.get(kind)
                if lists is None:
                    lists = found[kind] = ([], [], [], [])
                lists[0].append(param)
                lists[1].append(index)
                lists[2].append(self.state[param] or self._state_of(group, param))
                lists[3].append(grad)
            first += len(group["params"])
            result += [(group, self._bucket(kind, group, *lists)) for kind, lists in found.items()]
        return result

    def _gradient_factor(self, buckets: list[Bucket], max_norm: Optional[float]) -> tuple[Tensor, Tensor]:
        """(factor, skip): what multiplies every gradient (FP32), and whether this step does nothing (bool); 0-d."""
        device = buckets[0].params[0].device
        factor = torch.ones((), device=device)
        skip = torch.zeros((), dtype=torch.bool, device=device)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            factor = 1.0 / grad_scale.to(device, torch.float32)
        if found_inf is not None:
            skip = found_inf.to(device) != 0
        self.grad_norm = None
        if self.check_finite or max_norm is not None:
            parts = [bucket.sum_squares().to(device) for bucket in buckets]
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
            self.grad_norm = total.sqrt() * factor
            skip = skip | ~torch.isfinite(self.grad_norm)
            if max_norm is not None:
                factor = factor * (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        if self.skipped_steps is None:
            self.skipped_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped_steps += skip
        return factor, skip


def _check_gradient(param: Tensor, grad: Tensor) -> None:
    """ValueError if the gradient cannot be used."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"overcoat.AdamW got a {grad.layout} gradient for a parameter of shape {tuple(param.shape)}; "
            f"build the embedding with sparse=False"
        )
    check_gradient_placements(param, grad)


def _check_hyperparameters(group: dict[str, Any]) -> None:
    lr, eps, decay, betas = group["lr"], group["eps"], group["weight_decay"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have one element")
    elif not 0.0 <= lr < math.inf:
        raise ValueError(f"lr {lr!r} must be a number >= 0")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas {betas!r} must be two numbers in [0, 1)")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps {eps!r} must be a number >= 0")
    if not 0.0 <= decay < math.inf:
        raise ValueError(f"weight_decay {decay!r} must be a number >= 0")
    if group["group_size"] not in GROUP_SIZES:
        raise ValueError(f"group_size {group['group_size']!r} must be one of {', '.join(map(str, GROUP_SIZES))}")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed {group['seed']!r} must be an integer")
