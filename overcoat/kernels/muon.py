"""Muon's step: 8-bit momentum, Newton-Schulz in FP16 with symmetric products, 24-bit weights. Reference and kernels.

For each matrix (Jordan, https://kellerjordan.github.io/posts/muon; the same as torch.optim.Muon):

    m = mu m' + (1 - mu) g                         m' decoded from the state; encoded again as AdamW's first moment
    u = mu m + (1 - mu) g                          Nesterov, BF16; without: u = m
    o = Newton-Schulz(u / max(|u|, 1e-7))          |u|: Frobenius norm; U V^T of u = U S V^T, with singular values ~1
    w = w' (1 - lr decay) - lr ratio o             24-bit weights, as AdamW's

The weight moves by the new FP32 momentum; only the stored momentum is quantized. One pass over memory computes m and u,
another applies o; both work on the groups of any number of matrices in one launch, like AdamW's.

**Newton-Schulz.** A step is x <- P(x x^T) x with P(G) = a I + b G + c G^2. All polynomials in G = x x^T are symmetric
and commute, so a *segment* of several steps needs x twice only, at its beginning and its end (Gram form):

    G = x x^T;  for each step: P = P(G), Q = P Q, G = P G P;  x = Q x

Products of n x n matrices are symmetric: only tiles on and below the diagonal are computed, half of the work. Segments
of one step are the iteration as published. Rounding errors of G grow within a segment, so that the steps are divided
into segments (`segments`), and G is computed anew from x at each.

Singular values are at most 1.3 in every step, so FP16 holds all matrices, with three bits more than BF16 for the same
time; G is stored times 256, which keeps its small values normal. The result is 4 to 11 times nearer to the exact
iteration than torch.optim.Muon's in BF16 (docs/optimizer.md).

Legend: B matrices of one shape, n the smaller and m the larger of its rows and columns; G also the group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, List, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from overcoat.formats.expansion import EXPONENT_STEPS
from overcoat.formats.masters import (
    RANDOM_BITS,
    REMAINDER_DTYPE,
    decode_master,
    encode_master,
    group_bits,
    random_bits,
)
from overcoat.formats.moments import MOMENT_CODES, Encoded, decay, dithered_below, encode_first, range_log2
from overcoat.kernels import adamw_codes as codes
from overcoat.kernels.adamw import Groups, Piece
from overcoat.kernels.adamw_step import NUM_WARPS, TILE, StepTensors, _elements, _place, _pointer, de8_tables
from overcoat.kernels.hardware import fma
from overcoat.kernels.instructions import fma as fma_of
from overcoat.kernels.instructions import to_bfloat16, to_float32
from overcoat.kernels.language import INTERPRETED, TensorDescriptor, tl, triton
from overcoat.kernels.launch import Blocks, cdiv, kernel
from overcoat.kernels.multi_tensor import TRITON_TYPE, tile_table

# The published coefficients a, b, c, and the smallest norm that is divided by: torch.optim.Muon's.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPS = 1e-7
# Steps of the first segment and of all others where the Gram form takes less work: from this ratio m / n on.
SEGMENT = (3, 2)
GRAM_RATIO = 1.25
# G is stored times this.
GRAM_SCALE = 256.0


class MuonHyper(NamedTuple):
    """Options of a step. The first four are `step_coefficients`'s: with these betas it returns lr and 1 - lr decay."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    nesterov: bool
    code: str
    master: str
    group_size: int
    steps: int


def hyper(
    momentum: float, nesterov: bool, weight_decay: float, code: str, master: str, group_size: int, steps: int
) -> MuonHyper:
    """Return the options of a step; master: resolved, not "auto"."""
    return MuonHyper(0.0, 0.0, 0.0, weight_decay, momentum, nesterov, code, master, group_size, steps)


class Part(NamedTuple):
    """The rows of one matrix that this process holds.

    piece: the rows of the parameter; offset: of the first element in the buffer of updates; ratio: of the update.
    """

    piece: Piece
    offset: int
    ratio: float

    def of(self, updates: Tensor) -> Tensor:
        """Return this part of the flat buffer of updates."""
        return updates[self.offset : self.offset + self.numel]

    @property
    def numel(self) -> int:
        return (self.piece.stop - self.piece.start) * self.piece.layout.columns


