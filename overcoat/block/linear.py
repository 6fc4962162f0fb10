"""The three GEMMs of a linear layer in FP8.

With T tokens, K in, N out (kernels/quantize.py has the layouts):

    y  = x W^T          x, W in E4M3, one scale each, found just in time
    dx = dy W           dy in the recipe's gradient format (E5M2)
    dW = dy^T x         x rebuilt from its saved 8-bit form, with the forward's scale

Weights that read the same input (q, k, v; gate, up) are stacked into one operand of one GEMM. Autograd saves the
parameters, never their FP8 copies: these are made just before their GEMM and freed after it. A small block makes all
its operands at once, since launches would take longer than their work (kernels/weights.py); they live for the whole
forward, and transposed for the whole backward: one byte per weight.

With `Recipe.linear_scaling="block"` operands have a scale per block: 1x128 along the summed axis for x and dy, 128x128
for W. Then the backward reuses no scale of the forward: the transposed layouts have their own (kernels/blockwise.py).

Gathered weights. Under FSDP2 with `fp8_all_gather` (distributed/fp8_all_gather.py) a `GatheredWeight` replaces the
parameter between the all-gather and its last use. To autograd it has the parameter's shape and dtype. It holds E4M3
codes, made from the shards with the scale of the stack; an op that would read it as a 16-bit weight is refused. If one
process holds all rows, nothing is sent, and it holds the 16-bit weight.

Adapters run beside the GEMMs (adapters.py).

Legend: T tokens, K in, N out of all stacked layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from overcoat.block.spec import Block, ForwardScales, Linear
from overcoat.formats import E4M3, Quantized
from overcoat.kernels.blockwise import (
    block_quantize,
    block_quantize_both,
    block_quantize_t,
    blocks,
)
from overcoat.kernels.gemm import block_gemm, gemm
from overcoat.kernels.groups import group_encode
from overcoat.kernels.quantize import amax, quantize, quantize_both, quantize_t
from overcoat.kernels.weights import (
    OPERANDS,
    block_stack_weights,
    numbers_of,
    padded_blocks,
    quantize_parameters,
    stack_codes,
    stack_operands,
    stack_weights,
)
from overcoat.recipe import Recipe

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
CHANGED = "Recipe.linear_scaling has changed since overcoat.fp8_all_gather: call it again after overcoat.convert"
_ZEROS = (_aten.zeros_like.default, _aten.new_zeros.default)


class GatheredWeight(Tensor):
    """A weight (N, K) held as E4M3 codes alone.

    Attributes:
        held: (N, K) E4M3, in the memory that FSDP2 gathered into; or the weight in 16 bits, if there is one shard.
        scale: 0-d FP32, shared by all weights of the stack; or one per block, (N / 128, L4) as in
            `block_stack_weights`; None for a single 16-bit shard with block scales.
        w_amax: max |weight| of the stack, 0-d FP32; None with block scales.
    """

    held: Tensor
    scale: Optional[Tensor]
    w_amax: Optional[Tensor]
    # Ops are handled in `__torch_dispatch__` alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, held: Tensor, scale: Optional[Tensor], w_amax: Optional[Tensor], dtype: torch.dtype
    ) -> GatheredWeight:
        """dtype: the dtype that FSDP2 would have gathered the weight in, and that of its gradient."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=dtype, device=held.device
        )
        return made

    def __init__(self, held: Tensor, scale: Optional[Tensor], w_amax: Optional[Tensor], dtype: torch.dtype) -> None:
        self.held, self.scale, self.w_amax = held, scale, w_amax

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Return the names of the inner tensors and the dtype, for torch.compile."""
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
            f"{func} cannot read a weight that was gathered in FP8 (overcoat.fp8_all_gather, overcoat.stream): it has "
            "no 16-bit numbers while its layer trains. Call model.eval() to run the original forward, "
            "FSDPModule.reshard() to read or change the shards, or leave fp8_all_gather or stream out"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


def is_gathered(linear: Linear) -> bool:
    """True if these weights were gathered in FP8. Either all weights of a stack are, or none."""
    return isinstance(linear.weights[0], GatheredWeight)


def gathered_operand(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `operand` returns, of gathered weights: (sum N, K) or (K, sum N) E4M3, scale, maximum."""
    first, rows = linear.weights[0], _rows(linear)
    if first.w_amax is None:
        raise ValueError(CHANGED)
    if rows[0].dtype != E4M3.dtype:
        return *stack_weights(rows, first.w_amax, transposed), first.w_amax
    return _stacked(rows, transposed), first.scale, first.w_amax


