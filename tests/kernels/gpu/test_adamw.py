"""The optimizer's Triton kernel on a GPU: equal to the reference bit for bit, and never waiting for it."""

import copy

import pytest
import torch

from overcoat.kernels.adamw import adamw_step_, gradients_sum_squares
from overcoat.optim.adamw import AdamW
from overcoat.optim.arguments import sum_squares
from tests.kernels.gpu.adamw_cases import (
    SHAPES,
    arguments,
    check_weight_amax,
    differing_bytes,
    gradients,
    reference,
    run,
    step_and_find,
)
from tests.waits import waiting_is_an_error

pytestmark = pytest.mark.gpu

# Every code of m, every code of v, every master, parameters and gradients of both widths.
CASES = [
    (("sqrt8", "log8"), "bf16+8", {}),
    (("e4m3x", "e4m3x"), "bf16+8", {}),
    (("bf16", "bf16"), "bf16", {}),
    (("fp32", "fp32"), "fp32", {}),
    (("sqrt8", "log8"), "bf16", {"group_size": 64}),
    (("sqrt8", "sqrt8"), "bf16+16", {"grad_dtype": torch.float32}),
    (("de8", "de8"), "fp32", {"grad_dtype": torch.bfloat16}),
    (("e4m3", "e5m2"), "bf16", {"group_size": 32}),
    (("e5m2", "e4m3"), "bf16+16", {"group_size": 16}),
    (("de8x", "e5m2x"), "fp32", {}),
    (("e5m2x", "de8x"), "bf16+8", {}),
]


@pytest.mark.parametrize(("moments", "master", "options"), CASES)
def test_kernel_equals_the_reference_bit_for_bit(moments, master, options):
    args = arguments(moments, master, shapes=(*SHAPES, (96, 1024)), device="cuda", **options)
    expected, actual = run(reference, args, steps=4), run(adamw_step_, args, steps=4)
    assert differing_bytes(expected, run(lambda *args: None, args)) > 10_000, "the step changed nothing"
    assert differing_bytes(expected, actual) == 0


def test_skipped_step_changes_nothing():
    args = arguments(device="cuda")
    args[11] = torch.tensor(True, device="cuda")
    assert differing_bytes(run(adamw_step_, args), run(lambda *args: None, args)) == 0


def test_sum_of_squares():
    grads = [torch.randn(s, device="cuda", dtype=d) for s in (3, 100_003, 0) for d in (torch.bfloat16, torch.float32)]
    expected = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(gradients_sum_squares(grads).double(), expected, rtol=1e-5, atol=0)
    large = [torch.full_like(g, 1e18) for g in grads]
    expected = sum(g.double().square().sum() for g in large)  # 4e41, which FP32 does not hold
    torch.testing.assert_close(gradients_sum_squares(large), expected, rtol=1e-5, atol=0)
    grads[2][70_001] = float("inf")
    assert not gradients_sum_squares(grads).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_squares_of_each_tensor(dtype):
    """One tensor, many programs, more partial sums than a program reads at once; which sums are not finite."""
    sizes = (3, 100_003, 0, 1, 80_000_001, 65_536)
    grads = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    gradients = sum_squares.Gradients(list(sizes), torch.device("cuda"))
    gradients.set(grads)
    first = gradients.sums_of_squares()
    expected = torch.stack([g.double().square().sum() for g in grads])
    torch.testing.assert_close(first.squares.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients.sum_squares().double(), expected.sum(), rtol=1e-5, atol=0)
    assert not first.skips.any()
    grads[4][70_001_000], grads[0][1] = torch.nan, -torch.inf
    second = gradients.sums_of_squares(first)
    assert second.skips.tolist() == [True, False, False, False, True, False]
    assert second.squares is first.squares


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


def make(count=6, dtype=torch.bfloat16):
    params = [torch.nn.Parameter(torch.randn(64, 256, device="cuda", dtype=dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


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


def test_gpu_follows_the_cpu():
    """Same options, same gradients: apart by near ties only."""
    cpu = arguments()
    gpu = arguments(device="cuda")
    for a, b in zip(run(adamw_step_, cpu)[: len(SHAPES)], run(adamw_step_, gpu)):
        torch.testing.assert_close(a, b.cpu(), rtol=2**-7, atol=1e-4)


def test_state_moves_between_devices_bit_for_bit():
    params = make()
    optimizer = AdamW(params)
    optimizer.step()
    other = AdamW([torch.nn.Parameter(p.detach().cpu()) for p in params])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = AdamW(params)
    back.load_state_dict(other.state_dict())
    for p in params:
        assert differing_bytes(optimizer.state[p].values(), back.state[p].values()) == 0


def test_a_tensor_of_more_than_2_to_31_elements():
    """Its last rows step like a small tensor of the same rows: 32-bit offsets would wrap."""
    rows, columns = 2**20 + 8, 2048
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    group = {"moments": ("sqrt8", "log8"), "group_size": 128, "master": "auto"}
    from overcoat.optim.state import init_state

    big = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    grad = torch.zeros_like(big)
    grad[-8:] = torch.randn(8, columns, device="cuda")

    def step(param, grad, first):
        s = init_state(param, group)
        adamw_step_(
            [param], [grad], [s["exp_avg"]], [s["exp_avg_amax"]], [], [s["exp_avg_sq"]], [s["exp_avg_sq_scale"]],
            [s["remainder"]], [s["step"]], torch.tensor(0.1, device="cuda"), torch.tensor(1.0, device="cuda"),
            torch.tensor(False, device="cuda"), 0.9, 0.95, 1e-8, 0.0, *group["moments"], "bf16+8", 128, [5], [first],
        )  # fmt: skip
        return [param[-8:], s["exp_avg"][-8:], s["exp_avg_sq"][-8:], s["remainder"][-8:]]

    small = step(big[-8:].clone(), grad[-8:].clone(), (rows - 8) * columns // 128)
    large = step(big, grad, 0)
    assert differing_bytes(small, large) == 0
    assert large[0].abs().min() > 0
    assert big[:-8].count_nonzero() == 0


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
