"""What AdamW keeps for a parameter: plain tensors, their shapes and dtypes, and how they travel in a state
dict.

    step               0-d FP32, on the parameter's device, as torch's fused AdamW; the rest may be offloaded
    exp_avg            codes of m in the parameter's shape
    exp_avg_amax       BF16 (dim0, n): maxima of m's groups; (n,) for a 1-d parameter
    exp_avg_exponent   uint8, same shape: k16, only if m's code is expanded
    exp_avg_sq         codes of v in the parameter's shape
    exp_avg_sq_scale   int32, same shape as exp_avg_amax: packed maximum and shape byte of v's groups
    remainder          int8 or int16 in the parameter's shape, only for the masters "bf16+8" and "bf16+16"

No tensor subclass of our own: a state dict is saved, sliced and sharded by whatever handles plain tensors. The
state of a sharded parameter is sharded like it (`overcoat.optim.shards`); shapes above are the unsharded ones.

n = number of groups in a row (`overcoat.kernels.adamw.rows_of`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import REMAINDER_DTYPE, resolve_master
from overcoat.formats.moments import MOMENT_CODES
from overcoat.host import packed
from overcoat.kernels.adamw import rows_of
from overcoat.optim.shards import place_state, state_shape, wrap_state


class Field(NamedTuple):
    """Shape, dtype and initial value of one state tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0


def state_fields(param: Tensor, group: dict[str, Any]) -> dict[str, Field]:
    """The state tensors of `param` under the options of its parameter group."""
    m_code, v_code = (MOMENT_CODES[name] for name in group["moments"])
    shape = tuple(param.shape)
    layout = rows_of(shape, group["group_size"])
    per_group = (layout.rows, layout.groups) if len(shape) > 1 else (layout.groups,)
    k_one = EXPONENT_STEPS  # the exponent of an all-zero group: k = 1
    fields = {"step": Field((), torch.float32), "exp_avg": Field(shape, m_code.dtype)}
    if m_code.grouped:
        fields["exp_avg_amax"] = Field(per_group, torch.bfloat16)
    if m_code.expanded:
        fields["exp_avg_exponent"] = Field(per_group, torch.uint8, k_one)
    fields["exp_avg_sq"] = Field(shape, v_code.dtype)
    if v_code.grouped:
        fields["exp_avg_sq_scale"] = Field(per_group, torch.int32, k_one if v_code.expanded else 0)
    remainder = REMAINDER_DTYPE[resolve_master(group["master"], param.dtype)]
    if remainder is not None:
        fields["remainder"] = Field(shape, remainder)
    return fields


def init_state(param: Tensor, group: dict[str, Any], offload: bool = False) -> dict[str, Tensor]:
    """The state before the first step: both moments zero, the master equal to the parameter."""
    state = {}
    for name, field in state_fields(param, group).items():
        dtype = torch.uint8 if field.dtype.itemsize == 1 else field.dtype  # the 8-bit floats cannot be filled
        device = _home(name, param, offload)
        value = torch.full(state_shape(param, field.shape), field.fill, dtype=dtype, device=device)
        state[name] = wrap_state(param, value.view(field.dtype), field.shape)
    return state


def check_state(saved: dict[str, Any], param: Tensor, group: dict[str, Any], index: Any) -> None:
    """ValueError if a saved state does not fit `param`; its message says which tensor and what to do."""
    fields = state_fields(param, group)
    if set(saved) != set(fields):
        raise ValueError(
            f"saved optimizer state of parameter {index} has {sorted(saved)}, but moments={group['moments']!r} and "
            f"master={group['master']!r} keep {sorted(fields)}; build overcoat.AdamW with the options it was saved with"
        )
    for name, field in fields.items():
        value = saved[name]
        if tuple(value.shape) != field.shape or value.dtype != field.dtype:
            raise ValueError(
                f"saved {name!r} of parameter {index} is {value.dtype} {tuple(value.shape)}, expected {field.dtype} "
                f"{field.shape}; is this the state of another model, or of other options?"
            )


def restore_state(saved: dict[str, Any], param: Tensor, offload: bool = False) -> dict[str, Tensor]:
    """A copy of a saved state, laid out as the parameter, every tensor with its own dtype and bits."""
    return {name: place_state(param, value, _home(name, param, offload)) for name, value in saved.items()}


def is_elsewhere(state: dict[str, Tensor], param: Tensor, offload: bool = False) -> bool:
    """Whether a state is not on the device of its parameter, or with offload the step count is not."""
    names = ("step",) if offload else tuple(state)
    return any(state[name].device != param.device for name in names)


def _home(name: str, param: Tensor, offload: bool) -> torch.device:
    return torch.device("cpu") if offload and name != "step" else param.device


def bytes_to_offload(param: Tensor, group: dict[str, Any]) -> int:
    """Bytes of one parameter's state that offload keeps in this process' host memory, padding included."""
    fields = state_fields(param, group)
    sizes = [
        math.prod(state_shape(param, field.shape)) * field.dtype.itemsize
        for name, field in fields.items()
        if name != "step"
    ]
    return packed(sizes)[1]
