"""A whole block, op by op and as `Recipe.checkpoint = "block"`: `pytest tests/ops/test_block.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Starcoder2Config

import overcoat.ops.block as block_ops
from overcoat import Recipe, convert
from overcoat.estimate.dry_run import meta_model
from overcoat.estimate.meter import LibraryAttention, Meter
from overcoat.ops.attention import Heads, Rotary, attention
from tests.exact import E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, combined_db
from tests.ops.harness import RECIPES, block_case, check, run
from tests.ops.test_attention import SEQUENCE, masks

recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
kinds = pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"biases": True},
        {"head_norm": True},
        {"biases": True, "head_norm": True},
        {"gelu": "tanh", "biases": True},
        {"gelu": "none"},
    ],
    ids=["llama", "biases", "head norm", "both", "gelu with biases", "gelu"],
)


@recipes
@kinds
def test_block(kwargs, recipe, device):
    check(block_case(device=device, **kwargs), recipe)


@kinds
@pytest.mark.parametrize("kind", [None, *masks()])
def test_checkpointed_block(kwargs, kind, device):
    mask = None if kind is None else masks()[kind]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(torch.bfloat16)
    check(block_case(sequence=SEQUENCE, mask=mask, device=device, **kwargs), Recipe.leanest())


@recipes
def test_checkpointed_gradients_are_those_of_the_block(recipe, device):
    """The backward of the block at x' = decode(encode(x)) instead of x.

    The outputs are equal to the bit. Between the gradients stands the noise of x' (the kept code's), and what it makes
    fall differently: every value that enters a GEMM is rounded anew, and where x' differs from x by more than a step
    of FP8 that rounding is independent of the other. So at worst the two are as far apart as two independent FP8
    backwards: each at the distance `check` allows from the truth.
    """
    case = block_case(biases=True, head_norm=True, device=device)
    outputs, grads = run(case, recipe)
    checkpointed_outputs, checkpointed = run(case, replace(recipe, checkpoint="block"))
    assert torch.equal(outputs[0], checkpointed_outputs[0])
    limits = case.limits(recipe)
    for name, grad in grads.items():
        allowed = combined_db(limits[name], limits[name])
        assert_close(f"d{name}", grad, checkpointed[name], allowed, extra=0.5)


class _Calls(TorchDispatchMode):
    """Names of our ops in the order in which they are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "overcoat":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


def test_a_recomputed_block_does_not_look_for_what_its_forward_has_found():
    """The weights' maxima; and it ends where the backward's own inputs are there, before the product by down."""
    case, found = block_case(), {}
    for recipe in (Recipe(), Recipe.leanest()):
        names = ("x", "q", "k", "v", "o", "gate", "up", "down")
        leaves = {name: case.inputs[name].clone().requires_grad_() for name in names}  # weights nobody has seen
        with _Calls() as calls:
            (y,) = case.op({**case.inputs, **leaves}, recipe)
            forward = Counter(calls.names)
            y.backward(case.grads[0].to(y.dtype))
        found[recipe.checkpoint] = forward, Counter(calls.names) - forward
    (forward, backward), (forward_of_leanest, with_forward) = found.values()
    assert forward["stack_amax"] == forward_of_leanest["stack_amax"] == 4
    assert with_forward["stack_amax"] == backward["stack_amax"] == 0
    # Forward products: q, k and v stacked, o, gate and up stacked, down.
    assert (forward["gemm"], with_forward["gemm"] - backward["gemm"]) == (4, 3)
    assert with_forward["activation_quantize"] == 0 < forward["activation_quantize"]


@pytest.mark.parametrize(
    ("kwargs", "recipe", "expected"),
    [
        ({}, Recipe(), ["amax", "quantize"]),
        ({"biases": True}, Recipe(), ["amax_sums", "quantize"]),
        ({"head_norm": True}, Recipe(), [""]),
        ({}, Recipe(linear_scaling="block"), ["block"]),
        ({"biases": True}, Recipe(linear_scaling="block"), [""]),
    ],
    ids=["llama", "biases", "head norm", "scales of blocks", "scales of blocks, biases"],
)
def test_the_gradient_of_q_k_v_goes_straight_into_fp8(kwargs, recipe, expected):
    """But for head norms, and for biases with scales of blocks: those read it in 16 bits."""
    case = block_case(**kwargs)
    (y,) = case.op({**case.inputs, "x": case.inputs["x"].clone().requires_grad_()}, recipe)
    with _Calls() as calls:
        y.backward(case.grads[0].to(y.dtype))
    found = [name.removeprefix("qk_rope_") for name in calls.names if name.startswith("qk_rope_") and "back" in name]
    assert found == [{"": "backward", "block": "block_backward"}.get(name, f"backward_{name}") for name in expected]


