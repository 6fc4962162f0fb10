"""A weight that came over the network in FP8 (models/gather.py), and how the products of a linear layer read it.

Under FSDP2 it stands in the parameter's place between the all-gather and the end of its use. To autograd it has the
parameter's shape and dtype, so its gradient has them too. Its numbers are E4M3 codes, made from the shards with the
scale of the stack; whatever would read it as a weight in 16 bits is refused.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.block.spec import Linear
from overcoat.formats import E4M3
from overcoat.kernels.block_weights import padded_blocks
from overcoat.kernels.blockwise import blocks
from overcoat.kernels.stack import stack_codes

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
CHANGED = "Recipe.linear_scaling has changed since overcoat.fp8_all_gather: call it again after overcoat.convert"
_ZEROS = (_aten.zeros_like.default, _aten.new_zeros.default)


class GatheredWeight(Tensor):
    """A weight (N, K) of which E4M3 codes are all there is.

    Attributes:
        codes: (N, K) E4M3, in the memory that FSDP2 gathered into.
        scale: 0-d FP32, of the weights that are stacked with it; or of each block, (N / 128, L4) as
            `block_stack_weights` has them.
        w_amax: their maximum, 0-d FP32; None with block scales.
    """

    codes: Tensor
    scale: Tensor
    w_amax: Optional[Tensor]
    # The plain functions of `Tensor`: all that happens to it happens in `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, w_amax: Optional[Tensor], dtype: torch.dtype) -> GatheredWeight:
        """dtype: what the weight would have travelled in, and its gradient's."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor, w_amax: Optional[Tensor], dtype: torch.dtype) -> None:
        self.codes, self.scale, self.w_amax = codes, scale, w_amax

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """For torch.compile, which passes the tensors inside."""
        return ["codes", "scale", *(["w_amax"] if self.w_amax is not None else [])], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["codes"], inner["scale"], inner.get("w_amax"), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        weight = args[0] if args and isinstance(args[0], cls) else None
        if weight is not None and func in _ALIASES:
            return cls(weight.codes, weight.scale, weight.w_amax, weight.dtype)
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
    first = linear.weights[0]
    if first.w_amax is None:
        raise ValueError(CHANGED)
    return _stacked(linear, transposed), first.scale, first.w_amax


def _stacked(linear: Linear, transposed: bool) -> Tensor:
    codes = [weight.codes for weight in linear.weights]
    if linear.orders:
        codes = [
            each if order is None else order.take(each.view(torch.uint8)).view(E4M3.dtype)
            for each, order in zip(codes, linear.orders, strict=True)
        ]
    if len(codes) == 1 and not transposed:
        return codes[0]
    return stack_codes(codes, transposed)


def gathered_blocks(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor]:
    """`block_stack_weights` of weights that came in FP8, whose rows are multiples of 128."""
    if linear.weights[0].w_amax is not None:
        raise ValueError(CHANGED)
    data = _stacked(linear, transposed)
    scales = [weight.scale for weight in linear.weights]
    scale = scales[0] if len(scales) == 1 else torch.cat(scales)
    if not transposed:
        return data, scale
    scale = scale[:, : blocks(data.shape[0])].t()
    return data, F.pad(scale, (0, padded_blocks(data.shape[1]) - scale.shape[1])).contiguous()
