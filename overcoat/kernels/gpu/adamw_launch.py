"""Launching the fused AdamW step: the CUDA face of `overcoat::adamw_step_`.

A `Plan` holds what stays the same from step to step: the device tables of addresses and tiles. It is built when a list
of parameters is seen for the first time and found again by the addresses of all its tensors. The gradients' addresses
change with every step: they travel through pinned memory of their own, without synchronization.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Any, List, NamedTuple

import torch
import triton
from torch import Tensor

from overcoat import de8
from overcoat.expansion import EXPONENT_STEPS
from overcoat.kernels.adamw import adamw_step_, rows_of, step_coefficients
from overcoat.kernels.gpu.adamw import FIELDS, adamw_kernel, count_steps_kernel
from overcoat.kernels.gpu.hardware import on_device
from overcoat.kernels.gpu.multi_tensor import TRITON_TYPE, readable, tile_table, upload
from overcoat.kernels.gpu.sum_squares import NormTables, partial_sums
from overcoat.masters import RANDOM_BITS
from overcoat.moments import MOMENT_CODES, range_log2

# Elements of a tile and warps of a program: 16 elements per thread, loads of 16 bytes. Measured on an H200, 1.07e9
# parameters: 3.55 ms; with 8 elements per thread 4.1, with several tiles per program 3.5 to 3.9.
TILE = 2048
NUM_WARPS = 4
# Expansion waits for the special function unit, so more programs at once pay: 4.00 ms instead of 4.25 with "fp8".
MAX_REGISTERS_EXPANDED = 72


@lru_cache(maxsize=16)
def _de8_tables(signed: bool, device: torch.device) -> Tensor:
    """FP32 (768,): the 256 values of DE8, its 255 midpoints (and one unused), the byte of each rank."""
    midpoints, order = de8.encode_tables(signed)
    return torch.cat([de8.decode_table(signed), midpoints, torch.zeros(1), order.float()]).to(device)


class _Launch(NamedTuple):
    """One launch: the tiles of all tensors whose rows lie in memory in the same way."""

    tiles: Tensor  # int64 (programs,)
    flat: bool
    align: int


# Table entries that are addresses of tensors in the parameter's shape, read in vectors.
_VECTORS = ("param", "exp_avg", "exp_avg_sq", "remainder")


class Options(NamedTuple):
    """What a step needs that is no tensor; equal options share compiled kernels."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    m_code: str
    v_code: str
    master: str
    group_size: int


