"""`overcoat.optim.adamw.AdamW` as a torch optimizer: equality with torch's, options, resume, scaling, errors."""

import copy
import inspect
import io
import math

import pytest
import torch

from overcoat import memory
from overcoat.formats.moments import MOMENTS
from overcoat.optim.adamw import AdamW
from tests.optim.harness import assert_same_bits, make_params, set_grads, snapshot, train


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
    "moments", [*MOMENTS, ("de8x", "e5m2"), ("e5m2x", "de8"), ("bf16", "log8"), ("sqrt8", "log8"), ("sqrt8", "sqrt8")]
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
def test_a_thousand_tiny_constant_updates(moments):
    """Each is below a BF16 spacing by 2^10 or, of weights of 1/32, 2^5; they must accumulate.

    The 24-bit spacing is above the former by ten times. Gradients whose maxima would stop at different distances, were
    they rounded to nearest: up to 4% of m with 1.06.
    """
    gradients, start = torch.tensor([1.0, 1.06, 0.3, 1e-3]).bfloat16(), torch.tensor([1.0, 2.0**-5])
    w = torch.nn.Parameter(start.repeat_interleave(4)[:, None].repeat(1, 512).bfloat16())  # (8, 512)
    exact = torch.nn.Parameter(start.clone())
    optimizer = AdamW([w], lr=3e-6, weight_decay=0.0, master="bf16+8", moments=moments, check_finite=False)
    fp32 = torch.optim.AdamW([exact], lr=3e-6, weight_decay=0.0)
    w.grad, exact.grad = gradients.repeat(2)[:, None].expand_as(w).contiguous(), torch.ones(2)
    for _ in range(1000):
        optimizer.step()
        fp32.step()
    remainder = optimizer.state[w]["remainder"].int() << 8
    stored = (w.detach().float().view(torch.int32) + remainder).view(torch.float32).double()
    moved = start.double()[:, None] - stored.mean(1).view(2, 4)
    expected = (start.double() - exact.detach().double())[:, None]
    assert (moved / expected - 1).abs().max() < 0.01


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_an_outlier_slows_none_of_its_neighbours(beta2):
    """One steady gradient 1 to 1e6 times the others of its group: each goes FP32's way. In sqrt8, whose codes end at
    1/16129 of a group's maximum, the others went 0.1 of it from 1e4.5 on."""
    ratios = 10 ** torch.linspace(0, 6, 25)
    grad = (1e-2 / ratios)[:, None].repeat(1, 128)
    grad[:, 0] = 1e-2
    ways = []
    for moments in ("8bit", "fp32"):
        w = torch.nn.Parameter(torch.zeros(25, 128))
        optimizer = AdamW([w], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, moments=moments, check_finite=False)
        w.grad = grad
        for _ in range(300):
            optimizer.step()
        ways.append(w.detach())
    share = ways[0] / ways[1]
    assert share[:, 1:].mean(1).min() > 0.955
    assert share.min() > 0.93
    assert share.max() < 1.07


