"""`AdamW`: torch.optim.AdamW with moments in 8 bits and 24-bit weights, one fused step (COAT, section 4).

    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)

The maths is in `overcoat.kernels.adamw`. The host never waits for the GPU: learning rate, step count, gradient scale,
clipping factor and skip flag are tensors on the device.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from typing import Any, Callable, Iterable, Mapping, Optional, Union

import torch
from torch import Tensor

from overcoat.kernels.multi_tensor import is_capturing
from overcoat.optim.offload import SLOTS, OffloadedStepGroup, Staging, StreamedStepGroup, check_offload_options
from overcoat.optim.state import (
    Home,
    bytes_to_offload,
    check_groups,
    check_new_group,
    check_state,
    init_state,
    is_elsewhere,
    make_plain,
    match_saved,
    restore_state,
    warn_if_frozen,
)
from overcoat.optim.step import StepGroup, StepGroups, moved, norm_of

# Attributes that a pickled or copied optimizer contains besides torch's own.
ATTRIBUTES = ("check_finite", "clip_grad_norm", "offload", "offload_buffer", "skipped_steps", "grad_norm", "_options")
_GRAD = operator.attrgetter("grad")


class AdamW(torch.optim.Optimizer):
    """AdamW with quantized moments.

    Args:
        params: parameters or parameter groups, BF16 or FP32; a group may override any option up to `seed`.
        lr: learning rate, a float or a 0-d tensor (then schedules can change it inside a CUDA graph).
        betas: decay of the two moments.
        eps: added to sqrt(v). With 0, a gradient below 1e-18 makes an infinite step on a GPU, where the root of a
            denormal is 0.
        weight_decay: decoupled, as in torch.optim.AdamW.
        moments: "8bit" (default), "fp8" (the paper's), "bf16", "fp32", or a pair of formats (docs/optimizer.md).
        master: master weights of BF16 parameters: "bf16+8" ("auto"), "bf16+16" or "bf16" (docs/optimizer.md).
        group_size: elements that share one maximum: 128, 64, 32 or 16.
        seed: of stochastic rounding; the same seed repeats a run bit for bit.
        check_finite: skip a step if any gradient is inf or NaN, or its square overflows FP32 (never below 2^60, always
            from 2^64 on). It costs one read of the gradients, which clipping needs anyway. False trusts the gradients,
            or GradScaler's own check.
        clip_grad_norm: the default of `step(clip_grad_norm=...)`, for trainers that call `step()` themselves.
        offload: keep moments and remainders in page-locked host memory and stream them through the GPU during the step,
            with the same results: `overcoat.optim.offload`.
        offload_buffer: bytes of GPU memory for that, in three staging buffers.

    Attributes:
        skipped_steps: 0-d int32 tensor on the device of the parameters: steps skipped so far.
        grad_norm: 0-d FP32 tensor: norm of all gradients at the last step, unscaled, before clipping; None if unknown.
        release: the handle of `overcoat.release_gradients` or `overcoat.stream` while it is active, else None.

    A gradient that is not contiguous, or on a GPU does not begin at a multiple of 16 bytes, is copied for the step.

    Raises:
        ValueError: an option is out of range, at the start or at a later step; a parameter is neither BF16 nor FP32, or
            given twice; a gradient is sparse; options or parameters have changed so that states no longer fit.
    """

    # A class attribute: a copied or unpickled optimizer is not released; the hooks stay with the original.
    release: Any = None
    clip_grad_norm: Optional[float] = None
    algorithms: tuple[str, ...] = ("adamw",)  # that a parameter group may have

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
        clip_grad_norm: Optional[float] = None,
        offload: bool = False,
        offload_buffer: int = 192 * 2**20,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        defaults |= {"moments": moments, "master": master, "group_size": group_size}
        check_offload_options(offload, offload_buffer)
        _check_clipping(clip_grad_norm)
        self.check_finite, self.clip_grad_norm = check_finite, clip_grad_norm
        self.offload, self.offload_buffer = offload, offload_buffer
        self.skipped_steps: Optional[Tensor] = None
        self.grad_norm: Optional[Tensor] = None
        self._options: dict[int, tuple[Any, ...]] = {}  # the options last checked, by group number
        self._start_fresh()
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if GradScaler asks: `step` then unscales.

        GradScaler then passes `grad_scale` and `found_inf` instead of waiting for its check, and `step` can refuse it
        when gradients are released. Lightning takes the same attribute to mean "cannot be clipped" and refuses
        `gradient_clip_val` even without a scaler. So the result depends on the caller.
        """
        return sys._getframe(1).f_globals.get("__name__") == "torch.amp.grad_scaler"

    def _start_fresh(self) -> None:
        """Drop everything from earlier steps except the states."""
        self._step_groups: dict[int, StepGroups] = {}  # by number of the parameter group
        self._owners: list[Any] = []  # of all states, in their order, when step groups were made last
        self._staging: dict[torch.device, Staging] = {}
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._captured: dict[tuple[int, ...], tuple[Any, ...]] = {}  # what CUDA graphs read at every replay

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy save; torch's own method omits this class's attributes."""
        self.wait_for_offload()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("_captured", "_constants")
        captured: dict[str, Any] = {name: self.__dict__[name] for name in names if name in self.__dict__}
        super().__setstate__(state)
        self.__dict__.setdefault("_options", {})  # pickled by an earlier version
        self._start_fresh()
        self.__dict__.update(captured)  # CUDA graphs captured before remain valid

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.release is not None:
            raise ValueError("add_param_group: release_gradients would not see the new parameters; remove() its handle")
        if param_group.get("algorithm", "adamw") not in self.algorithms:
            raise ValueError(
                f"algorithm {param_group['algorithm']!r} of a parameter group must be one of "
                f"{', '.join(self.algorithms)}; overcoat.Muon has both"
            )
        check_new_group(param_group, self.defaults)
        super().add_param_group(param_group)
        self.forget_staging()

    @torch._disable_dynamo  # graph break: the step is one launch already
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, *, clip_grad_norm: Optional[float] = None) -> Any:
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss.
            clip_grad_norm: scale all gradients together so that their norm is at most this, inside the step; the
                gradients themselves do not change. None: the constructor's; math.inf: no clipping.

        Returns: the closure's loss, or None.
        """
        max_norm = self.clip_grad_norm if clip_grad_norm is None else clip_grad_norm
        _check_clipping(max_norm)
        if self.release is not None:
            self.release.check_step(max_norm)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self.release is not None:
                self.release.check_step(max_norm)  # of what the closure has accumulated
        try:
            has_stepped = self._step_all(max_norm)
        except BaseException:
            self._step_groups = {}  # they hold gradients that would not be freed
            raise
        if self.release is not None:
            self.release.end_step(self.grad_norm if has_stepped else None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients; with released gradients this also marks the end of a step, as `step` does."""
        super().zero_grad(set_to_none)
        if self.release is not None:
            self.release.drop_pending()
            self.release.end_step()

    # ---- state dicts ----------------------------------------------------------------------------------
    # torch's loading casts states to their parameter's dtype, which would destroy the codes, so it loads the rest only.
    # Our hooks run next to its own code: users' hooks see complete state dicts and a filled state.

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict as torch does; offloaded states are copied, since later steps write to them."""
        check_groups(self.param_groups, self.state, self._options)
        self.wait_for_offload()
        hook = self.register_state_dict_post_hook(make_plain, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved with the same moments, master and group size, bit for bit.

        One saved with an earlier version's "8bit" is continued in that format, with a warning.

        Raises:
            ValueError: it was saved with other options, by another optimizer or for another model; nothing changes.
        """
        states: list[tuple[Tensor, dict[str, Any]]] = []

        def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            rest, states[:] = match_saved(saved, self.param_groups)
            self.wait_for_offload()
            if self.release is not None:
                self.release.end_step()
                self.release.drop_states()
            groups = [{**group, "betas": group["betas"][:2]} for group in saved["param_groups"]]  # without `CODES`
            return {**saved, "state": rest, "param_groups": groups}

        def put(_: Any) -> None:
            for group in self.param_groups:
                group["moments"] = tuple(group["moments"])  # the state's own: possibly an earlier "8bit"
            self._options.clear()
            for param, saved in states:
                self.state[param] = restore_state(saved, param, self.home_of(param))

        check_groups(self.param_groups, self.state, self._options)
        first = self.register_load_state_dict_pre_hook(take)
        last = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            last.remove()

    # ---- inside a step --------------------------------------------------------------------------------

    def _step_all(self, max_norm: Optional[float]) -> bool:
        """Take the step; the factor of all gradients (FP32) and the skip flag (bool) stay on the device.

        Returns: True if there were gradients.
        """
        pairs = self._take_gradients()
        if pairs:
            step_groups = [step_group for _, step_group in pairs]
            if len({step_group.device.type == "meta" for step_group in step_groups}) > 1:
                raise ValueError(
                    "overcoat.AdamW: some parameters with gradients are on the meta device, without data, and others "
                    "are not: load them, or leave them out of the optimizer"
                )
            one, never = self.constants(step_groups[0].device)
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            factor = one if scale is None else 1.0 / scale.to(one.device, torch.float32)
            skip = never if found_inf is None else found_inf.to(one.device) != 0
            self.grad_norm = None
            if self.check_finite or max_norm is not None:
                self.grad_norm = norm_of(step_groups, None if scale is None else factor)
                is_bad = (self.grad_norm < math.inf).logical_not()  # NaN is not below anything
                skip = is_bad if found_inf is None else skip | is_bad
                if max_norm is not None:
                    clip = (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
                    factor = clip if scale is None else factor * clip
            self.count_skipped(skip)
            for group, step_group in pairs:
                step_group.step(group, factor, skip)
            self.keep_if_captured(step_groups)
        else:
            warn_if_frozen(self.param_groups)
        return bool(pairs)

    def _take_gradients(self) -> list[tuple[dict[str, Any], StepGroup]]:
        """Return the step groups of all parameters that have gradients, with these gradients."""
        self.begin_step()
        result: list[tuple[dict[str, Any], StepGroup]] = []
        first = 0
        for number, group in enumerate(self.param_groups):
            grads = list(map(_GRAD, group["params"]))
            step_groups = self._step_groups.pop(number, None)
            if step_groups is None or not step_groups.hold(group, first, grads):
                step_groups = None  # free offloaded states before new ones are made
                step_groups = StepGroups(group, first, grads, self.step_group_of)
            self._step_groups[number] = step_groups
            result += [(group, step_group) for step_group in step_groups.take_gradients(grads)]
            first += len(grads)
        return result

    def begin_step(self) -> None:
        """Begin a step; with released gradients called before the first of them."""
        check_groups(self.param_groups, self.state, self._options)
        owners = list(self.state)
        if len(owners) != len(self._owners) or not all(map(operator.is_, owners, self._owners)):
            self._drop_step_groups()
        for staging in self._staging.values():
            staging.begin_step()

    def _drop_step_groups(self) -> None:
        """Drop the step groups, when they were made for other states."""
        self._step_groups = {}
        if self.release is not None:
            self.release.drop_states()

    def forget_staging(self) -> None:
        """Drop step groups and staging buffers, which may be too small now."""
        self._drop_step_groups()
        self.wait_for_offload()
        self._staging = {}

    def wait_for_offload(self) -> None:
        """Wait until the last step's states are in host memory."""
        for staging in self._staging.values():
            staging.synchronize()

    def _place_state(self, group: Mapping[str, Any], param: Tensor, index: int) -> None:
        """Make the state of a parameter before its first step, and move it to the right device."""
        state: Any = self.state.get(param)
        home = self.home_of(param)
        if not state:
            self.state[param] = init_state(param, group, home)
        else:
            check_state(state, param, group, index, "set back what has changed, or start anew without its state")
            if is_elsewhere(state, home):  # the model has been moved
                self.wait_for_offload()
                self.state[param] = restore_state(state, param, home)

    def home_of(self, param: Tensor) -> Home:
        """Return where a parameter is stepped and its state kept."""
        device = None if self.release is None else self.release.device_of(param)
        return Home(param.device, self.offload) if device is None else Home(device, True)

    def step_group_of(self, group: dict[str, Any], params: list[Tensor], indices: list[int]) -> StepGroup:
        """Return a new step group of parameters that can be stepped together; makes their states if missing."""
        for param, index in zip(params, indices, strict=True):
            self._place_state(group, param, index)
        self._owners = list(self.state)
        streamed = None if self.release is None else self.release.stepped_on_device(params)
        if streamed is not None:
            staging = self.staging_on(self.home_of(params[0]).device)
            return StreamedStepGroup(streamed, staging, weakref.proxy(self), group, params, indices)
        if not self.offload:
            return StepGroup(weakref.proxy(self), group, params, indices)
        return OffloadedStepGroup(self.staging_on(params[0].device), weakref.proxy(self), group, params, indices)

    def staging_on(self, device: torch.device) -> Staging:
        """Return the staging buffers through which states in host memory pass on a device."""
        if device not in self._staging:
            owners = [(param, group) for group in self.param_groups for param in group["params"]]
            owners = [of for of in owners if of[0].is_floating_point()]  # not a frozen base
            homes = [self.home_of(param) for param, _ in owners]
            needed = sum(
                bytes_to_offload(*of) for of, home in zip(owners, homes, strict=True) if home == (device, True)
            )
            self._staging[device] = Staging(device, min(self.offload_buffer // SLOTS, needed))
        return self._staging[device]

    def keep_if_captured(self, step_groups: list[StepGroup]) -> None:
        """Keep step groups alive that a CUDA graph captures: it reads their tables by address at every replay."""
        for step_group in step_groups:
            if step_group.on_kernel and is_capturing(step_group.device):
                tables = step_group.gradients.addresses, step_group.counters.numbers
                self._captured[tuple(map(id, tables))] = (step_group, tables, step_group.state_tensors())

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (1.0, False), 0-d on the device: a factor without effect, and no skip."""
        if device not in self._constants:
            false = torch.zeros((), dtype=torch.bool, device=device)
            self._constants[device] = (torch.ones((), dtype=torch.float32, device=device), false)
        return self._constants[device]

    def count_skipped(self, skip: Tensor) -> None:
        """Add a flag or a number of steps, 0-d, to `skipped_steps`."""
        if self.skipped_steps is None:
            self.skipped_steps = torch.zeros((), dtype=torch.int32, device=skip.device)
        self.skipped_steps += moved(skip, self.skipped_steps.device)


def _check_clipping(clip_grad_norm: Optional[float]) -> None:
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ValueError(f"clip_grad_norm {clip_grad_norm!r} must be positive; pass None for no clipping")
