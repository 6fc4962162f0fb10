"""How kernels/gpu/adamw_launch.py steps many tensors at once, on a GPU: without waiting, wherever they lie."""

import pytest
import torch

from overcoat.kernels.adamw import adamw_step_
from overcoat.optim.adamw import AdamW
from tests.kernels.gpu.adamw_cases import (
    SHAPES,
    arguments,
    check_weight_amax,
    differing_bytes,
    gradients,
    make,
    run,
    step_and_find,
)
from tests.waits import waiting_is_an_error

pytestmark = pytest.mark.gpu


def test_single_tensors_are_skipped():
    """Flags for each tensor: those skipped keep every byte, the others step as they do alone."""
    args = arguments(device="cuda")
    skips = torch.arange(len(SHAPES), device="cuda") % 2 == 0
    stepped, kept = run(adamw_step_, args), run(lambda *args: None, args)

    def step_some(*args):
        step_and_find(args, skips, {})

    for found, new, old in zip(by_tensor(run(step_some, args)), by_tensor(stepped), by_tensor(kept)):
        for i in range(len(found)):
            assert differing_bytes([found[i]], [old[i] if i % 2 == 0 else new[i]]) == 0


def test_maxima_of_the_weights_are_found_on_the_way():
    check_weight_amax("cuda")


def by_tensor(tensors):
    """Results of `run` as lists of one tensor for each parameter."""
    return [tensors[i : i + len(SHAPES)] for i in range(0, len(tensors), len(SHAPES))]


def test_non_contiguous_parameters_and_unaligned_gradients():
    start, grad = torch.randn(256, 512, device="cuda"), torch.randn(256 * 512 + 1, device="cuda")
    plain, strided = start.clone(), start.t().contiguous().t()
    results = []
    for p, g in ((plain, grad[1:].clone().view(256, 512)), (strided, grad[1:].view(256, 512))):
        p = torch.nn.Parameter(p)
        optimizer = AdamW([p])
        for _ in range(3):
            p.grad = g
            optimizer.step()
        results.append(p.detach())
    assert not results[1].is_contiguous()
    assert torch.equal(*results)


def test_step_never_synchronizes_nor_recompiles():
    params = make()
    optimizer = AdamW(params, lr=1e-3)
    optimizer.step(clip_grad_norm=1.0)
    from overcoat.kernels.gpu.adamw import adamw_kernel

    compiled = sum(len(cache[0]) for cache in adamw_kernel.device_caches.values())
    with waiting_is_an_error():
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step(clip_grad_norm=0.5 + step)
    assert sum(len(cache[0]) for cache in adamw_kernel.device_caches.values()) == compiled


def test_a_cuda_graph_captures_the_step():
    """Replays equal eager steps, learning rate included."""
    lr = torch.tensor(1e-2, device="cuda")
    params = make()
    eager = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = AdamW(params, lr=lr), AdamW(eager, lr=lr)
    for p, q in zip(params, eager):
        q.grad = p.grad.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step(clip_grad_norm=1.0)
        other.step(clip_grad_norm=1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(clip_grad_norm=1.0)
    for step in range(3):
        lr.fill_(1e-2 / (step + 1))
        for p, q in zip(params, eager):
            p.grad.normal_()
            q.grad.copy_(p.grad)
        graph.replay()
        other.step(clip_grad_norm=1.0)
    for p, q in zip(params, eager):
        assert torch.equal(p, q)
        assert optimizer.state[p]["step"].item() == 4


def test_offsets_of_gradients_do_not_matter():
    """Gradients that move in memory between steps are found again."""
    params = make()
    fixed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    moving, still = AdamW(params), AdamW(fixed)
    for step in range(3):
        values = gradients(params, step)
        for p, q, g in zip(params, fixed, values):
            p.grad = torch.cat([torch.zeros(step * 64, 256, device="cuda"), g]).bfloat16()[step * 64 :]
            q.grad = g
        moving.step()
        still.step()
    for p, q in zip(params, fixed):
        assert torch.equal(p, q)
