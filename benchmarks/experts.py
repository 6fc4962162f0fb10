"""The expert branch of a decoder layer alone: x + experts(norm(x)), its router included, in front of `layer`'s clock.

    overcoat                  `overcoat.convert` of the layer, the branch as that layer runs it
    bf16 IMPLEMENTATION ...   transformers' branch under one of its `experts_implementation`s
    torchao fp8 rowwise       torchao's grouped GEMMs in such an implementation of ours, with groups filled up to 16
                              rows, as it wants them

"compile" is torch.compile of the branch. transformers downloads the kernels of sonicmoe and deepgemm from the hub.

A table of its own has the grouped GEMMs of a step, with that step's operands, beside `torch._scaled_grouped_mm` with
scales for each row: times of the device alone. PyTorch's take rows that are gathered before them, in their time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import overcoat
from benchmarks.contestants import Block
from benchmarks.kernels import Call, Recorder
from benchmarks.rows import Column, Row, decimals
from benchmarks.timing import time_ms
from overcoat import Recipe
from overcoat.kernels.grouped import Routing, grouped_gemm, grouped_wgrad, route
from overcoat.models.decoder import as_they_are
from overcoat.models.family import Modules, decoder_layers, family_of


class Way(NamedTuple):
    """How an expert branch is run. experts: transformers' implementation; recipe: ours; needs: packages."""

    experts: str = "grouped_mm"
    recipe: Recipe | None = None
    is_compiled: bool = False
    needs: tuple[str, ...] = ()


WAYS = {
    "overcoat": Way(recipe=Recipe()),
    "overcoat leanest": Way(recipe=Recipe.leanest()),
    "bf16 eager": Way("eager"),
    "bf16 grouped_mm": Way(),
    "bf16 grouped_mm, compile": Way(is_compiled=True),
    "bf16 sonicmoe": Way("sonicmoe", needs=("kernels",)),
    "bf16 deepgemm": Way("deepgemm", needs=("kernels",)),
    "torchao fp8 rowwise": Way("torchao", needs=("torchao",)),
    "torchao fp8 rowwise, compile": Way("torchao", is_compiled=True, needs=("torchao",)),
}
PRODUCT_COLUMNS = (
    Column("ms", "ms", decimals(3)),
    Column("TFLOP/s", "flops_per_second", decimals(0, 1e-12)),
    Column("torch ms", "torch_ms", decimals(3)),
    Column("torch/ours", "ratio", decimals(2)),
)
ALIGNED = 16  # rows of a group


def torchao_experts(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts of x (T, H), in the form of transformers' `ExpertsInterface`, with torchao's grouped GEMMs."""
    training = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    routing = Routing(*route(index, experts.num_experts, ALIGNED))
    ends, owner = routing.bounds[1:] * ALIGNED, routing.experts.clamp(max=experts.num_experts - 1).long()
    here, owner = (routing.tokens >= 0)[:, None], owner.repeat_interleave(ALIGNED)

    def linear(a: Tensor, name: str) -> Tensor:
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        weight = weight if experts.is_transposed else weight.mT
        if weight.stride(-2) != 1:  # it takes columns alone
            weight = weight.mT.contiguous().mT
        y: Tensor = training._to_fp8_rowwise_then_scaled_grouped_mm(
            a, weight, ends, pad_token_groups_for_grouped_mm=False
        )
        return y if bias is None else y + bias[owner]

    z = linear(torch.where(here, x[routing.tokens.clamp(min=0).long()], 0), "gate_up_proj")
    y = linear(torch.where(here, experts._apply_gate(z), 0), "down_proj")
    return (y[routing.slots.long()] * weights[..., None]).sum(1).to(x.dtype)


class ExpertBranch(nn.Module):
    """The branch as its layer runs it; with a recipe that layer is a converted one."""

    def __init__(self, layer: Any, modules: Modules, recipe: Recipe | None) -> None:
        super().__init__()
        self.norm, self.experts = modules.pre, modules.owner
        self.run: Callable[[Tensor], Tensor] = self.own
        if recipe is not None:
            family = layer.overcoat_family
            self.run = lambda x: as_they_are(modules, family, x, {}, (), recipe)

    def own(self, x: Tensor) -> Tensor:
        y = self.experts(self.norm(x))
        return y[0] if isinstance(y, tuple) else y  # gpt-oss returns the router's scores as well

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H) -> (B, S, H)."""
        return x + self.run(x)


def make_branch(name: str, model: Any) -> Block:
    """The contestant `name` of `WAYS`, made out of `model` of one layer, which it may change. ValueError: the layer
    has no experts, or ours leaves it alone."""
    way, (layer,) = WAYS[name], decoder_layers(model).values()
    family = family_of(layer)
    modules = next((each for each in family.branches(layer, 1) if each.mixer is None), None) if family else None
    if modules is None:
        raise ValueError(f"{type(layer).__name__} has no branch of experts")
    if way.experts == "torchao":
        importlib.import_module("transformers.integrations.moe").ExpertsInterface.register("torchao", torchao_experts)
    model.set_experts_implementation(way.experts)
    if way.recipe is not None and (report := overcoat.convert(model, way.recipe)).left_alone:
        raise ValueError(f"not converted:\n{report}")
    branch = ExpertBranch(layer, modules, way.recipe).train()
    if way.is_compiled:
        branch.compile()

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in branch.named_parameters() if p.grad is not None}

    return Block(branch, branch, gradients)


