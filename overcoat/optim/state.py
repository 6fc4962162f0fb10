"""AdamW's state of a parameter: plain tensors, their shapes and dtypes, and checks.

    step               0-d FP32, on the parameter's device, as torch's fused AdamW; the rest may be offloaded
    exp_avg            codes of m in the parameter's shape
    exp_avg_amax       BF16 (dim0, n): maxima of m's groups; (n,) for a 1-d parameter
    exp_avg_exponent   uint8, same shape: k16, only if m's code is expanded
    exp_avg_sq         codes of v in the parameter's shape
    exp_avg_sq_scale   int32, same shape as exp_avg_amax: packed maximum and shape byte of v's groups
    remainder          int8 or int16 in the parameter's shape, only for the masters "bf16+8" and "bf16+16"

n: groups of a slice along dim 0, a matrix' row or an expert (`overcoat.kernels.adamw.groups_of_slice`). There is no
tensor subclass: any code that handles plain tensors can save, slice and shard a state dict. The state of a sharded
parameter is sharded like it; shapes here are unsharded.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import REMAINDER_DTYPE, resolve_master
from overcoat.formats.moments import EARLIER_8BIT, MOMENT_CODES, MOMENTS, resolve_moments
from overcoat.kernels.adamw import groups_of_slice
from overcoat.optim.sharding import (
    check_placements,
    check_sharding,
    local,
    place_state,
    rewrap,
    state_shape,
    wrap_state,
)
from overcoat.pinned_memory import alias, host_buffer, packed
from overcoat.recipe import GROUP_SIZES

# Options of a parameter group, except lr. The first three define the layout and codes of a state.
OPTIONS = ("moments", "master", "group_size", "betas", "eps", "weight_decay", "seed")
FORMAT_OPTIONS = OPTIONS[:3]
TORCHS_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
# A third beta marks saved groups whose moments are codes, so that torch's optimizers fail at their first step.
CODES = "its moments are codes, which overcoat.AdamW alone reads"
# The `algorithm` of parameter groups that `Muon` orthogonalizes.
MUON = "muon"
_values_of = operator.itemgetter(*OPTIONS)


class Field(NamedTuple):
    """Shape, dtype and initial value of one state tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0


def state_fields(param: Tensor, group: Mapping[str, Any]) -> Mapping[str, Field]:
    """Return the state tensors that `param` has under the options of its parameter group."""
    master = resolve_master(group["master"], param.dtype)
    return _make_fields(tuple(param.shape), tuple(group["moments"]), master, int(group["group_size"]))


@functools.cache
def _make_fields(shape: tuple[int, ...], moments: tuple[str, ...], master: str, group_size: int) -> dict[str, Field]:
    m_code, v_code = MOMENT_CODES[moments[0]], MOMENT_CODES[moments[-1]]
    per_group = (*(shape[:1] if len(shape) > 1 else ()), groups_of_slice(shape, group_size))
    k_one = EXPONENT_STEPS  # the exponent of an all-zero group: k = 1
    fields = {
        "step": Field((), torch.float32),
        "exp_avg": Field(shape, m_code.dtype),
        "exp_avg_amax": Field(per_group, torch.bfloat16),
        "exp_avg_exponent": Field(per_group, torch.uint8, k_one),
        "exp_avg_sq": Field(shape, v_code.dtype),
        "exp_avg_sq_scale": Field(per_group, torch.int32, k_one if v_code.expanded else 0),
        "remainder": Field(shape, REMAINDER_DTYPE[master] or torch.int8),
    }
    has_second = len(moments) > 1  # Muon's matrices have momentum alone
    present = {
        "exp_avg_sq": has_second,
        "exp_avg_amax": m_code.grouped,
        "exp_avg_exponent": m_code.expanded,
        "exp_avg_sq_scale": has_second and v_code.grouped,
        "remainder": REMAINDER_DTYPE[master] is not None,
    }
    return {name: field for name, field in fields.items() if present.get(name, True)}


class Home(NamedTuple):
    """The places where a parameter is stepped and its state is kept.

    device: of the step and of the step count. on_host: True if the rest is in host memory, page-locked if `device` is a
    GPU.
    """

    device: torch.device
    on_host: bool = False

    def of(self, name: str) -> torch.device:
        """Return the device of one tensor of the state."""
        return torch.device("cpu") if self.on_host and name != "step" else self.device


def init_state(param: Tensor, group: Mapping[str, Any], home: Optional[Home] = None) -> dict[str, Tensor]:
    """Return the state before the first step: both moments zero, the master equal to the parameter."""
    home, state = home or Home(param.device), {}
    for name, field in state_fields(param, group).items():
        dtype = torch.uint8 if field.dtype.itemsize == 1 else field.dtype  # `fill_` does not support 8-bit floats
        value = torch.full(state_shape(param, field.shape), field.fill, dtype=dtype, device=home.of(name))
        state[name] = wrap_state(param, value.view(field.dtype), field.shape)
    return _in_host_buffer(state, home) if home.on_host else state