class Plan:
    """What stays the same from step to step for one list of parameters: device tables and compile-time choices.

    Args:
        tensors: the lists of `adamw_step_`, by the names in `gpu.adamw.FIELDS`; contiguous, not empty.
        group_size, keys, first_groups: as `adamw_step_` takes them.
    """

    def __init__(
        self, tensors: dict[str, List[Tensor]], group_size: int, keys: List[int], first_groups: List[int]
    ) -> None:
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
            }
            rows.append([fields.get(name, 0) for name in FIELDS])
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.launches = [_Launch(tile_table(count).to(self.device), *kind) for kind, count in counts.items()]
        self.steps = torch.empty(len(params), dtype=torch.float32, device=self.device)
        self.norm = NormTables([param.numel() for param in params], self.device)
        self.addresses: List[int] = []
        self.grads = self.table  # int64 (T,) once `set_gradients` was called
        self.grad_dtype = self.dtype
        self.copies: List[Tensor] = []

    def set_gradients(self, grads: List[Tensor]) -> None:
        """Tell where the gradients of the coming step lie; they are uploaded if that changed."""
        as_read = readable(grads)
        self.copies = [] if as_read is grads else as_read  # alive until the step has been launched
        self.grad_dtype = grads[0].dtype
        addresses = [grad.data_ptr() for grad in as_read]
        if addresses != self.addresses:
            self.addresses, self.grads = addresses, upload(addresses, self.device)

    def sum_squares(self) -> Tensor:
        """`gradients_sum_squares` of the gradients that were set."""
        with on_device(self.device):
            return partial_sums(self.norm, self.grads, self.grad_dtype).sum()

    def step(self, lr: Tensor, grad_factor: Tensor, skip: Tensor, options: Options) -> None:
        """Step every parameter by the gradients that were set; the arguments are those of `adamw_step_`."""
        block = 128
        with on_device(self.device):
            count_steps_kernel[(triton.cdiv(len(self.addresses), block),)](
                self.table, self.steps, skip, len(self.addresses), len(FIELDS), block
            )
            coefficients = step_coefficients(
                self.steps, lr, options.beta1, options.beta2, options.eps, options.weight_decay
            )
            for launch in self.launches:
                if len(launch.tiles):
                    self._launch(launch, coefficients, grad_factor, skip, options)
        self.copies = []

    def _launch(
        self,
        launch: _Launch,
        coefficients: Tensor,
        grad_factor: Tensor,
        skip: Tensor,
        options: Options,
    ) -> None:
        m, v = MOMENT_CODES[options.m_code], MOMENT_CODES[options.v_code]
        adamw_kernel[(len(launch.tiles),)](
            launch.tiles,
            self.table,
            self.grads,
            coefficients,
            self.steps,
            grad_factor,
            skip,
            _de8_tables(True, self.device),
            _de8_tables(False, self.device),
            options.beta1,
            1.0 - options.beta1,
            options.beta2,
            1.0 - options.beta2,
            PARAM=TRITON_TYPE[self.dtype],
            GRAD=TRITON_TYPE[self.grad_dtype],
            FIRST=TRITON_TYPE[m.dtype],
            SECOND=TRITON_TYPE[v.dtype],
            REMAINDER=None if self.remainder_dtype is None else TRITON_TYPE[self.remainder_dtype],
            M_CODE=m.base,
            M_EXPANDED=m.expanded,
            M_RANGE=EXPONENT_STEPS * range_log2(m.base, signed=True) if m.expanded else 0.0,
            V_CODE=v.base,
            V_EXPANDED=v.expanded,
            V_RANGE=EXPONENT_STEPS * range_log2(v.base, signed=False) if v.expanded else 0.0,
            MASTER=options.master,
            RANDOM=RANDOM_BITS[options.master],
            G=options.group_size,
            GROUPS=TILE // options.group_size,
            FLAT=launch.flat,
            ALIGN=launch.align,
            NUM_FIELDS=len(FIELDS),
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS_EXPANDED if m.expanded or v.expanded else None,
            enable_fp_fusion=False,
        )


# ---- the op ---------------------------------------------------------------------------------------------------

_plans: OrderedDict[Any, Plan] = OrderedDict()
_MAX_PLANS = 16


def _plan(tensors: dict[str, List[Tensor]], group_size: int, keys: List[int], first_groups: List[int]) -> Plan:
    """The plan of these very tensors; the few used last are kept."""
    params = tensors["param"]
    identity = (
        group_size,
        params[0].device,
        tuple(keys),
        tuple(first_groups),
        tuple((param.dtype, param.shape) for param in params),
        tuple(tensor.data_ptr() for of in tensors.values() for tensor in of),
    )
    plan = _plans.pop(identity, None) or Plan(tensors, group_size, keys, first_groups)
    _plans[identity] = plan
    if len(_plans) > _MAX_PLANS:
        _plans.popitem(last=False)
    return plan


@adamw_step_.cuda
def adamw_step_triton(
    params, grads, exp_avgs, exp_avg_amaxes, exp_avg_exponents, exp_avg_sqs, exp_avg_sq_scales, remainders, steps,
    lr, grad_factor, skip, beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size, keys, first_groups,
) -> None:  # fmt: skip
    """`adamw_step_` by the fused kernel; a non-contiguous parameter is copied there and back."""
    contiguous = [param.contiguous() for param in params]
    tensors = {
        "param": contiguous,
        "exp_avg": exp_avgs,
        "exp_avg_sq": exp_avg_sqs,
        "remainder": remainders,
        "amax": exp_avg_amaxes,
        "exponent": exp_avg_exponents,
        "scale": exp_avg_sq_scales,
        "step": steps,
    }
    plan = _plan(tensors, group_size, keys, first_groups)
    plan.set_gradients(grads)
    plan.step(lr, grad_factor, skip, Options(beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size))
    for param, copy in zip(params, contiguous, strict=True):
        if copy is not param:
            param.copy_(copy)
