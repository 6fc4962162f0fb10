"""Propose the block of a layer of any class: structure proposes, numbers decide.

For a layer without a family (family.py) its own forward runs once, in FP32 on random weights, with arguments caught
from the model's own call, and every module's input and output is written down. The wiring is read off these numbers:

    a branch        linear layers that read one tensor, and the one after them: q, k, v and o; gate, up and down
    norm before     a module whose output the branch reads, norm after: one that reads what it returns
    stream          each branch adds a multiple of its result to what the branch before left, or all to the input

What lies between a branch's linear layers is tried: attention's layout of q, k and v, norms, rotation, scale and caps;
the MLP's activation. Each candidate is compared with the input of the branch's last layer. The whole is then verified
(verify.py) like a family's, far from position 0 as well; only what agrees becomes the layer's family. Multipliers are
believed only if a name has them.

    found = propose(model, "model.layers.0")
    found.family    or, where nothing agrees, found.reason: the nearest miss
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.attention import Attention, Heads
from overcoat.block.mlp import Mlp
from overcoat.block.spec import Branch, RowPermutation, Tables
from overcoat.models import verify
from overcoat.models.clone import Cloner, UnverifiableError, twin_of
from overcoat.models.decoder import block_of, norm_eps, norm_of, rotation_of
from overcoat.models.family import Family, Modules, original_class
from overcoat.models.fingerprint import names_in
from overcoat.models.lora import base_of, is_lora
from overcoat.models.masks import check_mask
from overcoat.models.refusals import is_conv1d, is_linear, why_partitioned, why_unsupported
from overcoat.models.verify import LIMIT_DB, decibels

TRIES = 64  # candidates of what is inside a branch
MULTIPLIERS = re.compile("multipl|scal|factor|alpha|depth")
SCALES = ("scaling", "scale", "softmax_scale", "attn_scale", "inv_norm_factor", "norm_factor")
WIDTHS = ("head_dim", "head_size", "attention_head_size", "attn_head_size", "kv_channels")
CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "logit_softcapping", "softcap")
CLIPS = ("clip_qkv", "qkv_clip")
# Names of what only long rows show; of sliding windows masks tell, and patterns and counts are of layers.
LONG = re.compile("window|chunk|local_att|block_size|index_")
HARMLESS = re.compile("^sliding_window$|pattern|layers|feed_forward")


class Proposed(NamedTuple):
    """A family that was verified, or None and the reason."""

    family: Optional[Family] = None
    reason: str = ""


class Loose:
    """Linear layers of a branch that have no module of their own, in place of one."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._modules = parts


