"""Hooks on the decoder layers of a model in training that code what passes, and what comes back, in every way.

Of each layer, from one forward and backward pass:

    norms      the input x, the normalised x (xhat), and the norm's output from a coded x: its forward error
    attention  q, k, v as the projections leave them and o, as attention keeps them
    MLP        gate, up, their product, and the product from coded gate and up: its forward error
    backward   the output gradients of the four products, as operands of dgrad and wgrad
    dq dk dv   attention's gradients from coded q, k, v, o against those from exact ones, in FP32

Legend: T = B * S tokens, D head width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.activation_codes import (
    OURS,
    OURS_CENTERED,
    Code,
    activation_codes,
    attention_codes,
    gradient_codes,
    sqnr,
)
from overcoat.kernels.activation import activated
from overcoat.kernels.groups import group_encode, token_center
from overcoat.models.llama import NORMS
from overcoat.ops.attention import AttentionKept, Heads, Rotary, attention_backward, attention_forward
from overcoat.recipe import KeptFormat, Recipe

# Output gradients that are one operand of one product, by the projections that they come from.
GRADIENTS = {"dqkv": ("q", "k", "v"), "do_proj": ("o_proj",), "dgate_up": ("gate", "up"), "ddown": ("down",)}


class Kept(NamedTuple):
    """How attention keeps q, k, v and o: the code; of which the common vector is taken out; o and lse found again."""

    code: KeptFormat
    centered: str = ""
    again: bool = False


BF16 = "BF16"
ATTENTION = {
    "E4M3 1xG": Kept("e4m3"),
    "INT8 1xG": Kept("int8"),
    "INT8 1xG, centered": Kept("int8", "qkvo"),
    OURS: Kept("sqrt8"),
    "sqrt8 1xG, k centered": Kept("sqrt8", "k"),
    "sqrt8 1xG, q k centered": Kept("sqrt8", "qk"),
    OURS_CENTERED: Kept("sqrt8", "qkvo"),
    "sqrt8 1xG, centered, o again": Kept("sqrt8", "qkvo", again=True),
}


class Results:
    """SQNR in dB by quantity, code and layer; beside it max |x| / rms, and the share of x != 0 decoded to 0."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.sqnr: dict[str, dict[str, list[float]]] = {}
        self.peaks: dict[str, list[float]] = {}
        self.lost: dict[str, dict[str, list[float]]] = {}

    def put(self, table: dict[str, list[float]], name: str, layer: int, value: float) -> None:
        """Enter one figure; layers come in any order."""
        table.setdefault(name, [0.0] * self.num_layers)[layer] = round(value, 7)

    def measure(self, name: str, layer: int, codes: dict[str, Code], *inputs: Tensor, function: Any = None) -> None:
        """Code the inputs, (T, C) each; with `function`, compare its results instead of its input."""
        wide = [x.float() for x in inputs]
        exact = wide[0] if function is None else function(*wide)
        for code, apply in codes.items():
            decoded = [apply(x) for x in wide]
            got = decoded[0] if function is None else function(*decoded)
            self.put(self.sqnr.setdefault(name, {}), code, layer, sqnr(exact, got))
        if function is None:
            peak = float(exact.abs().amax() / exact.square().mean().sqrt())
            self.put(self.peaks, name, layer, peak)

    def count_lost(self, name: str, layer: int, codes: dict[str, Code], x: Tensor) -> None:
        """How many elements underflow."""
        wide = x.float()
        there = wide != 0
        for code, apply in codes.items():
            share = float((there & (apply(wide) == 0)).sum() / there.sum().clamp_min(1))
            self.put(self.lost.setdefault(name, {}), code, layer, share)


