"""One AdamW step over many parameters, `overcoat::adamw_step_`: any number of them, one launch, one pass over memory.

The op, and how its kernel (`adamw_kernel.py`) is launched: a `Plan` holds the device's tables, which stay the same
from step to step. The optimizer keeps it (`optim.step`); the op finds it again by the addresses of all its tensors. A
skipped step changes nothing, not even the step count.

Legend: T tensors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import lru_cache
from itertools import chain
from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.formats import de8
from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import RANDOM_BITS, REMAINDER_DTYPE
from overcoat.formats.moments import range_log2
from overcoat.kernels.adamw import Hyper, rows_of, state_names, step_coefficients, step_parameter
from overcoat.kernels.adamw_counters import Counters, StepScalars
from overcoat.kernels.adamw_kernel import FIELDS, adamw_kernel
from overcoat.kernels.language import INTERPRETED, triton
from overcoat.kernels.multi_tensor import TRITON_TYPE, Gradients, contiguous, tile_table
from overcoat.kernels.op import op

# Elements of a tile and warps of a program: 16 elements per thread, loads of 16 bytes. With 8 elements per thread, or
# several tiles per program, a step took longer (docs/research/log.md).
TILE = 2048
NUM_WARPS = 4
# Held to 72 registers, more programs run at once: with expansion, which waits for the special function unit, and with
# the default codes (3.72 ms instead of 3.77). Without a remainder expansion spills at 72 (4.27 ms instead of 4.11).
# Where rows are not aligned, loads element by element need 254.
MAX_REGISTERS = 72
MAX_REGISTERS_SPILLING = 80
# Tensors in the parameter's shape, read in vectors.
_VECTORS = FIELDS[:4]


@op(mutates=("params", "states"))
def adamw_step_(
    params: List[torch.Tensor], grads: List[torch.Tensor], states: List[torch.Tensor], lr: torch.Tensor,
    grad_factor: torch.Tensor, skip: torch.Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
    m_code: str, v_code: str, master: str, group_size: int, keys: List[int], first_groups: List[int],
) -> None:  # fmt: skip
    """Step every parameter in place; all share dtype, codes, master and hyperparameters.

    Args:
        params: T tensors, BF16 or FP32, any shape. grads: their gradients, any floating dtype.
        states: their state tensors, contiguous: T for each name of `state_names`, name by name.
        lr, grad_factor: 0-d FP32; the factor unscales and clips, it multiplies every gradient. skip: 0-d bool.
        m_code, v_code: names of the moments' codes. master: resolved, not "auto".
        keys: `masters.parameter_key` of each parameter.
        first_groups: number of each tensor's first group in its unsharded parameter.
    """
    if bool(skip):
        return
    hyper = Hyper(beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size)
    lists = _by_name(states, len(params), hyper)
    torch._foreach_add_(lists["step"], 1.0)
    coefficients = step_coefficients(torch.stack(lists["step"]), lr, beta1, beta2, eps, weight_decay)
    for i, param in enumerate(params):
        state = {name: of[i] for name, of in lists.items()}
        step_parameter(param, grads[i], state, hyper, coefficients[i], grad_factor, keys[i], first_groups[i])


@adamw_step_.fake
def _(*args):
    return None


def _by_name(states: List[Tensor], count: int, hyper: Hyper) -> dict[str, List[Tensor]]:
    """The lists of the op's `states`."""
    names = state_names(*hyper.codes, hyper.master)
    return {name: states[i * count : (i + 1) * count] for i, name in enumerate(names)}


