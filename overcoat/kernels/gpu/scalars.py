"""0-d results of kernels, scales and maxima, out of slabs that are zeroed once.

A block makes some thirty of them. A tensor of its own costs the host 4 us, and 10 and a launch if it must be zero, as
what programs share an atomic maximum in must. Here both cost a third of a microsecond: a slab is cut into its places
when it is made, each is given away once, and its memory lives as long as any of its places does.

Only on the default stream. A slab is zeroed on the stream that made it, so another stream would have to wait; a
captured graph would not zero a place again; and of the pools of torch.compile's graphs nobody may keep a part. On other
streams each scalar is a tensor of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Places in a slab; 32-bit words from one to the next, as launches are remembered for multiples of 16 bytes (launch.py).
PLACES, WORDS = 128, 4


class Scalar(NamedTuple):
    """One place in memory, 0 still, as two 0-d tensors: int32 (bits of an atomic maximum) and FP32."""

    bits: Tensor
    value: Tensor


class Scalars:
    """Where one launcher takes one of its results from: `self(where)`.

    Each result has slabs of its own, as two results of an op may not share a storage, nor one with an argument: so says
    `torch.library`, and nobody's maximum is an argument of what finds it.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[Scalar]] = {}  # by device; of the default stream

    def __call__(self, where: Tensor) -> Scalar:
        """A zero on the device of `where`, for the current stream."""
        device = where.get_device()
        if device < 0 or torch._C._cuda_getCurrentRawStream(device):
            bits = torch.zeros((), dtype=torch.int32, device=where.device)
            return Scalar(bits, bits.view(torch.float32))
        try:
            return self.free[device].pop()
        except (KeyError, IndexError):
            places = _slab(where.device)
            self.free[device] = places[1:]
            return places[0]


def _slab(device: torch.device) -> list[Scalar]:
    # Autograd refuses to keep what was made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        words = torch.zeros((PLACES, WORDS), dtype=torch.int32, device=device)[:, 0]
        return [Scalar(*pair) for pair in zip(words.unbind(), words.view(torch.float32).unbind(), strict=True)]