class Probe:
    """The hooks of one decoder layer (Llama's names), which fill `results` at place `index`."""

    def __init__(self, layer: nn.Module, index: int, results: Results) -> None:
        self.layer, self.index, self.results = layer, index, results
        self.parts: dict[str, Tensor] = {}  # until all that belong together are there
        self.tables: tuple[Tensor, Tensor] | None = None
        self.batch = 0

    def attach(self) -> list[Any]:
        """Put the hooks in place; the caller removes them."""
        module: Any = self.layer
        attention, mlp = module.self_attn, module.mlp
        handles = [module.register_forward_pre_hook(self._start, with_kwargs=True)]
        for path in NORMS:
            handles.append(module.get_submodule(path).register_forward_pre_hook(partial(self._norm, path)))
        for name in ("q", "k", "v"):
            handles.append(getattr(attention, f"{name}_proj").register_forward_hook(partial(self._output, name)))
        handles.append(attention.o_proj.register_forward_pre_hook(self._attended))
        handles.append(attention.o_proj.register_forward_hook(partial(self._output, "o_proj")))
        for name in ("gate", "up", "down"):
            handles.append(getattr(mlp, f"{name}_proj").register_forward_hook(partial(self._output, name)))
        handles.append(mlp.down_proj.register_forward_pre_hook(self._multiplied))
        return handles

    def _start(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        cos, sin = (table.detach().float().flatten(0, -2) for table in kwargs["position_embeddings"])
        self.tables, self.batch = (cos, sin), args[0].shape[0]

    @torch.no_grad()
    def _norm(self, path: str, norm: Any, args: Any) -> None:
        x = _rows(args[0]).float()
        name, codes = path.replace("_", " ").replace("layernorm", "norm"), activation_codes()

        def normalised(x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)

        self.results.measure(f"{name}: x", self.index, codes, x)
        self.results.measure(f"{name}: xhat", self.index, codes, normalised(x))
        self.results.measure(
            f"{name}: output of coded x", self.index, codes, x, function=lambda x: normalised(x) * norm.weight.float()
        )

    def _output(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        if name not in ("o_proj", "down"):  # of those only the gradient is of interest
            self.parts[name] = _rows(output)
        output.register_hook(partial(self._gradient, name))

    @torch.no_grad()
    def _attended(self, _module: nn.Module, args: Any) -> None:
        self.parts["o"] = o = _rows(args[0])
        codes = attention_codes(self._width, o.shape[0] // self.batch)
        for name in ("q", "k", "v", "o"):
            self.results.measure(name, self.index, codes, self.parts[name])
        args[0].register_hook(self._attention_gradient)

    @torch.no_grad()
    def _multiplied(self, _module: nn.Module, args: Any) -> None:
        gate, up, codes = self.parts.pop("gate"), self.parts.pop("up"), activation_codes()
        self.results.measure("gate", self.index, codes, gate)
        self.results.measure("up", self.index, codes, up)
        self.results.measure("product", self.index, codes, _rows(args[0]))
        self.results.measure(
            "product of coded gate, up", self.index, codes, gate, up,
            function=lambda gate, up: activated(torch.cat((gate, up), 1), "silu", True),
        )  # fmt: skip

    @torch.no_grad()
    def _gradient(self, name: str, gradient: Tensor) -> None:
        self.parts["d" + name] = _rows(gradient)
        for whole, names in GRADIENTS.items():
            if name in names and all("d" + part in self.parts for part in names):
                x = torch.cat([self.parts.pop("d" + part) for part in names], 1)
                self.results.measure(whole, self.index, gradient_codes(), x)
                self.results.count_lost(whole, self.index, gradient_codes(), x)

    @property
    def _width(self) -> int:
        module: Any = self.layer
        return int(module.self_attn.head_dim)

    @torch.no_grad()
    def _attention_gradient(self, gradient: Tensor) -> None:
        module: Any = self.layer.get_submodule("self_attn")
        assert self.tables is not None
        q, k, v = (self.parts.pop(name).float() for name in ("q", "k", "v"))
        del self.parts["o"]
        num_q, num_kv = (x.shape[1] // self._width for x in (q, k))
        heads = Heads(self.batch, num_q, num_kv, self._width, module.scaling)
        for variant, errors in attention_errors(
            (q, k, v), _rows(gradient).float(), Rotary(*self.tables), heads, ATTENTION
        ).items():
            for name, value in errors.items():
                self.results.put(self.results.sqnr.setdefault(name, {}), variant, self.index, value)


def attention_errors(
    parts: tuple[Tensor, Tensor, Tensor], do: Tensor, rotary: Rotary, heads: Heads, ways: dict[str, Kept]
) -> dict[str, dict[str, float]]:
    """SQNR of dq, dk, dv against those from exact q, k, v, o in FP32: of attention in BF16, and of all `ways`.

    Args:
        parts: q, k, v as the projections leave them, (T, heads * D) FP32; do: gradient of o, (T, heads * D) FP32.
    """
    qkv, sizes = torch.cat(parts, 1), [part.shape[1] for part in parts]
    exact = Recipe(kept_attention="bf16")  # keeps the values as they are
    o, _, kept = attention_forward(qkv, rotary, heads, exact)
    truth = attention_backward(do, kept, rotary, heads, exact)[0].split(sizes, 1)

    def errors(do: Tensor, kept: AttentionKept, heads: Heads, recipe: Recipe) -> dict[str, float]:
        got = attention_backward(do, kept, rotary, heads, recipe)[0].split(sizes, 1)
        return {name: sqnr(x, y) for name, x, y in zip(("dq", "dk", "dv"), truth, got, strict=True)}

    _, _, rounded = attention_forward(qkv.bfloat16(), rotary, heads, exact)
    found = {BF16: errors(do.bfloat16(), rounded, heads, exact)}
    for name, how in ways.items():
        coded = coded_attention(qkv, o, kept.lse, sizes, heads.width, how)
        found[name] = errors(do, coded, heads._replace(biased=how.again), Recipe(kept_format=how.code))
    return found


def coded_attention(qkv: Tensor, o: Tensor, lse: Tensor, sizes: list[int], width: int, how: Kept) -> AttentionKept:
    """What attention keeps: qkv (T, sum of `sizes`) and o in 8 bits, lse as it is."""
    center = o_center = None
    if how.centered:
        chosen = [torch.full((size,), float(name in how.centered)) for name, size in zip("qkv", sizes, strict=True)]
        center = token_center(qkv) * torch.cat(chosen).to(qkv.device)
    if "o" in how.centered:
        o_center = token_center(o)
    codes, amax = group_encode(qkv, center, how.code, width)
    o_codes, o_amax = group_encode(o, o_center, how.code, width)
    return AttentionKept(lse, codes, amax, center, o_codes, o_amax, o_center)


def _rows(x: Tensor) -> Tensor:
    """(B, S, C) -> (T, C), cut off from autograd."""
    return x.detach().flatten(0, -2)


def probe(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Results, float]:
    """Run `loss` forward and backward with probes on every decoder layer of a Llama-shaped model.

    Raises:
        ValueError: the model is of another shape.
    """
    layers: Any = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(layers[0], NORMS[0]) or hasattr(layers[0].self_attn, "q_norm"):
        raise ValueError(f"{type(model).__name__} is not Llama-shaped (Llama, Mistral, Qwen2): no layers to look into")
    results = Results(len(layers))
    handles = [handle for index, layer in enumerate(layers) for handle in Probe(layer, index, results).attach()]
    try:
        value = loss()
        value.backward()
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad(set_to_none=True)
    return results, float(value.detach())
