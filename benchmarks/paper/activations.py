"""Figure 4: what granularity costs kept activations, by layer, and what the maximum of a tensor costs in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.arms import newest_checkpoint, tiny_run
from benchmarks.paper.result import Options, Result
from benchmarks.rows import Row
from benchmarks.timing import time_ms
from overcoat.eval.command import find_target, load_target
from overcoat.extras import load_extra
from overcoat.formats.float8 import dequantize_blocks, dequantize_tensor, quantize_blocks, quantize_tensor
from overcoat.formats.groups import decode_groups, encode_groups
from overcoat.kernels.quantize import amax
from overcoat.models.family import decoder_layers
from overcoat.train.process import choose_device

# By name: x (T, H) FP32 -> what is decoded again.
GRANULARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "per tensor": lambda x: dequantize_tensor(quantize_tensor(x)),
    "16x16": lambda x: dequantize_blocks(quantize_blocks(x, (16, 16)), (16, 16)),
    "4x4": lambda x: dequantize_blocks(quantize_blocks(x, (4, 4)), (4, 4)),
    "1x16": lambda x: decode_groups(encode_groups(x, "e4m3", 16), "e4m3", 16),
    "1x128": lambda x: decode_groups(encode_groups(x, "e4m3", 128), "e4m3", 128),
    "sqrt8 1x128": lambda x: decode_groups(encode_groups(x, "sqrt8", 128), "sqrt8", 128),
}
ROWS, LENGTH = 8, 128


def layer_inputs(model: Any, ids: Tensor) -> dict[str, list[Tensor]]:
    """Inputs of every layer's first norm and activation, (T, C) FP32, layer by layer."""
    found: dict[str, list[Tensor]] = {"norm": [], "activation": []}
    handles = []
    layers: list[Any] = [*decoder_layers(model).values()]
    for layer in layers:
        for name, part in (("norm", layer.input_layernorm), ("activation", layer.mlp.act_fn)):
            handles.append(part.register_forward_pre_hook(
                lambda _, given, name=name: found[name].append(given[0].detach().float().flatten(0, -2))
            ))  # fmt: skip
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def figure4a(options: Options) -> Result:
    """Relative error of a layer's kept inputs, mean over the layers and the worst, on text the model was made for."""
    run_dir = tiny_run() if options.size == "small" else newest_checkpoint(options.checkpoint).parents[1]
    device = choose_device("auto")
    model, tokenizer = load_target(find_target(str(run_dir)), device)
    text = "\n".join(str(module.__doc__) for module in (torch, torch.nn, torch.nn.functional, load_extra)) * 9
    ids = torch.tensor(tokenizer(text).input_ids[: ROWS * LENGTH], device=device)
    found = layer_inputs(model, ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
    rows: list[Row] = []
    curves: dict[str, dict[float, float]] = {}
    for name, code in GRANULARITIES.items():
        row: Row = {"name": name}
        for part, inputs in found.items():
            each = [100 * float((code(x) - x).norm() / x.norm()) for x in inputs]
            row |= {f"{part} %": sum(each) / len(each), f"{part}, worst %": max(each)}
            curves[f"{part}, {name}"] = {float(layer): error for layer, error in enumerate(each)}
        rows.append(row)
    columns = ("norm %", "norm, worst %", "activation %", "activation, worst %")
    notes = ("Paper: 1x16 groups lose least; blocks that span tokens (4x4) twice as much at the norms' inputs.",)
    title = "Figure 4a: relative error of kept inputs in E4M3, by granularity"
    return Result(title, columns, rows, notes, curves, ("layer", "relative error, %"))


def figure4b(options: Options) -> Result:
    """The maximum of a (T, 4096) tensor in one stage, against stage two of Group Scaling: of one maximum a row."""
    rows: list[Row] = []
    for tokens in (2048, 4096, 8192, 16384):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        row_amax = x.abs().amax(1).float()
        one, two = (time_ms(lambda x=x: amax(x))["ms"] for x in (x, row_amax))  # type: ignore[misc]
        rows.append({"name": f"{tokens} x 4096", "one stage ms": one, "stage two ms": two, "x": one / two})
    notes = ("Stage one is part of the kernel that computes the tensor (python -m benchmarks kernels: norm_stats).",)
    return Result("Figure 4b: time of the maximum", ("one stage ms", "stage two ms", "x"), rows, notes)
