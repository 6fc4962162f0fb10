"""Measure what each branch of a model's layers saves for the backward, as it was and as it is converted.

Two forwards of the model in `train()` mode: in the first the layers run their own forward, in the second the converted
one. What autograd saves is recorded layer by layer (`overcoat.memory.record_kept`), and freed behind each layer, so
that both take the memory of one layer. Tensors that a layer is given beside its input (rotary tables, masks) are shared
by all layers and not counted.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from overcoat.block.mlp import Mlp
from overcoat.memory import SavedReport, SavedTensor, record_kept
from overcoat.models.compiled import eager
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.experts import Fp8Experts
from overcoat.models.family import family_of, original_class
from overcoat.models.frozen import FrozenWeight
from overcoat.models.linear_layers import Fp8Linear, SavingNorm

CONVERTED = (Fp8DecoderLayer, Fp8Linear, Fp8Experts, SavingNorm)
OWN = {"training": False, "overcoat_eval": False, "overcoat_offload": None}  # as attributes: the own forward runs
HEADS = ("branch", "of class", "state", "layers", "before", "after")  # of tables of BranchBytes
REST = "(layer)"  # what a layer's own forward saves between its modules


class BranchBytes(NamedTuple):
    """Bytes per token that a branch of one layer saves for the backward: the model's own, and converted.

    kind: the layer's class. branch: the path of its module; norms around it are included where a block or a family
    says which they are. state: "fused", "linear" (FP8 linear layers, experts or norms in its own forward) or "own".
    layers: how many have it; before, after: their mean.
    """

    kind: str
    branch: str
    state: str
    layers: int
    before: float
    after: float

    def cells(self) -> tuple[str, ...]:
        """Return a line of a table, in the order of HEADS."""
        return self.branch, self.kind, self.state, str(self.layers), f"{self.before:,.0f}", f"{self.after:,.0f}"


class Measured(NamedTuple):
    """One layer in one forward."""

    kept: SavedReport
    tokens: int


def measure_branches(model: nn.Module, names: Collection[str], batch: Mapping[str, Any]) -> list[BranchBytes]:
    """Return a row for each class of layers, branch and state. names: of the layers; batch: arguments of the model.

    ValueError: the model is in `eval()`, or checkpoints activations by itself, which hides what is saved, or has no
        layers of these names.
    """
    if not model.training:
        raise ValueError("the model is in eval(), where nothing is saved in FP8: call model.train() first")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing is on, and hides what a layer saves: call model.gradient_checkpointing_disable()"
        )
    modules = dict(model.named_modules())
    if missing := [name for name in names if name not in modules]:
        raise ValueError(f"{type(model).__name__} has no layer {missing[0]}: give it the model that was converted")
    layers = {name: modules[name] for name in names}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad(), eager():
        with _own_forwards(model):
            before = _forward(model, layers, batch, _hold_decoded)
        after = _forward(model, layers, batch)
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for name, layer in layers.items():
        if name not in after:  # of a tower that the batch has no images for
            continue
        branches = _Branches(layer)
        sizes = [branches.sizes(each[name]) for each in (before, after)]
        for branch in dict.fromkeys([*branches.states, *sizes[0], *sizes[1]]):
            key = (original_class(layer).__name__, branch, branches.state(branch))
            found.setdefault(key, []).append((sizes[0].get(branch, 0.0), sizes[1].get(branch, 0.0)))
    rows = [
        BranchBytes(*key, len(each), *(sum(column) / len(each) for column in zip(*each, strict=True)))
        for key, each in found.items()
    ]
    return [row for row in rows if row.before or row.after]


def table(rows: list[BranchBytes]) -> list[str]:
    """Return the rows as aligned lines under a head; [] if there are none."""
    if not rows:
        return []
    cells = [HEADS, *(row.cells() for row in rows)]
    names, widths = range(3), [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(row[i].ljust(widths[i]) if i in names else row[i].rjust(widths[i]) for i in range(6)) for row in cells
    ]
    return ["bytes per token that a layer saves for the backward:", *lines]


class _Branches:
    """The branches of a layer after a converted forward: which module's tensors belong to which, and their states."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.places, self.states = layer, dict[str, str](), dict[str, str]()
        self.fused: dict[bool, str] = {}  # the fused branches by whether they are MLPs
        self.behind = REST  # the branch whose norm is the block's op "norm"
        family = family_of(layer) if isinstance(layer, Fp8DecoderLayer) else None
        if family is None or layer.overcoat_ran != "FP8":
            return
        paths = {id(module): path for path, module in layer.named_modules()}
        for modules in family.branches(layer, 1):
            branch = paths[id(modules.owner)]
            norms = [each for each in (modules.pre, modules.post, *modules.around) if id(each) in paths]
            for module in (modules.owner, *norms):
                self.places.setdefault(paths[id(module)], branch)
            if modules.mixer is None:
                self.behind = branch
                continue
            self.states[branch] = "fused"
            self.fused.setdefault(isinstance(modules.mixer, Mlp), branch)
        if layer.overcoat_recipe.checkpoint == "block":  # what the block saves is that of all its branches
            together = " + ".join(self.states)
            self.places = {path: together if at in self.states else at for path, at in self.places.items()}
            self.fused, self.states = dict.fromkeys(self.fused, together), {together: "fused"}

    def sizes(self, measured: Measured) -> dict[str, float]:
        """Return the bytes per token by branch."""
        found: dict[str, float] = {}
        for row in measured.kept.rows:
            branch = self._branch(row)
            found[branch] = found.get(branch, 0.0) + row.bytes / measured.tokens
        return found

    def _branch(self, row: SavedTensor) -> str:
        if not row.module and (row.op == "norm" or not self.fused):
            return self.behind
        if not row.module:  # also what is saved around the block, such as Gemma's 1 + weight: by the first branch
            return self.fused.get(row.op.startswith("mlp"), next(iter(self.fused.values())))
        inside = [path for path in self.places if f"{row.module}.".startswith(f"{path}.")]
        return self.places[max(inside, key=len)] if inside else row.module.split(".")[0]

    def state(self, branch: str) -> str:
        """Return "fused", "linear" or "own"."""
        if branch in self.states or branch == REST:
            return self.states.get(branch, "own")
        parts = self.layer.get_submodule(branch).modules()
        is_linear = any(isinstance(part, CONVERTED) and part.overcoat_recipe is not None for part in parts)
        return "linear" if is_linear else "own"


