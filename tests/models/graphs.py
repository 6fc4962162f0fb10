"""What PyTorch has made of layers that were to be CUDA graphs."""

from __future__ import annotations

import torch


def recorded() -> int:
    """CUDA graphs that are there now; 0 where none was ever asked for."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else sum(1 + root.num_descendants() for root in manager.get_roots())


def skipped() -> int:
    """How often in this process PyTorch compiled what it then ran without a graph, which it says in a warning only."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
