"""What every op owes autograd, whatever it computes: `pytest tests/ops/test_autograd.py`.

Strided and missing gradients, frozen parameters and inputs, accumulation, hooks, torch.compile, torch.utils.checkpoint,
changes in place. Results are compared bit for bit: the same op on the same values must give the same numbers. On CUDA
the backward of some library kernels adds in no fixed order, so there the comparison is to a few BF16 roundings.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from overcoat import Recipe
from tests.exact import BF16_DB, assert_close, combined_db
from tests.ops.harness import CASES, evaluate, run

cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES)
RECIPE = Recipe()


def same(name, expected, got):
    """Equal bytes on the CPU; on CUDA equal to two BF16 roundings."""
    assert (expected is None) == (got is None), f"{name}: {'a' if expected is None else 'no'} gradient"
    if expected is None:
        return
    assert expected.dtype == got.dtype
    if expected.device.type == "cpu":
        assert torch.equal(expected, got), f"{name} differs"
    else:
        assert_close(name, expected, got, combined_db(BF16_DB, BF16_DB), extra=6.0)


def compare(expected, got):
    for i, (a, b) in enumerate(zip(expected[0], got[0], strict=True)):
        same(f"out{i}", a.detach(), b.detach())
    assert expected[1].keys() == got[1].keys()
    for name in expected[1]:
        same(f"d{name}", expected[1][name], got[1][name])


def op_of(case):
    return lambda inputs: case.op(inputs, RECIPE)


@cases
def test_strided_gradients(make, device):
    """Transposed and expanded gradients (as `sum().backward()` sends) are read like contiguous ones."""
    case = make(device=device)
    strided = [grad.t().contiguous().t() for grad in case.grads]
    compare(run(case, RECIPE), evaluate(op_of(case), case.inputs, case.names(), strided))
    ones = [torch.ones_like(grad) for grad in case.grads]
    expanded = [grad.new_ones(()).expand(grad.shape) for grad in case.grads]
    compare(*(evaluate(op_of(case), case.inputs, case.names(), grads) for grads in (ones, expanded)))


@cases
def test_strided_inputs(make, device):
    case = make(device=device)
    expected = run(case, RECIPE)
    for name, x in case.inputs.items():
        if x is not None and x.dim() == 2:
            case.inputs[name] = x.t().contiguous().t()
    compare(expected, evaluate(lambda inputs: case.op(restride(inputs), RECIPE), case.inputs, case.names(), case.grads))


def restride(inputs):
    """`evaluate` clones its inputs, which may make them contiguous: stride them again, inside autograd's view."""
    return {name: x.t().contiguous().t() if x is not None and x.dim() == 2 else x for name, x in inputs.items()}


@cases
def test_frozen_inputs(make, device):
    """Freezing any one input, all parameters, or all but one changes no other gradient, and gives the frozen none."""
    case = make(device=device)
    outputs, grads = run(case, RECIPE)
    names = case.names()
    groups = [[name for name in names if name != frozen] for frozen in names] + [[name] for name in names]
    for wanted in groups:
        got = evaluate(op_of(case), case.inputs, wanted, case.grads)
        compare((outputs, {name: grads[name] for name in wanted}), got)


@cases
def test_nothing_to_differentiate(make, device):
    """Without a tensor that wants a gradient, or under no_grad, the outputs are the same and hold no graph."""
    case = make(device=device)
    expected, _ = run(case, RECIPE)
    leaves = {name: x if x is None else x.detach().clone() for name, x in case.inputs.items()}
    for out, reference in zip(case.op(leaves, RECIPE), expected, strict=True):
        assert not out.requires_grad
        same("out", reference.detach(), out)
    leaves["x" if "x" in leaves else case.names()[0]].requires_grad_()
    with torch.no_grad():
        assert all(out.grad_fn is None for out in case.op(leaves, RECIPE))


@pytest.mark.parametrize("name", ["norm_linear", "norm_linear layer norm"])
def test_one_output_unused(name, device):
    """A branch that does not reach the loss sends no gradient: that of the other branch alone arrives."""
    case = CASES[name](device=device)
    both = run(case, RECIPE)[1]
    residual_only = evaluate(op_of(case), case.inputs, case.names(), [None, case.grads[1]])[1]
    same("dx", case.grads[1], residual_only["x"])
    assert all(grad is None for name, grad in residual_only.items() if name != "x")
    product_only = evaluate(op_of(case), case.inputs, case.names(), [case.grads[0], None])[1]
    zero = evaluate(op_of(case), case.inputs, case.names(), [case.grads[0], torch.zeros_like(case.grads[1])])[1]
    for key, grad in zero.items():
        same(key, grad, product_only[key])
        if key != "x":
            same(key, both[key], product_only[key])


