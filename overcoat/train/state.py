"""All state that changes during training, and its form in a checkpoint: tensors and a record.

    tensors   model/NAME              parameters and buffers, tied ones under their first name; with LoRA only adapters
              optimizer/NUMBER/FIELD  states of the optimizer, by the number of the parameter
              rows/FIELD, drawn       rows that were read but not yet trained on
    record    counters, position in the data, generators, options of the optimizer: plain JSON

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
from torch import Tensor

import overcoat
from overcoat.train import process
from overcoat.train.batch_plan import BatchPlan, recipe_of
from overcoat.train.build import base_model
from overcoat.train.config import Config
from overcoat.train.data import Batch, Images, RowSource, make_batch

# Options that the configuration may change on resuming; load_state_dict would restore the old values.
RECONFIGURABLE = ("betas", "eps", "weight_decay", "momentum", "nesterov", "steps", "scale")


@dataclass
class TrainState:
    model: Any
    optimizer: overcoat.AdamW
    rows: RowSource
    data_identity: str
    eos: int | None
    device: torch.device
    plan: BatchPlan
    images: Images | None = None
    held_out: int = 0  # checksum of the rows to evaluate on
    step: int = 0
    num_tokens: int = 0
    kept_bytes: int = 0  # kept for the backward by one forward pass; 0 until measured
    kept_table: str = ""
    drawn: np.ndarray | None = None  # rows of the step being taken, (rows, T + 1): a step taken again has the same
    with_images: list[str] | None = None  # parameters that several processes have gradients of, once rows had images

    def batch(self, rows_BT: np.ndarray, document_mask: bool) -> Batch:
        """Return rows (B, T + 1) as a batch, with their images."""
        batch = make_batch(rows_BT, self.eos, document_mask)
        return batch if self.images is None else self.images.add_to(batch, rows_BT, base_model(self.model))

    def change_plan(self, config: Config, plan: BatchPlan) -> None:
        """Continue with another plan; the next forward pass is measured again."""
        overcoat.convert(self.model, recipe_of(config, plan))
        self.plan, self.kept_bytes, self.kept_table = plan, 0, ""

    def trained(self) -> list[str]:
        """Return the names of the trained parameters; the optimizer knows them by number only."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def params(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """Return (name, parameter, group) for the optimizer's parameters, by number."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        return [(names[id(param)], param, group) for group in groups for param in group["params"]]

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the record and the tensors of a checkpoint, without copying. All processes call it."""
        optimizer, rows = self.optimizer.state_dict(), self.rows.state_dict()
        states = {number: state for number, state in optimizer["state"].items() if state}
        tensors = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(self.model).items()}
        for number, state in states.items():
            tensors |= {f"optimizer/{number}/{field}": value for field, value in state.items()}
        tensors |= {f"rows/{field}": rows.pop(field) for field in [*rows] if isinstance(rows[field], Tensor)}
        if self.drawn is not None:
            tensors["drawn"] = torch.from_numpy(self.drawn)
        record = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "kept_bytes": self.kept_bytes,
            "data_identity": self.data_identity,
            "held_out": self.held_out,
            "trained": self.trained(),
            "with_state": [*states],  # parameters that have had a gradient
            "param_groups": optimizer["param_groups"],
            "rows": rows,
            "rng": process.gather(rng_state()),
        }
        return record, tensors

    def load(self, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore everything but the weights from a checkpoint."""
        states: dict[int, dict[str, Tensor]] = {number: {} for number in record["with_state"]}
        rows = dict(record["rows"])
        for key, value in tensors.items():
            kind, *path = key.split("/")
            if kind == "optimizer":
                states[int(path[0])][path[1]] = value
            elif kind == "rows":
                rows[path[0]] = value
        chosen = [{key: group[key] for key in RECONFIGURABLE if key in group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({"state": states, "param_groups": record["param_groups"]})
        for group, options in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update(options)
        self.rows.load_state_dict(rows)
        self.step, self.num_tokens, self.kept_bytes = record["step"], record["num_tokens"], record["kept_bytes"]
        self.drawn = tensors["drawn"].numpy() if "drawn" in tensors else None
        if process.rank() < len(record["rng"]):
            set_rng_state(record["rng"][process.rank()])
        else:
            torch.manual_seed(self.step * process.count() + process.rank())


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers by name, tied ones under their first name; only the adapters of a `PeftModel`."""
    found, adapters_only = dict[int, tuple[str, Tensor]](), hasattr(model, "peft_config")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or not adapters_only:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and PyTorch as JSON values."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def set_rng_state(saved: dict[str, Any]) -> None:
    """Restore the global generators; states of GPUs that do not exist here are ignored."""
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), index)
