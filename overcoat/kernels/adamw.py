"""The reference of AdamW's step on quantized states, in plain PyTorch: decode, update, encode.

For each parameter, in FP32 (COAT, section 4; decoupled decay as in Loshchilov and Hutter and torch.optim.AdamW):

    m = beta1 m' + (1 - beta1) g                 m', v' decoded from the state
    v = beta2 v' + (1 - beta2) g^2
    w = w' (1 - lr decay) - lr / (1 - beta1^t) * m / ( sqrt(v) / sqrt(1 - beta2^t) + eps )

Scalars are multiplied with each other first: beta1 with a group's maximum (`moments.decay`); the factor that unscales
and clips the gradient with sqrt(1 - beta2), before the square. The weight moves by the new FP32 moments; only the
stored moments are quantized. A parameter is viewed as rows of its last dimension (`rows_of`), a group is `group_size`
consecutive elements of a row. So experts (E, N, K) train as a matrix (E N, K), and sharding along dim 0 splits no
group.

The kernel (`adamw_step.py`) equals this bit for bit on a GPU, except for NaN: every operation is exactly rounded, and
FMAs are used only where `fma` is called.

Legend: R rows, C columns, G group size, n = ceil(C / G) groups of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor

from overcoat.formats import to_groups
from overcoat.formats.masters import RANDOM_BITS, decode_master, encode_master, group_bits, phase_bits, random_bits
from overcoat.formats.moments import MOMENT_CODES, Encoded, MomentCode, decay, encode_first, encode_second
from overcoat.kernels.hardware import fma, reciprocal, sqrt

# Elements stepped at once: temporaries stay in a CPU's cache and do not grow with the model.
CHUNK = 1 << 18


class Rows(NamedTuple):
    """A parameter as rows of groups: R, C, n."""

    rows: int
    columns: int
    groups: int


def rows_of(shape: torch.Size | tuple[int, ...], group_size: int) -> Rows:
    """Return the layout of a parameter's shape: rows are its last dimension; 0-d and 1-d are one row.

    If the last dimension is shorter than half a group, as of a convolution's kernel, rows are [dim0, the rest
    flattened]: maxima of so few elements would take more memory than their codes.
    """
    shape = (1, *shape) if len(shape) < 2 else shape
    split = -1 if 2 * shape[-1] >= group_size else 1
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    return Rows(rows, columns, -(-columns // group_size))


def groups_of_slice(shape: torch.Size | tuple[int, ...], group_size: int) -> int:
    """Return the number of groups of each slice along dim 0, which sharding never splits; of a vector all."""
    layout = rows_of((1, *shape[1:]) if len(shape) > 1 else shape, group_size)
    return layout.rows * layout.groups


class Hyper(NamedTuple):
    """Options of a step; equal options share compiled kernels. master: resolved, not "auto"."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    m_code: str
    v_code: str
    master: str
    group_size: int

    @property
    def codes(self) -> tuple[MomentCode, MomentCode]:
        return MOMENT_CODES[self.m_code], MOMENT_CODES[self.v_code]


