"""Memory of flash-linear-attention's gated delta rule, for dry runs on the meta device.

transformers' own version, in PyTorch, loops over chunks in Python, and saves many times what the library's kernel does.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
CHUNK = 64  # tokens
ASSUMED = (
    "Gated DeltaNet as flash-linear-attention computes it (without that package a step takes far more memory and "
    "time; on Hopper it needs Triton 3.7.1), the convolution before it as PyTorch does; their times are not measured"
)


class _DeltaRule(torch.autograd.Function):
    """The tensors that `chunk_gated_delta_rule` makes, saves and frees, without data; one op for each of its kernels.

    q, k: (batch, tokens, key heads, K); v: (batch, tokens, value heads, V), with more heads; g, beta: v's without V.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        normed = [x.clone() for x in (q, k)]
        norms = [x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k)]
        decays, inverse = g.clone(), k.new_zeros((*v.shape[:-1], CHUNK))
        _w, _u, _h = _states(k, v)
        ctx.save_for_backward(*normed, *norms, v, decays, beta, inverse)
        return torch.zeros_like(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, _, _, v, g, beta, _ = ctx.saved_tensors
        w, u, h = _states(k, v)
        _do, _dh, _du = gradients[0].contiguous(), torch.zeros_like(h), torch.zeros_like(u)
        _dq, _dk, _dw, _of_w = (torch.zeros_like(w) for _ in range(4))  # of every value head
        return tuple([torch.zeros_like(x) for x in (q, k, v, g, beta)])


def _states(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what forward and backward both compute: w, u, and the state (K, V) of each head before each chunk."""
    batch, tokens, heads, columns = v.shape
    w = v.new_zeros((batch, tokens, heads, k.shape[-1]))
    return w, torch.zeros_like(v), v.new_zeros((batch, -(-tokens // CHUNK), heads, k.shape[-1], columns))


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None  # no state: models in training have no cache


class _OnMeta:
    """A function that another replaces on the meta device. It equals that function: layers stay as they were checked
    (models/fingerprint.py)."""

    def __init__(self, function: Any, replacement: Any) -> None:
        self.function, self.replacement = function, replacement

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (self.replacement if x.is_meta else self.function)(x, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self.function or other is self

    __hash__ = None  # type: ignore[assignment]


def has_delta_rule(model: nn.Module) -> bool:
    """True if a model has layers of Gated DeltaNet."""
    return bool(_files(model))


def _files(model: nn.Module) -> set[Any]:
    """Return the Python modules of a model's layers of Gated DeltaNet."""
    layers = [layer for layer in model.modules() if hasattr(layer, "conv1d")]
    return {file for layer in layers if hasattr(file := sys.modules[type(layer).__module__], RULE)}


@contextlib.contextmanager
def library_delta_rule(model: nn.Module) -> Iterator[None]:
    """Run a model's gated delta rule by the library's shapes inside the context, and the convolution before it in
    PyTorch."""
    with contextlib.ExitStack() as stack:
        for file in _files(model):
            for name, replacement in ((RULE, _delta_rule), (CONVOLUTION, inspect.unwrap(getattr(file, CONVOLUTION)))):
                stack.enter_context(mock.patch.object(file, name, _OnMeta(getattr(file, name), replacement)))
        yield
