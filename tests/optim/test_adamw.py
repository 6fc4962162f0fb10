"""`overcoat.optim.adamw.AdamW` as a torch optimizer: equality with torch's, options, resume, scaling, errors."""

import copy
import io

import pytest
import torch

from overcoat import memory
from overcoat.formats.moments import MOMENTS
from overcoat.optim.adamw import AdamW
from tests.optim.harness import SHAPES, assert_same_bits, make_params, set_grads, snapshot, train


def test_fp32_moments_equal_torch_over_100_steps():
    ours, theirs = make_params(), make_params()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    train(ours, AdamW(ours, moments="fp32", **options), 100)
    train(theirs, torch.optim.AdamW(theirs, **options), 100)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_bf16_16_equals_fp32_parameters_bit_for_bit():
    """The BF16 weight is the rounded FP32 weight at every step; gradients are the same BF16 values."""
    wide = [torch.nn.Parameter(p.detach().bfloat16().float()) for p in make_params()]
    narrow = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    first, second = AdamW(wide, master="bf16+16"), AdamW(narrow, master="bf16+16")
    for step in range(20):
        set_grads(narrow, step)
        for a, b in zip(wide, narrow):
            a.grad = b.grad.float()
        first.step()
        second.step()
    for a, b in zip(wide, narrow):
        assert torch.equal(a.bfloat16(), b)
        if a.numel():
            assert torch.equal(
                (b.float().view(torch.int32) + second.state[b]["remainder"].int()).view(torch.float32), a
            )


@pytest.mark.parametrize(
    "moments", [*MOMENTS, ("de8x", "e5m2"), ("e5m2x", "de8"), ("bf16", "log8"), ("sqrt8", "sqrt8")]
)
def test_every_code_follows_fp32_moments(moments):
    """Fifty steps of Gaussian gradients: the distance to FP32 is a small part of the way."""
    shapes = [(16, 384)]
    ours, exact, start = (make_params(shapes=shapes) for _ in range(3))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    train(ours, AdamW(ours, moments=moments, **options), 50)
    train(exact, AdamW(exact, moments="fp32", **options), 50)
    way = (exact[0] - start[0]).norm()
    # The E formats without expansion lose small v: their smallest code stands for many octaves.
    limit = {("de8x", "e5m2"): 0.3, "fp8": 0.1, "fp32": 0.0}.get(moments, 0.05)
    assert (ours[0] - exact[0]).norm() / way <= limit


@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_ten_thousand_tiny_constant_updates(moments):
    """Each is below a BF16 spacing by 2^14 or, of weights of 1/32, 2^9; they must accumulate.

    The 24-bit spacing is above the former by 2^6. Gradients whose maxima would stop at different distances, were they
    rounded to nearest: up to 4% of m with 1.06.
    """
    gradients, start = torch.tensor([1.0, 1.06, 0.3, 1e-3]).bfloat16(), torch.tensor([1.0, 2.0**-5])
    w = torch.nn.Parameter(start.repeat_interleave(4)[:, None].repeat(1, 512).bfloat16())  # (8, 512)
    exact = torch.nn.Parameter(start.clone())
    optimizer = AdamW([w], lr=3e-7, weight_decay=0.0, master="bf16+8", moments=moments, check_finite=False)
    fp32 = torch.optim.AdamW([exact], lr=3e-7, weight_decay=0.0)
    w.grad, exact.grad = gradients.repeat(2)[:, None].expand_as(w).contiguous(), torch.ones(2)
    for _ in range(10_000):
        optimizer.step()
        fp32.step()
    remainder = optimizer.state[w]["remainder"].int() << 8
    stored = (w.detach().float().view(torch.int32) + remainder).view(torch.float32).double()
    moved = start.double()[:, None] - stored.mean(1).view(2, 4)
    expected = (start.double() - exact.detach().double())[:, None]
    assert (moved / expected - 1).abs().max() < 0.01


@pytest.mark.parametrize("moments", ["8bit", "fp8"])
@pytest.mark.parametrize("neighbours", ["constant", "noise"])
def test_weights_whose_gradients_stop_come_to_rest(moments, neighbours):
    """As with FP32 moments. An m that stays while v goes to zero makes steps that grow; these weights went 17 to 87
    times as far with all codes of sqrt8 rounded to nearest."""
    generator = torch.Generator().manual_seed(0)
    stops = torch.arange(128) % 8 == 0
    weights = {name: torch.nn.Parameter(torch.zeros(32, 128)) for name in (moments, "fp32")}
    optimizers = [AdamW([w], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, moments=m) for m, w in weights.items()]
    grad = torch.randn(32, 128, generator=generator).sign() * 1e-4
    for step in range(400):
        if neighbours == "noise":
            grad = torch.randn(32, 128, generator=generator) * 1e-4
        if step > 40:
            grad = torch.where(stops, 0.0, grad)
        for w, optimizer in zip(weights.values(), optimizers):
            w.grad = grad
            optimizer.step()
    ours, exact = (w.detach()[:, stops] for w in weights.values())
    assert (ours - exact).norm() < 0.05 * exact.norm()