class Part(NamedTuple):
    """One branch by the paths of its modules in the layer, as `Modules` has them; heads' numbers are left to weights.

    qkv_interleaved: one layer makes q, k and v, with the rows of a group's q, its k, its v together.
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

    def modules(self, layer: Any, batch: int) -> Modules:
        """Return the branch of a layer."""
        at = layer.get_submodule
        norm: Any = {name: None if name is None else at(name) for name in (*self.qk_norm, self.pre, self.post)}
        in_proj, out_proj = tuple([at(name) for name in self.in_proj]), at(self.out_proj) if self.out_proj else None
        owner = at(self.owner) if self.owner else Loose(dict(enumerate((*in_proj, out_proj))))  # type: ignore[arg-type]
        made = Modules(
            self.mixer, owner, in_proj, out_proj, (), norm[self.pre], norm[self.post], None, self.norm_after_residual,
            tuple([at(name) for name in self.around]), (), self.scale,
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
        if not (self.qkv_interleaved or heads.rope_interleaved or heads.rotated):
            return heads, ()
        group = num_q // max(num_kv, 1) if self.qkv_interleaved else 0
        counts = (num_q + num_kv,) if fused else (num_q, num_kv)
        orders = [RowPermutation(width, heads.rotated or width, n, heads.rope_interleaved, group) for n in counts]
        return heads, tuple(orders) if fused else (*orders, None)

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


class MissError(Exception):
    """Nothing agrees; says what came nearest."""


def forget_proposed(module: nn.Module) -> None:
    """Take from a layer or a model that stays as it is what was proposed for it."""
    for name in ("overcoat_spec", "overcoat_family"):
        vars(module).pop(name, None)


_found: dict[Any, Proposed] = {}


def propose(model: nn.Module, name: str) -> Proposed:
    """Return a verified family for the layer `name` of a model, whatever its class, or why there is none."""
    layer = model.get_submodule(name)
    cls = original_class(layer)
    blank = Family(cls.__module__, cls.__name__, "", None, Proposal(()), {}, rotary=False)
    if (reason := why_partitioned(layer)) is not None:
        return Proposed(None, reason)
    key = verify.kind_of(layer, blank)
    if key is None:
        _found.pop(None, None)
    if key not in _found:
        try:
            with verify.undisturbed():
                _found[key] = Proposed(_propose(model, name, layer, blank))
        except (MissError, UnverifiableError) as error:
            _found[key] = Proposed(None, f"no proposal was verified: {error}")
        except Exception as error:  # a trial must not stop the conversion
            _found[key] = Proposed(None, f"no proposal could be made ({error!r:.80})")
    return _found[key]


def _propose(model: nn.Module, path: str, layer: Any, blank: Family) -> Family:
    if (reason := _why_long(layer)) is not None:
        raise MissError(reason)
    trace = _traced(model, path, layer, blank)
    family = blank._replace(rotary=trace.embeddings is not None, results=trace.results, given=trace.given)
    called = {event.path.partition(".")[0] for event in trace.events}
    is_crossed = getattr(trace.config, "is_encoder_decoder", False) or getattr(
        trace.config, "add_cross_attention", False
    )
    unread = [
        name for name, part in layer.named_children() if name not in called and any(True for _ in part.parameters())
    ]
    if is_crossed and unread:
        raise MissError(f"{unread[0]} reads what another model makes")
    family, parts = _read(trace, family)
    first = next(part for part in parts if isinstance(part.mixer, Attention))
    family = family._replace(tables=TABLES[first.tables], encoder=not first.mixer.heads.causal)
    family = family._replace(branches=Proposal(parts), proposed=True)
    if (reason := why_unsupported(layer, family)) is not None:
        raise MissError(reason)
    verified = verify.verify(model, path, family)
    if verified.decibels is None:
        raise MissError(str(verified.reason))
    if verified.difference is not None:
        how = "; ".join(map(str, parts))
        raise MissError(f"nearest {how}: {verified.decibels:.0f} dB ({verified.compared})")
    return family


def _why_long(layer: nn.Module) -> Optional[str]:
    """Return what rows of a verification's length do not show: windows of the layer's own code, tables of masks."""
    configs = {id(part.config): part.config for part in layer.modules() if hasattr(part, "config")}
    code = {name for part in layer.modules() for name in _names_of(original_class(part))}
    for each in (*layer.modules(), *configs.values()):
        for name, value in getattr(each, "__dict__", {}).items():
            is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if is_size and name in code and LONG.search(name) and not HARMLESS.search(name):
                return f"{name} is {value}, which short rows do not show"
    for name, buffer in layer.named_buffers():
        if buffer.dtype == torch.bool and buffer.dim() > 1 and buffer.device.type != "meta":
            table = buffer.flatten(0, -2)[-buffer.shape[-1] :]
            if not torch.equal(table, torch.ones_like(table).tril()):
                return f"{name} is a mask of its own"
    return None


@functools.cache
def _names_of(cls: Any) -> frozenset[str]:
    """All names in the code of a module's class."""
    own = [value for each in cls.__mro__ if each.__module__ == cls.__module__ for value in vars(each).values()]
    return frozenset(name for value in own if callable(value) for name in names_in(value))


# ---- what the layer's own forward does -------------------------------------------------------------------------------


class Event(NamedTuple):
    """A call of a module: its first input and its result, in their order."""

    path: str
    module: Any
    x: Tensor
    y: Tensor


class Trace(NamedTuple):
    """A layer's own forward: x (B, S, H) -> y, and what its modules did."""

    layer: Any
    x: Tensor
    y: Tensor
    events: list[Event]
    embeddings: Any
    mask: Any
    config: Any
    results: int
    given: tuple[str, ...]


