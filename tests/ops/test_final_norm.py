"""`final_norm` against FP64 autograd, and what it keeps: `pytest tests/ops/test_final_norm.py`."""

from __future__ import annotations

import pytest
import torch

from overcoat.memory import record_kept
from overcoat.ops.final_norm import final_norm
from tests import exact
from tests.emulation import sqnr
from tests.kernels.samples import normal

EPS = 1e-5


def inputs(shape, dtype=torch.float32):
    x, weight = 3 * normal(*shape), 1 + 0.3 * normal(shape[-1], seed=1)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 24), (2, 7, 200), (2, 3, 5, 130)])
@pytest.mark.parametrize(("dtype", "decibels"), [(torch.float32, 110), (torch.bfloat16, exact.BF16_DB - 3)])
def test_values_and_gradients_of_any_leading_dimensions(shape, dtype, decibels):
    x, weight = inputs(shape, dtype)
    dy = normal(*shape, seed=2).to(dtype)
    wide_x, wide_weight = exact.leaf(x), exact.leaf(weight)
    truth = exact.norm(wide_x, wide_weight, None, EPS, False)
    truth.backward(dy.double())
    y = final_norm(x, weight, EPS)
    y.backward(dy)
    for wide, ours in ((truth, y), (wide_x.grad, x.grad), (wide_weight.grad, weight.grad)):
        assert ours.shape == wide.shape
        assert ours.dtype == dtype
        assert sqnr(wide, ours) > decibels


def test_by_hand():
    """Mean square (9 + 16) / 2 = 12.5, and eps that makes it 16: y = x / 4 * weight."""
    x, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([2.0, -1.0], requires_grad=True)
    y = final_norm(x, weight, 3.5)
    assert y.tolist() == [[1.5, -1.0]]
    y.sum().backward()
    # dx_j = w_j / 4 - x_j (sum_i w_i x_i) / (2 * 4^3), with a sum of 2.
    torch.testing.assert_close(x.grad, torch.tensor([[0.5 - 6 / 128, -0.25 - 8 / 128]]))
    torch.testing.assert_close(weight.grad, torch.tensor([0.75, 1.0]))


def test_it_keeps_its_input_and_a_number_for_each_token_of_all_rows():
    x, weight = inputs((2, 5, 64), torch.bfloat16)
    flowing = x * 1
    with record_kept(None) as kept:
        final_norm(flowing, torch.nn.Parameter(weight.detach()), EPS)
    rows = {row.name: (row.op, row.shape, row.dtype) for row in kept.rows}
    assert rows == {
        "x": ("final_norm", (10, 64), torch.bfloat16),
        "rstd": ("final_norm", (10,), torch.float32),
    }


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_one_of_two_is_frozen(frozen):
    x, weight = inputs((3, 64))
    final_norm(x, weight, EPS).square().sum().backward()
    both = {"x": x.grad, "weight": weight.grad}
    tensors = {"x": x.detach(), "weight": weight.detach()}
    (other,) = set(tensors) - {frozen}
    tensors[other].requires_grad_()
    final_norm(tensors["x"], tensors["weight"], EPS).square().sum().backward()
    assert tensors[frozen].grad is None
    assert torch.equal(tensors[other].grad, both[other])


def test_no_tokens_have_no_gradient():
    x, weight = inputs((2, 0, 64))
    y = final_norm(x, weight, EPS)
    assert y.shape == (2, 0, 64)
    y.sum().backward()
    assert x.grad.shape == (2, 0, 64)
    assert torch.equal(weight.grad, torch.zeros(64))


def test_rows_that_lie_apart():
    x, weight = inputs((4, 64))
    apart = torch.zeros(4, 2, 64)
    apart[:, 1] = x.detach()
    assert torch.equal(final_norm(apart[:, 1], weight, EPS), final_norm(x, weight, EPS))


def test_no_second_derivative():
    """What the backward returns is no differentiable function of its inputs: an error, not a wrong number."""
    x, weight = inputs((3, 64))
    (dx,) = torch.autograd.grad(final_norm(x, weight, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
