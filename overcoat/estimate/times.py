"""Predict the time of a training step on H200s or H100s, from a dry run's ops and measured rates of kernels.

    GEMMs        2 M N K operations, by the kind of operands      gemm.jsonl; BF16 and block scales: model.jsonl
    experts      2 M N K of the tiles that the tokens of each expert fill, or their bytes if that takes longer
    attention    2 S^2 operations a column, 5 backward            attention.jsonl
    the rest     bytes: every tensor that an op is given is read, every one that it makes or mutates is written
                                                                  kernels.jsonl
    optimizer    weights and states both ways, gradients twice    optimizer.jsonl
    FSDP2        two gathers, a reduction, and their copies       sharded.jsonl
    offload      states and saved activations over PCIe           model.jsonl
    streaming    codes, weights and states over the link, whatever is longer of it and computing (not measured)
    the host     launch time per op, if it exceeds the GPU's time    layer.jsonl

The rates come from these files of benchmarks/results/; `python -m tests.estimate.recorded` compares predictions with
every measured run in them.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from overcoat.estimate.workspaces import copied
from overcoat.kernels.attention import attention, attention_backward, is_starts
from overcoat.kernels.gemm import block_gemm, gemm
from overcoat.kernels.grouped import grouped_gemm, grouped_wgrad, pair_count

# Operations a second, hot.
PRODUCTS = {"fp8": 1330e12, "fp8 exact": 1240e12, "fp8 blocks": 960e12, "bf16": 680e12}
# Of attention forward and backward: operations a second in endless rows, and the length at which there are half.
ATTENTION = ((700e12, 747), (620e12, 1027))
# An additive mask: times as long as causal.
MASKED = 3.1
# Bytes a second of passes over memory, and of AdamW's one pass.
MEMORY, ADAMW = 3.19e12, 4.07e12
# Bytes a second of other GPUs' memory, for those of an H200 (data sheets: 3.35 and 4.8 TB/s); the rest is alike.
GPUS = {"h200": 1.0, "h100": 3.35 / 4.8}
# Seconds that an op takes besides: on the GPU, and of a host of middling speed (98e-6 in the median of 24 layers, from
# 78e-6 to 166e-6; whole steps: 64e-6 to 111e-6).
LAUNCH, HOST = 4e-6, 95e-6
HOSTS = 0.7, 1.7  # times as long on others
# Bytes a second: between two GPUs of a host; over PCIe one way, and each way if both at once.
NVLINK, PCIE, PCIE_BOTH = 370e9, 52e9, 43e9
# Shares of transfers behind GEMMs that are not hidden: they use memory bandwidth, NCCL also multiprocessors.
LINK_SHOWS, PCIE_SHOWS = 0.7, 0.5
KEPT_SHOWS = 0.05  # of saved activations
# From one host to another, for each GPU: 400 Gbit/s. Not measured.
NETWORK = 50e9
# Beside the measured runs; tests/estimate/test_recorded.py holds it.
ERROR = "64 measured runs limited by the GPU: median error 1.7%, largest 7% (hidden 576: 16%); hosts differ by 2x"

_FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view")


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    found = []
    for part in value:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple, dict)):
            found += tensors_in(part)
    return found


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Optional[tuple[str | Grouped, float]]:
    """Return an op's kind and its operations, bytes or, for attention, seconds, as `__torch_dispatch__` sees it; of a
    GEMM of experts all of it, and 1. None: it launches nothing."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _FREE or not tensors_in((args, out)):
        return None
    if func is gemm or func is block_gemm:
        kind = "fp8 blocks" if func is block_gemm else "fp8" if args[6] else "fp8 exact"
        return kind, 2 * args[0].numel() * args[1].shape[0]
    if func is attention or func is attention_backward:
        qkv, (mask, batch, num_q, num_kv) = (args[0], args[1:5]) if func is attention else (args[1], args[4:8])
        columns = qkv.shape[1] * num_q // (num_q + 2 * num_kv)
        seconds = attention_seconds(batch, qkv.shape[0] // batch, columns, func is attention_backward)
        # Of all pairs where the last argument says that it is not causal.
        times = MASKED if mask is not None and not is_starts(mask) else 2.0 if args[-1] is False else 1.0
        return "attention", times * seconds
    if name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("backward")
        q = args[is_backward]  # (B, heads, S, D)
        return "attention", attention_seconds(q.shape[0], q.shape[2], q.shape[1] * q.shape[3], is_backward)
    if func.overloadpacket in flop_registry:
        return "bf16", flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
    if name == "addmm_":
        return "bf16", 2 * args[1].numel() * args[2].shape[1]
    moved = _moved(func, args, kwargs, out) + 2 * copied(func, args)
    if func is torch.ops.aten._grouped_mm.default:
        operations = 2 * args[0].numel() * args[1].shape[-1]
        return ("bf16", operations) if operations / PRODUCTS["bf16"] > moved / MEMORY else ("bytes", moved)
    grouped = _grouped(func, args, moved)
    return ("bytes", moved) if grouped is None else (grouped, 1)


class Grouped(NamedTuple):
    """A GEMM of experts. kind: of operands; pairs: of a token and one of its `experts`; rows: slots of a tile;
    per_slot: operations of a slot; moved: bytes; tokens: those of the pairs, 0 if unknown."""

    kind: str
    pairs: int
    experts: int
    rows: int
    per_slot: int
    moved: int
    tokens: int = 0

    def operations(self, load: float = 1.0) -> int:
        """Return the operations in tiles that hold a pair. load: the busiest expert's pairs over the mean."""
        return filled_tiles(self.pairs, self.experts, self.rows, load) * self.rows * self.per_slot

    def seconds(self, load: float, memory: float) -> float:
        """Return the seconds on the GPU: all weights are read or written, however few tokens chose their expert."""
        return max(self.operations(load) / PRODUCTS[self.kind], self.moved / (memory * MEMORY))


@functools.cache
def filled_tiles(pairs: int, experts: int, rows: int, load: float) -> int:
    """Return how many tiles of `rows` slots hold a pair, if the numbers of the experts' pairs fall evenly, from `load`
    times the mean: with a load above 2 down to none for the last ones."""
    visited = min(experts, int(2 * experts / load))
    step = 2 * (visited * load - experts) / (visited * (visited - 1)) if visited > 1 else 0.0  # in means
    sums = [round(pairs / experts * (n * load - step * n * (n - 1) / 2)) for n in range(visited + 1)]
    return sum(-(-(end - start) // rows) for start, end in itertools.pairwise(sums))


def _grouped(func: Any, args: Any, moved: int) -> Optional[Grouped]:
    """Return the work of a GEMM of experts in FP8, None of other ops."""
    if func is grouped_gemm:
        a, chosen, b, experts, *_ = args
        (count, columns, depth), tiles = b.shape, experts.shape[0]
        rows = (a if chosen is None else chosen).shape[0] // max(tiles, 1)
        tokens = 0 if chosen is None else a.shape[0]
        return Grouped("fp8", pair_count(tiles, count, rows), count, rows, 2 * columns * depth, moved, tokens)
    if func is grouped_wgrad:
        a, b, bounds, rows, *_, fast = args
        count = bounds.shape[0] - 1
        pairs, per_slot = pair_count(a.shape[1] // rows, count, rows), 2 * a.shape[0] * b.shape[0]
        return Grouped("fp8" if fast else "fp8 exact", pairs, count, rows, per_slot, moved)
    return None


class Work(defaultdict[tuple[bool, "str | Grouped"], float]):
    """Work of ops: operations, bytes and launches, by (whether in the backward, kind); attention in seconds; GEMMs of
    experts: how many are alike."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, kind: str | Grouped, amount: float, backward: bool) -> None:
        """Add an op's work (`work_of`)."""
        self[backward, "launches"] += 1
        self[backward, kind] += amount

    def include(self, other: Work) -> None:
        """Add all of another's work."""
        for key, amount in other.items():
            self[key] += amount

    def check_load(self, load: float) -> None:
        """Raise ValueError if the busiest expert cannot have `load` times the mean of tokens."""
        if load == 1:
            return
        grouped = [kind for _, kind in self if isinstance(kind, Grouped) and kind.tokens]
        if not grouped:
            raise ValueError(f"expert load {load:g}: no experts compute in FP8, whose time it changes; leave it out")
        most = min(each.experts * each.tokens / each.pairs for each in grouped)
        # `pair_count` is exact to a tile.
        if not load >= 1 or any(load * (each.pairs - each.rows) > each.experts * each.tokens for each in grouped):
            limit = f"expert load {load:g}: from 1, an even load, to {most:.3g}, where every token visits the expert"
            raise ValueError(limit)

    def seconds(self, backward: bool, memory: float = 1.0, load: float = 1.0) -> float:
        """Return the seconds on the GPU, without the host; memory: the GPU's bandwidth relative to an H200's; load: the
        tokens of the busiest expert over the mean."""
        products = sum(self[backward, kind] / rate for kind, rate in PRODUCTS.items())
        products += sum(
            count * kind.seconds(load, memory)
            for (back, kind), count in self.items()
            if back == backward and isinstance(kind, Grouped)
        )
        passes = self[backward, "bytes"] / (memory * MEMORY) + self[backward, "launches"] * LAUNCH
        return products + passes + self[backward, "attention"]


def attention_seconds(batch: int, sequence: int, columns: int, backward: bool) -> float:
    """Return the seconds of one layer's causal attention over heads of `columns` columns in all."""
    rate, half = ATTENTION[backward]
    return (5 if backward else 2) * batch * sequence**2 * columns * (1 + half / sequence) / rate


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an op reads and writes."""
    seen = {id(tensor): tensor for tensor in tensors_in((args, kwargs, out))}
    declared = zip(args, func._schema.arguments, strict=False)
    mutated = [arg for arg, how in declared if how.alias_info is not None and how.alias_info.is_write]
    tensors = [*seen.values(), *tensors_in(mutated)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Crossing(NamedTuple):
    """Bytes between host and GPU with `overcoat.stream`: FP8 codes, which come twice, and go once if all are trained;
    and weights with states, which come and go once; of this process' rows. sent: bytes of whole layers between GPUs."""

    codes: int
    stepped: int
    sent: int = 0

    def seconds(self, link: float) -> tuple[float, float]:
        """Return the seconds behind the forward, and each way behind the backward."""
        return self.codes / link, (self.codes + self.stepped) / link


class Sizes(NamedTuple):
    """Bytes of all weights, as FSDP2 gathers them and as it sums their gradients; of this process' part of the trained
    ones, their states, states in host memory, and saved activations there. orthogonalizing: operations of Muon in this
    process. crossing: what is streamed."""

    weights: int
    gathered: int
    reduced: int
    trained: int
    states: int
    offloaded: int
    kept_on_host: int
    orthogonalizing: float = 0.0
    crossing: Crossing = Crossing(0, 0)


class Cluster(NamedTuple):
    """gpus: in all; nodes: hosts they stand in; hybrid: sharded within a host, alike in all; network: bytes a second
    from host to host for each GPU; gpu: one of GPUS; link: bytes a second between a GPU and its host, each way."""

    gpus: int = 1
    nodes: int = 1
    hybrid: bool = False
    network: float = NETWORK
    gpu: str = "h200"
    link: float = PCIE_BOTH

    def check(self) -> Cluster:
        """Return itself. ValueError: the numbers do not make a cluster."""
        if self.gpus % self.nodes or not self.network > 0:
            raise ValueError(
                f"--gpus {self.gpus} --nodes {self.nodes} --network {self.network / 1e9:g}: as many GPUs in each host, "
                "and a rate above 0"
            )
        return self

    @property
    def sharding(self) -> int:
        """Return the number of GPUs that share a model."""
        return self.gpus // self.nodes if self.hybrid else self.gpus


ONE = Cluster()


class Times(NamedTuple):
    """Seconds of a step: the GPU's forward, backward and optimizer, transfers that they do not hide, the host's.

    crossing: with `overcoat.stream`, of the copies behind the forward and behind the backward.
    """

    forward: float
    backward: float
    optimizer: float
    links: float
    host: float
    crossing: tuple[float, float] = (0.0, 0.0)

    @property
    def on_gpu(self) -> float:
        return sum(self[:4])

    @property
    def step(self) -> float:
        return max(self.on_gpu, self.host)

    @property
    def most_crossing(self) -> float:
        """Return the seconds of copies for each second of computing that can hide them; above 1 the link limits."""
        return max(self.crossing[0] / self.forward, self.crossing[1] / self.backward)


def step_times(
    work: Work, sizes: Sizes, accumulation: int, released: bool, cluster: Cluster, load: float = 1.0
) -> Times:
    """Return the predicted times of an optimizer step of several micro-batches. load: of the busiest expert."""
    memory = GPUS[cluster.gpu]
    ahead, back = (accumulation * work.seconds(backward, memory, load) for backward in (False, True))
    passes = (4 * sizes.trained + 2 * sizes.states) / (memory * ADAMW)
    products = sizes.orthogonalizing / PRODUCTS["bf16"]
    optimizer = passes + products
    links = 0.0
    if cluster.sharding > 1:
        share, within = 1 - 1 / cluster.sharding, cluster.gpus // cluster.nodes
        across = cluster.nodes > 1 and not cluster.hybrid
        rate = min(NVLINK, within * cluster.network) if across else NVLINK
        # Twice out of the gathered buffer; into the one that is summed, and cast back.
        copied = 4 * sizes.gathered + sizes.weights + sizes.reduced
        if sizes.reduced != sizes.weights:
            copied += (sizes.weights + sizes.reduced) // cluster.sharding
        coded = sizes.weights - sizes.gathered  # twice from 2 bytes to 1, and their maximum
        links += (accumulation * (copied + 6 * coded / cluster.sharding) + 2 * coded / cluster.sharding) / (
            memory * MEMORY
        )
        sent = (2 * sizes.gathered + sizes.reduced + sizes.crossing.sent) * share
        links += _shows(ahead + back, accumulation * sent / rate, LINK_SHOWS)
    if cluster.hybrid and cluster.nodes > 1:
        part = sizes.trained * sizes.reduced / sizes.weights
        reduced = 2 * (1 - 1 / cluster.nodes) * part / cluster.network
        links += _shows(back, accumulation * reduced, LINK_SHOWS)
    if sizes.kept_on_host:
        links += accumulation * sum(_shows(each, sizes.kept_on_host / PCIE, KEPT_SHOWS) for each in (ahead, back))
    if sizes.offloaded:
        transfer = sizes.offloaded / PCIE_BOTH
        links += _shows(back + products, transfer, PCIE_SHOWS) if released else max(0.0, transfer - optimizer)
        links -= passes if released else 0.0  # hidden behind the transfers
    before, after = sizes.crossing.seconds(cluster.link)
    if sizes.crossing.codes:
        links += _shows(ahead, before, KEPT_SHOWS) + _shows(back + optimizer, after, KEPT_SHOWS)
    launches = accumulation * (work[False, "launches"] + work[True, "launches"])
    return Times(ahead, back, optimizer, links, launches * HOST, (before, after))


def _shows(work: float, transfer: float, share: float) -> float:
    """Return the seconds by which a concurrent transfer lengthens some work."""
    return max(work, transfer) + share * min(work, transfer) - work
