"""Layers compiled one by one: the eager results, one graph for all of them, nothing compiled where they run eagerly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import overcoat
from overcoat import Recipe
from overcoat.models import family
from overcoat.models.compiled import begin_pass, compile_layers, forget, graph_layers, keep_gradients_outside
from overcoat.models.convert import decoder_layers
from overcoat.models.experts import Fp8Experts
from overcoat.models.images import longest
from overcoat.optim.release import BATCH_BYTES
from tests.models.graphs import recorded, skipped
from tests.models.test_images import seen_rows
from tests.models.zoo import assert_equal, gradients, make_batch, make_encoder, make_model
from tests.nightly import mostly_nightly
from tests.sweep.tiny import tiny


@pytest.fixture(autouse=True)
def _forget_after() -> Any:
    forget()
    yield
    forget()


def made(kind: str, recipe: Recipe, device: str = "cpu") -> Any:
    model: Any = make_model(kind, layers=3).to(device)
    overcoat.convert(model, recipe)
    return model


def one_pass(model: Any, **batch: Any) -> torch.Tensor:
    device = model.lm_head.weight.device
    inputs = {name: value.to(device) for name, value in make_batch(**batch).items()}
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach().clone()


# ---- on a CPU -------------------------------------------------------------------------------------------------------


def test_the_layers_of_graphs_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step: which model this is, its first module says."""
    model, asked, real = made("llama", Recipe()), [], family.model_spec_of
    monkeypatch.setattr(family, "model_spec_of", lambda module: asked.append(module) or real(module))
    assert list(graph_layers(model)) == [f"model.layers.{place}" for place in range(3)]
    assert asked == [model]


COMPILED = (
    ("llama", Recipe(), "causal"),
    ("qwen3", Recipe.leanest(), "left-padded"),
    ("starcoder2", Recipe.paper(), "packed"),
    ("llama", Recipe.bf16(), "causal"),
)


@pytest.mark.parametrize(("kind", "recipe", "masks"), mostly_nightly(COMPILED, COMPILED[:1]))
def test_compiled_layers_share_a_graph_and_give_the_eager_gradients(kind: str, recipe: Recipe, masks: str) -> None:
    plain, model = made(kind, recipe), made(kind, recipe)
    compile_layers(model, graphs=False)
    graphs = CompileCounterWithBackend("aot_eager")
    counts = []
    for rows in (2, 2, 3, 5):
        expected = one_pass(plain, kind=masks, batch=rows, length=96)
        with torch.compiler.set_stance(force_backend=graphs):
            assert torch.equal(one_pass(model, kind=masks, batch=rows, length=96), expected)
        assert_equal(gradients(model), gradients(plain))
        counts.append(graphs.frame_count)
    assert counts == [1, 1, 2, 2]  # of three layers: one graph for the first number of rows, one for all others
    assert model.state_dict().keys() == plain.state_dict().keys()
    # Another recipe's constants are in the graph: with the old one a run would go on as before, unseen.
    for each in (plain, model):
        overcoat.convert(each, Recipe() if recipe == Recipe.leanest() else Recipe.leanest())
        each.zero_grad()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        assert torch.equal(one_pass(model), one_pass(plain))
    assert_equal(gradients(model), gradients(plain))


