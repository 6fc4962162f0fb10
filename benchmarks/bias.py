"""Do 8-bit codes of what non-linear layers and attention keep bias gradients? arXiv 2605.01255, 2510.04212, 2603.02170.

    python -m benchmarks.bias EXPORT --batches 1000          a trained model (folder of weights and tokenizer)

Everything is FP32 but what a backward reads: norms' outputs, gate and up, and attention's v (with o computed again of
it) are encoded and decoded as Overcoat keeps them. Of each batch the error of a gradient is e = g' - g. Over batches

    error     rms of e over rms of g
    bias      |mean e| over |mean g|, the noise of finitely many batches taken out: <e_i, e_j> of different groups
    along     <e, g> / <g, g>: by how much the gradient itself is longer or shorter

each with its standard error, for every kind of weight and layer. And of attention alone, for what may be kept of q, k,
v and o: the mean and rms of the error of D = sum(do o), and of the row sums of dS, which are zero.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, append_row
from overcoat.bench.rows import Row
from overcoat.extras import load_extra
from overcoat.formats.groups import decode_groups, encode_groups, from_groups, to_groups
from overcoat.train.config import DataConfig
from overcoat.train.sources import documents

Code = Callable[[Tensor], Tensor]
Statistics = dict[str, list[Tensor]]
GROUPS = 10  # of batches, for errors
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")


def grouped(code: str, size: int) -> Code:
    return lambda x: decode_groups(encode_groups(x, code, size), code, size)


def stochastic(x: Tensor) -> Tensor:
    """sqrt8 in groups of 128, rounded up or down by chance, right in the mean."""
    groups = to_groups(x, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127**2
    y = groups.abs() / scale
    low = y.sqrt().floor()
    c = low + (torch.rand_like(y) < (y - low.square()) / (2 * low + 1))
    return from_groups(torch.copysign(c.square() * scale, groups), x.shape)


CODES: dict[str, Code] = {
    "sqrt8 1x128": grouped("sqrt8", 128),
    "e4m3 1x128": grouped("e4m3", 128),
    "e4m3 1x16": grouped("e4m3", 16),
    "sqrt8 stochastic": stochastic,
    "bf16": lambda x: x.bfloat16().float(),
}
# What attention's backward may read: codes of q and k, of v, of o (None: computed again).
KEPT: dict[str, tuple[Code, Code, Code | None]] = {
    "12-bit q k, sqrt8 v, o again": (CODES["bf16"], CODES["sqrt8 1x128"], None),
    "all sqrt8, o again": (CODES["sqrt8 1x128"], CODES["sqrt8 1x128"], None),
    "all sqrt8": (CODES["sqrt8 1x128"],) * 3,
    "all e4m3": (CODES["e4m3 1x128"],) * 3,
    "bf16": (CODES["bf16"],) * 3,
}


class State:
    """The code in use (None: exact), and where attention's backward puts its statistics."""

    code: Code | None = None
    attention: Statistics | None = None


def decoded(x: Tensor) -> Tensor:
    return x if State.code is None else State.code(x)


