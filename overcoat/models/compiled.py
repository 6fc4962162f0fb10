"""Decoder layers under torch.compile, one by one, and as CUDA graphs: `train.compile`.

    layers      torch.compile(fullgraph=True) of every layer. They share their code, so one graph serves all, and one
                more serves other batch sizes; a tower has one for images of one size and one for mixed sizes
    graphs      the same with mode="reduce-overhead": forward and backward of every layer are recorded once and then
                replayed without the host, which limits small blocks. In a vision-language model only the tower is
                recorded: a graph copies its inputs and keeps its memory, which does not pay for large text layers

A replay runs the same kernels on the same addresses. So a graph must hold whatever changes from step to step, or be
given it anew:

    weights     stay where they are, and the optimizer writes them in place. Their FP8 copies are made inside the graph,
                from what the weights are by then
    input       the embedding's result, rotary tables and masks are copied into the graph; from layer to layer results
                stay in the graphs' memory
    gradients   see `keep_gradients_outside`

The first pass compiles and warms up, the second records; later ones replay. All graphs share one pool of memory, which
is given back by `forget` alone.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.models.family import decoder_layers, tower_path


def compile_layers(model: nn.Module, graphs: bool) -> None:
    """Compile every decoder layer of a model in place, at its next forward pass; names and parameters stay.

    Args:
        model: converted or not; on a GPU if `graphs`.
        graphs: replay the layers as CUDA graphs. Every pass of a training then takes `begin_pass`, and a step of
            several passes `keep_gradients_outside`. Gradients that are released (`overcoat.release_gradients`) free
            graph memory that the next layer's reuse.

    Raises:
        ValueError: there is no decoder layer, or nothing to record on the model's device.
    """
    layers = graph_layers(model) if graphs else decoder_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} contains no decoder layer to compile")
    device = next(model.parameters()).device
    # Text and towers, images of one size and of several: one graph too many is an error under fullgraph.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    if graphs and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and the model lies on {device}: compile it with graphs=False")
    mode = "reduce-overhead" if graphs else "default"
    layer: Any
    for layer in layers.values():
        if hasattr(type(layer), "overcoat_mode"):  # of `Fp8DecoderLayer`, which then calls `run_compiled`
            layer.overcoat_mode = mode  # hooks run outside: transformers collects towers' hidden states by them
        else:
            layer.compile(fullgraph=True, mode=mode)


def run_compiled(layer: Any, x: Tensor, batch: int, images: int, kwargs: dict[str, Any]) -> Tensor:
    """A layer's `_forward` in compiled code, which learns from a shape what rows `rows_of` found."""
    is_flat = x.dim() == 2
    if is_flat:  # not a view: code is compiled anew for what a view is of
        x = torch.ops.aten._unsafe_view(x, (batch, -1, x.shape[1]))
    return _compiled(layer.overcoat_mode, layer.overcoat_fullgraph)(layer, x, is_flat, images > 0, **kwargs)


@functools.cache
def _compiled(mode: str, fullgraph: bool) -> Any:
    # What a graph cannot hold would run beside it, unseen and slowly: fullgraph makes it an error. Not for mixers that
    # run as they are, whose kernels may not be traceable (flash-linear-attention's).
    return torch.compile(_forward_rows, fullgraph=fullgraph, mode=mode)


def _forward_rows(layer: Any, rows: Tensor, is_flat: bool, are_images: bool, **kwargs: Any) -> Any:
    x, batch = rows.flatten(0, 1) if is_flat else rows, rows.shape[0]
    return layer._forward(x, batch, batch if are_images else 0, kwargs)


def graph_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that become CUDA graphs, by name: a vision tower's, or all of a model without one."""
    tower = tower_path(model)
    return {path: layer for path, layer in decoder_layers(model).items() if path.startswith(tower)}


def eager() -> AbstractContextManager[None]:
    """Inside, layers run as if they were not compiled: for evaluation, samples and measurements, whose shapes and modes
    would each be compiled and recorded anew."""
    return torch.compiler.set_stance("force_eager")


def begin_pass() -> None:
    """Allow CUDA graphs to overwrite what earlier passes left in their memory.

    Call it before each forward pass, when no backward is pending. PyTorch by itself would take the end of the last
    backward for this moment, and a pass that ran out of memory has none.
    """
    torch.compiler.cudagraph_mark_step_begin()


def keep_gradients_outside(model: nn.Module) -> None:
    """Move the layers' gradients out of the graphs' memory: between the first and the second pass of a step.

    Autograd makes the first gradient of a step the parameter's `.grad` as it is, a tensor in the graphs' memory, which
    the next replay overwrites without a word. A step of one pass may leave it there: the optimizer has read it by then.
    Of several passes the others add to what the first one left, so that has to be elsewhere; what they add themselves
    dies at once.

    One copy of all gradients a step (4 bytes of traffic per BF16 parameter, one launch a layer) is less than zeroed
    `.grad`s kept for every pass to add to (8 bytes, a launch a parameter), or a hook on every parameter.
    """
    for layer in graph_layers(model).values():
        parameters = [parameter for parameter in layer.parameters() if parameter.grad is not None]
        inside = [parameter.grad for parameter in parameters if parameter.grad is not None]
        outside = [torch.empty_like(gradient) for gradient in inside]
        if inside:
            torch._foreach_copy_(outside, inside)
        for parameter, gradient in zip(parameters, outside, strict=True):
            parameter.grad = gradient


def forget() -> None:
    """Drop everything that was compiled and recorded in this process, and the graphs' memory with it: between runs, and
    where memory ran out. Layers that are compiled stay so, and begin anew at their next forward pass."""
    torch.compiler.reset()
