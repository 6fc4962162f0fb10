"""FP8 GEMMs through cuBLASLt's C interface: choose a faster kernel than PyTorch does, and fuse bias and residual.

cuBLASLt ranks about eight kernels by their speed on a cool GPU, and `torch._scaled_mm` takes the first. In training an
H200 reaches its 700 W and lowers its clock: then 192 x 192 tiles, the first choice for wide results, take 6% longer for
a 7B's gate and up than 168 x 128. All kernels that do not split K return the same bits. So the kernel is chosen by a
model of the time, fitted on hot H200s for K from 2,048 to 38,000 and 4,096 to 16,384 rows (docs/research/kernels.md):

    time = waves * area * (per_product + per_tile * 4096 / K)

waves: rounds of one tile per multiprocessor, an unfinished round counted whole; area of a tile. The cost per tile (its
epilogue) matters less the longer K is. This takes 2.3% off a block of Llama-2-7B.

cuBLASLt is column-major: a row-major D = A @ B^T is a column-major D^T = B @ A^T. So B, a column-major (K, N) matrix,
is its first operand, transposed, and A its second. The constants are those of cublasLt.h, CUDA 12 and 13.

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
    """A kernel's tile of the result, the shape of its cluster in tiles, and its fitted times."""

    columns: int
    rows: int
    across: int
    down: int
    per_product: float
    per_tile: float


# The shortest K measured.
SHORTEST = 2048
# By cuBLASLt's numbers of the tile and of the cluster's shape (cublasLtMatmulTile_t, cublasLtClusterShape_t).
TILES = {
    (24, 5): Tile(256, 128, 1, 2, 1.000, 0.000),
    (29, 3): Tile(128, 160, 2, 1, 1.018, -0.024),
    (197, 5): Tile(168, 128, 1, 2, 1.015, -0.033),
    (201, 5): Tile(176, 128, 1, 2, 0.997, -0.027),
}


def relative_time(tile: Tile, rows: int, columns: int, inner: int, processors: int) -> float:
    """Return the modelled time of D (rows, columns) with a tile, in a unit common to all tiles; inner: K."""
    across = cdiv(cdiv(columns, tile.columns), tile.across) * tile.across
    down = cdiv(cdiv(rows, tile.rows), tile.down) * tile.down
    waves = cdiv(across * down, processors)
    return waves * tile.columns * tile.rows * (tile.per_product + tile.per_tile * 4096 / inner)


def choose(offered: Sequence[tuple[int, int]], rows: int, columns: int, inner: int, processors: int) -> int:
    """Return the index of the fastest kernel in `offered`, (tile, cluster) pairs in cuBLASLt's order.

    0 if the result is small (less than two waves of large tiles, where the model is inaccurate), if K is below
    `SHORTEST`, or if none of `TILES` is offered.
    """
    if rows * columns < 2 * processors * 256 * 128 or inner < SHORTEST:
        return 0
    places = [place for place, key in enumerate(offered) if key in TILES]
    return min(places, key=lambda i: relative_time(TILES[offered[i]], rows, columns, inner, processors), default=0)


# ---- the library -----------------------------------------------------------------------------------------------------

# PyTorch's default workspace on Hopper, so that the library offers the same kernels; and the most kernels to ask for.
MAX_WORKSPACE, MAX_OFFERS = 32 * 2**20, 16
# Bytes of workspace that stay allocated. A large GEMM needs 4: a counter by which its programs take tiles.
KEPT_WORKSPACE = 512
# All addresses of a plan are multiples of this many bytes, as the allocator returns them.
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
    """Return the cuBLASLt that this PyTorch has loaded, or None if there is none."""
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
    """Return the library's handle of a GPU, created once."""
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
    """A GEMM's descriptor, layouts and offered kernels. place: index of the chosen one; 0: PyTorch's choice."""

    def __init__(
        self, device: int, rows: int, columns: int, inner: int, a: torch.dtype, b: torch.dtype, fast: bool, biased: bool
    ) -> None:
        lib = library()
        assert lib is not None
        self.lib = lib
        self.handle, self.descriptor, self.lock = _handle(device), c_void_p(), threading.Lock()
        self.columns, self.layouts = columns, [c_void_p() for _ in range(3)]
        self.addresses = (c_uint64 * 3)()  # of scales and bias, copied from here into the descriptor
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
        """Choose the kernel at index `place` of `offers`."""
        self.place, offer = place, self.offers[place]
        self.algorithm, self.workspace = byref(offer.algorithm), offer.workspace

    def run(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, device: int, bias: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
    ) -> Tensor:  # fmt: skip
        """Return (a @ b^T) * scale_a * scale_b in BF16, plus bias, if the plan was made for one, plus residual."""
        lib, descriptor, (first, second, result) = self.lib, self.descriptor, self.layouts
        out = a.new_empty(a.shape[0], self.columns, dtype=torch.bfloat16)
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Only the default stream's workspace stays allocated: memory allocated for a CUDA graph must not.
        is_kept = stream == 0 and self.workspace <= KEPT_WORKSPACE
        workspace = _workspace(device) if is_kept else a.new_empty(self.workspace, dtype=torch.uint8)
        place, describe = out.data_ptr(), lib.cublasLtMatmulDescSetAttribute
        beta, added = (_ZERO, place) if residual is None else (_ONE, residual.data_ptr())
        # The call copies the descriptor; until then no other thread may write its addresses into it.
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


# Each number of tokens needs a plan of its own, hence a bound.
@functools.lru_cache(maxsize=4096)
def plan(
    device: int, rows: int, columns: int, inner: int, a: torch.dtype, b: torch.dtype, fast: bool, biased: bool
) -> Optional[Plan]:
    """Return the `Plan` of a GEMM into BF16 on Hopper; None elsewhere, or for sizes that cuBLASLt does not take.

    rows, columns, inner: M, N, K; a, b: dtypes; fast: as in `gemm`; biased: True if a bias is added.
    """
    is_small = rows * columns * inner == 0 or (columns | inner) % 16
    if is_small or not fast or torch.cuda.get_device_capability(device)[0] != 9 or library() is None:
        return None
    made = Plan(device, rows, columns, inner, a, b, fast, biased)
    return made if made.offers else None
