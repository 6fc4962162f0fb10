"""Muon's kernels against their references: both passes over memory bit for bit, products and Newton-Schulz closely."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from overcoat.formats.moments import MOMENT_CODES
from overcoat.kernels import muon
from overcoat.kernels.adamw import Piece, rows_of, step_coefficients
from overcoat.kernels.adamw_step import StepTensors
from overcoat.kernels.multi_tensor import Gradients
from overcoat.optim.state import init_state
from tests.kernels.adamw_cases import differing_bytes, gradients
from tests.kernels.compare import DEVICE, INTERPRETED

# Whole groups, ragged rows (aligned to 16 and not), rows shorter than half a group, batches.
SHAPES = ((4, 256), (3, 144), (5, 130), (6, 20), (2, 3, 144), (3, 5, 24))
CODES = [("sqrt8", "bf16+8"), ("e4m3x", "bf16+16"), ("de8", "bf16"), ("bf16", "fp32"), ("fp32", "bf16+8")]


def tensors_of(code: str, master: str, shapes=SHAPES, seed: int = 0) -> StepTensors:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    group = {"moments": (code,), "group_size": 128, "master": "auto" if master == "fp32" else master}
    states = [init_state(param, group) for param in params]
    lists = {name: [state[name] for state in states] for name in states[0]}
    return StepTensors(params, lists, list(range(7, 7 + len(shapes))), [3 * i for i in range(len(shapes))], 128)


def parts_of(tensors: StepTensors) -> tuple[list[muon.Part], int]:
    """Every parameter as two parts, its first row and the rest; and their elements."""
    parts, offset = [], 0
    for owner, param in enumerate(tensors.params):
        layout = rows_of(param.shape, tensors.group_size)
        for rows in ((0, 1), (1, layout.rows)):
            part = muon.Part(Piece(owner, *rows, layout), offset, 0.5 + owner)
            parts.append(part)
            offset += part.numel + 16
    return parts, offset


def passes(tensors: StepTensors, options: muon.MuonHyper, skip: torch.Tensor, by_kernel: bool, steps: int = 2):
    """Take steps with u itself as the update, and return all tensors."""
    tensors = copy.deepcopy(tensors)
    parts, size = parts_of(tensors)
    lr, factor = torch.tensor(1e-2, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    updates = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    made = muon.Passes(tensors, parts)
    for step in range(steps):
        grads = gradients(tensors.params, step)
        counts = torch.arange(len(grads), dtype=torch.float32, device=DEVICE) + step + 1
        counted = counts, step_coefficients(counts, lr, *options[:4])
        if by_kernel:
            table = Gradients([grad.numel() for grad in grads], DEVICE)
            table.set(grads)
            made.momentum(table.addresses, table.dtype, updates, counts, factor, skip, options)
            made.apply(updates, counted, skip, options)
        else:
            muon.reference_momentum(tensors, parts, grads, updates, counts, factor, skip, options)
            muon.reference_apply(tensors, parts, updates, *counted, skip, options)
    return [updates, *tensors.params, *(value for of in tensors.states.values() for value in of)]


@pytest.mark.kernel
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("code", "master"), CODES)
def test_passes_equal_the_reference(code, master, nesterov):
    tensors, skip = tensors_of(code, master), torch.tensor(False, device=DEVICE)
    options = muon.hyper(0.95, nesterov, 0.1, code, master, 128, 5)
    expected = passes(tensors, options, skip, by_kernel=False)
    found = passes(tensors, options, skip, by_kernel=True)
    assert differing_bytes(expected[1:], [*tensors.params, *(x for of in tensors.states.values() for x in of)]) > 1000
    share = differing_bytes(expected, found) / sum(x.nbytes for x in expected)
    assert share <= (0.01 if INTERPRETED else 0.0)
    assert MOMENT_CODES[code].grouped == ("exp_avg_amax" in tensors.states)


@pytest.mark.kernel
def test_skipped_parameters_keep_every_byte():
    tensors = tensors_of("sqrt8", "bf16+8")
    options = muon.hyper(0.95, True, 0.1, "sqrt8", "bf16+8", 128, 5)
    skip = torch.arange(len(SHAPES), device=DEVICE) % 2 == 0
    stepped = passes(tensors, options, torch.tensor(False, device=DEVICE), by_kernel=True)[1:]
    found = passes(tensors, options, skip, by_kernel=True)[1:]
    before = [*tensors.params, *(value for of in tensors.states.values() for value in of)]
    for number, (mine, new, old) in enumerate(zip(found, stepped, before)):
        assert differing_bytes([mine], [new if number % len(SHAPES) % 2 else old]) == 0


@pytest.mark.kernel
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "inner"), [(64, 64), (65, 130), (7, 24), (200, 40)])
def test_product(rows, inner, symmetric):
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(2, rows, inner, generator=generator).to(DEVICE, torch.bfloat16)
    b = a if symmetric else torch.randn(2, rows + 3, inner, generator=generator).to(DEVICE, torch.bfloat16)
    added = torch.randn(2, rows, len(b[0]), generator=generator).to(DEVICE, torch.bfloat16)
    added = added + added.mT if symmetric else added
    scale = torch.tensor([0.5, 3.0], device=DEVICE)
    found = muon.product(a, b, symmetric, alpha=0.3, added=added, beta=-2.0, gamma=4.0, scale=scale, power=2)
    expected = 0.3 * a.float() @ b.float().mT - 2.0 * added.float() + 4.0 * torch.eye(rows, len(b[0]), device=DEVICE)
    expected = expected * scale.square()[:, None, None]
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2e-3)
    if symmetric:
        assert torch.equal(found, found.mT)
    transposed = a.mT.contiguous().mT
    again = muon.product(transposed, b, symmetric, alpha=0.3, added=added, beta=-2.0, gamma=4.0, scale=scale, power=2)
    assert torch.equal(again, found)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(64, 64), (48, 130), (130, 48), (33, 300)])
def test_newton_schulz(shape):
    """As near to the exact polynomial as the reference; a matrix's bits do not depend on the others beside it."""
    generator = torch.Generator().manual_seed(1)
    updates = torch.randn(2, *shape, generator=generator).to(DEVICE, torch.bfloat16)
    exact = exact_newton_schulz(updates.double(), 5)
    expected = muon.newton_schulz(updates, 5).double()
    together = muon.orthogonalize(updates.clone(), 5)
    alone = muon.orthogonalize(updates[1:].clone(), 5)
    assert torch.equal(together[1:], alone)
    error = (together.double() - exact).norm() / exact.norm()
    assert error < 1.2 * (expected - exact).norm() / exact.norm()


def exact_newton_schulz(updates: torch.Tensor, steps: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(updates, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = muon.COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s.unsqueeze(-2) @ v


@pytest.mark.kernel
def test_a_gradient_of_zeros_makes_no_update():
    assert not muon.orthogonalize(torch.zeros(1, 16, 24, dtype=torch.bfloat16, device=DEVICE), 5).any()