def adamw_update(
    w: Tensor, grad: Tensor, grad_factor: Tensor, first: Encoded, second: Encoded, hyper: Hyper, coefficients: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (w, m, v), FP32, from FP32 tensors w and grad and stored moments, of one shape.

    coefficients: from `step_coefficients`, (3, ...), which broadcast to the shape of w.

    v's bias correction is moved out of the fraction: m / (sqrt(v)/s + eps) = m s / (sqrt(v) + eps s). Each gradient is
    multiplied by one number for m and by one for v, before the square.
    """
    step_size, eps, keep = coefficients
    addend = grad * (grad_factor * (1.0 - hyper.beta1))
    m = decay(first, hyper.codes[0], hyper.beta1, addend, signed=True, second=second)
    root = grad * (grad_factor * math.sqrt(1.0 - hyper.beta2))
    v = decay(second, hyper.codes[1], hyper.beta2, root * root, signed=False)
    w = fma(m * reciprocal(sqrt(v) + eps), -step_size, w * keep)
    return w, m, v


def step_coefficients(steps: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float) -> Tensor:
    """Return the coefficients that depend on the step t, FP32 (T, 3) from step counts (T,), computed in FP64:

    step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t)     eps sqrt(1 - beta2^t)     keep = 1 - lr weight_decay
    """
    log1, log2, eps, weight_decay = step_numbers(beta1, beta2, eps, weight_decay)
    t, rate = steps.double(), lr.double()
    bias = torch.sqrt(1.0 - torch.exp2(t * log2))
    step_size = rate * bias / (1.0 - torch.exp2(t * log1))
    keep = (1.0 - rate * weight_decay).expand_as(t)
    return torch.stack([step_size, bias * eps, keep], dim=1).float()


def step_numbers(beta1: float, beta2: float, eps: float, weight_decay: float) -> list[float]:
    """Return the inputs of `step_coefficients` as Python numbers, the betas as binary logarithms.

    Tensors are read here, since they may later change in place.
    """
    return [*(math.log2(beta) if beta else -math.inf for beta in (beta1, beta2)), float(eps), float(weight_decay)]


class Piece(NamedTuple):
    """Rows `start` to `stop` of one parameter: its index (owner) and its layout."""

    owner: int
    start: int
    stop: int
    layout: Rows

    @property
    def groups(self) -> int:
        return (self.stop - self.start) * self.layout.groups

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.layout.rows

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return these rows of a parameter, or of a state of it by element or by group, as a flat view."""
        flat, rows = tensors[self.owner].view(-1), self.layout.rows
        width = flat.numel() // rows
        return flat if self.is_whole else flat[self.start * width : self.stop * width]


