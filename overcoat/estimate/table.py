"""Estimates as text and as plain data for `--json`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

from overcoat.estimate.delta_rule import ASSUMED
from overcoat.estimate.fit import Advice, Room
from overcoat.estimate.predict import Prediction
from overcoat.estimate.times import ERROR, HOSTS, Cluster, Times

GIBI = 2.0**30
# Components below this are left out of the table.
LEAST = 2**20


def gib(size: float) -> str:
    """Format bytes as a number of GiB."""
    return f"{size / GIBI:,.2f}"


def component_table(prediction: Prediction) -> str:
    """Format the GPU's memory at the peak of a step."""
    peak = prediction.peak_bytes
    lines = [f"{'at the peak, ' + prediction.moment:38s} {'GiB':>8s}   share"]
    for name, size in prediction.components.items():
        if size >= LEAST:
            lines.append(f"{name:38s} {gib(size):>8s}  {size / peak:6.1%}")
    sums = {
        "allocated": peak,
        "allocator, margin": prediction.slack_bytes,
        f"CUDA context{' and NCCL' if prediction.gpus > 1 else ''}, margin": prediction.context_bytes,
        "needed on each GPU": prediction.total_bytes,
    }
    if prediction.host_bytes:
        sums["page-locked host memory, each process"] = prediction.host_bytes
    return "\n".join([*lines, *(f"{name:38s} {gib(size):>8s}" for name, size in sums.items())])


def time_line(times: Times, tokens: int, cluster: Cluster) -> str:
    """Format the time of a step, tokens per GPU, and the measured error of such predictions."""
    named = list(times._asdict().items())[:-1]
    parts = ", ".join(f"{name} {seconds * 1e3:,.0f}" for name, seconds in named if seconds >= 5e-4)
    all_gpus = f" ({cluster.gpus * tokens / times.step:,.0f} in all)" if cluster.gpus > 1 else ""
    where = f", {cluster.nodes} hosts, {cluster.network / 1e9:.0f} GB/s between them" if cluster.nodes > 1 else ""
    fast, slow = (max(times.on_gpu, share * times.host) for share in HOSTS)
    hosts = f"\nfrom {tokens / slow:,.0f} to {tokens / fast:,.0f} with a slow or a fast host (CPU)" * (slow > fast)
    return (
        f"about {tokens / times.step:,.0f} tokens/s on each {cluster.gpu.upper()}{all_gpus}{where}: "
        f"{times.step * 1e3:,.0f} ms a step; {parts}{hosts}\n({ERROR})"
    )


def limit_line(times: Times, tokens: int, cluster: Cluster) -> str:
    """Return a line on what limits a step with `overcoat.stream`, or ""."""
    if not times.most_crossing:
        return ""
    enough = math.ceil(tokens * times.most_crossing)
    limit = "the link" if times.most_crossing > 1 else "the GPU"
    return f"{limit} limits: at {cluster.link / 1e9:g} GB/s each way computing does from about {enough:,} tokens a step"


def largest_line(name: str, prediction: Optional[Prediction], limit: int, host: int) -> str:
    """Return a line on the largest model that can be streamed."""
    where = f"{gib(limit)} GiB of GPU and {gib(host)} GiB of host memory"
    if prediction is None:
        return f"none of the named models fits into {where}"
    needed, on_host = gib(prediction.total_bytes), gib(prediction.host_bytes)
    return f"the largest named model for {where}: {name}, {needed} and {on_host} GiB"


def not_converted(prediction: Prediction) -> str:
    """Return a line on decoder layers that are not converted, or ""."""
    reasons = sorted(set(prediction.report.left_alone.values()) - {"Recipe.bf16()"})
    if not reasons:
        return ""
    count = len(prediction.report.left_alone)
    return f"{count} of {len(prediction.report.layers)} decoder layers keep their precision: {'; '.join(reasons)}"


def assumed(prediction: Prediction) -> str:
    """Return a line on what the estimate assumes of other libraries, or ""."""
    return ASSUMED if prediction.has_delta_rule else ""


def rung_table(room: Room, advice: Advice) -> str:
    """Format the requested setup and each change on top of the previous one: bytes allocated (as PyTorch will report
    them) and needed, largest batch, price."""
    lines = [f"{'':34s} {'allocated':>10s} {'needed GiB':>10s} {'largest batch':>13s}   price"]
    for rung in advice.rungs:
        name = "as asked" if rung.change is None else f"+ {rung.change.name}"
        price = "" if rung.change is None else rung.change.price
        largest = room.largest_batch(rung.prediction.setup)
        allocated, needed = gib(rung.prediction.peak_bytes), gib(rung.prediction.total_bytes)
        lines.append(f"{name:34s} {allocated:>10s} {needed:>10s} {largest:13d}   {price}".rstrip())
    return "\n".join(lines)


def recommendation(room: Room, advice: Advice) -> str:
    """Format the recommendation, in one or two sentences."""
    where = f"{gib(room.limit)} GiB" + (f" on each of {room.gpus} GPUs" if room.gpus > 1 else "")
    if advice.changes is None:
        least = advice.rungs[-1].prediction.total_bytes
        smaller = room.largest_batch(advice.rungs[-1].prediction.setup)
        otherwise = "shorter sequences, more GPUs, or a smaller model"
        remedy = f"batch {smaller} fits with all of it" if smaller else otherwise
        needs = f"with everything above it needs {gib(least)} GiB; {remedy}"
        return f"Batch {room.batch} does not fit into {where}: {needs}."
    if not advice.changes:
        return f"Batch {room.batch} fits into {where} as asked."
    names = ", ".join(change.name for change in advice.changes)
    needed, largest = gib(room.predict(advice.setup).total_bytes), room.largest_batch(advice.setup)
    return f"Batch {room.batch} fits into {where} with {names}: {needed} GiB needed, largest batch {largest}."


def as_data(prediction: Prediction, room: Optional[Room], advice: Optional[Advice]) -> dict[str, Any]:
    """Return the whole estimate as plain data, sizes in bytes."""
    plain = ("components", "moment", "peak_bytes", "slack_bytes", "context_bytes", "total_bytes", "host_bytes")
    data = {name: getattr(prediction, name) for name in ("parameters", "batch", "sequence", "gpus", "has_delta_rule")}
    data["setup"] = dataclasses.asdict(prediction.setup)
    data |= {name: getattr(prediction, name) for name in plain}
    data["left_alone"] = prediction.report.left_alone
    if room is not None and advice is not None:
        changes = advice.changes
        data |= {
            "gpu_memory": room.limit,
            "rungs": [
                {
                    "change": None if change is None else change.name,
                    "peak_bytes": found.peak_bytes,
                    "total_bytes": found.total_bytes,
                    "largest_batch": room.largest_batch(found.setup),
                }
                for change, found in advice.rungs
            ],
            "fits": changes == [],
            "recommendation": None if changes is None else [change.name for change in changes],
            "recommended_setup": None if changes is None else dataclasses.asdict(advice.setup),
        }
    return data
