"""Kept activations in host memory: every bit of the step without it, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import overcoat
from overcoat import Recipe, memory
from overcoat.block import offload
from overcoat.block import run as block
from overcoat.block.offload import AHEAD, LEAST_BYTES, MOST_AHEAD, choose_blocks, transfers
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly
from tests.waits import waiting_is_an_error

ALL = Recipe(offload_blocks="all")
LAYERS = 6
RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    "block scales": Recipe(linear_scaling="block"),
}


@pytest.fixture(autouse=True)
def _own_transfers():
    """What other tests have left is not counted here."""
    with offload.separate(torch.device("cpu")):
        yield


@pytest.fixture(scope="module")
def untouched():
    return make_model("llama", layers=LAYERS)


def converted(model, recipe, device="cpu"):
    model = copy.deepcopy(model).to(device)
    overcoat.convert(model, recipe)
    return model


def loss_of(model, seed=0, kind="causal"):
    device = next(model.parameters()).device
    return model(**{name: value.to(device) for name, value in make_batch(kind, length=64, seed=seed).items()}).loss


def backward(model):
    loss_of(model).backward()


def assert_changes_nothing(model, run, recipe=ALL):
    """`run` leaves the gradients that it leaves without offloading."""
    one, other = converted(model, recipe), converted(model, replace(recipe, offload_blocks=0))
    for each in (one, other):
        run(each)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def pool(device="cpu"):
    return transfers(torch.device(device)).pool


def assert_all_given_back(buffers=LAYERS - AHEAD):
    gc.collect()
    assert len(pool().buffers) == len(pool().free) == buffers


# ---- which blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 12, 32])
@pytest.mark.parametrize("tower", [0, 5])
def test_as_many_blocks_as_asked_for_are_chosen(blocks, tower):
    """A tower's when the others are used up, and of the others none that would come back before it has left."""
    able, others = max(tower + blocks - AHEAD, 0), max(blocks - AHEAD, 0)
    for count in range(blocks + tower + 3):
        places, ahead = choose_blocks(count, tower + blocks, tower)
        assert len(places) == min(count, able)
        assert sum(place >= tower for place in places) == min(count, others)
        assert AHEAD <= ahead <= MOST_AHEAD
        assert all(place < tower + blocks - ahead for place in places)
        assert count == 0 or others == 0 or tower in places
    assert choose_blocks("all", tower + blocks, tower) == (set(range(able)), AHEAD)


