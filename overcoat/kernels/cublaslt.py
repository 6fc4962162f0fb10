"""cuBLASLt's FP8 product by its C interface: for the choice of its kernel, and to add the residual stream inside.

`torch._scaled_mm` calls the same function with the kernel that the library recommends, and cannot add a matrix. A
`Plan` holds what a shape of product needs (descriptor, layouts, the kernel chosen by `gemm_tiles`); it is made once per
shape, and run with pointers alone. PyTorch's setting for the workspace does not reach here; where it has been told to
leave multiprocessors free (its "carveout"), `kernels.gemm` calls PyTorch.

cuBLASLt is column-major: D = A @ B^T in rows is D^T = B @ A^T in columns. So B, a column-major (K, N) matrix, is its
first operand, transposed, and A its second.

Source: cublasLt.h of CUDA 12 and 13, whose numbers the constants repeat.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import Structure, byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, Optional

import torch
from torch import Tensor

from overcoat.kernels.gemm_tiles import choose

# What PyTorch allows on Hopper too unless told otherwise, so that the library makes the same offers.
MAX_WORKSPACE = 32 * 2**20
# Kernels asked for; eight are offered for a large product.
MAX_OFFERS = 16
# Plans remembered. A new number of tokens is a new plan, hence a bound.
MAX_PLANS = 4096
# A large product's workspace, the counter by which programs share the tiles out, is 4 bytes. Small ones are kept.
SMALL_WORKSPACE = 512

_DATA_TYPES = {  # cudaDataType_t
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F, _SCALE_32F, _TRANSPOSED, _EPILOGUE_BIAS = 68, 0, 1, 4
# cublasLtMatmulDescAttributes_t
_TRANSA, _EPILOGUE, _BIAS_POINTER, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM, _BIAS_DATA_TYPE = (
    3, 7, 8, 17, 18, 25, 26
)  # fmt: skip
# cublasLtMatmulPreferenceAttributes_t: bytes of workspace; alignment of A, B, C, D
_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
# cublasLtMatmulAlgoConfigAttributes_t
_TILE_ID, _SPLITK_NUM, _CLUSTER_SHAPE_ID = 1, 2, 8

_ONE, _ZERO = c_float(1.0), c_float(0.0)
_ALPHA = byref(_ONE)


class _Algorithm(Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Offer(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@functools.cache
def library() -> Optional[Any]:
    """The cuBLASLt that this PyTorch has loaded, or None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    address, number = c_void_p, c_int
    for name, types in {
        "cublasLtCreate": [address],
        "cublasLtMatmulDescCreate": [address, number, number],
        "cublasLtMatmulDescDestroy": [address],
        "cublasLtMatmulDescSetAttribute": [address, number, address, c_size_t],
        "cublasLtMatrixLayoutCreate": [address, number, c_uint64, c_uint64, c_int64],
        "cublasLtMatrixLayoutDestroy": [address],
        "cublasLtMatmulPreferenceCreate": [address],
        "cublasLtMatmulPreferenceDestroy": [address],
        "cublasLtMatmulPreferenceSetAttribute": [address, number, address, c_size_t],
        "cublasLtMatmulAlgoGetHeuristic": [*[address] * 7, number, address, address],
        "cublasLtMatmulAlgoConfigGetAttribute": [address, number, address, c_size_t, address],
        "cublasLtMatmul": [*[address] * 14, c_size_t, address],
    }.items():
        getattr(lib, name).argtypes = types
    return lib


@functools.cache
def is_available(device: int) -> bool:
    """Whether products run on this GPU (-1: the CPU): on Hopper, where the choice of kernels was measured."""
    return device >= 0 and torch.cuda.get_device_capability(device)[0] == 9 and library() is not None


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: {what} failed with status {status} (cublasStatus_t)")


@functools.cache
def _handle(device: int) -> c_void_p:
    """The library's handle of a GPU; made once and kept."""
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(byref(handle)), "cublasLtCreate")  # type: ignore[union-attr]
    return handle


