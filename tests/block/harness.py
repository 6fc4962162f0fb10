"""A whole block as a case: inputs by name, the block, its truth in FP64, and the SQNR it must reach.

The limits are sums of noise powers (tests/exact.py): a GEMM's two operands, and the kept codes that the backward reads.

    forward          x and W in E4M3                        combined(31.5, 31.5) = 28.5 dB
    dgrad, wgrad     dy in E5M2 (or E4M3), W or x in E4M3   combined(25.5, 31.5) = 24.5 dB
    norm, the MLP    the dgrad's noise, and one or two kept codes (43.4 dB for sqrt8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

from overcoat import Recipe
from overcoat.block import reference
from overcoat.block.attention import Attention, Heads
from overcoat.block.mlp import Mlp
from overcoat.block.run import run_block
from overcoat.block.spec import Block, Branch, Linear, Norm, RowPermutation, Tables
from tests.exact import E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import normal

Inputs = dict[str, Optional[Tensor]]
EPS = 1e-5
FP32_DB = 120.0  # 24 bits are 144; less 24 for sums over a few hundred terms

RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "int8": Recipe(kept_format="int8"),
    "groups of 32": Recipe(group_size=32),
    "attention bf16": Recipe(kept_attention="bf16"),
    "e4m3 gradients": Recipe(grad_format="e4m3"),
    "blocks": Recipe(linear_scaling="block"),
}


@dataclass
class Case:
    """An op on its inputs.

    Attributes:
        inputs: tensors by name; those in `constants` take no gradient.
        op, truth: the op under a recipe and its FP64 twin, both from inputs to the output.
        limits: dB of the output ("out") and of inputs' gradients by name, given a recipe.
        heavy: extra dB for results that are products of Gaussians.
        sharing: how many elements of a matrix share one error.
        grad: the output's gradient.
    """

    inputs: Inputs
    op: Callable[[Inputs, Recipe], Tensor]
    truth: Callable[[Inputs], Tensor]
    limits: Callable[[Recipe], dict[str, float]]
    heavy: float = 0.0
    sharing: int = 1
    constants: tuple[str, ...] = ("cos", "sin", "mask")

    def __post_init__(self) -> None:
        with torch.no_grad():
            out = self.truth(double(self.inputs))
        self.grad = normal(*out.shape, seed=90).to(next(x for x in self.inputs.values() if x is not None))

    def names(self) -> list[str]:
        """Inputs that take gradients."""
        return [name for name, x in self.inputs.items() if x is not None and name not in self.constants]


def double(inputs: Inputs) -> Inputs:
    """FP64 copies; boolean masks stay."""
    return {name: x.detach().double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}


def leaves_of(inputs: Inputs, needs_grad: list[str]) -> Inputs:
    """Copies, of which those in `wanted` take gradients."""
    return {
        name: x if x is None else x.detach().clone().requires_grad_(name in needs_grad and x.is_floating_point())
        for name, x in inputs.items()
    }


def evaluate(
    function: Callable[[Inputs], Tensor], inputs: Inputs, needs_grad: list[str], grad: Tensor
) -> tuple[Tensor, dict[str, Optional[Tensor]]]:
    """The output, and the gradients of the inputs in `wanted`, for its gradient."""
    leaves = leaves_of(inputs, needs_grad)
    out = function(leaves)
    out.backward(grad.to(out.dtype))
    for name, x in leaves.items():
        assert x is None or name in needs_grad or x.grad is None, f"{name} takes no gradient but got one"
    return out.detach(), {name: leaves[name].grad for name in needs_grad}


def run(case: Case, recipe: Recipe) -> tuple[Tensor, dict[str, Optional[Tensor]]]:
    """The op forward and backward."""
    return evaluate(lambda inputs: case.op(inputs, recipe), case.inputs, case.names(), case.grad)


def check(case: Case, recipe: Recipe) -> None:
    """Output and every gradient against FP64: size and direction of the error, shapes, dtypes, None."""
    out, grads = run(case, recipe)
    truth, true_grads = evaluate(case.truth, double(case.inputs), case.names(), case.grad)
    limits = case.limits(recipe)
    assert_close("out", truth, out, limits["out"], case.heavy, case.sharing)
    for name, truth in true_grads.items():
        assert grads[name] is not None, f"no gradient for {name}"
        assert grads[name].dtype == case.inputs[name].dtype
        sharing = case.sharing if truth.dim() == 2 else 1
        assert_close(f"d{name}", truth, grads[name], limits[name], case.heavy, sharing)


def gemm_db(recipe: Recipe, *more: float) -> float:
    """dgrad or wgrad, and further sources."""
    return combined_db(FLOAT8_DB[recipe.grad_format], E4M3_DB, *more)


# ---- the case ---------------------------------------------------------------------------------------------------

# How a block is wired, what its norms of q and k are, whether its layers have biases, its MLP's activation, and which
# layer makes attention's output gate.
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "biases": {"biases": True},
    "head norm": {"qk_norm": "head"},
    "biases, head norm": {"biases": True, "qk_norm": "head"},
    "gelu": {"activation": "gelu"},
    "gelu, biases": {"activation": "gelu_tanh", "biases": True},
    "post": {"wiring": "post", "qk_norm": "full"},
    "sandwich": {"wiring": "sandwich"},
    "sandwich, gelu": {"wiring": "sandwich", "activation": "gelu", "biases": True},
    "parallel": {"wiring": "parallel", "biases": True},
    "gate": {"output_gate": "g"},
    "gate of q, biases, head norm": {"output_gate": "q", "biases": True, "qk_norm": "head", "rotated": 16},
}


def tables_of(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin (sequence, width)."""
    angles = torch.arange(sequence)[:, None] * 100.0 ** (-torch.arange(width // 2) / (width // 2))
    angles = torch.cat((angles, angles), 1)
    return angles.cos(), angles.sin()


def block_case(
    batch: int = 2,
    sequence: int = 31,
    hidden: int = 256,
    biases: bool = False,
    qk_norm: Optional[str] = None,
    mask: Optional[Tensor] = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    intermediate: int = 344,
    num_q: int = 4,
    num_kv: int = 2,
    activation: str = "silu",
    wiring: str = "pre",
    output_gate: str = "",
    rotated: int = 0,
) -> Case:
    """A block with SwiGLU and RMSNorms, or with another activation LayerNorms and no gate; qk_norm: "head", "full".

    output_gate: "g" has a layer for it, "q" makes it beside each head; "": none.
    """
    width, gated = hidden // num_q, activation == "silu"
    shapes = {
        "q": (hidden, hidden), "k": (num_kv * width, hidden), "v": (num_kv * width, hidden), "o": (hidden, hidden),
        "gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate),
    }  # fmt: skip
    if not gated:
        del shapes["gate"]
    if output_gate:
        shapes[output_gate] = ((1 + (output_gate == "q")) * hidden, hidden)
    places = {"pre": ("pre",), "post": ("post",), "sandwich": ("pre", "post"), "parallel": ("pre",)}[wiring]
    norms = [f"{place}_{mixer}" for place in places for mixer in ("attention", "mlp")]
    inputs: Inputs = {"x": normal(batch * sequence, hidden, seed=30)}
    for i, name in enumerate(norms):
        inputs[name] = 1 + 0.3 * normal(hidden, seed=40 + i)
        inputs[f"{name}_bias"] = None if gated else 0.3 * normal(hidden, seed=45 + i)
    for i, (name, shape) in enumerate(shapes.items()):
        inputs[name] = normal(*shape, seed=50 + i) * shape[1] ** -0.5
        inputs[f"{name}_bias"] = 0.3 * normal(shape[0], seed=60 + i) if biases else None
    for i, (name, count) in enumerate((("q_weight", num_q), ("k_weight", num_kv))):
        size = width if qk_norm == "head" else width * count
        inputs[name] = None if qk_norm is None else 1 + 0.3 * normal(size, seed=70 + i)
    inputs["cos"], inputs["sin"] = tables_of(sequence, rotated or width)
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    inputs["mask"] = mask if mask is None else mask.to(device)
    options = {"rotated": rotated, "gated": output_gate != ""}
    heads = Heads(batch, num_q, num_kv, width, width**-0.5, EPS, qk_norm == "full", **options)
    qkv, orders = ("q", "k", "v"), ()
    if output_gate == "g":
        qkv = ("g", *qkv)
    if output_gate == "q":
        turned = (width, rotated or width)
        orders = RowPermutation(*turned, num_q, gate_interleaved=True), RowPermutation(*turned, num_kv), None

    def block_of(inputs: Inputs) -> Block:
        def linear(*names: str) -> Linear:
            return Linear(tuple(inputs[name] for name in names), tuple(inputs[f"{name}_bias"] for name in names))

        def norm(name: str) -> Optional[Norm]:
            return Norm(inputs[name], inputs[f"{name}_bias"], EPS, not gated) if name in inputs else None

        qk_norm, gate = (inputs["q_weight"], inputs["k_weight"]), ("gate", "up") if gated else ("up",)
        in_proj = linear(*qkv)._replace(orders=orders)
        attention = Branch(
            Attention(heads), in_proj, linear("o"), qk_norm, norm("pre_attention"), norm("post_attention")
        )
        mlp = Branch(Mlp(activation, gated), linear(*gate), linear("down"), (), norm("pre_mlp"), norm("post_mlp"))
        return Block((attention, mlp), wiring == "parallel")

    def op(inputs: Inputs, recipe: Recipe) -> Tensor:
        tables = Tables(inputs["cos"], inputs["sin"], inputs["mask"])
        return run_block(inputs["x"], block_of(inputs), tables, recipe)

    def truth(inputs: Inputs) -> Tensor:
        return reference.block(inputs["x"], block_of(inputs), Tables(inputs["cos"], inputs["sin"], inputs["mask"]))

    def limits(recipe: Recipe) -> dict[str, float]:
        # A gradient passes at most four dgrads and wgrads (down, gate/up, o, qkv) of values that four forward products
        # made noisy, and the backward of attention, which raises noise by up to 3 dB (NUMERICS.md section 7: 2 to 3).
        forward = combined_db(*[combined_db(E4M3_DB, E4M3_DB)] * 4)
        deep = combined_db(*[gemm_db(recipe, KEPT_DB[recipe.kept_format])] * 4, forward) - 3
        return {"out": forward} | dict.fromkeys(inputs, deep)

    return Case(inputs, op, truth, limits, heavy=0.5)
