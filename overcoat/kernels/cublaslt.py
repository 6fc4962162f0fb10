"""cuBLASLt by its C interface, for another of its kernels than the one that PyTorch takes, and for bias and residual.

cuBLASLt recommends, of some eight kernels, the one that is fastest on a cool GPU, and `torch._scaled_mm` takes it. In
training an H200 draws its 700 W and lowers its clock: there 192 x 192 tiles, the first choice for wide results, take 6%
longer for a 7B's gate and up than 168 x 128. All kernels that do not split K return the same bits. So the choice is by
a model of the time, fitted on hot H200s for K from 2,048 to 38,000 and 4,096 to 16,384 rows (docs/research/kernels.md):

    time = waves * area * (per_product + per_tile * 4096 / K)

waves: how often all multiprocessors get a tile, the last, unfinished round counted whole; area of a tile. What is per
tile (its epilogue) counts less the longer K is. It takes 2.3% off a block of Llama-2-7B.

cuBLASLt is column-major: D = A @ B^T in rows is D^T = B @ A^T in columns. So B, a column-major (K, N) matrix, is its
first operand, transposed, and A its second. Source: cublasLt.h of CUDA 12 and 13, whose numbers the constants repeat.

Legend: M rows, N columns of the result, K the contracted axis; all of row-major D = A @ B^T.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import Structure, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from overcoat.kernels.launch import cdiv


class Tile(NamedTuple):
    """A kernel's tile of the result, and how many tiles of a cluster lie side by side in either direction."""

    columns: int
    rows: int
    across: int
    down: int
    per_product: float
    per_tile: float


# The shortest K that was measured.
SHORTEST = 2048
# By cuBLASLt's numbers of the tile and of the cluster's shape (cublasLtMatmulTile_t, cublasLtClusterShape_t).
TILES = {
    (24, 5): Tile(256, 128, 1, 2, 1.000, 0.000),
    (29, 3): Tile(128, 160, 2, 1, 1.018, -0.024),
    (197, 5): Tile(168, 128, 1, 2, 1.015, -0.033),
    (201, 5): Tile(176, 128, 1, 2, 0.997, -0.027),
}


def relative_time(tile: Tile, rows: int, columns: int, inner: int, processors: int) -> float:
    """Time of D (rows, columns) with this tile, in units that are the same for all tiles; inner: K."""
    across = cdiv(cdiv(columns, tile.columns), tile.across) * tile.across
    down = cdiv(cdiv(rows, tile.rows), tile.down) * tile.down
    waves = cdiv(across * down, processors)
    return waves * tile.columns * tile.rows * (tile.per_product + tile.per_tile * 4096 / inner)


def choose(offered: Sequence[tuple[int, int]], rows: int, columns: int, inner: int, processors: int) -> int:
    """The place of the fastest kernel in `offered`, (tile, cluster) in the order of cuBLASLt's recommendation.

    The first one where the result is small (less than two rounds of large tiles: tails decide there, which the model
    does not know), where K is shorter than any that was measured, and where none of `TILES` is offered.
    """
    if rows * columns < 2 * processors * 256 * 128 or inner < SHORTEST:
        return 0
    places = [place for place, key in enumerate(offered) if key in TILES]
    return min(places, key=lambda i: relative_time(TILES[offered[i]], rows, columns, inner, processors), default=0)


# ---- the library -----------------------------------------------------------------------------------------------------

# What PyTorch allows on Hopper too unless told otherwise, so that the library makes the same offers; kernels asked for.
MAX_WORKSPACE, MAX_OFFERS = 32 * 2**20, 16
# A large product's workspace is 4 bytes, the counter by which its programs share the tiles out.
KEPT_WORKSPACE = 512
# Bytes that all addresses of a plan are multiples of: as the allocator gives them.
ALIGNMENT = 256
# cudaDataType_t
_TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
# cublasLtMatmulDescAttributes_t; cublasLtMatmulAlgoConfigAttributes_t
_TRANSA, _EPILOGUE, _BIAS_POINTER, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 3, 7, 8, 17, 18, 25
_EPILOGUE_BIAS = 4  # cublasLtEpilogue_t
_TILE_ID, _SPLITK_NUM, _CLUSTER_SHAPE_ID = 1, 2, 8
_ONE, _ZERO = byref(c_float(1.0)), byref(c_float(0.0))


class _Offer(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("rest", c_int * 4)
    ]  # fmt: skip


@functools.cache
def library() -> Optional[Any]:
    """The cuBLASLt that this PyTorch has loaded, or None where there is none."""
    try:
        lib = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    except OSError:
        return None
    lib.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
    lib.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    return lib


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"cuBLASLt: {name} failed with status {status} (cublasStatus_t)")


@functools.cache
def _handle(device: int) -> c_void_p:
    """The library's handle of a GPU; made once and kept."""
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


@functools.cache
def _workspace(device: int) -> Tensor:
    return torch.empty(KEPT_WORKSPACE, dtype=torch.uint8, device=torch.device("cuda", device))


def _config(offer: _Offer, attribute: int) -> int:
    value, written = c_int(), c_size_t()
    size = c_size_t(2 if attribute == _CLUSTER_SHAPE_ID else 4)
    get = library().cublasLtMatmulAlgoConfigGetAttribute  # type: ignore[union-attr]
    return value.value if get(byref(offer.algorithm), attribute, byref(value), size, byref(written)) == 0 else -1


