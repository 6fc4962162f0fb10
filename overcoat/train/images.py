"""The images of conversations: what the model is given for those of a batch.

Tokens, with each image's own among them, are made once (chat.py). Pixels are read anew for every batch, in threads,
while the GPU works on the one before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overcoat.models.samples import tower_inputs
from overcoat.train.chat import read_image
from overcoat.train.data import Batch, conversations

READERS = 8


class Images:
    """The images of conversations by their number among the data."""

    def __init__(self, processor: Any, folder: str, paths: list[list[str]]):
        self.processor, self.folder, self.paths = processor, Path(folder), paths
        self._readers = ThreadPoolExecutor(READERS)

    def add_to(self, batch: Batch, rows_BT: np.ndarray, model: Any) -> Batch:
        """`batch` with what `model`, of transformers, is given for the images of its rows."""
        numbers = conversations(rows_BT)
        paths = [path for number in numbers for path in self.paths[number]]
        if not paths:
            return batch
        each = list(self._readers.map(self._pixels, paths))
        given = {name: torch.cat([image[name] for image in each]) for name in each[0]}
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
        inner, grid = model.model, given.get("image_grid_thw")
        if grid is None or not hasattr(inner, "get_rope_index"):
            return replace(batch, images=given)
        # What the model would find out from the sizes, and make the host wait for.
        counts = iter([len(self.paths[number]) for number in numbers if self.paths[number]])
        positions = _rope_positions(batch, counts, grid, inner, model.config.image_token_id)
        return replace(batch, position_ids=positions, images={**given, **tower_inputs(inner.visual, grid)})

    def _pixels(self, path: str) -> dict[str, torch.Tensor]:
        return dict(self.processor.image_processor(images=[read_image(self.folder / path)], return_tensors="pt"))


def _rope_positions(batch: Batch, counts: Any, grid: torch.Tensor, inner: Any, image_token: int) -> torch.Tensor:
    """Position ids (4, B, T) of documents: in the text, then in time, height and width, each from 0."""
    assert batch.position_ids is not None
    assert batch.document_starts is not None
    ids, begun, found = batch.input_ids.flatten(), 0, []
    for start, end in zip(batch.document_starts[:-1].tolist(), batch.document_starts[1:].tolist(), strict=True):
        document, kinds = ids[None, start:end], (ids[None, start:end] == image_token).int()
        count = next(counts) if kinds.any() else 0
        images = grid[begun : begun + count]
        begun += count
        found.append(inner.get_rope_index(document, mm_token_type_ids=kinds, image_grid_thw=images)[0][:, 0])
    return torch.cat([batch.position_ids[None], torch.cat(found, dim=1).view(3, *batch.input_ids.shape)])
