"""A whole block against FP64 autograd, and what it owes autograd: `pytest tests/block/test_run.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import overcoat.block.run as block_ops
from overcoat import Recipe, convert
from overcoat.block import attention as attention_ops
from overcoat.block import mlp as mlp_ops
from overcoat.block.spec import Tables
from overcoat.estimate.dry_run import meta_model
from overcoat.estimate.meter import Meter
from overcoat.estimate.workspaces import LibraryAttention
from tests.block.harness import KINDS, RECIPES, block_case, check, evaluate, leaves_of, run
from tests.block.test_attention import SEQUENCE, masks
from tests.exact import BF16_DB, assert_close, combined_db

recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
kinds = pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)
some = pytest.mark.parametrize(
    "name", ["biases, head norm", "gelu, biases", "post", "sandwich", "parallel", "gate of q, biases, head norm"]
)
gates = pytest.mark.parametrize("kwargs", [kwargs for kwargs in KINDS.values() if "output_gate" in kwargs])


@recipes
@kinds
def test_block(kwargs, recipe, device):
    check(block_case(device=device, **kwargs), recipe)


@kinds
def test_checkpointed_block(kwargs, device):
    check(block_case(device=device, **kwargs), Recipe.leanest())


@gates
def test_a_gate_that_is_kept_in_16_bits_with_scales_of_blocks(kwargs, device):
    check(block_case(device=device, **kwargs), Recipe(kept_attention="bf16", linear_scaling="block"))


@pytest.mark.parametrize("kind", masks())
def test_masks_of_a_checkpointed_block(kind, device):
    mask = masks()[kind]
    mask = mask.to(torch.bfloat16) if mask.is_floating_point() else mask
    check(block_case(sequence=SEQUENCE, mask=mask, device=device), Recipe.leanest())


class _Calls(TorchDispatchMode):
    """Names of our ops in the order in which they are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "overcoat":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


@some
def test_a_recomputed_block_repeats_every_bit_where_its_input_is_kept_exactly(name):
    """x made of a code's own values decodes to itself."""
    case = block_case(**KINDS[name])
    recipe = Recipe(kept_format="int8", group_size=16, kept_attention="bf16")  # as a recomputation keeps it
    x = torch.randint(-127, 128, case.inputs["x"].shape, generator=torch.Generator().manual_seed(0))
    x[:, ::16] = 127
    case.inputs["x"] = (x / 127 * 2).to(torch.bfloat16)
    encoded = block_ops.group_encode(case.inputs["x"], "int8", 16)
    decoded = block_ops.group_decode(*encoded, "int8", 16, torch.bfloat16)
    assert torch.equal(decoded, case.inputs["x"])
    compare(run(case, recipe), run(case, replace(recipe, checkpoint="block")))


@pytest.mark.parametrize(("intermediate", "num_kv"), [(384, 2), (384, 1), (344, 2)])
@pytest.mark.parametrize("checkpoint", [None, "block"])
def test_blocks_that_span_two_tensors(intermediate, num_kv, checkpoint, device):
    """128 divides gate's width and k's, or not: the gradients go straight to FP8, or by way of BF16."""
    recipe = Recipe(linear_scaling="block", checkpoint=checkpoint)
    check(block_case(intermediate=intermediate, num_kv=num_kv, device=device), recipe)


def test_one_token_and_odd_counts(device):
    """T = 7 pads the tokens of every wgrad; one token is one key for attention."""
    check(block_case(1, 7, device=device), Recipe())
    check(block_case(1, 7, device=device), Recipe(linear_scaling="block"))
    for recipe in (Recipe(), Recipe.leanest(), Recipe(linear_scaling="block")):
        out, grads = run(block_case(1, 1, device=device), recipe)
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads.values())
        # One key: its probability is 1 whatever q and k are. What is left is the noise of decoded o and v.
        assert grads["q"].norm() < 0.05 * grads["v"].norm()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["kept", "checkpointed"])
def test_rows_of_sequences_are_the_same_tokens(recipe, device):
    """(B, S, H) as (T, H), contiguous or not; and no view, which FSDP2 warns of. On a GPU cuDNN adds dq up in any
    order, which moves a few roundings of the gradient."""
    case = block_case(device=device)
    expected, grads = run(case, recipe)

    def rows(x, strided):
        x = x.view(2, 31, -1)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x

    for strided in (False, True):
        x = rows(case.inputs["x"], strided).detach().requires_grad_()
        y = case.op({**case.inputs, "x": x}, recipe)
        assert y.shape == x.shape
        assert y._base is None
        assert torch.equal(y.flatten(0, 1), expected)
        y.backward(rows(case.grad.to(y.dtype), strided))
        got = x.grad.flatten(0, 1)
        distance = (got - grads["x"]).norm() / grads["x"].norm()
        assert distance == 0 if device.type == "cpu" else distance < 0.03


