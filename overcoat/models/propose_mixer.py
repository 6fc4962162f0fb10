"""Candidates of what lies between a branch's linear layers, and how closely each agrees with what was traced.

Attention's layout of q, k, v and gates, norms, rotation, scale and caps; an MLP's activation. A candidate is compared
with the input of the branch's last linear layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.attention import Attention, Heads
from overcoat.block.mlp import Mlp
from overcoat.block.spec import Branch, Tables
from overcoat.models.decoder import block_of, rotation_of
from overcoat.models.family import Family
from overcoat.models.masks import check_mask
from overcoat.models.proposal import TABLES, Part
from overcoat.models.trace import Event, Trace, parent
from overcoat.models.verify import decibels

SCALES = ("scaling", "scale", "softmax_scale", "attn_scale", "inv_norm_factor", "norm_factor")
WIDTHS = ("head_dim", "head_size", "attention_head_size", "attn_head_size", "kv_channels")
CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "logit_softcapping", "softcap")
CLIPS = ("clip_qkv", "qkv_clip")


def agreement(trace: Trace, family: Family, part: Part, u: Tensor, expected: Tensor) -> float:
    """Return how far the last linear layer's input agrees, in dB."""
    try:
        block = block_of((part.modules(trace.layer, trace.x.shape[0]),), family, trace.layer)
        branch: Branch = block.branches[0]
        tables = Tables(torch.empty(0), torch.empty(0))
        if isinstance(part.mixer, Attention):
            turned = trace.embeddings
            if turned is not None and part.tables:
                turned = TABLES[part.tables](turned)
            rotation = rotation_of(turned, trace.x, block)
            is_lengths = isinstance(trace.mask, Tensor) and trace.mask.dim() == 1
            tables = Tables(*rotation, trace.mask if is_lengths else check_mask(trace.mask, trace.x.shape[1]))
        z = reference.linear(u.flatten(0, -2), branch.in_proj)
        return decibels(expected.reshape(len(z), -1), reference.mixer(z, branch, tables))
    except (RuntimeError, ValueError, ZeroDivisionError):  # of other shapes
        return -math.inf


def candidates(trace: Trace, ins: list[Event], out: Event, norms: list[Event]) -> Iterator[Part]:
    """Yield what may lie between linear layers, the usual first: an MLP where sizes allow, then attention."""
    count, width = sum(event.y.shape[-1] for event in ins), out.x.shape[-1]
    names, owner = tuple(event.path for event in ins), _common(ins[0].path, out.path)
    attends = any(hasattr(event.module, "is_causal") for event in trace.events if event.path == parent(ins[0].path))
    if len(ins) < 3 and count in (width, 2 * width) and not attends:
        orders = [names, names[::-1]] if len(ins) == 2 else [names]
        for order in orders:
            for activation in reference.ACTIVATIONS:
                yield Part(Mlp(activation, count == 2 * width), owner, order, out.path)
    if len(ins) == 2 or count < width:
        return
    owner = parent(ins[0].path)
    module = trace.layer.get_submodule(owner)
    ins = sorted(ins, key=lambda event: _role(event.path, len(ins) == 4))
    names = tuple([event.path for event in ins])
    # A layer of its own makes the gates, or q's, which then has twice the rows.
    if len(ins) == 4 and (_role(names[0], True) >= 0 or ins[0].y.shape[-1] != width):
        return
    gate_interleaved = len(ins) == 3 and ins[0].y.shape[-1] == 2 * width
    gated = gate_interleaved or len(ins) == 4
    qk_norm = tuple([event.path for event in norms if event.path.startswith(f"{owner}.")][:2])
    sinks = f"{owner}.sinks" if isinstance(getattr(module, "sinks", None), nn.Parameter) else ""
    layouts = (False, True) if len(ins) == 1 else (False,)
    for heads, tables in _heads(trace, module, width, norms, qk_norm):
        for interleaved in layouts:
            yield Part(
                Attention(heads._replace(gated=gated)), owner, names, out.path, qk_norm, qkv_interleaved=interleaved,
                gate_interleaved=gate_interleaved, sinks=sinks, tables=tables,
            )  # fmt: skip


