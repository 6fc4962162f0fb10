"""The fused AdamW step in Triton: `kernels.adamw`, any number of parameters, one pass over memory.

A program owns a tile of GROUPS whole groups of one parameter: decode both moments and the master, update in FP32
registers, find each group's statistics, encode, store. With 8-bit moments and a 24-bit master that is 12.1 bytes of
traffic per parameter, and nothing else touches memory.

Which tile of which parameter a program owns stands in two tables on the device, which `adamw_step` builds:

    tiles    int64 (programs,)           tensor | tile << 32
    table    int64 (T, FIELDS)           addresses and layout of each parameter, in the order of `FIELDS`

Learning rate, step counts, scales and flags are read from device memory, so no value recompiles anything.

Legend: G group size, GROUPS groups per tile, T tensors.
"""

from __future__ import annotations

from overcoat.kernels import adamw_codes as codes
from overcoat.kernels.instructions import fma, reciprocal, sqrt, to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import kernel

FIELDS = (
    "param", "exp_avg", "exp_avg_sq", "remainder", "exp_avg_amax", "exp_avg_exponent", "exp_avg_sq_scale",
    "groups", "columns", "groups_per_row", "first_group", "key",
)  # fmt: skip


@triton.jit
def _pointer(row, FIELD: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row + FIELD).to(tl.pointer_type(TYPE))


@triton.jit
def _elements(base, offset, ALIGN: tl.constexpr):
    """Pointers to a tile, with the promise that groups start at multiples of ALIGN bytes and are contiguous."""
    return tl.multiple_of(tl.max_contiguous(base + offset, (1, offset.shape[1])), (ALIGN, ALIGN))


@triton.jit
def _place(group, lane, groups, columns, per_row, G: tl.constexpr, FLAT: tl.constexpr):
    """(offset, mask) of a tile's elements, (GROUPS, G); FLAT: rows are whole groups, so groups follow one another."""
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
    beta1, complement1, beta2, root2,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, REMAINDER: tl.constexpr,
    M_CODE: tl.constexpr, M_EXPANDED: tl.constexpr, M_RANGE: tl.constexpr,
    V_CODE: tl.constexpr, V_EXPANDED: tl.constexpr, V_RANGE: tl.constexpr,
    MASTER: tl.constexpr, RANDOM: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    FLAT: tl.constexpr, ALIGN: tl.constexpr, NUM_FIELDS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """One tile of one parameter. ALIGN: bytes that the start of every group is a multiple of.

    root2: sqrt(1 - beta2).
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
    m = codes.decay(first, amax, k16, beta1, g * (factor * complement1), de8_first, M_CODE, M_EXPANDED, True)
    w = codes.decode_master(param, remainder, MASTER)
    v = codes.decay_second(second, packed, beta2, root * root, de8_second, V_CODE, V_EXPANDED)
    w = fma(m * reciprocal(sqrt(v) + eps), -step_size, w * keep)

    number = (tl.load(row + 10) + group).to(tl.int32)
    of_group = codes.group_bits(tl.load(row + 11).to(tl.int32), tl.load(steps + tensor), number)
    random = remainder
    if RANDOM > 0:
        random = codes.random_bits(of_group, lane, RANDOM)
    param, remainder = codes.encode_master(w, random, MASTER)
    tl.store(_elements(param_base, offset, ALIGN), param, mask)
    if REMAINDER is not None:
        tl.store(_elements(remainder_base, offset, ALIGN), remainder, mask)
    first, amax, k16 = codes.encode_first(m, of_group, de8_first, M_CODE, M_EXPANDED, M_RANGE, FIRST)
    second, packed = codes.encode_second(v, of_group, de8_second, V_CODE, V_EXPANDED, V_RANGE, SECOND)
    tl.store(_elements(first_base, offset, ALIGN), first, mask)
    tl.store(_elements(second_base, offset, ALIGN), second, mask)
    # The addresses of the groups' numbers are read again: kept all the while, they would take registers.
    tl.store(_pointer(row, 4, tl.bfloat16) + group, amax, valid & M_GROUPED)
    tl.store(_pointer(row, 5, tl.uint8) + group, k16.to(tl.uint8), valid & M_EXPANDED)
    tl.store(_pointer(row, 6, tl.int32) + group, packed, valid & V_GROUPED)
