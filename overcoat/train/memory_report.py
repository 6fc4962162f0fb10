"""`memory.report`: measured and predicted memory of a step, and what each branch of the layers saves for the backward:
memory.txt (tables), memory.png (by phase), memory.json.

The second step of the first process is measured: the optimizer's states exist from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from overcoat.estimate.phases import LOSS, Phase, kind_of, measure_step
from overcoat.estimate.predict import Prediction, Predictor
from overcoat.extras import drawing
from overcoat.memory import optimizer_bytes
from overcoat.models.dummy_batch import tokens
from overcoat.models.family import decoder_layers
from overcoat.models.saved_bytes import BranchBytes, measure_branches, table
from overcoat.optim.sharding import shard_bytes
from overcoat.train import process
from overcoat.train.batch_plan import training_setup
from overcoat.train.build import loss_for_estimates
from overcoat.train.config import Config
from overcoat.train.parallel import num_shards
from overcoat.train.state import TrainState

MEASURED_STEP = 2
COLORS = {"forward": "tab:green", "loss": "tab:orange", "backward": "tab:blue", "optimizer": "tab:purple"}
Step = Callable[[TrainState, Config], Any]


# Lines of the table: name, bytes predicted, bytes measured (None if unknown).
Figures = list[tuple[str, int, int | None]]


def reporting(train_step: Step, say: Callable[[str], None]) -> Step:
    """Return `train_step` with its second successful call measured and reported (the first if no other is left)."""
    num_taken = 0

    def step(state: TrainState, config: Config) -> Any:
        nonlocal num_taken
        is_due = num_taken + 1 == MEASURED_STEP or (not num_taken and state.step + 1 == config.train.num_steps)
        is_measured = is_due and process.is_first()
        record = _measured(train_step, say, state, config) if is_measured else train_step(state, config)
        num_taken += 1
        return record

    return step


def _measured(train_step: Step, say: Callable[[str], None], state: TrainState, config: Config) -> Any:
    gradients: list[int] = []

    def count(*_: Any) -> None:
        gradients.append(sum(shard_bytes(p.grad) for p in state.model.parameters() if p.grad is not None))

    handle = state.optimizer.register_step_pre_hook(count)
    try:
        with measure_step(state.model, state.optimizer) as phases:
            record = train_step(state, config)
    finally:
        handle.remove()
    say(write_report(state, config, phases, gradients[-1]))
    return record


def write_report(state: TrainState, config: Config, phases: list[Phase], gradients: int) -> str:
    """Write the three files and return the text to print. phases: as measured; gradients: their bytes after the
    backward."""
    setup, is_gpu = training_setup(config, state.plan), state.device.type == "cuda"
    if not is_gpu:
        setup = replace(setup, offload=False)  # the states are in the memory that is counted
    predictor = Predictor(state.model.config, loss_for_estimates(setup.document_mask))
    work = (state.plan.micro_batch, config.data.sequence_length)
    prediction = predictor.predict(*work, setup, num_shards(config.parallel))
    # Nothing of a CPU's matrix library is in the count of tensors.
    absent = 0 if is_gpu else prediction.handle_bytes
    predicted = [Phase(label, peak - absent, end - absent) for label, peak, end in prediction.phases]
    kept = ("kept for the backward", predictor.kept(*work, setup).total_bytes, state.kept_bytes or None)
    figures = [*_component_figures(state, prediction, gradients), kept, *_phase_figures(predicted, phases)]
    data = {
        "figures": {name: {"predicted": mine, "measured": real} for name, mine, real in figures},
        "predicted": [phase._asdict() for phase in predicted],
        "measured": [phase._asdict() for phase in phases],
    }
    branches, reason = _branches(state, config)
    data["branches"] = [branch._asdict() for branch in branches]
    text, run_dir = "\n".join([write_table(figures), *table(branches), *reason]), Path(config.train.run_dir)
    (run_dir / "memory.txt").write_text(text + "\n", encoding="utf-8")
    (run_dir / "memory.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
    draw_timeline(predicted, phases, run_dir / "memory.png")
    return f"{text}\n{run_dir / 'memory.png'} shows the step's course"


def _branches(state: TrainState, config: Config) -> tuple[list[BranchBytes], list[str]]:
    """Return what each branch saves in a micro-batch of made-up tokens, or [] and why: training goes on without."""
    if process.count() > 1 or config.train.stream:
        return [], ["bytes of branches: not measured, as weights of layers are on other GPUs or in host memory"]
    try:
        batch = tokens(state.model, state.plan.micro_batch, config.data.sequence_length, {})
        return measure_branches(state.model, decoder_layers(state.model), {**batch, "use_cache": False}), []
    except (torch.OutOfMemoryError, ValueError) as error:
        return [], [f"bytes of branches: not measured: {' '.join(str(error).split())[:200]}"]


def _component_figures(state: TrainState, prediction: Prediction, gradients: int) -> Figures:
    """Return weights, optimizer states and gradients."""
    components = prediction.components
    weights, trained = (
        sum(shard_bytes(each) for each in state.model.parameters() if each.requires_grad >= least)
        for least in (False, True)
    )
    states = optimizer_bytes(state.optimizer, state.device.type if prediction.setup.offload else None)
    return [
        ("weights", components["weights"], weights),
        ("moments and remainders", components["moments"] + components["remainders"], states),
        ("gradients, backward done", 0 if prediction.setup.release_gradients else trained, gradients),
    ]


def _phase_figures(predicted: list[Phase], measured: list[Phase]) -> Figures:
    """Return the peak of each kind of phase, and the bytes allocated between forward and backward."""

    def end(phases: list[Phase]) -> int:
        return next(phase.end for phase in phases if phase.label == LOSS)

    def peak(phases: list[Phase], kind: str | None = None) -> int:
        return max((phase.peak for phase in phases if kind in (None, kind_of(phase.label))), default=0)

    kinds = [(f"peak, {kind}", peak(predicted, kind), peak(measured, kind)) for kind in COLORS]
    done = ("allocated, forward done", end(predicted), end(measured))
    return [done, *kinds, ("peak of the step", peak(predicted), peak(measured))]


def write_table(figures: Figures) -> str:
    """Return the figures as a table in MiB with relative differences."""
    lines = [f"{'memory of a step, MiB':28s} {'predicted':>12s} {'measured':>12s}"]
    for name, predicted, measured in figures:
        line = f"{name:28s} {predicted / 2**20:12,.1f}"
        if measured is not None:
            difference = f" {predicted / measured - 1:+8.2%}" if measured else ""
            line += f" {measured / 2**20:12,.1f}{difference}"
        lines.append(line)
    return "\n".join(lines)


def draw_timeline(predicted: list[Phase], measured: list[Phase], path: Path) -> None:
    """Plot bytes over the phases: bars are measured (dark: at the end of a phase, light: its peak), lines are
    predicted. ValueError: matplotlib is not installed."""
    unit, size = ("GiB", 2**30) if max(phase.peak for phase in measured) >= 2**30 else ("MiB", 2**20)
    with drawing(path, "hf", "memory.report = true", 10, 4.5) as axes:
        for kind, color in COLORS.items():
            places = [place for place, phase in enumerate(measured) if kind_of(phase.label) == kind]
            ends = [measured[place].end / size for place in places]
            tops = [(measured[place].peak - measured[place].end) / size for place in places]
            axes.bar(places, ends, 1.0, color=color, alpha=0.65, label=f"{kind}, measured")
            axes.bar(places, tops, 1.0, bottom=ends, color=color, alpha=0.3)
        edges = [place - 0.5 for place in range(len(predicted) + 1)]
        for name, style in (("peak", "-"), ("end", ":")):
            values = [getattr(phase, name) / size for phase in predicted]
            axes.stairs(values, edges, color="black", linestyle=style, baseline=None, label=f"{name}, predicted")
        # Labels for every phase outside the blocks, and for the first and the last block each way.
        others = {place for place, phase in enumerate(measured) if not phase.label.startswith("block")}
        shown = [place for place in range(len(measured)) if others & {place - 1, place, place + 1}]
        axes.set_xticks(shown, [measured[place].label for place in shown], rotation=30, ha="right", fontsize=7)
        axes.set_ylabel(f"{unit} allocated: at a phase's peak (light) and end")
        axes.set_xlim(-0.5, max(len(measured), len(predicted)) - 0.5)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, loc="lower center", ncols=3)
