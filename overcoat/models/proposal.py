"""A proposed block as data: the branches of a layer by the paths of its modules (propose.py finds them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from torch import nn

from overcoat.block.attention import Attention, Heads
from overcoat.block.spec import RowPermutation
from overcoat.models.decoder import norm_eps
from overcoat.models.family import Argument, Modules
from overcoat.models.trace import shape_of


class Loose:
    """Linear layers of a branch that have no module of their own, in place of one."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._modules = parts


class Part(NamedTuple):
    """One branch by the paths of its modules in the layer, as `Modules` has them; heads' numbers are left to weights.

    qkv_interleaved: one layer makes q, k and v, with the rows of a group's q, its k, its v together.
    gate_interleaved: q's layer makes its output gates too, each head's rows together.
    tables: a name in `TABLES`, what the model's position_embeddings are.
    """

    mixer: Any
    owner: str
    in_proj: tuple[str, ...] = ()
    out_proj: str = ""
    qk_norm: tuple[Optional[str], ...] = ()
    pre: Optional[str] = None
    post: Optional[str] = None
    scale: float = 1.0
    norm_after_residual: bool = False
    qkv_interleaved: bool = False
    sinks: str = ""
    around: tuple[str, ...] = ()
    tables: str = ""
    call: tuple[Argument, ...] = ()
    results: int = 0
    gate_interleaved: bool = False

    def modules(self, layer: Any, batch: int) -> Modules:
        """Return the branch of a layer."""
        at = layer.get_submodule
        norm: Any = {name: None if name is None else at(name) for name in (*self.qk_norm, self.pre, self.post)}
        in_proj, out_proj = tuple([at(name) for name in self.in_proj]), at(self.out_proj) if self.out_proj else None
        owner = at(self.owner) if self.owner else Loose(dict(enumerate((*in_proj, out_proj))))  # type: ignore[arg-type]
        made = Modules(
            self.mixer, owner, in_proj, out_proj, (), norm[self.pre], norm[self.post], None, self.norm_after_residual,
            tuple([at(name) for name in self.around]), (), self.scale, call=self.call,
            results=self.results,
        )  # fmt: skip
        if not isinstance(self.mixer, Attention):
            return made
        heads, orders = self._heads(in_proj, out_proj, batch)
        qk_norm = tuple([norm[name] for name in self.qk_norm]) or (None, None)
        heads = heads._replace(eps=0.0 if qk_norm[0] is None else norm_eps(qk_norm[0]))
        sinks = self.sinks.removeprefix(f"{self.owner}.") or None
        return made._replace(mixer=Attention(heads), qk_norm=qk_norm, orders=orders, sinks=sinks)

    def _heads(self, in_proj: Any, out_proj: Any, batch: int) -> tuple[Heads, tuple[Optional[RowPermutation], ...]]:
        heads: Heads = self.mixer.heads
        width = heads.width
        num_q, fused = shape_of(out_proj)[1] // width, len(in_proj) == 1
        rows = shape_of(in_proj[-1])[0] // width
        num_kv = (rows - num_q) // 2 if fused else rows
        heads = heads._replace(batch=batch, num_q=num_q, num_kv=num_kv)
        if not (self.qkv_interleaved or self.gate_interleaved or heads.rope_interleaved or heads.rotated):
            return heads, ()
        group = num_q // max(num_kv, 1) if self.qkv_interleaved else 0
        counts = (num_q + num_kv,) if fused else (num_q, num_kv)
        orders: Any = [RowPermutation(width, heads.rotated or width, n, heads.rope_interleaved, group) for n in counts]
        orders[0] = orders[0]._replace(gate_interleaved=self.gate_interleaved)
        gates = (None,) if len(in_proj) == 4 else ()  # of a layer of their own, the first
        return heads, tuple(orders) if fused else (*gates, *orders, None)

    def __str__(self) -> str:
        if self.mixer is None:
            return f"{self.owner} as it is"
        if not isinstance(self.mixer, Attention):
            return ("gated " if self.mixer.gated else "") + self.mixer.activation
        heads = self.mixer.heads
        turned = "interleaved columns" if heads.rope_interleaved else "halves"
        turned += f" of {heads.rotated} columns" if heads.rotated else ""
        how = [f"rotation by {turned}" if heads.rotates else "no rotation", f"scores x {heads.scale:.3g}"]
        how += ["q, k, v of each head together"] * self.qkv_interleaved + ["q/k norm"] * bool(self.qk_norm)
        how += ["output gate"] * heads.gated
        return ", ".join(how + ["not causal"] * (not heads.causal))


def backwards(embeddings: Any) -> Any:
    """cos and sin of a model that rotates the other way (NanoChat), or has sin before cos (GPT-J): by 90 degrees more,
    which scores do not see."""
    cos, sin = embeddings
    return cos, -sin


TABLES: dict[str, Any] = {"": None, "backwards": backwards}


@dataclass(frozen=True)
class Proposal:
    """The branches of a layer, as data: `Family.branches` of a proposed family."""

    parts: tuple[Part, ...]

    def __call__(self, layer: Any, batch: int) -> tuple[Modules, ...]:
        return tuple([part.modules(layer, batch) for part in self.parts])


def always(layer: Any) -> bool:
    """`Family.parallel` of a proposed family."""
    return True


def forget_proposed(module: nn.Module) -> None:
    """Take from a layer or a model that stays as it is what was proposed for it."""
    for name in ("overcoat_spec", "overcoat_family"):
        vars(module).pop(name, None)
