"""AdamW's kernel against its reference, and how it is launched.

On a GPU every byte is equal. Triton's interpreter rounds roots like NumPy, the reference like PyTorch: a last bit of
FP32 may differ, and then a code by one in a near tie.
"""

import pytest
import torch

from overcoat.kernels.adamw import Hyper, step_coefficients
from overcoat.kernels.adamw_step import Counters, adamw_kernel
from overcoat.optim.adamw import AdamW
from overcoat.optim.state import init_state
from tests.kernels.adamw_cases import (
    SHAPES,
    SKIP,
    arguments,
    by_kernel,
    differing_bytes,
    nothing,
    reference,
    run,
    step_one_by_one,
)
from tests.kernels.compare import DEVICE, INTERPRETED
from tests.waits import waiting_is_an_error

# Every code of m, every code of v, every master, parameters and gradients of both widths.
CASES = [
    (("ratio8", "log8"), "bf16+8", {}),
    (("e4m3x", "e4m3x"), "bf16+8", {"group_size": 32}),
    (("bf16", "bf16"), "bf16", {}),
    (("fp32", "fp32"), "fp32", {"grad_dtype": torch.bfloat16}),
    (("ratio8", "log8"), "bf16", {"group_size": 64}),
    (("sqrt8", "log8"), "bf16+8", {}),
    (("sqrt8", "sqrt8"), "bf16+16", {"grad_dtype": torch.float32}),
    (("de8", "de8"), "fp32", {"grad_dtype": torch.bfloat16}),
    (("e4m3", "e5m2"), "bf16", {"group_size": 32}),
    (("e5m2", "e4m3"), "bf16+16", {"group_size": 16}),
    (("de8x", "e5m2x"), "fp32", {}),
    (("e5m2x", "de8x"), "bf16+8", {}),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("moments", "master", "options"), CASES)
def test_kernel_equals_the_reference_bit_for_bit(moments, master, options):
    shapes = SHAPES if INTERPRETED else (*SHAPES, (96, 1024))
    args = arguments(moments, master, shapes=shapes, device=DEVICE, **options)
    expected, actual = run(reference, args), run(by_kernel, args)
    assert differing_bytes(expected, run(nothing, args)) > 1000, "the step changed nothing"
    share = differing_bytes(expected, actual) / sum(x.nbytes for x in expected)
    assert share <= (0.01 if INTERPRETED else 0.0)
    for a, b in zip(expected[: len(shapes)], actual):
        torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.kernel
def test_coefficients_follow_the_options():
    """New ones each step, a tensor that changes in place, and one parameter that is skipped."""
    counters = [torch.tensor(float(t), device=DEVICE) for t in (0, 1, 9, 1000, 10**6)]
    counted, lr, decay = Counters(counters), torch.tensor(1e-3, device=DEVICE), torch.tensor(0.1)
    skip = torch.tensor([False, False, True, False, False], device=DEVICE)
    for number, options in enumerate(
        [(0.9, 0.95, 1e-8, 0.0), *2 * [(0.0, 0.999, 1e-6, decay)], (0.99, 1 - 1e-7, 0, 0)]
    ):
        decay.fill_(0.1 * number)
        steps, found = counted.take_step(lr, skip, Hyper(*options, "ratio8", "log8", "bf16+8", 128))
        assert steps.tolist() == [number + 1, number + 2, 9, number + 1001, number + 10**6 + 1]
        # NumPy's last bit of exp2 in FP64 is not PyTorch's.
        torch.testing.assert_close(found, step_coefficients(steps, lr, *options), rtol=2**-23, atol=0)
    assert torch.stack(counters).tolist() == steps.tolist()


def by_tensor(tensors):
    """Results of `run` as lists of one tensor for each parameter."""
    return [tensors[i : i + len(SHAPES)] for i in range(0, len(tensors), len(SHAPES))]


@pytest.mark.kernel
@pytest.mark.parametrize("alone", [False, True])
def test_skipped_tensors_keep_every_byte(alone):
    """All of them, or by flags for each tensor: the others step as they do without."""
    args = arguments(device=DEVICE)
    skips = torch.arange(len(SHAPES), device=DEVICE) % 2 == 0 if alone else torch.tensor(True, device=DEVICE)
    stepped, kept = run(by_kernel, args), run(nothing, args)
    found = run(lambda *args: step_one_by_one(args, skips), args)
    for mine, new, old in zip(by_tensor(found), by_tensor(stepped), by_tensor(kept)):
        for i, tensor in enumerate(mine):
            assert differing_bytes([tensor], [new[i] if alone and i % 2 else old[i]]) == 0
    if not alone:
        args[SKIP] = skips
        assert differing_bytes(run(by_kernel, args), kept) == 0


@pytest.mark.kernel
def test_unaligned_gradients():
    grad = torch.randn(8 * 512 + 1, device=DEVICE)
    results = []
    for g in (grad[1:].clone(), grad[1:]):
        args = arguments(("ratio8", "log8"), "fp32", shapes=((8, 512),), device=DEVICE)
        start, args[1] = args[0][0].clone(), [g.view(8, 512)]
        for _ in range(3):
            by_kernel(*args)
        results.append([*args[0], *args[2]])
    assert differing_bytes(*results) == 0
    assert not torch.equal(results[0][0], start)


# ---- on a GPU ---------------------------------------------------------------------------------------------------


def make(count=6):
    params = [torch.nn.Parameter(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_to_31_elements():
    """Its last rows step like a small tensor of the same rows: 32-bit offsets would wrap."""
    rows, columns = 2**20 + 8, 2048
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    last = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16)

    def step(rows, first):
        args = arguments(shapes=((8, columns),), device="cuda")
        group = {"moments": ("ratio8", "log8"), "group_size": 128, "master": "auto"}
        param = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
        grad = torch.zeros_like(param)
        grad[-8:] = last
        args[0], args[1], args[2] = [param], [grad], list(init_state(param, group).values())
        args[15] = [first]
        by_kernel(*args)
        return param, [tensor[-8:] for tensor in (param, *args[2]) if tensor.shape == param.shape]

    _, small = step(8, (rows - 8) * columns // 128)
    big, large = step(rows, 0)
    assert len(large) == 4
    assert differing_bytes(small, large) == 0
    assert large[0][0].count_nonzero() == columns
    assert big[:-8].count_nonzero() == 0


@pytest.mark.gpu
def test_step_never_synchronizes_nor_recompiles():
    params = make()
    optimizer = AdamW(params, lr=1e-3)
    optimizer.step(clip_grad_norm=1.0)
    compiled = sum(len(cache[0]) for cache in adamw_kernel.device_caches.values())
    with waiting_is_an_error():
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step(clip_grad_norm=0.5 + step)
    assert sum(len(cache[0]) for cache in adamw_kernel.device_caches.values()) == compiled