@pytest.mark.parametrize("outlier", ["steady", "alternates"])
def test_weights_whose_gradients_alternate_stay_where_they_are(outlier):
    """FP32 AdamW's go 1.8 learning rates, in the first steps. A mean that is rounded to nearest circles about something
    else than zero, and one whose codes are far apart strays."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(7, 128, generator=generator).sign() * torch.exp2(torch.rand(7, 128, generator=generator))
    grad *= 1e-3 / 10 ** torch.arange(7.0)[:, None]
    w = torch.nn.Parameter(torch.zeros(7, 128))
    optimizer = AdamW([w], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, check_finite=False)
    for step in range(500):
        w.grad = grad.clone() if step % 2 else -grad
        w.grad[:, 0] = 1e-2 if outlier == "steady" or step % 2 else -1e-2
        optimizer.step()
        if step % 50 == 49:
            assert w.detach()[:, 1:].abs().max() < 4


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.999)])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_a_mean_comes_out_right_whatever_the_betas(betas, noise):
    """Steady gradients of 1 to 1e3, alone and under noise of twice their size, go FP32's way in the mean."""
    generator = torch.Generator().manual_seed(0)
    mean = 1e-5 * 10 ** (3 * torch.rand(8, 128, generator=generator))
    weights = [torch.nn.Parameter(torch.zeros(8, 128)) for _ in range(2)]
    optimizers = [
        AdamW([w], lr=1e-3, betas=betas, weight_decay=0.0, moments=moments, check_finite=False)
        for w, moments in zip(weights, ("8bit", "fp32"))
    ]
    for _ in range(300):
        grad = mean * (1 + noise * torch.randn(8, 128, generator=generator))
        for w, optimizer in zip(weights, optimizers):
            w.grad = grad
            optimizer.step()
    ours, exact = (w.detach().double() for w in weights)
    assert float(ours.sum() / exact.sum()) == pytest.approx(1, abs=0.02)
    assert (ours - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("moments", "neighbours"), [("8bit", "constant"), ("8bit", "noise"), ("fp8", "constant")])
def test_weights_whose_gradients_stop_come_to_rest(moments, neighbours):
    """As with FP32 moments. An m that stays while v goes to zero makes steps that grow; these weights went 17 to 87
    times as far with all codes of sqrt8 rounded to nearest."""
    generator = torch.Generator().manual_seed(0)
    stops = torch.arange(128) % 8 == 0
    weights = {name: torch.nn.Parameter(torch.zeros(16, 128)) for name in (moments, "fp32")}
    optimizers = [AdamW([w], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, moments=m) for m, w in weights.items()]
    grad = torch.randn(16, 128, generator=generator).sign() * 1e-4
    for step in range(250):
        if neighbours == "noise":
            grad = torch.randn(16, 128, generator=generator) * 1e-4
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


@pytest.mark.parametrize("moments", [*MOMENTS, ("de8x", "de8"), ("sqrt8", "log8")])
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


# Rows of whole groups, with a tail, and shorter than a group of 128.
EXPERTS = [(4, 6, 256), (3, 4, 288), (3, 5, 80), (2, 2, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 64},
        {"moments": "fp8", "master": "bf16+16"},
        {"moments": ("de8x", "sqrt8"), "master": "bf16", "group_size": 16},
        {"moments": "bf16"},
        {"offload": True, "offload_buffer": 3 * 4096},
    ],
    ids=str,
)
def test_experts_train_as_the_matrix_of_all_their_rows(options, dtype):
    """Clipped, without a gradient, skipped, with a gradient of zeros, frozen, and after a resume."""
    runs = []
    for flat in (False, True):
        params = make_params(dtype, EXPERTS)
        params = [torch.nn.Parameter(p.detach().flatten(0, 1)) for p in params] if flat else params
        optimizer = AdamW(params, lr=1e-2, weight_decay=0.1, **options)
        for step in range(6):
            set_grads(params, step)  # which draws numbers, whatever their shape
            if step == 4:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = AdamW(params, **options)
                optimizer.load_state_dict(saved)
            if step == 1:
                params[1].grad = None
            elif step == 2:
                params[0].grad.view(-1)[300] = torch.inf
            elif step == 3:
                params[2].grad.zero_()
                params[3].requires_grad_(False)
            if step > 2:
                params[3].grad = None
            optimizer.step(clip_grad_norm=1.0)
        assert [optimizer.state[p]["step"] for p in params] == [5, 4, 5, 2]
        runs.append([value.flatten() for value in snapshot(params, optimizer)])
    assert_same_bits(*runs)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_an_earlier_8bit_goes_on_as_it_was(dtype):
    """Its m is in sqrt8, of the same shapes and dtypes as the default's; a resumed run gives the bits of one that was
    not stopped."""
    params = make_params(dtype)
    optimizer = AdamW(params, lr=1e-3, moments=("sqrt8", "log8"))
    train(params, optimizer, 3)
    copies, saved = [torch.nn.Parameter(p.detach().clone()) for p in params], copy.deepcopy(optimizer.state_dict())
    other = AdamW(copies, lr=7.0)
    train(copies, other, 1)
    for p, value in zip(copies, params):
        p.data.copy_(value.data)
    with pytest.warns(UserWarning, match=r"an earlier version's '8bit', \('sqrt8', 'log8'\), and continues with it"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["moments"] == ("sqrt8", "log8")
    for run in ((params, optimizer), (copies, other)):
        train(*run, 3, first=3)
    assert_same_bits(snapshot(params, optimizer), snapshot(copies, other))
    third = AdamW(copies, moments="8bit")
    with pytest.warns(UserWarning, match="continues with it"):
        third.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"saved with moments=\('ratio8', 'log8'\).*to load it"):
        other.load_state_dict(AdamW(make_params(dtype)).state_dict())


