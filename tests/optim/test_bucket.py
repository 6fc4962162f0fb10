"""Parameters that are stepped together: when a bucket still serves, its gradients, sums, one step by hand."""

import gc
import math
import weakref

import pytest
import torch

from overcoat import weight_amax
from overcoat.optim.bucket import Bucket, check_gradient, scalar_on
from overcoat.optim.state import init_state
from tests.optim.harness import assert_same_bits, make_params

GROUP = {
    "lr": 0.1,
    "betas": (0.5, 0.75),
    "eps": 0.0,
    "weight_decay": 0.5,
    "moments": ("fp32", "fp32"),
    "master": "auto",
    "group_size": 128,
    "seed": 0,
}
SHAPES = [(4, 200), (300,), ()]


def make(shapes=SHAPES, dtype=torch.float32, **options):
    """A bucket, its parameters and their states."""
    group = {**GROUP, **options}
    params = make_params(dtype, shapes)
    states = [init_state(param, group) for param in params]
    return Bucket(group, params, list(range(len(params))), states), params, states


@torch.no_grad()
def stepped(bucket, grads, factor=1.0, skip=False, **options):
    bucket.take_gradients(grads)
    bucket.step({**GROUP, **options}, torch.tensor(factor), torch.tensor(skip))


# ---- whether it serves ----------------------------------------------------------------------------------


def move_a_parameter(params, states):
    params[1].data = params[1].data.clone()


def cut_a_parameter_where_it_lies(params, states):
    params[1].data = params[1].data[:299]


def move_a_moment(params, states):
    states[0]["exp_avg_sq"].data = states[0]["exp_avg_sq"].data.clone()


def move_a_step_count(params, states):
    states[2]["step"].data = states[2]["step"].data.clone()


@pytest.mark.parametrize("change", [move_a_parameter, cut_a_parameter_where_it_lies, move_a_moment, move_a_step_count])
def test_a_bucket_whose_tensors_have_moved_does_not_serve(change):
    bucket, params, states = make()
    assert bucket.serves()
    stepped(bucket, [torch.ones_like(p) for p in params])
    assert bucket.serves()
    change(params, states)
    assert not bucket.serves()


def test_a_bucket_serves_until_the_maximum_of_one_of_its_weights_is_tracked():
    bucket, params, _ = make()
    other = torch.nn.Parameter(torch.ones(3))
    assert weight_amax.predict([other]) is None
    assert bucket.serves()
    assert weight_amax.predict([params[0]]) is None
    assert not bucket.serves()


def test_maxima_that_are_tracked_are_known_after_the_step():
    params = make_params(shapes=SHAPES)
    assert weight_amax.predict([params[0]]) is None
    bucket = Bucket(GROUP, params, [0, 1, 2], [init_state(param, GROUP) for param in params])
    assert weight_amax.predict([params[0]]) is None
    stepped(bucket, [torch.full_like(p, 2.0) for p in params])
    (known,) = weight_amax.predict([params[0]])
    assert torch.equal(known, params[0].detach().abs().max())
    assert list(bucket.arguments.weight_amax) == [0]


# ---- gradients ------------------------------------------------------------------------------------------


def test_gradients_are_contiguous_and_let_go_by_the_step():
    bucket, _, _ = make()
    grads = [torch.randn(200, 4).t(), torch.randn(600)[::2], torch.tensor(1.0)]
    with torch.no_grad():
        bucket.take_gradients(grads)
        assert all(map(torch.Tensor.is_contiguous, bucket.grads))
        assert_same_bits([g.contiguous() for g in grads], bucket.grads)
        held = [weakref.ref(grad) for grad in bucket.grads]
        bucket.step(GROUP, torch.tensor(1.0), torch.tensor(False))
    del grads
    gc.collect()
    assert bucket.grads == []
    assert not any(grad() is not None for grad in held)


def test_a_sparse_gradient_is_refused_by_the_shape_of_its_parameter():
    embedding = torch.nn.Parameter(torch.ones(10, 4))
    check_gradient(embedding, torch.ones(10, 4))
    with pytest.raises(ValueError, match=r"sparse.* of shape \(10, 4\); build the embedding with sparse=False"):
        check_gradient(embedding, torch.eye(10, 4).to_sparse())