def test_copies_have_time_and_few_are_under_way():
    """A block's memory is given back by when the second offloaded block behind it has run."""
    assert choose_blocks(8, 36) == (set(range(0, 32, 4)), 4)
    assert choose_blocks(3, 10, 1) == ({1, 2, 4}, 4)
    assert choose_blocks(5, 9) == ({0, 1, 2, 3, 4}, 3)
    assert choose_blocks(24, 36)[1] == 3
    for count in range(1, 31):
        places, ahead = choose_blocks(count, 32)
        for first in range(32):
            assert sum(first <= place < first + ahead for place in places) <= AHEAD + 1


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "count"),
    mostly_nightly(
        [*((name, "all") for name in RECIPES), ("default", 1), ("leanest", 3)],
        [("default", "all"), ("leanest", 3), ("block scales", "all")],
    ),
)
def test_gradients_are_equal_bit_for_bit(untouched, recipe, count, monkeypatch):
    """Two micro-batches; the second one's buffers are those of the first."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    recipe = replace(RECIPES[recipe], offload_blocks=count)
    assert_changes_nothing(untouched, lambda model: [loss_of(model, seed).backward() for seed in range(2)], recipe)
    assert_all_given_back(LAYERS - AHEAD if count == "all" else count)


@pytest.mark.parametrize("order", [pytest.param((0, 1), marks=pytest.mark.nightly), (1, 0)])
def test_several_forwards_before_the_backwards(untouched, order):
    def run(model):
        losses = [loss_of(model, seed) for seed in range(2)]
        for place in order:
            losses[place].backward()

    assert_changes_nothing(untouched, run)
    assert_all_given_back(2 * (LAYERS - AHEAD))


def test_a_graph_used_twice(untouched):
    """The loss of all logits: the lean one multiplies its gradients in place."""

    def run(model):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_changes_nothing(untouched, run, replace(ALL, head=None))
    assert_all_given_back()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_blocks(untouched, reentrant):
    def run(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        backward(model)

    assert_changes_nothing(untouched, run)
    assert_all_given_back(len(pool().buffers))
    if not reentrant:
        assert pool().buffers == []  # the checkpoint's hooks are in force: it keeps nothing


# ---- what is kept where ---------------------------------------------------------------------------------------------


def test_large_tensors_of_the_chosen_blocks_are_in_host_memory(untouched):
    model, plain = converted(untouched, ALL), converted(untouched, Recipe())
    with memory.record_kept(model) as kept:
        loss = loss_of(model)
    with memory.record_kept(plain) as expected:
        loss_of(plain)
    assert kept.by_tensor() == expected.by_tensor()
    assert expected.host_bytes == 0
    moved = [row for row in kept.rows if row.on_host]
    assert {(row.op, row.name) for row in moved} == {("mlp", "codes"), ("attention", "qkv")}
    assert len(moved) == 2 * (LAYERS - AHEAD)
    assert min(row.bytes for row in moved) >= LEAST_BYTES
    assert kept.host_bytes == sum(row.bytes for row in moved) == pool().total_bytes  # multiples of 16 as they are
    assert "of it in host memory" in str(kept)
    assert "host" not in str(expected)
    loss.backward()


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise torch.OutOfMemoryError("out of memory")


def _fail(*_):
    raise torch.OutOfMemoryError("out of memory")


def _fail_backward(_module, args):
    return (_Broken.apply(args[0]), *args[1:])


@pytest.mark.parametrize("hook", [_fail, _fail_backward], ids=["forward", "backward"])
def test_a_step_that_fails_midway_loses_nothing(untouched, hook):
    """As where memory runs out: the error ends the step, and the next one is right and finds all buffers."""

    def run(model):
        handle = model.model.layers[3].register_forward_pre_hook(hook)
        with pytest.raises(torch.OutOfMemoryError):
            backward(model)
        handle.remove()
        model.zero_grad()
        assert_all_given_back(len(pool().buffers))
        backward(model)

    assert_changes_nothing(untouched, run)
    assert_all_given_back()


# ---- what is said is what happens -----------------------------------------------------------------------------------


def said(report):
    return [row.name for row in report.layers if "in host memory" in row.detail]


def left(model, monkeypatch, **inputs):
    """The layers whose tensors have left the device by the end of a forward."""
    stored, names = [], []
    store = offload.Transfers.store
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    monkeypatch.setattr(offload.Transfers, "store", lambda *args: stored.append(store(*args)) or stored[-1])
    for name, layer in overcoat.models.family.decoder_layers(model).items():
        layer.register_forward_hook(lambda *_, name=name: names.extend([name] * (len(stored) - len(names))))
    model.train()(**(inputs or make_batch(length=32)))
    return [name for name, one in zip(names, stored, strict=True) if one.on_device is None]


def _freeze(model, layers):
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:layers].requires_grad_(False)


FROZEN = {
    "no layer": (lambda model: _freeze(model, 0), 6),
    "first layers": (lambda model: _freeze(model, 4), 2),
    "layers alone": (lambda model: model.model.layers[:4].requires_grad_(False), 6),
    "layers between": (lambda model: model.model.layers[1:6].requires_grad_(False), 6),
    "input wants gradients": (lambda model: [_freeze(model, 4), model.enable_input_require_grads()], 6),
    "all but the last": (lambda model: _freeze(model, 7), 0),
    "all layers": (lambda model: model.requires_grad_(False), 6),
}


@pytest.mark.filterwarnings("error:this layer was chosen")
@pytest.mark.parametrize("count", mostly_nightly([1, 2, 5, "all"], [2, "all"]))
@pytest.mark.parametrize(("freeze", "able"), FROZEN.values(), ids=FROZEN)
def test_blocks_that_keep_nothing_are_not_chosen(freeze, able, count, monkeypatch):
    model = make_model("llama", layers=8)
    freeze(model)
    report = overcoat.convert(model, Recipe(offload_blocks=count))
    inputs = {}
    if not any(parameter.requires_grad for parameter in model.parameters()):  # a prompt is trained
        batch = make_batch(length=32)
        embeds = model.model.embed_tokens(batch["input_ids"]).requires_grad_()
        inputs = {"inputs_embeds": embeds, "labels": batch["labels"]}
        assert "in host memory where its input wants gradients" in str(report)
    found = left(model, monkeypatch, **inputs)
    assert found == said(report)
    assert len(found) == (able if count == "all" else min(able, count))


def test_a_chosen_block_that_is_frozen_later_says_so(monkeypatch):
    model = make_model("llama", layers=8)
    report = overcoat.convert(model, Recipe(offload_blocks=2))
    _freeze(model, 4)
    with pytest.warns(UserWarning, match=r"saves none.*Call overcoat.convert\(model, recipe\) again"):
        assert left(model, monkeypatch) != said(report)


@contextlib.contextmanager
def _hooks_inside(model):
    """Without conversion: the last layers run their original forward."""
    for layer in model.model.layers[-3:]:
        layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="original precision"):
        yield


@contextlib.contextmanager
def _checkpoints(model):
    for layer in model.model.layers[-3:]:
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = forward
    yield


@pytest.mark.parametrize(
    ("change", "count"),
    mostly_nightly(
        itertools.product((_hooks_inside, _checkpoints), (2, "all")), [(_hooks_inside, 2), (_checkpoints, "all")]
    ),
)
def test_blocks_before_layers_that_keep_their_own_leave(untouched, change, count, monkeypatch):
    """Hooks and checkpoints on the last three of six layers, behind the conversion."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    one, other = converted(untouched, Recipe(offload_blocks=count)), converted(untouched, Recipe())
    found = []
    for model in (one, other):
        with change(model):
            found += [left(model, monkeypatch)] if model is one else []
            backward(model)
    assert found[0] == [f"model.layers.{place}" for place in sorted(choose_blocks(count, LAYERS).places) if place < 3]
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


