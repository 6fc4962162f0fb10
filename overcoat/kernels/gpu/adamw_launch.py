"""Launching the fused AdamW step: the CUDA face of `overcoat::adamw_step_`.

A `Plan` holds what stays the same from step to step: the device tables of addresses and tiles. The optimizer keeps it
(`optim.step`); the op itself finds it again by the addresses of all its tensors.

`skip` may be one flag for all or one per tensor. The kernels read a single flag, so a tensor that is skipped alone gets
another row of the table: no groups, and a dummy step counter.

Legend: T tensors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import lru_cache
from itertools import chain
from typing import Any, List, NamedTuple, Optional

import torch
import triton
from torch import Tensor

from overcoat.formats import de8
from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import RANDOM_BITS
from overcoat.formats.moments import range_log2
from overcoat.kernels.adamw import Hyper, adamw_step_, rows_of
from overcoat.kernels.gpu.adamw import FIELDS, adamw_kernel
from overcoat.kernels.gpu.adamw_counters import StepScalars, Table, scalars_of
from overcoat.kernels.gpu.multi_tensor import TRITON_TYPE, contiguous, tile_table
from overcoat.kernels.gpu.sum_squares import Gradients
from overcoat.kernels.launch import on_device

# Elements of a tile and warps of a program: 16 elements per thread, loads of 16 bytes. With 8 elements per thread, or
# several tiles per program, a step took longer (docs/research/log.md).
TILE = 2048
NUM_WARPS = 4
# Held to 72 registers, more programs run at once: with expansion, which waits for the special function unit, and with
# the default codes (3.72 ms instead of 3.77) unless they find the weights' maxima, which takes 80. Without a remainder
# expansion would spill at 72 (4.27 ms instead of 4.11). Where rows are not aligned, loads element by element need 254.
MAX_REGISTERS = 72
MAX_REGISTERS_SPILLING = 80
# Triton's interpreter runs the kernels on CPU tensors.
INTERPRETED: bool = triton.knobs.runtime.interpret


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


# Table entries that are addresses of tensors in the parameter's shape, read in vectors.
_VECTORS = ("param", "exp_avg", "exp_avg_sq", "remainder")


class Plan:
    """What stays the same from step to step for one list of parameters: device tables and compile-time choices.

    Args:
        tensors: the lists of `adamw_step_`, by the names in `gpu.adamw.FIELDS`; contiguous, not empty. Without "step"
            only `launch` works.
        group_size, keys, first_groups: as `adamw_step_` takes them.
        weight_amax: where max |parameter| is wanted, 0-d FP32, by number of the parameter.
    """

    def __init__(
        self,
        tensors: dict[str, List[Tensor]],
        group_size: int,
        keys: List[int],
        first_groups: List[int],
        weight_amax: Optional[dict[int, Tensor]] = None,
    ) -> None:
        self.weight_amax = weight_amax or {}
        params = tensors["param"]
        self.device = params[0].device
        self.dtype = params[0].dtype
        self.remainder_dtype = tensors["remainder"][0].dtype if tensors["remainder"] else None
        rows: List[List[int]] = []
        counts: dict[tuple[bool, int], List[int]] = {}  # tiles of each tensor, by kind of launch
        for i, param in enumerate(params):
            layout = rows_of(param.shape, group_size)
            groups = layout.rows * layout.groups
            fields = {name: of[i].data_ptr() for name, of in tensors.items() if of}
            aligned = all(fields[name] % 16 == 0 for name in _VECTORS if name in fields)
            flat = aligned and layout.columns % group_size == 0
            kind = (flat, 16 if aligned and layout.columns % 16 == 0 else 1)
            counts.setdefault(kind, [0] * len(params))[i] = -(-groups * group_size // TILE)
            fields |= {
                "groups": groups,
                "columns": layout.columns,
                "groups_per_row": layout.groups,
                "first_group": first_groups[i],
                "key": keys[i],
                "weight_amax": self.weight_amax[i].data_ptr() if i in self.weight_amax else 0,
            }
            rows.append([fields.get(name, 0) for name in FIELDS])
        self.table = Table(torch.tensor(rows, dtype=torch.int64), self.device)
        self.launches = [
            _Launch(tile_table(count).to(self.device), sum(count), *kind) for kind, count in counts.items()
        ]

    def step(self, gradients: Gradients, lr: Tensor, grad_factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        """Step every parameter; the arguments are those of `adamw_step_`, but skip may be (T,)."""
        with on_device(self.device):
            rows, skip = self.table.skipping(skip)
            scalars = scalars_of(self.table.count(rows, skip), lr, hyper)
            self._launch(rows, gradients.addresses, gradients.dtype, scalars, grad_factor, skip, hyper)

    def launch(
        self,
        addresses: Tensor,
        grad_dtype: torch.dtype,
        scalars: StepScalars,
        grad_factor: Tensor,
        skip: Tensor,
        hyper: Hyper,
    ) -> None:
        """The update alone, where somebody else counts the steps; addresses of the gradients, int64 (T,)."""
        with on_device(self.device):
            rows, skip = self.table.skipping(skip)
            self._launch(rows, addresses, grad_dtype, scalars, grad_factor, skip, hyper)

    def _launch(
        self,
        rows: Tensor,
        addresses: Tensor,
        grad_dtype: torch.dtype,
        scalars: StepScalars,
        grad_factor: Tensor,
        skip: Tensor,
        hyper: Hyper,
    ) -> None:
        if self.weight_amax:
            self.table.clear_weight_amax(rows, skip)
        kind = (self.dtype, grad_dtype, self.remainder_dtype, hyper, bool(self.weight_amax))
        signed, unsigned = _de8_tables(True, self.device), _de8_tables(False, self.device)
        for launch in self.launches:
            if launch.programs:
                adamw_kernel[(launch.programs,)](
                    launch.tiles,
                    rows,
                    addresses,
                    scalars.coefficients,
                    scalars.steps,
                    grad_factor,
                    skip,
                    signed,
                    unsigned,
                    hyper.beta1,
                    1.0 - hyper.beta1,
                    hyper.beta2,
                    math.sqrt(1.0 - hyper.beta2),
                    ALIGN=launch.align,
                    **_constants(*kind, launch.flat, launch.align >= 16),
                )


@lru_cache(maxsize=64)
def _constants(
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    remainder_dtype: Optional[torch.dtype],
    hyper: Hyper,
    weight_amax: bool,
    flat: bool,
    aligned: bool,
) -> dict[str, Any]:
    """Compile-time arguments of the kernel and its launch options."""
    m, v = hyper.codes
    return {
        "PARAM": TRITON_TYPE[dtype],
        "GRAD": TRITON_TYPE[grad_dtype],
        "FIRST": TRITON_TYPE[m.dtype],
        "SECOND": TRITON_TYPE[v.dtype],
        "REMAINDER": None if remainder_dtype is None else TRITON_TYPE[remainder_dtype],
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
        "NUM_FIELDS": len(FIELDS),
        "WEIGHT_AMAX": weight_amax,
        "FLAT": flat,
        "num_warps": NUM_WARPS,
        "maxnreg": _max_registers(hyper, m.expanded or v.expanded, weight_amax) if aligned else None,
        "enable_fp_fusion": False,
    }


def _max_registers(hyper: Hyper, expanded: bool, weight_amax: bool) -> Optional[int]:
    if expanded:
        return MAX_REGISTERS_SPILLING if hyper.master == "bf16" else MAX_REGISTERS
    is_default = (hyper.m_code, hyper.v_code, hyper.master) == ("sqrt8", "log8", "bf16+8")
    return MAX_REGISTERS if is_default and not weight_amax else None


# ---- the op ---------------------------------------------------------------------------------------------------

_plans: OrderedDict[Any, tuple[Plan, Gradients]] = OrderedDict()
_MAX_PLANS = 16


def _plan(
    tensors: dict[str, List[Tensor]], group_size: int, keys: List[int], first_groups: List[int]
) -> tuple[Plan, Gradients]:
    """The plan of these very tensors; the few used last are kept."""
    params = tensors["param"]
    identity = (
        group_size,
        params[0].device,
        tuple(keys),
        tuple(first_groups),
        tuple((param.dtype, param.shape) for param in params),
        tuple(remainder.dtype for remainder in tensors["remainder"]),
        tuple(map(Tensor.data_ptr, chain.from_iterable(tensors.values()))),
    )
    found = _plans.pop(identity, None)
    if found is None:
        gradients = Gradients([param.numel() for param in params], params[0].device)
        found = (Plan(tensors, group_size, keys, first_groups), gradients)
    _plans[identity] = found
    if len(_plans) > _MAX_PLANS:
        _plans.popitem(last=False)
    return found


@adamw_step_.cuda
def adamw_step_triton(
    params, grads, exp_avgs, exp_avg_amaxes, exp_avg_exponents, exp_avg_sqs, exp_avg_sq_scales, remainders, steps,
    lr, grad_factor, skip, beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size, keys, first_groups,
) -> None:  # fmt: skip
    """`adamw_step_` by the fused kernel; a non-contiguous parameter is copied there and back."""
    whole = [param.contiguous() for param in params]
    tensors = {
        "param": whole,
        "exp_avg": exp_avgs,
        "exp_avg_sq": exp_avg_sqs,
        "remainder": remainders,
        "amax": exp_avg_amaxes,
        "exponent": exp_avg_exponents,
        "scale": exp_avg_sq_scales,
        "step": steps,
    }
    plan, gradients = _plan(tensors, group_size, keys, first_groups)
    gradients.set(contiguous(grads))
    hyper = Hyper(beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size)
    plan.step(gradients, lr, grad_factor, skip, hyper)
    gradients.forget_copies()
    for param, copy in zip(params, whole, strict=True):
        if copy is not param:
            param.copy_(copy)
