"""`overcoat bench optimizer | layer | kernels | model`: the sub-commands."""

from __future__ import annotations

import argparse

from overcoat.bench import kernels, layer, model, optimizer

BENCHMARKS = {
    "optimizer": (optimizer, "one optimizer step: ours and the installed peers"),
    "layer": (layer, "one decoder block, forward and backward: ours and the installed peers"),
    "kernels": (kernels, "every kernel against the copy bandwidth"),
    "model": (model, "whole training steps of a whole model: ours and assembled peers"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure this project and the peers that are installed, in one run on one NVIDIA GPU."
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, summary) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(benchmark)
        benchmark.set_defaults(function=module.run)
