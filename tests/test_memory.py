"""What a forward keeps, as reported and as truly alive: `pytest tests/test_memory.py`.

U = tokens * hidden * 2 bytes. On a Llama block with I = 2.6875 H the design's sum is 0.5 (norm) + 2 (q, k, v, o) + 0.5
(norm) + 2.6875 (gate, up) = 5.6875 U, and with it the groups' maxima (1/64 of that) and the log-sum-exp (1/64 U for
heads 128 wide). cos, sin and the mask are shared by all layers and counted once for the model."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from overcoat import Recipe, memory
from overcoat.memory import record_kept
from tests.block.harness import block_case

TOKENS, HIDDEN, INTERMEDIATE = 256, 1024, 2752
UNIT = TOKENS * HIDDEN * 2
SHARED = {("attention", "cos"), ("attention", "sin"), ("block", "cos"), ("block", "sin")}
OURS = {"attention input", "attention", "attention output", "mlp input", "mlp", "block"}


class OneBlock(nn.Module):
    """A case's op as a module, so that its parameters are known as such."""

    def __init__(self, case, recipe):
        super().__init__()
        self.case, self.recipe = case, recipe
        for name, x in case.inputs.items():
            if x is not None and name not in ("x", *case.constants):
                self.register_parameter(f"p_{name}", nn.Parameter(x))

    def forward(self, x):
        parameters = {name.removeprefix("p_"): p for name, p in self.named_parameters()}
        return self.case.op({**self.case.inputs, **parameters, "x": x}, self.recipe)


@pytest.fixture(scope="module")
def large_case():
    return block_case(2, TOKENS // 2, HIDDEN, intermediate=INTERMEDIATE, num_q=8, num_kv=8)


def record(case, recipe, blocks=1):
    """The report of a few blocks in a row, and what came out (its graph holds what is kept)."""
    module = OneBlock(case, recipe)
    x = case.inputs["x"].clone().requires_grad_()
    with record_kept(module) as kept:
        out = x
        for _ in range(blocks):
            out = module(out)
    return kept, out


def units(kept, leave_out=SHARED):
    return sum(size for row, size in kept.by_tensor().items() if row not in leave_out) / UNIT


def graph_storages(out, without):
    """Bytes of every tensor that the nodes below `out` hold, by storage: autograd's own account, not the report's."""
    seen, todo, storages = set(), [out.grad_fn], {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        saved = list(getattr(node, "saved_tensors", ())) if hasattr(node, "saved_tensors") else []
        saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_") and name != "_saved_tensors"]
        for x in saved:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in without:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return storages


def pointers(*tensors):
    return {x.untyped_storage().data_ptr() for x in tensors}


LIMITS = {
    "default": (Recipe(), 5.9),
    "attention bf16": (Recipe(kept_attention="bf16"), 7.9),
    "int8": (Recipe(kept_format="int8"), 5.9),
    "blocks": (Recipe(linear_scaling="block"), 5.9),
    "leanest": (Recipe.leanest(), 0.6),
    # 1x16 groups of BF16 maxima cost 1/8 on norms, gate and up: 0.125 * 3.6875 U more.
    "paper": (Recipe.paper(), 7.9 + 0.46),
}


@pytest.mark.parametrize(("recipe", "limit"), LIMITS.values(), ids=LIMITS)
def test_a_block_keeps_no_more_than_the_design_says(large_case, recipe, limit):
    kept, _ = record(large_case, recipe)
    assert units(kept) <= limit
    assert {row.op for row in kept.rows} <= OURS, "something unnamed is kept"


@pytest.mark.parametrize(("kept_attention", "expected"), [("8bit", 0.5 + 1 / 128), ("bf16", 1.0)])
def test_an_output_gate_is_kept_in_groups_or_in_16_bits(large_case, kept_attention, expected):
    """As wide as the stream; nothing else is kept for it."""
    recipe = Recipe(kept_attention=kept_attention)
    gated = block_case(2, TOKENS // 2, HIDDEN, intermediate=INTERMEDIATE, num_q=8, num_kv=8, output_gate="g")
    kept = record(gated, recipe)[0]
    assert kept.by_op()["attention gate"] / UNIT == expected
    assert units(kept) - units(record(large_case, recipe)[0]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("recipe", "name"), [(Recipe(), "w_amax"), (Recipe.leanest(), "in_proj, out_proj")], ids=["default", "leanest"]
)
def test_what_shares_a_storage_is_one_row_of_the_whole(recipe, name):
    """The four weight maxima of a small block."""
    by_tensor = record(block_case(), recipe)[0].by_tensor()
    assert by_tensor["block", name] == 4 * 4 * 4
    assert len([row for row in by_tensor if row[1] in ("w_amax", "in_proj", "out_proj", name)]) == 1


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in LIMITS.values()], ids=LIMITS)
def test_the_report_is_what_autograd_holds(recipe):
    """Walk the graph and add up every node's saved tensors: the same bytes as reported, no more and no less."""
    case = block_case(biases=True, qk_norm="head", output_gate="q")
    module = OneBlock(case, recipe)
    x = case.inputs["x"].clone().requires_grad_()
    with record_kept(module) as kept:
        pass
    assert kept.total_bytes == 0
    out = module(x)  # the graph of an unrecorded forward shows its tensors as they are
    storages = graph_storages(out, pointers(*module.parameters()))
    with record_kept(module) as kept:
        again = module(x)
    assert sum(storages.values()) == kept.total_bytes
    assert again.shape == out.shape


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(kept_attention="bf16"), Recipe.leanest(), Recipe(linear_scaling="block")],
    ids=["8", "16", "lean", "blocks"],
)
def test_nothing_else_stays_alive(recipe):
    """Every tensor born in the forward and alive after it is the output or in the report; after the backward, none."""
    case = block_case(biases=True, qk_norm="head")
    module = OneBlock(case, recipe)
    x = case.inputs["x"].clone().requires_grad_()
    out = module(x)  # warm up
    del out
    gc.collect()
    before = pointers(x, *module.parameters(), *(t for t in case.inputs.values() if t is not None))
    born = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, torch.Tensor):
                    born.append((weakref.ref(t.untyped_storage()), t.untyped_storage().nbytes()))
            return result

    with Watch():
        out = module(x)
    gc.collect()
    alive = {}
    for reference, size in born:
        storage = reference()
        if storage is not None and storage.data_ptr() not in before:
            alive[storage.data_ptr()] = size
    held = graph_storages(out, pointers(*module.parameters()))
    assert set(held) <= set(alive) | before, "the watch misses tensors"
    expected = set(held) | pointers(out)
    assert set(alive) <= expected, f"{sum(s for p, s in alive.items() if p not in expected)} bytes are alive unreported"
    out.sum().backward()


