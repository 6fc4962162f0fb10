"""A batch for any model: random tokens and, where the model sees, one image in each row.

`overcoat estimate` and the benchmarks run models without a data set. What a vision-language model is given depends
on its class: LLaVA's images have one size, Qwen3-VL's any. The image's tokens come after a row's first, inside its
length, and are no labels.

    inputs = images(model, batch, sequence, side=1024)
    loss = model(**inputs, **tokens(model, batch, sequence, inputs)).loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overcoat.extras import load_extra
from overcoat.models.family import model_spec_of
from overcoat.models.images import longest

# Pixels a side of an image, where the model takes any.
SIDE = 1024


def model_class(config: Any) -> Any:
    """transformers' class of a configuration that has a loss over text: of images and text, or of text alone.
    ValueError: it is no such model, or none whose images are known here."""
    transformers = load_extra("transformers", "hf", "overcoat")
    text, both = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    for mapping, fits in ((text, True), (both, sees(config))):
        if fits and type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"{config.model_type} is no causal language model of transformers, nor one of those with images that can be "
        f"made up ({', '.join(SEEING)})"
    )


def sees(config: Any) -> bool:
    """True if the model of a configuration takes images."""
    return config.model_type in SEEING


def tower_parameters(model: Any) -> list[Tensor]:
    """Return the parameters of a vision-language model's tower, without the connector; [] for other models."""
    whole = model_spec_of(model)
    if whole is None or not whole.vision:
        return []
    kept = {id(parameter) for parameter in model.get_submodule(whole.connector).parameters()}
    return [parameter for parameter in model.get_submodule(whole.vision).parameters() if id(parameter) not in kept]


def freeze_tower(model: Any) -> None:
    """Train all but the vision tower. ValueError: there is none."""
    parameters = tower_parameters(model)
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no vision tower to freeze: leave --freeze-tower out")
    for parameter in parameters:
        parameter.requires_grad_(False)


def images(model: Any, batch: int, sequence: int, side: int = SIDE) -> dict[str, Tensor]:
    """Return the forward's arguments for one random image in each of `batch` rows, on its device; {} if it takes none.
    ValueError: an image's tokens do not fit into a row."""
    return SEEING[model.config.model_type](model, batch, sequence, side) if sees(model.config) else {}


def tokens(model: Any, batch: int, sequence: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random input_ids and labels, int64 (batch, sequence), with room for the images of `given`; without data on the
    meta device."""
    device, config = model.device, model.config
    if not given:
        ids = _random_ids(config.get_text_config().vocab_size, batch, sequence, device)
        return {"input_ids": ids, "labels": ids}
    special = [value for name in ("image_token_id", "video_token_id") if (value := getattr(config, name, None))]
    ids = _random_ids(min([config.get_text_config().vocab_size, *special]), batch, sequence, device)
    labels = ids.clone()
    place = slice(1, 1 + _image_tokens(config, given, batch))
    ids[:, place], labels[:, place] = config.image_token_id, -100
    return {"input_ids": ids, "labels": labels}


def patches(given: dict[str, Tensor], config: Any) -> tuple[int, int]:
    """How many patches the tower computes in all, and how many see each other; (0, 0) without images."""
    if not given:
        return 0, 0
    pixels = given["pixel_values"]
    if pixels.dim() == 2:
        return len(pixels), len(pixels) // len(given["image_grid_thw"])
    each = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1
    return len(pixels) * each, each


def _random_ids(vocabulary: int, batch: int, sequence: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty((batch, sequence), dtype=torch.int64, device=device)
    return torch.randint(vocabulary, (batch, sequence), device=device)


def _image_tokens(config: Any, given: dict[str, Tensor], batch: int) -> int:
    """Return the number of tokens of one image."""
    if "image_grid_thw" in given:
        return int(given["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def _check_room(count: int, sequence: int) -> None:
    if count >= sequence:
        raise ValueError(
            f"an image of {count} tokens does not fit into a row of {sequence}: give longer rows, or a smaller image"
        )


def _pixels(model: Any, *size: int) -> Tensor:
    return torch.randn(size, dtype=model.dtype, device=model.device)


def _llava(model: Any, batch: int, sequence: int, _side: int) -> dict[str, Tensor]:
    config = model.config
    _check_room(_image_tokens(config, {}, batch), sequence)
    side = config.vision_config.image_size
    return {"pixel_values": _pixels(model, batch, config.vision_config.num_channels, side, side)}


def _qwen3_vl(model: Any, batch: int, sequence: int, side: int) -> dict[str, Tensor]:
    """Return the inputs, and what the model would compute from the images' sizes with a host sync."""
    config, device = model.config, model.device
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    if side % unit:
        raise ValueError(f"image side {side} must be a multiple of {unit} for Qwen3-VL")
    across = side // vision.patch_size
    grid = torch.tensor([[1, across, across]] * batch)
    given = {"image_grid_thw": grid}
    count = _image_tokens(config, given, batch)
    _check_room(count, sequence)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    given["pixel_values"] = _pixels(model, batch * across**2, width)
    kinds = torch.zeros((batch, sequence), dtype=torch.int64)
    kinds[:, 1 : 1 + count] = 1
    positions, _ = model.model.get_rope_index(kinds, mm_token_type_ids=kinds, image_grid_thw=grid)
    found = {"position_ids": positions, **tower_inputs(model.model.visual, grid)}
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}
    return {**given, **moved}


def tower_inputs(tower: Any, grid: Tensor) -> dict[str, Any]:
    """Return what the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL compute on the CPU from a grid of image sizes,
    int64 (images, 3): patches in time, height and width."""
    from transformers import vision_utils

    merge = tower.spatial_merge_size
    found: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        **longest(tower, grid),
    }
    if hasattr(tower, "interpolation_mode"):  # Qwen3-VL
        found["interp_indices"], found["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(tower, "window_size"):  # Qwen2.5-VL
        window, lengths = vision_utils.get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": window, "cu_window_seqlens": lengths}
    return {f"image_{name}": value for name, value in found.items()}


SEEING = {"llava": _llava, "qwen3_vl": _qwen3_vl}
