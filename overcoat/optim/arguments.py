"""What a call of `overcoat::adamw_step_` takes, for parameters that are stepped together again and again."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overcoat.kernels.adamw import adamw_step_, find_weight_amax_
from overcoat.recipe import GROUP_SIZES

if importlib.util.find_spec("triton") is not None:
    from overcoat.kernels.gpu import adamw_launch, sum_squares
else:  # the reference runs everywhere
    adamw_launch = sum_squares = None  # type: ignore[assignment]

# Names of the state tensors, by the op's and the kernel's names for their lists.
STATE_LISTS = {
    "exp_avg": "exp_avg",
    "amax": "exp_avg_amax",
    "exponent": "exp_avg_exponent",
    "exp_avg_sq": "exp_avg_sq",
    "scale": "exp_avg_sq_scale",
    "remainder": "remainder",
    "step": "step",
}


class Hyper(NamedTuple):
    """Hyperparameters as the op takes them, but the learning rate."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    m_code: str
    v_code: str

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        """Those of a parameter group."""
        beta1, beta2 = group["betas"]
        m_code, v_code = group["moments"]
        return cls(beta1, beta2, group["eps"], group["weight_decay"], m_code, v_code)


def check_hyperparameters(group: dict[str, Any]) -> None:
    """ValueError if an option of a parameter group is out of range; codes and masters are checked by their modules."""
    lr, eps, decay, betas = group["lr"], group["eps"], group["weight_decay"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have one element")
    elif not 0.0 <= lr < math.inf:
        raise ValueError(f"lr {lr!r} must be a number >= 0")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas {betas!r} must be two numbers in [0, 1)")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps {eps!r} must be a number >= 0")
    if not 0.0 <= decay < math.inf:
        raise ValueError(f"weight_decay {decay!r} must be a number >= 0")
    if group["group_size"] not in GROUP_SIZES:
        raise ValueError(f"group_size {group['group_size']!r} must be one of {', '.join(map(str, GROUP_SIZES))}")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed {group['seed']!r} must be an integer")


class Arguments(NamedTuple):
    """Lists of equal length, of plain tensors on one device, and what their parameters share.

    Attributes:
        params: of one dtype.
        states: lists by the names of `STATE_LISTS`; empty where the codes need no such tensor.
        keys, first_groups, master, group_size: as `adamw_step_` takes them.
        weight_amax: where max |parameter| is wanted, 0-d FP32, by place in the lists (weight_amax.py).
    """

    params: list[Tensor]
    states: dict[str, list[Tensor]]
    keys: list[int]
    first_groups: list[int]
    master: str
    group_size: int
    weight_amax: dict[int, Tensor]

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def kernel_runs(self) -> bool:
        """Whether the kernel can be launched on these very tensors: on a GPU, and in Triton's interpreter."""
        return (
            adamw_launch is not None
            and (self.params[0].is_cuda or adamw_launch.INTERPRETED)
            and all(map(Tensor.is_contiguous, self.params))
        )

    def plan(self) -> adamw_launch.Plan:
        """The kernel's tables."""
        tensors = {"param": self.params, **self.states}
        return adamw_launch.Plan(tensors, self.group_size, self.keys, self.first_groups, self.weight_amax)

    def gradients(self) -> sum_squares.Gradients:
        """The table of their gradients."""
        return sum_squares.Gradients([param.numel() for param in self.params], self.device)

    def options(self, hyper: Hyper) -> adamw_launch.Options:
        """What the kernel is compiled for."""
        return adamw_launch.Options(*hyper, self.master, self.group_size)

    def call(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        """Step by the op; skip may be one flag (0-d) or one per parameter (T,)."""
        if skip.dim():
            for i, grad in enumerate(grads):
                self.part([i]).call([grad], lr, factor, skip[i], hyper)
            return
        of = self.states
        adamw_step_(
            self.params, grads, of["exp_avg"], of["amax"], of["exponent"], of["exp_avg_sq"], of["scale"],
            of["remainder"], of["step"], lr, factor, skip, *hyper, self.master, self.group_size, self.keys,
            self.first_groups,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            for place, amax in self.weight_amax.items():
                find_weight_amax_(amax, self.params[place], skip)

    def part(self, indices: list[int]) -> Arguments:
        """Those of some of the parameters."""

        def pick(values: list[Any]) -> list[Any]:
            return [values[i] for i in indices] if values else []

        states = {name: pick(tensors) for name, tensors in self.states.items()}
        return self._replace(
            params=pick(self.params),
            states=states,
            keys=pick(self.keys),
            first_groups=pick(self.first_groups),
            weight_amax={place: self.weight_amax[i] for place, i in enumerate(indices) if i in self.weight_amax},
        )