def test_other_modules_appear_under_their_path():
    """Plain torch modules inside a recorded model: saved inputs by path, parameters and their views left out."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(3, 8, requires_grad=True)
    with record_kept(model) as kept:
        model(x)
    assert kept.by_op() == {"0": 3 * 8 * 4, "1": 3 * 16 * 4, "2": 3 * 16 * 4}
    assert memory._active == []
    with record_kept(model) as twice:
        model(x)
        model(x)  # x itself is the same storage
    assert twice.total_bytes == 2 * kept.total_bytes - 3 * 8 * 4


@pytest.mark.parametrize("op", [torch.exp, torch.rsqrt, torch.relu_, lambda x: x.softmax(-1)])
def test_a_graph_that_is_dropped_is_freed(op):
    """Of ops that save their result; its gradients, and theirs, stay as they are."""

    w = nn.Parameter(torch.tensor([0.5, 2.0]))

    def gradients(y):
        (first,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return first, *torch.autograd.grad(first[0], w)

    with record_kept():
        y, other = op(w * w), op(w * w)
    assert all(map(torch.equal, gradients(other), gradients(op(w * w))))
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None


def test_hooks_are_removed_after_an_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), record_kept(nn.Linear(2, 2)):
        nn.Linear(2, 2)(torch.ones(1, 3))
    assert memory._active == []
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


# ---- the allocator --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_segments_that_grow_also_after_the_import():
    """PyTorch reads the environment at the first allocation, so asking for it after `import torch` is in time."""
    program = """
import torch
from overcoat.memory import use_expandable_segments
use_expandable_segments()
x = torch.zeros(2**22, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "[True]", run.stderr


# ---- Host memory: what is locked and unlocked, and what the pool lends ----------------------------------------------