def test_a_parallel_branch_does_not_use_the_largest_gradient_of_another(monkeypatch):
    """Each branch's gradient is the block's own, whose maximum nobody has looked for."""
    seen = []
    quantize = mlp_ops.quantize_gradient
    monkeypatch.setattr(mlp_ops, "quantize_gradient", lambda *args: seen.append(args[3]) or quantize(*args))
    linear_gemm = attention_ops.linear_backward
    monkeypatch.setattr(attention_ops, "linear_backward", lambda *args: seen.append(args[-1]) or linear_gemm(*args))
    run(block_case(wiring="parallel"), Recipe())
    assert seen == [None, None]
    run(block_case(), Recipe())
    assert seen[2] is None
    assert seen[3] is not None


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@some
def test_non_finite_reaches_output_and_gradients(name, bad, device):
    """It must reach the loss, and through the gradients found_inf; nothing clamps it away."""
    case = block_case(device=device, **KINDS[name])
    case.inputs["x"][3, 5] = bad
    out, grads = run(case, Recipe())
    assert not out.isfinite().all()
    assert not grads["q"].isfinite().all()
    assert not grads["down"].isfinite().all()


@pytest.mark.parametrize("hidden", [136, 264])
@pytest.mark.parametrize("name", ["gelu, biases", "post"])
def test_widths_that_fit_no_group(hidden, name, device):
    check(block_case(2, 13, hidden, device=device, dtype=torch.float32, **KINDS[name]), Recipe())


WIDE = 11008 / 4096  # gate, up and h of Llama-2-7B in 16 bits, in U
LLAMA = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, vocab_size=32)


