"""Muon's kernels against their references: both passes over memory bit for bit, products and Newton-Schulz closely."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from overcoat.formats.moments import MOMENT_CODES
from overcoat.kernels import muon
from overcoat.kernels.adamw_step import StepTensors
from overcoat.optim import muon as optim
from tests.kernels.adamw_cases import differing_bytes
from tests.kernels.compare import DEVICE, INTERPRETED
from tests.kernels.muon_cases import SHAPES, passes, tensors_of

CODES = [("sqrt8", "bf16+8"), ("e4m3x", "bf16+16"), ("de8", "bf16"), ("bf16", "fp32"), ("fp32", "bf16+8")]


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
    a = torch.randn(2, rows, inner, generator=generator).to(DEVICE, torch.float16)
    b = a if symmetric else torch.randn(2, rows + 3, inner, generator=generator).to(DEVICE, torch.float16)
    added = torch.randn(2, rows, len(b[0]), generator=generator).to(DEVICE, torch.float16)
    added = added + added.mT if symmetric else added
    found = muon.product(a, b, symmetric, alpha=0.3, added=added, beta=-2.0, gamma=4.0)
    expected = 0.3 * a.float() @ b.float().mT - 2.0 * added.float() + 4.0 * torch.eye(rows, len(b[0]), device=DEVICE)
    torch.testing.assert_close(found.float(), expected, rtol=2**-10, atol=1e-3)
    if symmetric:
        torch.testing.assert_close(found, found.mT, rtol=2**-9, atol=1e-3)
    transposed = a.mT.contiguous().mT
    again = muon.product(transposed, b, symmetric, alpha=0.3, added=added, beta=-2.0, gamma=4.0)
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


@pytest.mark.kernel
def test_the_optimizer_launches_what_its_reference_computes(monkeypatch):
    shapes = ((40, 64), (40, 64), (64, 160), (3, 48, 24))

    def step():
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for s in shapes]
        group = {"params": params, "algorithm": "muon"}
        optimizer = optim.Muon([group], lr=0.02, weight_decay=0.0, master="bf16+16")
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, torch.bfloat16)
            optimizer.step()
        return [optimizer.state[param]["exp_avg"] for param in params], [param.detach().float() for param in params]

    codes, params = step()
    monkeypatch.setattr(StepTensors, "kernel_runs", lambda _: False)
    monkeypatch.setattr(muon, "orthogonalize", muon.newton_schulz)
    expected, others = step()
    assert differing_bytes(expected, codes) <= (0.01 if INTERPRETED else 0.0) * sum(x.numel() for x in codes)
    for mine, other in zip(params, others):
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=1e-3)