@cases
def test_accumulation_and_double_use(make, device):
    """Two backwards add up; so do two uses of one op in one graph. Twice the same BF16 number is exact."""
    case = make(device=device)
    _, once = run(case, RECIPE)
    leaves = {name: x if x is None else x.detach().clone() for name, x in case.inputs.items()}
    for name in case.names():
        leaves[name].requires_grad_()
    for _ in range(2):
        torch.autograd.backward(case.op(leaves, RECIPE), case.grads)
    for name in case.names():
        same(name, 2 * once[name], leaves[name].grad)
        leaves[name].grad = None
    outputs = [out for _ in range(2) for out in case.op(leaves, RECIPE)]
    torch.autograd.backward(outputs, case.grads * 2)
    for name in case.names():
        same(name, 2 * once[name], leaves[name].grad)


@cases
def test_hooks_see_and_change_gradients(make, device):
    """Hooks on outputs get gradients of the output's own dtype and shape (the original passed FP8 bytes), and may
    change them. Times 2 commutes with every rounding here: each gradient is exactly doubled."""
    case = make(device=device)
    expected = evaluate(op_of(case), case.inputs, case.names(), [2 * grad for grad in case.grads])
    seen = []

    def hooked(inputs):
        outputs = case.op(inputs, RECIPE)
        for out in outputs:
            out.register_hook(lambda grad, out=out: (seen.append((grad.dtype, grad.shape, out)), 2 * grad)[1])
        return outputs

    compare(expected, evaluate(hooked, case.inputs, case.names(), case.grads))
    assert len(seen) == len(case.grads)
    assert all(dtype == out.dtype and shape == out.shape for dtype, shape, out in seen)


@cases
def test_compiled_equals_eager_bit_for_bit(make, device):
    case = make(device=device)
    torch.compiler.reset()
    compiled = torch.compile(op_of(case), fullgraph=True, backend="aot_eager")
    compare(run(case, RECIPE), evaluate(compiled, case.inputs, case.names(), case.grads))


@cases
def test_torch_checkpoint(make, device):
    """`torch.utils.checkpoint` around an op: the recomputed forward keeps the same codes."""
    case = make(device=device)

    def checkpointed(inputs):
        return checkpoint(lambda: case.op(inputs, RECIPE), use_reentrant=False)

    compare(run(case, RECIPE), evaluate(checkpointed, case.inputs, case.names(), case.grads))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("attention")])
def test_a_weight_changed_in_place_before_the_backward_is_an_error(name, device):
    """Autograd keeps the parameter itself; its FP8 copy is made again in the backward, so it must be the same one."""
    case = CASES[name](device=device)
    weight = next(key for key in ("weight", "weight0", "down") if key in case.inputs)
    leaves = {key: x if x is None else x.detach().clone() for key, x in case.inputs.items()}
    for key in case.names():
        leaves[key].requires_grad_()
    outputs = case.op(leaves, RECIPE)
    with torch.no_grad():
        leaves[weight].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, case.grads)


@cases
def test_the_graph_is_freed_after_the_backward(make, device):
    case = make(device=device)
    leaves = {name: x if x is None else x.detach().clone() for name, x in case.inputs.items()}
    for name in case.names():
        leaves[name].requires_grad_()
    outputs = case.op(leaves, RECIPE)
    torch.autograd.backward(outputs, case.grads)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(outputs, case.grads)


@cases
def test_a_second_derivative_is_an_error_and_not_zero(make, device):
    """Ops have no derivative of their backward; gradients of gradients must say so, not leave the op's share out."""
    case = make(device=device)
    leaves = {name: x if x is None else x.detach().clone() for name, x in case.inputs.items()}
    for name in case.names():
        leaves[name].requires_grad_()
    (grad,) = torch.autograd.grad(case.op(leaves, RECIPE)[0].square().sum(), leaves[case.names()[0]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