def _rows(linear: Linear) -> list[Tensor]:
    """Return the data of each weight, rows in the operand's order."""
    rows = [weight.held for weight in linear.weights]
    if not linear.orders:
        return rows
    as_bytes = torch.uint8 if rows[0].dtype == E4M3.dtype else rows[0].dtype  # 8-bit floats cannot be indexed
    return [
        each if order is None else order.take(each.view(as_bytes)).view(each.dtype)
        for each, order in zip(rows, linear.orders, strict=True)
    ]


def _stacked(rows: list[Tensor], transposed: bool) -> Tensor:
    if transposed or not (len(rows) == 1 or _adjoin(rows)):
        return stack_codes(rows, transposed)
    count, columns = sum([len(each) for each in rows]), rows[0].shape[1]
    return rows[0] if len(rows) == 1 else rows[0].as_strided((count, columns), (columns, 1))


def _adjoin(rows: list[Tensor]) -> bool:
    """True if matrices follow one another in memory, as those of a streamed layer do."""
    if torch.compiler.is_compiling():
        return False
    first, place = rows[0].untyped_storage()._cdata, rows[0].storage_offset()
    for each in rows:
        if each.untyped_storage()._cdata != first or each.storage_offset() != place or not each.is_contiguous():
            return False
        place += each.numel()
    return True