class Plan:
    """A product's descriptor, layouts and offered kernels. place: of the chosen one, 0: PyTorch takes the same."""

    def __init__(
        self, device: int, rows: int, columns: int, inner: int, a: torch.dtype, b: torch.dtype, fast: bool, biased: bool
    ) -> None:
        lib = library()
        assert lib is not None
        self.lib = lib
        self.handle, self.descriptor, self.lock = _handle(device), c_void_p(), threading.Lock()
        self.columns, self.layouts = columns, [c_void_p() for _ in range(3)]
        self.addresses = (c_uint64 * 3)()  # of scales and bias, on their way into the descriptor
        self.pointers = [_A_SCALE_POINTER, _B_SCALE_POINTER, _BIAS_POINTER][: 2 + biased]
        _call("cublasLtMatmulDescCreate", byref(self.descriptor), 68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        settings = [(_TRANSA, c_int(1)), (_FAST_ACCUM, c_int8(fast)), (_EPILOGUE, c_int(_EPILOGUE_BIAS))]
        for attribute, value in settings[: 2 + biased]:
            size = ctypes.sizeof(value)
            _call("cublasLtMatmulDescSetAttribute", self.descriptor, attribute, byref(value), size)
        shapes = ((b, inner, columns), (a, inner, rows), (torch.bfloat16, columns, rows))
        for layout, (kind, height, width) in zip(self.layouts, shapes, strict=True):
            sizes = c_uint64(height), c_uint64(width), c_int64(height)
            _call("cublasLtMatrixLayoutCreate", byref(layout), _TYPES[kind], *sizes)
        preference, count, offers = c_void_p(), c_int(), (_Offer * MAX_OFFERS)()
        first, second, result = self.layouts
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        most = c_uint64(MAX_WORKSPACE)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
        _call("cublasLtMatmulPreferenceSetAttribute", preference, 1, byref(most), c_size_t(8))
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.descriptor, first, second, result, result, preference, MAX_OFFERS, offers, byref(count)
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        self.offers = [offer for offer in offers[: count.value] if status == offer.state == 0]
        kinds = [
            (_config(offer, _TILE_ID), _config(offer, _CLUSTER_SHAPE_ID))
            if _config(offer, _SPLITK_NUM) == 1
            else (-1, -1)
            for offer in self.offers
        ]
        processors, self.place = torch.cuda.get_device_properties(device).multi_processor_count, 0
        if self.offers:
            self.take(choose(kinds, rows, columns, inner, processors))

    def take(self, place: int) -> None:
        """Choose the kernel at a place in `offers`."""
        self.place, offer = place, self.offers[place]
        self.algorithm, self.workspace = byref(offer.algorithm), offer.workspace

    def run(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, device: int, bias: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
    ) -> Tensor:  # fmt: skip
        """(a @ b^T) * scale_a * scale_b in BF16, plus bias, if the plan is of one, and residual, if given."""
        lib, descriptor, (first, second, result) = self.lib, self.descriptor, self.layouts
        out = a.new_empty(a.shape[0], self.columns, dtype=torch.bfloat16)
        stream = torch._C._cuda_getCurrentRawStream(device)
        # The default stream's is kept. Not that of others: what is allocated for a graph nobody may keep.
        is_kept = stream == 0 and self.workspace <= KEPT_WORKSPACE
        workspace = _workspace(device) if is_kept else a.new_empty(self.workspace, dtype=torch.uint8)
        place, describe = out.data_ptr(), lib.cublasLtMatmulDescSetAttribute
        beta, added = (_ZERO, place) if residual is None else (_ONE, residual.data_ptr())
        # The call copies the descriptor; until then no other thread may write its own addresses into it.
        with self.lock:
            self.addresses[0], self.addresses[1] = scale_b.data_ptr(), scale_a.data_ptr()
            if bias is not None:
                self.addresses[2] = bias.data_ptr()
            status = 0
            for number, attribute in enumerate(self.pointers):
                status = status or describe(descriptor, attribute, byref(self.addresses, 8 * number), 8)
            status = status or lib.cublasLtMatmul(
                self.handle, descriptor, _ONE, b.data_ptr(), first, a.data_ptr(), second, beta, added, result, place,
                result, self.algorithm, workspace.data_ptr(), self.workspace, stream,
            )  # fmt: skip
        if status:
            raise RuntimeError(f"cuBLASLt: cublasLtMatmul failed with status {status} (cublasStatus_t)")
        return out

    def __del__(self) -> None:
        for layout in self.layouts:
            self.lib.cublasLtMatrixLayoutDestroy(layout)
        self.lib.cublasLtMatmulDescDestroy(self.descriptor)


# A new number of tokens is a new plan, hence a bound.
@functools.lru_cache(maxsize=4096)
def plan(
    device: int, rows: int, columns: int, inner: int, a: torch.dtype, b: torch.dtype, fast: bool, biased: bool
) -> Optional[Plan]:
    """Return the measured kernel of a GEMM into BF16 on Hopper, arguments as of `gemm`; None if there is none."""
    is_small = rows * columns * inner == 0 or (columns | inner) % 16
    if is_small or not fast or torch.cuda.get_device_capability(device)[0] != 9 or library() is None:
        return None
    made = Plan(device, rows, columns, inner, a, b, fast, biased)
    return made if made.offers else None
