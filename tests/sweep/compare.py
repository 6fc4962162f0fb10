"""How a kind of model trains after `convert`, against itself in FP32 and with FP8 GEMMs alone.

The same random weights thrice, rounded to BF16 and held in FP32: as they are (exact), converted (ours), and with the
linear layers that compute in FP8 after the conversion multiplying FP8 values, all else exact (alone: tests/emulation).
All three send their tokens to the experts that the exact one chose: another expert is no error of a gradient.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
from torch import Tensor, nn

import overcoat
from overcoat.models.experts import Fp8Experts
from overcoat.models.family import decoder_layers
from overcoat.models.linear_layers import Fp8Linear, large_linears
from overcoat.models.report import Report
from tests.emulation import experts_in_fp8, linears_of_block, multiply_in_fp8
from tests.sweep import tiny
from tests.sweep.batches import batches

LIMIT_DB = 1.0
SEEDS = 4  # of a kind that is above the limit with the first
EXACT = 1e-8  # relative noise power of FP32 itself
# A loss is one number: of three (batches) the noise is by chance 12 times another in 0.1% of cases (F distribution).
LOSS = 12.0


class Row(NamedTuple):
    """A kind's row of the table; ours, alone: dB of the whole gradient over all batches, None where nothing ran.
    trains: grades of the layers. faults: what is wrong, silent or failed, a line each; notes: what is not, but odd."""

    kind: str
    model: str
    trains: str
    reasons: tuple[str, ...] = ()
    head: str = ""
    ours: Optional[float] = None
    alone: Optional[float] = None
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Routes:
    """In the place of torch.topk: repeats the choices of an earlier pass."""

    def __init__(self) -> None:
        self.topk, self.seen, self.place, self.mode = torch.topk, [], 0, "off"

    def __call__(self, x: Tensor, k: int, dim: int = -1, *args: Any, **options: Any) -> Any:
        found = self.topk(x, k, dim, *args, **options)
        if self.mode == "record":
            self.seen.append(found.indices)
        elif self.mode == "replay" and self.place < len(self.seen):
            indices = self.seen[self.place]
            if indices.shape != found.indices.shape:  # of a verification, on rows of its own
                return found
            self.place += 1
            return torch.return_types.topk((x.gather(dim, indices), indices))
        return found

    @contextlib.contextmanager
    def pass_(self, mode: str) -> Iterator[None]:
        self.seen, self.place, self.mode = [] if mode == "record" else self.seen, 0, mode
        try:
            yield
        finally:
            self.mode = "off"


class Noise:
    """Noise of one model's gradients against the exact ones: power relative to the signal's."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.by_name: dict[str, list[float]] = {}
        self.losses: list[float] = []

    def add(self, exact: dict[str, Tensor], found: dict[str, Tensor]) -> None:
        loss = float(exact["loss"])
        self.losses.append((float(found["loss"]) - loss) / abs(loss))
        signals = {name: float(x.square().sum()) for name, x in exact.items() if name != "loss"}
        noises = {name: float((found[name] - exact[name]).square().sum()) for name in signals if name in found}
        self.whole.append(sum(noises.values()) / max(sum(signals.values()), 1e-300))
        largest = max(signals.values(), default=0.0)
        for name, noise in noises.items():
            if signals[name] > 1e-12 * largest and exact[name].dim() > 1:
                self.by_name.setdefault(name, []).append(noise / signals[name])

    @property
    def of_matrices(self) -> float:
        """The mean over matrices, each by its own size: one that is wrong is seen, however small its gradient."""
        means = [sum(each) / len(each) for each in self.by_name.values()]
        return sum(means) / max(len(means), 1)

    @property
    def of_loss(self) -> float:
        return math.sqrt(sum(x * x for x in self.losses) / max(len(self.losses), 1))

    @property
    def of_all(self) -> float:
        return sum(self.whole) / max(len(self.whole), 1)


