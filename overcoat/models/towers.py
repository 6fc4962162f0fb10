"""Made-up images for a tower whose forward takes patches of images of all sizes in one row, and the sizes beside them.

Its layers get cu_seqlens and the rotation, which only the tower's own forward makes as the model does (verify.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.models.clone import UnverifiableError
from overcoat.models.family import original_class

SIZES = ("grid_thw", "image_grid_thw")  # (images, 3): frames, rows and columns of patches
# Sides that windows and merged patches divide.
IMAGES = {"one image": [[1, 4, 8]], "images": [[1, 8, 4], [1, 4, 4]]}
PATCHES = (nn.Linear, nn.Conv2d, nn.Conv3d)


def sizes_of(owner: Any) -> dict[str, dict[str, Tensor]]:
    """Return the sizes of images for a tower's forward, by title; {} if it takes none."""
    accepted = inspect.signature(original_class(owner).forward).parameters
    name: Optional[str] = next((name for name in SIZES if name in accepted), None)
    return {} if name is None else {title: {name: torch.tensor(grid)} for title, grid in IMAGES.items()}


def count_of(sizes: dict[str, Tensor]) -> int:
    """Return the number of patches."""
    return int(sum(grid.prod(1).sum() for grid in sizes.values()))


def patches_of(owner: Any, count: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield images of `count` patches by the name that a tower's forward has for them: flat ones, then as the
    first module takes them."""
    found = [module for module in owner.modules() if isinstance(module, PATCHES)]
    if not found:
        raise UnverifiableError(f"{type(owner).__name__} has no module that takes patches")
    convolutions = [module for module in found if not isinstance(module, nn.Linear)]
    name = tuple(inspect.signature(original_class(owner).forward).parameters)[1]
    for first in dict.fromkeys((*convolutions[:1], found[0])):  # some have a convolution in their layers, too
        size = first.weight.shape[1:]
        yield {name: torch.zeros(count, size.numel(), device=device)}
        yield {name: torch.zeros(count, *size, device=device)}