def _traced(model: nn.Module, name: str, layer: Any, blank: Family) -> Trace:
    owner_name, _, place = name.rpartition(".")
    owner_name, _, stack = owner_name.rpartition(".")
    owner: Any = model.get_submodule(owner_name) if stack and place.isdigit() else None
    if owner is None or not isinstance(getattr(owner, stack, None), nn.ModuleList):
        raise UnverifiableError("the model's own call of the layer is not known")
    device = torch.device("cpu")
    configs: dict[int, Any] = {}
    is_large = sum(p.numel() for p in layer.parameters()) > verify.LARGE
    clone = twin_of(layer, configs) if is_large else Cloner(device, configs).layer(layer)
    for part in clone.modules():
        vars(part)["training"] = False  # rates of dropout are refused by name, later
    scene = verify.scenes_of(owner, blank)["several rows"]
    given = verify.caught_call(owner, blank, stack, int(place), scene, device, configs)
    names = tuple(name for name, value in given.items() if value is not None)
    if isinstance(given.get("attention_mask"), Tensor) and given["attention_mask"].dim() == 2:
        given["attention_mask"] = None
    width = verify.width_of(owner, clone)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((scene.rows, verify.LENGTH, width), generator=generator)
    events: list[Event] = []
    watched = {path: part for path, part in clone.named_modules() if path}
    for path, part in watched.items():
        vars(part)["forward"] = _watched(path, part, events)
    try:
        with torch.no_grad():
            y = original_class(clone).forward(clone, x.clone(), **{n: verify.detached(v) for n, v in given.items()})
    except Exception as error:
        raise UnverifiableError(f"its own forward could not run in FP32 ({error!r:.80})") from error
    finally:
        for part in watched.values():
            del vars(part)["forward"]
    results = len(y) if isinstance(y, tuple) else 0
    y = y[0] if isinstance(y, tuple) else y
    config = next((part.config for part in clone.modules() if hasattr(part, "config")), getattr(owner, "config", None))
    return Trace(
        clone, x, y, events, given.get("position_embeddings"), given.get("attention_mask"), config, results, names
    )


def _watched(path: str, part: Any, events: list[Event]) -> Callable[..., Any]:
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        x = None if first is None else first.detach().clone()
        y = own(*args, **kwargs)
        result = y[0] if isinstance(y, tuple) and y else y
        if x is not None and isinstance(result, Tensor):
            events.append(Event(path, part, x, result.detach().clone()))
        return y

    return forward


def shape_of(linear: Any) -> tuple[int, int]:
    """How many outputs and inputs a linear layer has."""
    base = base_of(linear)
    rows, columns = base.weight.shape
    return (columns, rows) if is_conv1d(base) else (rows, columns)


# ---- reading it ------------------------------------------------------------------------------------------------------


def _read(trace: Trace, family: Family) -> tuple[Family, tuple[Part, ...]]:
    """Return the family's kind of norm and wiring, and the branches."""
    linears = [event for event in trace.events if is_linear(event.module) and not _inside_lora(trace, event.path)]
    runs = [list(run) for run in _runs(linears)]
    norms, family = _norms(trace, family)
    found: list[Found] = []
    while runs:
        branch = _branch(trace, family, runs, norms, first=not found)
        owner = branch.part.owner if branch.part.mixer is None else ""
        runs = [run for run in runs[branch.used :] if not owner or not run[0].path.startswith(f"{owner}.")]
        found.append(branch)
    if not found or not isinstance(found[0].part.mixer, Attention):
        raise MissError("no attention was found in it")
    seen = [name for branch in found for name in (branch.part.owner, *branch.part.in_proj, branch.part.out_proj)]
    for event in trace.events:  # experts without linear layers
        if (
            "." not in event.path
            and any(True for _ in event.module.parameters())
            and not is_linear(event.module)
            and not any(event is norm for norm in norms)
            and not any(f"{name}.".startswith(f"{event.path}.") for name in seen)
        ):
            found.append(Found(Part(None, event.path), event.x, event.y, 0))
    family, parts = _wired(trace, family, norms, found)
    covered = {name for part in parts for name in (part.owner, part.pre, part.post, *part.qk_norm) if name}
    as_is = tuple([f"{part.owner}." for part in parts if part.mixer is None])
    around = [
        path
        for path, module in trace.layer.named_modules()
        if path not in ("", *covered)
        and not path.startswith(as_is or "\n")
        and not is_linear(module)
        and not _inside_lora(trace, path)
        and any(event.path == path for event in trace.events)
    ]
    return family, (parts[0]._replace(around=tuple(around)), *parts[1:])


class Found(NamedTuple):
    """A branch, what its linear layers read, its result, and how many runs of linear layers it takes."""

    part: Part
    u: Tensor
    y: Tensor
    used: int


def _inside_lora(trace: Trace, path: str) -> bool:
    names = path.split(".")
    return any(is_lora(trace.layer.get_submodule(".".join(names[:count]))) for count in range(1, len(names)))