# ---- copies that are late -------------------------------------------------------------------------------------------


class _Late(offload.Transfers):
    """Copies on streams that do nothing until somebody waits for them: whoever forgets to reads or leaves garbage."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.queues = {"to_host": [], "to_device": []}
        self.on_fetch = lambda tensor: tensor.view(-1).view(torch.uint8).fill_(85)

    def current(self):
        return self

    def wait_event(self, event):
        direction, end = event
        for place in range(end):
            self.queues[direction][place]()
            self.queues[direction][place] = lambda: None

    @contextlib.contextmanager
    def copying(self, direction, after):
        queue = self.queues[direction]
        if after is not None:
            queue.append(functools.partial(self.wait_event, after))
        with _Deferring(queue):
            yield lambda: (direction, len(queue))


class _Deferring(TorchDispatchMode):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.queue.append(functools.partial(func, *args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


def _leave_and_overwrite(leave, offloaded):
    tensors = offloaded.on_device or []
    leave(offloaded)
    if offloaded.on_device is None:
        for tensor in tensors:
            tensor.view(-1).view(torch.uint8).fill_(85)


@pytest.mark.parametrize(("count", "forwards"), [(2, 1), ("all", 2)])
def test_nothing_is_read_before_it_was_copied(untouched, count, forwards, monkeypatch):
    late = _Late()
    monkeypatch.setitem(offload._transfers, torch.device("cpu"), late)
    leave = functools.partial(_leave_and_overwrite, offload._Offloaded.leave)
    monkeypatch.setattr(offload._Offloaded, "leave", lambda self: leave(self))

    def run(model):
        for step in range(2):
            losses = [loss_of(model, 2 * step + index) for index in range(forwards)]
            while losses:  # a graph that stays: else a block that lets go of its tensors waits for them, too
                losses.pop().backward(retain_graph=count == "all")

    assert_changes_nothing(untouched, run, Recipe(offload_blocks=count))
    assert len(late.queues["to_device"]) > 2 * forwards * len(choose_blocks(count, LAYERS).places)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def _large_model(layers=8):
    """About 20 MiB of kept tensors in a block, for 2,048 tokens."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2752, "max_position_embeddings": 2048}
    return make_model("llama", layers, num_attention_heads=8, num_key_value_heads=8, **sizes)


