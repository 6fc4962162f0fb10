"""`overcoat.release_gradients`: the numbers of the ordinary step, one gradient alive at a time, clear refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overcoat import AdamW, release_gradients
from tests.optim import harness
from tests.optim.harness import assert_same_bits
from tests.waits import waiting_is_an_error

WIDTH = 24


class Tied(nn.Module):
    """Embedding and head share one weight; blocks may be checkpointed, `shared` blocks are one and the same. The
    gradient of the stacked experts is a sum of four."""

    def __init__(self, reentrant=None, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 200), nn.GELU(), nn.Linear(200, WIDTH)) for _ in range(2)]
        self.blocks = nn.ModuleList([blocks[0], blocks[0]] if shared else blocks)
        self.experts = nn.Parameter(0.1 * torch.randn(2, WIDTH, 80))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        for expert in range(2):
            x = x + (x @ self.experts[expert]).relu() @ self.experts[expert].T
        return nn.functional.cross_entropy(self.head(self.norm(x)).float(), tokens.roll(1))


def make_pair(dtype=torch.bfloat16, model=None, **options):
    model = (Tied() if model is None else model).to(dtype)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return model, AdamW(groups, lr=1e-2, **options)


def loss_of(model, step):
    tokens = torch.randint(50, (40,), generator=torch.Generator().manual_seed(step))
    return model(tokens.to(model.head.weight.device))


def released(batch_bytes=2**25, **options):
    """A model, its optimizer and the handle of its released gradients."""
    model, optimizer = make_pair(**options)
    return model, optimizer, release_gradients(model, optimizer, batch_bytes=batch_bytes)


def train(model, optimizer, steps=4):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def snapshot(model, optimizer):
    return harness.snapshot(model.parameters(), optimizer)


@pytest.mark.parametrize(("reentrant", "batch_bytes"), [(None, 1), (False, 3000), (True, 2**25)])
@pytest.mark.parametrize(("dtype", "moments"), [(torch.bfloat16, "8bit"), (torch.float32, "fp8")])
def test_released_steps_equal_ordinary_ones_bit_for_bit(dtype, moments, reentrant, batch_bytes, device):
    """With tied weights, two parameter groups, a schedule, and checkpointing of both kinds."""
    released, optimizer = make_pair(dtype, Tied(reentrant).to(device), moments=moments)
    plain, ordinary = make_pair(dtype, Tied(reentrant).to(device), moments=moments)
    release_gradients(released, optimizer, batch_bytes=batch_bytes)
    train(released, optimizer)
    train(plain, ordinary)
    assert_same_bits(snapshot(released, optimizer), snapshot(plain, ordinary))
    assert all(optimizer.state[p]["step"] == 4 for p in released.parameters())
    torch.testing.assert_close(optimizer.grad_norm, ordinary.grad_norm, rtol=1e-6, atol=0)
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("batch_bytes", [1, 12_000])
def test_gradients_alive_are_bounded(reentrant, batch_bytes):
    """A part's at a time, or fewer bytes than asked for and a part's; the second steps some parts together."""
    model, optimizer = make_pair(model=Tied(reentrant))
    seen, most = [], 0  # (name, bytes, weak reference to the gradient); the hook runs before the one that takes it

    def record(name):
        def hook(param):
            nonlocal most
            alive = sum(size for _, size, grad in seen if grad() is not None)
            assert alive < batch_bytes + largest
            most = max(most, alive)
            assert [n for n, p in model.named_parameters() if p.grad is not None] == [name]
            seen.append((name, param.grad.nbytes, weakref.ref(param.grad)))

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(record(name))
    numbers = release_gradients(model, optimizer, batch_bytes=batch_bytes).parts.number
    of_parts = [[p.nbytes for p in model.parameters() if numbers[id(p)] == part] for part in set(numbers.values())]
    largest = max(map(sum, of_parts))
    assert largest == model.blocks[0][0].weight.nbytes
    for step in range(2):
        loss_of(model, step).backward()
        assert sorted(name for name, *_ in seen) == sorted(name for name, _ in model.named_parameters())
        assert all(p.grad is None for p in model.parameters())
        assert all(grad() is None for *_, grad in seen)
        assert (most >= largest) == (batch_bytes > 1)
        optimizer.step()
        seen.clear()


def test_a_layer_is_stepped_at_once():
    """When its last gradient is there, whichever that is; also if another layer, or itself, lacks one."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(9)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters())
    handle = release_gradients(model, optimizer, batch_bytes=200)
    for trains, expected in ((True, [8, *[6] * 8]), (False, [8, 6, 6, 6, 11, 6, 6, 6])):
        layers[4][0].weight.requires_grad_(trains)
        model(torch.randn(3, 8)).sum().backward()
        assert [len(step_group.params) for step_group in handle.used.values()] == expected
        optimizer.step()
        optimizer.zero_grad()