# ---- Newton-Schulz ----------------------------------------------------------------------------------------------


def segments(rows: int, columns: int, steps: int) -> tuple[int, ...]:
    """Return the number of steps of each segment; their sum is `steps`."""
    if max(rows, columns) < GRAM_RATIO * min(rows, columns):
        return (1,) * steps
    found: list[int] = []
    while (left := steps - sum(found)) > 0:
        found.append(min(left, SEGMENT[min(len(found), 1)]))
    return tuple(found)


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of a matrix, symmetric products counted as half."""
    n, m = min(rows, columns), max(rows, columns)
    parts = segments(rows, columns, steps)
    square = sum(length + 3 * (length - 1) for length in parts)
    return n * n * (square * n + 3 * len(parts) * m)


def newton_schulz(updates: Tensor, steps: int) -> Tensor:
    """Return the orthogonalized matrices, FP16, of BF16 (B, rows, columns); the specification."""
    return torch.stack([_newton_schulz(update.float(), steps) for update in updates])


def _newton_schulz(update: Tensor, steps: int) -> Tensor:
    alpha, beta, gamma = polynomial()
    rows, columns = update.shape
    wide = rows <= columns
    norm = update.square().sum(dtype=torch.float64).sqrt().float()
    x = _rounded((update if wide else update.mT) * (1.0 / norm.clamp(min=EPS)))
    for length in segments(rows, columns, steps):
        gram = _rounded((x @ x.mT) * GRAM_SCALE)
        total = None
        for step in range(length):
            poly = alpha * (gram @ gram) + beta * gram
            poly.diagonal().add_(gamma)
            poly = _rounded(poly)
            total = poly if total is None else _rounded(poly @ total)
            if step < length - 1:
                gram = _rounded(_rounded(poly @ gram) @ poly)
        assert total is not None
        x = _rounded(total @ x)
    return (x if wide else x.mT).half()


def polynomial() -> tuple[float, float, float]:
    """Return (alpha, beta, gamma): P = alpha G^2 + beta G + gamma I of the stored G."""
    a, b, c = COEFFICIENTS
    return c / GRAM_SCALE**2, b / GRAM_SCALE, a


def _rounded(x: Tensor) -> Tensor:
    """Round FP32 to FP16."""
    return x.half().float()


def orthogonalize(updates: Tensor, steps: int) -> Tensor:
    """Return the orthogonalized matrices, FP16, of contiguous BF16 (B, rows, columns), which are overwritten.

    The result for a matrix does not depend on the others beside it.
    """
    if triton and (updates.is_cuda or INTERPRETED):
        return orthogonalize_by_kernels(updates, steps)
    return newton_schulz(updates, steps)


# ---- the passes over memory: reference ----------------------------------------------------------------------------


class _Taken:
    """The groups of parts whose parameters are not skipped, with their random numbers."""

    def __init__(self, tensors: StepTensors, parts: Sequence[Part], steps: Tensor, skip: Tensor) -> None:
        skipped = skip.expand(len(tensors.params)).tolist()
        self.parts = [part for part in parts if part.numel and not skipped[part.piece.owner]]
        if not self.parts:
            return
        self.pieces = [part.piece for part in self.parts]
        device = tensors.params[0].device
        self.groups = Groups(self.pieces, tensors.first_groups, tensors.group_size, device)
        keys = torch.tensor(tensors.keys, dtype=torch.int32, device=device)
        owner = self.groups.owner
        self.random = group_bits(keys[owner], steps[owner], self.groups.number)


@_disable_current_modes()  # hide its temporaries from memory counters, like a kernel's
def reference_momentum(
    tensors: StepTensors, parts: Sequence[Part], grads: Sequence[Tensor], updates: Tensor, steps: Tensor,
    grad_factor: Tensor, skip: Tensor, hyper: MuonHyper,
) -> None:  # fmt: skip
    """Update the momentum of `parts` and write u into `updates`, flat BF16. steps: FP32 (T,), already counted."""
    taken, code, states = _Taken(tensors, parts, steps, skip), MOMENT_CODES[hyper.code], tensors.states
    if not taken.parts:
        return
    groups, mu = taken.groups, hyper.momentum

    def per_group(name: str) -> Tensor | None:
        return groups.gather(states[name], per_group=True) if name in states else None

    stored = Encoded(groups.gather(states["exp_avg"]), per_group("exp_avg_amax"), per_group("exp_avg_exponent"))
    addend = groups.gather(grads).float() * (grad_factor * (1.0 - mu))
    m = decay(stored, code, mu, addend, signed=True)
    u = fma(m, m.new_full((), mu), addend) if hyper.nesterov else m
    groups.unpack(u.bfloat16(), [part.of(updates) for part in taken.parts])
    new = encode_first(m, code, taken.random, None, mu)
    for name, value in zip(("exp_avg", "exp_avg_amax", "exp_avg_exponent"), new, strict=True):
        if value is not None:
            groups.scatter(value, states[name])


@_disable_current_modes()
def reference_apply(
    tensors: StepTensors, parts: Sequence[Part], updates: Tensor, steps: Tensor, coefficients: Tensor, skip: Tensor,
    hyper: MuonHyper,
) -> None:  # fmt: skip
    """Apply the orthogonalized `updates`, flat FP16, to the weights. coefficients: `step_coefficients`, (T, 3)."""
    taken, bits, states = _Taken(tensors, parts, steps, skip), RANDOM_BITS[hyper.master], tensors.states
    if not taken.parts:
        return
    groups = taken.groups
    ratios = torch.tensor([part.ratio for part in taken.parts], device=updates.device)
    ratio = ratios.repeat_interleave(torch.tensor([piece.groups for piece in taken.pieces], device=updates.device))
    rate, _, keep = coefficients[groups.owner].T
    remainder = groups.gather(states["remainder"]) if "remainder" in states else None
    w = decode_master(groups.gather(tensors.params), remainder)
    o = groups.pack([part.of(updates) for part in taken.parts]).float()
    w = fma(o, -(rate * ratio).unsqueeze(-1), w * keep.unsqueeze(-1))
    random = random_bits(taken.random, hyper.group_size, bits) if bits else None
    new_param, remainder = encode_master(w, hyper.master, random)
    groups.scatter(new_param, tensors.params)
    if remainder is not None:
        groups.scatter(remainder, states["remainder"])


# ---- the passes over memory: kernels ------------------------------------------------------------------------------

FIELDS = (
    "param", "exp_avg", "remainder", "exp_avg_amax", "exp_avg_exponent",
    "groups", "columns", "groups_per_row", "first_group", "key", "owner", "element", "offset", "ratio",
)  # fmt: skip


@kernel
def momentum_kernel(
    tiles, table, grads, updates, steps, grad_factor, skip, de8, mu, complement, dithered,
    GRAD: tl.constexpr, FIRST: tl.constexpr, CODE: tl.constexpr, EXPANDED: tl.constexpr, RANGE: tl.constexpr,
    NESTEROV: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr,
    NUM_FIELDS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Update the momentum of one tile of a part and store u; arguments as of `adamw_kernel`."""
    GROUPED: tl.constexpr = CODE != "bf16" and CODE != "fp32"
    entry = tl.load(tiles + tl.program_id(0))
    row = table + (entry & 0xFFFFFFFF) * NUM_FIELDS
    owner = tl.load(row + 10)
    grad_base = tl.load(grads + owner).to(tl.pointer_type(GRAD)) + tl.load(row + 11)
    out_base = updates + tl.load(row + 12)
    first_base = _pointer(row, 1, FIRST)
    amax_base, k16_base = _pointer(row, 3, tl.bfloat16), _pointer(row, 4, tl.uint8)
    skipped = tl.load(skip + owner if SKIPS else skip)
    groups = tl.where(skipped, 0, tl.load(row + 5))
    columns, per_row = tl.multiple_of(tl.load(row + 6), ALIGN), tl.load(row + 7)
    group = (entry >> 32) * GROUPS + tl.arange(0, GROUPS)
    valid = group < groups
    offset, mask = _place(group, tl.arange(0, G), groups, columns, per_row, G, FLAT)
    g = to_float32(tl.load(_elements(grad_base, offset, ALIGN), mask, 0.0))
    first = tl.load(_elements(first_base, offset, ALIGN), mask, 0.0)
    amax = tl.load(amax_base + group, valid & GROUPED, 0.0).to(tl.float32)
    k16 = tl.load(k16_base + group, valid & EXPANDED, 16).to(tl.int32)

    addend = g * (tl.load(grad_factor) * complement)
    m = codes.decay(first, amax, k16, mu, addend, de8, CODE, EXPANDED, True)
    u = fma_of(m, mu, addend) if NESTEROV else m
    tl.store(_elements(out_base, offset, ALIGN), to_bfloat16(u), mask)
    number, key = (tl.load(row + 8) + group).to(tl.int32), tl.load(row + 9).to(tl.int32)
    random = codes.group_bits(key, tl.load(steps + owner), number)
    first, amax, k16 = codes.encode_first(m, random, m, dithered, de8, CODE, EXPANDED, RANGE, FIRST)
    tl.store(_elements(first_base, offset, ALIGN), first, mask)
    tl.store(amax_base + group, amax, valid & GROUPED)
    tl.store(k16_base + group, k16.to(tl.uint8), valid & EXPANDED)


