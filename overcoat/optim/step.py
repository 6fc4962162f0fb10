"""Step groups: parameters that one launch steps together; they persist between steps.

    parameter group    the user's: an entry of `optimizer.param_groups`, with its options
    step group         its parameters with gradients, of one device, dtype, gradient dtype and sharding

With a thousand parameters, collecting the lists of their tensors costs the host more time than the step costs the GPU.
So step groups persist, and a step checks only what may have changed: which parameters have gradients, their types and
dtypes, and all addresses. The checks are `map`s over lists, without a Python call per parameter: 0.5 us per parameter
instead of 1.5. Step groups hold no state tensors, since users may move these to the host between steps. They look
states up by position in `optimizer.state`, since a look-up by parameter would hash it in Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overcoat.formats.masters import parameter_key, resolve_master
from overcoat.kernels.adamw import Hyper, groups_of_slice
from overcoat.kernels.adamw_step import Counters, Plan, StepTensors, is_real, reference_step
from overcoat.kernels.multi_tensor import Gradients, sum_squares
from overcoat.optim.sharding import (
    buffer_for,
    check_gradient,
    check_sharding,
    first_row,
    is_whole,
    layout_of,
    local,
    stepped_parts,
    sums_over_shards,
    write_back,
)

_DTYPE = operator.attrgetter("dtype")


def hyper_of(group: Mapping[str, Any], dtype: torch.dtype) -> Hyper:
    """Return the hyperparameters of a parameter group, for its parameters of one dtype."""
    master = resolve_master(group["master"], dtype)
    (beta1, beta2), (m_code, v_code) = group["betas"], group["moments"]
    return Hyper(beta1, beta2, group["eps"], group["weight_decay"], m_code, v_code, master, int(group["group_size"]))


class StepGroup:
    """Parameters of one parameter group, device and pair of dtypes that are stepped together, and their tensors.

    Args:
        optimizer: holds the states of all of them; kept as a weak reference.
        group: their parameter group.
        params: as the optimizer holds them, DTensors of one layout or plain tensors.
        indices: their numbers in the optimizer.
    """

    def __init__(
        self, optimizer: Any, group: Mapping[str, Any], params: Sequence[Tensor], indices: Sequence[int]
    ) -> None:
        self.optimizer, self.params, self.indices = optimizer, params, indices
        places = {param: place for place, param in enumerate(optimizer.state)}
        self.places = [places[param] for param in params]
        self.sharded, self.whole = isinstance(params[0], DTensor), is_whole(params[0])
        self.buffers: dict[int, Tensor] = {}
        size = int(group["group_size"])
        self.tensors = StepTensors(
            params=self._stepped(),
            states={},
            keys=[parameter_key(group["seed"], index) for index in indices],
            first_groups=[
                0 if self.whole else first_row(param) * groups_of_slice(param.shape, size) for param in params
            ],
            group_size=size,
        )
        self.device, self.dtype = self.tensors.params[0].device, params[0].dtype
        self.addresses = self._addresses()
        self.on_kernel = self.tensors.kernel_runs()
        self.grads: list[Tensor] = []
        if self.on_kernel:  # its tables: of the gradients, the step counters, and all else
            self.gradients = Gradients([param.numel() for param in self.tensors.params], self.device)
            self.counters = Counters([state["step"] for state in self.states()])
        self._prepare()

    def _stepped(self) -> list[Tensor]:
        """Return the tensors that are stepped: this process' rows, or buffers for whole vectors and for tensors that
        are not contiguous.

        Buffers are filled before every step, not here: gathering needs all processes, which need not build their step
        groups at the same time.
        """
        own = [local(param) for param in self.params]
        self.buffers = {
            i: buffer_for(self.params[i]) for i, of in enumerate(own) if self.whole or not of.is_contiguous()
        }
        return [self.buffers.get(i, of) for i, of in enumerate(own)]

    def _prepare(self) -> None:
        if self.on_kernel:
            self.plan = Plan(self.with_states())

    def with_states(self) -> StepTensors:
        """Return the step's tensors, states included."""
        states = self.states()
        return self.tensors._replace(states={name: [local(state[name]) for state in states] for name in states[0]})

    def states(self) -> list[dict[str, Tensor]]:
        """Return the states now in `optimizer.state`."""
        return list(map(list(self.optimizer.state.values()).__getitem__, self.places))

    # ---- whether it still holds -----------------------------------------------------------------------

    def holds(self) -> bool:
        """True if parameters and state tensors have their old addresses: assigning to a tensor's `data` moves it.

        All are checked, half of the host's time of a step with a thousand parameters: a kernel that wrote to an old
        address would corrupt other memory.
        """
        try:
            return self._addresses() == self.addresses
        except (TypeError, IndexError):  # a state is gone, or contains something that is no tensor
            return False

    def _addresses(self) -> list[Any]:
        params = list(map(local, self.params)) if self.sharded else self.params
        # Shapes and strides too: a parameter may be narrowed, transposed or reshaped at the same address.
        where = (map(of, params) for of in (Tensor.data_ptr, Tensor.size, Tensor.is_contiguous))
        return [*chain.from_iterable(where), *map(Tensor.data_ptr, self.state_tensors())]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of all states, this process' parts."""
        found = list(chain.from_iterable(map(dict.values, self.states())))
        return [getattr(tensor, "_local_tensor", tensor) for tensor in found] if self.sharded else found

    # ---- a step ---------------------------------------------------------------------------------------

    def take_gradients(self, grads: Sequence[Tensor]) -> None:
        """Set the gradients of the next step, one per parameter; those of sharded vectors are gathered."""
        if self.sharded or not all(map(Tensor.is_contiguous, grads)):
            for param, grad in zip(self.params, grads, strict=True):
                check_gradient(param, grad)
            grads = [part.contiguous() for part in stepped_parts(grads)]
        self.grads = list(grads)
        parts = stepped_parts([self.params[i] for i in self.buffers])
        for buffer, part in zip(self.buffers.values(), parts, strict=True):
            buffer.copy_(part)
        if self.on_kernel:
            self.gradients.set(self.grads)

    def sum_squares(self) -> Tensor:
        """Return the sum of squares of this process' gradients, 0-d FP64."""
        return self.gradients.sum_squares() if self.on_kernel else sum_squares(self.grads)

    def sums_of_squares(self) -> tuple[Tensor, Tensor]:
        """Return each gradient's sum of squares over all processes, FP64 (T,), and flags of those not finite, bool
        (T,)."""
        if self.on_kernel:
            squares, flags = self.gradients.sums_of_squares()
            if not self.sharded:
                return squares, flags
        else:
            squares = torch.stack([sum_squares([grad]) for grad in self.grads])
        if self.sharded:
            (squares,) = sums_over_shards([squares], self.params[:1])
        return squares, (squares < math.inf).logical_not()  # NaN is not below anything

    def step(self, group: Mapping[str, Any], factor: Tensor, skip: Tensor) -> None:
        """Step with the gradients of `take_gradients`, which are freed, and the parameter group's hyperparameters.

        factor: 0-d FP32, multiplies every gradient; skip: bool, 0-d or one per parameter (T,).
        """
        grads, self.grads = self.grads, []
        factor, skip, hyper = moved(factor, self.device), moved(skip, self.device), self.hyper_of(group)
        lr = scalar_on(group["lr"], self.device)
        if self.on_kernel:
            self._launch(self.counters.take_step(lr, skip, hyper), factor, skip, hyper)
            self.gradients.forget_copies()
            # PyTorch does not see these launches, so increment the version counters.
            torch.autograd.graph.increment_version(self.tensors.params)
        elif is_real(self.tensors.params[0]):
            self._reference(grads, lr, factor, skip, hyper)
        for i, buffer in self.buffers.items():
            write_back(self.params[i], buffer)

    def hyper_of(self, group: Mapping[str, Any]) -> Any:
        """Return the hyperparameters of a step."""
        return hyper_of(group, self.dtype)

    def _launch(self, counted: tuple[Tensor, Tensor], factor: Tensor, skip: Tensor, hyper: Any) -> None:
        self.plan.launch(self.gradients.addresses, self.gradients.dtype, counted, factor, skip, hyper)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Any) -> None:
        reference_step(self.with_states(), grads, lr, factor, skip, hyper)