def test_stochastic_bf16_moves_on_average():
    w = torch.nn.Parameter(torch.full((8192,), 1.0, dtype=torch.bfloat16))
    optimizer = AdamW([w], lr=1e-4, weight_decay=0.0, master="bf16")
    w.grad = torch.ones_like(w)
    for _ in range(200):
        optimizer.step()
    moved = 1.0 - w.detach().double()
    standard_error = moved.std() / 8192**0.5
    assert abs(moved.mean() - 0.02) < 5 * standard_error
    assert moved.std() > 0
    assert "remainder" not in optimizer.state[w]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_repeat_and_seeds_differ(dtype):
    def run(seed):
        params = make_params(dtype)
        optimizer = AdamW(params, lr=1e-3, seed=seed)
        train(params, optimizer, 5)
        return snapshot(params, optimizer)

    assert_same_bits(run(0), run(0))
    if dtype == torch.bfloat16:
        with pytest.raises(AssertionError):
            assert_same_bits(run(0), run(1))


@pytest.mark.parametrize("moments", [*MOMENTS, ("de8x", "de8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_not_stopping(moments, dtype):
    """Through torch.save and a weights_only load, into an optimizer that has already stepped."""
    params = make_params(dtype)
    optimizer = AdamW(params, lr=1e-3, moments=moments)
    train(params, optimizer, 3)
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    train(params, optimizer, 3, first=3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_params(dtype, seed=5)
    other = AdamW(resumed, lr=7.0, moments=moments)
    train(resumed, other, 1)
    for p, value in zip(resumed, saved["params"]):
        p.data.copy_(value)
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["lr"] == 1e-3
    train(resumed, other, 3, first=3)
    assert_same_bits(snapshot(params, optimizer), snapshot(resumed, other))


def test_loaded_state_is_a_copy():
    params, others = make_params(), make_params()
    optimizer, other = AdamW(params), AdamW(others)
    train(params, optimizer, 1)
    other.load_state_dict(optimizer.state_dict())
    before = snapshot(params, optimizer)
    train(others, other, 1)
    assert_same_bits(before, snapshot(params, optimizer))


def test_deepcopied_optimizer_keeps_its_options():
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params, moments="fp8")
    train(params, optimizer, 1)
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups[0]["moments"] == ("e4m3x", "e4m3x")
    assert twin.check_finite


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moments": "fp8"}, "moments"),
        ({"group_size": 64}, "group_size"),
        ({"master": "bf16+16"}, "master"),
    ],
)
def test_loading_under_other_options_is_an_error_that_names_them(options, words):
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    other = AdamW(params, **options)
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_loading_another_models_state_is_an_error():
    params, others = make_params(), make_params(shapes=[*SHAPES[:-1], (2, 9)])
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    with pytest.raises(ValueError, match="another model"):
        AdamW(others).load_state_dict(optimizer.state_dict())


def test_torch_adamw_state_is_refused_before_anything_changes():
    params = make_params()
    theirs = torch.optim.AdamW(params)
    train(params, theirs, 1)
    ours = AdamW(params)
    with pytest.raises(ValueError, match="moments"):
        ours.load_state_dict(theirs.state_dict())


# ---- what a torch optimizer can do ---------------------------------------------------------------------


def test_parameter_groups_schedulers_and_missing_gradients():
    params = make_params()
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = AdamW(
        [
            {"params": params[:5], "weight_decay": 0.0},
            {"params": [*params[5:], frozen], "lr": 1e-2, "moments": "fp32"},
        ],
        lr=1e-3,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    set_grads(params, 0)
    params[3].grad = None
    before = params[3].detach().clone()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-3]
    assert torch.equal(params[3], before)
    assert params[3] not in optimizer.state
    assert frozen not in optimizer.state
    assert torch.equal(frozen, torch.ones(4))
    assert optimizer.state[params[4]]["exp_avg"].dtype == torch.int8
    assert optimizer.state[params[5]]["exp_avg"].dtype == torch.float32


def test_named_parameters():
    layer = torch.nn.Linear(8, 8)
    optimizer = AdamW(layer.named_parameters())
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_learning_rate_as_tensor_equals_float():
    left, right = make_params(), make_params()
    train(left, AdamW(left, lr=torch.tensor(3e-3)), 3)
    train(right, AdamW(right, lr=3e-3), 3)
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_closure():
    w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = AdamW([w], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(60)]
    assert losses[0] == 13.0
    assert losses[-1] < 0.1


@pytest.mark.parametrize("shape", [(64, 256), (256,)])
def test_non_contiguous_parameters_equal_contiguous_ones(shape):
    generator = torch.Generator().manual_seed(0)
    start, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    plain = torch.nn.Parameter(start.clone())
    strided = torch.nn.Parameter(start.t().contiguous().t() if len(shape) > 1 else start.repeat_interleave(2)[::2])
    assert not strided.is_contiguous()
    for p in (plain, strided):
        optimizer = AdamW([p])
        for _ in range(3):
            p.grad = grad.t().contiguous().t() if len(shape) > 1 else grad.clone()
            optimizer.step()
    assert torch.equal(plain, strided)


# ---- gradient scaling, clipping, skipping --------------------------------------------------------------


def test_clipping_equals_torch_clipping_before_the_step():
    left, right = make_params(), make_params()
    ours, theirs = AdamW(left, moments="fp32"), AdamW(right, moments="fp32")
    for step in range(3):
        set_grads(left, step, 5.0)
        set_grads(right, step, 5.0)
        norm = torch.nn.utils.clip_grad_norm_(right, 0.7)
        ours.step(clip_grad_norm=0.7)
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(bad, moments):
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params, moments=moments)
    train(params, optimizer, 2)
    before = snapshot(params, optimizer)
    set_grads(params, 2)
    params[4].grad[1, 77] = bad
    optimizer.step()
    assert_same_bits(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps.item() == 1
    train(params, optimizer, 1)
    assert optimizer.skipped_steps.item() == 1
    assert optimizer.state[params[4]]["step"].item() == 3


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale):
    """Scaled gradients through torch.amp.GradScaler give the unscaled run's weights; an overflow is skipped."""
    left, right = make_params(), make_params()
    ours, plain = AdamW(left), AdamW(right)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(3):
        set_grads(left, step)
        set_grads(right, step)
        loss = sum((p * p.grad.clone()).sum() for p in left)
        for p in left:
            p.grad = None
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        plain.step()
    for a, b in zip(left, right):
        assert torch.equal(a, b)

    before = snapshot(left, ours)
    scaler.scale(sum((p * torch.inf).sum() for p in left)).backward()
    scaler.step(ours)
    scaler.update()
    assert_same_bits(before, snapshot(left, ours))
    assert ours.skipped_steps.item() == 1
    assert scaler.get_scale() == 512.0


