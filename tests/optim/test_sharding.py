"""AdamW on FSDP2's sharded parameters: two gloo processes on the CPU hold what one process holds, bit for bit.

Each process also trains an unsharded twin, and compares. Matrices with rows that two does not divide, rows that
the group does not divide, vectors whose shards cut groups, and experts that two does not divide.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overcoat import AdamW, release_gradients
from overcoat.optim import sharding
from tests.nightly import mostly_nightly
from tests.processes import on_two, two_of

OPTIONS = {
    "8bit": {},
    "fp8": {"moments": "fp8", "master": "bf16+16"},
    "stochastic": {"moments": ("de8x", "sqrt8"), "master": "bf16", "group_size": 16},
    "offloaded": {"offload": True, "offload_buffer": 3 * 4096},
}


class Experts(nn.Module):
    """x + the mean of three experts, whose weights and biases are stacked."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, width)), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x):
        return x + (torch.einsum("tk,enk->ten", x, self.weight) + self.bias).mean((1, 2)).unsqueeze(1)


def make(sharded, kind="8bit", seed=0, released=False, device="cpu"):
    torch.manual_seed(seed)
    layers = nn.Linear(200, 301), nn.LayerNorm(301), nn.GELU(), Experts(301), nn.Linear(301, 1)
    model = nn.Sequential(*layers).to(device).bfloat16()
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == big]} for big in (True, False)]
    optimizer = AdamW(groups, lr=1e-2, **OPTIONS[kind])
    if released:  # the matrix of 60 kB a process on its own, the small ones together
        release_gradients(model, optimizer, batch_bytes=40_000)
    return model, optimizer


def train(model, optimizer, steps, first=0, **kwargs):
    """Every process sees the same batch, so the averaged gradient is that of one process."""
    for step in range(first, first + steps):
        x = torch.randn(16, 200, generator=torch.Generator().manual_seed(step)).bfloat16()
        x = x.to(next(model.parameters()).device)
        model(x).square().mean().backward()
        optimizer.step(**kwargs)
        optimizer.zero_grad()


def whole(tensor):
    """A DTensor gathered as bytes, which pickle: 8-bit floats do not."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().contiguous().view(torch.uint8).cpu())
    return torch.cat(parts).view(tensor.dtype)


def everything(model, optimizer):
    """Unsharded parameters and states by name."""
    result = {}
    for name, param in model.named_parameters():
        result[name] = whole(param)
        result |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[param].items()}
    return result


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert value.shape == right[name].shape, name
        mine, other = (x.cpu().reshape(-1).view(torch.uint8) for x in (value, right[name]))
        assert torch.equal(mine, other), name


# ---- the step ------------------------------------------------------------------------------------------


def _steps_alike(rank, device):
    for kind in OPTIONS:
        plain = make(False, kind if kind != "offloaded" else "8bit", device=device)
        train(*plain, 3)
        for released in (False, True) if kind in ("8bit", "offloaded") else (False,):
            sharded = make(True, kind, released=released, device=device)
            train(*sharded, 3)
            assert_same_bits(everything(*plain), everything(*sharded))
    model, optimizer = make(True, device=device)
    train(model, optimizer, 1)
    for param in model.parameters():
        for name, value in optimizer.state[param].items():
            assert isinstance(value, DTensor) == (param.dim() > 1 and name != "step")
            if isinstance(value, DTensor):
                assert value.placements == param.placements
                assert len(value) == len(param)
                assert len(value.to_local()) == len(param.to_local())


@two_of
def test_two_processes_hold_the_codes_of_one(device):
    on_two(_steps_alike, device, device)


@pytest.mark.gpu
@pytest.mark.parametrize("released", [False, True])
def test_offloaded_states_of_a_mesh_of_gpus(released):
    """The states are DTensors on the host whose mesh is one of GPUs; one process is enough for that."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = make(False, device="cuda")
        sharded = make(True, "offloaded", released=released, device="cuda")
        for run in (plain, sharded):
            train(*run, 3)
        torch.cuda.synchronize()  # states are on their way to host memory
        assert_same_bits(everything(*plain), everything(*sharded))
        moments = sharded[1].state[sharded[0][0].weight]["exp_avg"]
        assert isinstance(moments, DTensor)
        assert moments.to_local().is_pinned()
        again = make(True, "offloaded", seed=4, device="cuda")
        again[1].load_state_dict(sharded[1].state_dict())
        for param, original in zip(again[0].parameters(), sharded[0].parameters()):
            for name, value in sharded[1].state[original].items():
                assert_same_bits({name: whole(value)}, {name: whole(again[1].state[param][name])})
    finally:
        dist.destroy_process_group()


