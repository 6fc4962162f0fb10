"""A whole decoder block as one autograd node: one loop over its branches forward, one backward.

One node saves passes over memory that separate nodes could not: the gradients of gate and up, and of q, k and v, are
written straight in the two FP8 layouts that the GEMMs read, and never exist in 16 bits; q and k are rotated in place; a
branch's result is added to the residual inside the next norm.

With `Recipe.checkpoint = "block"` the forward saves only the block's input in 8-bit groups (0.5 U; U as in memory.py)
and `ForwardScales`. The backward decodes the input, recomputes the forward, then runs the branches' backwards in
reverse. This is cheaper than `torch.utils.checkpoint`, which saves 1 U, finds all maxima again, and recomputes the
block's result, which nothing reads.

`saved` is a stack: the forward appends the tensors of each step, the backward pops them, so memory is freed as soon as
it has been read. With `Recipe.offload_blocks` they wait in host memory (offload.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from overcoat.block.adapters import (
    FactorGradients,
    adapters_backward_,
    add_adapters_,
    before_factors,
    has_factors,
    kept_input,
)
from overcoat.block.linear import InputSaved, stream_linear_forward, with_operands
from overcoat.block.norm import (
    NormLinearSaved,
    NormSaved,
    in_proj_backward,
    input_gradient,
    norm_after_forward,
    norm_linear_forward,
)
from overcoat.block.offload import offload_active, run_offloaded
from overcoat.block.spec import (
    Adapter,
    Block,
    Branch,
    ForwardScales,
    Linear,
    Tables,
    tensors_of,
    with_tensors,
    without_tensors,
)
from overcoat.kernels.groups import group_decode, group_encode
from overcoat.kernels.op import check_dispatcher_once, check_no_transforms, first_order
from overcoat.memory import Part, release_saved, save_parts
from overcoat.recipe import Recipe


@check_dispatcher_once
def block_forward(
    x: Tensor, block: Block, tables: Tables, recipe: Recipe, cached: Optional[Sequence[ForwardScales]] = None
) -> tuple[Tensor, list[Any]]:
    """Return the block's result (T, H) for x (T, H), and the saved tensors.

    cached: scales of the first forward, given in a recomputation. Then the last output layer's GEMM is skipped, and the
    returned tensor is not the block's result.
    """
    saved: list[Any] = []
    block = with_operands(block, len(x), recipe) if cached is None else block
    source, y = x, None  # y: a branch's result that is still to be added to x
    for index, branch in enumerate(block.branches):
        scales = ForwardScales() if cached is None else cached[index]
        if block.parallel:
            _, z = _enter(source, None, branch, recipe, saved, scales)
        else:
            x, z = _enter(x, y, branch, recipe, saved, scales)
            y = None
        inside = branch.mixer.inside(z, branch, tables, recipe, saved)
        del z  # free 3 U: q, k and v in 16 bits
        is_last = block.parallel or index == len(block.branches) - 1
        # The residual is added by the output layer's GEMM (adds), or by the next norm in its own pass.
        adds = branch.norm_after_residual or (branch.post is None and (is_last or recipe.linear_scaling == "tensor"))
        if cached is not None and is_last and branch.post is None:
            branch.mixer.recompute(inside, branch, recipe, saved, scales)
            continue
        y = branch.mixer.output(inside, branch, recipe, saved, scales, x if adds else None)
        del inside
        if branch.post is not None:
            x, entry = norm_after_forward(
                y, torch.zeros_like(x) if branch.norm_after_residual else x, branch.post, recipe
            )
            saved.append(entry)
            y = None
        elif adds:
            x, y = y, None
    return x, saved


def _enter(
    x: Tensor, y: Optional[Tensor], branch: Branch, recipe: Recipe, saved: list[Any], cached: ForwardScales
) -> tuple[Tensor, Tensor]:
    """Return x, or x + y if y is given, and z (T, sum N): a branch's first layers on its norm. Appends to `saved`."""
    entry: Any
    if branch.pre is None:
        x = x if y is None else x + y
        z, entry = stream_linear_forward(x, branch.in_proj, recipe, cached.in_proj)
    else:
        x, z, entry = norm_linear_forward(x, y, branch.pre, branch.in_proj, recipe, cached.in_proj)
    saved.append(entry)
    if branch.in_proj.adapters:
        add_adapters_(z, branch.in_proj, kept_input(entry, branch.pre, recipe, z.dtype))
    return x, z


