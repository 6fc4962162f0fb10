"""0-d results out of slabs: each place is zero, is given away once, and lives as long as somebody holds it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overcoat.kernels.gpu.scalars import PLACES, Scalar, Scalars


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tensor of "GPU 0", whose memory is the host's, on the default stream."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return SimpleNamespace(get_device=lambda: 0, device=torch.device("cpu"))


def test_both_names_are_the_same_zero(where: Any) -> None:
    scalar = Scalars()
    bits, value = scalar(where)
    assert (bits.dtype, value.dtype, bits.shape, value.shape) == (torch.int32, torch.float32, (), ())
    assert bits == 0
    value.fill_(1.0)
    assert int(bits) == 0x3F800000


def test_places_are_aligned_zero_and_nobody_elses_beyond_the_end_of_a_slab(where: Any) -> None:
    scalar = Scalars()
    places = []
    for _ in range(2 * PLACES + 1):
        places.append(scalar(where))
        assert places[-1].bits == 0
        assert places[-1].bits.data_ptr() % 16 == 0
        places[-1].value.fill_(float(len(places)))
    assert len({place.bits.data_ptr() for place in places}) == len(places)
    assert [float(place.value) for place in places] == [float(i + 1) for i in range(len(places))]
    assert len({place.bits.untyped_storage().data_ptr() for place in places}) == 3


def test_threads_share_no_place(where: Any) -> None:
    scalar = Scalars()
    found: list[list[Scalar]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(scalar(where) for _ in range(3 * PLACES)))
        for mine in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [place for mine in found for place in mine]
    assert len({place.bits.data_ptr() for place in places}) == 12 * PLACES


def test_what_inference_made_training_may_keep(where: Any) -> None:
    scalar = Scalars()
    with torch.inference_mode():
        scalar(where)
    weight = torch.ones((), requires_grad=True)
    (weight * scalar(where).value).backward()
    assert weight.grad == 0


@pytest.mark.parametrize(("device", "stream"), [(0, 7), (-1, 0)])
def test_other_streams_and_the_host_get_tensors_of_their_own(
    where: Any, monkeypatch: pytest.MonkeyPatch, device: int, stream: int
) -> None:
    scalar = Scalars()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream, raising=False)
    where.get_device = lambda: device
    places = [scalar(where) for _ in range(3)]
    assert all(place.bits.untyped_storage().nbytes() == 4 and place.bits == 0 for place in places)
    assert not scalar.free


@pytest.mark.gpu
def test_a_captured_graph_zeroes_its_own() -> None:
    """A replay begins with zero again, whatever the default stream has been given in between."""
    scalar, x = Scalars(), torch.zeros(1, device="cuda")
    scalar(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place = scalar(x)
        place.value += 1.0
    others = [scalar(x) for _ in range(2 * PLACES)]
    for _ in range(3):
        graph.replay()
    assert place.value == 1.0
    assert all(other.value == 0.0 for other in others)
