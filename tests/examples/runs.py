"""Runs a script of examples/ as its users do, and keeps what a plain loop needs to repeat it."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import overcoat
from overcoat.models.family import find_causal_model
from tests.processes import on_two

EXAMPLES = Path(__file__).parents[2] / "examples"
# Libraries that keep their messages from the root logger.
LOGGERS = ("", "transformers", "lightning.pytorch", "lightning.fabric", "trl", "accelerate", "torchtitan")


class Run:
    """What one process of a script did.

    losses: as the script has them. models: copies of what it converted, from before. batches: the arguments of each
    training forward of the first one's causal model. starts: its weights at each, unless sharded. ran: what its layers
    and head ran at last. said: warnings and log messages, once each. weights: of the first one, at the end. norms: of
    gradients, as PyTorch found them to clip. script: its variables.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.models: list[Any] = []
        self.batches: list[dict[str, Any]] = []
        self.starts: list[dict[str, Tensor]] = []
        self.ran: dict[str, str] = {}
        self.said: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []
        self.script: dict[str, Any] = {}
        self._model: Any = None
        self._report: Any = None

    def convert(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """In the place of `overcoat.convert`."""
        self.models.append(copy.deepcopy(model))
        report = CONVERT(model, *args, **options)
        if self._report is None:
            self._model, self._report = model, report
            # torchtitan calls what is inside of transformers' causal model, and computes the loss itself.
            found = None if type(model).__module__.startswith("torchtitan") else find_causal_model(model)
            (found[1] if found else model).register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return report

    def _before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            inputs = {**kwargs, **({"args": args} if args else {})}
            self.batches.append(copy.deepcopy({name: value for name, value in inputs.items() if value is not None}))
            weights = dict(self._model.named_parameters())
            if not any(isinstance(weight, DTensor) for weight in weights.values()):
                self.starts.append({name: weight.detach().clone() for name, weight in weights.items()})

    def clip(self, *args: Any, **options: Any) -> Tensor:
        """In the place of `torch.nn.utils.clip_grad_norm_`."""
        norm = CLIP(*args, **options)
        self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).detach().clone())
        return norm

    def run(self, name: str) -> None:
        with pytest.MonkeyPatch.context() as patch, self._listening():
            patch.setattr(overcoat, "convert", self.convert)
            patch.setattr(torch.nn.utils, "clip_grad_norm_", self.clip)
            for place, patched in PATCHED_BY_TORCHTITAN:  # every later model of this process would have random angles
                patch.setattr(place, patched, getattr(place, patched))
            self.script = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        self.losses, self.ran = (
            [loss.item() if isinstance(loss, Tensor) else loss for loss in self.script["losses"]],
            self._report.running(),
        )
        for parameter_name, parameter in self._model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            self.weights[parameter_name] = whole.detach().clone()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        handler = Handler(self.said)
        for each in LOGGERS:
            logging.getLogger(each).addHandler(handler)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
            self.said += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
        finally:
            for each in LOGGERS:
                logging.getLogger(each).removeHandler(handler)
        self.said = list(dict.fromkeys(self.said))


PATCHED_BY_TORCHTITAN = (
    (PreTrainedModel, "_init_weights"),
    (PreTrainedModel, "_initialize_weights"),
    (LlamaDecoderLayer, "__init__"),
)
CONVERT, CLIP = overcoat.convert, torch.nn.utils.clip_grad_norm_


class Handler(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.name}: {record.getMessage()}")


def run_here(name: str) -> Run:
    run = Run()
    run.run(name)
    return run


def run_on_two(names: tuple[str, ...], folder: Path) -> dict[str, list[Run]]:
    """The scripts, one after another, in two processes of one gloo group, as torchrun starts them."""
    on_two(_run_all, "cpu", names, folder)
    return {name: [torch.load(folder / f"{name}-{rank}", weights_only=False) for rank in range(2)] for name in names}


def _run_all(rank: int, names: tuple[str, ...], folder: Path) -> None:
    os.chdir(folder)
    as_torchrun(rank)
    dist.init_process_group = lambda *_, **__: None  # type: ignore[assignment]  # one for all scripts
    dist.destroy_process_group = dist.barrier  # type: ignore[assignment]
    for name in names:
        with sharding_on_cpus() if name == "accelerate_fsdp2" else contextlib.nullcontext():
            run = run_here(name)
        run.script = {"class": type(run.script["model"]).__name__}
        run._model = run._report = None
        torch.save(run, folder / f"{name}-{rank}")


def as_torchrun(rank: int) -> None:
    """The environment of one of its two workers, whose process group there is already."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {**place, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}


@contextlib.contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Accelerate shards on GPUs alone: where it decides so, it is to take these CPUs for some."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
