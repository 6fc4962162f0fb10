"""What tests of training share: states, rows of metrics, what a run has computed, and interference between steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from overcoat.train import loop
from overcoat.train.batch_plan import BatchPlan
from overcoat.train.build import build_model, make_optimizer
from overcoat.train.checkpoint import list_checkpoints, read_record
from overcoat.train.config import Config
from overcoat.train.data import PackedRows
from overcoat.train.metrics import read_metrics
from overcoat.train.state import TrainState

MakeConfig = Callable[..., Config]
CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")
# A model whose experts two processes do not divide.
OLMOE = (
    "model.config.model_type=olmoe",
    "model.config.num_experts=3",
    "model.config.num_experts_per_tok=2",
    "model.config.intermediate_size=96",
)
EXACT = ("model.dtype=float32", "optimizer.moments=fp32", "model.config.vocab_size=50")


def make_state(config: Config, eos: int | None = 0) -> TrainState:
    """An unconverted model on simple tokens: what the loop adds is plain PyTorch and can be compared with it."""
    model = build_model(config, None).train()
    lengths = np.random.default_rng(0).integers(5, 60, 40)
    tokens = np.arange(lengths.sum()) * 7 % 49 + 1  # each token decides the next
    ends = np.cumsum(lengths)
    tokens[ends - 1] = 0
    rows = PackedRows(tokens, np.stack([ends - lengths, ends], axis=1), config.data.sequence_length, seed=0)
    optimizer = make_optimizer(model, config.optimizer, 0)
    return TrainState(model, optimizer, rows, "test", eos, CPU, BatchPlan(config.train.batch_size))


def row(step: int, loss: float = 1.0, norm: float = 1.0) -> dict[str, Any]:
    figures = {"loss": loss, "gradient_norm": norm, "tokens_per_second": 9.5, "peak_bytes": 7}
    return {"kind": "train", "step": step, **figures}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def losses(run_dir: Path) -> dict[str, dict[int, tuple[float, ...]]]:
    """Everything numerical that a run logged: {"train": {step: (loss, lr, norm)}, "eval": {step: (loss,)}, ...}."""
    keys = ("loss", "lr", "gradient_norm")
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return {
        kind: {s: tuple(row[key] for key in keys if key in row) for s, row in rows.items()}
        for kind, rows in metrics.items()
    }


def fits_of(run_dir: Path) -> dict[int, tuple[int, bool]]:
    rows = read_metrics(run_dir / "metrics.jsonl")["fit"]
    return {step: (row["micro_batch"], row["block_checkpoints"]) for step, row in rows.items()}


def newest(run_dir: Path) -> Path:
    return list_checkpoints(run_dir / "checkpoints")[-1]


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Weights, optimizer states and position in the data of the last checkpoints, and the exported weights."""
    folders = (run_dir, reference)
    assert_same_tensors(*(tensors_in(newest(folder)) for folder in folders))
    assert_same_tensors(*(load_file(folder / "export/model.safetensors") for folder in folders))
    saved, expected = (read_record(newest(folder)) for folder in folders)
    assert saved["rows"] == expected["rows"]


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a checkpoint's files; those of several processes with the file before their names."""
    files = sorted(checkpoint.glob("shard-*.safetensors"))
    start = [f"{file.name} " if len(files) > 1 else "" for file in files]
    return {
        of + name: tensor for of, file in zip(start, files, strict=True) for name, tensor in load_file(file).items()
    }


def assert_same_tensors(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert mine.keys() == other.keys()
    assert len(mine) > 1
    for name, tensor in mine.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name


def assert_same_run(run_dir: Path, reference: Path) -> None:
    assert losses(run_dir) == losses(reference)
    assert_same_end(run_dir, reference)


def before_steps(patch: pytest.MonkeyPatch, act: Callable[[TrainState], object]) -> None:
    """Before each training step, `act` gets the state; `state.step + 1` is the step to be taken."""
    real = loop.train_step

    def step(state: TrainState, config: Config) -> loop.StepRecord:
        act(state)
        return real(state, config)

    patch.setattr(loop, "train_step", step)


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """SIGTERM during optimizer step `step`, in this process."""
    before_steps(patch, lambda state: state.step + 1 == step and os.kill(os.getpid(), signal.SIGTERM))


def run_out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore lines")


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]
