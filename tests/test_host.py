"""Host memory: what is locked and unlocked, and what the pool lends."""

from __future__ import annotations

import gc

import pytest
import torch

from overcoat.host import Pool, host_buffer, packed


def test_packed_tensors_are_aligned_and_do_not_overlap():
    assert packed([3, 16, 17, 0, 1]) == ([0, 16, 32, 64, 64], 80)


def test_buffers_too_small_make_room():
    """A longer sequence in every step: as many buffers as one step needs, not one more for each length."""
    pool = Pool(lambda size: None)
    for size in (10, 20, 30, 20):
        lent = [pool.take(size) for _ in range(3)]
        for buffer in lent:
            pool.free.append(buffer)
    assert [buffer.size for buffer in pool.buffers] == [30, 30, 30]


class Cudart:
    """Stands in for `torch.cuda.cudart()`: what has been registered, in bytes by address."""

    def __init__(self, error=0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.registered[address]
        return 0


def test_host_memory_is_unlocked_when_its_last_tensor_goes(monkeypatch):
    cudart, waited = Cudart(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(cudart.registered)))
    buffer = host_buffer(10_001, True, "a test", "less")
    view = buffer[100:108].view(torch.int32)
    assert cudart.registered == {buffer.data_ptr(): 10_001}
    assert buffer.count_nonzero() == 0
    del buffer
    gc.collect()
    view.fill_(7)
    assert len(cudart.registered) == 1
    del view
    gc.collect()
    assert cudart.registered == {}
    assert waited == [1]


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch):
    cudart = Cudart(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(RuntimeError, match=r"page-locking 64 bytes of host memory for a test.*or use less"):
        host_buffer(64, True, "a test", "less")