def _bundles(layouts: Sequence[Rows], group_size: int) -> Iterator[list[Piece]]:
    """Yield all rows as lists of pieces, each of at most about `CHUNK` elements with padding, sorted by row length.

    So small parameters share operations.
    """
    bundle: list[Piece] = []
    size = 0
    for owner in sorted(range(len(layouts)), key=lambda i: layouts[i].columns):
        layout = layouts[owner]
        rows = max(1, CHUNK // max(1, layout.groups * group_size))
        for start in range(0, layout.rows if layout.columns else 0, rows):
            piece = Piece(owner, start, min(start + rows, layout.rows), layout)
            elements = piece.groups * group_size
            if bundle and size + elements > CHUNK:
                yield bundle
                bundle, size = [], 0
            bundle.append(piece)
            size += elements
    if bundle:
        yield bundle


class Groups:
    """Gather and scatter the groups of some pieces as one tensor (N, G), rows' last groups padded with zeros.

    owner: each group's parameter, (N,); number: its number in the unsharded parameter, int32 (N,).
    """

    def __init__(self, pieces: list[Piece], first_groups: Sequence[int], size: int, device: torch.device) -> None:
        self.size = size
        self.runs = [(length, list(run)) for length, run in groupby(pieces, key=lambda piece: piece.layout.columns)]
        counts, table, offset = [piece.groups for piece in pieces], [], 0
        for piece, count in zip(pieces, counts, strict=True):
            table.append((piece.owner, first_groups[piece.owner] + piece.start * piece.layout.groups - offset))
            offset += count
        groups = torch.tensor(table, device=device).repeat_interleave(torch.tensor(counts, device=device), 0)
        self.owner, self.number = groups[:, 0], (groups[:, 1] + torch.arange(offset, device=device)).to(torch.int32)

    def gather(self, tensors: Sequence[Tensor], per_group: bool = False) -> Tensor:
        """Return (N, G) of a state with one value per element, or with `per_group` (N,)."""
        return self.pack([piece.of(tensors) for _, run in self.runs for piece in run], per_group)

    def scatter(self, new: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write `new`, of the shape that `gather` returns, back to the tensors."""
        self.unpack(new, [piece.of(tensors) for _, run in self.runs for piece in run])

    def pack(self, parts: Sequence[Tensor], per_group: bool = False) -> Tensor:
        """Return (N, G), or with `per_group` (N,), of one flat tensor for each piece, in their order."""
        found, dtype, left = [], parts[0].dtype, iter(parts)
        as_bytes = dtype.itemsize == 1  # `F.pad` does not support 8-bit floats
        for length, run in self.runs:
            of_run = list(islice(left, len(run)))
            rows = torch.cat([x.view(torch.uint8) for x in of_run] if as_bytes else of_run)
            found.append(rows if per_group else to_groups(rows.view(-1, length), self.size).view(-1, self.size))
        together = torch.cat(found) if len(found) > 1 else found[0]
        return together.view(dtype) if as_bytes else together

    def unpack(self, new: Tensor, parts: Sequence[Tensor]) -> None:
        """Write `new`, of the shape that `pack` returns, to one flat tensor for each piece."""
        counts, left = [sum(piece.groups for piece in run) for _, run in self.runs], iter(parts)
        for (length, run), rows in zip(self.runs, new.split(counts), strict=True):
            if new.dim() > 1:
                rows = rows.view(-1, -(-length // self.size) * self.size)[:, :length].flatten()
            of_run = list(islice(left, len(run)))
            torch._foreach_copy_(of_run, rows.split([part.numel() for part in of_run]))


def step_parameters(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], hyper: Hyper,
    coefficients: Tensor, grad_factor: Tensor, keys: Sequence[int], first_groups: Sequence[int],
) -> None:  # fmt: skip
    """Step parameters of one dtype and their states in place; all contiguous. coefficients: (T, 3)."""
    device, bits = params[0].device, RANDOM_BITS[hyper.master]
    steps, key_of = torch.stack(list(states["step"])), torch.tensor(keys, dtype=torch.int32, device=device)
    for pieces in _bundles([rows_of(param.shape, hyper.group_size) for param in params], hyper.group_size):
        groups = Groups(pieces, first_groups, hyper.group_size, device)
        of_group = group_bits(key_of[groups.owner], steps[groups.owner], groups.number)
        phase = phase_bits(key_of[groups.owner], steps[groups.owner], groups.number)
        random = of_group, phase, random_bits(of_group, hyper.group_size, bits) if bits else None
        of_owner = coefficients[groups.owner].T.unsqueeze(-1)
        _step_groups(groups, params, grads, states, hyper, of_owner, grad_factor, random)


def _step_groups(
    groups: Groups, params: Sequence[Tensor], grads: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]],
    hyper: Hyper, coefficients: Tensor, grad_factor: Tensor, random: tuple[Tensor, Tensor, Tensor | None],
) -> None:  # fmt: skip
    """Step groups in place. coefficients: (3, N, 1); random: per group (N,), phases (N,), per element (N, G)."""
    (m_code, v_code), read = hyper.codes, groups.gather

    def per_group(name: str) -> Tensor | None:
        return read(states[name], per_group=True) if name in states else None

    first = Encoded(read(states["exp_avg"]), per_group("exp_avg_amax"), per_group("exp_avg_exponent"))
    second = Encoded(read(states["exp_avg_sq"]), per_group("exp_avg_sq_scale"))
    w = decode_master(read(params), read(states["remainder"]) if "remainder" in states else None)
    w, m, v = adamw_update(w, read(grads).float(), grad_factor, first, second, hyper, coefficients)

    of_group, phase, of_element = random
    new_param, remainder = encode_master(w, hyper.master, of_element)
    second = encode_second(v, v_code, of_group, phase)
    first = encode_first(m, m_code, of_group, second, hyper.beta1)
    state = {"exp_avg": first.codes, "exp_avg_amax": first.amax, "exp_avg_exponent": first.shape}
    state |= {"exp_avg_sq": second.codes, "exp_avg_sq_scale": second.amax, "remainder": remainder}
    groups.scatter(new_param, params)
    for name, new in state.items():
        if new is not None:
            groups.scatter(new, states[name])