def test_remove_gives_back_the_ordinary_step():
    model, optimizer = make_pair()
    plain, ordinary = make_pair()
    handle = release_gradients(model, optimizer)
    train(model, optimizer, 2)
    handle.remove()
    loss_of(model, 9).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step(clip_grad_norm=1e-3)
    train(plain, ordinary, 2)
    loss_of(plain, 9).backward()
    ordinary.step(clip_grad_norm=1e-3)
    assert_same_bits(snapshot(model, optimizer), snapshot(plain, ordinary))
    optimizer.zero_grad()
    release_gradients(model, optimizer)


def test_what_nobody_holds_any_more_is_freed():
    """Also without `remove()`: a notebook's next model needs the memory."""
    model, optimizer = released()[:2]  # the handle is not held either
    train(model, optimizer, steps=2)
    states = weakref.ref(optimizer.state[model.head.weight]["exp_avg"])
    weight, owner = weakref.ref(model.norm.weight), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert owner() is None
    assert states() is None


@pytest.mark.parametrize("offloaded", [False, True])
def test_other_batches_than_last_time(offloaded, device):
    """Parameters and, at the fifth step, the whole second group drop out and come back: what is kept does not fit."""
    runs = [make_pair(model=Tied().to(device), offload=offloaded, offload_buffer=12_000) for _ in range(2)]
    release_gradients(*runs[0], batch_bytes=8000)
    for model, optimizer in runs:
        for step in range(8):
            model.norm.requires_grad_(step % 3 != 1)
            model.blocks[0].requires_grad_(step % 2 == 0)
            if step == 4:
                model.blocks.requires_grad_(False)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.blocks.requires_grad_(True)
    assert_same_bits(snapshot(*runs[0]), snapshot(*runs[1]))
    steps = [int(runs[0][1].state[p]["step"]) for p in (runs[0][0].norm.bias, runs[0][0].head.weight)]
    assert steps == [5, 8]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("then", ["zero_grad", "step"])
def test_gradients_of_a_backward_pass_that_failed(then):
    """zero_grad forgets what was collected, step uses it; in neither case is anything left for later."""
    model, optimizer, _ = released()
    train(model, optimizer, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = Broken.apply(model.embedding(torch.arange(9)))
    with pytest.raises(RuntimeError, match="out of memory"):
        model.head(model.norm(x)).square().sum().backward()
    getattr(optimizer, then)()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == ({"norm.weight", "norm.bias"} if then == "step" else set())
    optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.state[model.norm.bias]["step"] == (3 if then == "step" else 2)
    assert optimizer.state[model.head.weight]["step"] == 2


def test_a_non_finite_gradient_skips_its_own_parameter_only():
    model, optimizer, _ = released()
    train(model, optimizer, 1)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state[model.norm.weight])
    model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    loss_of(model, 1).backward()
    optimizer.step()
    assert torch.equal(model.norm.weight, before.norm.weight)
    assert all(torch.equal(optimizer.state[model.norm.weight][name], value) for name, value in state.items())
    assert not torch.equal(model.head.weight, before.head.weight)
    assert not torch.equal(model.norm.bias, before.norm.bias)
    assert optimizer.skipped_steps == 1
    assert not optimizer.grad_norm.isfinite()


# ---- refusals: each names the reason, and nothing has changed -------------------------------------------


@pytest.mark.parametrize("mark", ["step", "zero_grad"])
def test_accumulation_is_refused_at_the_second_forward(mark):
    model, optimizer, _ = released()
    loss_of(model, 0).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"accumulation.*optimizer\.step\(\)"):
        loss_of(model, 1)
    with torch.no_grad():
        loss_of(model, 1)
    assert_same_bits(before, snapshot(model, optimizer))
    getattr(optimizer, mark)()
    loss_of(model, 1).backward()
    assert not all(map(torch.equal, before, snapshot(model, optimizer)))


@pytest.mark.parametrize("twice", ["one graph", "two graphs"])
def test_a_second_backward_is_refused_before_anything_moves(twice):
    model, optimizer, _ = released()
    first = model.embedding(torch.arange(5)).sum()  # not through the model's forward, which would refuse
    second = first if twice == "one graph" else model.embedding(torch.arange(9)).square().sum()
    first.backward(retain_graph=True)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"second gradient for 'embedding\.weight'.*add the losses"):
        second.backward()
    assert_same_bits(before, snapshot(model, optimizer))
    assert model.embedding.weight.grad is None