@kernel
def apply_kernel(
    tiles, table, updates, coefficients, steps, skip,
    PARAM: tl.constexpr, REMAINDER: tl.constexpr, MASTER: tl.constexpr, RANDOM: tl.constexpr,
    G: tl.constexpr, GROUPS: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, NUM_FIELDS: tl.constexpr,
    SKIPS: tl.constexpr,
):  # fmt: skip
    """Apply the orthogonalized update to one tile of a part."""
    entry = tl.load(tiles + tl.program_id(0))
    row = table + (entry & 0xFFFFFFFF) * NUM_FIELDS
    owner = tl.load(row + 10)
    param_base, out_base = _pointer(row, 0, PARAM), updates + tl.load(row + 12)
    skipped = tl.load(skip + owner if SKIPS else skip)
    groups = tl.where(skipped, 0, tl.load(row + 5))
    columns, per_row = tl.multiple_of(tl.load(row + 6), ALIGN), tl.load(row + 7)
    ratio = tl.load(row + 13).to(tl.int32).to(tl.float32, bitcast=True)
    rate, keep = tl.load(coefficients + owner * 3) * ratio, tl.load(coefficients + owner * 3 + 2)
    group, lane = (entry >> 32) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, G)
    offset, mask = _place(group, lane, groups, columns, per_row, G, FLAT)
    o = to_float32(tl.load(_elements(out_base, offset, ALIGN), mask, 0.0))
    param = tl.load(_elements(param_base, offset, ALIGN), mask, 0.0)
    remainder = param
    if REMAINDER is not None:
        remainder_base = _pointer(row, 2, REMAINDER)
        remainder = tl.load(_elements(remainder_base, offset, ALIGN), mask, 0)
    w = codes.decode_master(param, remainder, MASTER)
    w = fma_of(o, -rate, w * keep)
    random = remainder
    if RANDOM > 0:
        number, key = (tl.load(row + 8) + group).to(tl.int32), tl.load(row + 9).to(tl.int32)
        random = codes.random_bits(codes.group_bits(key, tl.load(steps + owner), number), lane, RANDOM)
    param, remainder = codes.encode_master(w, random, MASTER)
    tl.store(_elements(param_base, offset, ALIGN), param, mask)
    if REMAINDER is not None:
        tl.store(_elements(remainder_base, offset, ALIGN), remainder, mask)


