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


@pytest.mark.gpu
def test_addresses_uploaded_in_a_capture_are_there_at_a_replay_only():
    """A second graph over the same gradients must upload them again."""
    from overcoat.kernels.gpu.sum_squares import Gradients

    first, second = torch.ones(1000, device="cuda"), torch.full((1000,), 2.0, device="cuda")
    gradients = Gradients([1000], first.device)
    gradients.set([first])
    assert gradients.sum_squares().item() == 1000
    sums, graphs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradients.set([second])
            sums.append(gradients.sum_squares())
        graphs.append(graph)
    graphs[1].replay()
    assert sums[1].item() == 4000
    gradients.set([second])
    assert gradients.sum_squares().item() == 4000
