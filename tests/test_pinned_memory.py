"""Page-locked host memory, and how much there is: `pytest tests/test_pinned_memory.py`."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import types

import pytest
import torch

from overcoat import pinned_memory
from overcoat.pinned_memory import Pool, host_buffer, packed


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
    with pytest.raises(
        RuntimeError, match=r"page-locking 64 bytes of host memory for a test.*ulimit -l: .*or use less"
    ) as raised:
        host_buffer(64, True, "a test", "less")
    assert "\n" not in str(raised.value)


# ---- what the system says -------------------------------------------------------------------------------------------

GIBI = 2**30


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))


@pytest.fixture
def system(tmp_path, monkeypatch):
    """`system(files)`: folders in place of /proc and /sys, with 100 GiB available."""
    monkeypatch.setattr(pinned_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(pinned_memory, "SYS", tmp_path / "sys")

    def make(files):
        write_files(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 * 2**20} kB\n", **files})

    return make


def v2(folder, most, now, inactive=0):
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {f"{folder}/memory.max": most, f"{folder}/memory.current": now, f"{folder}/memory.stat": stat}


def v1(folder, most, now, inactive=0):
    stat = f"inactive_file 7\ntotal_inactive_file {inactive}\n"
    sizes = {f"{folder}/memory.limit_in_bytes": most, f"{folder}/memory.usage_in_bytes": now}
    return {**sizes, f"{folder}/memory.stat": stat}


TOP, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
OWN = {"proc/self/cgroup": "0::/job/step\n"}
OWN_V1 = {"proc/self/cgroup": "9:cpuset:/other\n4:hugetlb,memory:/job/step\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 100 * GIBI),
        (v2(TOP, 50 * GIBI, 20 * GIBI, 3 * GIBI) | {"proc/self/cgroup": "0::/\n"}, 33 * GIBI),  # a container
        (v2(TOP, "max", 20 * GIBI) | {"proc/self/cgroup": "0::/\n"}, 100 * GIBI),
        (OWN | v2(f"{TOP}/job/step", 50 * GIBI, 20 * GIBI) | v2(f"{TOP}/job", 60 * GIBI, 50 * GIBI), 10 * GIBI),
        (OWN | v2(f"{TOP}/job/step", "max", 20 * GIBI) | v2(f"{TOP}/job", 60 * GIBI, 50 * GIBI), 10 * GIBI),
        (OWN | v2(f"{TOP}/job/step", 21 * GIBI, 20 * GIBI) | v2(f"{TOP}/other", GIBI, GIBI), GIBI),
        (OWN | v2(TOP, 50 * GIBI, 20 * GIBI), 30 * GIBI),  # the path is the host's
        (OWN | v2(f"{TOP}/job", 20 * GIBI, 21 * GIBI), 1),  # none: 0 is unknown
        (OWN_V1 | v1(f"{OLD}/job/step", 50 * GIBI, 20 * GIBI, 2 * GIBI) | v1(OLD, 2**63 - 4096, 90 * GIBI), 32 * GIBI),
        (OWN_V1 | v1(f"{OLD}/job/step", 2**63 - 4096, 0) | v1(f"{OLD}/job", 50 * GIBI, 20 * GIBI), 30 * GIBI),
        (OWN_V1 | v1(OLD, 50 * GIBI, 20 * GIBI), 30 * GIBI),
        (OWN_V1 | v1(f"{OLD}/other", GIBI, GIBI), 100 * GIBI),
    ],
)
def test_the_smallest_rest_of_all_groups_is_free(files, free, system):
    system(files)
    assert pinned_memory.bytes_free() == free


def test_without_proc_what_is_free_is_unknown(system, tmp_path):
    assert pinned_memory.bytes_free() == 0


@pytest.mark.parametrize(
    ("node", "cpulist", "found"),
    [
        (1, "2-3,6-7\n", {2, 3, 6, 7}),
        (1, "2-3,16-31\n", {2, 3}),
        (1, "5\n", {5}),
        (1, "16-31\n", set(range(8))),  # this process may not run there
        (-1, "2-3\n", set(range(8))),
    ],
)
def test_pages_are_made_on_the_cpus_of_the_gpus_node(node, cpulist, found, system, monkeypatch):
    place = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0xCA, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place if device == 3 else None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append((process, cpus)), raising=False)
    system({"sys/bus/pci/devices/0000:ca:00.0/numa_node": node, "sys/devices/system/node/node1/cpulist": cpulist})
    assert pinned_memory.cpus_near_gpu() == found
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pinned_memory, "PART", 4096)
    host_buffer(10_001, True, "a test", "less")
    assert bound == [(0, found)] * 3


def test_where_a_gpu_is_may_be_unknown(system, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace())
    assert pinned_memory.cpus_near_gpu() == os.sched_getaffinity(0)


def test_all_pages_are_made_before_they_are_locked(monkeypatch):
    """And in threads whose CPUs are not those of this one."""
    before, made = os.sched_getaffinity(0), []

    class Counting(Cudart):
        def cudaHostRegister(self, address, size, flags):  # noqa: N802
            made.append(resident_pages(address, size))
            return super().cudaHostRegister(address, size, flags)

    cudart = Counting()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pinned_memory, "PART", 8 * mmap.PAGESIZE)
    buffer = host_buffer(21 * mmap.PAGESIZE + 5, True, "a test", "less")
    assert made == [22]
    assert buffer.count_nonzero() == 0
    assert os.sched_getaffinity(0) == before


def resident_pages(address, size):
    """Pages of a range that are in memory, as mincore(2) says."""
    libc, pages = ctypes.CDLL(None, use_errno=True), -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) == 0
    return sum(each & 1 for each in vector)