def test_checkpointed_gradients_are_equal_where_the_input_is_kept_exactly():
    """x made of a code's own values decodes to itself: recomputing the block must then repeat every bit."""
    case = block_case(biases=True, head_norm=True)
    recipe = Recipe(kept_format="int8", group_size=16, kept_attention="bf16")  # as a recomputation keeps it
    x = torch.randint(-127, 128, case.inputs["x"].shape, generator=torch.Generator().manual_seed(0))
    x[:, ::16] = 127
    case.inputs["x"] = (x / 127 * 2).to(torch.bfloat16)
    encoded = block_ops.group_encode(case.inputs["x"], None, "int8", 16)
    decoded = block_ops.group_decode(*encoded, None, "int8", 16, torch.bfloat16)
    assert torch.equal(decoded, case.inputs["x"])
    _, grads = run(case, recipe)
    _, checkpointed = run(case, replace(recipe, checkpoint="block"))
    for name, grad in grads.items():
        if name == "x":  # op by op, autograd sums the two branches of a norm in one pass as well: same bits
            assert torch.equal(grad, checkpointed[name])
        assert torch.equal(grad, checkpointed[name]), name


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
        outputs, grads = run(block_case(1, 1, device=device), recipe)
        assert outputs[0].isfinite().all()
        assert all(grad.isfinite().all() for grad in grads.values())
        # One key: its probability is 1 whatever q and k are. What is left is the noise of decoded o and v.
        assert grads["q"].norm() < 0.05 * grads["v"].norm()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["kept", "checkpointed"])
def test_rows_of_sequences_are_the_same_tokens(recipe, device):
    """(B, S, H) as (T, H), contiguous or not; and no view, which FSDP2 warns of. On a GPU cuDNN adds dq up in any
    order, which moves a few roundings of the gradient."""
    case = block_case(device=device)
    (expected,), grads = run(case, recipe)

    def rows(x, strided):
        x = x.view(2, 31, -1)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x

    for strided in (False, True):
        x = rows(case.inputs["x"], strided).detach().requires_grad_()
        (y,) = case.op({**case.inputs, "x": x}, recipe)
        assert y.shape == x.shape
        assert y._base is None
        assert torch.equal(y.flatten(0, 1), expected)
        y.backward(rows(case.grads[0].to(y.dtype), strided))
        got = x.grad.flatten(0, 1)
        distance = (got - grads["x"]).norm() / grads["x"].norm()
        assert distance == 0 if device.type == "cpu" else distance < 0.03


@pytest.mark.parametrize(
    ("part", "kwargs"),
    [
        ("mlp_backward", {}),
        ("qkv_gradient_quantized", {}),
        ("mlp_backward", {"gelu": "tanh", "biases": True}),
    ],
)
def test_a_missing_branch_is_seen(part, kwargs, monkeypatch):
    """The checkpointed block adds the branches' gradients itself: drop one and `check` must fail."""
    original = getattr(block_ops, part)

    def spoiled(*args, **kwargs):
        results = original(*args, **kwargs)
        gradient = results if part == "qkv_gradient_quantized" else results[0]
        zeros = gradient._replace(
            data=torch.zeros_like(gradient.data), transposed=torch.zeros_like(gradient.transposed)
        )
        return zeros if gradient is results else (zeros, *results[1:])

    monkeypatch.setattr(block_ops, part, spoiled)
    with pytest.raises(AssertionError):
        check(block_case(**kwargs), Recipe.leanest())


def test_gradients_reach_the_input_through_both_residual_branches(device):
    """With all projections 0 the block is the identity, forward and backward, to the bit."""
    for recipe in (Recipe(), Recipe.leanest()):
        case = block_case(device=device)
        for name in ("o", "down"):
            case.inputs[name] = torch.zeros_like(case.inputs[name])
        outputs, grads = run(case, recipe)
        assert torch.equal(outputs[0], case.inputs["x"])
        assert torch.equal(grads["x"], case.grads[0])


WIDE = 11008 / 4096  # gate, up and h of Llama-2-7B in 16 bits, in U
LLAMA = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, vocab_size=32)
STARCODER = Starcoder2Config(
    hidden_size=4096, intermediate_size=16384, num_hidden_layers=1, vocab_size=32, num_attention_heads=32,
    num_key_value_heads=32, use_bias=False, residual_dropout=0.0, embedding_dropout=0.0,
)  # fmt: skip


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
    ((_, most, _),) = meter.account(["all"] * meter.count).phases()
    return most / x.nbytes


RECIPES_THAT_END_ALIKE = pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])


def _attention_kept(recipe):
    """q and k in 12 bits, v in 8, maxima of 128; a recomputation's: q, k, v and o in 16 bits, lse."""
    return 4 + 2 / 128 if recipe.checkpoint else 2 + 1.5 * 2 / 128


