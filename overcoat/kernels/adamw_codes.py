"""Device functions of the optimizer kernel: `overcoat.formats.moments`, `log8` and `masters` in Triton, bit for bit.

Each docstring names the PyTorch function that it equals, where the formulas are explained. Compiled without
contraction: FMAs are used only where `fma` is called. A tile is (GROUPS, G) FP32, a group's statistics (GROUPS,).
"""

from __future__ import annotations

from overcoat.formats import log8, masters, moments
from overcoat.kernels.instructions import (
    add_remainder,
    byte_of,
    exp2,
    fma,
    log2,
    log2_magnitude,
    reciprocal,
    root_with_sign,
    rsqrt,
    second_byte,
    second_byte_flipped,
    signed_root,
    sqrt,
    to_bfloat16,
    to_float8,
    to_float32,
)
from overcoat.kernels.language import tl, triton

_ROUND = tl.constexpr(log8.ROUND)
_FIXED = tl.constexpr(moments.FIXED)
_SMALLEST = tl.constexpr(moments.SQRT8_SMALLEST)
_DITHERED = tl.constexpr(moments.SQRT8_DITHERED)
_GOLDEN = tl.constexpr(masters.GOLDEN)
_SILVER = tl.constexpr(masters.SILVER)
_TINY = tl.constexpr(moments.FLOAT32_TINY)
_LARGEST_INVERSE = tl.constexpr(moments.LARGEST_INVERSE)
_ROUND_BITS = tl.constexpr(0x4B400000)  # of ROUND


@triton.jit
def normalize(x, amax):
    """`expansion.normalize`; amax per group."""
    scale = tl.where(amax < 2.0**-62, 2.0**64, tl.where(amax > 2.0**62, 2.0**-64, 1.0))
    inverse = tl.where(amax > 0.0, reciprocal(amax * scale), 0.0)
    return (x * scale[:, None]) * inverse[:, None]