def _runs(linears: list[Event]) -> Iterator[list[Event]]:
    """Yield groups of consecutive calls that read the same tensor for the same module."""
    run: list[Event] = []
    for event in linears:
        if run and not (_parent(event.path) == _parent(run[0].path) and _same(event.x, run[0].x)):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.shape[-1] == b.shape[-1] and torch.equal(a.reshape(b.shape), b)


def _norms(trace: Trace, family: Family) -> tuple[list[Event], Family]:
    """Return the calls of norms, and the family with the kind of norm that they are."""
    calls = [
        event
        for event in trace.events
        if event.x.shape == event.y.shape
        and not isinstance(event.module, nn.Identity)
        and not event.module._modules
        and not is_linear(event.module)
        and all(p is None or p.dim() == 1 for p in event.module._parameters.values())
    ]
    found: list[list[Event]] = []
    kinds = list(itertools.product((False, True), (False, True)))
    for plus_one, centered in kinds:
        kind = family._replace(plus_one=plus_one, centered=centered)
        found.append([event for event in calls if _is_norm(event, kind)])
    best = max(range(len(kinds)), key=lambda place: len(found[place]))
    plus_one, centered = kinds[best]
    return found[best], family._replace(plus_one=plus_one, centered=centered)


def _is_norm(event: Event, family: Family) -> bool:
    try:
        return decibels(event.y, reference.norm(event.x, norm_of(event.module, family))) > LIMIT_DB
    except (AttributeError, RuntimeError, TypeError):
        return False


def _branch(trace: Trace, family: Family, runs: list[list[Event]], norms: list[Event], first: bool) -> Found:
    """Return the branch that begins with the first of `runs`."""
    ins, outs = runs[0], runs[1] if len(runs) > 1 else []
    u, best = ins[0].x, (-math.inf, "")
    child = ins[0].path.partition(".")[0]
    call = next((event for event in trace.events if event.path == child and not is_linear(event.module)), None)
    if len(outs) == 1 and len(ins) <= 3:
        for part in itertools.islice(_candidates(trace, ins, outs[0], norms), TRIES):
            found = _agreement(trace, family, part, u, outs[0].x)
            if found > LIMIT_DB:
                inside = call is not None and outs[0].path.startswith(f"{child}.")
                if not first and inside and call is not None and not _same(call.y, outs[0].y):
                    break  # one of several experts
                return Found(part, u, outs[0].y, 2)
            best = max(best, (found, str(part)))
    if first:
        nearest = f"nearest {best[1]}: {best[0]:.0f} dB" if best[1] else "its linear layers are not those of q, k, v, o"
        raise MissError(f"{_parent(ins[0].path)}: {nearest}")
    if call is None or call.x.shape[-1] != call.y.shape[-1]:
        near = f": nearest {best[1]}: {best[0]:.0f} dB" if best[1] else ""
        raise MissError(f"{ins[0].path} is followed by what is no MLP{near}")
    return Found(Part(None, child), call.x, call.y, 0)


def _agreement(trace: Trace, family: Family, part: Part, u: Tensor, expected: Tensor) -> float:
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
            tables = Tables(*rotation, check_mask(trace.mask, trace.x.shape[1]))
        z = reference.linear(u.flatten(0, -2), branch.in_proj)
        return decibels(expected.reshape(len(z), -1), reference.mixer(z, branch, tables))
    except (RuntimeError, ValueError, ZeroDivisionError):  # of other shapes
        return -math.inf


def _candidates(trace: Trace, ins: list[Event], out: Event, norms: list[Event]) -> Iterator[Part]:
    """Yield what may lie between linear layers, the usual first: an MLP where sizes allow, then attention."""
    count, width = sum(event.y.shape[-1] for event in ins), out.x.shape[-1]
    names, owner = tuple(event.path for event in ins), _common(ins[0].path, out.path)
    attends = any(hasattr(event.module, "is_causal") for event in trace.events if event.path == _parent(ins[0].path))
    if len(ins) < 3 and count in (width, 2 * width) and not attends:
        orders = [names, names[::-1]] if len(ins) == 2 else [names]
        for order in orders:
            for activation in reference.ACTIVATIONS:
                yield Part(Mlp(activation, count == 2 * width), owner, order, out.path)
    if len(ins) == 2 or count < width:
        return
    owner = _parent(ins[0].path)
    module = trace.layer.get_submodule(owner)
    names = tuple(sorted(names, key=_role))
    qk_norm = tuple([event.path for event in norms if event.path.startswith(f"{owner}.")][:2])
    sinks = f"{owner}.sinks" if isinstance(getattr(module, "sinks", None), nn.Parameter) else ""
    layouts = (False, True) if len(ins) == 1 else (False,)
    for heads, tables in _heads(trace, module, width, norms, qk_norm):
        for interleaved in layouts:
            mixer = Attention(heads)
            yield Part(mixer, owner, names, out.path, qk_norm, qkv_interleaved=interleaved, sinks=sinks, tables=tables)