class Passes:
    """Device tables of a list of parts, made once and used in every step: both passes over their memory.

    origins: the parts' pieces of the parameters, whose gradients and step counts are used, if `tensors` are of pieces.
    """

    def __init__(self, tensors: StepTensors, parts: Sequence[Part], origins: Sequence[Piece] | None = None) -> None:
        parts = [part for part in parts if part.numel]
        origins = [part.piece for part in parts] if origins is None else origins
        self.device, self.dtype = tensors.params[0].device, tensors.params[0].dtype
        rows: List[List[int]] = []
        counts: dict[tuple[bool, int], List[int]] = {}  # tiles of each part, by kind of launch
        size = tensors.group_size
        for number, ((piece, offset, ratio), origin) in enumerate(zip(parts, origins, strict=True)):
            named = {"param": tensors.params, **{name: of for name, of in tensors.states.items() if name in FIELDS}}
            fields = {name: piece.of(of).data_ptr() for name, of in named.items()}
            columns = piece.layout.columns
            element = origin.start * columns
            aligned = all(fields[name] % 16 == 0 for name in FIELDS[:3] if name in fields)
            aligned = aligned and element % 16 == 0 and offset % 16 == 0
            kind = (aligned and columns % size == 0, 16 if aligned and columns % 16 == 0 else 1)
            counts.setdefault(kind, [0] * len(parts))[number] = cdiv(piece.groups * size, TILE)
            fields |= {
                "groups": piece.groups,
                "columns": columns,
                "groups_per_row": piece.layout.groups,
                "first_group": tensors.first_groups[piece.owner] + piece.start * piece.layout.groups,
                "key": tensors.keys[piece.owner],
                "owner": origin.owner,
                "element": element,
                "offset": offset,
                "ratio": int(torch.tensor(ratio).view(torch.int32)),
            }
            rows.append([fields.get(name, 0) for name in FIELDS])
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.launches = [(tile_table(count).to(self.device), sum(count), *kind) for kind, count in counts.items()]

    def momentum(
        self, addresses: Tensor, grad_dtype: torch.dtype, updates: Tensor, steps: Tensor, grad_factor: Tensor,
        skip: Tensor, hyper: MuonHyper,
    ) -> None:  # fmt: skip
        """`reference_momentum`. addresses: of the gradients, int64 (T,), of `grad_dtype`."""
        de8, mu, code = de8_tables(True, self.device), hyper.momentum, MOMENT_CODES[hyper.code]
        for tiles, programs, flat, align in self.launches:
            momentum_kernel[(programs,)](
                tiles, self.table, addresses, updates, steps, grad_factor, skip, de8,
                mu, 1.0 - mu, dithered_below(mu),
                GRAD=TRITON_TYPE[grad_dtype], FIRST=TRITON_TYPE[code.dtype], CODE=code.base, EXPANDED=code.expanded,
                RANGE=EXPONENT_STEPS * range_log2(code.base, signed=True) if code.expanded else 0.0,
                NESTEROV=hyper.nesterov, **_layout(hyper.group_size, flat, align, skip.dim() > 0),
            )  # fmt: skip

    def apply(self, updates: Tensor, counted: tuple[Tensor, Tensor], skip: Tensor, hyper: MuonHyper) -> None:
        """`reference_apply`. counted: the results of `Counters.take_step`."""
        steps, coefficients = counted
        remainder = REMAINDER_DTYPE[hyper.master]
        for tiles, programs, flat, align in self.launches:
            apply_kernel[(programs,)](
                tiles, self.table, updates, coefficients, steps, skip,
                PARAM=TRITON_TYPE[self.dtype], REMAINDER=None if remainder is None else TRITON_TYPE[remainder],
                MASTER=hyper.master, RANDOM=RANDOM_BITS[hyper.master],
                **_layout(hyper.group_size, flat, align, skip.dim() > 0),
            )  # fmt: skip