def norm_of(step_groups: Sequence[StepGroup], factor: Optional[Tensor]) -> Tensor:
    """Return the norm of all gradients over all processes, times the factor, 0-d FP32 on the first group's device."""
    parts = [moved(step_group.sum_squares(), step_groups[0].device) for step_group in step_groups]
    parts = sums_over_shards(parts, [step_group.params[0] for step_group in step_groups])
    norm = (parts[0] if len(parts) == 1 else torch.stack(parts).sum()).sqrt()
    return (norm if factor is None else norm * factor).float()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`; three times as fast as `Tensor.to` if it is there already."""
    return tensor if tensor.device == device else tensor.to(device)


def scalar_on(value: Union[float, Tensor], device: torch.device) -> Tensor:
    """Return a 0-d FP32 tensor on `device`; a Python float is passed as a kernel argument, without a copy."""
    if isinstance(value, Tensor) and value.device == device:
        return value.float()
    return torch.full((), float(value), dtype=torch.float32, device=device)


# ---- all step groups of a parameter group -------------------------------------------------------------------

# A function that makes the step group of some parameters of a group, given their numbers in the optimizer.
MakeGroup = Callable[[dict[str, Any], list[Tensor], list[int]], StepGroup]


def kind_of(param: Tensor, grad: Tensor) -> Any:
    """Return a key that is equal for parameters of one parameter group that can be stepped together."""
    layout = layout_of(param) if isinstance(param, DTensor) else None
    return (param.device, param.dtype, grad.dtype, layout)


class StepGroups:
    """The step groups of one parameter group, for the parameters that had gradients when this was made.

    first: number of its first parameter in the optimizer; grads: its parameters' gradients or None.
    """

    def __init__(self, group: dict[str, Any], first: int, grads: list[Any], make: MakeGroup) -> None:
        check_sharding(group["params"])
        self.group, self.first, self.seed = group, first, group["seed"]
        self.params = list(group["params"])
        self.types = list(map(type, grads))
        self.present = [grad is not None for grad in grads]
        self.all_present = all(self.present)
        grads = self._of_present(grads)
        self.dtypes = list(map(_DTYPE, grads))
        params = self._of_present(self.params)
        indices = self._of_present(range(first, first + len(self.params)))
        places: dict[Any, list[int]] = {}  # in these lists
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            places.setdefault(kind_of(param, grad), []).append(place)
        self.parts: list[tuple[StepGroup, Optional[list[int]]]] = [
            (make(group, [params[i] for i in of], [indices[i] for i in of]), of if len(places) > 1 else None)
            for of in places.values()
        ]

    def _of_present(self, values: Sequence[Any]) -> list[Any]:
        return list(values) if self.all_present else list(compress(values, self.present))

    def hold(self, group: dict[str, Any], first: int, grads: list[Any]) -> bool:
        """True if these groups are valid for the next step too, provided that the states are the same."""
        params = group["params"]
        return (
            group is self.group
            and first == self.first
            and group["seed"] == self.seed
            and len(params) == len(self.params)
            and all(map(operator.is_, params, self.params))
            and list(map(type, grads)) == self.types
            and list(map(_DTYPE, self._of_present(grads))) == self.dtypes
            and all(step_group.holds() for step_group, _ in self.parts)
        )

    def take_gradients(self, grads: list[Any]) -> list[StepGroup]:
        """Return the step groups, after giving each its gradients."""
        grads = self._of_present(grads)
        for step_group, places in self.parts:
            step_group.take_gradients(grads if places is None else [grads[place] for place in places])
        return [step_group for step_group, _ in self.parts]
