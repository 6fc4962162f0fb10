"""Triton's interpreter as these tests need it: working with NumPy 2.4, and three times as fast. Applied by importing.

NumPy no longer turns one-element arrays into Python integers, which Triton 3.6's interpreter asks it to do.

Its time goes into Python around small arrays. The same results without:

* Before it runs a kernel the interpreter replaces some 500 members of `triton.language` by its own, and does so again
  at every call of a function inside the kernel, where they have been replaced already: here once for each module of
  such functions in a launch.
* It computes all integers once more in 64 bits, for an assertion that it leaves out (`debug` is off).
* It makes a type, its name and its shape anew for every value, and compares shapes number by number before it adds:
  here once for each type, and shapes that are the same object are equal.
* It takes floating point numbers apart to convert them: BF16 and FP32 differ by 16 bits, but for what is subnormal.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _set_attr = interpreter._LangPatchScope.set_attr
    _patch_lang = interpreter._patch_lang
    _launch = interpreter.GridExecutor.__call__
    _np_dtype = interpreter._get_np_dtype
    _convert_float = interpreter._convert_float
    _broadcast = interpreter.TritonSemantic.broadcast_impl_value
    _init_block_type = tl.block_type.__init__
    # Modules, as ids of their globals, whose language the launch in progress has replaced; at its end it puts all back.
    _replaced: set[int] = set()
    _np_dtypes: dict = {}  # by the type's name
    _block_types: dict = {}  # by elements and shape: the attributes
    _shapes: dict = {(): (tl.constexpr(1), tl.tuple([]))}  # a value's `numel` and `shape`

    def _set_attr_with_item(scope, obj, name, value):
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        _set_attr(scope, obj, name, value)

    def _patch_lang_once(function):
        if id(function.__globals__) in _replaced:
            return interpreter._LangPatchScope()
        _replaced.add(id(function.__globals__))
        return _patch_lang(function)

    def _launch_anew(executor, *args, **options):
        _replaced.clear()
        return _launch(executor, *args, **options)

    def _get_np_dtype_once(type_):
        if type_.name not in _np_dtypes:
            _np_dtypes[type_.name] = _np_dtype(type_)
        return _np_dtypes[type_.name]

    def _init_block_type_once(block, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in _block_types:
            _init_block_type(block, element_ty, list(sizes))
            _shapes.setdefault(sizes, (tl.constexpr(block.numel), tl.tuple([tl.constexpr(size) for size in sizes])))
            _block_types[key] = {**vars(block), "_of_values": _shapes[sizes]}
        vars(block).update(_block_types[key])

    def _init_tensor(tensor, handle, type_):
        tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar
        tensor.numel, tensor.shape = getattr(type_, "_of_values", _shapes[()])

    def _broadcast_others(semantic, left, right):
        return (left, right) if left.shape is right.shape else _broadcast(semantic, left, right)

    def _convert_normal_numbers(x, from_type, to_type, rounding):
        """As bits. Between BF16 and FP32 the interpreter never rounds."""
        widths = {tl.bfloat16.name: 16, tl.float32.name: 32}
        width, other = widths.get(from_type.name), widths.get(to_type.name)
        bits = x.view(f"u{width // 8}") if width and other and width != other and rounding is None else None
        if bits is None or (((bits << 1) < 1 << width - 8) & (bits << 1 != 0)).any():
            return _convert_float(x, from_type, to_type, rounding)
        return bits.astype(np.uint32) << 16 if width == 16 else (bits >> 16).astype(np.uint16)

    interpreter._LangPatchScope.set_attr = _set_attr_with_item
    interpreter._patch_lang = _patch_lang_once
    interpreter.GridExecutor.__call__ = _launch_anew
    interpreter._get_np_dtype = _get_np_dtype_once
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast_others
    interpreter._convert_float = _convert_normal_numbers
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.block_type.__init__ = _init_block_type_once
    tl.tensor.__init__ = _init_tensor