def _fullest(recipe, rows, retain_graph=False, config=LLAMA):
    """What a block and its result hold at most in its backward of rows of 2048 tokens, in U."""
    model = meta_model(config, torch.bfloat16)
    convert(model, recipe)
    x = torch.empty(rows, 2048, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tables = tuple(torch.empty(1, 2048, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    dy, meter = torch.empty_like(x), Meter()
    meter.leave_out([*model.parameters(), *model.buffers(), x, dy, *tables])
    with meter, LibraryAttention():
        y = model.model.layers[0](x, position_embeddings=tables)
        meter.mark("backward")
        y.backward(dy, retain_graph=retain_graph)
    meter.stop()
    ((_, fullest, _),) = meter.account(["all"] * meter.count)
    most = sum(fullest.values())
    return most / x.nbytes


RECIPES_THAT_END_ALIKE = pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])


ATTENTION_KEPT = 2 + 1.5 * 2 / 128  # q and k in 12 bits, v in 8, maxima of 128


@RECIPES_THAT_END_ALIKE
def test_a_backward_of_many_tokens_holds_what_it_still_needs(recipe):
    """Fullest where the gradients of gate and up are made: the block's result; what is kept, of the output projection
    scales alone; dy transposed for wgrad; dh; gate's and up's gradients in both layouts; h transposed. The gradients of
    the weights are 0.6 U here, and not there yet."""
    kept = (0.5 + 0.5 + WIDE) * (1 + 2 / 128) + ATTENTION_KEPT
    gradients = 0.5 + WIDE + 2 * WIDE + WIDE / 2
    assert _fullest(recipe, 32) == pytest.approx(1 + kept + gradients, abs=0.03)
    # What is kept for another backward stays: attention's part is the fullest then.
    if recipe.checkpoint is None:
        assert _fullest(recipe, 32, retain_graph=True) > 1 + kept + gradients + 1


def test_a_retained_graph_gives_the_same_gradients_again():
    case = block_case()
    leaves = {name: case.inputs[name].detach().requires_grad_() for name in ("x", "q", "o", "gate", "down")}
    for recipe in (Recipe(), Recipe.leanest()):
        y = case.op({**case.inputs, **leaves}, recipe)
        arguments = y, list(leaves.values()), case.grad.to(y.dtype)
        first, second = (torch.autograd.grad(*arguments, retain_graph=True) for _ in range(2))
        third = torch.autograd.grad(*arguments)
        for again in (second, third):
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(*arguments)


def test_input_that_no_kernel_takes_is_refused():
    case = block_case()
    with pytest.raises(ValueError, match=r"shape \(0, 256\): leave out batches without tokens"):
        case.op({**case.inputs, "x": case.inputs["x"][:0]}, Recipe())
    tables = torch.zeros(1, 1).expand(2**24, 128)
    with pytest.raises(ValueError, match=r"shape \(16777216, 128\): give them fewer than 2\^31 elements"):
        block_ops.run_block(case.inputs["x"], None, Tables(tables, tables), Recipe())


# ---- what a block owes autograd -------------------------------------------------------------------------------------


def same(name, expected, got):
    """Equal bytes on the CPU; on CUDA, where library kernels add in any order, equal to two BF16 roundings."""
    assert (expected is None) == (got is None), f"{name}: {'a' if expected is None else 'no'} gradient"
    if expected is None:
        return
    assert expected.dtype == got.dtype
    if expected.device.type == "cpu":
        assert torch.equal(expected, got), f"{name} differs"
    else:
        assert_close(name, expected, got, combined_db(BF16_DB, BF16_DB), extra=6.0)


def compare(expected, got):
    same("out", expected[0], got[0])
    assert expected[1].keys() == got[1].keys()
    for name in expected[1]:
        same(f"d{name}", expected[1][name], got[1][name])


def op_of(case):
    return lambda inputs: case.op(inputs, Recipe())


@pytest.mark.parametrize("name", ["biases, head norm", "post"])
def test_strided_inputs_and_gradients(name, device):
    """Transposed and expanded (as `sum().backward()` sends), read like contiguous ones."""
    case = block_case(device=device, **KINDS[name])
    expected = run(case, Recipe())
    strided = case.grad.t().contiguous().t()

    def op(inputs):
        stride = {n: x.t().contiguous().t() if x is not None and x.dim() == 2 else x for n, x in inputs.items()}
        return case.op(stride, Recipe())

    compare(expected, evaluate(op, case.inputs, case.names(), strided))
    ones, expanded = torch.ones_like(case.grad), case.grad.new_ones(()).expand(case.grad.shape)
    compare(*(evaluate(op_of(case), case.inputs, case.names(), grad) for grad in (ones, expanded)))


def test_frozen_weights_cost_no_wgrad():
    case = block_case()
    needs_grad = {"x": 0, "q": 1, "o": 1, "up": 1, "down": 1}
    for name, products in needs_grad.items():
        leaf = case.inputs[name].clone().requires_grad_()
        y = case.op({**case.inputs, name: leaf}, Recipe())
        with _Calls() as calls:
            y.backward(case.grad.to(y.dtype))
        assert Counter(calls.names)["gemm"] == 4 + products, name  # four dgrads


@pytest.mark.parametrize("weight", ["q", "o", "up", "down", "pre_mlp"])
def test_a_weight_changed_in_place_before_the_backward_is_an_error(weight):
    """Autograd keeps the parameter itself; its FP8 copy is made again in the backward, so it must be the same one."""
    case = block_case()
    leaves = leaves_of(case.inputs, case.names())
    out = case.op(leaves, Recipe())
    with torch.no_grad():
        leaves[weight].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(case.grad)


def test_a_second_derivative_is_an_error_and_not_zero():
    case = block_case()
    leaves = leaves_of(case.inputs, ["x"])
    y = case.op(leaves, Recipe())
    for loss in (y.square().sum(), y.sum()):  # the gradient of y has one itself, or none
        with pytest.raises(RuntimeError, match=r"create_graph=True: .* no second derivative"):
            torch.autograd.grad(loss, leaves["x"], create_graph=True, retain_graph=True)


@pytest.mark.parametrize(
    ("kwargs", "recipe", "expected"),
    [
        ({}, Recipe(), ["amax", "quantize"]),
        ({"biases": True}, Recipe(), ["amax", "quantize"]),
        ({"qk_norm": "head"}, Recipe(), [""]),
        ({}, Recipe(linear_scaling="block"), [""]),
    ],
    ids=["llama", "biases", "head norm", "scales of blocks"],
)
def test_the_gradient_of_q_k_v_goes_straight_into_fp8(kwargs, recipe, expected):
    """But for head norms and scales of blocks: those read it in 16 bits."""
    case = block_case(**kwargs)
    y = case.op({**case.inputs, "x": case.inputs["x"].clone().requires_grad_()}, recipe)
    with _Calls() as calls:
        y.backward(case.grad.to(y.dtype))
    found = [name.removeprefix("qk_rope_") for name in calls.names if name.startswith("qk_rope_") and "back" in name]
    assert found == [f"backward_{name}".rstrip("_") for name in expected]
