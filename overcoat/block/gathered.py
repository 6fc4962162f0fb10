"""A weight that came over the network in FP8 (models/gather.py), and how the products of a linear layer read it.

Under FSDP2 it stands in the parameter's place between the all-gather and the end of its use. To autograd it has the
parameter's shape and dtype, so its gradient has them too. Its numbers are E4M3 codes, made from the shards with the
scale of the stack; whatever would read it as a weight in 16 bits is refused. Where one process holds all rows, nothing
travels, and it holds the weight itself.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.block.spec import Linear
from overcoat.formats import E4M3
from overcoat.kernels.blockwise import blocks
from overcoat.kernels.weights import block_stack_weights, padded_blocks, stack_codes, stack_weights

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
CHANGED = "Recipe.linear_scaling has changed since overcoat.fp8_all_gather: call it again after overcoat.convert"
_ZEROS = (_aten.zeros_like.default, _aten.new_zeros.default)


class GatheredWeight(Tensor):
    """A weight (N, K) of which E4M3 codes are all there is.

    Attributes:
        held: (N, K) E4M3, in the memory that FSDP2 gathered into; or in 16 bits, the only shard.
        scale: 0-d FP32, of the weights that are stacked with it; or of each block, (N / 128, L4) as
            `block_stack_weights` has them, None if those of the only shard are not made yet.
        w_amax: their maximum, 0-d FP32; None with block scales.
    """

    held: Tensor
    scale: Optional[Tensor]
    w_amax: Optional[Tensor]
    # The plain functions of `Tensor`: all that happens to it happens in `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, held: Tensor, scale: Optional[Tensor], w_amax: Optional[Tensor], dtype: torch.dtype
    ) -> GatheredWeight:
        """dtype: what the weight would have travelled in, and its gradient's."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=dtype, device=held.device
        )
        return made

    def __init__(self, held: Tensor, scale: Optional[Tensor], w_amax: Optional[Tensor], dtype: torch.dtype) -> None:
        self.held, self.scale, self.w_amax = held, scale, w_amax

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """For torch.compile, which passes the tensors inside."""
        return [name for name in ("held", "scale", "w_amax") if getattr(self, name) is not None], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["held"], inner.get("scale"), inner.get("w_amax"), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        weight = args[0] if args and isinstance(args[0], cls) else None
        is_whole = func is not _aten.as_strided.default or tuple(args[1]) == tuple(args[0].shape)
        if weight is not None and func in _ALIASES and is_whole:
            return cls(weight.held, weight.scale, weight.w_amax, weight.dtype)
        if weight is not None and func in _ZEROS:
            size = weight.shape if func is _ZEROS[0] else args[1]
            return torch.zeros(size, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} cannot read a weight that was gathered in FP8 (overcoat.fp8_all_gather): it has no 16-bit numbers "
            "while its layer trains. Call model.eval() to run the original forward, FSDPModule.reshard() to "
            "read or change the shards, or leave fp8_all_gather out"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


def is_gathered(linear: Linear) -> bool:
    """Whether these weights came in FP8: all of a stack do, or none."""
    return isinstance(linear.weights[0], GatheredWeight)


def gathered_operand(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`operand` (linear.py) of weights that came in FP8: (sum N, K) or (K, sum N) E4M3, their scale, their maximum."""
    first, rows = linear.weights[0], _rows(linear)
    if first.w_amax is None:
        raise ValueError(CHANGED)
    if rows[0].dtype != E4M3.dtype:
        return *stack_weights(rows, first.w_amax, transposed), first.w_amax
    return _stacked(rows, transposed), first.scale, first.w_amax


def _rows(linear: Linear) -> list[Tensor]:
    """What each weight holds, rows in the operand's order."""
    rows = [weight.held for weight in linear.weights]
    if not linear.orders:
        return rows
    as_bytes = torch.uint8 if rows[0].dtype == E4M3.dtype else rows[0].dtype  # 8-bit floats cannot be indexed
    return [
        each if order is None else order.take(each.view(as_bytes)).view(each.dtype)
        for each, order in zip(rows, linear.orders, strict=True)
    ]


def _stacked(rows: list[Tensor], transposed: bool) -> Tensor:
    return rows[0] if len(rows) == 1 and not transposed else stack_codes(rows, transposed)


def gathered_blocks(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor]:
    """`block_stack_weights` of weights that came in FP8, whose rows are multiples of 128."""
    if linear.weights[0].w_amax is not None:
        raise ValueError(CHANGED)
    rows = _rows(linear)
    if rows[0].dtype != E4M3.dtype:
        return block_stack_weights(rows, transposed)
    data = _stacked(rows, transposed)
    scales = [weight.scale for weight in linear.weights]
    scale = scales[0] if len(scales) == 1 else torch.cat(scales)
    if not transposed:
        return data, scale
    scale = scale[:, : blocks(data.shape[0])].t()
    return data, F.pad(scale, (0, padded_blocks(data.shape[1]) - scale.shape[1])).contiguous()