def _clips_and_skips_together(rank, device):
    plain, sharded = make(False, device=device), make(True, device=device)
    for limit in (1e9, 1e-3):
        train(*plain, 1, clip_grad_norm=limit)
        train(*sharded, 1, clip_grad_norm=limit)
        torch.testing.assert_close(sharded[1].grad_norm, plain[1].grad_norm, rtol=1e-5, atol=0)
    left, right = everything(*plain), everything(*sharded)
    torch.testing.assert_close(left["0.weight"], right["0.weight"], rtol=1e-2, atol=1e-4)

    before = everything(*sharded)
    for param in sharded[0].parameters():
        param.grad = torch.zeros_like(param)
    if rank == 1:
        sharded[0][0].weight.grad.to_local()[3, 5] = torch.inf
    sharded[1].step()
    assert_same_bits(before, everything(*sharded))
    assert sharded[1].skipped_steps == 1


@two_of
def test_clipping_and_skipping_are_global(device):
    on_two(_clips_and_skips_together, device, device)


def _one_all_reduce(rank):
    calls, plain, sent, gathers = [], dist.all_reduce, [], sharding._all_gather
    for reduce_dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).bfloat16()
        for layer in (*model, model):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        groups = [{"params": [layer.weight for layer in model[:2]]}, {"params": [layer.weight for layer in model[2:]]}]
        optimizer = AdamW([*groups, {"params": [layer.bias for layer in model]}], lr=1e-2)
        model(torch.ones(3, 40, dtype=torch.bfloat16) * (rank + 1)).sum().backward()
        expected = torch.stack([p.grad.full_tensor().double().square().sum() for p in model.parameters()]).sum().sqrt()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda x, *a, **k: (calls.append(x.numel()), plain(x, *a, **k))[1])
            patch.setattr(sharding, "_all_gather", lambda *a, **k: (sent.append(len(a[1])), gathers(*a, **k))[1])
            patch.setattr(DTensor, "full_tensor", None)
            optimizer.step(clip_grad_norm=1.0)
        torch.testing.assert_close(optimizer.grad_norm, expected.float())
    assert calls == [2, 2]  # both groups of matrices; vectors are whole
    assert sent == [4 * 20] * 4  # all vectors' gradients together, and themselves


def test_norm_clip_and_finite_check_take_one_all_reduce_and_vectors_one_gather():
    on_two(_one_all_reduce, "cpu")


# ---- sharding that leaves each process to decide alone -------------------------------------------------------------


def _refused(rank):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    for kept in (False, True):  # use_orig_params
        before = model()
        optimizer = AdamW(before.parameters())
        sharded = FullyShardedDataParallel(before, use_orig_params=kept, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"FSDP1.*use torch.distributed.fsdp.fully_shard"):
            AdamW(sharded.parameters())
        sharded(torch.ones(2, 8)).sum().backward()
        weights = [p.detach().clone() for p in sharded.parameters()]
        if kept:  # wrapped after the optimizer was built; else that has parameters which nobody trains
            with pytest.raises(ValueError, match="FSDP1"):
                optimizer.step()
        with pytest.raises(ValueError, match="FSDP1"):
            release_gradients(sharded, optimizer)
        assert all(torch.equal(p, old) for p, old in zip(sharded.parameters(), weights))
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer.*use torch.distributed.fsdp.fully_shard"):
        ZeroRedundancyOptimizer(model().parameters(), optimizer_class=AdamW, lr=1e-3)
    replicas = nn.parallel.DistributedDataParallel(model())
    optimizer = AdamW(replicas.parameters())
    handle = release_gradients(replicas.module, optimizer)  # as where a trainer wraps the model
    with pytest.raises(ValueError, match=r"DistributedDataParallel averages.*handle.remove\(\)"):
        replicas(torch.ones(2, 8))
    handle.remove()
    replicas(torch.ones(2, 8) * (rank + 1)).sum().backward()
    optimizer.step()  # every process has all gradients, each the mean of all
    norms = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(norms, optimizer.grad_norm)
    assert norms[0] == norms[1] > 0


def test_other_sharding_is_refused_before_it_trains():
    on_two(_refused, "cpu")


