"""One AdamW step over many parameters, states decoded and re-encoded on the way: `overcoat::adamw_step_`.

For each parameter, in FP32 (COAT, section 4; Loshchilov and Hutter for the decoupled decay, as
torch.optim.AdamW):

    m = beta1 m' + (1 - beta1) g                 m', v' decoded from the state
    v = beta2 v' + (1 - beta2) g^2
    w = w' (1 - lr decay) - lr / (1 - beta1^t) * m / ( sqrt(v) / sqrt(1 - beta2^t) + eps )

Scalars are multiplied with each other first: beta1 into a group's maximum (`moments.decay`), what unscales and clips
the gradient into sqrt(1 - beta2), which is squared with it. The weight moves by the fresh FP32 moments; only what is
stored for the next step is quantized. A parameter is seen as [dim0, the rest flattened] (0-d and 1-d: one row), a
group as `group_size` neighbours in a row: sharding along dim 0 never cuts a group of a matrix.

`skip` and `grad_factor` live on the device: a step with a non-finite gradient changes nothing, not even the
step count, without the host ever waiting for the answer. `grad_factor` unscales and clips; it multiplies
every gradient.

The functions below are the specification. The Triton kernel (`gpu/adamw.py`) equals them bit for bit on a
GPU for all that is not NaN: every operation is exactly rounded, and products and sums are contracted to an FMA
where `fma` says so, nowhere else.

Legend: R rows, C columns, G group size, n = ceil(C / G) groups of a row.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple

import torch
from torch import Tensor

from overcoat.formats import from_groups, to_groups
from overcoat.formats.masters import RANDOM_BITS, decode_master, encode_master, group_bits, random_bits
from overcoat.formats.moments import (
    MOMENT_CODES,
    Encoded,
    MomentCode,
    decay,
    encode_first,
    encode_second,
)
from overcoat.kernels.hardware import fma, reciprocal, sqrt
from overcoat.kernels.op import op

# Elements that the reference handles at once: its temporaries stay in a CPU's cache and never grow with the model.
CHUNK = 1 << 17


class Rows(NamedTuple):
    """A parameter as rows of groups: R, C, n."""

    rows: int
    columns: int
    groups: int


def rows_of(shape: torch.Size | tuple[int, ...], group_size: int) -> Rows:
    """How `shape` is cut: [dim0, rest]; 0-d and 1-d are one row."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape[1:] if len(shape) > 1 else shape)
    return Rows(rows, columns, -(-columns // group_size))


class Hyper(NamedTuple):
    """What all parameters of a step share besides tensors, in the order of `adamw_step_`; equal ones share kernels."""

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
    w: Tensor,
    grad: Tensor,
    grad_factor: Tensor,
    first: Encoded,
    second: Encoded,
    hyper: Hyper,
    coefficients: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW on FP32 tensors w and grad, and moments as they are stored, of one shape: returns the new (w, m, v).

    coefficients: those of `step_coefficients` for this parameter, (3,).

    The correction of v's bias is moved out of the fraction: m / (sqrt(v)/s + eps) = m s / (sqrt(v) + eps s). What
    multiplies every gradient is one number each for m and for v, where it is under the square.
    """
    step_size, eps, keep = coefficients
    m = decay(first, hyper.codes[0], hyper.beta1, grad * (grad_factor * (1.0 - hyper.beta1)), signed=True)
    root = grad * (grad_factor * math.sqrt(1.0 - hyper.beta2))
    v = decay(second, hyper.codes[1], hyper.beta2, root * root, signed=False)
    w = fma(m * reciprocal(sqrt(v) + eps), -step_size, w * keep)
    return w, m, v


def step_coefficients(steps: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float) -> Tensor:
    """What depends on the step t, FP32 (T, 3) from step counts (T,), computed in FP64:

        step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t)     eps sqrt(1 - beta2^t)     keep = 1 - lr weight_decay

    Shared by the reference and the kernel, so that they cannot differ.
    """
    t, rate = steps.double(), lr.double()
    bias = torch.sqrt(1.0 - beta2**t)
    step_size = rate * bias / (1.0 - beta1**t)
    keep = (1.0 - rate * weight_decay).expand_as(t)
    return torch.stack([step_size, bias * eps, keep], dim=1).float()


@op(
    mutates=(
        "params",
        "exp_avgs",
        "exp_avg_amaxes",
        "exp_avg_exponents",
        "exp_avg_sqs",
        "exp_avg_sq_scales",
        "remainders",
        "steps",
    )
)
def adamw_step_(
    params: List[torch.Tensor],
    grads: List[torch.Tensor],
    exp_avgs: List[torch.Tensor],
    exp_avg_amaxes: List[torch.Tensor],
    exp_avg_exponents: List[torch.Tensor],
    exp_avg_sqs: List[torch.Tensor],
    exp_avg_sq_scales: List[torch.Tensor],
    remainders: List[torch.Tensor],
    steps: List[torch.Tensor],
    lr: torch.Tensor,
    grad_factor: torch.Tensor,
    skip: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    m_code: str,
    v_code: str,
    master: str,
    group_size: int,
    keys: List[int],
    first_groups: List[int],
) -> None:
    """Step every parameter in place; all share dtype, codes, master and hyperparameters.

    Args:
        params: T tensors, BF16 or FP32, any shape. grads: their gradients, any floating dtype.
        exp_avgs, exp_avg_sqs: codes in the parameters' shapes, contiguous.
        exp_avg_amaxes: BF16 (R, n); exp_avg_exponents: uint8 (R, n), empty unless m's code is expanded;
            exp_avg_sq_scales: packed int32 (R, n). The lists are empty for "bf16" and "fp32".
        remainders: int8 or int16 in the parameters' shapes; empty list unless master is "bf16+8" or "bf16+16".
        steps: 0-d FP32 each: steps taken so far; incremented.
        lr, grad_factor: 0-d FP32. skip: 0-d bool.
        m_code, v_code: names of the moments' codes. master: resolved, not "auto".
        keys: `masters.parameter_key` of each parameter.
        first_groups: number of each tensor's first group in its unsharded parameter.
    """
    if bool(skip):
        return
    torch._foreach_add_(steps, 1.0)
    coefficients = step_coefficients(torch.stack(steps), lr, beta1, beta2, eps, weight_decay)
    hyper = Hyper(beta1, beta2, eps, weight_decay, m_code, v_code, master, group_size)
    lists = {
        "exp_avg": exp_avgs,
        "amax": exp_avg_amaxes,
        "exponent": exp_avg_exponents,
        "exp_avg_sq": exp_avg_sqs,
        "scale": exp_avg_sq_scales,
        "remainder": remainders,
    }
    for i, param in enumerate(params):
        state = {name: tensors[i] for name, tensors in lists.items() if tensors}
        draw = Draw(keys[i], steps[i], first_groups[i], RANDOM_BITS[master])
        _step_parameter(param, grads[i], state, hyper, coefficients[i], grad_factor, draw)


@adamw_step_.fake
def _(*args):
    return None


def find_weight_amax_(amax: Tensor, param: Tensor, skip: Tensor) -> None:
    """max |param| after a step, into `amax` (0-d FP32): NaN if any element is; skip (0-d bool): the step was skipped.

    Plain PyTorch; the kernel finds the same on its way (weight_amax.py has what it is for).
    """
    if param.numel():
        top = torch.linalg.vector_norm(param.detach(), math.inf)  # without |param| in memory
        amax.copy_(torch.where(skip, amax, top.float()))


class Draw(NamedTuple):
    """Where a parameter's random numbers come from: see `masters.random_bits`."""

    key: int
    step: Tensor
    first_group: int
    bits: int

    def of_rows(self, chunk: slice, groups: int, group_size: int) -> tuple[Tensor, Tensor | None]:
        """Random numbers of some rows: of groups (r, n), and of elements (r, n, G) or None if none are needed."""
        numbers = torch.arange(chunk.start * groups, chunk.stop * groups, device=self.step.device) + self.first_group
        group = group_bits(self.key, self.step, numbers.to(torch.int32).view(-1, groups))
        return group, random_bits(group, group_size, self.bits) if self.bits else None


def _step_parameter(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    hyper: Hyper,
    coefficients: Tensor,
    grad_factor: Tensor,
    draw: Draw,
) -> None:
    """Step one parameter in place, some rows at a time."""
    layout = rows_of(param.shape, hyper.group_size)
    if not param.numel():
        return
    flat, grad = param.reshape(layout.rows, layout.columns), grad.reshape(layout.rows, layout.columns)
    state = {name: tensor.view(layout.rows, -1) for name, tensor in state.items()}
    per_chunk = max(1, CHUNK // layout.columns)
    for start in range(0, layout.rows, per_chunk):
        chunk = slice(start, min(start + per_chunk, layout.rows))
        random = draw.of_rows(chunk, layout.groups, hyper.group_size)
        rows = {name: tensor[chunk] for name, tensor in state.items()}
        _step_rows(flat[chunk], grad[chunk], rows, hyper, coefficients, grad_factor, random)
    if flat.data_ptr() != param.data_ptr():  # a non-contiguous parameter was copied by reshape
        param.copy_(flat.view(param.shape))


def _step_rows(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    hyper: Hyper,
    coefficients: Tensor,
    grad_factor: Tensor,
    random: tuple[Tensor, Tensor | None],
) -> None:
    """Step some rows of one parameter in place: all tensors are (r, C) or (r, n) views; random: `Draw.of_rows`."""
    (m_code, v_code), group_size = hyper.codes, hyper.group_size
    first = Encoded(_groups(state["exp_avg"], group_size), state.get("amax"), state.get("exponent"))
    second = Encoded(_groups(state["exp_avg_sq"], group_size), state.get("scale"))
    remainder = _groups(state["remainder"], group_size) if "remainder" in state else None
    w = decode_master(_groups(param, group_size), remainder)
    w, m, v = adamw_update(w, to_groups(grad.float(), group_size), grad_factor, first, second, hyper, coefficients)

    of_group, of_element = random
    new_param, new_remainder = encode_master(w, hyper.master, of_element)
    first, second = encode_first(m, m_code, of_group), encode_second(v, v_code, of_group)
    shape = param.shape
    param.copy_(from_groups(new_param, shape))
    state["exp_avg"].copy_(from_groups(first.codes, shape))
    state["exp_avg_sq"].copy_(from_groups(second.codes, shape))
    for name, value in (("amax", first.amax), ("exponent", first.shape), ("scale", second.amax)):
        if value is not None:
            state[name].copy_(value)
    if new_remainder is not None:
        state["remainder"].copy_(from_groups(new_remainder, shape))


def _groups(x: Tensor, group_size: int) -> Tensor:
    """`to_groups` for any dtype: padding does not know the 8-bit floats."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return to_groups(x.view(torch.uint8), group_size).view(x.dtype)
    return to_groups(x, group_size)


@op
def gradients_sum_squares(grads: List[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements of all tensors, 0-d FP64; inf or NaN if any element is not finite.

    Squares are FP32, as in the second moment, so it is inf too if an element's overflows: from 2^64 = 1.8e19 on. The
    kernel sums 128 of them in FP32 before FP64, so there from 2^60 = 1.1e18 on, depending on the others.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in grads:
        total += grad.float().square().sum(dtype=torch.float64)
    return total


@gradients_sum_squares.fake
def _(grads):
    return grads[0].new_empty((), dtype=torch.float64)