@pytest.mark.nightly  # four graphs each; what a compiled layer computes is above
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("qwen3-vl-vision", Recipe()), ("qwen3-vl-vision", Recipe.leanest()), ("qwen2.5-vl-vision", Recipe())],
)
def test_compiled_images_of_one_size_are_a_batch(kind: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager ones, and so are equal windows; a graph for all further grids of one size, one for others."""
    seen, graphs, counts = seen_rows(monkeypatch), CompileCounterWithBackend("aot_eager"), []
    plain = make_encoder(kind)
    overcoat.convert(plain, recipe)
    model = copy.deepcopy(plain)
    compile_layers(model, graphs=False)
    for sizes in ([8, 8], [8, 4, 8, 6], [4, 4, 4], [2, 2], [6, 2], [6, 6, 6, 6], [10, 4, 8]):
        grid = torch.tensor([(1, 8, columns) for columns in sizes])
        x, results = torch.randn(8 * sum(sizes), 96), []
        for each, backend in ((plain, "eager"), (model, graphs)):
            with torch.compiler.set_stance(force_backend=backend):
                y = each(x, grid, **longest(each, grid)).last_hidden_state
                y.square().sum().backward()
            results.append((y, list(seen)))
            seen.clear()
        assert torch.equal(results[0][0], results[1][0])
        assert_equal(gradients(model), gradients(plain))
        assert results[0][1] == results[1][1]
        assert ((len(sizes), False) in results[1][1]) is (len(set(sizes)) == 1)
        counts.append(graphs.frame_count)
    assert counts[2:] == [counts[2]] * 5, counts


@pytest.mark.filterwarnings("error:this layer trains in its original precision")
@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_layers_may_be_wrapped_before_they_are_converted(wrap: Any) -> None:
    """Their model then asked for a cache, and so they trained in BF16."""
    losses = []
    for when in ("never", "before"):
        model: Any = make_model("llama", layers=2)
        if when == "before":
            model.model.layers = nn.ModuleList(map(wrap, model.model.layers))
        overcoat.convert(model)
        losses.append(model(**make_batch()).loss.detach())
    assert torch.equal(*losses)


def test_moved_gradients_are_the_same_and_elsewhere() -> None:
    model = made("qwen2", Recipe())
    keep_gradients_outside(model)  # none are there yet
    frozen = model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    one_pass(model)
    before, of_layers = gradients(model), set(nn.ModuleList(decoder_layers(model).values()).parameters())
    values = {name: gradient.clone() for name, gradient in before.items()}
    keep_gradients_outside(model)
    for name, parameter in model.named_parameters():
        if parameter is frozen:
            assert parameter.grad is None
            continue
        assert torch.equal(parameter.grad, values[name]), name
        moved = parameter.grad.data_ptr() != before[name].data_ptr()
        assert moved is (parameter in of_layers), name


def test_a_layer_left_alone_after_all_is_compiled_as_one_of_others() -> None:
    model = made("llama", Recipe())
    compile_layers(model, graphs=False)
    overcoat.convert(model, filter_fn=lambda *_: False)
    compile_layers(model, graphs=False)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)


def test_what_cannot_be_compiled_is_said() -> None:
    with pytest.raises(ValueError, match=r"Linear contains no decoder layer to compile"):
        compile_layers(nn.Linear(2, 2), graphs=False)
    with pytest.raises(ValueError, match="the model lies on cpu: compile it with graphs=False"):
        compile_layers(make_model("llama", layers=1), graphs=True)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Recipe(), Recipe.leanest()], ids=["default", "leanest"])
def test_gradients_add_up_over_passes_of_cuda_graphs(recipe: Recipe) -> None:
    """Bit for bit what eager passes add up to, for new tokens and new weights, without a new recording each."""
    plain, model = made("llama", recipe, "cuda"), made("llama", recipe, "cuda")
    compile_layers(model, graphs=True)
    before, counts = skipped(), []
    for step in range(5):
        for number in range(3):
            seed = 3 * step + number
            expected = one_pass(plain, length=64, seed=seed)
            if number == 1:
                keep_gradients_outside(model)
            begin_pass()
            assert torch.equal(one_pass(model, length=64, seed=seed), expected), (step, number)
        assert_equal(gradients(model), gradients(plain))
        for each in (plain, model):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(1.0 + 0.1 * step)
            each.zero_grad()
        counts.append(recorded())
    assert skipped() == before
    assert counts[1] >= 6  # forward and backward of three layers
    assert counts[2:] == [counts[2]] * 3, counts


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_in_cuda_graphs_equal_compiled_ones(kind: str) -> None:
    """For tokens that take other experts from pass to pass. Inductor rounds routers otherwise than eager passes do."""
    plain, model = (tiny(kind).bfloat16().cuda().train() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        overcoat.convert(each, Recipe())
        assert any(isinstance(module, Fp8Experts) for module in each.modules())
    compile_layers(plain, graphs=False)
    compile_layers(model, graphs=True)
    before = skipped()
    for seed in range(4):
        ids = torch.randint(0, 90, (2, 64), generator=torch.Generator().manual_seed(seed)).cuda()
        begin_pass()
        losses = [each(input_ids=ids, labels=ids, use_cache=False).loss for each in (plain, model)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses), seed
        assert_equal(gradients(model), gradients(plain))
        for each in (plain, model):
            each.zero_grad()
    assert (skipped(), recorded() > 0) == (before, True)


@pytest.mark.gpu
def test_cuda_graphs_read_what_adamw_writes() -> None:
    """Recorded with AdamW's maxima of the weights, replayed with later ones, and with such as are no longer true."""
    plain, model = made("llama", Recipe(), "cuda"), made("llama", Recipe(), "cuda")
    optimizers = [overcoat.AdamW(each.parameters(), lr=0.02) for each in (plain, model)]
    compile_layers(model, graphs=True)
    for step in range(6):
        expected = one_pass(plain, length=64, seed=step)
        begin_pass()
        assert torch.equal(one_pass(model, length=64, seed=step), expected), step
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                for parameter in each.parameters():
                    parameter.data.mul_(1.5)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_bytes", [1, BATCH_BYTES])
def test_released_steps_of_cuda_graphs_equal_eager_ones(batch_bytes: int) -> None:
    """Each layer's gradients stepped on their own, and all that are held until the backward ends."""
    plain, model = made("llama", Recipe(), "cuda"), made("llama", Recipe(), "cuda")
    optimizers = [overcoat.AdamW(each.parameters(), lr=0.02) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        overcoat.release_gradients(each, optimizer, batch_bytes=batch_bytes)
    compile_layers(model, graphs=True)
    before, counts = skipped(), []
    for step in range(6):
        expected = one_pass(plain, length=64, seed=step)
        begin_pass()
        assert torch.equal(one_pass(model, length=64, seed=step), expected), step
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            assert all(parameter.grad is None for parameter in each.parameters())
            optimizer.step()
        assert torch.equal(optimizers[1].grad_norm, optimizers[0].grad_norm), step
        counts.append(recorded())
    assert skipped() == before
    assert counts[2:] == [6] * 4, counts
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.gpu
def test_forgotten_cuda_graphs_give_their_memory_back() -> None:
    model = made("llama", Recipe(), "cuda")
    compile_layers(model, graphs=True)
    for seed in range(3):
        begin_pass()
        one_pass(model, length=64, seed=seed)
        model.zero_grad()
    assert recorded() == 6
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    forget()
    torch.cuda.empty_cache()
    assert recorded() == 0
    assert torch.cuda.memory_reserved() < reserved
    begin_pass()
    one_pass(model, length=64)
