"""The 8-bit formats in plain PyTorch: FP8 operands, codes of saved tensors, and optimizer states.

float8      FP8 with one scale per tensor or block: GEMM operands
groups      8-bit codes of 1xG groups: tensors saved for the backward; bf12: 12-bit codes of q and k
moments     codes of AdamW's moments; their parts: de8, log8, expansion
masters     master weights with more bits than BF16
bits        eight flags in a byte
"""

from overcoat.formats.float8 import (
    E4M3,
    E5M2,
    FLOAT8,
    Float8,
    Quantized,
    cast_float8,
    decode_float8,
    dequantize_blocks,
    quantize_blocks,
    quantize_tensor,
    scale_blocks,
    scale_from_amax,
)
from overcoat.formats.groups import (
    AMAX_FLOOR,
    GROUP_CODES,
    GroupCode,
    decode_groups,
    empty_groups,
    encode_groups,
    from_groups,
    group_code,
    to_groups,
)
