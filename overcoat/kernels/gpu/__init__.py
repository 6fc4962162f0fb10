"""The Triton kernels of the op catalogue, one file per op family, named as the references in `overcoat.kernels`.

Imported only when an op meets a CUDA tensor: Triton is absent on machines without a GPU. Only `cublaslt.py` and
`gemm_tiles.py`, for the library's products, do without it. `common.py` has what the
kernels share; each other file holds kernels, each followed by its launcher. A launcher takes and returns what its op
does; the op's reference is the specification, and the kernel equals it bit for bit unless its docstring says otherwise.
"""
