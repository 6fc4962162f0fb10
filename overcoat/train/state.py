"""Everything that changes while training, in one object: what a checkpoint holds is what this holds.

The learning-rate schedule is a function of the step and needs no state of its own. `rng_state` covers every
generator that a model or a library might draw from (dropout, for one); stochastic rounding has its own inside
the optimizer's state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import overcoat
from overcoat.optim.sharding import local
from overcoat.optim.state import check_state
from overcoat.train import process
from overcoat.train.batch_plan import BatchPlan, recipe_of
from overcoat.train.build import base_model
from overcoat.train.config import Config
from overcoat.train.configfile import LARGEST
from overcoat.train.data import Batch, Images, RowSource, make_batch

# What load_state_dict takes from the checkpoint although the configuration says it, and may say it anew.
RECONFIGURABLE = ("betas", "eps", "weight_decay")


@dataclass
class TrainState:
    model: Any
    optimizer: overcoat.AdamW
    rows: RowSource
    data_identity: str
    eos: int | None
    device: torch.device
    fit: BatchPlan
    images: Images | None = None
    held_out: int = 0  # checksum of the rows to evaluate on
    step: int = 0
    num_tokens: int = 0
    kept_bytes: int = 0  # kept for the backward by one forward pass; 0 until measured
    kept_table: str = ""
    drawn: np.ndarray | None = None  # rows of the step being taken, (rows, T + 1): a step taken again has the same
    with_images: list[str] | None = None  # parameters that several processes have gradients of, once rows had images

    def batch(self, rows_BT: np.ndarray, document_mask: bool) -> Batch:
        """Rows (B, T + 1) as one forward pass, with their images."""
        batch = make_batch(rows_BT, self.eos, document_mask)
        return batch if self.images is None else self.images.add_to(batch, rows_BT, base_model(self.model))

    def change_fit(self, config: Config, fit: BatchPlan) -> None:
        """Go on with another micro-batch or recipe; the next forward pass is measured anew."""
        overcoat.convert(self.model, recipe_of(config, fit))
        self.fit, self.kept_bytes, self.kept_table = fit, 0, ""

    def trained(self) -> list[str]:
        """The names of the parameters that have states in the optimizer, which knows them by their order alone."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _with_state(self) -> list[int]:
        """Numbers of the parameters that have a state: those that have had a gradient."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return [number for number, param in enumerate(params) if self.optimizer.state.get(param)]

    def check_states(self, saved: dict[str, Any]) -> None:
        """ValueError: states of the optimizer are not those that were saved, or hold what no step leaves."""
        states, names = saved["optimizer"]["state"], self.trained()
        expected = set(saved.get("with_state", states))  # not recorded by earlier versions
        if differing := sorted(expected ^ set(states), key=str):
            name = names[differing[0]] if differing[0] in range(len(names)) else differing[0]
            raise ValueError(f"{len(differing)} states of the optimizer are missing or too many, the first of {name}")
        # In the order of the optimizer's groups, which is not that of the names.
        of_id = {id(parameter): name for name, parameter in self.model.named_parameters()}
        params = [(group, param) for group in self.optimizer.param_groups for param in group["params"]]
        for number, state in states.items():
            if number not in range(len(params)):
                raise ValueError(f"there is a state of parameter {number}, and {len(params)} parameters")
            group, param = params[number]
            name = of_id.get(id(param), str(number))
            check_state(state, param, group, name, "of another model, or damaged")
            for field, value in state.items():
                if why := _impossible(field, local(value), saved["step"]):
                    raise ValueError(f"{field!r} of {name} {why}")

    def training_dict(self) -> dict[str, Any]:
        """All but the model's weights, as plain containers and tensors (loadable with weights_only)."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "trained": self.trained(),
            "with_state": self._with_state(),
            "rows": self.rows.state_dict(),
            "data_identity": self.data_identity,
            "held_out": self.held_out,
            "rng": rng_state() if process.count() == 1 else process.gather(rng_state()),
            "step": self.step,
            "num_tokens": self.num_tokens,
            "kept_bytes": self.kept_bytes,
            "drawn": None if self.drawn is None else torch.from_numpy(self.drawn),
        }

    def load_training_dict(self, saved: dict[str, Any]) -> None:
        chosen = [{key: group[key] for key in RECONFIGURABLE} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, options in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update(options)
        self.rows.load_state_dict(saved["rows"])
        self.step, self.num_tokens, self.kept_bytes = saved["step"], saved["num_tokens"], saved["kept_bytes"]
        drawn = saved.get("drawn")  # only of a run that ended in a step which did not fit
        self.drawn = None if drawn is None else drawn.numpy()
        rngs = saved["rng"] if isinstance(saved["rng"], list) else [saved["rng"]]  # of each process that saved it
        if process.rank() < len(rngs):
            set_rng_state(rngs[process.rank()])
        else:
            torch.manual_seed(self.step * process.count() + process.rank())


def check_counts(saved: dict[str, Any]) -> None:
    """ValueError: a count of a training state is no whole number from 0 on."""
    rows = saved.get("rows", {})
    stream = rows.get("stream", {})
    counts = {key: saved.get(key) for key in ("step", "num_tokens", "kept_bytes")}
    counts |= {key: value for of in (rows, stream) for key, value in of.items() if key in ("epoch", "num_done")}
    for key, value in counts.items():
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise ValueError(f"{key} is {value!r:.40}, expected a whole number from 0 on")


def _impossible(field: str, value: torch.Tensor, steps: int) -> str:
    """Say what no step leaves in a state's tensor; "" if there is nothing."""
    if not value.is_floating_point():
        return ""
    value = value.float() if value.element_size() == 1 else value
    if field == "step":
        count = float(value)
        return "" if 0 <= count <= steps and count == int(count) else f"is {count}, expected a count of up to {steps}"
    if not bool(value.isfinite().all()):
        return "is not finite"
    return "is negative" if field in ("exp_avg_sq", "exp_avg_amax") and bool((value < 0).any()) else ""


def rng_state() -> dict[str, Any]:
    """The global generators of Python, NumPy and PyTorch."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(saved: dict[str, Any]) -> None:
    """Put the global generators back; GPUs that are not here any more are left out."""
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
