"""A whole decoder block as one autograd node: one loop over its branches forward, one backward.

Neighbours in a block save passes over memory that separate autograd nodes cannot: the gradients of gate and up, and of
q, k and v, are written straight into the two FP8 layouts that the products read, and never exist in 16 bits; q and k
are rotated in place; a branch's result is added to the residual inside the next norm.

With `Recipe.checkpoint = "block"` the forward keeps the block's input in 8-bit groups (0.5 U) and `ForwardScales`. The
backward decodes the input, runs the forward again, and then the branches' backwards in reverse. Cheaper than
`torch.utils.checkpoint`, which keeps 1 U, finds all maxima again, and computes the block's result a second time only to
throw it away.

What is saved is a stack: the forward appends what each step keeps, the backward takes it from the end, so that memory
is free as soon as it has been read. With `Recipe.offload_blocks` it waits in host memory (offload.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from overcoat.block.linear import (
    InputSaved,
    adapters_backward_,
    add_adapters_,
    kept_input,
    stream_linear_forward,
    with_operands,
)
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
    """x (T, H) -> x (T, H), and what is saved. known: a recomputation's; where nothing reads a result it is not
    computed, and what is returned is not the block's."""
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
        del z  # 3 U of q, k and v in 16 bits, as long as somebody knows them
        is_last = block.parallel or index == len(block.branches) - 1
        # The product adds x, or the next norm in its own pass.
        adds = branch.norm_after_residual or (branch.post is None and (is_last or recipe.linear_scaling == "tensor"))
        if cached is not None and is_last and branch.post is None:
            branch.mixer.recompute(inside, branch, recipe, saved, scales)
            continue
        y = branch.mixer.output(inside, branch, recipe, saved, scales, x if adds else None)
        del inside
        if branch.post is not None:
            x, kept = norm_after_forward(
                y, torch.zeros_like(x) if branch.norm_after_residual else x, branch.post, recipe
            )
            saved.append(kept)
            y = None
        elif adds:
            x, y = y, None
    return x, saved


def _enter(
    x: Tensor, y: Optional[Tensor], branch: Branch, recipe: Recipe, saved: list[Any], cached: ForwardScales
) -> tuple[Tensor, Tensor]:
    """x plus y, if given, and the stacked linear layers of its norm."""
    kept: Any
    if branch.pre is None:
        x = x if y is None else x + y
        z, kept = stream_linear_forward(x, branch.in_proj, recipe, cached.in_proj)
    else:
        x, z, kept = norm_linear_forward(x, y, branch.pre, branch.in_proj, recipe, cached.in_proj)
    saved.append(kept)
    if branch.in_proj.adapters:
        add_adapters_(z, branch.in_proj, kept_input(kept, branch.pre, recipe, z.dtype))
    return x, z