@triton.jit
def copysign(magnitude, sign):
    """torch.copysign for a magnitude >= 0."""
    bits = magnitude.to(tl.int32, bitcast=True) | (sign.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reference_log2(amax):
    """`expansion.reference_log2`."""
    return tl.where(amax >= _TINY, log2(amax), 0.0)


@triton.jit
def exponent_of_range(amax, smallest, RANGE_16: tl.constexpr):
    """`expansion.exponent_of_range`, as int32; RANGE_16 = 16 log2(R_format)."""
    octaves = tl.maximum(reference_log2(amax) - log2(smallest), 0.0)
    steps = tl.floor(reciprocal(octaves) * RANGE_16)
    steps = tl.minimum(tl.maximum(steps, 1.0), 255.0)
    return tl.where(amax > 0.0, steps, 16.0).to(tl.int32)


@triton.jit
def expand(x, amax, k16, SIGNED: tl.constexpr):
    """`expansion.expand`; amax and k16 (int32) per group. SIGNED: some x may be negative."""
    exponent = (k16.to(tl.float32) * 0.0625)[:, None]
    y = exp2((log2_magnitude(x) - reference_log2(amax)[:, None]) * exponent)
    return copysign(y, x) if SIGNED else y


@triton.jit
def contract(z, k16, SIGNED: tl.constexpr):
    """`expansion.contract`. SIGNED: some z may be negative."""
    exponent = (reciprocal(k16.to(tl.float32)) * 16.0)[:, None]
    x = exp2(log2_magnitude(z) * exponent)
    return copysign(x, z) if SIGNED else x


@triton.jit
def decode_unit(codes, table, CODE: tl.constexpr):
    """`moments._decode_unit`; table: the 256 values of DE8."""
    if CODE == "de8":
        return tl.load(table + codes.to(tl.int32))
    elif CODE == "e4m3":
        return codes.to(tl.float32) * (1.0 / 448.0)
    else:
        return codes.to(tl.float32) * (1.0 / 57344.0)


@triton.jit
def encode_de8(y, de8):
    """`de8.encode`: binary search for the number of midpoints <= y, then that value's byte.

    de8: 256 values, 256 midpoints, 256 bytes in ascending order of value.
    """
    rank = tl.zeros(y.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):
        candidate = rank + (1 << bit)
        rank = tl.where(tl.load(de8 + 255 + candidate) <= y, candidate, rank)
    return tl.load(de8 + 512 + rank).to(tl.int32)


@triton.jit
def decay_ratio8(codes, amax, value, beta, addend):
    """`moments.decay` of ratio8; value: `log8_value`."""
    root = to_float32(codes)
    return fma(root * tl.abs(root) * sqrt(value), ((amax * beta) * (1.0 / 16129.0))[:, None], addend)


@triton.jit
def decay(codes, amax, k16, beta, addend, table, CODE: tl.constexpr, EXPANDED: tl.constexpr, SIGNED: tl.constexpr):
    """`moments.decay`, but for ratio8 and log8; amax FP32, k16 int32 per group."""
    if CODE == "fp32" or CODE == "bf16":
        return fma(to_float32(codes), beta, addend)
    elif CODE == "sqrt8":
        root = to_float32(codes)
        return fma(root * tl.abs(root), ((amax * beta) * (1.0 / 16129.0))[:, None], addend)
    else:
        z = decode_unit(codes, table, CODE)
        if EXPANDED:
            z = contract(z, k16, SIGNED)
        return fma(z, (amax * beta)[:, None], addend)


@triton.jit
def log8_step(bits, shape):
    """`log8.step_bits`."""
    limit = (bits.to(tl.uint32, bitcast=True) // 255).to(tl.int32, bitcast=True)
    return tl.minimum((16 + (shape & 15)) << ((shape >> 4) + 5), limit)


@triton.jit
def log8_value(codes, packed):
    """`log8.level_value`; packed int32 per group."""
    bits = packed & -256
    step = log8_step(bits, packed & 255)
    value = (bits - 255 * step)[:, None] + codes.to(tl.int32) * step[:, None]
    return value.to(tl.float32, bitcast=True)


@triton.jit
def decay_second(codes, packed, beta, addend, table, CODE: tl.constexpr, EXPANDED: tl.constexpr):
    """`moments.decay` of v; packed int32 per group."""
    bits = packed & -256
    shape = packed & 255
    if CODE == "log8":
        return fma(tl.where(codes.to(tl.int32) > 0, log8_value(codes, packed), 0.0), beta, addend)
    else:
        return decay(codes, bits.to(tl.float32, bitcast=True), shape, beta, addend, table, CODE, EXPANDED, False)


@triton.jit
def encode_sqrt8(root, amax, addend):
    """`moments._encode_sqrt8`, int8, of signed roots."""
    factor = tl.where(amax >= _TINY, reciprocal(sqrt(amax)) * 127.0, 0.0)
    return second_byte(fma(root, factor[:, None], addend))


@triton.jit
def addend_of_first(x, amax, random, dithered_below):
    """The addend of `moments._encode_first_sqrt8`."""
    is_odd = ((tl.arange(0, x.shape[1]) & 1) == 1)[None, :]
    even = (random.to(tl.uint32, bitcast=True) >> 24).to(tl.float32) * 0.00390625
    dithered = tl.where(is_odd, (0.99609375 - even)[:, None], even[:, None]) + _FIXED
    nearest = tl.where(is_odd, 0.49609375, 0.5) + _FIXED
    return tl.where(tl.abs(x) < (amax * dithered_below)[:, None], dithered, nearest)


@triton.jit
def smallest_positive(x):
    """`expansion.smallest_positive` per group, for x >= 0."""
    return tl.min(tl.where(x > 0.0, x, float("inf")), 1)


@triton.jit
def store_wide(x, TYPE: tl.constexpr, POSITIVE: tl.constexpr):
    """A moment as "fp32" or "bf16"; with POSITIVE, `moments._never_zero`: BF16 lacks FP32's smallest denormals."""
    if tl.float32 == TYPE:
        return x
    elif POSITIVE:
        bits = to_bfloat16(x).to(tl.int16, bitcast=True)
        return tl.where((x > 0.0) & (bits == 0), 1, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return to_bfloat16(x)


@triton.jit
def encode_first(
    x, random, value, dithered_below, de8,
    CODE: tl.constexpr, EXPANDED: tl.constexpr, RANGE_16: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`moments.encode_first`: (codes, amax BF16, k16 int32) of a tile; random int32 per group. value: v as it is
    stored; dithered_below: `moments.dithered_below`."""
    if CODE == "ratio8":
        x = x * tl.minimum(rsqrt(value), _LARGEST_INVERSE)
    bits = tl.minimum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True), 0x7F7F0000)
    exact = bits.to(tl.float32, bitcast=True)
    amax = upper_half(bits + (random & 0xFFFF))
    stored = amax.to(tl.float32)
    k16 = tl.full(stored.shape, 16, tl.int32)
    if CODE == "bf16" or CODE == "fp32":
        return store_wide(x, TYPE, False), amax, k16
    elif CODE == "sqrt8":
        root = signed_root(x, (stored * _SMALLEST)[:, None])
        return encode_sqrt8(root, stored, addend_of_first(x, stored, random, _DITHERED)), amax, k16
    elif CODE == "ratio8":
        addend = addend_of_first(x, stored, random, dithered_below)
        return encode_sqrt8(root_with_sign(x), stored, addend), amax, k16
    else:
        if EXPANDED:
            k16 = exponent_of_range(exact, smallest_positive(tl.abs(x)), RANGE_16)
            y = expand(x, exact, k16, True)
        else:
            y = normalize(x, exact)
        if CODE == "de8":
            return encode_de8(y, de8).to(tl.uint8), amax, k16
        elif CODE == "e4m3":
            return to_float8(y * 448.0, tl.float8e4nv, 3, -9), amax, k16
        else:
            return to_float8(y * 57344.0, tl.float8e5, 2, -16), amax, k16


@triton.jit
def packed_maximum(amax, random):
    """`moments.packed_maximum`; random int32."""
    bits = amax.to(tl.int32, bitcast=True)
    rounded = tl.maximum(tl.minimum(bits, 0x7F7FFF00) + (random & 255), 256)
    return tl.where(bits > 0, tl.minimum(rounded, 0x7F7FFF00), 0) & -256


@triton.jit
def encode_log8(x, bits, phase):
    """`log8.encode`: (uint8 codes, shape byte int32, `log8.level_value` of them)."""
    x_bits = x.to(tl.int32, bitcast=True)
    # The smallest positive value: minimum of bits - 1 as unsigned numbers, of which zeros become the largest.
    smallest = tl.min((x_bits - 1).to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True) + 1
    span = tl.maximum(bits - tl.where(bits > 0, smallest, 0), 0)
    needed = ((span + 253).to(tl.uint32, bitcast=True) // 254).to(tl.int32, bitcast=True).to(tl.float32)
    shape = tl.maximum(((needed.to(tl.int32, bitcast=True) + 0x7FFFF) >> 19) - 2176, 1)
    step = tl.where(bits > 0, log8_step(bits, shape), 1)
    origin = tl.where(bits > 0, bits, 1073741824)
    moved = ((((phase >> 24) & 255) * 2 - 255) * tl.maximum(step - 512, 0)) >> 9
    is_odd = ((tl.arange(0, x.shape[1]) & 1) == 1)[None, :]
    origin = tl.where(is_odd, (origin - moved)[:, None], (origin + moved)[:, None])
    distance = tl.minimum(origin - x_bits, (255 * step)[:, None]).to(tl.float32)
    level = fma(distance, -reciprocal(step.to(tl.float32))[:, None], _ROUND + 255.0).to(tl.int32, bitcast=True)
    step = log8_step(bits, shape)  # 0 in an all-zero group
    # `level` holds the level plus the bits of ROUND; the second term subtracts ROUND's share of the product.
    value = level * step[:, None] + (bits - (255 + _ROUND_BITS) * step)[:, None]
    return level.to(tl.uint8), shape, value.to(tl.float32, bitcast=True)


@triton.jit
def encode_second(
    x, random, phase, de8,
    CODE: tl.constexpr, EXPANDED: tl.constexpr, RANGE_16: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`moments.encode_second`: (codes, packed int32, v as log8 stores it) of a tile; v > 0 never becomes 0. random,
    phase: int32 per group."""
    bits = packed_maximum(tl.max(x, 1), random >> 16)
    if CODE == "bf16" or CODE == "fp32":
        return store_wide(x, TYPE, True), bits, x
    elif CODE == "log8":
        bits = tl.where(bits < 262144, 0, bits)
        codes, shape, value = encode_log8(x, bits, phase)
        return codes, bits | shape, value
    else:
        stored = bits.to(tl.float32, bitcast=True)
        if CODE == "sqrt8":
            codes = encode_sqrt8(root_with_sign(tl.minimum(x, stored[:, None])), stored, _FIXED + 0.5)
            return tl.where((x > 0.0) & (codes == 0), 1, codes).to(tl.int8), bits, x
        else:
            shape = tl.zeros(bits.shape, tl.int32)
            if EXPANDED:
                shape = exponent_of_range(stored, smallest_positive(x), RANGE_16)
                y = expand(x, stored, shape, False)
            else:
                y = normalize(x, stored)
            if CODE == "de8":
                codes = encode_de8(y, de8)
                return tl.where((x > 0.0) & (codes == 0), 1, codes).to(tl.uint8), bits | shape, x
            elif CODE == "e4m3":
                y = tl.where(x > 0.0, tl.maximum(y * 448.0, 0.001953125), 0.0)
                return to_float8(y, tl.float8e4nv, 3, -9), bits | shape, x
            else:
                y = tl.where(x > 0.0, tl.maximum(y * 57344.0, 1.52587890625e-05), 0.0)
                return to_float8(y, tl.float8e5, 2, -16), bits | shape, x


# ---- master weights -------------------------------------------------------------------------------------------


@triton.jit
def mix(x):
    """`masters.mix` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def group_bits(key, step, group):
    """`masters.group_bits`, int32 per group."""
    start = (key + step.to(tl.int32) * _GOLDEN).to(tl.uint32, bitcast=True)
    return mix(mix(start) ^ group.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def phase_bits(key, step, group):
    """`masters.phase_bits`, int32 per group."""
    return (key + step.to(tl.int32) * _GOLDEN) + group * _SILVER


@triton.jit
def random_bits(group, lane, BITS: tl.constexpr):
    """`masters.random_bits`: int32 below 2^BITS, (GROUPS, G); group: `group_bits`."""
    shared = lane // (32 // BITS)  # 32 / BITS consecutive elements, all in one thread, share a hash
    x = mix((group[:, None] + (shared * _GOLDEN)[None, :]).to(tl.uint32, bitcast=True))
    if BITS == 8:
        return byte_of(x, (lane & 3)[None, :])
    else:
        return (x >> ((lane & 1) * 16)[None, :]).to(tl.int32, bitcast=True) & 0xFFFF


@triton.jit
def decode_master(param, remainder, MASTER: tl.constexpr):
    """`masters.decode_master`."""
    if MASTER == "bf16+8":
        return add_remainder(param, remainder)
    elif MASTER == "bf16+16":
        bits = to_float32(param).to(tl.int32, bitcast=True)
        size = tl.maximum((bits & 0x7FFFFFFF) + remainder.to(tl.int32), 0)
        return (size | (bits & -2147483648)).to(tl.float32, bitcast=True)
    else:
        return to_float32(param)


@triton.jit
def encode_master(value, random, MASTER: tl.constexpr):
    """`masters.encode_master`: (parameter, remainder); the remainder is meaningless for "fp32" and "bf16"."""
    bits = tl.minimum(value.to(tl.int32, bitcast=True), 0x7FC00000)
    if MASTER == "fp32":
        return value, bits
    elif MASTER == "bf16":
        return upper_half(bits + random), bits
    elif MASTER == "bf16+16":
        return upper_half(bits + 0x8000), bits.to(tl.int16)
    else:
        # 0x8000, the parameter's rounding, is added for both, so the remainder's highest bit comes out inverted.
        bits = bits + random + 0x8000
        return upper_half(bits), second_byte_flipped(bits)


@triton.jit
def upper_half(bits):
    """The BF16 in the upper half of FP32 bits."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
