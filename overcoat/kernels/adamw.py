"""AdamW's step of one parameter in plain PyTorch, its states decoded and encoded on the way: the specification.

For each parameter, in FP32 (COAT, section 4; Loshchilov and Hutter for the decoupled decay, as torch.optim.AdamW):

    m = beta1 m' + (1 - beta1) g                 m', v' decoded from the state
    v = beta2 v' + (1 - beta2) g^2
    w = w' (1 - lr decay) - lr / (1 - beta1^t) * m / ( sqrt(v) / sqrt(1 - beta2^t) + eps )

Scalars are multiplied with each other first: beta1 into a group's maximum (`moments.decay`), what unscales and clips
the gradient into sqrt(1 - beta2), which is squared with it. The weight moves by the fresh FP32 moments; only what is
stored for the next step is quantized. A parameter is seen as [dim0, the rest flattened] (0-d and 1-d: one row), a
group as `group_size` neighbours in a row: sharding along dim 0 never cuts a group of a matrix.

The kernel (`adamw_step.py`) equals this bit for bit on a GPU for all that is not NaN: every operation is exactly
rounded, and products and sums are contracted to an FMA where `fma` says so, nowhere else.

Legend: R rows, C columns, G group size, n = ceil(C / G) groups of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from overcoat.formats import from_groups, to_groups
from overcoat.formats.masters import RANDOM_BITS, decode_master, encode_master, group_bits, random_bits
from overcoat.formats.moments import MOMENT_CODES, Encoded, MomentCode, decay, encode_first, encode_second
from overcoat.kernels.hardware import fma, reciprocal, sqrt

# Elements that are stepped at once: temporaries stay in a CPU's cache and never grow with the model.
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
    """What all parameters of a step share besides tensors; equal ones share kernels. master: not "auto"."""

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


def step_parameter(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hyper, coefficients: Tensor, grad_factor: Tensor,
    key: int, first_group: int,
) -> None:  # fmt: skip
    """Step one parameter and its state in place, some rows at a time; all contiguous."""
    layout = rows_of(param.shape, hyper.group_size)
    if not param.numel():
        return
    flat, grad = param.view(layout.rows, layout.columns), grad.view(layout.rows, layout.columns)
    step, bits = state["step"], RANDOM_BITS[hyper.master]
    by_row = {name: tensor.view(layout.rows, -1) for name, tensor in state.items() if name != "step"}
    per_chunk = max(1, CHUNK // layout.columns)
    for start in range(0, layout.rows, per_chunk):
        chunk = slice(start, min(start + per_chunk, layout.rows))
        numbers = torch.arange(chunk.start * layout.groups, chunk.stop * layout.groups, device=param.device)
        of_group = group_bits(key, step, (numbers + first_group).to(torch.int32).view(-1, layout.groups))
        random = of_group, random_bits(of_group, hyper.group_size, bits) if bits else None
        rows = {name: tensor[chunk] for name, tensor in by_row.items()}
        _step_rows(flat[chunk], grad[chunk], rows, hyper, coefficients, grad_factor, random)


def _step_rows(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hyper, coefficients: Tensor, grad_factor: Tensor,
    random: tuple[Tensor, Tensor | None],
) -> None:  # fmt: skip
    """Step some rows in place: tensors are (r, C) or (r, n) views; random: of groups (r, n), of elements (r, n, G)."""
    (m_code, v_code), group_size = hyper.codes, hyper.group_size
    first = Encoded(_groups(state["exp_avg"], group_size), state.get("exp_avg_amax"), state.get("exp_avg_exponent"))
    second = Encoded(_groups(state["exp_avg_sq"], group_size), state.get("exp_avg_sq_scale"))
    remainder = _groups(state["remainder"], group_size) if "remainder" in state else None
    w = decode_master(_groups(param, group_size), remainder)
    w, m, v = adamw_update(w, to_groups(grad.float(), group_size), grad_factor, first, second, hyper, coefficients)

    of_group, of_element = random
    new_param, new_remainder = encode_master(w, hyper.master, of_element)
    first, second = encode_first(m, m_code, of_group), encode_second(v, v_code, of_group)
    param.copy_(from_groups(new_param, param.shape))
    for name, codes in (("exp_avg", first.codes), ("exp_avg_sq", second.codes), ("remainder", new_remainder)):
        if codes is not None:
            state[name].copy_(from_groups(codes, param.shape))
    per_group = {"exp_avg_amax": first.amax, "exp_avg_exponent": first.shape, "exp_avg_sq_scale": second.amax}
    for name, value in per_group.items():
        if value is not None:
            state[name].copy_(value)


def _groups(x: Tensor, group_size: int) -> Tensor:
    """`to_groups` for any dtype: padding does not know the 8-bit floats."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return to_groups(x.view(torch.uint8), group_size).view(x.dtype)
    return to_groups(x, group_size)