class Norm(torch.autograd.Function):
    """RMSNorm (LayerNorm where there is no weight: OLMo) that keeps its normalized input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        centered = x - x.mean(-1, keepdim=True) if weight is None else x
        rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(decoded(centered * rstd), rstd, weight)
        return centered * rstd if weight is None else centered * rstd * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (xhat, rstd, weight) = gradients, ctx.saved_tensors
        inner = dy if weight is None else dy * weight
        dx = inner - xhat * (inner * xhat).mean(-1, keepdim=True)
        if weight is None:
            dx = dx - inner.mean(-1, keepdim=True)
        return rstd * dx, None if weight is None else (dy * xhat).flatten(0, -2).sum(0), None


class Mlp(torch.autograd.Function):
    """down(silu(gate) up) that keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(decoded(gate), decoded(up), weight)
        return F.linear(F.silu(gate) * up, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (dy,), (gate, up, weight) = gradients, ctx.saved_tensors
        s, dh = gate.sigmoid(), dy @ weight
        dgate = dh * up * s * (1 + gate * (1 - s))
        return dgate, dh * gate * s, dy.flatten(0, -2).T @ (gate * s * up).flatten(0, -2)


def softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """o, P and log-sum-exp of causal attention, (B, heads, S, ...)."""
    scores = scale * q @ k.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    return p @ v, p, lse


class Attention(torch.autograd.Function):
    """Keeps q and k as they are, which is what 12 bits of BF16 would give back, and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return softmax(q, k, v, scale)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (do,), (q, k, exact_v) = gradients, ctx.saved_tensors
        if State.attention is not None:
            watch(q, k, exact_v, do, ctx.scale, State.attention)
        v = decoded(exact_v)
        o, p, _ = softmax(q, k, v, ctx.scale)
        ds = ctx.scale * p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True))
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do, None


def watch(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, found: Statistics) -> None:
    """What is in KEPT: mean and mean square of D's error and of dS' row sums, mean square of dS' error, of D, of dS."""
    o, p, lse = softmax(q, k, v, scale)
    true_d = (do * o).sum(-1)
    true_ds = p * (do @ v.transpose(-1, -2) - true_d.unsqueeze(-1))
    for name, (of_qk, of_v, of_o) in KEPT.items():
        q_, k_, v_ = of_qk(q), of_qk(k), of_v(v)
        again, p_, _ = softmax(q_, k_, v_, scale)
        if of_o is not None:  # o and lse are the forward's
            p_ = (scale * q_ @ k_.transpose(-1, -2)).sub(lse).exp() * (p > 0)
        d = (do * (again if of_o is None else of_o(o))).sum(-1)
        ds = p_ * (do @ v_.transpose(-1, -2) - d.unsqueeze(-1))
        error, rows = d - true_d, ds.sum(-1)
        parts = (error.mean(), error.square().mean(), rows.mean(), rows.square().mean(), (ds - true_ds).square().mean())
        found.setdefault(name, []).append(torch.stack([*parts, true_d.square().mean(), true_ds.square().mean()]))


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return Attention.apply(q, k, v, scaling).transpose(1, 2), None


def prepare(export: Path, device: str) -> tuple[Any, Any]:
    """The model in FP32 with the functions above in its layers, and its tokenizer."""
    transformers = load_extra("transformers", "hf", "benchmarks.bias")
    transformers.AttentionInterface.register("bias", attention)
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, attn_implementation="bias")
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if "Norm" in type(module).__name__:
            eps = getattr(module, "variance_epsilon", 1e-5)
            module.forward = lambda x, m=module, eps=eps: Norm.apply(x, getattr(m, "weight", None), eps)
        elif hasattr(module, "gate_proj"):
            module.forward = lambda x, m=module: Mlp.apply(m.gate_proj(x), m.up_proj(x), m.down_proj.weight)
    return model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(export)


def batches(tokenizer: Any, count: int, rows: int, length: int, files: list[str]) -> Iterator[Tensor]:
    """Token ids (rows, length) of text."""
    ids: list[int] = []
    for text in documents(DataConfig(files=files)):
        ids += tokenizer(text).input_ids
        while len(ids) >= rows * length:
            yield torch.tensor(ids[: rows * length]).view(rows, length)
            ids, count = ids[rows * length :], count - 1
            if not count:
                return


def gradients(model: Any, ids: Tensor, code: Code | None, watched: Statistics | None = None) -> dict[str, Tensor]:
    State.code, State.attention = code, watched
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if ".layers." in name}


def mean_and_error(values: Tensor) -> tuple[float, float]:
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


def study(model: Any, found: list[Tensor]) -> tuple[dict[str, dict[str, Row]], dict[str, Row]]:
    """Of weights' gradients by code and name, and of attention by what is kept: in per cent, with standard errors."""
    device, size = next(model.parameters()).device, len(found) // GROUPS
    sums: dict[tuple[str, str], list[Tensor]] = {}
    scalars: dict[tuple[str, str], list[Tensor]] = {}
    total: dict[str, Tensor] = {}
    watched: Statistics = {}
    for number, ids in enumerate(each.to(device) for each in found[: size * GROUPS]):
        exact = gradients(model, ids, None, watched)
        for name, g in exact.items():
            total[name] = total.get(name, torch.zeros_like(g)) + g
        for key, code in CODES.items():
            for name, coded in gradients(model, ids, code).items():
                e, g = coded - exact[name], exact[name]
                groups = sums.setdefault((key, name), [])
                if number % size == 0:
                    groups.append(torch.zeros_like(e))
                groups[-1] += e
                powers = (e.square().sum(), g.square().sum(), (e * g).sum() / g.square().sum())
                scalars.setdefault((key, name), []).append(torch.stack(powers))
    count = size * GROUPS
    of_weights = {
        key: {
            name: _figures(sums[key, name], torch.stack(scalars[key, name]), total[name] / count, size)
            for name in total
        }
        for key in CODES
    }
    return of_weights, {name: _of_attention(torch.stack(parts)) for name, parts in watched.items()}


