"""Tools of the repository: Overcoat beside its peers, the paper's tables, measurements that the documents quote.

    python -m benchmarks layer                 one of them; --help says what it measures
    python -m benchmarks paper list            the tables and figures of COAT
    python -m benchmarks layer --json FILE     appends rows: date, commit, GPU, versions, command, figures

Exit status: 0 done; 2 a mistake in what was asked for, or a package or GPU that is missing, in one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Those with `add_arguments` and `run`, which import PyTorch only when they are asked for.
TOOLS = {
    "layer": "one decoder block, forward and backward: ours and the installed peers",
    "optimizer": "one optimizer step: ours and the installed peers",
    "muon": "one step of Muon: ours, peers, and the products that bound it",
    "model": "whole training steps of a whole model: ours and assembled peers",
    "kernels": "every kernel against the copy bandwidth",
    "paper": "the tables and figures of COAT, measured here",
    "turns": "the working tree beside another commit, in turns in one process",
    "memory": "predicted beside measured peaks of whole training steps",
    "scores": "gradients where attention's scores are large",
    "pretrained": "real weights: gradients beside FP32's, fine-tuning beside BF16's",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one tool; return the exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `overcoat` does: threads that spin slow each other
    words = sys.argv[1:] if argv is None else list(argv)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, summary in TOOLS.items():
        tool = tools.add_parser(name, help=summary, formatter_class=raw)
        if name in words[:1]:
            module = importlib.import_module(f"benchmarks.{name}")
            tool.description = module.__doc__
            for each in module.add_arguments(tool) or [tool]:
                each.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per row")
            tool.set_defaults(function=module.run)
    parsed = parser.parse_args(words)
    try:
        return int(parsed.function(parsed))
    except (ValueError, FloatingPointError) as error:
        print(f"benchmarks {parsed.tool}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