@contextlib.contextmanager
def _own_forwards(model: nn.Module) -> Iterator[None]:
    """Let converted modules run their own forward, and no warning say that they do."""
    before = {module: dict(vars(module)) for module in model.modules() if isinstance(module, CONVERTED)}
    for module in before:
        vars(module).update(OWN)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, own in before.items():
            for name in OWN:
                vars(module).pop(name)
            vars(module).update({name: own[name] for name in OWN if name in own})


@contextlib.contextmanager
def _hold_decoded(layer: nn.Module) -> Iterator[None]:
    """Hold a layer's frozen weights in 16 bits: its own forward would decode them for each use, and save that."""
    held = [module for module in layer.modules() if isinstance(module._parameters.get("weight"), FrozenWeight)]
    weights: list[Any] = [module._parameters["weight"] for module in held]
    for module, weight in zip(held, weights, strict=True):
        module._parameters["weight"] = nn.Parameter(weight.decoded(), requires_grad=False)
    try:
        yield
    finally:
        for module, weight in zip(held, weights, strict=True):
            module._parameters["weight"] = weight


def _forward(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batch: Mapping[str, Any],
    around: Callable[[nn.Module], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Measured]:
    """Run the model once; return what was recorded of each layer at its first call. around: a layer while it runs."""
    found: dict[str, Measured] = {}
    with contextlib.ExitStack() as handles, contextlib.ExitStack() as recording:
        for name, layer in layers.items():
            first = tuple(inspect.signature(original_class(layer).forward).parameters)[1]

            def enter(layer: Any, args: Any, kwargs: Any, name: str = name, first: str = first) -> None:
                x = args[0] if args else kwargs[first]
                others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not x]
                if name not in found:
                    recording.enter_context(around(layer))
                    kept = recording.enter_context(record_kept(layer, others))
                    found[name] = Measured(kept, x.shape[:-1].numel())

            def leave(_layer: Any, _args: Any, result: Any) -> Any:
                recording.close()
                return tree_map(_cut, result)

            handles.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(layer.register_forward_hook(leave).remove)
        model(**batch)
    return found


def _cut(value: Any) -> Any:
    """Return a tensor without its graph, which holds what was saved; it wants a gradient as before."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_().clone()  # no leaf: the next layer may change it in place