def test_the_state_of_another_optimizer_is_refused_by_name():
    param = torch.nn.Parameter(torch.ones(2, 3))
    other = torch.optim.AdamW([param])
    param.grad = torch.ones(2, 3)
    other.step()
    with pytest.raises(ValueError, match="another optimizer saved it"):
        AdamW([param]).load_state_dict(other.state_dict())


@pytest.mark.parametrize("moments", ["8bit", ("e5m2", "fp32")])
def test_torchs_adamw_takes_no_codes_for_moments(moments):
    params, copies = make_params(), make_params()
    optimizer, other = AdamW(params, moments=moments), torch.optim.AdamW(copies)
    train(params, optimizer, 1)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="too many values to unpack"):
        train(copies, other, 1)
    assert_same_bits(copies, make_params())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    plain = AdamW(copies, moments="fp32")
    other.load_state_dict(plain.state_dict())
    train(copies, other, 1)


@pytest.mark.parametrize("as_saved", [tuple, list])  # through JSON, say
def test_a_group_of_a_state_dict_can_be_added(as_saved):
    optimizer = AdamW([{"params": make_params(), "betas": (0.8, 0.95)}], lr=1e-3, weight_decay=0.1, group_size=64)
    (saved,) = optimizer.state_dict()["param_groups"]
    assert len(saved["betas"]) == 3
    saved.update(betas=as_saved(saved["betas"]), moments=as_saved(saved["moments"]))
    params, expected = make_params(), make_params()
    other = AdamW([{**saved, "params": params[:1]}])
    other.add_param_group({**saved, "params": params[1:]})
    assert {**other.param_groups[1], "params": 0} == {**optimizer.param_groups[0], "params": 0}
    train(params, other, 2)
    train(expected, AdamW(expected, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1, group_size=64), 2)
    assert_same_bits(params, expected)
    with pytest.raises(TypeError, match="can only optimize Tensors, but one of the params is int"):
        AdamW([saved])


# ---- what a torch optimizer can do ---------------------------------------------------------------------


def test_parameter_groups_schedulers_and_missing_gradients():
    params = make_params()
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    quantized = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)  # bitsandbytes'
    optimizer = AdamW(
        [
            {"params": params[:5], "weight_decay": 0.0},
            {"params": [*params[5:], frozen, quantized], "lr": 1e-2, "moments": "fp32"},
        ],
        lr=1e-3,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    set_grads(params, 0)
    params[3].grad = None
    before = [p.detach().clone() for p in params]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-3]
    moved = [not torch.equal(p, old) for p, old in zip(params, before)]
    assert moved == [p.numel() > 0 and p is not params[3] for p in params]
    assert params[3] not in optimizer.state
    assert frozen not in optimizer.state
    assert torch.equal(frozen, torch.ones(4))
    assert optimizer.state[params[4]]["exp_avg"].dtype == torch.int8
    assert optimizer.state[params[5]]["exp_avg"].dtype == torch.float32


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