@check_dispatcher_once
def block_backward(
    dy: Tensor, saved: list[Any], block: Block, tables: Tables, recipe: Recipe, needs_grad: Block
) -> tuple[Tensor, list[Branch]]:
    """Return the gradients of the block's input (T, H) and of its branches' parameters.

    saved: popped from its end. A step's saved tensors are freed when its gradients exist, and these when the next step
    has read them. The peak is 17 U (Llama-2-7B, 4 x 2048 tokens, weight gradients included); if all lived to the end,
    29 U.
    needs_grad: for each parameter, in its place, True if it needs a gradient (frozen weights do not).
    """
    block = with_operands(block, len(dy), recipe, _scales(saved, block))
    dx, dx_amax, gradients = dy, None, []
    for branch, needs in zip(reversed(block.branches), reversed(needs_grad.branches), strict=True):
        d, d_amax, dpost = dx, dx_amax, None
        if block.parallel:
            d, d_amax = dy, None
        if branch.post is not None:
            d, dpost, d_amax = input_gradient(d, None, saved.pop(), branch.post, recipe)
            if branch.norm_after_residual:
                dx = d
        dz, d_out_proj, d_qk_norm = branch.mixer.backward(
            d, d_amax, saved, branch, tables, recipe, any(needs.out_proj.weights)
        )
        del d
        entry, in_proj_needs_grad = saved.pop(), any(needs.in_proj.weights)
        dora = FactorGradients()
        if branch.in_proj.adapters and has_factors(branch.in_proj):
            inputs = kept_input(entry, branch.pre, recipe, dz.dtype)
            dz, dora = before_factors(dz, branch.in_proj, inputs, entry.w_amax, recipe)
        in_proj = in_proj_backward(dz, entry, branch.pre, branch.in_proj, recipe, in_proj_needs_grad)
        assert in_proj.dx is not None
        adapters: tuple[Adapter, ...] = ()
        if branch.in_proj.adapters:
            inputs = kept_input(entry, branch.pre, recipe, in_proj.dx.dtype)
            adapters = adapters_backward_(dz, in_proj.dx, branch.in_proj, inputs, dora.factors)
            del inputs
        del dz
        if branch.pre is None:
            dx, dpre, dx_amax = dx + in_proj.dx, None, None
        else:
            dx, dpre, dx_amax = input_gradient(in_proj.dx, dx, entry, branch.pre, recipe)
        d_in_proj = Linear(in_proj.dweights, dora.biases or in_proj.dbiases, adapters=adapters)
        del in_proj, entry
        gradients.append(Branch(branch.mixer, d_in_proj, d_out_proj, d_qk_norm, dpre, dpost))
    return dx, gradients[::-1]


def _kinds(block: Block) -> tuple[list[type[Any]], list[str]]:
    """Return the NamedTuples that `block_forward` saves, in order, and their names in the memory report."""
    kinds: list[type[Any]] = []
    names: list[str] = []
    for branch in block.branches:
        *before, after = branch.mixer.names
        kinds += (InputSaved if branch.pre is None else NormLinearSaved, *branch.mixer.saved)
        names += before
        if branch.post is not None:
            kinds.append(NormSaved)
            names.append(after)
    return kinds, names


def _unflatten(tensors: Sequence[Any], kinds: Sequence[type[Any]]) -> list[Any]:
    """Return NamedTuples of the given types, filled from the flat list of their tensors."""
    parts: list[Any] = []
    first = 0
    for kind in kinds:
        last = first + len(kind._fields)
        parts.append(kind(*tensors[first:last]))
        first = last
    return parts


def _scales(saved: Sequence[Any], block: Block) -> list[ForwardScales]:
    """Return the scales that a recomputation reuses."""
    found, rest = [], list(saved)
    for branch in reversed(block.branches):
        if branch.post is not None:
            rest.pop()
        activation, out_proj = branch.mixer.scales(rest)
        del rest[-len(branch.mixer.saved) :]
        found.append(ForwardScales(rest.pop().w_amax, activation, out_proj))
    return found[::-1]


