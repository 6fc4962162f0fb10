"""A model's weights as block-scaled FP8, in the layout that vLLM and transformers read (`quant_method: fp8`).

    X.weight            (N, K) E4M3 codes
    X.weight_scale_inv  (N / B, K / B) FP32, one scale for each B x B block; weight = codes * scale

Names are those of the model's files on the hub. Codes are made of the BF16-rounded weight. Quantized are the linear
layers and the experts of the text's decoder layers. In BF16 stay embeddings, lm_head, norms, biases, routers, vision
towers, and

    weights with a side that is no multiple of B   transformers does not decode them, vLLM does not stack them
    what vLLM stacks with such a weight            q, k, v; gate, up; all experts of a layer
    experts that the hub's files hold stacked      gpt-oss

Legend: N rows of a weight, K its columns, B the block's side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.extras import load_extra
from overcoat.formats import quantize_blocks
from overcoat.models.family import decoder_layers, tower_path
from overcoat.models.frozen import FrozenWeight
from overcoat.models.linear_layers import ROUTERS
from overcoat.optim.sharding import gather

BLOCKS = (128, 64)
SCALE = "_scale_inv"  # what follows a weight's name


def quantization_config(block: int, left: list[str]) -> dict[str, Any]:
    """Return config.json's entry. left: the modules that stay in BF16, by their names in the files."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": left,
    }


def fp8_state_dict(model: nn.Module, block: int = 128) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors for an inference engine, one decoder layer after the other: E4M3 codes and their scales
    where `overcoat export --format fp8` writes them, all others in BF16.

    Names and layout are those that vLLM's `load_weights` takes. Tensors stay on the model's device, and no second copy
    of the model is made. Under FSDP2 every process iterates to the end, and gets every tensor, gathered layer by layer.

    Args:
        model: a transformers model, converted or not, without adapters.
        block: side of a scale's block, 128 or 64.

    Raises:
        ValueError: the model has adapters that are not merged, is not transformers', or no weight fits `block`.
    """
    if block not in BLOCKS:
        raise ValueError(f"block = {block}: the side of a scale's block is 128 or 64")
    transformers = load_extra("transformers", "hf", "overcoat.fp8_state_dict")
    seen, tensors = set[int](), dict[str, Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # tied ones have their first name
            seen.add(id(tensor))
            tensors[name] = tensor
    if any(".base_layer." in name for name in tensors):
        raise ValueError("the model has adapters: merge them into it first, model = model.merge_and_unload()")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a transformers model, whose files name the weights")
    chosen, groups = set[str](), _by_layer(model, tensors)
    linears = linear_weights(model)
    for group in groups:
        shapes = {name: torch.empty(group[name].shape, device="meta") for name in group.keys() & linears}
        chosen |= _quantized(_as_in_files(model, shapes), block)
    if not chosen:
        other = ", or in blocks of 64" if block == 128 else ""
        raise ValueError(f"no weight of {type(model).__name__} has sides that are multiples of {block}: BF16{other}")
    return _tensors(model, groups, chosen, block)


def _tensors(model: Any, groups: list[dict[str, Tensor]], chosen: set[str], block: int) -> Iterator[tuple[str, Tensor]]:
    dtype = model.dtype
    for group in groups:
        with torch.no_grad():
            # Only what has the model's own dtype: transformers keeps some in FP32.
            whole = {
                name: gather(_decoded(each)).to(torch.bfloat16 if _is_of(each, dtype) else each.dtype)
                for name, each in group.items()
            }
            found = _as_in_files(model, whole)
        for name, tensor in found.items():
            if name in chosen:
                codes, scale = quantize_blocks(tensor, (block, block))
                yield name, codes
                yield name + SCALE, scale
            else:
                yield name, tensor.contiguous()


def _decoded(tensor: Tensor) -> Tensor:
    return tensor.decoded() if isinstance(tensor, FrozenWeight) else tensor.detach()


def _is_of(tensor: Tensor, dtype: torch.dtype) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dtype == dtype


def linear_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers and of stacked experts, of the text's decoder layers."""
    found, tower = set[str](), tower_path(model)
    for path, layer in decoder_layers(model).items():
        if tower and path.startswith(tower):
            continue
        for name, module in layer.named_modules(prefix=path):
            last = name.rpartition(".")[2]
            if isinstance(module, nn.Linear) and last not in ROUTERS:
                found.add(f"{name}.weight")
            elif last == "experts":
                found |= {f"{name}.{key}" for key, each in module.named_parameters(recurse=False) if each.dim() == 3}
    return found


def _by_layer(model: nn.Module, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each decoder layer together, and every other one by itself."""
    prefixes = tuple(f"{path}." for path in decoder_layers(model))
    groups = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors.items():
        groups[next((prefix for prefix in prefixes if name.startswith(prefix)), name)][name] = tensor
    return list(groups.values())


def _as_in_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names, and in the pieces, of the model's files on the hub."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors) if tensors else {}


def _quantized(weights: dict[str, Tensor], block: int) -> set[str]:
    """Return the names of the weights that become FP8: of those that vLLM may stack, all or none."""
    stacks = defaultdict[Any, list[str]](list)
    for name, weight in weights.items():
        parent = name.rpartition(".")[0].rpartition(".")[0]
        owner, is_expert, _ = f"{parent}.".partition(".experts.")
        stacks[owner if is_expert else (parent, weight.shape[-1])].append(name)

    def fits(name: str) -> bool:
        shape = weights[name].shape
        return name.endswith(".weight") and len(shape) == 2 and not any(size % block for size in shape)

    return {name for names in stacks.values() if all(map(fits, names)) for name in names}
