"""`overcoat estimate`: predict a training step's GPU memory and time, before renting the GPU.

    overcoat estimate --model llama-2-7b --batch 4 --seq 2048 --gpu-memory 80GB
    overcoat estimate --model ./config.json --batch 1 --seq 4096 --recipe leanest --release-gradients
    overcoat estimate --model llama-2-7b --batch 4 --lora 16 --gpu-memory 24GB
    overcoat estimate --config configs/llama-2-7b.toml train.batch_size=2 --gpu-memory 80GB

Prints the memory by component at the step's peak, and tokens per second on H200s or H100s, from measured kernels. With
--gpu-memory also the largest batch that fits and, if the requested one does not, the cheapest changes that make it fit.
Needs only the model's configuration: no weights, no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

from overcoat.estimate import table
from overcoat.estimate.dry_run import own_loss
from overcoat.estimate.fit import Room, advise
from overcoat.estimate.predict import Prediction, Predictor
from overcoat.estimate.setup import DTYPES, Setup
from overcoat.estimate.times import GPUS, NETWORK, PCIE_BOTH, Cluster
from overcoat.extras import fit_terminal, importing, load_extra
from overcoat.formats.masters import MASTERS
from overcoat.formats.moments import MOMENTS
from overcoat.models.convert import check_converted
from overcoat.models.dummy_batch import SIDE, sees
from overcoat.models.shapes import MODELS, load_model_config
from overcoat.recipe import GROUP_SIZES, Recipe

UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SMALLEST = 10**6  # bytes of a GPU; a smaller number lacks its unit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `overcoat estimate`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    built_in = ", ".join(MODELS)
    what.add_argument("--model", metavar="NAME|PATH", help=f"{built_in}, a config.json or its folder, or a hub name")
    what.add_argument("--config", metavar="FILE.toml", help="a training configuration; what it says replaces the rest")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to --config")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs that share the model (FSDP2; default 1)")
    parser.add_argument("--nodes", type=positive, default=1, help="machines with these GPUs (default 1)")
    parser.add_argument("--hybrid", action="store_true", help="shard within a machine, replicate between machines")
    parser.add_argument(
        "--network", type=float, metavar="GB/S", default=NETWORK / 1e9,
        help=f"between machines, per GPU (default {NETWORK / 1e9:.0f})",
    )  # fmt: skip
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose speed is predicted (default h200)")
    parser.add_argument("--gpu-memory", type=memory_size, metavar="SIZE", help="of one GPU: 80GB, 141GB, 24GiB")
    parser.add_argument(
        "--link", type=rate, metavar="RATE", default=PCIE_BOTH,
        help=f"between host and GPU, each way: 48GB/s (default {PCIE_BOTH / 1e9:.0f}GB/s)",
    )  # fmt: skip
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="of the host, with --stream: 256GB")
    parser.add_argument(
        "--expert-load", type=float, metavar="X", default=1.0,
        help="tokens of the busiest expert over the mean, as a run logs them: changes the time (default 1: even)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the tables")
    parser.set_defaults(function=run)
    setup = parser.add_argument_group("how it is trained, with --model", argument_default=argparse.SUPPRESS)
    setup.add_argument("--batch", type=positive, help="rows in a micro-batch, on each GPU (default 1)")
    setup.add_argument("--seq", type=positive, help="tokens in a row (default 2048)")
    setup.add_argument(
        "--recipe",
        nargs="+",
        metavar=("NAME", "FIELD=VALUE"),
        help="default, paper, leanest or bf16, and fields of overcoat.Recipe: --recipe default head=fp8",
    )
    setup.add_argument("--optimizer", choices=("adamw", "muon"), help="muon: of hidden matrices (default adamw)")
    setup.add_argument("--moments", help=f"{', '.join(MOMENTS)}, or a pair of formats M,V (default 8bit)")
    setup.add_argument("--master", choices=MASTERS, help="master weights of BF16 weights (default auto: bf16+8)")
    setup.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="of the moments (default 128)")
    setup.add_argument("--release-gradients", action="store_true", help="overcoat.release_gradients")
    setup.add_argument("--offload", action="store_true", help="the optimizer's offload=True: states in host memory")
    setup.add_argument("--stream", action="store_true", help="overcoat.stream: layers in host memory")
    setup.add_argument("--resident", type=positive, help="with --stream: layers that stay on the GPU (default 0)")
    setup.add_argument("--accumulation", type=positive, help="micro-batches in a step (default 1)")
    setup.add_argument("--dtype", choices=DTYPES, help="of the parameters (default bfloat16)")
    setup.add_argument("--reduce-dtype", choices=DTYPES, help="in which FSDP2 sums gradients (default: in theirs)")
    setup.add_argument("--all-gather", choices=("fp8", "bf16"), help="gathered weights: overcoat.fp8_all_gather")
    setup.add_argument("--lora", type=positive, dest="lora_rank", metavar="R", help="train adapters of rank R alone")
    setup.add_argument("--dora", action="store_true", help="with --lora: adapters are DoRA's")
    setup.add_argument("--freeze-tower", action="store_true", help="do not train a vision-language model's tower")
    setup.add_argument(
        "--image-side", type=positive, metavar="PIXELS", help=f"of the image in each row, if not fixed (default {SIDE})"
    )
    setup.add_argument("--document-mask", action="store_true", help="several documents in a row, attention masked")


def positive(text: str) -> int:
    """Parse a whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def memory_size(text: str) -> int:
    """Parse "80GB", "24 GiB" or a plain number to bytes; argparse prints the error."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 80GB (10^9 bytes) or 80GiB (2^30)")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < SMALLEST:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes, less than any GPU has; write 80GB or 80GiB")
    return size


def rate(text: str) -> float:
    """Parse "48GB/s" to bytes a second; argparse prints the error."""
    return float(memory_size(text.strip().removesuffix("/s")))


def parse_recipe(words: list[str]) -> Recipe:
    """Return a recipe from its name and field=value words. ValueError: the name, a field or its value is not known."""
    changes: dict[str, Any] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--recipe {word!r}: after the name come field=value, for example kept_attention=bf16")
        changes[key] = None if value == "none" else value
        with contextlib.suppress(ValueError):
            changes[key] = json.loads(value)  # a number, true or false
    return Recipe.from_name(words[0], **changes)


@contextlib.contextmanager
def _scanned_once() -> Iterator[None]:
    """Make transformers scan its models' files once on import, not twice (0.3 s each).

    It caches the scan by the folder's name, of which it uses two spellings.
    """
    module = load_extra("transformers.utils.import_utils", "hf", "overcoat estimate")
    scan = getattr(module, "create_import_structure_from_path", None)
    if scan is None:  # in another release
        yield
        return
    module.create_import_structure_from_path = lambda path: scan(Path(path).parent if os.path.isfile(path) else path)
    try:
        yield
    finally:
        module.create_import_structure_from_path = scan


@importing()
def run(parsed: argparse.Namespace) -> int:
    """Print the estimate. `parsed.read_config`: path, overrides, memory, cluster -> what `_what` returns."""
    with _scanned_once():
        load_extra("transformers.modeling_utils", "hf", "overcoat estimate")
    cluster = Cluster(parsed.gpus, parsed.nodes, parsed.hybrid, parsed.network * 1e9, parsed.gpu, parsed.link).check()
    predictor, batch, sequence, setup, note = _what(parsed, cluster)
    prediction = predictor.predict(batch, sequence, setup, cluster.sharding)
    check_converted(prediction.report)  # as the training does
    load, times = parsed.expert_load, None
    if setup.dtype == "bfloat16":
        times = predictor.times(batch, sequence, setup, cluster, load)
    elif load != 1:
        raise ValueError(f"--expert-load {load:g} changes the time, which is predicted of BF16 parameters only")
    room = advice = None
    if parsed.gpu_memory is not None:
        room = Room(predictor, batch, sequence, cluster.sharding, parsed.gpu_memory)
        advice = advise(room, setup)
    tokens = setup.accumulation * batch * sequence
    if parsed.json:
        data = table.as_data(prediction, room, advice)
        if times is not None:
            seconds = {**times._asdict(), "step": times.step}
            data |= {"seconds": seconds, "tokens_per_second_per_gpu": tokens / times.step, "expert_load": load}
        data |= {"gpus": parsed.gpus, "nodes": parsed.nodes}
        print(json.dumps({"model": parsed.model or parsed.config, **data}))
        return 0
    gpus = f", {parsed.gpus} GPUs" if parsed.gpus > 1 else ""
    billions = prediction.parameters / 1e9
    count = f"{billions:.3f} B" if billions >= 0.01 else f"{billions * 1e3:.3f} M"
    print(f"{count} parameters, batch {batch} x {sequence} tokens{gpus}")
    for line in filter(None, (note, table.not_converted(prediction), table.assumed(prediction))):
        print(fit_terminal(line))
    print(table.component_table(prediction))
    if times is not None:
        print(fit_terminal(table.time_line(times, tokens, cluster)))
        if setup.stream:
            print(fit_terminal(table.limit_line(times, tokens, cluster)))
    if parsed.host_memory is not None:
        require_stream(setup, parsed.gpu_memory)
        name, found = largest_streamed(batch, sequence, setup, parsed.gpu_memory, parsed.host_memory)
        print(fit_terminal(table.largest_line(name, found, parsed.gpu_memory, parsed.host_memory)))
    if room is not None and advice is not None:
        print(fit_terminal(f"\n{table.rung_table(room, advice)}\n\n{table.recommendation(room, advice)}"))
    return 0


def require_stream(setup: Setup, gpu_memory: int | None) -> None:
    """Raise ValueError if `--host-memory` decides nothing."""
    if not setup.stream or gpu_memory is None:
        raise ValueError("--host-memory goes with --stream and --gpu-memory: which is the largest model for both")


def largest_streamed(batch: int, sequence: int, setup: Setup, gpu: int, host: int) -> tuple[str, Optional[Prediction]]:
    """Return the largest of the named models of text without experts that can be streamed, and its prediction."""
    configs = {name: model.config() for name, model in MODELS.items()}
    dense = {name: config for name, config in configs.items() if not sees(config) and not _has_experts(config)}
    for name in sorted(dense, key=lambda name: _rough_size(dense[name]), reverse=True):
        with contextlib.suppress(ValueError):  # layers that cannot be streamed
            prediction = Predictor(dense[name]).predict(batch, sequence, setup)
            if prediction.total_bytes <= gpu and prediction.host_bytes <= host:
                return name, prediction
    return "", None


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts"))


def _rough_size(config: Any) -> int:
    """Return about how many parameters a model has: enough for an order."""
    width, layers = config.hidden_size, config.num_hidden_layers
    return int(layers * width * (4 * width + 3 * config.intermediate_size) + 2 * width * config.vocab_size)


def _what(parsed: argparse.Namespace, cluster: Cluster) -> tuple[Predictor, int, int, Setup, str]:
    """Return the requested model, batch, sequence and setup, and a line on what was chosen by default."""
    options = {"batch", "seq", "image_side", *(field.name for field in fields(Setup))}
    given = {name: value for name, value in vars(parsed).items() if name in options}
    if parsed.config is not None:
        for name in given:
            option = name.replace("_rank", "").replace("_", "-")
            raise ValueError(f"--{option} does not go with --config; change that: train.batch_size=8, and the like")
        return parsed.read_config(parsed.config, parsed.overrides, parsed.gpu_memory, cluster)
    if parsed.overrides:
        raise ValueError(f"{parsed.overrides[0]!r}: section.key=value changes a --config, and there is none")
    batch, sequence = given.pop("batch", 1), given.pop("seq", 2048)
    loss_of = functools.partial(own_loss, side=given.pop("image_side", SIDE))
    if "recipe" in given:
        given["recipe"] = parse_recipe(given["recipe"])
    if "," in given.get("moments", ""):
        given["moments"] = tuple(given["moments"].split(",", 1))
    setup = Setup(**given, replicated=cluster.sharding < cluster.gpus)
    return Predictor(load_model_config(parsed.model, with_images=True), loss_of), batch, sequence, setup, ""