def _role(path: str) -> int:
    """Return where q, k and v stand among them, by their names."""
    name = path.rpartition(".")[2].lower()
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


def _looks_ahead(mask: Any) -> bool:
    """True if a mask of all pairs shows a token those after it."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    shown = mask if mask.dtype == torch.bool else mask > reference.HIDDEN
    return bool(shown.triu(1).any())


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
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), None)


def _common(a: str, b: str) -> str:
    """Path of the module that both are in."""
    parts = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(first for first, _ in parts)


# ---- the stream ------------------------------------------------------------------------------------------------------


def _wired(trace: Trace, family: Family, norms: list[Event], found: list[Found]) -> tuple[Family, list[Part]]:
    """Return the branches with their norms, what they are multiplied by, and how they are added."""
    ways = []
    for part, u, y, _ in found:
        pre = next((each for each in norms if _same(each.y, u)), None)
        post = next((each for each in norms if _same(each.x, y)), None)
        result = y if post is None else post.y
        part = part._replace(post=post.path if post else None)
        # What is read may be a norm's result, or the stream itself after a norm of the sum.
        before = [] if pre is None else [(part._replace(pre=pre.path), pre.x, result)]
        ways.append([*before, (part, u, result)])
    misses = []
    for way in itertools.product(*ways):
        tensors = [each.reshape(trace.x.shape) for _, *pair in way for each in pair]
        try:
            return _added(trace, family, norms, tensors, [part for part, *_ in way])
        except MissError as error:
            misses.append(str(error))
    raise MissError(misses[0])


def _added(
    trace: Trace, family: Family, norms: list[Event], tensors: list[Tensor], parts: list[Part]
) -> tuple[Family, list[Part]]:
    """Return the branches that begin and end with these: in turn, what each reads of the stream and its result."""
    starts, results = tensors[::2], tensors[1::2]
    if len(parts) > 1 and all(_same(start, trace.x) for start in starts):
        stacked = torch.stack([y.flatten() for y in results], 1).double()
        total = (trace.y - trace.x).flatten().double()
        factors = torch.linalg.lstsq(stacked, total[:, None]).solution[:, 0]
        if decibels(total, stacked @ factors) < LIMIT_DB - 10:
            raise MissError(f"branches side by side: {decibels(total, stacked @ factors):.0f} dB")
        scaled = [
            part._replace(scale=_named(float(factor), trace)) for part, factor in zip(parts, factors, strict=True)
        ]
        return family._replace(parallel=always), scaled
    wired, stream = [], trace.x
    for part, start, result, end in zip(parts, starts, results, [*starts[1:], trace.y], strict=True):
        name = part.owner or part.out_proj
        if not _same(start, stream):
            raise MissError(f"{name} does not read what the branch before left")
        summed = next((each for each in norms if _same(each.y, end) and each.path != part.post), None)
        added = (end if summed is None else summed.x.reshape(end.shape)) - stream
        factor = float((added * result).sum() / result.square().sum())
        if (found := decibels(added, factor * result)) < LIMIT_DB - 10:  # a difference of FP32's sums
            raise MissError(f"{name}: what it adds is no multiple of its result: {found:.0f} dB")
        part = part._replace(scale=_named(factor, trace))
        wired.append(part if summed is None else part._replace(post=summed.path, norm_after_residual=True))
        stream = end
    return family, wired


def _named(factor: float, trace: Trace) -> float:
    """Return 1, or the multiplier that a name of the layer's or the configuration's has."""
    places = [trace.layer, *(part for part in trace.layer.modules() if not part._modules), trace.config]
    values = [
        float(value)
        for place in places
        for name, value in getattr(place, "__dict__", {}).items()
        if MULTIPLIERS.search(name) and isinstance(value, (int, float)) and value
    ]
    for value in (1.0, *values, *(1 / value for value in values)):
        if abs(factor / value - 1) < 1e-5:
            return value
    raise MissError(f"a branch is multiplied by {factor:.4g}, which nothing in its configuration says")