def _role(path: str, gated: bool) -> int:
    """Return where q, k and v stand among them, by their names, and before these, if `gated`, the gates: -1."""
    name = path.rpartition(".")[2].lower()
    if gated and re.search(r"gate|(^|_)g(_|$)", name):
        return -1
    roles = ("q", "k", "v")
    found = [place for place, letter in enumerate(roles) if re.search(rf"(^|_|in){letter}(_|$|uery|ey|al)", name)]
    return found[0] if found else 1


def _heads(
    trace: Trace, module: Any, total: int, norms: list[Event], qk_norm: tuple[str, ...]
) -> Iterator[tuple[Heads, str]]:
    """Yield shapes of attention, with names in `TABLES`."""
    config = trace.config
    number = _first(config, ("num_attention_heads", "n_head", "num_heads", "n_heads"))
    known = [_first(module, WIDTHS), _first(config, WIDTHS), total // number if number else None]
    widths = dict.fromkeys(int(width) for width in known if width and total % int(width) == 0)
    cos = None if trace.embeddings is None else trace.embeddings[0].shape[-1]
    norm = next((event for event in norms if event.path in qk_norm), None)
    caps = [0.0] + [float(cap) for cap in (_first(module, CAPS), _first(config, CAPS)) if cap]
    clips = [0.0] + [float(clip) for clip in (_first(module, CLIPS), _first(config, CLIPS)) if clip]
    for width in widths:
        full = norm is not None and norm.x.shape[-1] == total != width
        turns = itertools.product(
            (True, False), _scales(module, config, width), caps[::-1], clips[::-1], _turns(cos, width)
        )
        for causal, scale, cap, clip, (turn, tables) in turns:
            yield Heads(0, 0, 0, width, scale, full_norm=full, causal=causal, softcap=cap, clip=clip, **turn), tables


def _turns(cos: Optional[int], width: int) -> list[tuple[dict[str, Any], str]]:
    """Rotations that tables of `cos` columns allow, the usual first, with names in `TABLES`."""
    if cos is None:  # tables of no angle (`rotation_of`)
        return [({}, "")]
    counts = [count for count in (cos, 2 * cos) if count <= width]
    rotated = [{"rotated": 0 if count == width else count} for count in counts]
    kinds: Any = ({}, {"rope_interleaved": True}, {"rope_interleaved": True, "rope_repeated": True})
    turned: list[Any] = [{**count, **kind} for count in rotated for kind in kinds]
    first, *others = [(turn, tables) for tables in TABLES for turn in turned]
    return [first, ({"rotates": False}, ""), *others]


def _scales(module: Any, config: Any, width: int) -> list[float]:
    """Factors of scores, the module's own first."""
    own = [value for value in (_first(module, (name,)) for name in SCALES) if value]
    named = [_first(config, ("attention_multiplier",)), (_first(config, ("query_pre_attn_scalar",)) or 0) ** 2]
    named[1] = None if not named[1] else named[1] ** -0.25
    found = [*own[:1], width**-0.5, *named, 1.0, 1 / width]
    return list(dict.fromkeys(float(value) for value in found if value))


def _first(owner: Any, names: tuple[str, ...]) -> Any:
    """The first of an object's attributes of these names that is a number."""
    values = [number_of(owner, name) for name in names]
    return next((value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), None)


def number_of(owner: Any, name: str) -> Any:
    """Return an attribute, None where there is none: or where layers differ in it and the configuration is asked for
    all (Gemma 4)."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


def _common(a: str, b: str) -> str:
    """Path of the module that both are in."""
    parts = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(first for first, _ in parts)