def restore_state(saved: Mapping[str, Tensor], param: Tensor, home: Optional[Home] = None) -> dict[str, Tensor]:
    """Copy a saved state, laid out as the parameter, without a change of dtypes or bits."""
    home = home or Home(param.device)
    state = {name: place_state(param, value, home.of(name)) for name, value in saved.items()}
    return _in_host_buffer(state, home) if home.on_host else state


def is_elsewhere(state: Mapping[str, Tensor], home: Home) -> bool:
    """True if a state is not at home: on another device, or in host memory that is not page-locked."""
    if any(local(value).device != home.of(name) for name, value in state.items()):
        return True
    value = local(state["exp_avg"])
    return home.on_host and home.device.type == "cuda" and value.numel() > 0 and not value.is_pinned()


def _in_host_buffer(state: dict[str, Tensor], home: Home) -> dict[str, Tensor]:
    """Move all but the step count to one host buffer, page-locked if the step runs on a GPU."""
    names = [name for name in state if name != "step"]
    offsets, size = packed([local(state[name]).nbytes for name in names])
    is_cuda = home.device.type == "cuda"
    buffer = host_buffer(size, is_cuda, "the optimizer's states", "a GPU with more memory, without offload or stream")
    moved = dict(state)
    for name, offset in zip(names, offsets, strict=True):
        value = local(state[name])
        host = buffer[offset : offset + value.nbytes]
        host.copy_(value.reshape(-1).view(torch.uint8))
        moved[name] = rewrap(state[name], host.view(value.dtype).view(value.shape))
    return moved


def bytes_to_offload(param: Tensor, group: Mapping[str, Any]) -> int:
    """Return the bytes of one parameter's state if kept in this process' host memory, padding included."""
    fields = state_fields(param, group)
    sizes = [
        math.prod(state_shape(param, field.shape)) * field.dtype.itemsize
        for name, field in fields.items()
        if name != "step"
    ]
    return packed(sizes)[1]


# ---- checks ----------------------------------------------------------------------------------------------


def check_lr(lr: Any) -> None:
    """Raise ValueError if a learning rate is out of range; one on a GPU is not checked, as the host would wait."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have one element")
        if lr.device.type != "cpu":
            return
    if not _is_within(lr, math.inf):
        raise ValueError(f"lr {lr!r} must be a number >= 0")


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError if another option of a group is out of range; moments and master are checked elsewhere."""
    eps, decay, betas = group["eps"], group["weight_decay"], group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(_is_within(beta, 1.0) for beta in betas):
        raise ValueError(f"betas {betas!r} must be two numbers in [0, 1)")
    if not _is_within(eps, math.inf):
        raise ValueError(f"eps {eps!r} must be a number >= 0")
    if not _is_within(decay, math.inf):
        raise ValueError(f"weight_decay {decay!r} must be a number >= 0")
    if group["group_size"] not in GROUP_SIZES:
        raise ValueError(f"group_size {group['group_size']!r} must be one of {', '.join(map(str, GROUP_SIZES))}")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed {group['seed']!r} must be an integer")


def check_torchs_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError for options of torch.optim.AdamW that this one lacks; foreach, fused, capturable are ignored."""
    for name, default in TORCHS_OPTIONS.items():
        if group.get(name, default) != default:
            raise ValueError(f"{name}={group[name]!r} is torch.optim.AdamW's and not supported; leave it out")


def _is_within(value: Any, upper: float) -> bool:
    """True if the value is a number in [0, upper)."""
    return hasattr(value, "__float__") and bool(0.0 <= value < upper)


def check_groups(
    groups: Sequence[dict[str, Any]], states: Mapping[Any, Any], known: dict[int, tuple[Any, ...]]
) -> None:
    """Raise ValueError if options were changed to what cannot work: states must be read with the codes they have.

    known: the options last checked, by group number; updated here.
    """
    for number, group in enumerate(groups):
        check_lr(group["lr"])
        check_torchs_options(group)
        new, old = _options_of(group), known.get(number)
        if new == old:
            continue
        has_states = old is not None and any(states.get(param) for param in group["params"])
        held = dict(zip(("algorithm", *FORMAT_OPTIONS), old or (), strict=False)) if has_states else {}
        _check_held(number, {"algorithm": group.get("algorithm", "adamw")}, held)
        check_options(group)
        group["moments"] = _resolved(group)
        _check_held(number, group, held)
        # Lists may be changed in place.
        known[number] = tuple(tuple(x) if isinstance(x, list) else x for x in _options_of(group))


def _check_held(number: int, group: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    for option, before in held.items():
        if option in group and group[option] != before:
            raise ValueError(
                f"param_groups[{number}][{option!r}] is {group[option]!r}, but its states are stored with {before!r}; "
                "set it back, or start anew after optimizer.state.clear()"
            )


def _options_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (group.get("algorithm", "adamw"), *_values_of(group))


def _resolved(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the codes of a group's states; of Muon's matrices momentum's alone."""
    return tuple(group["moments"]) if group.get("algorithm") == MUON else resolve_moments(group["moments"])


