"""Peak memory of a training step by component, from shapes alone.

    weights, remainders, moments   counted, as `overcoat.optim.state` stores them (FSDP2: this process' part)
    gradients, kept activations, residual stream, loss, workspace
                                   of a dry run of the step on the meta device (`dry_run.py`), at its fullest moment
    gathered                       what FSDP2 gathers, of the same dry run (`fsdp.py`)
    offload buffers                of `AdamW(offload=True)`
    libraries                      cuBLAS' workspaces, which it gets from PyTorch's allocator, and what the
                                   allocator's multiples add to the sizes of lasting tensors

Their sum is what `torch.cuda.max_memory_allocated()` will say from the second step on. What a GPU must have is more:
what the allocator holds between tensors (`slack_bytes`) and what lies outside it, the CUDA context and NCCL
(`context_bytes`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.estimate.dry_run import KEPT, DryRun, LossOf, Work, dry_run, kept_tensors, meta_model, own_loss
from overcoat.estimate.fsdp import shard_rows
from overcoat.estimate.meter import GATHERED, GRADIENTS, aligned
from overcoat.estimate.phases import Phase
from overcoat.formats.masters import resolve_master
from overcoat.formats.moments import resolve_moments
from overcoat.host import packed
from overcoat.memory import KeptReport
from overcoat.models.convert import Report
from overcoat.optim.offload import SLOTS
from overcoat.optim.state import state_fields
from overcoat.recipe import GROUP_SIZES, Recipe

# Margins for what is not a tensor; benchmarks/memory.py records what they stand for. The allocator's: shares of what
# lasts, which lies packed; of gradients that come and go with each step; and of what else comes and goes. They hold for
# segments that grow (`overcoat.memory.use_expandable_segments`); without, some steps need more (docs/memory.md). The
# CUDA context's and, with several GPUs, NCCL's (docs/research/measurements.md): bytes.
SLACK_OF_LASTING, SLACK_OF_GRADIENTS, SLACK_OF_MOVING = 0.01, 0.08, 0.16
CONTEXT = 900 * 2**20
NCCL = 720 * 2**20
# The workspace of a cuBLAS handle on Hopper (`DryRun.handles`).
HANDLE = 32 * 2**20
# As `overcoat.release_gradients` and `overcoat.AdamW` have them by default.
RELEASE_BYTES = 32 * 2**20
OFFLOAD_BUFFER = 192 * 2**20
DTYPES = ("bfloat16", "float32")
# Components that are there during the whole step.
LASTING = ("weights", "remainders", "moments", "offload buffers", "libraries")


@dataclass(frozen=True)
class Setup:
    """How a model is trained, as far as memory is concerned. Field names are those of `AdamW` and of the training
    configuration.

    Raises:
        ValueError: a value is not known, or two of them exclude each other.
    """

    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    moments: str | tuple[str, str] = "8bit"
    master: str = "auto"
    group_size: int = 128
    release_gradients: bool = False
    offload: bool = False
    offload_buffer: int = OFFLOAD_BUFFER
    accumulation: int = 1
    dtype: str = "bfloat16"
    document_mask: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not trained; choose one of {', '.join(DTYPES)}")
        resolve_moments(self.moments)
        resolve_master(self.master, self.torch_dtype)
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size {self.group_size!r} must be one of {', '.join(map(str, GROUP_SIZES))}")
        if self.accumulation < 1:
            raise ValueError(f"accumulation {self.accumulation!r} must be at least 1, forward passes in a step")
        if self.release_gradients and self.accumulation > 1:
            raise ValueError(
                f"release_gradients cannot accumulate {self.accumulation} forward passes: the weights move in the "
                "first one's backward. Use accumulation 1, or keep the gradients"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def group(self) -> dict[str, Any]:
        """The options of a parameter group."""
        return {"moments": resolve_moments(self.moments), "master": self.master, "group_size": self.group_size}


@dataclass(frozen=True)
class Prediction:
    """Bytes on each GPU.

    Attributes:
        components: at the fullest moment, by name; their sum is the peak.
        moment: the phase of that moment.
        phases: of the whole step, in order.
        parameters: of the model, all GPUs together.
        host_bytes: page-locked host memory of offloaded states and kept activations.
        handle_bytes: cuBLAS' workspaces, of what lasts; a CPU has none.
        report: what `convert` did.
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
    handle_bytes: int
    report: Report

    @property
    def peak_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated()` will say."""
        return sum(self.components.values())

    @property
    def slack_bytes(self) -> int:
        """What the caching allocator, with segments that grow, may hold besides between tensors."""
        lasting, gradients = sum(self.components[name] for name in LASTING), self.components["gradients"]
        # Accumulated, they are there before the activations of later passes come and go.
        of_gradients = SLACK_OF_LASTING if self.setup.accumulation > 1 else SLACK_OF_GRADIENTS
        moving = self.peak_bytes - lasting - gradients
        return int(SLACK_OF_LASTING * lasting + of_gradients * gradients + SLACK_OF_MOVING * moving)

    @property
    def context_bytes(self) -> int:
        """What lies outside of PyTorch's allocator."""
        return CONTEXT + (NCCL if self.gpus > 1 else 0)

    @property
    def total_bytes(self) -> int:
        """What the GPU must have free before the process starts."""
        return self.peak_bytes + self.slack_bytes + self.context_bytes


class StateBytes(NamedTuple):
    """Bytes of the optimizer's states on one GPU as `overcoat.memory.optimizer_bytes` counts them, the same in the
    allocator's multiples, and what of them offload takes."""

    moments: int
    remainders: int
    aligned: int
    offloaded: int
    offloaded_aligned: int
    host: int

    @classmethod
    def of(cls, parameters: list[Tensor], setup: Setup, gpus: int) -> StateBytes:
        """Of these (meta) parameters."""
        return cls(*map(sum, zip(*(cls._of_one(parameter, setup, gpus) for parameter in parameters), strict=True)))

    @classmethod
    def _of_one(cls, parameter: Tensor, setup: Setup, gpus: int) -> StateBytes:
        sizes = {}
        for name, field in state_fields(parameter, setup.group).items():
            value = torch.empty(field.shape, dtype=field.dtype, device="meta")
            # Those of vectors are whole on every process.
            sizes[name] = _part(value, gpus) if parameter.dim() > 1 and field.shape else value.nbytes
        movable = [size for name, size in sizes.items() if name != "step"]
        remainder = sizes.get("remainder", 0)
        moments, all_aligned = sum(sizes.values()) - remainder, sum(map(aligned, sizes.values()))
        offloaded_aligned = sum(map(aligned, movable))
        return cls(moments, remainder, all_aligned, sum(movable), offloaded_aligned, packed(movable)[1])


def _part(tensor: Tensor, gpus: int) -> int:
    """Bytes of the largest part of a tensor on one of `gpus` processes."""
    return shard_rows(tensor, gpus) * tensor[:1].nbytes if gpus > 1 and tensor.dim() else tensor.nbytes


class Predictor:
    """Predictions for one model; dry runs are kept, since optimizer options do not change them.

    Args:
        config: transformers configuration of a causal model.
        loss_of: how a step computes its loss: (model, batch, sequence) -> scalar.
    """

    def __init__(self, config: Any, loss_of: LossOf = own_loss) -> None:
        self.config, self.loss_of = config, loss_of
        self._runs: dict[Work, DryRun] = {}
        self._parameters: dict[torch.dtype, list[Tensor]] = {}

    def predict(self, batch: int, sequence: int, setup: Optional[Setup] = None, gpus: int = 1) -> Prediction:
        """Memory of a step.

        Args:
            batch: rows in one forward pass on each GPU; sequence: tokens in a row.
            gpus: processes of FSDP2 (`fully_shard` on every decoder layer and the model); 1 for none.
        """
        setup = setup or Setup()
        for name, value in (("batch", batch), ("sequence", sequence), ("gpus", gpus)):
            if value < 1:
                raise ValueError(f"{name} {value!r} must be at least 1")
        dtype, work = setup.torch_dtype, _work(batch, sequence, setup, gpus)
        if dtype not in self._parameters:
            self._parameters[dtype] = list(meta_model(self.config, dtype).parameters())
        if work not in self._runs:
            self._runs[work] = dry_run(self.config, work, self.loss_of)
        parameters, run = self._parameters[dtype], self._runs[work]
        states = StateBytes.of(parameters, setup, gpus)
        lasting, rounding = _lasting(parameters, states, setup, gpus, run)
        moment, moving = run.account.at_peak()
        base = sum(lasting.values()) + rounding
        components = {**lasting, GRADIENTS: lasting[GRADIENTS] + moving.pop(GRADIENTS, 0), **moving}
        components["libraries"] = components.pop("libraries") + rounding
        return Prediction(
            setup, batch, sequence, gpus, components, moment,
            [Phase(label, base + peak, base + end) for label, peak, end in run.account.phases()],
            sum(parameter.numel() for parameter in parameters),
            (states.host if setup.offload else 0) + run.host,
            HANDLE * run.handles,
            run.report,
        )  # fmt: skip

    def kept(self, batch: int, sequence: int, setup: Setup) -> KeptReport:
        """What a forward pass keeps for its backward, by op and tensor."""
        return kept_tensors(self.config, _work(batch, sequence, setup, 1), self.loss_of)


def predict(config: Any, batch: int, sequence: int, setup: Optional[Setup] = None, gpus: int = 1) -> Prediction:
    """Peak memory of a training step of a model, from its transformers configuration: `Predictor.predict`."""
    return Predictor(config).predict(batch, sequence, setup, gpus)


def _work(batch: int, sequence: int, setup: Setup, gpus: int) -> Work:
    release = RELEASE_BYTES if setup.release_gradients else None
    passes, mask = min(setup.accumulation, 2), setup.document_mask
    return Work(setup.recipe, batch, sequence, setup.torch_dtype, passes, release, gpus, mask)


def _lasting(
    parameters: list[Tensor], states: StateBytes, setup: Setup, gpus: int, run: DryRun
) -> tuple[dict[str, int], int]:
    """What is there during the whole step, and what the allocator's multiples add to it."""
    sizes = [_part(parameter, gpus) for parameter in parameters]
    weights, gradients = sum(sizes), sum(sizes) if setup.accumulation > 1 else 0
    rounding = sum(map(aligned, sizes)) - weights
    remainders, moments, buffers = states.remainders, states.moments, 0
    rounding += states.aligned - moments - remainders
    if setup.offload:
        rounding -= states.offloaded_aligned - states.offloaded
        buffers = SLOTS * aligned(min(setup.offload_buffer // SLOTS, states.host))
        moments, remainders = moments + remainders - states.offloaded, 0
    lasting = {
        "weights": weights,
        "remainders": remainders,
        "moments": moments,
        GRADIENTS: gradients,
        KEPT: 0,
        GATHERED: 0,
        "offload buffers": buffers,
        "libraries": HANDLE * run.handles,
    }
    return lasting, rounding