def test_sums_of_squares_by_hand():
    bucket, params, _ = make()
    bucket.take_gradients([torch.full_like(p, i + 1.0) for i, p in enumerate(params)])
    total = bucket.sum_squares()
    assert (total.dtype, total.shape, total.item()) == (torch.float64, (), 800 + 4 * 300 + 9)
    squares, bad = bucket.sums_of_squares()
    assert squares.dtype == torch.float64
    assert squares.tolist() == [800, 1200, 9]
    assert bad.tolist() == [False, False, False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**64])
def test_sums_tell_which_gradients_are_not_finite(value):
    """Nor may a square be beyond FP32."""
    bucket, params, _ = make()
    grads = [torch.ones_like(p) for p in params]
    grads[1].data[299] = value
    bucket.take_gradients(grads)
    assert not bucket.sum_squares().isfinite()
    squares, bad = bucket.sums_of_squares()
    assert bad.tolist() == [False, True, False]
    assert squares[[0, 2]].tolist() == [800, 1]


# ---- steps ----------------------------------------------------------------------------------------------


def test_a_step_by_hand():
    """At t = 1 all moves by lr against the sign, from w (1 - lr weight_decay); the factor is in m and v."""
    bucket, params, states = make()
    before = [p.detach().clone() for p in params]
    stepped(bucket, [torch.full_like(p, -4.0 if i else 4.0) for i, p in enumerate(params)], factor=0.5)
    for i, (param, old, state) in enumerate(zip(params, before, states)):
        sign = -1.0 if i else 1.0
        torch.testing.assert_close(param.detach(), old * 0.95 - 0.1 * sign)
        torch.testing.assert_close(state["exp_avg"], torch.full_like(old, sign))
        torch.testing.assert_close(state["exp_avg_sq"], torch.ones_like(old))
        assert state["step"] == 1


def test_the_hyperparameters_of_the_step_count_not_those_of_the_bucket():
    bucket, params, _ = make()
    before = [p.detach().clone() for p in params]
    stepped(bucket, [torch.ones_like(p) for p in params], lr=torch.tensor(0.25, dtype=torch.float64), weight_decay=0.0)
    for param, old in zip(params, before):
        torch.testing.assert_close(param.detach(), old - 0.25)


@pytest.mark.parametrize("skip", [True, False, [True, False, True]])
def test_skipped_parameters_keep_every_bit(skip):
    bucket, params, states = make(dtype=torch.bfloat16, moments=("sqrt8", "log8"))
    before = [[p.detach().clone(), *(v.clone() for v in state.values())] for p, state in zip(params, states)]
    stepped(bucket, [torch.ones_like(p) for p in params], skip=skip, moments=("sqrt8", "log8"))
    for i, (param, state) in enumerate(zip(params, states)):
        skipped = skip[i] if isinstance(skip, list) else skip
        if skipped:
            assert_same_bits(before[i], [param.detach(), *state.values()])
        else:
            assert state["step"] == 1
            assert not torch.equal(param, before[i][0])


def test_random_numbers_are_those_of_seed_and_index():
    """Of the parameter's number in the optimizer, not of its place in the bucket."""
    results = []
    for index, seed in ((1, 0), (1, 0), (2, 0), (1, 3)):
        param = torch.nn.Parameter(torch.ones(64, 128).bfloat16())
        group = {**GROUP, "master": "bf16", "seed": seed, "lr": 1e-3}
        bucket = Bucket(group, [param], [index], [init_state(param, group)])
        stepped(bucket, [torch.ones_like(param)], lr=1e-3)
        results.append(param.detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


# ---- scalars --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0.1, 1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1])]
)
def test_a_scalar_is_fp32_on_the_device(value):
    found = scalar_on(value, torch.device("cpu"))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(float(value), rel=1e-7)
    moved = scalar_on(value, torch.device("meta"))
    assert (moved.device.type, moved.shape) == ("meta", ())