def db(noise: float) -> float:
    return -10 * math.log10(max(noise, 1e-16))


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss, and every gradient by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = loss_of(model(**inputs))
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def loss_of(output: Any) -> Tensor:
    """The model's, or one of a bare encoder's states."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    states = next(
        x for name in ("last_hidden_state", "hidden_states") if (x := getattr(output, name, None)) is not None
    )
    wanted = torch.randn(states.shape, generator=torch.Generator().manual_seed(7))
    return (states - wanted).square().mean()


def fp8_linears(model: nn.Module) -> list[list[str]]:
    """Names of the linear layers of a converted model that compute in FP8, those with one input together."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [layer for layer in decoder_layers(model).values() if hasattr(layer, "overcoat_recipe")]
    groups = [[names[id(linear)] for linear in part] for layer in blocks for part in linears_of_block(layer)]
    inside = {name for group in groups for name in group}
    return groups + [[n] for n, m in model.named_modules() if isinstance(m, Fp8Linear) and n not in inside]


def grades(report: Report) -> tuple[str, tuple[str, ...]]:
    """Return how the layers train, and why not (all) in blocks."""
    total = len(report.layers)
    own = list(dict.fromkeys(name for names in report.in_part.values() for name in names))
    beside = f" beside {', '.join(own)} as {'it is' if len(own) == 1 else 'they are'}" if own else ""
    if len(report.converted) == total:
        return f"whole{beside and ',' + beside}", ()
    reasons = {}
    for row in report.layers:
        if not row.converted:
            reason = row.detail.removeprefix(f"{row.kind}: ").removeprefix("no proposal was verified: ")
            reasons.setdefault(reason, None)
    counts = [(len(report.converted), f"in blocks{beside}"), (len(report.in_linear_layers), "in linear layers")]
    counts.append((len(report.left_alone), "as they are"))
    return ", ".join(f"{n} of {total} {how}" for n, how in counts if n), tuple(reasons)


def unnamed(model: nn.Module, report: Report) -> list[str]:
    """Return members of lists of modules with three large linear layers and more that no row of the report covers:
    layers that stay in BF16 without a word. Connectors, which have two, stay as they are."""
    rows, found = [f"{row.name}." for row in report.layers], Counter[str]()
    for name in large_linears(model):
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if place is not None and not any(name.startswith(row) for row in rows):
            found[".".join(parts[: place + 1])] += 1
    return [name for name, count in found.items() if count > 2]


def row(kind: str, mapping: str = tiny.CAUSAL) -> Row:
    """Return a kind's row, averaged over more seeds where the first is above the limit."""
    logging.disable(logging.WARNING)
    noise, floor, routes = Noise(), Noise(), Routes()
    of_tensor = mock.patch.object(Tensor, "topk", lambda x, *args, **options: routes(x, *args, **options))
    with warnings.catch_warnings(), mock.patch.object(torch, "topk", routes), of_tensor:
        warnings.simplefilter("ignore")
        for seed in range(SEEDS):
            found = _row(kind, mapping, seed, routes, noise, floor)
            if not noise.whole or not floor.whole:
                return found
            beyond = _beyond(noise, floor)
            if found.faults or not beyond:
                break
    return found._replace(ours=db(noise.of_all), alone=db(floor.of_all), faults=(*found.faults, *beyond))


def safe_row(job: tuple[str, str]) -> Row:
    """`row` of (kind, mapping) in a process of its own, quietly; an error of the sweep is a fault."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            return row(*job)
        except Exception as error:
            name = tiny.kinds(job[1])[job[0]]
            return Row(job[0], name, "ERROR", faults=(f"sweep: {short(error)} ({where(error)})",))


def short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def where(error: BaseException) -> str:
    """The last places of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))