# ---- gradient scaling, clipping, skipping --------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.7, 1e4])
def test_clipping_equals_torch_clipping_before_the_step(limit):
    left, right = make_params(), make_params()
    ours, theirs = AdamW(left, moments="fp32"), AdamW(right, moments="fp32")
    for step in range(3):
        set_grads(left, step, 5.0)
        set_grads(right, step, 5.0)
        norm = torch.nn.utils.clip_grad_norm_(right, limit)
        ours.step(clip_grad_norm=limit)
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_equals_the_formula_where_the_norm_is_small():
    """|g| = 0.05 at a limit of 0.01: a fifth of it, in a step where eps is large enough to feel the size of g."""
    weight = torch.nn.Parameter(torch.zeros(25))
    weight.grad = torch.full((25,), 0.01)
    AdamW([weight], lr=1.0, eps=1.0, weight_decay=0.0, moments="fp32").step(clip_grad_norm=0.01)
    torch.testing.assert_close(weight.detach(), torch.full((25,), -0.002 / 1.002), rtol=1e-4, atol=0)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale):
    """Scaled gradients through torch.amp.GradScaler give the unscaled run's weights; an overflow is skipped."""
    left, right = make_params(), make_params()
    ours, plain = AdamW(left, check_finite=not unscale), AdamW(right)  # unchecked the scaler alone tells
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


# ---- bytes, errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moments", "limit"), [("8bit", 2.047), ("fp8", 2.055), ("bf16", 4.0), ("fp32", 8.0)])
def test_state_bytes_per_parameter(moments, limit):
    w = torch.nn.Parameter(torch.zeros(256, 1024))
    optimizer = AdamW([w], moments=moments)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert memory.optimizer_bytes(optimizer) / w.numel() == pytest.approx(limit, abs=5e-4)


WRONG = [
    ({"lr": -1e-9}, "lr -1e-09 must be a number >= 0"),
    ({"lr": math.inf}, "lr inf"),
    ({"lr": math.nan}, "lr nan"),
    ({"lr": torch.tensor(-1.0)}, r"lr tensor\(-1.\)"),
    ({"lr": torch.ones(2, 3)}, r"lr is a tensor of shape \(2, 3\); it must have one element"),
    ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\) must be two numbers in \[0, 1\)"),
    ({"lr": "1e-3"}, "lr '1e-3' must be a number"),
    ({"betas": (math.nan, 0.9)}, "betas"),
    ({"betas": 0.9}, "betas 0.9 must be two numbers"),
    ({"betas": ("0.9", 0.99)}, "must be two numbers"),
    ({"betas": (0.9, 0.99, 0.999)}, "two numbers"),
    ({"eps": -1e-8}, "eps -1e-08"),
    ({"eps": math.nan}, "eps nan"),
    ({"eps": None}, "eps None"),
    ({"weight_decay": -0.1}, "weight_decay -0.1"),
    ({"weight_decay": math.inf}, "weight_decay inf"),
    ({"moments": "int4"}, "int4"),
    ({"master": "fp64"}, "fp64"),
    ({"group_size": 100}, "group_size 100 must be one of 16, 32, 64, 128"),
    ({"seed": 0.5}, "seed 0.5 must be an integer"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_options_are_named(options, words):
    """At the start, and where a group has been changed since: then before anything moves."""
    with pytest.raises(ValueError, match=words):
        AdamW(make_params(torch.bfloat16), **options)
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    before = snapshot(params, optimizer)
    ((name, value),) = options.items()
    old, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
    with pytest.raises(ValueError, match=words):
        train(params, optimizer, 1)
    optimizer.param_groups[0][name] = old
    assert_same_bits(before, snapshot(params, optimizer))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_grad_norm": 0}, "clip_grad_norm 0 must be positive"),
        ({"clip_grad_norm": math.nan}, "clip_grad_norm nan"),
        ({"offload": "cpu"}, "offload 'cpu'"),
        ({"offload": True, "offload_buffer": 0}, "offload_buffer 0"),
        ({"offload": True, "offload_buffer": 1.5e8}, "offload_buffer 150000000.0"),
    ],
)
def test_wrong_options_of_the_whole_optimizer_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        AdamW(make_params(), **options)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("moments", ("int8", "int8"), "int8"),
        (
            "moments",
            "fp8",
            r"param_groups\[0\]\['moments'\] is \('e4m3x', 'e4m3x'\).*with \('ratio8', 'log8'\); set it",
        ),
        ("moments", ("sqrt8", "log8"), "moments"),  # of the same dtype
        ("master", "bf16+16", "param_groups.*'master'.*is 'bf16.16', but its states are stored with 'auto'"),
        ("group_size", 64, "group_size"),
    ],
)
@pytest.mark.parametrize("act", ["step", "state_dict", "load_state_dict"])
def test_a_format_changed_after_a_step_is_refused(act, name, value, words):
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    before, saved = snapshot(params, optimizer), optimizer.state_dict()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved) if act == "load_state_dict" else getattr(optimizer, act)()
    optimizer.param_groups[0][name] = ("ratio8", "log8") if name == "moments" else {"master": "auto"}.get(name, 128)
    assert_same_bits(before, snapshot(params, optimizer))