def _other_layouts(rank):
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((2,), (1, 2), (2, 1))}

    def values():
        return torch.randn(6, 200, generator=torch.Generator().manual_seed(3)).bfloat16()

    def parameter(*placements, mesh=(2,)):
        return nn.Parameter(distribute_tensor(values(), meshes[mesh], placements))

    for placements, mesh in (([Shard(1)], (2,)), ([Shard(0), Shard(0)], (2, 1))):
        with pytest.raises(ValueError, match="tensor parallelism"):
            AdamW([parameter(*placements, mesh=mesh)])
    twice = distribute_tensor(torch.ones(7), meshes[2, 1], [Shard(0), Shard(0)])  # whose second cut the step forgot
    with pytest.raises(ValueError, match="tensor parallelism"):
        AdamW([nn.Parameter(twice)])
    expected = nn.Parameter(values())
    layouts = [
        parameter(Shard(0)),
        parameter(Replicate()),
        parameter(Replicate(), Shard(0), mesh=(1, 2)),
        parameter(Replicate(), Shard(0), mesh=(2, 1)),
    ]
    for param in [expected, *layouts]:
        optimizer = AdamW([param])
        param.grad = param.detach() * 2
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, 2 * values().float().norm())
    for param in layouts:
        assert torch.equal(param.detach().full_tensor(), expected)
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 1, 300, 2)]

    def stepped(params):
        for param in params:
            param.grad = param.detach() * 2
        AdamW(params).step(clip_grad_norm=1.0)
        return [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in params]

    expected = stepped([nn.Parameter(vector.clone()) for vector in vectors])
    for placements, mesh in (
        ([Shard(0)], (2,)), ([Replicate(), Shard(0)], (2, 1)), ([Replicate(), Shard(0)], (1, 2))
    ):  # fmt: skip
        given = [nn.Parameter(distribute_tensor(vector, meshes[mesh], placements)) for vector in vectors]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = stepped(given)
        assert all(len(each) == len(vector) and torch.equal(each, vector) for each, vector in zip(found, expected))
    param = parameter(Shard(0))
    param.grad = parameter(Replicate()).detach()
    with pytest.raises(ValueError, match="redistribute"):
        AdamW([param]).step()


def test_replicas_step_alike_and_shards_along_other_dimensions_are_refused():
    on_two(_other_layouts, "cpu")


# ---- checkpoints -----------------------------------------------------------------------------------------


def save(model, optimizer, folder):
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=folder)  # fmt: skip


def load(model, optimizer, folder):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def _save_on_two(rank, kind, folder):
    sharded = make(True, kind)
    train(*sharded, 2)
    save(*sharded, f"{folder}/two")


def _load_on_two(rank, kind, folder):
    for saved in ("two", "one"):
        expected = torch.load(f"{folder}/{saved}.pt")
        sharded = make(True, kind, seed=9)
        load(*sharded, f"{folder}/{saved}")
        assert_same_bits(expected, everything(*sharded))
    train(*sharded, 1, first=3)
    assert_same_bits(torch.load(f"{folder}/end.pt"), everything(*sharded))


@pytest.mark.parametrize("kind", mostly_nightly(["8bit", "fp8"], ["8bit"]))
def test_save_on_two_load_on_one_and_back(kind, tmp_path):
    """Exactly the state of a run on one process, which goes on as if nothing had happened."""
    on_two(_save_on_two, "cpu", kind, str(tmp_path))
    plain = make(False, kind)
    train(*plain, 2)
    torch.save(everything(*plain), tmp_path / "two.pt")
    loaded = make(False, kind, seed=5)
    load(*loaded, str(tmp_path / "two"))
    assert_same_bits(everything(*plain), everything(*loaded))

    for run in (plain, loaded):
        train(*run, 1, first=2)
    assert_same_bits(everything(*plain), everything(*loaded))
    save(*loaded, str(tmp_path / "one"))
    torch.save(everything(*loaded), tmp_path / "one.pt")
    train(*plain, 1, first=3)
    torch.save(everything(*plain), tmp_path / "end.pt")
    on_two(_load_on_two, "cpu", kind, str(tmp_path))


def _save_load_and_go_on(rank, device, kind, folder):
    saved, loaded = make(True, kind, device=device), make(True, kind, seed=9, device=device)
    train(*saved, 2)
    save(*saved, folder)
    load(*loaded, folder)
    assert_same_bits(everything(*saved), everything(*loaded))
    for run in (saved, loaded):
        train(*run, 1, first=2)
    assert_same_bits(everything(*saved), everything(*loaded))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIONS)
def test_checkpoints_through_nccl(kind, tmp_path):
    on_two(_save_load_and_go_on, "cuda", "cuda", kind, str(tmp_path))


def _plain_states_into_shards(rank):
    for kind in ("8bit", "fp8", "offloaded"):
        _plain_state_into_shards(kind)


def _plain_state_into_shards(kind):
    plain = make(False, kind)
    train(*plain, 2)
    sharded = make(True, kind, seed=4)
    sharded[1].load_state_dict(plain[1].state_dict())
    if kind != "fp8":  # torch gathers here, and gloo sends neither 8-bit floats nor int16
        full = get_optimizer_state_dict(*sharded, options=StateDictOptions(full_state_dict=True))
        for name, param in plain[0].named_parameters():
            assert_same_bits(plain[1].state[param], full["state"][name])
    for again in (make(True, kind, seed=5), make(False, kind, seed=5)):
        again[1].load_state_dict(sharded[1].state_dict())
        for (name, param), original in zip(again[0].named_parameters(), plain[0].parameters()):
            state = {key: whole(value) for key, value in again[1].state[param].items()}
            assert_same_bits(plain[1].state[original], state)
            is_sharded = isinstance(param, DTensor) and param.dim() > 1
            assert isinstance(again[1].state[param]["exp_avg"], DTensor) == is_sharded, name


def test_an_unsharded_state_loads_into_shards_and_is_gathered_again():
    on_two(_plain_states_into_shards, "cpu")