@lru_cache(maxsize=64)
def _layout(group_size: int, flat: bool, align: int, skips: bool) -> dict[str, Any]:
    """Return the compile-time arguments and launch options that both passes share."""
    return {
        "G": group_size,
        "GROUPS": TILE // group_size,
        "FLAT": flat,
        "ALIGN": align,
        "NUM_FIELDS": len(FIELDS),
        "SKIPS": skips,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
    }


# ---- Newton-Schulz: kernels ---------------------------------------------------------------------------------------

# Tiles (rows, columns, inner), warps and stages of a product, of large matrices and small ones. 4096 x 4096 has 528
# tiles of 128 x 128 on and below the diagonal: four times an H100's multiprocessors.
LARGE, SMALL = (128, 128, 64, 4, 4), (64, 64, 64, 4, 3)
LARGE_FROM = 1024
# From this n on the products with x, which are not symmetric, are cuBLAS's, one matrix after the other.
CUBLAS_FROM = 2048
# Rows of tiles that programs take one after the other, so that their operands stay in the L2 cache.
BAND = 8
# Elements that a program squares and sums, in reads of BLOCK.
SPAN, BLOCK = 16, 2048


@kernel
def _product_kernel(
    added, c, tiles, a, b, rows, columns, inner, alpha, beta, gamma,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    SYMMETRIC: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """c = alpha a b^T + beta added + gamma I, one tile, FP16; grid (tiles, B).

    a (B, rows, inner), b (B, columns, inner), read by the copy engine, which gives zeros beyond their ends; turned:
    (B, inner, rows). added, c (B, rows, columns) contiguous. tiles: int32, row | column << 16. SYMMETRIC: tiles on and
    below the diagonal; those below are stored twice. EVEN: tiles divide rows and columns.
    """
    tile, batch = tl.load(tiles + tl.program_id(0)), tl.program_id(1)
    m, n = (tile & 0xFFFF) * BM, (tile >> 16) * BN
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, inner, BK):
        x = a.load([batch, k, m]).reshape(BK, BM).T if A_TURNED else a.load([batch, m, k]).reshape(BM, BK)
        y = b.load([batch, k, n]).reshape(BK, BN) if B_TURNED else b.load([batch, n, k]).reshape(BN, BK).T
        acc = tl.dot(x, y, acc)
    acc *= alpha
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    first = batch.to(tl.int64) * rows * columns
    place = first + row.to(tl.int64)[:, None] * columns + column[None, :]
    if ADDS:
        other = tl.load(added + place, None if EVEN else inside, None if EVEN else 0.0)
        acc += beta * other.to(tl.float32)
        acc += tl.where(row[:, None] == column[None, :], gamma, 0.0)
    result = acc.to(tl.float16)
    tl.store(c + place, result, None if EVEN else inside)
    if SYMMETRIC and n + BN <= m:  # below the diagonal: not on it
        mirrored = first + column.to(tl.int64)[:, None] * columns + row[None, :]
        known = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(c + mirrored, tl.trans(result), None if EVEN else known)


