"""`Recipe.reuse_weights`: FP8 copies of weights, kept while the weights do not change."""

from __future__ import annotations

import pytest
import torch

import overcoat
from overcoat import Recipe
from overcoat.ops import weights as of_weights
from tests.models.zoo import make_model


def make(recipe, device, seed=0):
    model = make_model("llama", layers=2, seed=seed).to(device)
    overcoat.convert(model, recipe)
    return model


@pytest.fixture
def made(monkeypatch):
    """How many operands were made."""
    count = []

    def counted(original):
        return lambda *args: (count.append(args), original(*args))[1]

    for name in ("stack_weights", "stack_weights_predicted"):
        monkeypatch.setattr(of_weights, name, counted(getattr(of_weights, name)))
    return count


def backward(model, device, seed=1):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed)).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def test_two_micro_batches_make_the_operands_once(made, device):
    plain, reusing = make(Recipe(), device), make(Recipe(reuse_weights=True), device)
    for seed in (1, 2):
        assert torch.equal(backward(plain, device, seed), backward(reusing, device, seed))
    for a, b in zip(gradients(plain), gradients(reusing), strict=True):
        assert torch.equal(a, b)
    # 4 stacks a layer, forward and transposed; the plain model makes them for each of the two batches.
    assert len(made) == 3 * 8 * plain.config.num_hidden_layers
    linears = [p for n, p in reusing.named_parameters() if "proj" in n]
    assert of_weights.kept_bytes() >= 2 * sum(p.numel() for p in linears)


def change_by_adamw(model):
    overcoat.AdamW(model.parameters(), lr=0.1).step()


def change_by_torch(model):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def change_through_data(model):
    """What version counters do not see, inside of an optimizer."""

    class Through(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(1.5)

    Through(model.parameters(), lr=1.0).step()


def change_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def change_by_loading(model):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "change", [change_by_adamw, change_by_torch, change_through_data, change_in_place, change_by_loading]
)
def test_changed_weights_are_quantized_again(change, device):
    losses = []
    for recipe in (Recipe(), Recipe(reuse_weights=True)):
        model = make(recipe, device)
        first = backward(model, device)
        change(model)
        losses.append(backward(model, device))
        assert losses[-1] != first
    assert torch.equal(*losses)


def test_converting_again_drops_what_is_kept(device):
    model = make(Recipe(reuse_weights=True), device)
    backward(model, device)
    before = of_weights.kept_bytes()
    assert before > 0
    overcoat.convert(model, Recipe())
    assert of_weights.kept_bytes() < before


def test_nothing_is_kept_unless_asked(device):
    before = of_weights.kept_bytes()
    backward(make(Recipe(), device), device)
    assert of_weights.kept_bytes() == before


def test_a_forward_in_inference_mode_leaves_nothing_to_training(device):
    losses = []
    for recipe in (Recipe(), Recipe(reuse_weights=True)):
        model = make(recipe, device)
        before = of_weights.kept_bytes()
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 4), dtype=torch.int64, device=device))
        assert of_weights.kept_bytes() == before
        losses.append(backward(model, device))
    assert torch.equal(*losses)


def test_compiles_without_graph_breaks_once_something_was_reused(device):
    model = make(Recipe(reuse_weights=True), device)
    loss = backward(model, device)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(compiled(input_ids=ids, labels=ids).loss, loss)