class StepTensors(NamedTuple):
    """Lists of equal length, of plain tensors on one device.

    Attributes:
        params: of one dtype.
        states: lists by the names of `state_names`, in that order.
        keys, first_groups, group_size: as `adamw_step_` takes them.
    """

    params: List[Tensor]
    states: dict[str, List[Tensor]]
    keys: List[int]
    first_groups: List[int]
    group_size: int

    def kernel_runs(self) -> bool:
        """Whether the kernel can be launched on these very tensors: on a GPU, and in Triton's interpreter."""
        is_there = self.params[0].is_cuda or INTERPRETED
        return bool(triton and is_there) and all(map(Tensor.is_contiguous, self.params))

    def call_op(self, grads: List[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        """Step by the op; skip may be one flag (0-d) or one per parameter (T,)."""
        if skip.dim():
            for i, grad in enumerate(grads):
                self._only(i).call_op([grad], lr, factor, skip[i], hyper)
            return
        states = list(chain.from_iterable(self.states.values()))
        adamw_step_(self.params, grads, states, lr, factor, skip, *hyper, self.keys, self.first_groups)

    def _only(self, i: int) -> StepTensors:
        """The lists of parameter i alone."""
        return self._replace(
            params=[self.params[i]],
            states={name: of[i : i + 1] for name, of in self.states.items()},
            keys=[self.keys[i]],
            first_groups=[self.first_groups[i]],
        )


# ---- the launch -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _de8_tables(signed: bool, device: torch.device) -> Tensor:
    """FP32 (768,): the 256 values of DE8, its 255 midpoints (and one unused), the byte of each rank."""
    midpoints, order = de8.encode_tables(signed)
    return torch.cat([de8.decode_table(signed), midpoints, torch.zeros(1), order.float()]).to(device)


class _Launch(NamedTuple):
    """One launch: the tiles of all tensors whose rows lie in memory in the same way."""

    tiles: Tensor  # int64 (programs,)
    programs: int
    flat: bool
    align: int


class Plan:
    """What stays the same from step to step for one list of parameters, contiguous, not empty: the device's tables."""

    def __init__(self, tensors: StepTensors) -> None:
        params, states, _, _, group_size = tensors
        self.device, self.dtype, self.count = params[0].device, params[0].dtype, len(params)
        rows: List[List[int]] = []
        counts: dict[tuple[bool, int], List[int]] = {}  # tiles of each tensor, by kind of launch
        for i, param in enumerate(params):
            layout = rows_of(param.shape, group_size)
            groups = layout.rows * layout.groups
            fields = {name: of[i].data_ptr() for name, of in states.items() if name in FIELDS}
            fields["param"] = param.data_ptr()
            aligned = all(fields[name] % 16 == 0 for name in _VECTORS if name in fields)
            flat = aligned and layout.columns % group_size == 0
            kind = (flat, 16 if aligned and layout.columns % 16 == 0 else 1)
            counts.setdefault(kind, [0] * len(params))[i] = -(-groups * group_size // TILE)
            fields |= {
                "groups": groups,
                "columns": layout.columns,
                "groups_per_row": layout.groups,
                "first_group": tensors.first_groups[i],
                "key": tensors.keys[i],
            }
            rows.append([fields.get(name, 0) for name in FIELDS])
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.launches = [
            _Launch(tile_table(count).to(self.device), sum(count), *kind) for kind, count in counts.items()
        ]

    def launch(
        self, addresses: Tensor, grad_dtype: torch.dtype, scalars: StepScalars, grad_factor: Tensor, skip: Tensor,
        hyper: Hyper,
    ) -> None:  # fmt: skip
        """Step every parameter.

        Args:
            addresses: of the gradients, int64 (T,); grad_dtype: theirs.
            scalars: the step that each takes: whoever calls counts.
            grad_factor, hyper: as `adamw_step_` takes them. skip: bool, 0-d or (T,).
        """
        signed, unsigned = _de8_tables(True, self.device), _de8_tables(False, self.device)
        for launch in self.launches:
            if launch.programs:
                adamw_kernel[(launch.programs,)](
                    launch.tiles, self.table, addresses, scalars.coefficients, scalars.steps, grad_factor, skip,
                    signed, unsigned, hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, math.sqrt(1.0 - hyper.beta2),
                    **_constants(self.dtype, grad_dtype, hyper, skip.dim() > 0, launch.flat, launch.align),
                )  # fmt: skip


@lru_cache(maxsize=64)
def _constants(
    dtype: torch.dtype, grad_dtype: torch.dtype, hyper: Hyper, skips: bool, flat: bool, align: int
) -> dict[str, Any]:
    """Compile-time arguments of the kernel and its launch options."""
    m, v = hyper.codes
    remainder = REMAINDER_DTYPE[hyper.master]
    return {
        "PARAM": TRITON_TYPE[dtype],
        "GRAD": TRITON_TYPE[grad_dtype],
        "FIRST": TRITON_TYPE[m.dtype],
        "SECOND": TRITON_TYPE[v.dtype],
        "REMAINDER": None if remainder is None else TRITON_TYPE[remainder],
        "M_CODE": m.base,
        "M_EXPANDED": m.expanded,
        "M_RANGE": EXPONENT_STEPS * range_log2(m.base, signed=True) if m.expanded else 0.0,
        "V_CODE": v.base,
        "V_EXPANDED": v.expanded,
        "V_RANGE": EXPONENT_STEPS * range_log2(v.base, signed=False) if v.expanded else 0.0,
        "MASTER": hyper.master,
        "RANDOM": RANDOM_BITS[hyper.master],
        "G": hyper.group_size,
        "GROUPS": TILE // hyper.group_size,
        "FLAT": flat,
        "ALIGN": align,
        "NUM_FIELDS": len(FIELDS),
        "SKIPS": skips,
        "num_warps": NUM_WARPS,
        "maxnreg": _max_registers(hyper) if align >= 16 else None,
        "enable_fp_fusion": False,
    }


def _max_registers(hyper: Hyper) -> Optional[int]:
    if any(code.expanded for code in hyper.codes):
        return MAX_REGISTERS_SPILLING if hyper.master == "bf16" else MAX_REGISTERS
    is_default = (hyper.m_code, hyper.v_code, hyper.master) == ("sqrt8", "log8", "bf16+8")
    return MAX_REGISTERS if is_default else None


_plans: OrderedDict[Any, tuple[Plan, Counters, Gradients]] = OrderedDict()
_MAX_PLANS = 16


def _plan(tensors: StepTensors, hyper: Hyper) -> tuple[Plan, Counters, Gradients]:
    """The op's tables for these very tensors; the few used last are kept."""
    params = tensors.params
    identity = (
        hyper[4:],
        params[0].device,
        tuple(tensors.keys),
        tuple(tensors.first_groups),
        tuple((param.dtype, param.shape) for param in params),
        tuple(map(Tensor.data_ptr, chain(params, *tensors.states.values()))),
    )
    found = _plans.pop(identity, None)
    if found is None:
        gradients = Gradients([param.numel() for param in params], params[0].device)
        found = (Plan(tensors), Counters(tensors.states["step"]), gradients)
    _plans[identity] = found
    if len(_plans) > _MAX_PLANS:
        _plans.popitem(last=False)
    return found


def adamw_step_triton(
    params, grads, states, lr, grad_factor, skip, beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size,
    keys, first_groups,
) -> None:  # fmt: skip
    """`adamw_step_` by the fused kernel; a non-contiguous parameter is copied there and back."""
    hyper = Hyper(beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size)
    whole = [param.contiguous() for param in params]
    tensors = StepTensors(whole, _by_name(states, len(params), hyper), keys, first_groups, group_size)
    plan, counters, gradients = _plan(tensors, hyper)
    gradients.set(contiguous(grads))
    scalars = counters.take_step(lr, skip, hyper)
    plan.launch(gradients.addresses, gradients.dtype, scalars, grad_factor, skip, hyper)
    gradients.forget_copies()
    for param, copy in zip(params, whole, strict=True):
        if copy is not param:
            param.copy_(copy)


if triton:  # without it the reference runs on GPUs too
    adamw_step_.cuda(adamw_step_triton)
