"""Batches that small models of every kind take: plain, padded (left and right), and packed rows; images in rows."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import nn

from tests.sweep.tiny import HIDDEN, SPECIAL

ROWS, LENGTH = 2, 48
PLAIN, PADDED, PACKED, IMAGES = "plain", "padded", "packed", "images"


def batches(model: Any, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return the batches that a model's forward has arguments for, by name."""
    generator = torch.Generator().manual_seed(seed)
    takes = inspect.signature(type(model).forward).parameters
    books = model.config.num_codebooks if type(model).__name__.startswith("Musicgen") else None
    ids = torch.randint(8, SPECIAL, (ROWS * (books or 1), LENGTH), generator=generator)
    labels = ids if books is None else ids.reshape(ROWS, books, LENGTH).transpose(1, 2).contiguous()
    if "input_ids" not in takes:  # images alone
        return {PLAIN: next(_forms(model, takes, generator))}
    plain = {"input_ids": ids, "labels": labels.clone()}
    found = {PLAIN: plain}
    if "attention_mask" in takes:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[0, :7], mask[1, -11:] = 0, 0
        padded = labels.clone()
        padded[mask == 0] = -100
        padded[0, 7] = -100  # what padding predicts is nobody's
        found[PADDED] = {**plain, "attention_mask": mask, "labels": padded}
    if "position_ids" in takes:
        positions = torch.cat([torch.arange(13), torch.arange(20), torch.arange(LENGTH - 33)])
        found[PACKED] = {**plain, "position_ids": positions.expand(ROWS, -1).contiguous()}
    if "use_cache" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        found = {name: {**inputs, "use_cache": False} for name, inputs in found.items()}
    if "pixel_values" in takes and (images := with_images(model, found[PLAIN], set(takes), generator)) is not None:
        found[IMAGES] = images
    return found


def with_images(model: nn.Module, text: dict[str, Any], takes: set[str], generator: Any) -> Optional[dict[str, Any]]:
    """Return a row of text with an image, in the first form that a model takes; None if it takes none."""
    for image in _forms(model, takes, generator):
        count = 1
        for _ in range(2):
            inputs = _placed(model, text, image, takes, count)
            try:
                with torch.no_grad():
                    copy.deepcopy(model)(**inputs)
            except Exception as error:
                told = re.search(r"tokens: \d+,? (?:image )?features:? (?:torch.Size\(\[)?(\d+)", str(error))
                if told is None:
                    break
                count = int(told[1])  # of some models the numbers in them
                count = count // HIDDEN if count % HIDDEN == 0 else count
                continue
            return inputs
    return None


def _forms(model: Any, takes: set[str], generator: Any) -> Iterator[dict[str, Any]]:
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", None) or model.config
    patch, side = getattr(vision, "patch_size", 8), getattr(vision, "image_size", 32)
    patch, side = (each[0] if isinstance(each, (list, tuple)) else each for each in (patch, side or 32))
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    pixels = torch.randn(1, channels or 3, side, side, generator=generator)
    if "image_grid_thw" in takes:
        grid = torch.tensor([[1, 4, 4]])
        for width in (channels * patch * patch, 2 * channels * patch * patch):  # of one or two images in time
            yield {"pixel_values": torch.randn(16, width, generator=generator), "image_grid_thw": grid}
        yield {"pixel_values": torch.randn(16, channels, patch, patch, generator=generator), "image_grid_thw": grid}
    yield {"pixel_values": pixels}
    sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in takes else {}
    yield {"pixel_values": pixels, **sizes}
    yield {"pixel_values": pixels[None].expand(-1, 2, -1, -1, -1), **sizes}
    yield {"pixel_values": pixels[None], **sizes}


def _placed(model: Any, text: dict[str, Any], image: dict[str, Any], takes: set[str], count: int) -> dict[str, Any]:
    """Return a row with as many tokens of an image after its second, and labels after them."""
    config, ids = model.config, text["input_ids"][:1].repeat(1, 2)[:, : LENGTH + count]
    token = next((x for n in ("image_token_id", "image_token_index") if (x := getattr(config, n, None))), SPECIAL)
    ids[0, 1], ids[0, 2 : 2 + count] = getattr(config, "vision_start_token_id", None) or 9, token
    labels = ids.clone()
    labels[0, : 2 + count] = -100
    inputs = {**text, "input_ids": ids, "labels": labels, **image}
    for name in {"mm_token_type_ids", "token_type_ids"} & takes:
        inputs[name] = (ids == token).int()
    return inputs