def _described(x: Tensor, rows: int, inner: int) -> tuple[Any, bool]:
    """Return a descriptor of x (B, rows, inner) in blocks, and True if it lies turned.

    The copy engine takes rows of whole 16 bytes: others are padded.
    """
    turned = x.stride(2) != 1
    lying = x.mT if turned else x
    if lying.stride(2) != 1 or lying.shape[2] % 8 or lying.stride(1) % 8 or lying.stride(0) % 8:
        lying = torch.nn.functional.pad(lying, (0, -lying.shape[2] % 8))
    block = [1, inner, rows] if turned else [1, rows, inner]
    kind = TensorDescriptor if INTERPRETED else Blocks  # the interpreter takes whatever has an address for a tensor
    return kind(lying, lying.shape, lying.stride(), block), turned


@kernel
def _squares_kernel(x, partials, size, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """partials[matrix, program] = sum of squares of SPAN * BLOCK elements; x (B, size) BF16; grid (programs, B)."""
    program, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for span in tl.range(SPAN):
        place = (program * SPAN + span) * BLOCK + tl.arange(0, BLOCK)
        value = to_float32(tl.load(x + batch * size + place, place < size, 0.0))
        total += value * value
    tl.store(partials + batch * tl.num_programs(0) + program, tl.sum(total))


@kernel
def _inverse_norms_kernel(partials, scale, count, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """scale[matrix] = 1 / max(sqrt(sum of its partials), EPS); partials (B, count); grid (B,)."""
    batch = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(partials + batch * count + place, place < count, 0.0)
    norm = tl.sqrt_rn(tl.sum(total.to(tl.float64)).to(tl.float32))
    tl.store(scale + batch, tl.div_rn(1.0, tl.maximum(norm, EPS)))


@kernel
def _normalize_kernel(x, result, scale, size, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """result = scale x, FP16, of BF16 x (B, size), possibly in the same memory; grid (programs, B)."""
    program, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    factor = tl.load(scale + batch)
    for span in tl.range(SPAN):
        place = (program * SPAN + span) * BLOCK + tl.arange(0, BLOCK)
        value = to_float32(tl.load(x + batch * size + place, place < size, 0.0))
        tl.store(result + batch * size + place, (value * factor).to(tl.float16), place < size)


def normalize(x: Tensor) -> Tensor:
    """Return x / max(|x|, EPS) of contiguous BF16 matrices (B, ...) as FP16, in the same memory."""
    count, size = len(x), x[0].numel()
    programs = cdiv(size, SPAN * BLOCK)
    partials = torch.empty((count, programs), dtype=torch.float32, device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    _squares_kernel[(programs, count)](x, partials, size, SPAN, BLOCK, num_warps=8)
    _inverse_norms_kernel[(count,)](partials, scale, programs, EPS, 256)
    result = x.view(torch.float16)
    _normalize_kernel[(programs, count)](x, result, scale, size, SPAN, BLOCK, num_warps=8)
    return result


@cache  # CUDA graphs keep reading them
def _tiles(rows: int, columns: int, bm: int, bn: int, symmetric: bool, device: torch.device) -> Tensor:
    """Return the tiles of a product, int32 row | column << 16, in bands of BAND rows."""
    down, across = cdiv(rows, bm), cdiv(columns, bn)
    found = []
    for band in range(0, down, BAND):
        for column in range(across):
            of_band = range(band, min(band + BAND, down))
            found += [row | column << 16 for row in of_band if not symmetric or column * bn < (row + 1) * bm]
    return torch.tensor(found, dtype=torch.int32).to(device)


def product(
    a: Tensor, b: Tensor, symmetric: bool = False, *, alpha: float = 1.0, added: Tensor | None = None,
    beta: float = 0.0, gamma: float = 0.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return alpha a b^T + beta added + gamma I, FP16 (B, rows, columns), contiguous.

    a (B, rows, inner), b (B, columns, inner): FP16, of any strides. symmetric: the result is known to be symmetric, up
    to rounding; only tiles on and below the diagonal are computed.
    """
    (count, rows, inner), columns = a.shape, b.shape[1]
    bm, bn, bk, warps, stages = LARGE if min(rows, columns) >= LARGE_FROM else SMALL
    c = torch.empty((count, rows, columns), dtype=a.dtype, device=a.device) if out is None else out
    tiles = _tiles(rows, columns, bm, bn, symmetric, a.device)
    a_blocks, a_turned = _described(a, bm, bk)
    b_blocks, b_turned = (a_blocks, a_turned) if b is a and bm == bn else _described(b, bn, bk)
    _product_kernel[(len(tiles), count)](
        c if added is None else added, c, tiles, a_blocks, b_blocks, rows, columns, inner,
        float(alpha), float(beta), float(gamma), bm, bn, bk, a_turned, b_turned, symmetric, added is not None,
        rows % bm == 0 and columns % bn == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return c


def orthogonalize_by_kernels(updates: Tensor, steps: int) -> Tensor:
    """`newton_schulz` by kernels; `updates` (B, rows, columns) is overwritten."""
    (_, rows, columns), (alpha, beta, gamma) = updates.shape, polynomial()
    wide, x = rows <= columns, normalize(updates)
    spare = torch.empty_like(x)
    for length in segments(rows, columns, steps):
        side, total = x if wide else x.mT, None
        gram = product(side, side, True, alpha=GRAM_SCALE)
        for step in range(length):
            poly = product(gram, gram, True, alpha=alpha, added=gram, beta=beta, gamma=gamma)
            total = poly if total is None else product(poly, total, True)
            if step < length - 1:
                gram = product(product(poly, gram, True), poly, True)
        assert total is not None
        x, spare = _times(total, x, wide, spare), x
    return x


def _times(total: Tensor, x: Tensor, wide: bool, out: Tensor) -> Tensor:
    """Return total x if `wide`, else x total, in `out`; total (B, n, n) is symmetric."""
    if x.is_cuda and total.shape[1] >= CUBLAS_FROM:
        for left, right, result in zip(total if wide else x, x if wide else total, out, strict=True):
            torch.mm(left, right, out=result)
        return out
    return product(total, x.mT, out=out) if wide else product(x, total, out=out)