def _of_attention(parts: Tensor) -> Row:
    """parts (calls, 7): what `watch` leaves. In per cent of the rms of D, and of dS."""
    scale = 100 / parts[:, 5].mean().sqrt()
    row: Row = {}
    for name, place in (("D", 0), ("row sum of dS", 2)):
        row[f"{name}: bias"], row[f"+- {name}: bias"] = mean_and_error(parts[:, place] * scale)
        row[f"{name}: rms"] = float(parts[:, place + 1].mean().sqrt() * scale)
    return {**row, "dS: error": float(100 * (parts[:, 4].mean() / parts[:, 6].mean()).sqrt())}


def _figures(sums: list[Tensor], scalars: Tensor, mean: Tensor, size: int) -> Row:
    groups = torch.stack([each.flatten() for each in sums]) / size
    products, count = groups @ groups.T, len(groups)

    def squared(keep: Tensor) -> float:
        """|mean e|^2 without noise: the mean of products of different groups."""
        part = products[keep][:, keep]
        return float((part.sum() - part.trace()) / (len(part) * (len(part) - 1)))

    scale = float(mean.square().sum())
    whole = squared(torch.ones(count, dtype=torch.bool)) / scale
    without = torch.tensor([squared(torch.arange(count) != place) / scale for place in range(count)])
    error = float((without - without.mean()).square().sum().mul((count - 1) / count).sqrt())
    along, along_error = mean_and_error(scalars[:, 2])
    return {
        "error": 100 * math.sqrt(scalars[:, 0].sum() / scalars[:, 1].sum()),
        "bias squared": 1e4 * whole,
        "+- bias squared": 1e4 * error,
        "bias": 100 * math.sqrt(max(0.0, whole)),
        "along": 100 * along,
        "+- along": 100 * along_error,
    }


def table(of_weights: dict[str, dict[str, Row]]) -> str:
    """Mean over the layers, and the layer with the most bias, by code and kind of weight."""
    lines = ["| code | weights | error % | bias % | worst layer | along % (+-) |", "|---|---|---:|---:|---:|---:|"]
    for key, figures in of_weights.items():
        for kind in KINDS:
            rows = [row for name, row in figures.items() if kind in name]
            if not rows:
                continue
            mean = {each: sum(row[each] for row in rows) / len(rows) for each in rows[0]}
            bias, worst = math.sqrt(max(0.0, mean["bias squared"])), max(row["bias"] for row in rows)
            along = f"{mean['along']:+.4f} ({mean['+- along'] / math.sqrt(len(rows)):.4f})"
            lines.append(f"| {key} | {kind} | {mean['error']:.3f} | {bias:.3f} | {worst:.3f} | {along} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Study a model, print the tables and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--files", nargs="+", default=["stdlib"], help="as data.files")
    parser.add_argument("--out", type=Path, default=RESULTS / "bias.jsonl")
    arguments = parser.parse_args(argv)
    model, tokenizer = prepare(arguments.export, "cuda" if torch.cuda.is_available() else "cpu")
    found = list(batches(tokenizer, arguments.batches, arguments.rows, arguments.length, arguments.files))
    of_weights, of_attention = study(model, found)
    shape = {"parameters": sum(p.numel() for p in model.parameters()), "batches": len(found) // GROUPS * GROUPS}
    common = {"benchmark": "bias", **shape, "rows": arguments.rows, "length": arguments.length}
    append_row(arguments.out, {**common, "kind": "weights", "found": of_weights})
    append_row(arguments.out, {**common, "kind": "attention", "found": of_attention})
    print(table(of_weights), "", sep="\n")
    columns = list(next(iter(of_attention.values())))
    print("| kept | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns), sep="\n")
    for name, row in of_attention.items():
        print(f"| {name} | " + " | ".join(f"{row[key]:.4f}" for key in columns) + " |")


if __name__ == "__main__":
    main()