def check_new_group(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError if an option or a parameter of a new group cannot work.

    Changes the group: moments become a pair, params a list, and `CODES` (from a state dict) is removed.
    """
    options = {**defaults, **group}
    if isinstance(options["betas"], Sequence) and list(options["betas"][2:]) == [CODES]:
        group["betas"] = options["betas"] = tuple(options["betas"][:2])
    check_lr(options["lr"])
    check_options(options)
    check_torchs_options(options)
    group["moments"] = _resolved(options)
    if isinstance(group["params"], set):  # torch refuses it, as it has no order
        return
    group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    seen: set[int] = set()
    for entry in group["params"]:
        param = entry[1] if isinstance(entry, tuple) else entry  # or (name, parameter)
        if isinstance(param, Tensor):  # torch refuses anything else
            if id(param) in seen:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in its group twice and would be stepped twice; list "
                    "every parameter once"
                )
            seen.add(id(param))
            if param.requires_grad or param.is_floating_point():  # not a frozen quantized weight
                resolve_master(options["master"], param.dtype)
            check_placements(param)
    check_sharding([entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]])


def warn_if_frozen(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn if all parameters of the optimizer are frozen."""
    params = [param for group in groups for param in group["params"]]
    if params and not any(param.requires_grad for param in params):
        warnings.warn(
            f"step() does nothing: all {len(params)} parameters of this optimizer are frozen. PEFT freezes those that "
            "its model was made of: make the optimizer after get_peft_model",
            stacklevel=2,
        )


def check_state(state: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], index: Any, remedy: str) -> None:
    """Raise ValueError if a state does not fit `param`, with the tensor's name and the remedy."""
    fields = state_fields(param, group)
    if state.keys() != fields.keys():
        raise ValueError(
            f"optimizer state of parameter {index} has {sorted(state)}, but a {param.dtype} parameter with "
            f"moments={group['moments']!r} and master={group['master']!r} has {sorted(fields)}; {remedy}"
        )
    for name, (shape, dtype, _) in fields.items():
        value = state[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} of parameter {index} is a {type(value).__name__}, expected a tensor; {remedy}")
        if value.dtype != dtype or value.shape != shape:
            raise ValueError(
                f"{name!r} of parameter {index} is {value.dtype} {tuple(value.shape)}, expected {dtype} {shape}; "
                f"{remedy}"
            )


def match_saved(
    saved: dict[str, Any], groups: list[dict[str, Any]]
) -> tuple[dict[Any, Any], list[tuple[Tensor, dict[str, Any]]]]:
    """Return a state dict's other entries of `state`, and (parameter, its state) of all parameters with one.

    ValueError: a state was saved in another format than its group's, by another optimizer or for another model. An
    earlier version's "8bit" is accepted: its states keep their codes.
    """
    for group, saved_group in zip(groups, saved["param_groups"], strict=False):
        old, new = (of.get("algorithm", "adamw") for of in (saved_group, group))
        if old != new:
            raise ValueError(
                f"the state of a parameter group was saved by {old!r}, and this optimizer steps the group by {new!r}: "
                "continue with the optimizer and the groups that saved it, or start without a state"
            )
        for option in FORMAT_OPTIONS:
            if option not in saved_group:
                raise ValueError(
                    f"the state has no {option!r} in its parameter groups: another optimizer saved it. Start "
                    "overcoat.AdamW without a state, or continue with the optimizer that saved it"
                )
            old, new = saved_group[option], group[option]
            old = tuple(old) if option == "moments" else old
            if (old, new) == (EARLIER_8BIT, MOMENTS["8bit"]):
                warnings.warn(
                    f"the state was saved with an earlier version's '8bit', {old}, and continues with it; a new "
                    f"optimizer's is {new}",
                    stacklevel=2,
                )
            elif old != new:
                raise ValueError(
                    f"the state was saved with {option}={old!r}, this optimizer has {option}={new!r}; "
                    f"build overcoat.AdamW(..., {option}={old!r}) to load it"
                )
    rest, found = dict(saved["state"]), []
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    owners = [(param, group) for group in groups for param in group["params"]]
    for index, (param, group) in zip(indices, owners, strict=False):
        state = rest.pop(index, None)
        if state:  # reading `optimizer.state[param]` of a parameter without a state leaves an empty one
            check_state(state, param, group, index, "is this the state of another model, or of other options?")
            found.append((param, state))
    return rest, found


def make_plain(optimizer: Any, saved: dict[str, Any]) -> None:
    """Make a state dict's states plain dictionaries (hook of `state_dict`); with offload copies, not the live states.
    Streamed parameters' are the live ones, without the memory for a copy.

    Groups whose states other optimizers would mistake for plain moments are marked (`CODES`).
    """
    for group in saved["param_groups"]:
        if any(MOMENT_CODES[name].grouped for name in group["moments"]):
            group["betas"] = (*group["betas"], CODES)
    for index, state in saved["state"].items():
        if isinstance(state, dict):
            saved["state"][index] = {name: _saved(of, optimizer) for name, of in state.items()}


def _saved(value: Any, optimizer: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if optimizer.release is not None and optimizer.release.keeps_on_host and value.device.type == "cpu":
        return rewrap(value, alias(local(value)))
    return rewrap(value, local(value.detach()).clone()) if optimizer.offload else value
