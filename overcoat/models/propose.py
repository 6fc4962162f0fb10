"""Propose the block of a layer of any class: structure proposes, numbers decide.

For a layer without a family (family.py) its own forward runs once, in FP32 on random weights, with arguments caught
from the model's own call, and every module's input and output is written down. The wiring is read off these numbers:

    a branch        linear layers that read one tensor, and the one after them: q, k, v and o; gate, up and down
    norm before     a module whose output the branch reads, norm after: one that reads what it returns
    stream          each branch adds a multiple of its result to what the branch before left, or all to the input

What lies between a branch's linear layers is tried: attention's layout of q, k and v, gates, norms, rotation, scale and
caps; the MLP's activation. Each candidate is compared with the input of the branch's last layer. The whole is then
verified (verify.py) like a family's, far from position 0 as well; only what agrees becomes the layer's family.
A multiplier counts only if an attribute with a fitting name has it (`MULTIPLIERS`).

    found = propose(model, "model.layers.0")
    found.family    or, where nothing agrees, found.reason: the nearest miss
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block import reference
from overcoat.block.attention import Attention
from overcoat.models import verify
from overcoat.models.clone import UnverifiableError
from overcoat.models.decoder import norm_of
from overcoat.models.family import Family, original_class
from overcoat.models.fingerprint import names_in
from overcoat.models.lora import is_lora
from overcoat.models.proposal import TABLES, Part, Proposal, always
from overcoat.models.propose_mixer import agreement, candidates
from overcoat.models.refusals import is_linear, why_partitioned, why_unsupported
from overcoat.models.trace import Event, Trace, parent, same, traced
from overcoat.models.verify import LIMIT_DB, decibels

TRIES = 64  # candidates of what is inside a branch
MULTIPLIERS = re.compile("multipl|scal|factor|alpha|depth")
# Names of what only long rows show; of sliding windows masks tell, and patterns and counts are of layers.
LONG = re.compile("window|chunk|local_att|block_size|index_")
HARMLESS = re.compile("^sliding_window$|pattern|layers|feed_forward")


class Proposed(NamedTuple):
    """A family that was verified, or None and the reason."""

    family: Optional[Family] = None
    reason: str = ""


class MissError(Exception):
    """Raised if no candidate agrees; the message says which came nearest."""


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
    if (reason := _why_long(layer, [layer])) is not None:
        raise MissError(reason)
    trace = traced(model, path, layer, blank)
    family = blank._replace(
        rotary=trace.embeddings is not None, results=trace.results, given=trace.given, without=trace.without
    )
    if trace.embeddings is not None:
        family = family._replace(columns=trace.embeddings[0].shape[-1])
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
    attends = [part for part in parts if isinstance(part.mixer, Attention)]
    if attends:
        family = family._replace(tables=TABLES[attends[0].tables], encoder=not attends[0].mixer.heads.causal)
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


def _why_long(layer: nn.Module, parts: list[nn.Module]) -> Optional[str]:
    """Return what rows of a verification's length do not show of these parts of a layer: windows of their own code,
    tables of masks."""
    configs = {id(part.config): part.config for part in layer.modules() if hasattr(part, "config")}
    code = {name for part in parts for name in _names_of(original_class(part))}
    for each in (*parts, *configs.values()):
        for name, value in getattr(each, "__dict__", {}).items():
            is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if is_size and name in code and LONG.search(name) and not HARMLESS.search(name):
                return f"{name} is {value}, which short rows do not show"
    for name, buffer in (pair for part in parts for pair in part.named_buffers(recurse=False)):
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
    seen = [name for branch in found for name in (branch.part.owner, *branch.part.in_proj, branch.part.out_proj)]
    for event in trace.events:  # experts without linear layers
        if (
            "." not in event.path
            and any(True for _ in event.module.parameters())
            and not is_linear(event.module)
            and not any(event is norm for norm in norms)
            and not any(f"{name}.".startswith(f"{event.path}.") for name in seen)
        ):
            found.append(_as_it_is(event, ""))
    found.sort(key=lambda each: next(place for place, event in enumerate(trace.events) if event.y is each.y))
    fused = [place for place, each in enumerate(found) if each.part.mixer is not None]
    if not fused:
        raise MissError(next((each.miss for each in found if each.miss), "there is no attention and no MLP in it"))
    family, parts = _wired(trace, family, norms, found)
    if family.parallel is None and len(fused) <= fused[-1] - fused[0]:
        raise MissError(f"{parts[fused[0] + 1]} between branches of one block")
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
    """A branch, what its linear layers read, its result, and how many runs of linear layers it takes. miss: why it runs
    as it is."""

    part: Part
    u: Tensor
    y: Tensor
    used: int
    miss: str = ""


def _as_it_is(event: Event, miss: str) -> Found:
    if event.call is None:
        raise MissError(miss or f"{event.path} is given what its layer computes")
    return Found(Part(None, event.path, call=event.call, results=event.results), event.x, event.y, 0, miss)


def _inside_lora(trace: Trace, path: str) -> bool:
    names = path.split(".")
    return any(is_lora(trace.layer.get_submodule(".".join(names[:count]))) for count in range(1, len(names)))


def _runs(linears: list[Event]) -> Iterator[list[Event]]:
    """Yield groups of consecutive calls that read the same tensor for the same module."""
    run: list[Event] = []
    for event in linears:
        if run and not (parent(event.path) == parent(run[0].path) and same(event.x, run[0].x)):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


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
    """Return the branch that begins with the first of `runs`: what was tried and agrees, or the module as it is."""
    ins, outs = runs[0], runs[1] if len(runs) > 1 else []
    u, best = ins[0].x, (-math.inf, "")
    child = ins[0].path.partition(".")[0]
    call = next((event for event in trace.events if event.path == child and not is_linear(event.module)), None)
    parts = [trace.layer] if call is None else list(call.module.modules())
    long = _why_long(trace.layer, parts)
    if len(outs) == 1 and len(ins) <= 4 and long is None:
        for part in itertools.islice(candidates(trace, ins, outs[0], norms), TRIES):
            found = agreement(trace, family, part, u, outs[0].x)
            if found > LIMIT_DB:
                inside = call is not None and outs[0].path.startswith(f"{child}.")
                if not first and inside and call is not None and not same(call.y, outs[0].y):
                    break  # one of several experts
                return Found(part, u, outs[0].y, 2)
            best = max(best, (found, str(part)))
    nearest = f"nearest {best[1]}: {best[0]:.0f} dB" if best[1] else "its linear layers are not those of q, k, v, o"
    miss = f"{parent(ins[0].path) or ins[0].path}: {long or nearest}"
    if call is None or call.x.shape[-1] != call.y.shape[-1]:
        raise MissError(miss)
    return _as_it_is(call, miss)


# ---- the stream ------------------------------------------------------------------------------------------------------


def _wired(trace: Trace, family: Family, norms: list[Event], found: list[Found]) -> tuple[Family, list[Part]]:
    """Return the branches with their norms, what they are multiplied by, and how they are added."""
    ways = []
    for part, u, y, *_ in found:
        pre = next((each for each in norms if same(each.y, u)), None)
        post = next((each for each in norms if same(each.x, y)), None)
        result = y if post is None else post.y
        part = part._replace(post=post.path if post else None)
        # What is read may be a norm's result, or the stream itself after a norm of the sum.
        before = [] if pre is None else [(part._replace(pre=pre.path), pre.x, result)]
        ways.append([*before, (part, u, result)])
    misses = []
    own = (*trace.layer.named_parameters(recurse=False), *trace.layer.named_buffers(recurse=False))
    factors = {"": 1.0, **{name: value for name, value in own if value.numel() == 1}}
    for way, name in itertools.product(itertools.product(*ways), factors):
        tensors = [each.reshape(trace.x.shape) for _, *pair in way for each in pair]
        unscaled = trace._replace(y=trace.y / factors[name])
        try:
            return _added(unscaled, family._replace(factor=name), norms, tensors, [part for part, *_ in way])
        except MissError as error:
            misses.append(str(error))
    raise MissError(misses[0])


def _added(
    trace: Trace, family: Family, norms: list[Event], tensors: list[Tensor], parts: list[Part]
) -> tuple[Family, list[Part]]:
    """Return the branches that begin and end with these: in turn, what each reads of the stream and its result."""
    starts, results = tensors[::2], tensors[1::2]
    if len(parts) > 1 and all(same(start, trace.x) for start in starts):
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
        if not same(start, stream):
            raise MissError(f"{name} does not read what the branch before left")
        summed = next((each for each in norms if same(each.y, end) and each.path != part.post), None)
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