@pytest.mark.parametrize(("before", "after"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_parameter_of_another_dtype_than_its_state_is_refused(before, after):
    (param,) = params = make_params(before, [(4, 200)])
    optimizer = AdamW(params)
    train(params, optimizer, 1)
    param.data = param.data.to(after)
    with pytest.raises(ValueError, match=rf"state of parameter 0 .* {after} parameter.*set back"):
        train(params, optimizer, 1)


def test_parameters_that_cannot_be_stepped_are_named():
    first, second = make_params(shapes=[(4, 200), (3,)])
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    for params, error, words in (
        ([first, second, first], ValueError, r"shape \(4, 200\) is in its group twice"),
        ([{"params": [first, second]}, {"params": [first]}], ValueError, "more than one parameter group"),
        ([half], ValueError, "torch.float16"),
        ([{"params": {first, second}}], TypeError, "ordered"),  # another order in every run: other random numbers
    ):
        with pytest.raises(error, match=words):
            AdamW(params)


def test_what_torchs_adamw_can_do_besides_is_refused_in_groups():
    """At the start and when it is set later; how torch would launch its step is no matter of ours."""
    (param,) = make_params(shapes=[(3,)])
    torchs = torch.optim.AdamW([param], foreach=False, fused=False, capturable=True).defaults
    optimizer = AdamW([{"params": [param], **torchs}])
    group = optimizer.param_groups[0]
    mine = inspect.signature(AdamW).parameters
    for name in torchs.keys() - mine.keys() - {"foreach", "fused", "capturable"}:
        odd = {name: not torchs[name]}
        with pytest.raises(ValueError, match=f"{name}={odd[name]} is torch.optim.AdamW's"):
            AdamW([{"params": [param], **odd}])
        group.update(odd)
        param.grad = torch.ones(3)
        with pytest.raises(ValueError, match=f"{name}={odd[name]} is torch.optim.AdamW's"):
            optimizer.step()
        group[name] = torchs[name]
    optimizer.step()


def test_a_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse.* of shape \(10, 4\); build the embedding with sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_follows_its_parameter_to_another_device(offload):
    """As when a model is moved after its optimizer has loaded a state."""
    (param,) = make_params(torch.bfloat16, [(4, 200)])
    optimizer = AdamW([param], offload=offload)
    train([param], optimizer, 1)
    there = torch.nn.Parameter(param.to("meta"))
    optimizer.state[there] = optimizer.state.pop(param)
    optimizer._place_state(optimizer.param_groups[0], there, 0)
    state = optimizer.state[there]
    assert {value.device.type for name, value in state.items() if name != "step"} == {"cpu" if offload else "meta"}
    assert state["step"].is_meta


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


def test_parameters_without_data_beside_others_are_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(4, 128, device=device)) for device in ("cpu", "meta")]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="on the meta device, without data, and others are not: load them"):
        AdamW(params, lr=1e-3).step(clip_grad_norm=1.0)
