"""`Recipe`: every numerical choice of the FP8 flow, in one frozen dataclass.

The defaults were chosen by measurement (docs/research/log.md); `Recipe.paper()` is COAT as published.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

KeptFormat = Literal["sqrt8", "e4m3", "int8"]
KeptAttention = Literal["8bit", "bf16"]
Checkpoint = Literal["block"]
LinearScaling = Literal["tensor", "block"]
GradFormat = Literal["e5m2", "e4m3"]
Head = Literal["bf16", "fp8"]
FrozenWeights = Literal["bf16", "fp8"]

GROUP_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Recipe:
    """How a converted layer computes and what it saves for the backward.

    Attributes:
        kept_format: 8-bit code of the tensors that non-linear layers and attention save; no GEMM reads it.
            The paper uses "e4m3"; "sqrt8" has about 10 dB less error with the same bytes.
        group_size: size of its 1xG groups along the hidden axis (paper: 16). Attention has one group per token and
            head.
        kept_attention: what attention saves for its backward. "8bit": v in `kept_format`, q and k in 12 bits that
            decode BF16 exactly; o is recomputed. "bf16": q, k, v and o in BF16 (paper).
        checkpoint: None, or "block": save one 8-bit copy of each block's input and recompute the rest.
        linear_scaling: what shares an FP8 scale in the linear layers' GEMMs: "tensor" (COAT), or "block": 1x128
            activations and gradients and 128x128 weights (DeepSeek-V3), which on a GPU needs a Hopper.
        grad_format: FP8 format of the output gradients that dgrad and wgrad read. Default: "e5m2" (the paper's), or
            with block scales "e4m3", since PyTorch multiplies no other block-scaled operands.
        fp8: False leaves every layer in its original precision: the baseline through the same code path.
        head: precision of lm_head and its loss, computed without storing all logits: "bf16" (the model's own dtype),
            "fp8" (logits' gradient in `grad_format`); None: Hugging Face's loss, with all logits.
        z_loss: weight of log(sum exp(logits))^2, added to every label's loss in `train()` mode; it holds the
            logits near zero (arXiv 2204.02311: 1e-4). 0 adds nothing.
        frozen_weights: how weights of converted layers are held that do not train (LoRA's base): "bf16" (their own
            dtype), or "fp8", as the codes that the GEMMs read, 1 byte a weight; training does not change by a bit.
        offload_blocks: how many converted blocks, or "all", move their saved tensors to page-locked host memory between
            forward and backward (block/offload.py). Only blocks that save tensors count: freeze weights before
            `convert`. Spread evenly over text layers, then a vision tower's; not the last two to four, which would come
            back at once. Results do not change. Ignored under torch.compile and inside other saved-tensor hooks.

    Raises:
        ValueError: a field has a value that is not listed above, or two fields are incompatible.
    """

    kept_format: KeptFormat = "sqrt8"
    group_size: int = 128
    kept_attention: KeptAttention = "8bit"
    checkpoint: Checkpoint | None = None
    linear_scaling: LinearScaling = "tensor"
    grad_format: GradFormat = None  # type: ignore[assignment]  # never None once constructed
    fp8: bool = True
    head: Head | None = "bf16"
    z_loss: float = 0.0
    frozen_weights: FrozenWeights = "bf16"
    offload_blocks: int | Literal["all"] = 0

    def __post_init__(self) -> None:
        if self.grad_format is None:
            object.__setattr__(self, "grad_format", "e4m3" if self.linear_scaling == "block" else "e5m2")
        allowed: dict[str, tuple[Any, ...]] = {
            "kept_format": get_args(KeptFormat),
            "group_size": GROUP_SIZES,
            "kept_attention": get_args(KeptAttention),
            "checkpoint": (None, *get_args(Checkpoint)),
            "linear_scaling": get_args(LinearScaling),
            "grad_format": get_args(GradFormat),
            "fp8": (True, False),
            "head": (None, *get_args(Head)),
            "frozen_weights": get_args(FrozenWeights),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if not any(value == known and type(value) is type(known) for known in values):  # 128.0 and 1 are not
                choices = ", ".join(repr(v) for v in values)
                raise ValueError(f"Recipe.{name} = {value!r} is not known; choose one of {choices}")
        is_number = isinstance(self.z_loss, (int, float)) and not isinstance(self.z_loss, bool)
        if not is_number or not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"Recipe.z_loss = {self.z_loss!r} is not known; choose one of 0 (off), a weight above")
        if self.z_loss and self.head is None:
            raise ValueError(
                f"Recipe.z_loss = {self.z_loss!r} is part of the loss that Recipe.head computes: choose head='bf16' "
                "(the model's own dtype) instead of None"
            )
        blocks = self.offload_blocks
        if blocks != "all" and (type(blocks) is not int or blocks < 0):
            raise ValueError(f"Recipe.offload_blocks = {blocks!r} is not known; choose one of 0, 1, 2, ... or 'all'")
        if self.linear_scaling == "block" and self.grad_format != "e4m3":
            raise ValueError(
                f"Recipe.grad_format = {self.grad_format!r} does not go with linear_scaling='block', whose GEMMs "
                "take E4M3 only; leave grad_format out"
            )

    @classmethod
    def paper(cls) -> Recipe:
        """Return COAT as published: E4M3 in 1x16 groups, attention's tensors saved in BF16."""
        return cls(kept_format="e4m3", group_size=16, kept_attention="bf16")

    @classmethod
    def leanest(cls) -> Recipe:
        """Return the recipe with the least memory: one 8-bit copy of each block's input, everything else recomputed."""
        return cls(checkpoint="block")

    @classmethod
    def bf16(cls) -> Recipe:
        """Return the baseline: `convert` changes nothing."""
        return cls(fp8=False, head=None)

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Recipe:
        """Build a recipe from its name ("default", "paper", "leanest", "bf16") and field overrides."""
        recipes: dict[str, Callable[[], Recipe]] = {
            "default": cls,
            "paper": cls.paper,
            "leanest": cls.leanest,
            "bf16": cls.bf16,
        }
        if name not in recipes:
            raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(recipes)}")
        known = {field.name for field in fields(cls)}
        for key in overrides:
            if key not in known:
                raise ValueError(f"Recipe has no field {key!r}; its fields are {', '.join(sorted(known))}")
        chosen = asdict(recipes[name]())
        del chosen["grad_format"]  # follows linear_scaling
        return cls(**{**chosen, **overrides})
