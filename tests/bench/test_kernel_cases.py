"""Every case of `bench kernels` runs as written, and its bytes are those one counts by hand."""

from __future__ import annotations

import pytest
import torch

import overcoat.models.convert  # noqa: F401, all ops of a block
from overcoat.bench.kernel_cases import FAMILIES, Inputs, KernelCase
from overcoat.bench.shapes import BlockShape
from overcoat.kernels.loss import cross_entropy_
from overcoat.kernels.multi_tensor import gradients_sum_squares
from overcoat.kernels.op import CATALOGUE
from overcoat.kernels.quantize import quantize
from overcoat.models.shapes import Model, sizes

INPUTS = Inputs(BlockShape(Model("LlamaConfig", sizes(256, 384, 1, 2, 1, 96)), 2, 64), "cpu")
T, H, I = 128, 256, 384  # noqa: E741
# By hand: reads + writes of the large tensors; the rest (scales, maxima, tables) is within 5%.
BYTES = {
    "amax": 2 * T * H,
    "quantize": (2 + 1) * T * H,
    "quantize_both": (2 + 2) * T * H,
    "stack_weights": (2 + 1) * 2 * H * H,
    "norm_stats of a sum": (2 + 2 + 2) * T * H,
    "norm_stats of a sum LayerNorm": (2 + 2 + 2) * T * H,
    "rms_norm": (2 + 2) * T * H,
    "rms_norm_backward": (2 + 2 + 2) * T * H,
    "add_norm_encode": (2 + 2 + 2 + 1) * T * H,
    "qk_rope": (2 + 2) * 2 * T * H + 2 * 2 * 64 * 128,
    "qk_rope norm": (2 + 2) * 2 * T * H + 2 * 2 * 64 * 128,
    # Three gradients and, of qkv, q and k read; the gradient of all three written.
    "qk_rope_backward": (2 + 2) * 2 * T * H + 2 * 2 * 64 * 128,
    "qk_rope_backward norm": (2 + 2) * 2 * T * H + 2 * (H + H // 2) * T + 2 * 2 * 64 * 128,
    # Weight, both moments, remainder read and written, gradient read.
    "adamw_step_": (2 * (2 + 1 + 1 + 1) + 2) * (3 * H * H + 3 * H * I),
    "gradients_sum_squares": 2 * (3 * H * H + 3 * H * I),
    "group_decode": (1 + 2) * T * H,
    "norm_backward": (2 + 2 + 1 + 2) * T * H,
    # q and k in place, v only read; 12 bits of q and k, 8 of v. q is H wide, k and v half of it.
    "qk_rope_encode12_": (2 + 1) * 2 * T * H + (2 * 2 + 1) * (H + H // 2) * T // 2 + 2 * 2 * 64 * 128,
    "activation_quantize swiglu": (2 * 2 + 1) * T * I,
    "activation_decode swiglu": (2 + 2) * T * I,
    "activation_gradient_bound swiglu": 2 * T * I,
    "activation_backward to FP8 swiglu": (2 + 2 + 4 + 1) * T * I,
    "activation_encode gelu": (2 + 1) * T * I,
    "activation_gradient_bound gelu": 2 * T * I,
    "activation_backward to FP8 gelu": (2 + 1 + 3) * T * I,
    "activation_backward blocks gelu": (2 + 1 + 2 + 1) * T * I,
    "block_quantize_both": (2 + 2) * T * H,
    "cross_entropy_": (2 + 2) * T * 96,
}


# But for those of libraries, which are not bound by memory, the instructions that only the reference calls, and what
# launches the kernels of others.
NOT_MEASURED = {"gemm", "block_gemm", "attention", "attention_backward", "log2", "exp2", "sqrt", "reciprocal", "fma"}


@torch.no_grad()
def test_every_kernel_of_a_step_has_a_case_and_its_bytes_add_up() -> None:
    found: dict[str, int] = {}
    measured = set()
    for family in FAMILIES.values():
        for case in family(INPUTS):
            assert case.op is CATALOGUE[case.op.reference.__name__]
            assert case.name not in found  # names tell cases apart
            found[case.name] = case.moved_bytes(case.call())
            measured.add(case.op.reference.__name__)
    for name, expected in BYTES.items():
        assert found[name] == pytest.approx(expected, rel=0.05), name
    kernels = {name for name, op in CATALOGUE.items() if op.kernel and op.reference.__module__.startswith("overcoat.")}
    assert kernels - measured == NOT_MEASURED


def test_moved_bytes_of_what_is_returned_mutated_and_left_out() -> None:
    """By hand, in bytes: arguments read, results written; mutated ones both; a list is all of its tensors."""
    x, top = torch.ones(4, 16, dtype=torch.bfloat16), torch.tensor(1.0)
    case = KernelCase(quantize, (x, top, "e4m3"))
    assert case.moved_bytes(case.call()) == (128 + 4) + (64 + 4)
    assert case._replace(untouched=100).moved_bytes(case.call()) == 100
    in_place = KernelCase(cross_entropy_, (x, torch.zeros(4, dtype=torch.int64), -100, 0.0, True))
    assert in_place.moved_bytes(in_place.call()) == 128 + 32 + 16 + 128
    many = KernelCase(gradients_sum_squares, ([x, x[:1]],))
    assert many.moved_bytes(many.call()) == 128 + 32 + 8  # FP64


def test_an_output_layer_takes_as_many_columns_as_the_heads_have() -> None:
    """Where they are not as wide as the model."""
    wide = Inputs(BlockShape(Model("Qwen3Config", sizes(256, 384, 1, 4, 2, 96, head_dim=128)), 1, 16), "cpu")
    step = next(case for case in FAMILIES["optimizer"](wide) if case.name == "adamw_step_")
    assert [tuple(weight.shape) for weight in step.arguments[0]][5] == (256, 512)
