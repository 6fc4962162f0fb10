"""The kernels of kernels/stack_predicted.py equal their references, whatever is predicted."""

from __future__ import annotations

import pytest
import torch

from overcoat import weight_amax
from overcoat.kernels import quantize as ops
from overcoat.kernels import stack, stack_predicted
from tests.kernels.compare import DEVICE, assert_equal, awkward

pytestmark = pytest.mark.kernel

# What the maxima found by AdamW, taken as predicted, are multiplied by.
PREDICTIONS = {"right": 1.0, "too small": 0.25, "too large": 3.0, "zero": 0.0, "inf": torch.inf, "nan": torch.nan}


@pytest.mark.parametrize("factor", PREDICTIONS.values(), ids=PREDICTIONS.keys())
@pytest.mark.parametrize(
    ("sizes", "columns"),
    [([16], 77), ([48, 16], 336), ([16, 48, 16], 1040), ([100, 61], 77), ([130, 2, 4, 64, 18], 336)],
)
def test_stack_weights_predicted(sizes, columns, factor):
    """The prediction changes nothing, be it right, wrong or no number."""
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    predicted = [ops.amax.reference(w) * factor for w in weights]
    ours = stack_predicted.stack_weights_predicted.kernel(weights, predicted)
    assert_equal(ours, stack_predicted.stack_weights_predicted.reference(weights, predicted))
    assert_equal(ours, (*stack.stack_weights.kernel(weights, ours[2], False), stack.stack_amax.kernel(weights)))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_stack_weights_predicted_not_finite(value):
    weights = [torch.randn(rows, 144, device=DEVICE) for rows in (32, 16)]
    weights[1][3, 5] = value
    for predicted in ([ops.amax.reference(w) for w in weights], [torch.ones((), device=DEVICE)] * 2):
        ours = stack_predicted.stack_weights_predicted.kernel(weights, predicted)
        assert_equal(ours, stack_predicted.stack_weights_predicted.reference(weights, predicted))


def test_a_right_prediction_needs_no_second_copy(monkeypatch):
    from overcoat.kernels import stack_predicted

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    weights = [awkward(rows, 1040, seed=rows).clamp(-3, 3) for rows in (64, 40)]
    right = [ops.amax.reference(w) for w in weights]
    expected = stack_predicted.stack_weights_predicted.kernel(weights, right)
    monkeypatch.setattr(stack_predicted, "_requantize_if_changed_kernel", Nothing())
    data, _, amax = stack_predicted.stack_weights_predicted.kernel(weights, right)
    assert_equal((data, amax), (expected[0], expected[2]))
    data, _, amax = stack_predicted.stack_weights_predicted.kernel(weights, [top / 2 for top in right])
    assert torch.equal(amax, expected[2])
    assert not torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("sizes", [[16], [48, 16, 16], [130, 2, 4, 64, 18]])
@pytest.mark.parametrize("factor", [None, 1.0, 2.0], ids=["unknown", "right", "too large"])
def test_stack_weights_tracked(sizes, factor, monkeypatch):
    weights, asked = [awkward(rows, 336, seed=i) for i, rows in enumerate(sizes)], []
    predicted = None if factor is None else [ops.amax.reference(w) * factor for w in weights]
    monkeypatch.setattr(weight_amax, "predict", lambda found: (asked.extend(found), predicted)[1])
    assert_equal(
        stack_predicted.stack_weights_tracked.kernel(weights), stack_predicted.stack_weights_tracked.reference(weights)
    )
    assert [id(w) for w in asked] == [id(w) for w in weights]
