"""Steps between two calls of `optimizer.step()`: what a batch holds, which buckets are kept, what a step reports."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from overcoat import AdamW
from overcoat.optim.released import Batch, Entry, ReleasedSteps
from tests.optim.harness import assert_same_bits, make_params, snapshot

CPU = torch.device("cpu")
SHAPES = [(4, 200), (300,), (3, 128), ()]


def make(dtype=torch.float32, **options):
    """Released steps of an optimizer of two groups, its parameters."""
    params = make_params(dtype, SHAPES)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    return ReleasedSteps(AdamW(groups, lr=1e-2, **options)), params


def gradients(params, step=0):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def batch_of(params, grads, numbers):
    batch = Batch(CPU)
    for i in numbers:
        batch.add(Entry(0 if i < 2 else 1, i, params[i], grads[i]))
    return batch


# ---- batches --------------------------------------------------------------------------------------------


def test_a_batch_counts_the_bytes_of_its_gradients():
    batch = Batch(CPU)
    assert (batch.entries, batch.bytes, batch.stream, batch.raw_stream) == ([], 0, None, 0)
    entries = [Entry(0, i, g, g) for i, g in enumerate((torch.ones(3, 5), torch.ones(7).bfloat16(), torch.ones(0, 9)))]
    for entry in entries:
        batch.add(entry)
    assert batch.bytes == 4 * 15 + 2 * 7
    assert batch.entries == entries


@pytest.fixture
def group_of_four():
    """Process 1 of four that do not exist: for what needs no communication."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_sharded_gradient_counts_alike_on_every_process(group_of_four):
    """A quarter of the whole: ten rows are cut into 3, 3, 3 and 1. What is not sharded counts whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))

    def sharded(placements, rows):
        shape = torch.Size((10, 8))
        return DTensor.from_local(torch.ones(rows, 8), mesh, placements, run_check=False, shape=shape, stride=(8, 1))

    for placements, rows, parts in (
        ([Replicate(), Replicate()], 10, 1),
        ([Replicate(), Shard(0)], 5, 2),
        ([Shard(0), Shard(0)], 3, 4),
    ):
        batch, grad = Batch(CPU), sharded(placements, rows)
        batch.add(Entry(0, 0, grad, grad))
        assert batch.bytes == 4 * 80 // parts


# ---- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[3, 2], [1, 0]], [[2], [0, 3], [1]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_step_what_the_ordinary_step_does(batches, dtype):
    released, params = make(dtype)
    others = make_params(dtype, SHAPES)
    groups = [{"params": others[:2]}, {"params": others[2:], "weight_decay": 0.0}]
    ordinary = AdamW(groups, lr=1e-2)
    for step in range(3):
        grads = gradients(params, step)
        for numbers in batches:
            released.step(batch_of(params, grads, numbers))
        released.count()
        released.end()
        for other, grad in zip(others, grads):
            other.grad = grad
        ordinary.step()
        torch.testing.assert_close(released.optimizer.grad_norm, ordinary.grad_norm, rtol=1e-6, atol=0)
    assert_same_bits(snapshot(params, released.optimizer), snapshot(others, ordinary))


def test_parameters_of_other_groups_and_dtypes_have_buckets_of_their_own():
    released, params = make()
    grads = gradients(params)
    grads[1] = grads[1].bfloat16()
    released.step(batch_of(params, grads, [0, 1, 2, 3]))
    assert sorted([*bucket.indices] for bucket in released.buckets.values()) == [[0], [1], [2, 3]]
    released, params = make()
    released.step(batch_of(params, gradients(params), [3, 1, 0]))
    assert sorted([*bucket.indices] for bucket in released.buckets.values()) == [[1, 0], [3]]


def test_buckets_of_the_last_step_are_used_again_and_others_dropped():
    released, params = make()
    for step, numbers in enumerate(([0, 1], [0, 1], [1])):
        released.step(batch_of(params, gradients(params, step), numbers))
        if step == 0:
            (first,) = released.buckets.values()
        if step == 1:
            assert [*released.buckets.values()] == [first]
        if step == 2:
            assert len(released.buckets) == 2
        released.end()
    (last,) = released.buckets.values()
    assert last.indices == [1]
    assert released.used == {}


def test_a_bucket_whose_parameter_has_moved_is_replaced():
    released, params = make()
    released.step(batch_of(params, gradients(params), [0, 1]))
    released.end()
    (old,) = released.buckets.values()
    params[1].data = params[1].data.clone()
    before = params[1].detach().clone()
    released.step(batch_of(params, gradients(params, 1), [0, 1]))
    (new,) = released.buckets.values()
    assert new is not old
    assert not torch.equal(params[1], before)


def test_letting_go_drops_all_buckets_and_keeps_the_norm_of_what_was_stepped():
    released, params = make()
    grads = gradients(params)
    released.step(batch_of(params, grads, [0, 1]))
    released.let_go()
    assert (released.buckets, released.used, released.foresights) == ({}, {}, {})
    assert released.moved
    released.end()
    norm = torch.cat([grads[0].flatten(), grads[1]]).norm()
    torch.testing.assert_close(released.optimizer.grad_norm, norm, rtol=1e-6, atol=0)


# ---- what a step reports --------------------------------------------------------------------------------


def test_flags_say_what_happened_since_the_last_step():
    released, params = make()
    assert (released.stepped, released.moved) == (False, False)
    released.step(batch_of(params, gradients(params), [0]))
    assert (released.stepped, released.moved) == (True, True)
    released.end()
    assert (released.stepped, released.moved, released.sums) == (False, False, [])


def test_a_step_without_gradients_reports_nothing_new():
    released, params = make()
    released.step(batch_of(params, gradients(params), [0]))
    released.end()
    norm = released.optimizer.grad_norm
    released.end()
    assert released.optimizer.grad_norm is norm
    assert len(released.buckets) == 1


def test_the_norm_is_that_of_all_batches_by_hand():
    released, params = make()
    grads = [torch.full_like(p, 2.0) for p in params]
    for numbers in ([0, 2], [1], [3]):
        released.step(batch_of(params, grads, numbers))
    released.end()
    norm = released.optimizer.grad_norm
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert norm.item() == pytest.approx(2 * math.sqrt(800 + 300 + 384 + 1), rel=1e-6)
    assert released.optimizer.skipped_steps == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_whose_gradients_are_not_finite_are_skipped_and_counted_one_by_one(bad):
    released, params = make()
    grads = gradients(params)
    grads[1][299] = grads[3].data = torch.tensor(bad)
    before = [p.detach().clone() for p in params]
    for numbers in ([0, 1], [2, 3]):
        released.step(batch_of(params, grads, numbers))
    released.end()
    assert [torch.equal(p, old) for p, old in zip(params, before)] == [False, True, False, True]
    states = released.optimizer.state
    assert [states[p]["step"].item() for p in params] == [1, 0, 1, 0]
    assert released.optimizer.skipped_steps == 2
    assert not released.optimizer.grad_norm.isfinite()


def test_unchecked_gradients_have_no_norm():
    released, params = make(check_finite=False)
    released.step(batch_of(params, gradients(params), [0, 1]))
    released.end()
    assert released.optimizer.grad_norm is None
    assert released.optimizer.state[params[0]]["step"] == 1
