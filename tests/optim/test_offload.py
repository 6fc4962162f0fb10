"""Offloaded states: every bit of the ordinary step, in host memory, through buffers of bounded size."""

import gc
import io

import pytest
import torch

from overcoat import AdamW, memory
from overcoat.optim.offload import states_of
from tests.optim.harness import SHAPES, assert_same_bits, make_params, set_grads, snapshot, train
from tests.waits import waiting_is_an_error

# Many chunks, larger matrices cut; the longest vector takes less, of FP32 moments up to 2704 bytes.
SMALL = 3 * 2048


KINDS = {
    "8bit": {},
    "fp8": {"moments": "fp8", "master": "bf16+16"},
    "stochastic": {"moments": ("de8x", "sqrt8"), "master": "bf16", "group_size": 16},
    "plain": {"moments": "fp32"},
}


def make(device, dtype=torch.bfloat16, offloaded=True, shapes=SHAPES, seed=0, buffer=SMALL, **options):
    """Two parameter groups on a device, and their optimizer."""
    params = make_params(dtype, shapes, seed, device)
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0, "lr": 3e-3}]
    if offloaded:
        buffer = max(buffer, 3 * 2704) if options.get("moments") == "fp32" else buffer
        options |= {"offload": True, "offload_buffer": buffer}
    return params, AdamW(groups, lr=1e-2, **options)


def chunks_of(optimizer):
    return [chunk for groups in optimizer._step_groups.values() for group, _ in groups.parts for chunk in group.chunks]


@pytest.mark.parametrize("buffer", [SMALL, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_steps_equal_ordinary_ones_bit_for_bit(kind, dtype, buffer, device):
    """Clipped, one step skipped, with parameters that have no gradient at some steps."""
    ordinary = make(device, dtype, offloaded=False, **KINDS[kind])
    offloaded = make(device, dtype, buffer=buffer, **KINDS[kind])
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
    assert (len(chunks_of(offloaded[1])) > 2) == (buffer == SMALL)  # one for each group at least


def test_frozen_integers_have_no_states():
    """As of a quantized base."""
    params = make_params(torch.bfloat16, [(4, 200)])
    base = torch.nn.Parameter(torch.zeros(4, 200, dtype=torch.uint8), requires_grad=False)
    optimizer = AdamW([*params, base], offload=True)
    train(params, optimizer, 1)
    assert list(optimizer.state) == params


def extent(tensor):
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_copy_nothing_of_each_other(kind, dtype, device):
    """Else one would write back, on its own stream, what the other has written since."""
    params, optimizer = make(device, dtype, **KINDS[kind])
    train(params, optimizer, 1)
    owner = {}
    for groups in optimizer._step_groups.values():
        for group, _ in groups.parts:
            whole = states_of(group.with_states())
            for chunk in group.chunks:
                for piece in chunk.pieces:
                    for of in whole.values():
                        owner.update(dict.fromkeys(extent(piece.of(of)), chunk))
    for chunk in chunks_of(optimizer):
        copied = [byte for host, _ in chunk.spans for byte in extent(host)]
        assert {owner.get(byte, chunk) for byte in copied} == {chunk}
        assert set(copied) >= {byte for byte, of in owner.items() if of is chunk}


def test_states_are_in_host_memory_and_buffers_are_bounded(device):
    params, optimizer = make(device, shapes=[(512, 512), (700,), (64, 384)], buffer=3 * 30_000)
    train(params, optimizer, 2)
    numel = sum(p.numel() for p in params)
    assert memory.optimizer_bytes(optimizer, "cpu") > 3 * numel
    if device.type == "cuda":
        assert memory.optimizer_bytes(optimizer, "cuda") == 4 * len(params)  # the step counts
        assert all(v.is_pinned() for s in optimizer.state.values() for k, v in s.items() if k != "step")
    (staging,) = optimizer._staging.values()
    assert [slot.numel() for slot in staging.slots] == [30_000] * 3
    assert all(slot.device.type == device.type for slot in staging.slots)


@pytest.mark.parametrize("first", [False, True], ids=["into offloaded", "out of offloaded"])
def test_checkpoints_are_those_of_the_ordinary_step(first, device):
    """Saved by torch.save under one and loaded under the other, either way."""
    params, optimizer = make(device, offloaded=first)
    train(params, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    state_bytes = memory.optimizer_bytes(optimizer)
    assert file.tell() < state_bytes + 60_000  # views into larger memory would be saved with all of it
    file.seek(0)
    others, other = make(device, offloaded=not first, seed=5)
    train(others, other, 1)
    for p, q in zip(others, params):
        p.data.copy_(q)
    other.load_state_dict(torch.load(file, weights_only=True))
    for run in ((params, optimizer), (others, other)):
        train(*run, 2, first=2)
    assert_same_bits(snapshot(params, optimizer), snapshot(others, other))


def test_a_row_that_does_not_fit_is_an_error_that_names_the_remedy():
    params, optimizer = make("cpu", buffer=300)
    with pytest.raises(ValueError, match=r"shape \(3, 128\).*raise offload_buffer"):
        train(params, optimizer, 1)


def test_experts_are_cut_into_rows():
    """An expert of Mixtral has 352 MB of states, a staging buffer 64 MB."""
    params, optimizer = make("cpu", shapes=[(2, 40, 200)], buffer=3 * 6000)
    train(params, optimizer, 1)
    pieces = [piece for chunk in chunks_of(optimizer) for piece in chunk.pieces]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 9), (9, 18), (18, 27), (27, 36), (36, 45), (45, 54),
                                                               (54, 63), (63, 72), (72, 80)]  # fmt: skip


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_host_never_waits():
    params, optimizer = make("cuda", shapes=[(256, 1024)] * 4, buffer=3 * 100_000)
    train(params, optimizer, 2)
    gradients = [torch.randn_like(p) for p in params]
    with waiting_is_an_error():
        for _ in range(3):
            for p, g in zip(params, gradients):
                p.grad = g + 0
            optimizer.step(clip_grad_norm=1.0)


@pytest.mark.gpu
def test_gpu_memory_of_a_step_is_the_buffers():
    """A matrix of 400 MB of states passes through 12 MB."""
    param = torch.nn.Parameter(torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.randn_like(param)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = AdamW([param], offload=True, offload_buffer=12 * 2**20)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    assert memory.optimizer_bytes(optimizer) > 400e6
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20


@pytest.mark.gpu
def test_steps_in_a_row_read_what_the_one_before_has_written():
    """No gradient work between the steps, so copies of one step and of the next overlap as far as they may."""
    ordinary = make("cuda", offloaded=False, shapes=[(512, 4096)] * 3)
    offloaded = make("cuda", shapes=[(512, 4096)] * 3, buffer=3 * 2**20)
    for params, optimizer in (ordinary, offloaded):
        set_grads(params, 0)
        for _ in range(10):
            optimizer.step()
    assert_same_bits(snapshot(*ordinary), snapshot(*offloaded))


def test_non_contiguous_parameters(device):
    start = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(device)
    runs = []
    for offloaded in (False, True):
        param = torch.nn.Parameter(start.t().contiguous().t())
        optimizer = AdamW([param], offload=offloaded, offload_buffer=SMALL)
        train([param], optimizer, 3)
        assert not param.is_contiguous()
        runs.append(snapshot([param], optimizer))
    assert_same_bits(*runs)
