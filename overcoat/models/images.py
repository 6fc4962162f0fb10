"""Put image features among a text's tokens without a host sync.

transformers uses a mask of the image tokens: `masked_scatter`, whose backward needs the number of true elements, and a
check of that number. Each is a host sync in the middle of a step: the GPU runs out of work, and then works no faster
than the host can queue the vision tower's small layers. But the number is known: it is that of the features. So the
places of the image tokens have a known shape, and all is done by indexing.

transformers' own check, with its sync, stays for a model's first pass. In later ones a wrong number is an assertion on
the GPU. Under torch.compile of the whole model everything stays transformers'.

The convolution over an image's patches becomes one GEMM if its input holds each patch by itself, as Qwen-VL's does: in
three dimensions cuDNN has no fast kernel for it (of Qwen3-VL-8B, two images: 2.2 of a step's 326 ms).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

MISMATCH = "the number of image tokens in input_ids is not that of image features: check what truncates input_ids"


class ImageMask(Tensor):
    """A bool mask of tokens (B, S, 1) whose `masked_scatter` needs no count; all else gives plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.masked_scatter and args[1].shape == (*args[0].shape[:-1], 1):
                return put(args[0], args[1].as_subclass(Tensor), args[2])
            return func(*args, **(kwargs or {}))


def places(mask: Tensor, count: int) -> Tensor:
    """Return the positions of the first `count` true elements of a mask, int64 (count,); 0 for missing ones."""
    flat = mask.flatten()
    order = torch.where(flat, flat.cumsum(0) - 1, count).clamp(max=count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, order, torch.arange(len(flat), device=mask.device))[:count]


def put(embeds: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Return embeds (B, S, H) with features (..., H) in place of the tokens of a mask (B, S, 1), in order."""
    rows = features.reshape(-1, embeds.shape[-1])
    return embeds.flatten(0, -2).index_copy(0, places(mask, len(rows)), rows).view_as(embeds)


def add(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Return hidden (B, S, H) with features (N, H) added to the tokens of a mask (B, S), in order."""
    features = features.to(hidden.device, hidden.dtype)
    rows = places(mask.to(hidden.device), len(features))
    return hidden.flatten(0, -2).index_add(0, rows, features).view_as(hidden)


@contextlib.contextmanager
def without_waiting(causal: Any) -> Iterator[None]:
    """Inside, a vision-language model (`overcoat_spec` says where its parts are) finds its images' places as above."""
    text = causal.get_submodule(causal.overcoat_spec.text)
    inner = causal.get_submodule(causal.overcoat_spec.text.rpartition(".")[0])
    changes: list[tuple[Any, str, Callable[..., Any]]] = []
    hook = None
    if not _is_compiled():
        names = causal.overcoat_spec.vision.split(".")
        tower = functools.reduce(lambda module, name: getattr(module, name, None), names, causal)
        if tower is not None:  # as where it was dropped, to train the text alone
            hook = tower.register_forward_pre_hook(tell_longest, with_kwargs=True)
        if hasattr(inner, "get_placeholder_mask"):
            changes.append((inner, "get_placeholder_mask", _placeholder_mask(causal, inner)))
        if hasattr(text, "_deepstack_process"):
            changes.append((text, "_deepstack_process", add))
    for module, name, function in changes:
        setattr(module, name, function)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for module, name, _ in changes:
            delattr(module, name)


class PatchProduct(nn.Conv3d):
    """A convolution that is a product where its kernel covers all of x (patches, channels, *kernel) at one place."""

    overcoat_train = overcoat_eval = False

    def forward(self, x: Tensor) -> Tensor:
        has_one_place = x.shape[2:] == self.kernel_size and self.padding == (0, 0, 0)
        is_dense = self.dilation == (1, 1, 1) and self.groups == 1
        wanted = self.overcoat_train if self.training else self.overcoat_eval
        if not (wanted and has_one_place and is_dense):
            return nn.Conv3d.forward(self, x)
        return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def multiply_patches(model: nn.Module, converted: list[str], in_eval: bool) -> None:
    """Make the Conv3d beside converted layers (their names) products, in `train()` or always; others what they were."""
    module: Any
    for name, module in model.named_modules():
        around = ".".join(name.split(".")[:-2])  # of tower.patch_embed.proj the tower
        wanted = any(layer.startswith(f"{around}.".removeprefix(".")) for layer in converted)
        if type(module) is (nn.Conv3d if wanted else PatchProduct):
            module.__class__ = PatchProduct if wanted else nn.Conv3d
        if isinstance(module, PatchProduct):  # also one that has been wrapped since
            module.overcoat_train, module.overcoat_eval = wanted, wanted and in_eval


def longest(tower: Any, grid: Tensor) -> dict[str, int]:
    """Return the longest image of a grid (images, 3) and the longest window (Qwen2.5-VL), in patches, by the names of
    the tower's arguments. A grid on a GPU costs a host sync."""
    found = {"max_seqlen": max(rows * columns for _, rows, columns in grid.tolist())}
    if hasattr(tower, "window_size"):
        found["max_window_seqlen"] = (tower.window_size // tower.patch_size) ** 2
    return found


def tell_longest(tower: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the longest image and window to a tower's arguments, before its forward: from them layers see that all images
    have one length (`Fp8DecoderLayer`). A grid on a GPU is read only where transformers itself reads it on the host, to
    make the positions."""
    grid = kwargs.get("grid_thw")
    if grid is None or "max_seqlen" in kwargs or not (grid.is_cpu or (grid.is_cuda and "position_ids" not in kwargs)):
        return args, kwargs
    return args, {**longest(tower, grid), **kwargs}


def _is_compiled() -> bool:
    """True if torch.compile compiles the model's own code: an `ImageMask` would pass from one graph to the next. Layers
    that are compiled one by one never see one."""
    return torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False)


def _placeholder_mask(causal: Any, inner: Any) -> Callable[..., Any]:
    """`inner.get_placeholder_mask`, in whose place it is called."""
    original = inner.get_placeholder_mask
    has_videos = "video_features" in inspect.signature(original).parameters

    def masks(input_ids: Any, inputs_embeds: Tensor, image_features: Any = None, video_features: Any = None) -> Any:
        features = {"image_features": image_features, **({"video_features": video_features} if has_videos else {})}
        if input_ids is None:
            return original(input_ids, inputs_embeds=inputs_embeds, **features)
        is_checked = getattr(causal, "_overcoat_images_checked", False) or input_ids.device.type == "meta"
        if not is_checked or input_ids.device.type == "cpu":
            original(input_ids, inputs_embeds=inputs_embeds, **features)
            causal._overcoat_images_checked = True
        found = [_mask(input_ids == inner.config.image_token_id, inputs_embeds, image_features)]
        if has_videos:
            found.append(_mask(input_ids == inner.config.video_token_id, inputs_embeds, video_features))
        return tuple(found) if has_videos else found[0]

    return masks


def _mask(tokens: Tensor, embeds: Tensor, features: Optional[Tensor]) -> Tensor:
    if features is not None and tokens.is_cuda:
        torch._assert_async(tokens.sum() * embeds.shape[-1] == features.numel(), MISMATCH)
    return tokens.unsqueeze(-1).to(embeds.device).as_subclass(ImageMask)
