"""Maxima of weights, found by AdamW as it writes them: who has them when, and that they change nothing but time."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch

import overcoat
from overcoat import Recipe, weight_amax
from overcoat.block import linear as of_weights
from overcoat.block.spec import Linear
from overcoat.kernels.stack import stack_weights_predicted
from overcoat.models.compiled import compile_layers
from tests.models.zoo import make_model


def operand_of(*weights):
    return of_weights.operand(Linear(weights, ()), False, None)


def make(device, recipe=None, seed=0):
    model = make_model("llama", layers=2, seed=seed).to(device)
    overcoat.convert(model, recipe or Recipe())
    return model


def backward(model, device, seed=1):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed)).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def quantized(model):
    """The weights that a converted layer multiplies in FP8."""
    return [p for name, p in model.named_parameters() if "proj" in name]


def optimizer_of(model, **options):
    return overcoat.AdamW(model.parameters(), lr=0.05, **options)


def step(model, optimizer, device, seed=1):
    loss = backward(model, device, seed)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def assert_known(weights):
    for weight in weights:
        assert torch.equal(*weight_amax.predict([weight]), weight.detach().abs().amax().float())


@pytest.fixture
def passes(monkeypatch):
    """Weights that were read to find their maximum."""
    read = []
    original = of_weights.stack_amax
    monkeypatch.setattr(of_weights, "stack_amax", lambda weights: (read.extend(weights), original(weights))[1])
    return read


def losses(model, optimizer, device, batches=(1, 2, 3)):
    """Of three steps of two micro-batches, and all weights after them."""
    found = []
    for seed in batches:
        found += [backward(model, device, seed), backward(model, device, seed + 10)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def test_only_the_first_forward_looks_for_maxima(passes, device):
    """A skipped step keeps what is known."""
    model = make(device)
    optimizer = optimizer_of(model)
    step(model, optimizer, device)
    assert len(passes) == len(quantized(model))
    passes.clear()
    for seed in (2, 3):
        backward(model, device, seed)
        step(model, optimizer, device, seed)
        assert_known(quantized(model))
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_known(quantized(model))
    assert not passes
    others = [p for p in model.parameters() if all(p is not q for q in quantized(model))]
    assert all(weight_amax.tracked(p) is None for p in others)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(checkpoint="block")])
def test_training_is_the_same_bit_for_bit(recipe, monkeypatch, device):
    runs = []
    for known in (True, False):
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(weight_amax, "predict", lambda weights: None)
            model = make(device, recipe)
            runs.append(losses(model, optimizer_of(model), device))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def by_loading(model):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def by_another_optimizer(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@pytest.mark.parametrize("change", [by_loading, in_place, by_another_optimizer])
def test_changed_weights_are_not_predicted(change, passes, device):
    model = make(device)
    optimizer = optimizer_of(model)
    step(model, optimizer, device)
    change(model)
    passes.clear()
    backward(model, device)
    assert len(passes) == len(quantized(model))


def replace(p):
    p.data = p.data * 7.0


WRITES = {"grow": lambda p: p.data.mul_(7.0), "shrink": lambda p: p.data.mul_(1e-3), "replace": replace}


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_writes_that_nobody_sees_do_no_harm(change, passes, device):
    """Through `data` no version is counted: the prediction is wrong, the result is not."""
    model = make(device)
    step(model, optimizer_of(model), device)
    for p in quantized(model):
        change(p)
    twin = copy.deepcopy(model)
    passes.clear()
    loss = backward(model, device)
    assert not passes, "the prediction is tried"
    assert torch.equal(loss, backward(twin, device))
    assert len(passes) == len(quantized(twin)), "of a copy nothing is known"
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_released_gradients(passes, device):
    runs = []
    for released in (False, True):
        model = make(device)
        optimizer = optimizer_of(model)
        if released:
            overcoat.release_gradients(model, optimizer, batch_bytes=4096)
        passes.clear()
        runs.append([step(model, optimizer, device, seed) for seed in (1, 2, 3)])
        # Released, a step's first backward has tracked them before the tables are made.
        assert len(passes) == len(quantized(model))
        assert_known(quantized(model))
    assert runs[0] == runs[1]


def test_offloaded_states_leave_it_to_the_forward(passes, device):
    model = make(device)
    optimizer = optimizer_of(model, offload=True, offload_buffer=100_000)
    for seed in (1, 2):
        step(model, optimizer, device, seed)
    assert len(passes) == 2 * len(quantized(model))


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])
def test_other_optimizers_leave_it_to_the_first_micro_batch(passes, device, recipe):
    """Of three micro-batches, recomputed or not."""
    runs = []
    for forgetful in (False, True):
        model = make(device, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = losses(model, optimizer, device, (1,))
        passes.clear()
        for seed in (2, 3, 4):
            if forgetful:
                weight_amax._tracked.clear()
            found.append(backward(model, device, seed))
        runs.append(found)
        assert len(passes) == (3 if forgetful else 1) * len(quantized(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_step_of_any_optimizer_ends_what_a_forward_has_found(passes, device):
    """FSDP2 gathers new weights into the same parameters, whose version counters stay."""
    model = make(device)
    for seed in (1, 2):
        backward(model, device, seed)
    assert len(passes) == len(quantized(model))
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    backward(model, device, 3)
    assert len(passes) == 2 * len(quantized(model))


def test_nothing_is_kept_of_weights_that_are_gone(device):
    gc.collect()
    before = len(weight_amax._tracked)
    model = make(device)
    optimizer = optimizer_of(model)
    step(model, optimizer, device)
    assert len(weight_amax._tracked) == before + len(quantized(model))
    del model, optimizer
    gc.collect()
    assert len(weight_amax._tracked) == before


def test_computed_weights_are_not_tracked():
    computed = torch.nn.Parameter(torch.randn(16, 16)) * 2
    count = weight_amax.count()
    assert weight_amax.predict([computed]) is None
    assert weight_amax.count() == count


def test_of_frozen_weights_one_forward_finds_the_maxima(passes, device):
    """Whatever is stepped beside them; and again when they have changed."""
    model = make(device)
    for p in quantized(model):
        p.requires_grad_(False)
    optimizer = optimizer_of(model.lm_head)
    for seed in (1, 2, 3):
        step(model, optimizer, device, seed)
    assert len(passes) == len(quantized(model))
    with torch.no_grad():
        quantized(model)[0].mul_(2)
    step(model, optimizer, device)
    assert len(passes) == len(quantized(model)) + 3  # of q, k and v, which are one


@pytest.fixture
def known(monkeypatch, device):
    """Whether the maxima were known, each time that somebody asked; compiled code on a CPU, too, which has no need."""
    found = []
    original = weight_amax.predict

    def predicted(weights):
        result = original(weights)
        found.append(result is not None)
        return result

    monkeypatch.setattr(weight_amax, "predict", predicted)
    with torch.library._scoped_library("overcoat", "IMPL") as library:
        if device.type == "cpu":
            launch = functools.partial(stack_weights_predicted.reference, predicted=None)
            library.impl("stack_weights_tracked", lambda weights: (predicted(weights), launch(weights))[1], "CPU")
        yield found


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), pytest.param(Recipe.leanest(), marks=pytest.mark.nightly)],
    ids=["default", "leanest"],
)
def test_compiled_layers_ask_in_every_pass(recipe, known, device):
    """Once a stack: they find what AdamW has found since they were compiled, and give the eager results bit for bit."""
    torch.compiler.reset()
    eager, model = make(device, recipe), make(device, recipe)
    compile_layers(model, graphs=False)
    optimizers = [optimizer_of(each) for each in (eager, model)]
    stacks = 4 * model.config.num_hidden_layers
    with torch.compiler.set_stance(force_backend="aot_eager"):
        for seed in range(4):
            if seed == 3:
                for p, q in zip(quantized(eager), quantized(model), strict=True):
                    WRITES["grow"](p)
                    WRITES["grow"](q)
            for batch in (seed, seed + 10):
                loss = backward(eager, device, batch)
                known.clear()
                assert torch.equal(backward(model, device, batch), loss)
                assert known == [seed > 0] * stacks, (seed, batch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_compiled_code_notes_nothing(device):
    """What it computes may lie in the memory of a CUDA graph, where the next replay writes."""
    torch.compiler.reset()
    weight = torch.nn.Parameter(torch.randn(16, 16, device=device))
    assert weight_amax.predict([weight]) is None  # from now on somebody wants to know it
    run = torch.compile(lambda w: operand_of(w), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        found = run(weight)
        for a, b in zip(found, operand_of(weight.detach()), strict=True):
            assert torch.equal(a.float(), b.float())
    assert weight_amax.predict([weight]) is None


def test_weights_made_in_inference_mode_are_not_tracked():
    """They have no version counter."""
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.randn(32, 16))
    with torch.no_grad():
        for _ in range(2):
            data, _scale, amax = operand_of(weight)
    assert amax == weight.detach().abs().amax()
    assert data.shape == weight.shape
    assert weight_amax.tracked(weight) is None


@pytest.mark.gpu
def test_a_moved_model_is_tracked_again(passes):
    model = make("cpu")
    optimizer = optimizer_of(model)
    step(model, optimizer, "cpu")
    model.to("cuda")
    step(model, optimizer, "cuda")
    passes.clear()
    step(model, optimizer, "cuda")
    assert not passes


@pytest.mark.gpu
@torch.no_grad()
def test_captured_steps_follow_the_weights(passes):
    """Operand and step in one CUDA graph, whose replays count no versions, against eager ones."""
    start = [torch.randn(rows, 256, device="cuda").bfloat16() for rows in (64, 32)]
    captured, eager = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    optimizers = [overcoat.AdamW(params, lr=0.1) for params in (captured, eager)]
    for params in (captured, eager):
        for p in params:
            p.grad = torch.ones_like(p)

    def one(params, optimizer):
        operand = operand_of(*params)
        optimizer.step(clip_grad_norm=1.0)
        return operand

    for _ in range(2):
        one(captured, optimizers[0])
        one(eager, optimizers[1])
    passes.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = one(captured, optimizers[0])
    assert not passes, "captured with a prediction"
    for step in range(3):
        for p, q in zip(captured, eager, strict=True):
            p.grad.fill_(step - 1.5)
            q.grad.fill_(step - 1.5)
        graph.replay()
        for a, b in zip(found, one(eager, optimizers[1]), strict=True):
            assert torch.equal(a.float(), b.float())
    for p, q in zip(captured, eager, strict=True):
        assert torch.equal(p, q)
