"""Start from a quantized checkpoint: `model.dequantize` makes plain weights of its codes while they are read.

    fp8, mxfp8          E4M3 codes with a scale for each block (DeepSeek, Qwen), or for the whole weight
    compressed-tensors  the same under other names, or a scale for each row, if all its weights are FP8
    mxfp4               pairs of E2M1 codes with a power of two for each 32 (gpt-oss)
    bitsandbytes        4-bit codes, NF4 or FP4 (quantized_4bit.py)
    gguf                a file FOLDER/NAME.gguf

transformers maps the files and makes one tensor after the other, in `model.dtype`; experts are merged on the way. Its
own dequantization of FP8 divides a weight evenly by the number of its scales, but blocks of 128 x 128 are cut at a
weight's end: of 576 rows (DeepSeek-V3) it refuses five scales, and of 192 it would make two blocks of 96. So FP8 is
dequantized here, as a quantization method of its own, with blocks of the size that config.json says.

Where the base of adapters is held in FP8 with block scales (`keeps_codes`), E4M3 codes in blocks of 128 x 128 of linear
layers become frozen weights as they are (models/frozen.py), without a BF16 copy. All else is dequantized, as ever:
experts, what transformers merges or splits, rows that are no multiple of 128.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from overcoat.extras import GGUF, load_extra
from overcoat.formats import scale_blocks
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.launch import cdiv
from overcoat.models.fp8_weights import linear_weights
from overcoat.models.frozen import FrozenWeight
from overcoat.train import quantized_4bit
from overcoat.train.config import require

METHODS = ("fp8", "mxfp8", "compressed-tensors", "mxfp4", "bitsandbytes", "gguf")  # that can be dequantized
EXACT = "overcoat_fp8"  # the name of ours among transformers' quantization methods
# Ends of tensors that belong to codes: loaded without them, codes would be taken for weights.
COMPANIONS = ("weight_scale", "_scale_inv", "_scales", "_packed", "weight.absmax", ".qweight")
REMEDY = "name the checkpoint that it was made from"
KEEP = "adapters train on its codes with recipe.frozen_weights = 'fp8' and recipe.linear_scaling = 'block'"


def method_of(kind: Any, name: str) -> str:
    """Return the quantization method of a checkpoint's transformers configuration; "" if its weights are plain."""
    found = {"quant_method": "gguf"} if name.endswith(GGUF) else _about(kind)
    return str(getattr(found.get("quant_method"), "value", found.get("quant_method", "unknown"))) if found else ""


def check_quantized(kind: Any, name: str, dequantize: bool, keep_codes: bool = False) -> None:
    """Refuse quantized weights that are not, or cannot be, dequantized: neither they nor adapters on them are trained.

    kind: the transformers configuration. dequantize: model.dequantize. keep_codes: FP8 codes are held as they are.
    """
    method, what = method_of(kind, name), f"model.name = {name!r}"
    if not method:
        require(not dequantize, f"model.dequantize = true: {name!r} has plain weights; leave it out")
        return
    can, has_codes = is_known(kind, name), has_frozen_codes(kind, name)
    what += f" has quantized weights ({method:.40}), which are not trained, nor adapters on them"
    require(can or not dequantize, f"{what}, and which model.dequantize cannot make plain: {REMEDY}")
    remedy = f"set model.dequantize = true, or {REMEDY}" if can else REMEDY
    require(dequantize or (keep_codes and has_codes), f"{what}: {remedy}{f'; {KEEP}' if has_codes else ''}")


def is_known(kind: Any, name: str) -> bool:
    """True for quantized weights that `model.dequantize` makes plain."""
    method, about = method_of(kind, name), _about(kind)
    others = {"compressed-tensors": _are_fp8(about), "bitsandbytes": bool(about.get("load_in_4bit"))}
    return method in METHODS and others.get(method, True)


def has_frozen_codes(kind: Any, name: str) -> bool:
    """True for FP8 weights in blocks of 128 x 128, which can be frozen as the codes that they are."""
    method = method_of(kind, name)
    return method in ("fp8", "compressed-tensors") and is_known(kind, name) and _blocks(kind, method) == [BLOCK, BLOCK]


