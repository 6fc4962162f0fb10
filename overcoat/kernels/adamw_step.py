"""One AdamW step over any number of parameters in one launch and one pass over memory; and its reference.

A program owns a tile of GROUPS whole groups of one parameter: decode both moments and the master, update in FP32
registers, find each group's statistics, encode, store. With 8-bit moments and a 24-bit master that is 12.1 bytes of
traffic per parameter. Tables on the device, which do not change between steps, assign the tiles:

    tiles    int64 (programs,)           tensor | tile << 32
    table    int64 (T, FIELDS)           addresses and layout of each parameter, in the order of `FIELDS`

Learning rate, step counts, scales and flags are read from device memory: no value recompiles anything, and the host
waits for nothing. A skipped step changes nothing, not even the step count.

Legend: G group size, GROUPS groups per tile, T tensors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from overcoat.formats import de8
from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import RANDOM_BITS, REMAINDER_DTYPE
from overcoat.formats.moments import dithered_below, range_log2
from overcoat.kernels import adamw_codes as codes
from overcoat.kernels.adamw import Hyper, rows_of, step_coefficients, step_numbers, step_parameters
from overcoat.kernels.instructions import fma, reciprocal, sqrt, to_float32
from overcoat.kernels.language import INTERPRETED, tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.multi_tensor import TRITON_TYPE, is_capturing, send, tile_table

FIELDS = (
    "param", "exp_avg", "exp_avg_sq", "remainder", "exp_avg_amax", "exp_avg_exponent", "exp_avg_sq_scale",
    "groups", "columns", "groups_per_row", "first_group", "key",
)  # fmt: skip
# Fields of tensors with the parameter's shape, read in vectors.
_VECTORS = FIELDS[:4]
# Elements of a tile and warps of a program: 16 elements per thread, loads of 16 bytes. With 8 elements per thread, or
# several tiles per program, a step took longer (docs/research/log.md).
TILE = 2048
NUM_WARPS = 4
# Limited to 72 registers, more programs run at once. That helps with expansion, which waits for the special function
# unit, and with the default codes (3.72 ms instead of 3.77). Expansion without a remainder spills at 72 (4.27 ms; 4.11
# at 80). If rows are not aligned, loads are element by element and need 254.
MAX_REGISTERS = 72
MAX_REGISTERS_SPILLING = 80
# Step counters per program.
COUNTED = 128


class StepTensors(NamedTuple):
    """Tensors that a step updates: lists of equal length of plain tensors on one device.

    params: of one dtype. states: contiguous, by the names of `optim.state.state_fields`. keys: `masters.parameter_key`
    of each. first_groups: the number of each one's first group in its unsharded parameter.
    """

    params: List[Tensor]
    states: dict[str, List[Tensor]]
    keys: List[int]
    first_groups: List[int]
    group_size: int

    def kernel_runs(self) -> bool:
        """True if the kernel can be launched on these tensors: on a GPU, and in Triton's interpreter."""
        is_there = self.params[0].is_cuda or INTERPRETED
        return bool(triton and is_there) and is_real(self.params[0]) and all(map(Tensor.is_contiguous, self.params))