@torch.no_grad()
def largest_load(block: Block, x: Tensor) -> float:
    """Return the tokens of the expert that has the most, divided by the mean."""
    chosen: list[Tensor] = []
    routers = [module for name, module in block.layer.named_modules() if name in ("experts.gate", "experts.router")]
    handles = [each.register_forward_hook(lambda *given: chosen.append(given[-1][-1])) for each in routers]
    block.layer.own(x)  # type: ignore[operator]
    for handle in handles:
        handle.remove()
    counts = chosen[0].flatten().bincount(minlength=len(routers[0].weight)).float()
    return float(counts.max() / counts.mean())


# ---- grouped GEMMs ---------------------------------------------------------------------------------------------------


def grouped_calls(block: Block, x: Tensor, dy: Tensor) -> dict[str, Call]:
    """Return the grouped GEMMs of a step of our branch with their arguments, by what they are for."""
    with Recorder() as recorder:
        block.call(x).backward(dy)
    calls = [call for call in recorder.calls.values() if call.op in (grouped_gemm, grouped_wgrad)]
    names = ("gate, up", "down", "down dgrad", "down wgrad", "gate, up wgrad", "gate, up dgrad")
    return dict(zip(names, calls, strict=True))


def measure_product(call: Call) -> Row:
    """Time one grouped GEMM, ours and PyTorch's with the same operands."""
    pairs, flops = product_size(call)
    ours, theirs = time_ms(call.run), time_ms(torchs(call))
    return {
        **ours, "pairs": pairs, "flops_per_second": flops / ours["ms"] * 1e3, "torch_ms": theirs["ms"],
        "ratio": theirs["ms"] / ours["ms"],
    }  # fmt: skip


def product_size(call: Call) -> tuple[int, float]:
    """Return how many pairs of a token and an expert a product has, and its FLOP."""
    a, b, *rest = call.arguments
    if call.op is grouped_wgrad:
        pairs = a.shape[1] - int((a.view(torch.uint8) == 0).all(0).sum())
        return pairs, 2 * pairs * a.shape[0] * b.shape[0]
    rows, b = b, rest[0]
    pairs = int((rows >= 0).sum()) if rows is not None else a.shape[0] - int((a.view(torch.uint8) == 0).all(1).sum())
    return pairs, 2 * pairs * b.shape[1] * b.shape[2]


def torchs(call: Call) -> Callable[[], Tensor]:
    """Return the same product by `torch._scaled_grouped_mm`, which takes E4M3 alone."""

    def e4m3(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        if codes.dtype == torch.float8_e4m3fn:
            return codes, scale
        ratio = torch.finfo(codes.dtype).max / 448
        return (codes.bfloat16() / ratio).to(torch.float8_e4m3fn), scale * ratio

    if call.op is grouped_wgrad:
        a, b, bounds, tile, scale, dtype, fast = call.arguments
        count, ends = bounds.shape[0] - 1, bounds[1:] * tile
        (a, of_a), (b, of_b) = e4m3(a, scale), e4m3(b, torch.ones_like(scale))
        of_a, of_b = (one.expand(count * side.shape[0]).contiguous() for one, side in ((of_a, a), (of_b, b)))
        return lambda: torch._scaled_grouped_mm(a, b.t(), of_a, of_b, ends, out_dtype=dtype, use_fast_accum=fast)
    a, rows, b, owner, of_a, of_b, dtype = call.arguments
    (a, of_a), tile = e4m3(a, of_a), (a if rows is None else rows).shape[0] // owner.shape[0]
    ends = (owner[:, None] <= torch.arange(b.shape[0], device=a.device)).sum(0, dtype=torch.int32) * tile
    of_b = of_b[:, None].expand(b.shape[:2]).contiguous()
    place, of_a = None if rows is None else rows.clamp(min=0), of_a.expand(a.shape[0]).contiguous()

    def run() -> Tensor:
        rows8, scales = (a, of_a) if place is None else (a.view(torch.uint8)[place].view(a.dtype), of_a[place])
        return torch._scaled_grouped_mm(rows8, b.mT, scales, of_b, ends, out_dtype=dtype, use_fast_accum=True)

    return run