@RECIPES_THAT_END_ALIKE
def test_a_backward_of_many_tokens_holds_what_it_still_needs(recipe):
    """Fullest where the gradients of gate and up are made: the block's result; what is kept, of the output projection
    scales alone; dy transposed for wgrad; dh; gate's and up's gradients in both layouts; h transposed. The gradients of
    the weights are 0.6 U here, and not there yet."""
    kept = (0.5 + 0.5 + WIDE) * (1 + 2 / 128) + _attention_kept(recipe)
    gradients = 0.5 + WIDE + 2 * WIDE + WIDE / 2
    assert _fullest(recipe, 32) == pytest.approx(1 + kept + gradients, abs=0.03)
    # What is kept for another backward stays: attention's part is the fullest then.
    if recipe.checkpoint is None:
        assert _fullest(recipe, 32, retain_graph=True) > 1 + kept + gradients + 1


@RECIPES_THAT_END_ALIKE
def test_a_backward_of_few_tokens_holds_what_it_still_needs(recipe):
    """With 4 rows fullest in attention: the block's result; the first norm's input; gradients of o's, gate's, up's and
    down's weights; dx and do; rotated q, k, v, and o; their gradients, and 129 numbers in FP32 per token and head.

    With one row in the last wgrad: gradients of all weights; the first norm's input, and its output transposed; the
    gradient of q, k, v in both layouts; dx of the projections and of the residual."""
    first = 1 + 0.5 * (1 + 2 / 128)
    attention = 1 + 1 + 3 + 1 + 3 + 4 * 129 / (2 * 128)
    if recipe.checkpoint is None:
        assert _fullest(recipe, 4) == pytest.approx(first + (1 + 3 * WIDE) / 2 + attention, abs=0.03)
    assert _fullest(recipe, 1) == pytest.approx(first + 2 * (4 + 3 * WIDE) + 0.5 + 3 + 2, abs=0.03)


def test_a_backward_without_gate_holds_what_it_still_needs():
    """As above, with u and du of 4 U in 16 bits instead of gate and up, and h as wide."""
    kept = (0.5 + 0.5 + 2) * (1 + 2 / 128) + _attention_kept(Recipe())
    assert _fullest(Recipe(), 32, config=STARCODER) == pytest.approx(1 + kept + 0.5 + 4 + 4 + 2, abs=0.03)


def test_attentions_own_backward_holds_what_it_still_needs():
    """The op on its own: fullest in attention, where nothing but what it keeps is there besides."""
    qkv = torch.empty(8192, 3 * 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tables = [torch.empty(2048, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    do, meter = qkv.new_empty(8192, 4096), Meter()
    meter.leave_out([qkv, do, *tables])
    with meter, LibraryAttention():
        o = attention(qkv, Rotary(*tables), Heads(4, 32, 32, 128, 0.1), Recipe())
        meter.mark("backward")
        o.backward(do)
    meter.stop()
    ((_, most, _),) = meter.account(["all"] * meter.count).phases()
    kept, work = 1 + 2 * (1 + 2 / 128), 3 + 1 + 3 + 4 * 129 / (2 * 128)
    assert most / do.nbytes == pytest.approx(kept + work, abs=0.03)


def test_a_retained_graph_gives_the_same_gradients_again():
    case = block_case()
    leaves = {name: case.inputs[name].detach().requires_grad_() for name in ("x", "q", "o", "gate", "down")}
    for recipe in (Recipe(), Recipe.leanest()):
        (y,) = case.op({**case.inputs, **leaves}, recipe)
        arguments = y, list(leaves.values()), case.grads[0].to(y.dtype)
        first, second = (torch.autograd.grad(*arguments, retain_graph=True) for _ in range(2))
        third = torch.autograd.grad(*arguments)
        for again in (second, third):
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(*arguments)


def test_input_that_no_kernel_takes_is_refused():
    case = block_case()
    with pytest.raises(ValueError, match=r"shape \(0, 256\): leave batches without tokens out"):
        case.op({**case.inputs, "x": case.inputs["x"][:0]}, Recipe())
    tables = torch.zeros(1, 1).expand(2**24, 128)
    with pytest.raises(ValueError, match=r"shape \(16777216, 128\): give them fewer than 2\^31 elements"):
        block_ops.decoder_block(case.inputs["x"], None, Rotary(tables, tables), None, Recipe())


def test_limits_are_those_of_the_formats():
    """The derivation used by `check`, once with numbers: 28.5 dB forward, 24.5 dB backward, 24.4 with sqrt8."""
    assert combined_db(E4M3_DB, E4M3_DB) == pytest.approx(28.5, abs=0.05)
    assert combined_db(FLOAT8_DB["e5m2"], E4M3_DB) == pytest.approx(24.5, abs=0.05)
    assert combined_db(FLOAT8_DB["e5m2"], E4M3_DB, KEPT_DB["sqrt8"]) == pytest.approx(24.45, abs=0.05)
