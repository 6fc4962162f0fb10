"""`Setup`: the training options that change a step's memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from overcoat.formats.masters import resolve_master
from overcoat.formats.moments import resolve_moments
from overcoat.models.lora import ALL
from overcoat.optim.muon import MOMENTUM
from overcoat.optim.state import MUON
from overcoat.recipe import GROUP_SIZES, Recipe

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Setup:
    """Field names are those of `AdamW` and of the training configuration.

    Attributes:
        optimizer: "adamw", or "muon" for the matrices of hidden layers.
        stream: `overcoat.stream`: layers' weights and states are in host memory; gradients are released, too.
        resident: layers that stay on the GPU with `stream`.
        accumulation: forward passes in an optimizer step.
        document_mask: rows hold several documents, so attention has a mask.
        reduce_dtype: the dtype in which FSDP2 sums gradients; None: their own.
        all_gather: "fp8": `overcoat.fp8_all_gather`; "bf16": FSDP2 gathers parameters in their own dtype.
        replicated: other GPUs hold the same parameters or shards, and FSDP2 sums gradients over them.
        freeze_tower: a vision-language model's tower is not trained.
        lora_rank: of the adapters that are trained instead of the model; 0: none.
        lora_targets: layers that get adapters, by the end of their names.
        dora: the adapters are DoRA's.

    Raises:
        ValueError: a value is not known, or two of them exclude each other.
    """

    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    optimizer: str = "adamw"
    moments: str | tuple[str, str] = "8bit"
    master: str = "auto"
    group_size: int = 128
    release_gradients: bool = False
    offload: bool = False
    offload_buffer: int = 192 * 2**20
    stream: bool = False
    resident: int = 0
    accumulation: int = 1
    dtype: str = "bfloat16"
    document_mask: bool = False
    freeze_tower: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = (ALL,)
    dora: bool = False
    reduce_dtype: str | None = None
    all_gather: str = "bf16"
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", MUON):
            raise ValueError(f"optimizer {self.optimizer!r}: choose 'adamw' or 'muon'")
        if self.optimizer == MUON and self.moments not in MOMENTUM:
            raise ValueError(f"moments {self.moments!r}: optimizer 'muon' has {', '.join(MOMENTUM)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not trained; choose one of {', '.join(DTYPES)}")
        if self.reduce_dtype not in (None, *DTYPES):
            raise ValueError(f"reduce_dtype {self.reduce_dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.all_gather not in ("fp8", "bf16"):
            raise ValueError(f"all_gather {self.all_gather!r}: choose 'fp8' or 'bf16'")
        resolve_moments(self.moments)
        resolve_master(self.master, self.torch_dtype)
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size {self.group_size!r} must be one of {', '.join(map(str, GROUP_SIZES))}")
        if self.accumulation < 1:
            raise ValueError(f"accumulation {self.accumulation!r} must be at least 1, forward passes in a step")
        if self.dora and not self.lora_rank:
            raise ValueError("dora is for adapters alone: add lora, their rank, or leave it out")
        if self.resident and not self.stream:
            raise ValueError(f"resident {self.resident} is for stream alone: add it, or leave resident out")
        if self.stream and self.accumulation > 1:
            raise ValueError(
                f"stream is not estimated with accumulation {self.accumulation}, whose sums of gradients take 4 bytes "
                "of host memory a streamed weight on top: use accumulation 1"
            )
        if self.releases and self.accumulation > 1:
            raise ValueError(
                f"release_gradients cannot accumulate {self.accumulation} forward passes: the weights move in the "
                "first one's backward. Use accumulation 1, or keep the gradients"
            )

    @property
    def releases(self) -> bool:
        """True if gradients are stepped and freed in the backward."""
        return self.release_gradients or self.stream

    def is_sharded(self, gpus: int) -> bool:
        """True if FSDP2 shards the model, on one GPU too."""
        return gpus > 1 or self.replicated

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_reduce_dtype(self) -> torch.dtype | None:
        return None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype)

    @property
    def group(self) -> dict[str, Any]:
        """Return the options of an optimizer's parameter group."""
        return {"moments": resolve_moments(self.moments), "master": self.master, "group_size": self.group_size}

    @property
    def group_of_matrices(self) -> dict[str, Any]:
        """Return the options of the parameter groups that Muon orthogonalizes."""
        return {**self.group, "moments": (MOMENTUM[str(self.moments)],)}

    def without_optimizer(self) -> Setup:
        """Return the setup reduced to what a dry run depends on; passes after the second are like the second."""
        of_states = ("optimizer", "moments", "master", "group_size", "offload", "offload_buffer")
        default = {name: getattr(Setup, name) for name in (*of_states, "release_gradients")}
        return dataclasses.replace(self, accumulation=min(self.accumulation, 2), **default)

    def of_model(self) -> Setup:
        """Return the setup reduced to what the model and its all-gather depend on."""
        return dataclasses.replace(self.without_optimizer(), accumulation=1)