def _large_loss(model, seed=0):
    batch = make_batch("causal", 2, 1024, seed)
    return model(**{name: value.cuda() for name, value in batch.items()}).loss


def _watched_backward(original, seen):
    """block_backward that notes what it was given of kept tensors, when it begins and when it has ended."""

    def watched(dx, kept, *args):
        tensors = [x for part in kept for x in part if x is not None]
        seen.append([x.clone() for x in tensors])
        result = original(dx, kept, *args)
        seen.append([x.clone() for x in tensors])
        return result

    return watched


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, "all"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])
def test_the_backward_on_a_gpu_reads_the_same_bits(recipe, count, monkeypatch):
    """Not gradients: cuDNN's attention adds up dq in any order, so that two backwards of one model differ."""
    model, original = _large_model(), block.block_backward
    seen = {"offloaded": [], "plain": []}
    for name, its_recipe in (("offloaded", replace(recipe, offload_blocks=count)), ("plain", recipe)):
        one = converted(model, its_recipe, "cuda")
        monkeypatch.setattr(block, "block_backward", _watched_backward(original, seen[name]))
        for seed in range(3):
            _large_loss(one, seed).backward()
    assert len(seen["offloaded"]) == len(seen["plain"]) == 3 * 2 * 8
    for mine, expected in zip(seen["offloaded"], seen["plain"], strict=True):
        for x, y in zip(mine, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, "all"])
def test_memory_on_a_gpu_is_less_by_what_is_offloaded(count):
    """Between forward and backward to 1%; at the step's peak but for the blocks under way."""
    model = _large_model(12).cuda()
    found = []
    for recipe in (Recipe(), Recipe(offload_blocks=count)):
        overcoat.convert(model, recipe)
        for _ in range(2):  # the second step's workspaces and buffers are there
            torch.cuda.reset_peak_memory_stats()
            loss = _large_loss(model)
            # As asked for: what the allocator leaves at the end of its blocks is not the offload's.
            after_forward = torch.cuda.memory_stats()["requested_bytes.all.current"]
            loss.backward()
            found.append((after_forward, torch.cuda.max_memory_allocated()))
            del loss
    with memory.record_kept(model) as kept:
        loss = _large_loss(model)
    del loss
    (plain, plain_peak), (offloaded, offloaded_peak) = found[1], found[3]
    blocks = len(choose_blocks(count, 12).places)
    assert kept.host_bytes > blocks * 18 * 2**20
    assert plain - offloaded == pytest.approx(kept.host_bytes, rel=0.01)
    # In the backward two blocks are on their way back beside the one at work.
    assert plain_peak - offloaded_peak >= kept.host_bytes * (1 - AHEAD / blocks)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_copies():
    model = converted(_large_model(), ALL, "cuda")
    batch = {name: value.cuda() for name, value in make_batch("causal", 2, 1024).items()}
    for _ in range(2):
        model(**batch).loss.backward()
    # The blocks alone: what transformers does around them is its own.
    layers, x = model.model.layers, model.model.embed_tokens(batch["input_ids"]).detach().requires_grad_()
    positions = torch.arange(1024, device="cuda")[None]
    embeddings = model.model.rotary_emb(x, positions)
    with waiting_is_an_error():
        y = x
        for layer in layers:
            y = layer(y, position_embeddings=embeddings)
        y.backward(torch.ones_like(y))
