"""Predict the peak memory of a training step by component, from shapes alone.

Weights, remainders, moments and offload buffers are counted (FSDP2: this process' part); the rest is the peak of a dry
run of the step. "libraries": cuBLAS' workspaces, which come from PyTorch's allocator, and the allocator's rounding of
the sizes of tensors that live for the whole step. docs/memory.md explains the components.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from overcoat.estimate.delta_rule import has_delta_rule
from overcoat.estimate.dry_run import KEPT, DryRun, LossOf, Trained, dry_run, kept_tensors, own_loss, trained_model
from overcoat.estimate.fsdp import part_bytes
from overcoat.estimate.meter import GATHERED, GRADIENTS
from overcoat.estimate.phases import OPTIMIZER, Phase, kind_of
from overcoat.estimate.setup import Setup
from overcoat.estimate.streaming import (
    code_bytes,
    stream_buffers,
    stream_host_bytes,
    waiting_gradients,
    weights_of,
)
from overcoat.estimate.times import ONE, Cluster, Crossing, Sizes, Times, step_times
from overcoat.estimate.workspaces import aligned
from overcoat.kernels.muon import flops
from overcoat.memory import SavedReport
from overcoat.models.convert import Report
from overcoat.models.dummy_batch import sees
from overcoat.optim.muon_step import round_bytes
from overcoat.optim.offload import SLOTS
from overcoat.optim.state import MUON, state_fields
from overcoat.pinned_memory import packed
from overcoat.streaming.layers import Layer

# Margins for what is not a tensor; benchmarks/memory.py records what they stand for. The allocator's: shares of what
# lasts, which lies packed; of gradients that come and go with each step; and of what else comes and goes. They hold for
# segments that grow (`overcoat.memory.use_expandable_segments`); without, some steps need more (docs/memory.md). The
# CUDA context's and, with several GPUs, NCCL's (docs/research/measurements.md): bytes.
SLACK_OF_LASTING, SLACK_OF_GRADIENTS, SLACK_OF_MOVING = 0.01, 0.08, 0.16
CONTEXT = 900 * 2**20
NCCL = 720 * 2**20
MOST_TOKENS = 2**40  # whose tensors have sizes below 2**63 bytes
# Components that exist during the whole step.
LASTING = ("weights", "remainders", "moments", "offload buffers", "libraries")
# Of Muon's matrices, while the optimizer works.
ROUND = "Newton-Schulz"
# One dry run at a time: it patches ops and PyTorch for all threads (`alike_blocks`, `Meter.watch_resizes`).
_ALONE = threading.RLock()


@dataclass(frozen=True)
class Prediction:
    """Bytes on each GPU.

    Attributes:
        components: at the step's peak, by name; their sum is the peak.
        moment: the phase of the peak.
        phases: of the whole step, in order; by_phase: components at the peak of each.
        parameters: of the model, all GPUs together.
        host_bytes: page-locked host memory of offloaded states and saved activations.
        handle_bytes: cuBLAS' workspaces on Hopper, of what lasts, for each thread that multiplies: that of the forward
            and autograd's; a CPU has none.
        report: what `convert` did.
        has_delta_rule: True if layers of Gated DeltaNet are counted as flash-linear-attention's (delta_rule.py).
    """

    setup: Setup
    batch: int
    sequence: int
    gpus: int
    components: dict[str, int]
    moment: str
    phases: list[Phase]
    parameters: int
    host_bytes: int
    report: Report
    by_phase: list[dict[str, int]]
    has_delta_rule: bool = False
    handle_bytes: ClassVar[int] = 2 * 32 * 2**20

    @property
    def peak_bytes(self) -> int:
        """Return the predicted `torch.cuda.max_memory_allocated()`."""
        return sum(self.components.values())

    @property
    def slack_bytes(self) -> int:
        """Return the bytes that the caching allocator may hold between tensors, with expandable segments."""
        lasting, gradients = sum(self.components[name] for name in LASTING), self.components["gradients"]
        # Accumulated, they are there before the activations of later passes come and go.
        of_gradients = SLACK_OF_LASTING if self.setup.accumulation > 1 else SLACK_OF_GRADIENTS
        moving = self.peak_bytes - lasting - gradients
        return int(SLACK_OF_LASTING * lasting + of_gradients * gradients + SLACK_OF_MOVING * moving)

    @property
    def context_bytes(self) -> int:
        """Return the bytes outside of PyTorch's allocator."""
        return CONTEXT + (NCCL if self.setup.is_sharded(self.gpus) else 0)

    @property
    def total_bytes(self) -> int:
        """Return the bytes that must be free on the GPU before the process starts."""
        return self.peak_bytes + self.slack_bytes + self.context_bytes