@check_dispatcher_once
def block_backward(
    dy: Tensor, saved: list[Any], block: Block, tables: Tables, recipe: Recipe, needs_grad: Block
) -> tuple[Tensor, list[Branch]]:
    """Gradients of the block's input and of its branches' parameters.

    saved: emptied from its end: what a step has kept is free when its gradients are there, and so are these when the
    step before has read them. At its fullest moment a block's backward holds 17 U (in Llama-2-7B, at 4 x 2048 tokens,
    gradients of its weights among them); if all lived to the end, it would be 29.
    wanted: in the place of each parameter whether it wants a gradient (frozen weights have none).
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
        kept, in_proj_needs_grad = saved.pop(), any(needs.in_proj.weights)
        in_proj = in_proj_backward(dz, kept, branch.pre, branch.in_proj, recipe, in_proj_needs_grad)
        assert in_proj.dx is not None
        adapters: tuple[Adapter, ...] = ()
        if branch.in_proj.adapters:
            inputs = kept_input(kept, branch.pre, recipe, in_proj.dx.dtype)
            adapters = adapters_backward_(dz, in_proj.dx, branch.in_proj, inputs)
            del inputs
        del dz
        if branch.pre is None:
            dx, dpre, dx_amax = dx + in_proj.dx, None, None
        else:
            dx, dpre, dx_amax = input_gradient(in_proj.dx, dx, kept, branch.pre, recipe)
        d_in_proj = Linear(in_proj.dweights, in_proj.dbiases, adapters=adapters)
        del in_proj, kept
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
    """NamedTuples from the flat list of their tensors."""
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
        qk_norm, out_proj = branch.mixer.scales(rest)
        del rest[-len(branch.mixer.saved) :]
        found.append(ForwardScales(rest.pop().w_amax, qk_norm, out_proj))
    return found[::-1]


class _Block(torch.autograd.Function):
    """A whole block; keeps what its branches keep, or with `Recipe.checkpoint` its input in 8 bits."""

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
        inputs = ("block", Tables._fields, (cos, sin, mask, *parameters))  # what is kept of parameters has no name
        parts: list[Part]
        if recipe.checkpoint == "block":
            codes, group_amax = group_encode(x, recipe.kept_format, recipe.group_size)
            parts = [("block", ("codes", "group_amax"), (codes, group_amax))]
            parts += [("block", ForwardScales._fields, scales) for scales in _scales(saved, block)]
        else:
            ctx.kinds, names = _kinds(constants)
            named = zip(names, ctx.kinds, saved, strict=True)
            parts = [(name, kind._fields, kept) for name, kind, kept in named]
        save_parts(ctx, inputs, *parts)
        # Not a view, whose hooks are lost when somebody changes it in place: FSDP2 warns of such results.
        return y if y.shape == shape else torch.ops.aten._unsafe_view(y, shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        tensors, constants, recipe = ctx.saved_tensors, ctx.constants, ctx.recipe
        release_saved(ctx)
        needs_grad = ctx.needs_input_grad[6:]
        count = 3 + len(needs_grad)
        block, needs = with_tensors(constants, tensors[3:count]), with_tensors(constants, needs_grad)
        tables, kept = Tables(*tensors[:3]), tensors[count:]
        del tensors
        if recipe.checkpoint == "block":
            x = group_decode(*kept[:2], recipe.kept_format, recipe.group_size, ctx.dtype)
            cached = _unflatten(kept[2:], [ForwardScales] * len(block.branches))
            saved = block_forward(x, block, tables, recipe, cached)[1]
            del x
        else:
            saved = _unflatten(kept, ctx.kinds)
        del kept  # `block_backward` frees what it has read
        dx, gradients = block_backward(dy.contiguous().flatten(0, -2), saved, block, tables, recipe, needs)
        return (dx.view(dy.shape), None, None, None, None, None, *tensors_of(gradients))


def run_block(x: Tensor, block: Block, tables: Tables, recipe: Recipe, offload: Optional[int] = None) -> Tensor:
    """One decoder block on tokens x (T, H) or (B, S, H) as one autograd node; the result has x's shape.

    Keeps 5.8 U in Llama-2-7B, or with `Recipe.checkpoint = "block"` 0.5 U, and recomputes the rest.

    offload: blocks whose forward the copy of that to host memory may take, 0: it stays on the device; None in a model
        of which no block's goes.

    Raises:
        ValueError: no tokens, tables of others, or tables that the kernels' 32-bit offsets do not reach.
    """
    check_no_transforms()
    if not x.numel():
        raise ValueError(f"a block's input has the shape {tuple(x.shape)}: leave batches without tokens out")
    if max(tables.cos.numel(), tables.sin.numel()) >= 2**31:
        raise ValueError(f"cos and sin have the shape {tuple(tables.cos.shape)}: give them fewer than 2^31 elements")
    # A token's angles are in row (token % P). Rows of x say how many there are: a row's tokens, or all, or one for all.
    positions = len(tables.cos)
    if x.dim() == 3 and positions != x.shape[1] and positions != x.shape[:2].numel() and positions != 1:
        raise ValueError(f"position_ids are {positions} positions where the input is of {tuple(x.shape[:-1])} tokens")
    parameters = tensors_of(block.branches)
    run = functools.partial(_Block.apply, x, *tables, without_tensors(block), recipe, *parameters)
    if offload is None or not offload_active(offload, x):
        return run()
    return run_offloaded(run, 3 + len(parameters), offload)
