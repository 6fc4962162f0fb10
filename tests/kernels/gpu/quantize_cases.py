"""What test_quantize.py and test_groups.py have in common: shapes and dtypes."""

from __future__ import annotations

import torch

from tests.kernels.gpu.compare import INTERPRETED

SHAPES = [(1, 16), (7, 100), (61, 688), (9, 5120)] if INTERPRETED else [(1, 16), (7, 100), (61, 688), (1000, 5120)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