class Plan:
    """A product's descriptor, layouts and kernel.

    alignment: of all pointers, bytes, at most 256. offers, kinds: what the library offers, and (tile, cluster) of each;
    place: the chosen one. Without any offer `is_possible` is False.
    """

    def __init__(
        self, device: int, rows: int, columns: int, inner: int, a: torch.dtype, b: torch.dtype, dtype: torch.dtype,
        fast_accumulation: bool, has_bias: bool, has_residual: bool, alignment: int,
    ) -> None:  # fmt: skip
        lib = library()
        assert lib is not None
        self.lib, self.descriptor, self.layouts = lib, c_void_p(), [c_void_p() for _ in range(3)]
        self.handle, self.lock = _handle(device), threading.Lock()
        self.set, self.multiply = lib.cublasLtMatmulDescSetAttribute, lib.cublasLtMatmul
        _check(lib.cublasLtMatmulDescCreate(byref(self.descriptor), _COMPUTE_32F, _SCALE_32F), "a descriptor")
        self._describe(_TRANSA, c_int32(_TRANSPOSED))
        self._describe(_FAST_ACCUM, c_int8(fast_accumulation))
        if has_bias:
            self._describe(_EPILOGUE, c_int32(_EPILOGUE_BIAS))
            self._describe(_BIAS_DATA_TYPE, c_int32(_DATA_TYPES[dtype]))
            # The library looks at the address for its alignment alone.
            self._describe(_BIAS_POINTER, c_uint64(alignment))
        shapes = ((b, inner, columns), (a, inner, rows), (dtype, columns, rows))
        for layout, (kind, height, width) in zip(self.layouts, shapes, strict=True):
            status = lib.cublasLtMatrixLayoutCreate(byref(layout), _DATA_TYPES[kind], height, width, height)
            _check(status, "a layout")
        self.beta = byref(_ONE if has_residual else _ZERO)
        # The scales' and the bias' addresses on their way into the descriptor.
        self.addresses = (c_uint64 * 3)()
        self.slots = [byref(self.addresses, 8 * i) for i in range(3)]
        self.offers = self._ask(alignment)
        self.kinds = [self._kind(offer) for offer in self.offers]
        self.place, self.is_possible = 0, bool(self.offers)
        if self.is_possible:
            if fast_accumulation:
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                self.place = choose(self.kinds, rows, columns, inner, processors)
            chosen = self.offers[self.place]
            self.algorithm, self.workspace = byref(chosen.algorithm), chosen.workspace

    def _describe(self, attribute: int, value: Any) -> None:
        _check(self.set(self.descriptor, attribute, byref(value), ctypes.sizeof(value)), f"attribute {attribute}")

    def _ask(self, alignment: int) -> list[_Offer]:
        """The kernels that the library offers, the recommended one first."""
        preference, count, offers = c_void_p(), c_int(), (_Offer * MAX_OFFERS)()
        first, second, result = self.layouts
        wishes: list[tuple[int, Any]] = [(_MAX_WORKSPACE_BYTES, c_uint64(MAX_WORKSPACE))]
        wishes += [(attribute, c_int32(alignment)) for attribute in _MIN_ALIGNMENTS]
        _check(self.lib.cublasLtMatmulPreferenceCreate(byref(preference)), "a preference")
        try:
            for attribute, value in wishes:
                set_preference = self.lib.cublasLtMatmulPreferenceSetAttribute
                status = set_preference(preference, attribute, byref(value), ctypes.sizeof(value))
                _check(status, f"preference {attribute}")
            status = self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.descriptor, first, second, result, result, preference, MAX_OFFERS, offers,
                byref(count),
            )  # fmt: skip
        finally:
            self.lib.cublasLtMatmulPreferenceDestroy(preference)
        return [offer for offer in offers[: count.value] if offer.state == 0] if status == 0 else []

    def _kind(self, offer: _Offer) -> tuple[int, int]:
        """Tile and cluster, by which `choose` knows it; not if it adds up parts of K, whose bits could differ."""
        if self._config(offer, _SPLITK_NUM) != 1:
            return -1, -1
        return self._config(offer, _TILE_ID), self._config(offer, _CLUSTER_SHAPE_ID)

    def _config(self, offer: _Offer, attribute: int) -> int:
        value, written = c_int32(), c_size_t()
        get = self.lib.cublasLtMatmulAlgoConfigGetAttribute
        size = 2 if attribute == _CLUSTER_SHAPE_ID else 4
        status = get(byref(offer.algorithm), attribute, byref(value), size, byref(written))
        return value.value if status == 0 else -1

    def run(
        self, device: int, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor],
        added: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        """out = (a @ b^T) * scale_a * scale_b + bias, plus `added` if the problem has a residual."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        workspace = _workspace(self.workspace, stream, device, a)
        descriptor, (first, second, result), slots = self.descriptor, self.layouts, self.slots
        # The call copies the descriptor; until then no other thread may write its own addresses into it.
        with self.lock:
            self.addresses[0], self.addresses[1] = scale_b.data_ptr(), scale_a.data_ptr()
            status = self.set(descriptor, _A_SCALE_POINTER, slots[0], 8)
            status = status or self.set(descriptor, _B_SCALE_POINTER, slots[1], 8)
            if bias is not None:
                self.addresses[2] = bias.data_ptr()
                status = status or self.set(descriptor, _BIAS_POINTER, slots[2], 8)
            status = status or self.multiply(
                self.handle, descriptor, _ALPHA, b.data_ptr(), first, a.data_ptr(), second, self.beta,
                added.data_ptr(), result, out.data_ptr(), result, self.algorithm,
                workspace.data_ptr(), self.workspace, stream,
            )  # fmt: skip
        if status:
            _check(status, "cublasLtMatmul")

    def __del__(self) -> None:
        for layout in self.layouts:
            self.lib.cublasLtMatrixLayoutDestroy(layout)
        self.lib.cublasLtMatmulDescDestroy(self.descriptor)


_WORKSPACES: dict[int, Tensor] = {}  # by device


def _workspace(size: int, stream: int, device: int, where: Tensor) -> Tensor:
    """At least `size` bytes. The default stream's small one is kept.

    Not that of others: graphs are captured, and torch.compile's warmed up, in pools that nobody may keep a part of.
    """
    if stream or size > SMALL_WORKSPACE:
        return where.new_empty(size, dtype=torch.uint8)
    workspace = _WORKSPACES.get(device)
    if workspace is None:
        workspace = _WORKSPACES[device] = where.new_empty(SMALL_WORKSPACE, dtype=torch.uint8)
    return workspace


# By the arguments of `Plan`.
_PLANS: dict[tuple[Any, ...], Plan] = {}


def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Optional[Tensor],
    dtype: torch.dtype,
    fast_accumulation: bool,
    residual: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """`kernels.gemm.gemm` of operands whose K and N divide by 16; bias and residual have `dtype`. None if the library
    offers no kernel."""
    device = a.get_device()
    if device != torch._C._cuda_getDevice():  # the library's handle and streams are the current one's
        with torch.cuda.device(device):
            return gemm(a, b, scale_a, scale_b, bias, dtype, fast_accumulation, residual)
    a, b = a.contiguous(), b.contiguous()
    (rows, inner), columns = a.shape, b.shape[0]
    out = a.new_empty((rows, columns), dtype=dtype)
    addresses = a.data_ptr() | b.data_ptr() | out.data_ptr() | 256
    if residual is not None:
        residual = _for_kernels(residual)
        addresses |= residual.data_ptr()
    if bias is not None:
        bias = _for_kernels(bias)
        addresses |= bias.data_ptr()
    key = (
        device, rows, columns, inner, a.dtype, b.dtype, dtype, fast_accumulation,
        bias is not None, residual is not None, addresses & -addresses,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(*key)
    if not plan.is_possible:
        return None
    plan.run(device, a, b, scale_a, scale_b, bias, out if residual is None else residual, out)
    return out


def _for_kernels(x: Tensor) -> Tensor:
    """x contiguous and aligned to 16 bytes, as FP8 products want it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x
