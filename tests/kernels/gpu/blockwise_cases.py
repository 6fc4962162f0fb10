"""Inputs that the tests of the block-wise kernels have in common."""

from __future__ import annotations

import torch

from tests.kernels.gpu.compare import DEVICE, INTERPRETED

CODES = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]
# 144 tokens are a multiple of 16 and of no tile: nothing is padded.
SWIGLU_SHAPES = [(1, 128), (130, 256), (144, 256), (61, 688)]
SWIGLU_SHAPES += [] if INTERPRETED else [(1000, 11008), (300, 17920)]


def parameters(width, affine):
    weight = None if affine == "none" else torch.randn(width, device=DEVICE).bfloat16()
    return weight, torch.randn(width, device=DEVICE).bfloat16() if affine == "both" else None