def test_unchecked_gradients_are_trusted():
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([w], check_finite=False)
    w.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.grad_norm is None
    assert optimizer.skipped_steps.item() == 0


# ---- bytes, errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moments", "limit"), [("8bit", 2.047), ("fp8", 2.055), ("bf16", 4.0), ("fp32", 8.0)])
def test_state_bytes_per_parameter(moments, limit):
    w = torch.nn.Parameter(torch.zeros(256, 1024))
    optimizer = AdamW([w], moments=moments)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert memory.optimizer_bytes(optimizer) / w.numel() == pytest.approx(limit, abs=5e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr -1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"moments": "int4"}, "int4"),
        ({"master": "fp64"}, "fp64"),
        ({"group_size": 100}, "group_size 100"),
        ({"seed": 0.5}, "seed"),
        ({"lr": torch.ones(2)}, "one element"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        AdamW(make_params(torch.bfloat16), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.float64])
def test_unsupported_parameters_are_named(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        AdamW([torch.nn.Parameter(torch.ones(3, dtype=dtype))])


def test_sparse_gradients_and_wrong_clipping_are_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    with pytest.raises(ValueError, match="clip_grad_norm 0"):
        optimizer.step(clip_grad_norm=0)


@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_group_sizes(group_size):
    w = torch.nn.Parameter(torch.randn(4, 200))
    optimizer = AdamW([w], group_size=group_size)
    w.grad = torch.randn(4, 200)
    optimizer.step()
    assert optimizer.state[w]["exp_avg_amax"].shape == (4, -(-200 // group_size))


def test_the_state_of_another_optimizer_is_refused_by_name():
    param = torch.nn.Parameter(torch.ones(2, 3))
    other = torch.optim.AdamW([param])
    param.grad = torch.ones(2, 3)
    other.step()
    with pytest.raises(ValueError, match="another optimizer saved it"):
        AdamW([param]).load_state_dict(other.state_dict())


def test_a_set_of_parameters_is_refused():
    """It has another order in every run, and with it other random numbers."""
    with pytest.raises(TypeError, match="ordered"):
        AdamW([{"params": set(make_params())}])


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_follows_its_parameter_to_another_device(offload):
    """As when a model is moved after its optimizer has loaded a state."""
    (param,) = make_params(torch.bfloat16, [(4, 200)])
    optimizer = AdamW([param], offload=offload)
    train([param], optimizer, 1)
    there = torch.nn.Parameter(param.to("meta"))
    optimizer.state[there] = optimizer.state.pop(param)
    state = optimizer._state_of(optimizer.param_groups[0], there)
    assert {value.device.type for name, value in state.items() if name != "step"} == {"cpu" if offload else "meta"}
    assert state["step"].is_meta
    assert optimizer.state[there] is state


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_a_model_moved_to_the_gpu_goes_on_as_one_that_was_there(offload):
    saved = AdamW(make_params(torch.bfloat16))
    train(saved.param_groups[0]["params"], saved, 2)
    runs = []
    for moved_before in (True, False):
        params = make_params(torch.bfloat16)
        optimizer = AdamW(params, lr=1e-2, offload=offload)
        if not moved_before:
            optimizer.load_state_dict(saved.state_dict())
        for p in params:
            p.data = p.data.cuda()
        if moved_before:
            optimizer.load_state_dict(saved.state_dict())
        train(params, optimizer, 2, first=2)
        runs.append(snapshot(params, optimizer))
    assert_same_bits(*runs)