def gathered_blocks(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return what `block_stack_weights` returns, of gathered weights, whose rows are multiples of 128."""
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


# A block is small if weights * min(tokens, MANY) < SMALL: the host launches more slowly than the GPU computes. A block
# of hidden size 2048 (50 million weights) is small with any number of tokens, a 7B's (202 million) with 2,048. In
# larger blocks one byte per weight would add to the peak, and launches cost little.
SMALL, MANY = 2**39, 2**13


def stack_weights_of(linear: Linear) -> list[Tensor]:
    """Return the weights (N_i, K), rows in the operand's order."""
    if not linear.orders:
        return list(linear.weights)
    return [w if order is None else order.take(w) for w, order in zip(linear.weights, linear.orders, strict=True)]


def operand(linear: Linear, transposed: bool, amax: Optional[Tensor]) -> Sequence[Tensor]:
    """Return weights (N_i, K) as one E4M3 operand, (sum N, K) or (K, sum N); its 0-d scale; their 0-d maximum.

    amax: the maximum, if the forward has found it.
    """
    if linear.operand is not None:
        return linear.operand
    if is_gathered(linear):
        return gathered_operand(linear, transposed)
    weights = stack_weights_of(linear)
    if amax is None:
        return [each for (each,) in quantize_parameters(weights, [len(weights)])]
    return *stack_weights(weights, amax, transposed), amax


def block_operand(linear: Linear, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return weights (N_i, K) as one E4M3 operand in 128x128 blocks, (sum N, K) or (K, sum N), and the scales."""
    if is_gathered(linear):
        return gathered_blocks(linear, transposed)
    return block_stack_weights(stack_weights_of(linear), transposed)


def with_operands(block: Block, tokens: int, recipe: Recipe, cached: Optional[Sequence[ForwardScales]] = None) -> Block:
    """Return the block with all its FP8 weight operands if it is small, otherwise unchanged.

    cached: the forward's scales; given in the backward, which needs transposed operands.
    """
    linears = [linear for branch in block.branches for linear in (branch.in_proj, branch.out_proj)]
    if recipe.linear_scaling != "tensor" or len(linears) > OPERANDS or any(map(is_gathered, linears)):
        return block
    weights: list[Any] = []
    for linear in linears:
        weights += linear.weights
    size = sum([w.numel() for w in weights])
    # Sizes first: compiled code of a small model then has no guard on the number of tokens.
    is_large = size * MANY >= SMALL and size * tokens >= SMALL
    # Other types (DTensor) take the usual path, which refuses them: these ops check their first tensor only.
    if is_large or not {*map(type, weights)} <= {Tensor, Parameter}:
        return block
    stacks = [stack_weights_of(linear) for linear in linears]
    ordered, counts = [w for stack in stacks for w in stack], [len(stack) for stack in stacks]
    if cached is None:
        data, scales, amaxes = quantize_parameters(ordered, counts)
    else:
        maxima: list[Any] = [each for branch in cached for each in (branch.in_proj, branch.out_proj)]
        *data, numbers = stack_operands(ordered, counts, maxima, True)
        scales, amaxes = numbers_of(numbers), maxima
    made = zip(linears, data, scales, amaxes, strict=True)
    ready = iter([linear._replace(operand=operand) for linear, *operand in made])
    branches = [branch._replace(in_proj=next(ready), out_proj=next(ready)) for branch in block.branches]
    return block._replace(branches=tuple(branches))


# Fast accumulation in the backward's GEMMs: wgrad is 4 to 7% faster on a hot H200 (gemm.jsonl). Its error is 55 dB or
# more below a trained model's dgrad, and 48 dB (worst 41) below its wgrad over 8,192 tokens (accumulation.jsonl); FP8's
# own error is 17 to 27 dB below. It grows with the number of terms (for wgrad, tokens) and with their mean: for means
# of half the deviation it is 36 dB below over 8,192 tokens, 28 over 16,384 (docs/research/kernels.md).
FAST_DGRAD = True
FAST_WGRAD_TOKENS = 8192
# While models/recording.py records, each watcher's `saw` is called with the FP8 operands of every GEMM.
watchers: list[Any] = []


def _watch(kind: str, linear: Linear, codes: Tensor, scale: Tensor) -> None:
    if not torch.compiler.is_compiling():
        for watcher in watchers:
            watcher.saw(kind, linear.weights, codes, scale)


def stack_biases(linear: Linear) -> Optional[Tensor]:
    """Return one bias (sum N,) for the stacked weights, zeros where a layer has none; None if no layer has one."""
    weights, biases, orders, scale, *_ = linear
    if not linear.has_bias:
        return None
    orders = orders or (None,) * len(weights)
    stacked = [
        w.new_zeros(w.shape[0]) if b is None else b if order is None else order.take(b)
        for w, b, order in zip(weights, biases, orders, strict=True)
    ]
    bias = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
    return bias if scale == 1.0 else bias * scale


def linear_block_gemm(x: Quantized, linear: Linear, dtype: torch.dtype, residual: Optional[Tensor] = None) -> Tensor:
    """Return y = x W^T + bias + residual (T, N) of x (T, K) in 1x128 blocks and the stacked weights."""
    weight, scale = block_operand(linear, False)
    _watch("input", linear, x.data, x.scale)
    _watch("weight", linear, weight, scale)
    x_scale = x.scale if linear.scale == 1.0 else x.scale * linear.scale
    y = block_gemm(x.data, weight, x_scale, scale, True, stack_biases(linear), dtype)
    return y if residual is None else y.add_(residual)


def linear_gemm(
    x8: Tensor,
    x_scale: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    w_amax: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Return y = x W^T + bias + residual (T, N), and the stacked weights' maximum (0-d), for the backward.

    x8: (T, K) E4M3; x_scale: 0-d; w_amax: the maximum if already found.
    """
    w8, w_scale, w_amax = operand(linear, False, w_amax)
    _watch("input", linear, x8, x_scale)
    _watch("weight", linear, w8, w_scale)
    x_scale = x_scale if linear.scale == 1.0 else x_scale * linear.scale
    return gemm(x8, w8, x_scale, w_scale, stack_biases(linear), dtype, True, residual), w_amax


class LinearGrads(NamedTuple):
    """Gradients of a (stacked) linear layer: of its input, of each weight, of each bias (None where not needed)."""

    dx: Optional[Tensor]
    dweights: tuple[Optional[Tensor], ...]
    dbiases: tuple[Optional[Tensor], ...]


class Gradient(NamedTuple):
    """An output gradient (T, N) as FP8 operands of the two GEMMs that read it.

    data: (T, N), for dgrad; None once dgrad has run. transposed: (N, P), for wgrad; None if no weight needs a gradient.
    scale: 0-d, of both; with block scales, of `data`, and scale_t of `transposed`.
    sums: (N,) FP32, sums over the tokens, for biases; or None. dtype: that of the activations.
    """

    data: Optional[Tensor]
    transposed: Optional[Tensor]
    scale: Tensor
    sums: Optional[Tensor]
    dtype: torch.dtype
    scale_t: Optional[Tensor] = None


def quantize_gradient(
    dy: Tensor, linear: Linear, recipe: Recipe, dy_amax: Optional[Tensor] = None, want_weights: bool = True
) -> Gradient:
    """Return dy (T, N), times `Linear.scale`, in the recipe's gradient format; dy_amax: max |dy| if already found."""
    dy, factor, fmt = dy.contiguous(), linear.scale, recipe.grad_format
    sums = dy.sum(0, dtype=torch.float32) if linear.has_bias else None
    transposed = scale_t = None
    if recipe.linear_scaling == "block":
        if want_weights:
            data, scale, transposed, scale_t = block_quantize_both(dy, fmt)
        else:
            data, scale = block_quantize(dy, fmt)
    else:
        dy_amax = amax(dy) if dy_amax is None else dy_amax
        if want_weights:
            data, transposed, scale = quantize_both(dy, dy_amax, fmt)
        else:
            data, scale = quantize(dy, dy_amax, fmt)
    if factor != 1.0:
        scale, scale_t, sums = [None if x is None else x * factor for x in (scale, scale_t, sums)]
    return Gradient(data, transposed, scale, sums, dy.dtype, scale_t)


def quantize_blocks_of(dz: Tensor | Gradient, linear: Linear, recipe: Recipe) -> Tensor | Gradient:
    """Quantize dz now if scales are per block and no adapters read dz, so that its 16-bit copy is freed early."""
    if isinstance(dz, Gradient) or recipe.linear_scaling != "block" or linear.adapters:
        return dz
    return quantize_gradient(dz, linear, recipe)


def dgrad(d: Gradient, linear: Linear, w_amax: Optional[Tensor]) -> Tensor:
    """Return dx = dy W (T, K) of the stacked weights; w_amax: their maximum, None with block scales."""
    assert d.data is not None
    _watch("gradient", linear, d.data, d.scale)
    if w_amax is None:
        weight, scale = block_operand(linear, True)
        return block_gemm(d.data, weight, d.scale, scale, True, None, d.dtype)
    w_t, w_scale, _ = operand(linear, True, w_amax)
    return gemm(d.data, w_t, d.scale, w_scale, None, d.dtype, FAST_DGRAD)


def wgrad(d: Gradient, x_t: Quantized, dtype: torch.dtype) -> Tensor:
    """Return dW = dy^T x (N, K), with x as transposed operand (K, P)."""
    assert d.transposed is not None
    if d.scale_t is not None:
        return block_gemm(d.transposed, x_t.data, d.scale_t, x_t.scale, False, None, dtype)
    fast = d.transposed.shape[1] <= FAST_WGRAD_TOKENS
    return gemm(d.transposed, x_t.data, d.scale, x_t.scale, None, dtype, fast)


def linear_backward(
    dy: Tensor | Gradient,
    x_t: Optional[Quantized],
    linear: Linear,
    w_amax: Optional[Tensor],
    recipe: Recipe,
    dy_amax: Optional[Tensor] = None,
) -> LinearGrads:
    """Return all gradients of a linear layer from dy (T, N), in 16 bits or quantized.

    x_t: the input as transposed E4M3 operand (K, P), or None if no weight needs a gradient.
    dy_amax: max |dy| if already found.
    """
    d = dy if isinstance(dy, Gradient) else quantize_gradient(dy, linear, recipe, dy_amax, x_t is not None)
    dx = dgrad(d, linear, w_amax)
    stacked = None if x_t is None else wgrad(d, x_t, linear.weights[0].dtype)
    return LinearGrads(dx, *split_gradients(stacked, d.sums, linear))


def split_gradients(
    dweight: Optional[Tensor], sums: Optional[Tensor], linear: Linear
) -> tuple[tuple[Optional[Tensor], ...], tuple[Optional[Tensor], ...]]:
    """Return the gradients of each weight and bias, from dweight (sum N, K) and sums (sum N,) of the stack."""
    weights, biases, orders, *_ = linear
    if len(weights) == 1 and not orders:
        return (dweight,), (None if sums is None or biases[0] is None else sums.to(biases[0].dtype),)
    orders = orders or (None,) * len(weights)
    sizes = [w.shape[0] if order is None else order.count(w) for w, order in zip(weights, orders, strict=True)]

    def parts(stacked: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        if stacked is None:
            return (None,) * len(sizes)
        split = stacked.split_with_sizes(sizes)
        return tuple([x if order is None else order.put_back(x) for x, order in zip(split, orders, strict=True)])

    pairs = zip(biases, parts(sums), strict=True)
    dbiases = tuple([None if b is None or s is None else s.to(b.dtype) for b, s in pairs])
    return parts(dweight), dbiases


class OutputSaved(NamedTuple):
    """Tensors that an output layer saves: scales (None with block scales). The mixer saves or recomputes its input."""

    x_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def linear_forward(
    x: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    recipe: Recipe,
    x_amax: Optional[Tensor] = None,
    w_amax: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> tuple[Tensor, OutputSaved]:
    """Return x W^T + bias + residual (T, N) in `dtype`, x (T, K); x_amax, w_amax: maxima if already found."""
    if recipe.linear_scaling == "block":
        y = linear_block_gemm(Quantized(*block_quantize(x, "e4m3")), linear, dtype, residual)
        return y, OutputSaved(None, None)
    x8, x_scale = quantize(x, amax(x) if x_amax is None else x_amax, "e4m3")
    y, w_amax = linear_gemm(x8, x_scale, linear, dtype, w_amax, residual)
    return y, OutputSaved(x_scale, w_amax)


def rebuild_input_t(x: Tensor, scale: Optional[Tensor]) -> Quantized:
    """Return x (T, K) in 16 bits as transposed E4M3 operand (K, P), with the forward's scale if one was saved."""
    if scale is None:
        return Quantized(*block_quantize_t(x, "e4m3"))
    return Quantized(quantize_t(x, scale, "e4m3"), scale)


class InputSaved(NamedTuple):
    """Tensors saved by linear layers that read the residual stream itself: their input in 8-bit groups, scales."""

    codes: Tensor
    group_amax: Tensor
    scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def stream_linear_forward(
    x: Tensor, in_proj: Linear, recipe: Recipe, w_amax: Optional[Tensor] = None
) -> tuple[Tensor, InputSaved]:
    """Return x (T, H) times the stacked weights, (T, sum N), and the saved tensors; w_amax: as in `linear_forward`."""
    codes, group_amax = group_encode(x, recipe.kept_format, recipe.group_size)
    y, scales = linear_forward(x, in_proj, x.dtype, recipe, w_amax=w_amax)
    return y, InputSaved(codes, group_amax, *scales)
