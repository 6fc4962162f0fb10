"""Every autograd op of overcoat.ops as a case: inputs by name, the op, its truth in FP64, and the SQNR it must reach.

The limits are sums of noise powers (tests/exact.py): a GEMM's two operands, and the kept codes that the backward reads.

    forward          x and W in E4M3                        combined(31.5, 31.5) = 28.5 dB
    dgrad, wgrad     dy in E5M2 (or E4M3), W or x in E4M3   combined(25.5, 31.5) = 24.5 dB
    norm, the MLP    the dgrad's noise, and one or two kept codes (43.4 dB for sqrt8)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat import Recipe
from overcoat.formats import Quantized, dequantize_blocks, dequantize_tensor
from overcoat.models.llama import decoder_block
from overcoat.ops.attention import Heads, Rotary, attention
from overcoat.ops.linear import Norm, linear_residual, norm_linear
from overcoat.ops.mlp import MlpSaved, mlp_backward, mlp_forward
from overcoat.ops.parameters import Block, Linear
from overcoat.ops.products import Gradient
from tests import exact
from tests.exact import BF16_DB, E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import normal

Inputs = dict[str, Optional[Tensor]]
Outputs = tuple[Tensor, ...]
EPS = 1e-5
UNTOUCHED_DB = 300.0  # passed on as it is
FP32_DB = 120.0  # 24 bits are 144; less 24 for sums over a few hundred terms

RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "int8": Recipe(kept_format="int8"),
    "e4m3": Recipe(kept_format="e4m3"),
    "groups of 16": Recipe(group_size=16),
    "groups of 32": Recipe(group_size=32),
    "groups of 64": Recipe(group_size=64),
    "attention bf16": Recipe(kept_attention="bf16"),
    "e4m3 gradients": Recipe(grad_format="e4m3"),
    "blocks": Recipe(linear_scaling="block"),
}


@dataclass
class Case:
    """An op on its inputs.

    Attributes:
        inputs: tensors by name; those in `constants` take no gradient.
        op, truth: the op under a recipe and its FP64 twin, both from inputs to outputs.
        limits: dB by name of outputs ("out0", ...) and inputs, given a recipe.
        heavy: extra dB for results that are products of Gaussians.
        sharing: how many elements of a matrix share one error.
        relative: factor on the second output's gradient.
    """

    inputs: Inputs
    op: Callable[[Inputs, Recipe], Outputs]
    truth: Callable[[Inputs], Outputs]
    limits: Callable[[Recipe], dict[str, float]]
    heavy: float = 0.0
    sharing: int = 1
    relative: float = 1.0
    constants: tuple[str, ...] = ()
    grads: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.grads:
            with torch.no_grad():
                outputs = self.truth(double(self.inputs))
            x = next(x for x in self.inputs.values() if x is not None)
            self.grads = [normal(*out.shape, seed=90 + i).to(x) for i, out in enumerate(outputs)]
            if len(self.grads) > 1:
                self.grads[1] *= self.relative

    def names(self) -> list[str]:
        """Inputs that take gradients."""
        return [name for name, x in self.inputs.items() if x is not None and name not in self.constants]


def double(inputs: Inputs) -> Inputs:
    """FP64 copies; boolean masks stay."""
    return {name: x.detach().double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}


def evaluate(
    function: Callable[[Inputs], Outputs], inputs: Inputs, wanted: list[str], grads: list[Optional[Tensor]]
) -> tuple[Outputs, dict[str, Optional[Tensor]]]:
    """Outputs, and the gradients of the inputs in `wanted`, for gradients of the outputs (None: not used)."""
    leaves = {name: x if x is None else x.detach().clone() for name, x in inputs.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    outputs = function(leaves)
    used = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads) if grad is not None]
    torch.autograd.backward(*zip(*used))
    for name, x in leaves.items():
        assert x is None or name in wanted or x.grad is None, f"{name} takes no gradient but got one"
    return outputs, {name: leaves[name].grad for name in wanted}


def run(case: Case, recipe: Recipe) -> tuple[Outputs, dict[str, Optional[Tensor]]]:
    """The op forward and backward."""
    return evaluate(lambda inputs: case.op(inputs, recipe), case.inputs, case.names(), list(case.grads))


def check(case: Case, recipe: Recipe) -> None:
    """Outputs and every gradient against FP64: size and direction of the error, shapes, dtypes, None."""
    outputs, grads = run(case, recipe)
    exact_outputs, exact_grads = evaluate(case.truth, double(case.inputs), case.names(), list(case.grads))
    limits = case.limits(recipe)
    for i, (truth, value) in enumerate(zip(exact_outputs, outputs, strict=True)):
        assert_close(f"out{i}", truth, value, limits[f"out{i}"], case.heavy, case.sharing)
    for name, truth in exact_grads.items():
        assert grads[name] is not None, f"no gradient for {name}"
        assert grads[name].dtype == case.inputs[name].dtype
        sharing = case.sharing if truth.dim() == 2 else 1
        assert_close(f"d{name}", truth, grads[name], limits[name], case.heavy, sharing)


def gemm_db(recipe: Recipe, *more: float) -> float:
    """dgrad or wgrad, and further sources."""
    return combined_db(FLOAT8_DB[recipe.grad_format], E4M3_DB, *more)


def few_tokens(tokens: int) -> int:
    """A product over few tokens has few independent errors: one outer product of 64 + 80 numbers for one token."""
    return max(1, 64 // tokens)


# ---- the cases ---------------------------------------------------------------------------------------------------


def norm_linear_case(
    tokens: int = 61,
    hidden: int = 256,
    kind: str = "rms",
    biases: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Case:
    """kind: "rms", "rms without weight", "layer", "layer without parameters". Outputs: the product, and x."""
    sizes = (96, 32, 48)
    centered = kind.startswith("layer")
    bare = "without" in kind
    inputs: Inputs = {
        "x": 2 * normal(tokens, hidden) + 0.5,
        "norm_weight": None if bare else 1 + 0.3 * normal(hidden, seed=1),
        "norm_bias": 0.3 * normal(hidden, seed=2) if centered and not bare else None,
    }
    for i, n in enumerate(sizes):
        inputs[f"weight{i}"] = 0.15 * normal(n, hidden, seed=10 + i)
        inputs[f"bias{i}"] = normal(n, seed=20 + i) if biases and i != 1 else None  # one layer without, as a trap
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}

    def op(inputs: Inputs, recipe: Recipe) -> Outputs:
        norm = Norm(inputs["norm_weight"], inputs["norm_bias"], EPS, centered)
        layers = range(len(sizes))
        return norm_linear(
            inputs["x"], norm, [inputs[f"weight{i}"] for i in layers], [inputs[f"bias{i}"] for i in layers], recipe
        )

    def truth(inputs: Inputs) -> Outputs:
        y = exact.norm(inputs["x"], inputs["norm_weight"], inputs["norm_bias"], EPS, centered)
        return torch.cat([F.linear(y, inputs[f"weight{i}"], inputs[f"bias{i}"]) for i in range(len(sizes))], 1), inputs[
            "x"
        ]

    def limits(recipe: Recipe) -> dict[str, float]:
        kept = KEPT_DB[recipe.kept_format]
        dbs = {"out0": combined_db(E4M3_DB, E4M3_DB), "out1": UNTOUCHED_DB}
        dbs |= {"x": gemm_db(recipe, kept), "norm_weight": gemm_db(recipe, kept), "norm_bias": gemm_db(recipe)}
        for i in range(len(sizes)):
            dbs |= {f"weight{i}": gemm_db(recipe, kept), f"bias{i}": BF16_DB}
        return dbs

    return Case(inputs, op, truth, limits, sharing=few_tokens(tokens), relative=0.3)


def linear_residual_case(
    tokens: int = 61,
    inner: int = 192,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Case:
    """The output projection, with its input in 16 bits."""
    inputs: Inputs = {
        "x": normal(tokens, inner),
        "weight": 0.15 * normal(80, inner, seed=1),
        "bias": normal(80, seed=2) if bias else None,
        "residual": normal(tokens, 80, seed=3),
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}

    def op(inputs: Inputs, recipe: Recipe) -> Outputs:
        return (
            linear_residual(inputs["x"], inputs["weight"], inputs["bias"], inputs["residual"], recipe)
            - inputs["residual"].detach(),  # so that the product's own error is measured
        )

    def truth(inputs: Inputs) -> Outputs:
        y = F.linear(inputs["x"], inputs["weight"], inputs["bias"]) + inputs["residual"]
        return (y - inputs["residual"].detach(),)

    def limits(recipe: Recipe) -> dict[str, float]:
        return {
            "out0": combined_db(E4M3_DB, E4M3_DB, BF16_DB),
            "x": gemm_db(recipe),
            "weight": gemm_db(recipe),
            "bias": BF16_DB,
            "residual": UNTOUCHED_DB,
        }

    return Case(inputs, op, truth, limits, sharing=few_tokens(tokens))


class _Mlp(torch.autograd.Function):
    """`mlp_forward` and `mlp_backward` as autograd sees them inside a block."""

    @staticmethod
    def forward(ctx, z, weight, bias, residual, kind, recipe, quantized):
        y, saved = mlp_forward(z, weight, bias, residual, *kind, recipe)
        ctx.save_for_backward(*saved, weight, bias)
        ctx.kind, ctx.recipe, ctx.quantized = kind, recipe, quantized
        return y

    @staticmethod
    def backward(ctx, dy):
        *saved, weight, bias = ctx.saved_tensors
        dz, grads = mlp_backward(
            dy, MlpSaved(*saved), weight, bias, *ctx.kind, ctx.recipe,
            quantized=ctx.quantized, into_has_bias=ctx.quantized, want_weight=True,
        )  # fmt: skip
        if isinstance(dz, Gradient):
            dz = decoded_gradient(dz)
        return dz, grads.dweights[0], grads.dbiases[0], dy, None, None, None


def decoded_gradient(d: Gradient) -> Tensor:
    """The values of `data`; `transposed` and `sums` must be of the same."""
    assert d.data is not None
    assert d.sums is not None
    tokens = d.data.shape[0]
    if d.scale_t is None:
        values = dequantize_tensor(Quantized(d.data, d.scale))
        assert torch.equal(d.transposed[:, :tokens].t().float(), d.data.float())
    else:
        values = dequantize_blocks(Quantized(d.data, d.scale.t().contiguous()), (1, 128))
        other = dequantize_blocks(Quantized(d.transposed, d.scale_t.t().contiguous()), (1, 128))[:, :tokens].t()
        assert_close("transposed", values, other, combined_db(*[FLOAT8_DB["e5m2"]] * 2), extra=1.0)
    noise = FLOAT8_DB["e5m2"] if d.data.dtype == torch.float8_e5m2 else FLOAT8_DB["e4m3"]
    assert_close("sums", d.sums, values.sum(0), noise, extra=3.0)
    return values.to(d.dtype)


def mlp_case(
    tokens: int = 61,
    width: int = 200,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    activation: str = "silu",
    gated: bool = True,
    quantized: bool = False,
) -> Case:
    """Gate and up, if there are both, as two inputs, so that the gradient of each is held on its own.

    quantized: whether the gradient of z goes through FP8.
    """
    inputs: Inputs = {
        "gate": normal(tokens, width),
        "up": normal(tokens, width, seed=1) if gated else None,
        "weight": 0.15 * normal(80, width, seed=2),
        "bias": normal(80, seed=3) if bias else None,
        "residual": normal(tokens, 80, seed=4),
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}

    def op(inputs: Inputs, recipe: Recipe) -> Outputs:
        z = torch.cat((inputs["gate"], inputs["up"]), 1) if gated else inputs["gate"]
        linear = inputs["weight"], inputs["bias"], inputs["residual"]
        y = _Mlp.apply(z, *linear, (activation, gated), recipe, quantized)
        return (y - inputs["residual"].detach(),)

    def truth(inputs: Inputs) -> Outputs:
        h = exact.ACTIVATIONS[activation](inputs["gate"])
        h = h * inputs["up"] if gated else h
        return (F.linear(h, inputs["weight"], inputs["bias"]) + (inputs["residual"] - inputs["residual"].detach()),)

    def limits(recipe: Recipe) -> dict[str, float]:
        kept, stored = KEPT_DB[recipe.kept_format], [FLOAT8_DB[recipe.grad_format]] * quantized
        return {
            "out0": combined_db(E4M3_DB, E4M3_DB, BF16_DB),
            "gate": gemm_db(recipe, kept, *[kept] * gated, *stored),
            "up": gemm_db(recipe, kept, *stored),
            "weight": gemm_db(recipe, kept, *[kept] * gated),
            "bias": BF16_DB,
            "residual": UNTOUCHED_DB,
        }

    return Case(inputs, op, truth, limits, heavy=0.5, sharing=few_tokens(tokens))


def attention_case(
    batch: int = 2,
    sequence: int = 31,
    num_q: int = 4,
    num_kv: int = 2,
    width: int = 64,
    head_norm: bool = False,
    mask: Optional[Tensor] = None,
    shared_positions: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Case:
    """Inputs q, k, v apart, so that the gradient of each is held on its own."""
    tokens = batch * sequence
    heads = Heads(batch, num_q, num_kv, width, width**-0.5, EPS)
    angles = torch.arange(sequence)[:, None] * 100.0 ** (-torch.arange(width // 2) / (width // 2))
    angles = torch.cat((angles, angles), 1)
    if not shared_positions:
        angles = angles.repeat(batch, 1) + 0.5 * torch.arange(batch).repeat_interleave(sequence)[:, None]
    inputs: Inputs = {
        "q": normal(tokens, num_q * width),
        "k": normal(tokens, num_kv * width, seed=1),
        "v": normal(tokens, num_kv * width, seed=2),
        "q_weight": 1 + 0.3 * normal(width, seed=3) if head_norm else None,
        "k_weight": 1 + 0.3 * normal(width, seed=4) if head_norm else None,
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    inputs["mask"] = mask if mask is None else mask.to(device)

    def fused(inputs: Inputs) -> Tensor:
        return torch.cat((inputs["q"], inputs["k"], inputs["v"]), 1)

    def op(inputs: Inputs, recipe: Recipe) -> Outputs:
        rotary = Rotary(*(inputs[name] for name in ("cos", "sin", "mask", "q_weight", "k_weight")))
        o = attention(fused(inputs), rotary, heads, recipe)
        return (o,)

    def truth(inputs: Inputs) -> Outputs:
        rotated = exact.rope(
            fused(inputs), inputs["cos"], inputs["sin"], inputs["q_weight"], inputs["k_weight"], EPS, num_q, num_kv
        )
        return (exact.attention(rotated, inputs["mask"], batch, num_q, num_kv, heads.scale),)

    def limits(recipe: Recipe) -> dict[str, float]:
        # q, k, v, o and the probabilities made of q and k each bring a kept tensor's noise; in dS = P (dP - D) the
        # terms cancel in part, which raises it by up to 3 dB. Exact and kept in 16 bits: the same count of roundings.
        exactly = BF16_DB if dtype == torch.bfloat16 else FP32_DB
        kept = exactly if recipe.kept_attention == "bf16" else KEPT_DB[recipe.kept_format]
        score = combined_db(*[kept] * 5) - 3
        dbs = {"out0": combined_db(*[exactly] * 5), "v": combined_db(*[kept] * 3)}
        return dbs | dict.fromkeys(("q", "k", "q_weight", "k_weight"), score)

    return Case(inputs, op, truth, limits, sharing=width, constants=("cos", "sin", "mask"))


LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def block_case(
    batch: int = 2,
    sequence: int = 31,
    hidden: int = 256,
    biases: bool = False,
    head_norm: bool = False,
    mask: Optional[Tensor] = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    intermediate: int = 344,
    num_q: int = 4,
    num_kv: int = 2,
    gelu: Optional[str] = None,
) -> Case:
    """A whole Llama-shaped block; with `gelu` (its `approximate`) one of LayerNorms and an MLP without a gate."""
    width = hidden // num_q
    inner = attention_case(batch, sequence, num_q, num_kv, width, head_norm, mask, True, dtype, device).inputs
    shapes = {
        "q": (hidden, hidden), "k": (num_kv * width, hidden), "v": (num_kv * width, hidden), "o": (hidden, hidden),
        "gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate),
    }  # fmt: skip
    if gelu is not None:
        del shapes["gate"]
    inputs: Inputs = {"x": normal(batch * sequence, hidden, seed=30)}
    for i, name in enumerate(("attention_norm", "mlp_norm")):
        inputs[name] = 1 + 0.3 * normal(hidden, seed=40 + i)
        inputs[f"{name}_bias"] = None if gelu is None else 0.3 * normal(hidden, seed=45 + i)
    for i, (name, shape) in enumerate(shapes.items()):
        inputs[name] = normal(*shape, seed=50 + i) * shape[1] ** -0.5
        inputs[f"{name}_bias"] = 0.3 * normal(shape[0], seed=60 + i) if biases else None
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    inputs |= {name: inner[name] for name in ("q_weight", "k_weight", "cos", "sin", "mask")}
    heads = Heads(batch, num_q, num_kv, width, width**-0.5, EPS)

    def op(inputs: Inputs, recipe: Recipe) -> Outputs:
        norms = [
            Norm(inputs[name], inputs[f"{name}_bias"], EPS, gelu is not None) for name in ("attention_norm", "mlp_norm")
        ]
        linears = [Linear(inputs[name], inputs[f"{name}_bias"]) if name in shapes else None for name in LINEARS]
        block = Block(*norms, *linears, gelu)
        rotary = Rotary(*(inputs[name] for name in ("cos", "sin", "mask", "q_weight", "k_weight")))
        return (decoder_block(inputs["x"], block, rotary, heads, recipe),)

    def truth(inputs: Inputs) -> Outputs:
        def linear(name: str, y: Tensor) -> Tensor:
            return F.linear(y, inputs[name], inputs[f"{name}_bias"])

        def norm(name: str, x: Tensor) -> Tensor:
            return exact.norm(x, inputs[name], inputs[f"{name}_bias"], EPS, gelu is not None)

        def mlp(y: Tensor) -> Tensor:
            if gelu is not None:
                return F.gelu(linear("up", y), approximate=gelu)
            return exact.swiglu(torch.cat((linear("gate", y), linear("up", y)), 1))

        x = inputs["x"]
        y = norm("attention_norm", x)
        qkv = torch.cat([linear(name, y) for name in ("q", "k", "v")], 1)
        rotated = exact.rope(
            qkv, inputs["cos"], inputs["sin"], inputs["q_weight"], inputs["k_weight"], EPS, num_q, num_kv
        )
        o = exact.attention(rotated, inputs["mask"], batch, num_q, num_kv, heads.scale)
        x = x + linear("o", o)
        return (x + linear("down", mlp(norm("mlp_norm", x))),)

    def limits(recipe: Recipe) -> dict[str, float]:
        # A gradient passes at most four dgrads and wgrads (down, gate/up, o, qkv) of values that four forward products
        # made noisy, and the backward of attention, which raises noise by up to 3 dB (NUMERICS.md section 7: 2 to 3).
        forward = combined_db(*[combined_db(E4M3_DB, E4M3_DB)] * 4)
        deep = combined_db(*[gemm_db(recipe, KEPT_DB[recipe.kept_format])] * 4, forward) - 3
        return {"out0": forward} | dict.fromkeys(inputs, deep)

    return Case(inputs, op, truth, limits, heavy=0.5, constants=("cos", "sin", "mask"))


CASES: dict[str, Callable[..., Case]] = {
    "norm_linear": lambda **kwargs: norm_linear_case(biases=True, **kwargs),
    "norm_linear layer norm": lambda **kwargs: norm_linear_case(kind="layer", biases=True, **kwargs),
    "linear_residual": linear_residual_case,
    "attention": attention_case,
    "attention head norm": lambda **kwargs: attention_case(head_norm=True, **kwargs),
    "block": lambda **kwargs: block_case(biases=True, head_norm=True, **kwargs),
    "block gelu": lambda **kwargs: block_case(biases=True, gelu="tanh", **kwargs),
}