def _row(kind: str, mapping: str, seed: int, routes: Routes, noise: Noise, floor: Noise) -> Row:
    name = tiny.kinds(mapping)[kind]
    try:
        model = tiny.tiny(kind, mapping, seed).float()
    except Exception as error:
        return Row(kind, name, "not built", (short(error),))
    notes: list[str] = []
    faults: list[str] = []
    exact: dict[str, dict[str, Tensor]] = {}
    inputs = batches(model, seed)
    ours, alone = copy.deepcopy(model), copy.deepcopy(model)  # before it has run: some hold on to tensors of a graph
    chosen = {}
    for batch, each in inputs.items():
        try:
            with routes.pass_("record"):
                exact[batch] = run(model, each)
            chosen[batch] = routes.seen
        except Exception as error:
            notes.append(f"{batch}: fails by itself ({short(error)})")
    if not exact:
        return Row(kind, name, "fails by itself", tuple(notes[:1]))
    try:
        report = overcoat.convert(ours)
    except ValueError as error:
        if type(error) is ValueError and "contains no decoder layer" in str(error):
            return Row(kind, name, "as it is", ("no decoder layer of transformers (GradientCheckpointingLayer)",))
        return Row(kind, name, "refused", (str(error),))
    except Exception as error:
        return Row(kind, name, "ERROR", (), faults=(f"convert: {short(error)} ({where(error)})",))
    trains, reasons = grades(report)
    head = "no head" if report.head is None else "yes" if report.head.converted else f"no: {report.head.detail}"
    silent = unnamed(ours, report)
    if silent:
        faults.append(f"silent: {len(silent)} layers that the report does not have, {silent[0]} the first")
    groups = fp8_linears(ours)
    for group in groups:
        multiply_in_fp8([alone.get_submodule(each) for each in group], report.recipe.grad_format)
    for path, module in ours.named_modules():
        if isinstance(module, Fp8Experts):
            experts_in_fp8(alone.get_submodule(path), module.overcoat_how, report.recipe.grad_format)
    for batch, expected in exact.items():
        for which, each in ((noise, ours), (floor, alone)):
            routes.seen = chosen[batch]
            try:
                with warnings.catch_warnings(record=True) as caught, routes.pass_("replay"):
                    warnings.simplefilter("always")
                    found = run(each, inputs[batch])
            except Exception as error:
                who = "converted" if which is noise else "FP8 GEMMs alone"
                faults.append(f"{batch}, {who}: {short(error)} ({where(error)})")
                continue
            which.add(expected, found)
            if which is floor:
                continue
            faults += [f"{batch}: {each}" for each in _wrong(expected, found)]
            told = {str(each.message) for each in caught if "overcoat" in each.filename or "layer" in str(each.message)}
            for path, ran in report.running().items():
                if ran not in ("FP8", "loss without logits") and not ran.startswith("not seen to run"):
                    (notes if told else faults).append(f"{batch}: {'' if told else 'silent: '}{path} ran: {ran}")
    return Row(kind, name, trains, reasons, head, notes=tuple(notes), faults=tuple(dict.fromkeys(faults)))


def _wrong(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    lost, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    broken = [name for name, x in found.items() if not x.isfinite().all() and expected.get(name, x).isfinite().all()]
    lines = [
        f"{len(each)} {what}: {each[0]}"
        for each, what in (
            (lost, "gradients missing"),
            (more, "gradients of parameters that have none"),
            (broken, "not finite"),
        )
        if each
    ]
    return lines


def _beyond(noise: Noise, floor: Noise) -> list[str]:
    """Return what loses more than the limit."""
    found, in_fp8 = [], floor.of_all > EXACT
    if not in_fp8 and noise.of_all > EXACT:
        found.append(f"wrong: {db(noise.of_all):.1f} dB, and nothing computes in FP8")
    if in_fp8 and noise.of_all < 1e-3 * floor.of_all:
        found.append("silent: its gradients are FP32's")
    for what, ours, alone in (("all", noise.of_all, floor.of_all), ("matrices", noise.of_matrices, floor.of_matrices)):
        if in_fp8 and 10 * math.log10(max(ours, 1e-16) / max(alone, 1e-16)) > LIMIT_DB and ours > EXACT:
            lost = {n: db(sum(floor.by_name[n])) - db(sum(x)) for n, x in noise.by_name.items() if n in floor.by_name}
            worst = sorted(lost, key=lost.__getitem__)[-3:]
            where = ", ".join(f"{each} {lost[each]:.1f}" for each in worst)
            found.append(f"wrong: gradients of {what} {db(ours):.1f} dB, alone {db(alone):.1f} dB ({where})")
    if noise.of_loss > LOSS * floor.of_loss + 1e-5:
        found.append(f"wrong: loss off by {noise.of_loss:.1e}, alone by {floor.of_loss:.1e}")
    return found