class Predictor:
    """Predictions for one model; dry runs are cached, since optimizer options do not change them.

    Args:
        config: transformers configuration of a causal model, or of one that `samples.sees`.
        loss_of: how a step computes its loss: (model, batch, sequence) -> scalar.
    """

    def __init__(self, config: Any, loss_of: LossOf = own_loss) -> None:
        self.config, self.loss_of = config, loss_of
        self._runs: dict[Any, DryRun] = {}
        self._models: dict[Any, Trained] = {}
        self._cached = functools.cache(_lasting)

    def predict(self, batch: int, sequence: int, setup: Optional[Setup] = None, gpus: int = 1) -> Prediction:
        """Predict the memory of a step of `batch` rows of `sequence` tokens in one forward pass on each GPU.

        gpus: processes of FSDP2 (`fully_shard` on every decoder layer and the model); 1: no FSDP2.
        """
        setup = setup or Setup()
        model, run = self._run(batch, sequence, setup, gpus)
        matrices, layers = model.matrices if setup.optimizer == MUON else (), self._streamed(model, setup)
        lasting, host = self._lasting(model.parameters, matrices, setup, gpus, weights_of(layers), model.held)
        host += stream_host_bytes(layers, gpus)
        lasting["offload buffers"] += stream_buffers(layers, gpus, setup.torch_reduce_dtype)
        living, buffers = run.phases[setup.releases], {ROUND: round_bytes(matrices, gpus)} if matrices else {}
        by_phase = [
            _together(lasting, {**fullest, **(buffers if _steps(label, setup) else {})}) for label, fullest, _ in living
        ]
        for of, found in zip(living, by_phase, strict=True):
            found[GRADIENTS] += waiting_gradients(layers, of.label)
        base, peaks = sum(lasting.values()), [sum(each.values()) for each in by_phase]
        phases = [Phase(of.label, peak, base + of.end) for of, peak in zip(living, peaks, strict=True)]
        fullest = peaks.index(max(peaks))
        components, moment = by_phase[fullest], phases[fullest].label
        count = sum(parameter.numel() for parameter in model.parameters)
        work_done = (
            components,
            moment,
            phases,
            count,
            host + run.host,
            model.report,
            by_phase,
            has_delta_rule(model.model),
        )
        return Prediction(setup, batch, sequence, gpus, *work_done)

    def times(self, batch: int, sequence: int, setup: Setup, cluster: Cluster = ONE, expert_load: float = 1.0) -> Times:
        """Predict the seconds of a step.

        expert_load: tokens of the busiest expert over the mean of its layer, as a run logs it. ValueError: no experts
            compute in FP8, or they cannot have so many.
        """
        gpus = cluster.sharding
        model, run = self._run(batch, sequence, setup, gpus)
        run.work.check_load(expert_load)
        matrices, layers = model.matrices if setup.optimizer == MUON else (), self._streamed(model, setup)
        lasting, host = self._lasting(model.parameters, matrices, setup, gpus, weights_of(layers), model.held)
        trained = sum(part_bytes(each, gpus) for each in model.parameters if each.requires_grad)
        states = lasting["moments"] + lasting["remainders"]
        moved = weights_of(layers)
        weights = sum(each.nbytes for each in model.parameters if gpus == 1 or id(each) not in moved)
        wider = (setup.torch_reduce_dtype or setup.torch_dtype).itemsize / setup.torch_dtype.itemsize
        work = sum(flops(each.shape[-2], each.shape[-1], 5) * each.shape[:-2].numel() for each in matrices) / gpus
        crossing = Crossing(0, 0)
        if layers:
            stepped = sum(each.nbytes for each in model.parameters if id(each) in moved and each.requires_grad)
            codes, sent = code_bytes(layers), int(2 * code_bytes(layers) + stepped * wider)
            crossing = Crossing(codes // gpus, stepped // gpus + host, sent if gpus > 1 else 0)
            states, host = states + host, 0
        sizes = Sizes(weights, model.gathered, int(weights * wider), trained, states, host, run.host, work, crossing)
        return step_times(run.work, sizes, setup.accumulation, setup.releases, cluster, expert_load)

    def _streamed(self, model: Trained, setup: Setup) -> tuple[Layer, ...]:
        """Return the layers that are streamed; ValueError: none can be."""
        if not setup.stream:
            return ()
        if setup.replicated:
            raise ValueError("stream: shards have no replicas, so not with --hybrid: leave one out")
        if not model.streamed:
            reasons = "; ".join(dict.fromkeys(model.left.values())) or "no FP8"
            raise ValueError(f"stream: no weight can be streamed: {reasons}")
        return model.streamed

    def _lasting(self, *arguments: Any) -> tuple[dict[str, int], int]:
        lasting, host = self._cached(*arguments)
        return dict(lasting), host

    def _run(self, batch: int, sequence: int, setup: Setup, gpus: int) -> tuple[Trained, DryRun]:
        """Return the model, and a dry run of it."""
        for name, value in (("batch", batch), ("sequence", sequence), ("gpus", gpus)):
            if value < 1:
                raise ValueError(f"{name} {value!r} must be at least 1")
        if batch * sequence > MOST_TOKENS:
            raise ValueError(f"batch {batch} x sequence {sequence}: must be at most {MOST_TOKENS} tokens")
        if setup.is_sharded(gpus) and sees(self.config):
            many = f"gpus {gpus}" if gpus > 1 else "replicated"
            raise ValueError(f"{many}: a {self.config.model_type} model is estimated on one GPU only; use --gpus 1")
        alone, bare = setup.of_model(), setup.without_optimizer()
        work = (batch, sequence, bare, gpus)
        with _ALONE:
            if (alone, gpus) not in self._models:
                self._models[alone, gpus] = trained_model(self.config, alone, gpus)
            trained = self._models[alone, gpus]
            try:
                if work not in self._runs:
                    self._runs[work] = dry_run(trained, batch, sequence, bare, self.loss_of)
            except BaseException:
                del self._models[alone, gpus]  # FSDP2 has stopped amid a step
                raise
        return trained, self._runs[work]

    def batches(self, sequence: int, setup: Setup, gpus: int) -> list[int]:
        """Return the batches that `predict` has already run."""
        return [batch for batch, *work in self._runs if work == [sequence, setup.without_optimizer(), gpus]]

    def kept(self, batch: int, sequence: int, setup: Setup) -> SavedReport:
        """Return the tensors that a forward pass saves for its backward, by op and tensor."""
        with _ALONE:
            return kept_tensors(self.config, batch, sequence, setup, self.loss_of)


def predict(config: Any, batch: int, sequence: int, setup: Optional[Setup] = None, gpus: int = 1) -> Prediction:
    """Predict the peak memory of a training step of a model, from its configuration: see `Predictor.predict`."""
    return Predictor(config).predict(batch, sequence, setup, gpus)


def _together(lasting: dict[str, int], moving: dict[str, int]) -> dict[str, int]:
    """Merge the components, "libraries" last."""
    found = {**lasting, **moving, GRADIENTS: lasting[GRADIENTS] + moving.get(GRADIENTS, 0)}
    found["libraries"] = found.pop("libraries")
    return found


def _steps(label: str, setup: Setup) -> bool:
    """True if the optimizer works in a phase."""
    return kind_of(label) == "backward" if setup.releases else label == OPTIMIZER


def _lasting(
    parameters: tuple[Tensor, ...], matrices: tuple[Tensor, ...], setup: Setup, gpus: int,
    streamed: frozenset[int] = frozenset(), held: frozenset[int] = frozenset(),
) -> tuple[dict[str, int], int]:  # fmt: skip
    """Return the bytes that last for the whole step, and the bytes of offloaded states in host memory. Sizes are the
    tensors' own; what the allocator's multiples add to them is among the libraries'. matrices: Muon's; streamed: ids of
    parameters in host memory; held: of those held as FP8 codes, 1 byte a weight."""
    orthogonalized, host = set(map(id, matrices)), 0
    resident = [parameter for parameter in parameters if id(parameter) not in streamed]
    weights = [part_bytes(each, gpus) // (each.element_size() if id(each) in held else 1) for each in resident]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    moments: list[int] = []
    remainders: list[int] = []
    for parameter in trained:
        moved = []
        group = setup.group_of_matrices if id(parameter) in orthogonalized else setup.group
        for name, field in state_fields(parameter, group).items():
            value = torch.empty(field.shape, dtype=field.dtype, device="meta")
            # Those of vectors are whole on every process.
            size = part_bytes(value, gpus) if parameter.dim() > 1 and field.shape else value.nbytes
            if (setup.offload or id(parameter) in streamed) and name != "step":
                moved.append(size)
            else:
                (remainders if name == "remainder" else moments).append(size)
        host += packed(moved)[1]
    rounding = sum(aligned(size) - size for size in (*weights, *moments, *remainders))
    lasting = {
        "weights": sum(weights),
        "remainders": sum(remainders),
        "moments": sum(moments),
        GRADIENTS: sum(part_bytes(each, gpus) for each in trained) if setup.accumulation > 1 else 0,
        KEPT: 0,
        GATHERED: 0,
        "offload buffers": SLOTS * aligned(min(setup.offload_buffer // SLOTS, host)),
        "libraries": Prediction.handle_bytes + rounding,
    }
    return lasting, host
