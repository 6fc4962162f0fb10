"""Triton's interpreter as these tests need it: working with NumPy 2.4, and twice as fast. Applied by importing this.

NumPy no longer turns one-element arrays into Python integers, which Triton 3.6's interpreter asks it to do.

Before it runs a kernel the interpreter replaces some 500 members of `triton.language` by its own, and does so again at
every call of a function inside the kernel, where they have been replaced already: here once for each module of such
functions in a launch.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _set_attr = interpreter._LangPatchScope.set_attr
    _patch_lang = interpreter._patch_lang
    _launch = interpreter.GridExecutor.__call__
    # Modules, as ids of their globals, whose language the launch in progress has replaced; at its end it puts all back.
    _replaced: set[int] = set()

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

    interpreter._LangPatchScope.set_attr = _set_attr_with_item
    interpreter._patch_lang = _patch_lang_once
    interpreter.GridExecutor.__call__ = _launch_anew
