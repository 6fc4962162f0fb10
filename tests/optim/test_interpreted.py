"""How the optimizer launches its kernels, on a CPU: released, offloaded and both give the bits of the ordinary step.

Under Triton's interpreter the tables, counters and chunks that a GPU would see are built and used. Triton decides at
import whether it interprets, so this runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import tests.kernels.interpreter
import copy
import gc
import os
import weakref
import torch
from torch import nn
from overcoat import AdamW, Muon, muon_groups, release_gradients
from overcoat.kernels.adamw_step import Counters, Plan
from overcoat.kernels.muon import Passes

launches = {"take_step": 0, "launch": 0, "momentum": 0, "apply": 0}
for kind, name in ((Counters, "take_step"), (Plan, "launch"), (Passes, "momentum"), (Passes, "apply")):
    def counted(self, *args, name=name, method=getattr(kind, name)):
        launches[name] += 1
        return method(self, *args)
    setattr(kind, name, counted)


def run(batch_bytes=None, broken=False, steps=2, muon=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16), nn.LayerNorm(16)).bfloat16()
    params, kind = (muon_groups(model), Muon) if muon else (model.parameters(), AdamW)
    optimizer = kind(params, lr=1e-2, **({"adamw_lr": 1e-3} if muon else {}), **options)
    if batch_bytes:
        release_gradients(model, optimizer, batch_bytes=batch_bytes)
    for name in launches:
        launches[name] = 0
    for step in range(steps):
        if broken and step == 1:
            model[2].weight.register_hook(lambda grad: grad * torch.inf)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    values = [value for index in sorted(states) for value in states[index].values()]
    return model, optimizer, [*(p.detach() for p in model.parameters()), *values]


def same_bits(left, right):
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
               for a, b in zip(left, right, strict=True))


def check(expected, found, counted, chunks):
    assert same_bits(expected[2], found[2])
    torch.testing.assert_close(expected[1].grad_norm, found[1].grad_norm, rtol=1e-6, atol=0)
    assert launches["take_step"] == counted, launches
    assert launches["launch"] > 6 if chunks else launches["launch"] == 4, launches


ordinary = run()
assert launches == {"take_step": 2, "launch": 2, "momentum": 0, "apply": 0}, launches
offload = {"offload": True, "offload_buffer": 3 * 1000}
check(ordinary, run(**offload), 2, True)
check(ordinary, run(900), 4, False)  # two batches a step
check(ordinary, run(900, **offload), 4, True)

for options in ({"muon": True}, {"muon": True, "state": "fp8", "broken": True}):
    ordinary_muon = run(**options)
    assert launches["momentum"] == launches["apply"] == 4, launches  # two rounds of one shape each
    for batch_bytes in (None, 900):
        expected = run(batch_bytes, **options)[2] if batch_bytes else ordinary_muon[2]
        found = run(batch_bytes, **options, offload=True, offload_buffer=3 * 300)  # a matrix has 640 of momentum
        assert same_bits(expected, found[2]), options
        assert launches["momentum"] > 4, launches

model, optimizer, _ = run(900, broken=True)
assert optimizer.skipped_steps == 1
assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2, 2, 1, 2, 2, 2]
moved = [not torch.equal(p, q) for p, q in zip(ordinary[0].parameters(), model.parameters())]
assert moved == [False, False, True, False, False, False]

# States that are cleared are freed at once, with all that was made of them for the kernels.
for options in ({}, {"batch_bytes": 900}, {"muon": True}):
    model, optimizer = run(**options)[:2]
    old = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    gc.disable()
    for state in optimizer.state.values():
        state.clear()
    assert len(old) > 30 and not any(value() is not None for value in old), options
    gc.enable()

# Memory that moved between two steps: the kernel's tables of addresses are made anew.
model, optimizer, _ = run()
model[0].weight.data = model[0].weight.data.clone()
for value in optimizer.state[model[2].weight].values():
    value.data = value.data.clone()
twins, twin = copy.deepcopy((model, optimizer))
for m, o in ((model, optimizer), (twins, twin)):
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    o.step()
assert same_bits(model.parameters(), twins.parameters())
assert same_bits(optimizer.state[model[2].weight].values(), twin.state[twins[2].weight].values())

# autograd sees that the kernel has written, to this process' part of a sharded parameter too.
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))
rows = torch.distributed.tensor.distribute_tensor(torch.ones(4, 200), mesh, [torch.distributed.tensor.Shard(0)])
for param in (torch.nn.Parameter(torch.ones(4, 200)), torch.nn.Parameter(rows)):
    own = param.to_local() if hasattr(param, "to_local") else param
    before = own._version
    param.grad = torch.ones_like(param)
    AdamW([param]).step()
    assert own._version == before + 1
os._exit(0)  # gloo's threads run on after destroy_process_group, see `test_shards._process`
"""


def test_released_and_offloaded_steps_launch_kernels_that_give_the_same_bits():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