def test_weights_shared_by_reentrant_segments_are_refused_and_work_without():
    model, optimizer = make_pair(model=Tied(reentrant=True, shared=True))
    release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        loss_of(model, 0).backward()
    released, optimizer = make_pair(model=Tied(reentrant=False, shared=True))
    plain, ordinary = make_pair(model=Tied(reentrant=False, shared=True))
    release_gradients(released, optimizer)
    train(released, optimizer)
    train(plain, ordinary)
    assert_same_bits(snapshot(released, optimizer), snapshot(plain, ordinary))


def test_clipping_is_refused():
    model, optimizer = make_pair(clip_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"clip_grad_norm=1.0.*global norm"):
        release_gradients(model, optimizer)
    optimizer.clip_grad_norm = None
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="global norm"):
        optimizer.step(clip_grad_norm=1.0)
    optimizer.clip_grad_norm = 1.0
    with pytest.raises(ValueError, match="global norm"):
        optimizer.step()


def test_grad_scaler_is_refused():
    model, optimizer, _ = released(dtype=torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="bfloat16"):
        loss_of(model, 0)
    assert all(map(torch.equal, before, model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)


def test_what_cannot_be_released_is_named():
    model, optimizer = make_pair()
    with pytest.raises(ValueError, match="not in the model"):
        release_gradients(model.norm, optimizer)
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"batch_bytes {wrong}"):
            release_gradients(model, optimizer, batch_bytes=wrong)
    with pytest.raises(ValueError, match="got SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="gradients already"):
        release_gradients(model, optimizer)
    optimizer.zero_grad()
    release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="released already"):
        release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="for another optimizer"):
        release_gradients(model, AdamW(model.parameters()))
    with pytest.raises(ValueError, match="new parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_a_weight_of_two_released_models_is_named():
    model, optimizer = make_pair()
    other, second = make_pair()
    release_gradients(model, optimizer)
    other.norm.weight = model.norm.weight
    second = AdamW(other.parameters(), lr=1e-2)
    release_gradients(other, second)
    with pytest.raises(ValueError, match=r"the gradient of 'norm\.weight' is gone"):
        loss_of(model, 0).backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_not_released_and_holds_no_optimizer(copied):
    """An average of the weights, or a model saved whole: its hook came along with it."""
    model, optimizer, handle = released()
    loss_of(model, 0).backward()
    twin = copied(model)
    (hook,) = twin._forward_pre_hooks.values()
    assert vars(hook.__self__) == {"handles": []}
    for step in range(2):  # accumulation, which the original refuses
        loss_of(twin, step).backward()
    assert all(p.grad is not None for p in twin.parameters())
    with pytest.raises(ValueError, match="accumulation"):
        loss_of(model, 1)
    assert optimizer.release is handle


def test_weights_have_moved_whatever_becomes_of_the_states():
    """Who takes a failed step again asks `has_stepped`; reading a missing state writes to the dictionary of states."""
    model, optimizer, handle = released()
    assert not handle.has_stepped
    loss_of(model, 0).backward()
    assert handle.has_stepped
    optimizer.state["nothing"] = {}
    assert handle.has_stepped
    del optimizer.state["nothing"]
    optimizer.step()
    assert not handle.has_stepped


def test_a_model_without_memory_steps_too():
    """As estimators of memory take it."""
    model, optimizer, handle = released(model=Tied().to("meta"))
    train(model, optimizer, 2)
    assert optimizer.state[model.head.weight]["exp_avg"].is_meta
    assert len(handle.step_groups) > 0


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch_bytes", [1, 3000])
def test_the_host_never_waits(batch_bytes):
    model, optimizer, _ = released(batch_bytes, model=Tied().cuda())
    train(model, optimizer, 3)
    tokens = torch.arange(40, device="cuda")
    with waiting_is_an_error():
        for _ in range(3):
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.state[model.head.weight]["step"] == 6


@pytest.mark.gpu
def test_gradients_that_another_stream_has_made():
    """Forward on a stream of its own: autograd runs the hooks there, and ends the backward pass on the caller's."""
    runs = [make_pair(model=Tied().cuda()) for _ in range(2)]
    release_gradients(*runs[0], batch_bytes=3000)
    side = torch.cuda.Stream()
    for model, optimizer in runs:
        for step in range(5):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(snapshot(*runs[0]), snapshot(*runs[1]))


@pytest.mark.gpu
def test_gradient_memory_of_a_backward_pass():
    """32 matrices of 2 MB: two of them alive and a little more, instead of 64 MB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))).to("cuda", torch.bfloat16)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer, batch_bytes=2**21)
    x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).float().square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 6 * 2**20
