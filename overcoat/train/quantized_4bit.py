"""bitsandbytes' 4-bit checkpoints (NF4, FP4; arXiv 2305.14314): their weights as transformers reads them, made plain.

    X.weight                       codes, two in a byte, the first in the higher half, of the flattened weight
    X.weight.quant_map             (16,) the values of the codes
    X.weight.absmax                what blocks of consecutive values are multiplied by: FP32, or with double
                                   quantization 8-bit codes, of values in nested_quant_map (256,), times nested_absmax
                                   of their blocks, plus nested_offset
    X.weight.quant_state.bitsandbytes__nf4 (or fp4)   JSON in bytes: shape, blocksize, nested_blocksize, nested_offset

The files have all values, so the package bitsandbytes is not needed.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from overcoat.extras import load_extra
from overcoat.kernels.launch import cdiv
from overcoat.train.config import require

NAME = "overcoat_4bit"  # of the method among transformers' quantization methods
STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
COMPANIONS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *STATES)


def decode(codes: Tensor, companions: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of 4-bit codes, fp32, in its shape; companions: by what follows the weight's name. ValueError:
    its quant_state or its scales are missing, or they are not as many as it says."""
    states = [companions[name] for name in STATES if name in companions]
    require(len(states) == 1, "4-bit codes without their quant_state")
    about = json.loads(bytes(states[0].tolist()))
    pairs, count = codes.flatten().view(torch.uint8), math.prod(about["shape"])
    require(len(pairs) == cdiv(count, 2), f"{len(pairs)} bytes of 4-bit codes for {count} weights")
    places = torch.stack([pairs >> 4, pairs & 15], 1).flatten()[:count]
    top = companions["absmax"]
    if "nested_blocksize" in about:
        nested = _for_each(companions["nested_absmax"], about["nested_blocksize"], len(top))
        top = companions["nested_quant_map"][top.int()] * nested + about["nested_offset"]
    values = companions["quant_map"][places.int()]
    return values.mul_(_for_each(top, about["blocksize"], count)).view(about["shape"])


def _for_each(scales: Tensor, block: int, count: int) -> Tensor:
    """Return the scale of each of `count` values, of consecutive blocks."""
    fits = scales.is_floating_point() and len(scales) == cdiv(count, block)
    require(fits, f"{len(scales)} scales in {scales.dtype} for {count} values in blocks of {block}")
    return scales.repeat_interleave(block)[:count]


@functools.cache
def register() -> None:
    """Make NAME a quantization method of transformers, once."""
    auto = load_extra("transformers.quantizers.auto", "hf", "model.dequantize")
    base = load_extra("transformers.quantizers.base", "hf", "model.dequantize")
    loading = load_extra("transformers.core_model_loading", "hf", "model.dequantize")
    config = load_extra("transformers.utils.quantization_config", "hf", "model.dequantize")

    @auto.register_quantization_config(NAME)
    class FourBitConfig(config.QuantizationConfigMixin):  # type: ignore[name-defined]
        def __init__(self, **_: Any) -> None:
            self.quant_method, self.dequantize = NAME, True

    class Decode(loading.ConversionOps):  # type: ignore[name-defined]
        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(
            self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **_: Any
        ) -> dict[str, Any]:
            """Return the weights of an operation's tensors, each name's with as many as it had."""
            dtype, made = model.get_parameter_or_buffer(full_layer_name).dtype, {}
            lists = {key: value if isinstance(value, list) else [value] for key, value in input_dict.items()}
            for key in [key for key in lists if not key.endswith(COMPANIONS)]:
                around: list[dict[str, Tensor]] = [{} for _ in lists[key]]
                for name in COMPANIONS:
                    for companions, each in zip(around, lists.get(f"{key}.{name}", ()), strict=False):
                        companions[name] = each
                weights = [decode(*each) if each[1] else each[0] for each in zip(lists[key], around, strict=True)]
                require(all(each.is_floating_point() for each in weights), f"{full_layer_name} has codes alone")
                made[full_layer_name if key == "weight" else key] = [each.to(dtype) for each in weights]
            return made

        @property
        def reverse_op(self) -> Any:
            return loading._IdentityOp()  # saved plain

    @auto.register_quantizer(NAME)
    class FourBitQuantizer(base.HfQuantizer):  # type: ignore[name-defined]
        serialized_names = {"weight": ["weight", *(f"weight.{name}" for name in COMPANIONS)]}  # noqa: RUF012
        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def get_load_operations(self) -> dict[str, Any]:
            return {"dequantize": Decode}
