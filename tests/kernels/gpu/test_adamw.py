"""The optimizer's Triton kernel on a GPU: equal to the reference bit for bit."""

import copy

import pytest
import torch

from overcoat.kernels.adamw import adamw_step_
from overcoat.optim.adamw import AdamW
from tests.kernels.gpu.adamw_cases import (
    SHAPES,
    arguments,
    differing_bytes,
    make,
    reference,
    run,
)

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