def is_real(tensor: Tensor) -> bool:
    """True if the tensor has memory; meta and fake tensors, used to estimate memory, have none."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@_disable_current_modes()  # hide its temporaries from memory counters, like a kernel's
def reference_step(
    tensors: StepTensors, grads: List[Tensor], lr: Tensor, grad_factor: Tensor, skip: Tensor, hyper: Hyper
) -> None:
    """Step every parameter and its state in place, in plain PyTorch, as the kernel does.

    lr, grad_factor: 0-d FP32; the factor, which unscales and clips, multiplies every gradient. skip: bool, 0-d or one
    per parameter (T,).
    """
    flags = skip.expand(len(tensors.params)).tolist()
    if not (taken := [i for i, skipped in enumerate(flags) if not skipped]):
        return
    params, grads = [tensors.params[i] for i in taken], [grads[i] for i in taken]
    states = {name: [of[i] for i in taken] for name, of in tensors.states.items()}
    torch._foreach_add_(states["step"], 1.0)
    coefficients = step_coefficients(torch.stack(states["step"]), lr, *hyper[:4])
    keys, first_groups = [tensors.keys[i] for i in taken], [tensors.first_groups[i] for i in taken]
    step_parameters(params, grads, states, hyper, coefficients, grad_factor, keys, first_groups)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _pointer(row, FIELD: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row + FIELD).to(tl.pointer_type(TYPE))


@triton.jit
def _elements(base, offset, ALIGN: tl.constexpr):
    """Return pointers to a tile, and tell Triton that groups are contiguous and start at multiples of ALIGN bytes."""
    return tl.multiple_of(tl.max_contiguous(base + offset, (1, offset.shape[1])), (ALIGN, ALIGN))


@triton.jit
def _place(group, lane, groups, columns, per_row, G: tl.constexpr, FLAT: tl.constexpr):
    """Return (offset, mask) of a tile's elements, (GROUPS, G); FLAT: rows are whole groups, so all are contiguous."""
    if FLAT:
        offset = group[:, None] * G + lane[None, :]
        mask = (group < groups)[:, None] & (lane >= 0)[None, :]
    else:
        column = (group % per_row) * G
        offset = (group // per_row * columns + column)[:, None] + lane[None, :]
        mask = (group < groups)[:, None] & (column[:, None] + lane[None, :] < columns)
    return offset, mask


@kernel
def adamw_kernel(
    tiles, table, grads, coefficients, steps, grad_factor, skip, de8_first, de8_second,
    beta1, complement1, beta2, root2, dithered_below,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, REMAINDER: tl.constexpr,
    M_CODE: tl.constexpr, M_EXPANDED: tl.constexpr, M_RANGE: tl.constexpr,
    V_CODE: tl.constexpr, V_EXPANDED: tl.constexpr, V_RANGE: tl.constexpr,
    MASTER: tl.constexpr, RANDOM: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    FLAT: tl.constexpr, ALIGN: tl.constexpr, NUM_FIELDS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Step one tile of one parameter. ALIGN: every group starts at a multiple of this many bytes.

    root2: sqrt(1 - beta2); dithered_below: `moments.dithered_below`.
    SKIPS: skip has a flag for each parameter, (T,).
    """
    M_GROUPED: tl.constexpr = M_CODE != "bf16" and M_CODE != "fp32"
    V_GROUPED: tl.constexpr = V_CODE != "bf16" and V_CODE != "fp32"
    entry = tl.load(tiles + tl.program_id(0))
    tensor = (entry & 0xFFFFFFFF).to(tl.int32)
    row = table + tensor * NUM_FIELDS
    param_base, grad_base = _pointer(row, 0, PARAM), tl.load(grads + tensor).to(tl.pointer_type(GRAD))
    first_base, second_base = _pointer(row, 1, FIRST), _pointer(row, 2, SECOND)
    amax_base, k16_base = _pointer(row, 4, tl.bfloat16), _pointer(row, 5, tl.uint8)
    packed_base = _pointer(row, 6, tl.int32)
    skipped = tl.load(skip + tensor if SKIPS else skip)
    groups = tl.where(skipped, 0, tl.load(row + 7))  # a skipped step masks everything
    columns, per_row = tl.multiple_of(tl.load(row + 8), ALIGN), tl.load(row + 9)
    factor = tl.load(grad_factor)
    step_size, eps = tl.load(coefficients + tensor * 3), tl.load(coefficients + tensor * 3 + 1)
    keep = tl.load(coefficients + tensor * 3 + 2)
    lane = tl.arange(0, G)
    group = (entry >> 32) * GROUPS + tl.arange(0, GROUPS)
    valid = group < groups
    offset, mask = _place(group, lane, groups, columns, per_row, G, FLAT)
    param = tl.load(_elements(param_base, offset, ALIGN), mask, 0.0)
    g = to_float32(tl.load(_elements(grad_base, offset, ALIGN), mask, 0.0))
    first = tl.load(_elements(first_base, offset, ALIGN), mask, 0.0)
    second = tl.load(_elements(second_base, offset, ALIGN), mask, 0.0)
    remainder = param
    if REMAINDER is not None:
        remainder_base = _pointer(row, 3, REMAINDER)
        remainder = tl.load(_elements(remainder_base, offset, ALIGN), mask, 0)
    amax = tl.load(amax_base + group, valid & M_GROUPED, 0.0).to(tl.float32)
    k16 = tl.load(k16_base + group, valid & M_EXPANDED, 16).to(tl.int32)
    packed = tl.load(packed_base + group, valid & V_GROUPED, 0)

    root = g * (factor * root2)
    addend = g * (factor * complement1)
    if M_CODE == "ratio8":
        m = codes.decay_ratio8(first, amax, codes.log8_value(second, packed), beta1, addend)
    else:
        m = codes.decay(first, amax, k16, beta1, addend, de8_first, M_CODE, M_EXPANDED, True)
    w = codes.decode_master(param, remainder, MASTER)
    v = codes.decay_second(second, packed, beta2, root * root, de8_second, V_CODE, V_EXPANDED)
    w = fma(m * reciprocal(sqrt(v) + eps), -step_size, w * keep)

    number = (tl.load(row + 10) + group).to(tl.int32)
    key, step = tl.load(row + 11).to(tl.int32), tl.load(steps + tensor)
    of_group = codes.group_bits(key, step, number)
    random = remainder
    if RANDOM > 0:
        random = codes.random_bits(of_group, lane, RANDOM)
    param, remainder = codes.encode_master(w, random, MASTER)
    tl.store(_elements(param_base, offset, ALIGN), param, mask)
    if REMAINDER is not None:
        tl.store(_elements(remainder_base, offset, ALIGN), remainder, mask)
    phase = codes.phase_bits(key, step, number)
    second, packed, v = codes.encode_second(v, of_group, phase, de8_second, V_CODE, V_EXPANDED, V_RANGE, SECOND)
    first, amax, k16 = codes.encode_first(m, of_group, v, dithered_below, de8_first, M_CODE, M_EXPANDED, M_RANGE, FIRST)
    tl.store(_elements(first_base, offset, ALIGN), first, mask)
    tl.store(_elements(second_base, offset, ALIGN), second, mask)
    # The addresses of per-group states are loaded again: held until here, they would take registers.
    tl.store(_pointer(row, 4, tl.bfloat16) + group, amax, valid & M_GROUPED)
    tl.store(_pointer(row, 5, tl.uint8) + group, k16.to(tl.uint8), valid & M_EXPANDED)
    tl.store(_pointer(row, 6, tl.int32) + group, packed, valid & V_GROUPED)


@kernel
def _count_steps_kernel(
    counters, steps, coefficients, skip, lr, numbers, tensors, PER_TENSOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Increment every parameter's own step counter, unless skipped, gather them, and compute `step_coefficients`.

    counters: int64 addresses; steps (T,), coefficients (T, 3); numbers: FP64, `step_numbers`."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < tensors
    counter = tl.load(counters + tensor, mask, 0).to(tl.pointer_type(tl.float32))
    skipped = tl.load(skip + tensor, mask, 0) if PER_TENSOR else tl.load(skip)
    step = tl.load(counter, mask, 0.0) + tl.where(skipped, 0.0, 1.0)
    tl.store(counter, step, mask)
    tl.store(steps + tensor, step, mask)
    t, rate = step.to(tl.float64), tl.load(lr).to(tl.float64)
    bias = tl.sqrt(1.0 - tl.exp2(t * tl.load(numbers + 1)))
    step_size = rate * bias / (1.0 - tl.exp2(t * tl.load(numbers)))
    keep = 1.0 - rate * tl.load(numbers + 3) + tl.zeros((BLOCK,), tl.float64)
    tl.store(coefficients + tensor * 3, step_size.to(tl.float32), mask)
    tl.store(coefficients + tensor * 3 + 1, (bias * tl.load(numbers + 2)).to(tl.float32), mask)
    tl.store(coefficients + tensor * 3 + 2, keep.to(tl.float32), mask)


# ---- the launch -----------------------------------------------------------------------------------------------


class Counters:
    """The step counters of T parameters, separate 0-d FP32 tensors on one device."""

    def __init__(self, counters: List[Tensor]) -> None:
        self.device, self.count = counters[0].device, len(counters)
        self.addresses = torch.tensor(list(map(Tensor.data_ptr, counters)), dtype=torch.int64).to(self.device)
        self.steps = torch.empty(self.count, dtype=torch.float32, device=self.device)
        self.coefficients = torch.empty((self.count, 3), dtype=torch.float32, device=self.device)
        self._known: List[float] = []

    def take_step(self, lr: Tensor, skip: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """Count a step of every parameter that is not skipped; skip: bool, 0-d or (T,).

        Returns the step counts, FP32 (T,), and `step_coefficients`, FP32 (T, 3), valid until the next call.
        """
        numbers = step_numbers(*hyper[:4])
        if numbers != self._known:
            self._known, self.numbers = numbers, send(numbers, torch.float64, self.device)
            if is_capturing(self.device):
                self._known = []  # not on the device before a replay: send them again
        _count_steps_kernel[(cdiv(self.count, COUNTED),)](
            self.addresses, self.steps, self.coefficients, skip, lr, self.numbers, self.count, skip.dim() > 0, COUNTED,
            enable_fp_fusion=False,
        )  # fmt: skip
        return self.steps, self.coefficients


@lru_cache(maxsize=16)
def de8_tables(signed: bool, device: torch.device) -> Tensor:
    """Return FP32 (768,): the 256 values of DE8, its 255 midpoints (and one unused), the byte of each rank."""
    midpoints, order = de8.encode_tables(signed)
    return torch.cat([de8.decode_table(signed), midpoints, midpoints.new_zeros(1), order.float()]).to(device)


class _Launch(NamedTuple):
    """One launch: the tiles of all tensors whose rows have the same alignment and contiguity."""

    tiles: Tensor  # int64 (programs,)
    programs: int
    flat: bool
    align: int


class Plan:
    """Device tables of a list of parameters (contiguous, not empty), made once and used in every step."""

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
        self, addresses: Tensor, grad_dtype: torch.dtype, counted: tuple[Tensor, Tensor], grad_factor: Tensor,
        skip: Tensor, hyper: Hyper,
    ) -> None:  # fmt: skip
        """Step every parameter. addresses: of the gradients, int64 (T,), of `grad_dtype`; counted: the results of
        `Counters.take_step`; grad_factor, skip: as in `reference_step`."""
        steps, coefficients = counted
        signed, unsigned = de8_tables(True, self.device), de8_tables(False, self.device)
        for launch in self.launches:
            if launch.programs:
                adamw_kernel[(launch.programs,)](
                    launch.tiles, self.table, addresses, coefficients, steps, grad_factor, skip,
                    signed, unsigned, hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, math.sqrt(1.0 - hyper.beta2),
                    dithered_below(hyper.beta1),
                    **_constants(self.dtype, grad_dtype, hyper, skip.dim() > 0, launch.flat, launch.align),
                )  # fmt: skip


@lru_cache(maxsize=64)
def _constants(
    dtype: torch.dtype, grad_dtype: torch.dtype, hyper: Hyper, skips: bool, flat: bool, align: int
) -> dict[str, Any]:
    """Return the kernel's compile-time arguments and launch options."""
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
    is_default = (hyper.m_code, hyper.v_code, hyper.master) == ("ratio8", "log8", "bf16+8")
    return MAX_REGISTERS if is_default else None
