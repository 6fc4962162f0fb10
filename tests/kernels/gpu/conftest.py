"""Makes Triton 3.6's interpreter work with NumPy 2.4, which no longer turns one-element arrays into Python integers."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _set_attr = interpreter._LangPatchScope.set_attr

    def _set_attr_with_item(scope, obj, name, value):
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        _set_attr(scope, obj, name, value)

    interpreter._LangPatchScope.set_attr = _set_attr_with_item
