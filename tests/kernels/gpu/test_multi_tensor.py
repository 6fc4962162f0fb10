"""`overcoat.kernels.gpu.multi_tensor`: which tensors are copied before a kernel reads them."""

import pytest
import torch

pytest.importorskip("triton")

from overcoat.kernels.gpu.multi_tensor import aligned, contiguous


def test_only_what_is_not_aligned_is_copied():
    buffer = torch.randn(1000)
    assert buffer.data_ptr() % 16 == 0
    tensors = [buffer[:8], buffer[9:20], torch.randn(3), buffer[21:22]]
    found, addresses = aligned(tensors)
    assert [a is b for a, b in zip(found, tensors)] == [True, False, True, False]
    assert addresses == [tensor.data_ptr() for tensor in found]
    assert all(address % 16 == 0 for address in addresses)
    assert all(map(torch.equal, found, tensors))
    same = tensors[::2]
    assert aligned(same)[0] is same


def test_only_what_is_not_contiguous_is_copied():
    tensors = [torch.randn(3, 4), torch.randn(4, 3).t()]
    found = contiguous(tensors)
    assert found[0] is tensors[0]
    assert found[1].is_contiguous()
    assert torch.equal(found[1], tensors[1])
    assert contiguous(tensors[:1])[0] is tensors[0]
