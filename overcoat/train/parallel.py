"""A model over N processes: FSDP2 (`torch.distributed.fsdp.fully_shard`); no device ever holds the whole model.

    mesh      "full" (N,): parameters sharded over all processes. "hybrid" (nodes, N / nodes): sharded within a node,
              replicated between nodes. "none" (N, 1): replicated. Gradients are summed over all N.
    context   `parallel.context` neighboring processes get the same rows; each computes a part of the sequence
    rows      a step has `train.rows_per_step` rows for any N, split over the processes, in micro-batches of at most
              `train.batch_size` rows
    loss      each process divides by the labels of the whole step, so gradients are summed, not averaged
    reducing  after every micro-batch; or once a step (`parallel.accumulate = "whole"`), with unsharded gradients on
              every GPU, in `parallel.reduce_dtype`

A model is built on the meta device, or mapped into host memory from its files. Then one layer after the other is moved
to the device, initialized and sharded. Random weights equal those of a single process: a first pass draws all of them
without storing any and records the generator's state before each module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import overcoat
from overcoat.extras import load_extra
from overcoat.models.family import decoder_layers
from overcoat.train import process
from overcoat.train.build import base_model, build_model
from overcoat.train.config import Config, ParallelConfig, require

META, CPU = torch.device("meta"), torch.device("cpu")


def check_parallel(config: Config) -> None:
    """Refuse a configuration that this number of processes cannot run."""
    many, rows, length = process.count(), config.train.rows_per_step, config.data.sequence_length
    context, mode = config.parallel.context, config.train.compile
    among, groups = f"parallel.context = {context}", max(1, many // context)
    table = [
        (many % context, f"{among} with {many} processes: make it a divisor of them"),
        (
            context > 1 and length % (2 * context),
            f"data.sequence_length = {length} with {among}: make it a multiple of {2 * context}",
        ),
        (context > 1 and config.data.is_chat, f"data.format = {config.data.format!r} does not go with {among}"),
        (context > 1 and config.data.document_mask, f"data.document_mask = True does not go with {among}"),
        (context > 1 and mode != "none", f"train.compile = {mode!r} does not go with {among}"),
        (
            many > 1 and config.train.stream and config.parallel.shard != "full",
            f"train.stream = True streams shards of all processes, not parallel.shard = {config.parallel.shard!r}: set "
            "that to 'full'",
        ),
        (
            many > 1 and config.train.stream and config.parallel.accumulate == "whole",
            "train.stream = True adds up shards of gradients, in host memory: set parallel.accumulate to 'sharded'",
        ),
        (many > 1 and mode == "graphs", f"train.compile = 'graphs' does not go with {many} processes: leave it out"),
        (
            rows % groups,
            f"a step of {rows} rows (train.global_batch_size, or train.batch_size x train.accumulation) cannot be "
            f"divided among {groups} groups of {context} processes: make it a multiple of {groups}",
        ),
    ]
    for is_wrong, why in table:
        require(not is_wrong, why)
    num_shards(config.parallel)


def _mesh_shape(parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the shape of the device mesh: (shards,) or (replicas, shards)."""
    many = process.count()
    if parallel.shard == "none":
        return (many, 1)
    if parallel.shard == "full":
        return (many,)
    nodes = parallel.nodes or process.machines()
    require(
        nodes > 1 and many % nodes == 0,
        f"parallel.shard = 'hybrid' on {nodes} nodes with {many} processes: set parallel.nodes to a divisor of them "
        "above 1, or parallel.shard to 'full'",
    )
    return (nodes, many // nodes)


def num_shards(parallel: ParallelConfig) -> int:
    """Return into how many parts parameters are sharded."""
    return _mesh_shape(parallel)[-1] if process.count() > 1 else 1


class _ZeroGradients(torch.autograd.Function):
    """Returns the loss; its backward gives zero gradients to the given parameters, without reading their values (which
    travel in FP8)."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def reached_parameters(model: Any, loss: torch.Tensor) -> list[str]:
    """Return the names of the unsharded parameters that the backward of any process' loss reaches."""
    named = base_model(model).named_parameters()
    names = {id(each): name for name, each in named if each.requires_grad and not isinstance(each, DTensor)}
    waiting, seen, found = [loss.grad_fn], set[Any]([None]), set()
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            found.add(names.get(id(getattr(node, "variable", None)), ""))
            waiting += [each for each, _ in node.next_functions]  # type: ignore[union-attr]
    every = process.gather(found)
    return process.share(lambda: sorted(set().union(*every) - {""}))


def with_gradients(model: Any, loss: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Return the loss, whose backward also gives zero gradients to the parameters `names`: all processes must reduce
    the same parameters, also where no row has an image."""
    named = dict(base_model(model).named_parameters())
    return _ZeroGradients.apply(loss, *(named[name] for name in names))


def build_sharded(
    config: Config, tokenizer: Any | None, device: torch.device, recipe: overcoat.Recipe
) -> tuple[Any, overcoat.Report]:
    """Build and convert the configured model, sharded over all processes; return the model and the report."""
    shape = _mesh_shape(config.parallel)  # the last dimension is cut over, one before it has replicas
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, config.parallel.reduce_dtype))

    def cut(module: Any) -> None:
        """Shard a layer, or the rest of a model whose layers are sharded. Gradients are summed, not averaged."""
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    if config.model.name:
        model = build_model(config, tokenizer, CPU)
        overcoat.convert(model, recipe, strict=True)
        layers = [*decoder_layers(model).values()]
        if config.data.images:  # a tower's are part of the rest: not every pass runs them
            layers = [layer for layer in layers if layer in set(base_model(model).get_decoder().modules())]
            # So the first layer's gradients are summed before the rest's, with an image in its input or without. Not
            # by `enable_input_require_grads`: a frozen tower would be passed backward, too, and keep all for that.
            embedding = base_model(model).get_input_embeddings()
            embedding.register_forward_hook(lambda module, given, out: out.requires_grad_(True))
        _move_in_parts(model, layers, device, cut)
    else:
        draft = _Draft(config, tokenizer, device)
        model = draft.model
        overcoat.convert(model, recipe, strict=True)
        draft.fill(cut)
    cut(base_model(model))
    # Again, now that the parameters lie where they are used: what that device cannot do is refused.
    report = overcoat.convert(model, recipe, strict=True)
    if (context := config.parallel.context) > 1:
        names = ("rows", "context")
        shared = init_device_mesh(device.type, (process.count() // context, context), mesh_dim_names=names)
        overcoat.context_parallel(model, shared["context"])
    if config.parallel.all_gather == "fp8" and report.converted:
        try:
            travel = overcoat.fp8_all_gather(base_model(model))
            if travel.left_alone and process.rank() == 0:
                warnings.warn(f"parallel.all_gather: {travel}", stacklevel=2)
        except ValueError as error:
            warnings.warn(f"parallel.all_gather: {error}", stacklevel=2)
    if process.rank():
        torch.manual_seed(config.train.seed + process.rank())  # dropout differs between processes
    return model, report


class _DrawnElsewhere(TorchDispatchMode):
    """Draws random numbers of meta tensors on `device` and drops them: its generator advances as if the tensors were
    there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            func(torch.empty_like(args[0], device=self.device), *args[1:], **kwargs)
        return func(*args, **kwargs)


class _NoneForShards(TorchDispatchMode):
    """Refuses random initialization of a sharded parameter: it would differ from a single process'."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], DTensor):
            raise ValueError(
                "[model.config]: this model draws a layer's weights again after the layer itself: start it on one "
                "process, and go on from its checkpoint with more"
            )
        return func(*args, **(kwargs or {}))


class _Draft:
    """A model on the meta device that remembers the generator's state before each module's initialization on
    `device`."""

    def __init__(self, config: Config, tokenizer: Any | None, device: torch.device) -> None:
        self.device = device
        self._steps: dict[nn.Module, tuple[Any, torch.Tensor]] = {}  # in the order of transformers
        kind = load_extra("transformers", "hf", "building the model").PreTrainedModel
        initialize, draw = kind.init_weights, kind._initialize_weights

        def note(model: Any, module: nn.Module, *rest: Any, **options: Any) -> None:
            if not getattr(module, "_is_hf_initialized", False):
                self._steps[module] = (model, self._generator())
            draw(model, module, *rest, **options)

        def initialize_drafts(model: Any) -> None:
            model.initialize_weights()  # which transformers leaves out on the meta device
            initialize(model)

        kind.init_weights, kind._initialize_weights = initialize_drafts, note
        try:
            with _DrawnElsewhere(device):
                self.model = build_model(config, tokenizer, META)
        finally:
            kind.init_weights, kind._initialize_weights = initialize, draw

    def fill(self, cut: Callable[[nn.Module], None]) -> None:
        """Allocate and initialize the model, and shard each decoder layer as soon as it has its weights."""
        after = self._generator()
        rest = dict(self._steps)
        for layer in decoder_layers(self.model).values():
            inside = set(layer.modules())
            self._fill([module for module in self._steps if module in inside])
            for module in inside:
                rest.pop(module, None)
            cut(layer)
        with _NoneForShards():
            self._fill(list(rest))
        self.model.tie_weights()
        self._generator(after)

    def _fill(self, modules: list[nn.Module]) -> None:
        for module in modules:
            module.to_empty(device=self.device, recurse=False)
        with torch.no_grad():
            for module in modules:
                model, state = self._steps[module]
                self._generator(state)
                model._init_weights(module)

    def _generator(self, state: torch.Tensor | None = None) -> torch.Tensor:
        """Return the state of the device's generator, after setting it to `state` if given."""
        here: Any = torch.cuda if self.device.type == "cuda" else torch
        if state is not None:
            here.set_rng_state(state)
        return here.get_rng_state()


def _move_in_parts(
    model: nn.Module, layers: Iterable[nn.Module], device: torch.device, cut: Callable[[nn.Module], None]
) -> None:
    """Move a model to the device and shard its `layers`, one after the other."""
    for layer in layers:
        layer.to(device)
        cut(layer)
    for module in model.modules():
        module._apply(lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device), recurse=False)
