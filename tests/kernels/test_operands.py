"""The weights of several operands in one launch, against one operand at a time, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels.weights import (
    _remembered,
    grouped,
    numbers_of,
    quantize_operands,
    quantize_parameters,
    stack_operands,
    stack_weights,
)
from tests.kernels.compare import assert_equal, awkward
from tests.kernels.samples import normal

# A block's operands, q with k and v, gate with up; other numbers of weights, one too many; odd rows, one row.
blocks_of = pytest.mark.parametrize(
    ("sizes", "columns", "counts"),
    [
        ([48, 16, 16, 80, 130, 130, 96], [336, 48, 96, 130], [3, 1, 2, 1]),
        ([16, 48, 16, 18], [1040, 77], [1, 3]),
        ([64, 64, 64, 16, 64, 64, 64, 64], [64, 128, 16, 48], [3, 2, 2, 1]),
        ([61, 16, 16], [96, 1024], [2, 1]),
        ([80, 32, 96, 64], [96, 1040], [3, 1]),
        ([16, 1, 16], [96, 1024], [2, 1]),
        ([16, 16, 16, 16, 2], [16, 32, 48, 64, 80], [1] * 5),
        ([16] * 9, [48, 32], [4, 5]),
    ],
)


@pytest.mark.kernel
@blocks_of
def test_operands_of_a_block(sizes, columns, counts):
    wide = [k for k, count in zip(columns, counts, strict=True) for _ in range(count)]
    weights = [awkward(n, k, seed=i) * (i + 1) for i, (n, k) in enumerate(zip(sizes, wide, strict=True))]
    expected = quantize_operands.reference(weights, counts, [])
    assert_equal(quantize_operands.kernel(weights, counts, []), expected)
    maxima = numbers_of(expected[-1])
    for last in (maxima, [2.0 * maxima[0], *maxima[1:]], [*maxima[:-1], 0.5 * maxima[-1]]):
        assert_equal(quantize_operands.kernel(weights, counts, last), expected)
    for transposed in (False, True):
        ours = stack_operands.kernel(weights, counts, maxima, transposed)
        assert_equal(ours, stack_operands.reference(weights, counts, maxima, transposed))
        each = [stack_weights.reference(*one, transposed) for one in zip(grouped(weights, counts), maxima, strict=True)]
        assert_equal([*ours[:-1], *numbers_of(ours[-1])], [*[data for data, _ in each], *[scale for _, scale in each]])


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0, float("nan")])
@pytest.mark.parametrize(
    ("sizes", "columns"),
    [([16], 77), ([48, 16], 336), ([16, 48, 16], 1040), ([100, 61], 77), ([130, 2, 4, 64, 18], 336)],
)
def test_remembered_maximum_changes_nothing(sizes, columns, factor):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    expected = quantize_operands.reference(weights, [len(weights)], [])
    last = [numbers_of(expected[-1])[0] * factor]
    assert_equal(quantize_operands.kernel(weights, [len(weights)], last), expected)


@pytest.mark.gpu
def test_parameters_are_quantized_as_they_are_now():
    parameters = [torch.nn.Parameter(normal(n, 256, seed=n).to("cuda", torch.bfloat16)) for n in (48, 16)]
    before = len(_remembered)
    for factor in (1.0, 1.0, 2.0, 0.25):
        with torch.no_grad():
            parameters[0].mul_(factor)
            (data,), scales, tops = quantize_parameters(parameters, [2])
            expected = quantize_operands.reference(parameters, [2], [])
            assert_equal([data, *scales, *tops], [expected[0], *[numbers_of(each)[0] for each in expected[1:]]])
    assert len(_remembered) == before + 1
    quantize_parameters([parameters[0], parameters[1] * 1], [2])  # made anew in part: nothing is remembered of it
    assert len(_remembered) == before + 1
    del parameters[1]  # any of them
    assert len(_remembered) == before
