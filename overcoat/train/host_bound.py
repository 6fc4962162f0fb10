"""Whether the GPU waits for the host, and what to do about it.

The host queues the kernels of a whole log interval before it asks for the losses. Where the GPU is the slower one,
hundreds of kernels are still queued then, and the answer takes a good part of a step; where the host is, all but the
last few have run, and the answer is there. A decoder block takes the host 3 ms and more however small it is; replayed
as CUDA graphs it takes 1 to 2 (docs/research/kernels.md). So a run says once that it could be faster, if nothing in its
configuration speaks against graphs. What the host is busy with besides, reading data say, it does not know.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from overcoat.train.config import Config

# Waiting for less than this part of a step's time is not waiting.
SHORT = 0.05
# So many log intervals in a row: the first, in which kernels are compiled, may count wrongly.
INTERVALS = 3

ADVICE = (
    "The GPU waits for the host, as with small models: train.compile=graphs, which replays the layers as CUDA graphs, "
    "can make more tokens per second; so can more rows at once (train.batch_size)."
)


class HostWatch:
    """Counts the log intervals at whose ends the GPU had nothing left to do.

    Args:
        config: of the run; device: what it trains on.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.advises = device.type == "cuda" and config.recipe.name != "bf16" and _could_replay(config)
        self.in_a_row = 0

    def saw(self, steps: int, seconds: float, waited: float) -> str | None:
        """An interval of so many steps took `seconds`, in the last `waited` of which the host waited for the GPU.

        Returns:
            the advice, at most once.
        """
        if not self.advises:
            return None
        self.in_a_row = self.in_a_row + 1 if waited < SHORT * seconds / steps else 0
        if self.in_a_row < INTERVALS:
            return None
        self.advises = False
        return ADVICE


def _could_replay(config: Config) -> bool:
    """Whether the run could be one of CUDA graphs and is not."""
    if config.train.compile == "graphs":
        return False
    try:
        replace(config, train=replace(config.train, compile="graphs"))
    except ValueError:
        return False
    return True