def loading_options(kind: Any, name: str, keep_codes: bool = False) -> dict[str, Any]:
    """Return the options of `from_pretrained` that dequantize the weights of a checkpoint; `kind` is changed.

    keep_codes: linear layers with FP8 codes in blocks of 128 x 128 have a `FrozenWeight` instead.
    """
    transformers, method = load_extra("transformers", "hf", "model.dequantize"), method_of(kind, name)
    if method == "mxfp4":
        return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    if method == "gguf":
        return {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if method == "bitsandbytes":
        quantized_4bit.register()
        kind.quantization_config = {"quant_method": quantized_4bit.NAME}
        return {"config": kind}
    _register()
    about = {"quant_method": EXACT, "weight_block_size": _blocks(kind, method), "dequantize": True}
    kind.quantization_config = {**about, "keep_codes": keep_codes and has_frozen_codes(kind, name)}
    return {"config": kind}


def _blocks(kind: Any, method: str) -> list[int] | None:
    """Return the sides of the blocks that share a scale, None for scales of rows or weights."""
    found = _about(kind)
    blocks = found.get("weight_block_size", (1, 32) if method == "mxfp8" else None)
    if method == "compressed-tensors":
        structures = [group["weights"].get("block_structure") for group in found["config_groups"].values()]
        blocks = next(filter(None, structures), None)
    return None if blocks is None else [*blocks]


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return codes times scales, (..., M, N) fp32.

    Args:
        codes: (..., M, N), of a format whose values are codes.
        scales: one for all, for each row (M, 1), or for each block of `block` codes, of which the last may be cut.

    Raises:
        ValueError: the scales are of another number.
    """
    values, scales = codes.float(), scales.float()
    if scales.numel() == 1:
        return values * scales.reshape(())
    (rows, columns), grid = values.shape[-2:], scales.shape[-2:]
    for size in [(1, columns), *([] if block is None else [block])]:
        if grid == (cdiv(rows, size[0]), cdiv(columns, size[1])):
            return scale_blocks(values, scales, size)
    raise ValueError(f"a weight of {rows} x {columns} with {' x '.join(map(str, grid))} scales, of blocks of {block}")


def _about(kind: Any) -> dict[str, Any]:
    """Return the quantization that a transformers configuration states; {} if its weights are plain."""
    text = kind.get_text_config() if hasattr(kind, "get_text_config") else kind
    found = getattr(kind, "quantization_config", None) or getattr(text, "quantization_config", None) or {}
    return found if isinstance(found, dict) else vars(found)


def _are_fp8(about: dict[str, Any]) -> bool:
    """True if all weights of compressed-tensors are FP8 codes with scales for a weight, its rows or its blocks."""
    groups = [group.get("weights") or {} for group in about.get("config_groups", {}).values()]
    kinds = {(of.get("type"), of.get("num_bits"), of.get("symmetric", True)) for of in groups}
    is_dense = (about.get("sparsity_config") or {}).get("format", "dense") == "dense"
    is_fp8 = about.get("format") in ("float-quantized", "naive-quantized") and kinds == {("float", 8, True)}
    return is_dense and is_fp8 and all(of.get("strategy") in ("tensor", "channel", "block") for of in groups)


def of_powers(scales: Tensor) -> Tensor:
    """Return scales that are stored as exponents of two in bytes (E8M0) as what they stand for, others as they are."""
    return scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales


@functools.cache
def _register() -> None:
    """Make EXACT a quantization method of transformers, once."""
    transformers = load_extra("transformers", "hf", "model.dequantize")
    auto = load_extra("transformers.quantizers.auto", "hf", "model.dequantize")
    fp8 = load_extra("transformers.integrations.finegrained_fp8", "hf", "model.dequantize")
    loading = load_extra("transformers.core_model_loading", "hf", "model.dequantize")
    quantizer = load_extra("transformers.quantizers.quantizer_finegrained_fp8", "hf", "model.dequantize")

    @auto.register_quantization_config(EXACT)
    class ExactConfig(transformers.FineGrainedFP8Config):  # type: ignore[name-defined]
        def __init__(self, keep_codes: bool = False, **options: Any) -> None:
            super().__init__(**options)
            self.keep_codes = keep_codes

    class ExactDequantize(fp8.Fp8Dequantize):  # type: ignore[name-defined]
        def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
            for key, value in input_dict.items():
                first = value[0] if isinstance(value, list) else value
                is_scale = key.endswith(("_scale_inv", "activation_scale")) or f"{key}_scale_inv" in input_dict
                require(
                    is_scale or first.itemsize > 1, f"{options.get('full_layer_name', key)} has codes and no scales"
                )
            name = str(options.get("full_layer_name"))
            if name in self.hf_quantizer.frozen and "weight_scale_inv" in input_dict:
                codes, scales = (input_dict[key][0] for key in ("weight", "weight_scale_inv"))
                dtype = self._get_target_dtype(options["model"], name)
                weight = FrozenWeight.from_blocks(codes, of_powers(scales), dtype)
                if weight is not None:
                    return {name: weight}
            return super().convert(input_dict, **options)

        def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: Any = None) -> Tensor:
            scales = of_powers(scales)
            block = self.hf_quantizer.quantization_config.weight_block_size
            if quantized.dtype == torch.int8:  # experts of DeepSeek-V4: pairs of E2M1
                quantized, block = self._unpack_fp4(quantized), (1, 32)
            return dequantize(quantized, scales, block and tuple(block)).to(output_dtype or torch.bfloat16)

    @auto.register_quantizer(EXACT)
    class ExactQuantizer(quantizer.FineGrainedFP8HfQuantizer):  # type: ignore[name-defined]
        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            super()._process_model_before_weight_loading(model, **options)
            self.frozen = linear_weights(model) if self.quantization_config.keep_codes else set()

        def get_load_operations(self) -> dict[str, Any]:
            return {"dequantize": ExactDequantize}

        def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
            of_compressed = loading.WeightRenaming(r"\.weight_scale$", ".weight_scale_inv")
            return [of_compressed, *super().update_weight_conversions(weight_conversions, model)]
