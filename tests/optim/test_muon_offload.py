"""Muon's offloaded states: every bit of the ordinary step, in host memory, through buffers of bounded size."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overcoat import Muon, memory, release_gradients
from overcoat.optim.offload import states_of
from tests.optim import test_muon
from tests.optim.harness import assert_same_bits, make_params, set_grads, snapshot, train
from tests.optim.test_offload import extent
from tests.optim.test_sharding import assert_same_bits as assert_same_named
from tests.optim.test_sharding import everything
from tests.waits import waiting_is_an_error

# Rounds of several matrices, with rows of whole groups and without; fused rows; experts, with rows that are laid out
# together; a matrix that is not contiguous.
ALIKE = [(64, 128)] * 3 + [(72, 200)] * 2
FUSED = [(18, 130)]
STACKED = [(3, 40, 136), (4, 8, 20)]
OTHERS = [(32, 96), (96,), (5,)]
# Many chunks, matrices cut between rows.
SMALL = 3 * 2048
KINDS = {
    "8bit": {},
    "fp8": {"state": "fp8", "master": "bf16+16"},
    "bf16": {"state": "bf16", "group_size": 16},
    "fp32": {"state": "fp32", "master": "bf16"},
}


def make(device, offloaded=True, dtype=torch.bfloat16, seed=0, buffer=SMALL, **options):
    """Groups of matrices and of others on a device, and their optimizer."""
    params = make_params(dtype, [*ALIKE, *FUSED, *STACKED, *OTHERS], seed, device)
    params[0].data = params[0].data.mT.contiguous().mT
    a, b = len(ALIKE), len(ALIKE) + 1
    groups = [{"params": params[:a]}, {"params": params[a:b], "splits": (10, 5, 3)}, {"params": params[b : b + 2]}]
    groups = [{**group, "algorithm": "muon"} for group in groups]
    groups.append({"params": params[b + 2 :], "algorithm": "adamw", "lr": 3e-3})
    if offloaded:
        options |= {"offload": True, "offload_buffer": buffer}
    return params, Muon(groups, lr=0.02, **options)


def step_groups(optimizer):
    return [group for groups in optimizer._step_groups.values() for group, _ in groups.parts]


def chunks_of(group):
    """Return the chunks of a step group, of matrices or not, each with the states that it has."""
    if not hasattr(group, "rounds"):
        return group.chunks
    return [chunk for of_round in group.chunks for chunks in of_round.values() for chunk in chunks]


@pytest.mark.parametrize("buffer", [SMALL, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_steps_equal_ordinary_ones_bit_for_bit(kind, dtype, buffer, device):
    """Clipped, one step skipped, with a matrix that has no gradient at some step."""
    ordinary, offloaded = (make(device, of, dtype, buffer=buffer, **KINDS[kind]) for of in (False, True))
    for step in range(4):
        for params, optimizer in (ordinary, offloaded):
            set_grads(params, step)
            if step == 1:
                params[3].grad = None
            if step == 2:
                params[4].grad[0, 3] = torch.inf
            optimizer.step(clip_grad_norm=0.5)
            assert optimizer.skipped_steps.item() == (step > 1)
    assert_same_bits(snapshot(*ordinary), snapshot(*offloaded))
    torch.testing.assert_close(ordinary[1].grad_norm, offloaded[1].grad_norm, rtol=0, atol=0)
    matrices = step_groups(offloaded[1])[0]
    assert (len(matrices.chunks[0]["momentum"]) > 1) == (buffer == SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_released_gradients_take_the_same_steps(kind, device):
    """One gradient not finite: its matrix alone is skipped."""
    runs = []
    for options in ({}, {"offload": True, "offload_buffer": 3 * 4096}):
        model, optimizer = test_muon.make(device=device, **KINDS[kind], **options)
        release_gradients(model, optimizer, batch_bytes=40_000)
        test_muon.train(model, optimizer, 2)
        handle = model[1].weight.register_hook(lambda grad: grad * torch.inf)
        test_muon.train(model, optimizer, 1, first=2)
        handle.remove()
        test_muon.train(model, optimizer, 1, first=3)
        assert optimizer.skipped_steps.item() == 1
        runs.append(snapshot(model.parameters(), optimizer))
    assert_same_bits(*runs)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_copy_nothing_of_each_other(kind, device):
    """Else one would write back, on its own stream, what the other has written since."""
    params, optimizer = make(device, **KINDS[kind])
    train(params, optimizer, 1)
    owner = {}
    for group in step_groups(optimizer):
        whole = states_of(group.with_states())
        for chunk in chunks_of(group):
            held = states_of(chunk.tensors)
            for piece in chunk.pieces:
                for name in held:
                    bytes_ = extent(piece.of(whole[name]))
                    assert not any(byte in owner for byte in bytes_)
                    owner.update(dict.fromkeys(bytes_, chunk))
    for group in step_groups(optimizer):
        for of in states_of(group.with_states()).values():
            assert all(byte in owner for state in of for byte in extent(state))
        for chunk in chunks_of(group):
            copied = {byte for host, _ in chunk.spans for byte in extent(host)}
            assert {owner.get(byte, chunk) for byte in copied} <= {chunk}
            assert copied >= {byte for byte, of in owner.items() if of is chunk}


def test_states_are_in_host_memory_and_buffers_are_bounded(device):
    params, optimizer = make(device, buffer=3 * 30_000)
    train(params, optimizer, 2)
    assert memory.optimizer_bytes(optimizer, "cpu") > 2 * sum(p.numel() for p in params)
    if device.type == "cuda":
        assert memory.optimizer_bytes(optimizer, "cuda") == 4 * len(params)  # the step counts
        assert all(v.is_pinned() for s in optimizer.state.values() for k, v in s.items() if k != "step")
    (staging,) = optimizer._staging.values()
    assert [slot.numel() for slot in staging.slots] == [30_000] * 3


@pytest.mark.parametrize("first", [False, True], ids=["into offloaded", "out of offloaded"])
def test_checkpoints_are_those_of_the_ordinary_step(first, device):
    """Saved by torch.save under one and loaded under the other, either way; and a copy goes on, too."""
    params, optimizer = make(device, first)
    train(params, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, other = make(device, not first, seed=5)
    train(others, other, 1)
    for p, q in zip(others, params):
        p.data.copy_(q)
    other.load_state_dict(torch.load(file, weights_only=True))
    runs = [(params, optimizer), (others, other), copy.deepcopy((params, optimizer))]
    for run in runs:
        train(*run, 2, first=2)
    for run in runs[1:]:
        assert_same_bits(snapshot(params, optimizer), snapshot(*run))


def test_a_row_that_does_not_fit_is_an_error_that_names_the_remedy():
    params, optimizer = make("cpu", buffer=3 * 120)
    with pytest.raises(ValueError, match=r"shape \(72, 200\).*raise offload_buffer"):
        train(params, optimizer, 1)


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_host_never_waits():
    params, optimizer = make("cuda")
    train(params, optimizer, 2)
    gradients = [torch.randn_like(p) for p in params]
    with waiting_is_an_error():
        for _ in range(3):
            for p, g in zip(params, gradients):
                p.grad = g + 0
            optimizer.step(clip_grad_norm=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("released", [False, True])
def test_offloaded_states_of_a_mesh_of_gpus(released):
    """The states are DTensors on the host whose mesh is one of GPUs; one process is enough for that."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = test_muon.make(device="cuda")
        sharded = test_muon.make(True, released=released, device="cuda", offload=True, offload_buffer=3 * 4096)
        for run in (plain, sharded):
            test_muon.train(*run, 3)
        torch.cuda.synchronize()
        assert_same_named(everything(*plain), everything(*sharded))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_steps_in_a_row_read_what_the_one_before_has_written():
    """No gradient work between the steps, so copies of one step and of the next overlap as far as they may."""
    start = torch.randn(12, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    runs = []
    for options in ({}, {"offload": True, "offload_buffer": 3 * 2**20}, {"offload": True}):
        params = [nn.Parameter(x.clone()) for x in start]
        optimizer = Muon([{"params": params, "algorithm": "muon"}], lr=0.02, **options)
        set_grads(params, 0)
        for _ in range(10):
            optimizer.step()
        runs.append(snapshot(params, optimizer))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


@pytest.mark.gpu
def test_gpu_memory_of_a_step_is_a_round_and_the_buffers():
    """150 MB of states pass through 12 MB."""
    params = [nn.Parameter(torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)) for _ in range(18)]
    optimizer = Muon([{"params": params, "algorithm": "muon"}], lr=0.02, offload=True, offload_buffer=12 * 2**20)
    for param in params:
        param.grad = torch.randn_like(param)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert memory.optimizer_bytes(optimizer) > 150e6
    held = torch.cuda.memory_allocated()
    assert held - before < 50 * 2**20  # the buffers and cuBLAS' workspace
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    rounds = 2**24 * 2  # bytes of u in one round, as in test_muon
    assert torch.cuda.max_memory_allocated() - held < 5.01 * rounds