class _Block(torch.autograd.Function):
    """A whole block; saves what its branches save, or with `Recipe.checkpoint` its input in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Optional[Tensor],
        constants: Block,
        recipe: Recipe,
        *parameters: Optional[Tensor],
    ) -> Tensor:
        block, shape = with_tensors(constants, parameters), x.shape
        x = x.contiguous().flatten(0, -2)
        y, saved = block_forward(x, block, Tables(cos, sin, mask), recipe)
        ctx.constants, ctx.recipe, ctx.dtype = constants, recipe, x.dtype
        inputs = ("block", Tables._fields, (cos, sin, mask, *parameters))  # saved parameters get no field name
        parts: list[Part]
        if recipe.checkpoint == "block":
            codes, group_amax = group_encode(x, recipe.kept_format, recipe.group_size)
            parts = [("block", ("codes", "group_amax"), (codes, group_amax))]
            parts += [("block", ForwardScales._fields, scales) for scales in _scales(saved, block)]
        else:
            ctx.kinds, names = _kinds(constants)
            named = zip(names, ctx.kinds, saved, strict=True)
            parts = [(name, kind._fields, entry) for name, kind, entry in named]
        save_parts(ctx, inputs, *parts)
        # Not a view: its hooks would be lost by an in-place change, and FSDP2 warns of such results.
        return y if y.shape == shape else torch.ops.aten._unsafe_view(y, shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        tensors, constants, recipe = ctx.saved_tensors, ctx.constants, ctx.recipe
        release_saved(ctx)
        needs_grad = ctx.needs_input_grad[6:]
        count = 3 + len(needs_grad)
        block, needs = with_tensors(constants, tensors[3:count]), with_tensors(constants, needs_grad)
        tables, own = Tables(*tensors[:3]), tensors[count:]
        del tensors
        if recipe.checkpoint == "block":
            x = group_decode(*own[:2], recipe.kept_format, recipe.group_size, ctx.dtype)
            cached = _unflatten(own[2:], [ForwardScales] * len(block.branches))
            saved = block_forward(x, block, tables, recipe, cached)[1]
            del x
        else:
            saved = _unflatten(own, ctx.kinds)
        del own  # now `saved` alone holds the tensors, and `block_backward` frees what it has read
        dx, gradients = block_backward(dy.contiguous().flatten(0, -2), saved, block, tables, recipe, needs)
        return (dx.view(dy.shape), None, None, None, None, None, *tensors_of(gradients))


def run_block(x: Tensor, block: Block, tables: Tables, recipe: Recipe, offload: Optional[int] = None) -> Tensor:
    """Run one decoder block on tokens x (T, H) or (B, S, H) as one autograd node; the result has x's shape.

    Saves 5.8 U in Llama-2-7B, or with `Recipe.checkpoint = "block"` 0.5 U and recomputes the rest.

    offload: blocks that the copy of the saved tensors to the host may overlap; 0: this block is not offloaded; None: no
        block of the model is.

    Raises:
        ValueError: x has no tokens; cos and sin do not have as many rows as x has positions; or they have 2^31 elements
            or more, beyond the kernels' 32-bit offsets.
    """
    check_no_transforms()
    if not x.numel():
        raise ValueError(f"a block's input has the shape {tuple(x.shape)}: leave out batches without tokens")
    if max(tables.cos.numel(), tables.sin.numel()) >= 2**31:
        raise ValueError(f"cos and sin have the shape {tuple(tables.cos.shape)}: give them fewer than 2^31 elements")
    # Token t uses row t % P of the tables. P must be S, B * S or 1.
    positions = len(tables.cos)
    if x.dim() == 3 and positions != x.shape[1] and positions != x.shape[:2].numel() and positions != 1:
        raise ValueError(f"position_ids are {positions} positions, but the input has {tuple(x.shape[:-1])} tokens")
    parameters = tensors_of(block.branches)
    run = functools.partial(_Block.apply, x, *tables, without_tensors(block), recipe, *parameters)
    if offload is None or not offload_active(offload, x):
        return run()
    return run_offloaded(run, 3 + len(parameters), offload)
