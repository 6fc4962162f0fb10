"""bytes, time and share of the copy bandwidth of every kernel, on a model's shape.

Measured is what training steps call, with the arguments that they give: one-layer models of `SUBJECTS` take a step
while every op of ours is recorded. AdamW's step: `python -m benchmarks optimizer`.

Times are of the device alone, with cold caches.

    of copy        share of the rate at which 4 GiB are read and written by a copy
    of same size   the same of a copy that moves as many bytes as the kernel: a launch takes a few microseconds

Below 80% of the latter is a regression, or has its reason in docs/research/kernels.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.rows import Column, Row, decimals, percent
from benchmarks.session import Session, add_common_arguments, attempt, matches
from benchmarks.shapes import BlockShape, block_shape, build_model, head_dim
from benchmarks.timing import copy_ms, time_ms
from overcoat.kernels.loss import linear_cross_entropy
from overcoat.kernels.op import Op
from overcoat.models.convert import convert
from overcoat.models.shapes import Model, sizes
from overcoat.recipe import Recipe

COLUMNS = (
    Column("MB", "bytes", decimals(1, 1e-6)),
    Column("ms", "ms", decimals(4)),
    Column("TB/s", "TB_per_s", decimals(2)),
    Column("of copy", "share", percent),
    Column("of same size", "share_of_same_size", percent),
)
# Models of the shape asked for: configuration class, what differs, and the recipe.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GELU = {"hidden_act": "gelu", "use_bias": True}
SUBJECTS: dict[str, tuple[str, dict[str, Any], Recipe]] = {
    "": ("LlamaConfig", {}, Recipe()),
    "leanest": ("LlamaConfig", {}, Recipe.leanest()),
    "blocks": ("LlamaConfig", {}, Recipe(linear_scaling="block")),
    "biases": ("Qwen2Config", {}, Recipe()),
    "head norms": ("Qwen3Config", {}, Recipe()),
    "norms after": ("Olmo2Config", {}, Recipe()),
    "LayerNorm, GELU": ("Starcoder2Config", _GELU, Recipe()),
    "LayerNorm, GELU, blocks": ("Starcoder2Config", _GELU, Recipe(linear_scaling="block")),
    "gates": ("Qwen3_5TextConfig", {"layer_types": ["full_attention"]}, Recipe()),
    "experts": ("GptOssConfig", {**_EXPERTS, "attn_implementation": "eager"}, Recipe()),
}
# Bound by arithmetic, or PyTorch's own.
LIBRARY = ("attention", "gemm", "hardware")
_READ_VALUE = torch.ops.aten._local_scalar_dense.default


class Call(NamedTuple):
    """An op and its arguments, as they were before it."""

    op: Op
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        return self.op(*self.arguments)

    def moved_bytes(self, result: Any) -> int:
        """Bytes that the call must move: all tensors it is given are read, all it mutates or returns are written."""
        mutated = [self.arguments[place] for place, _ in self.op.written]
        touched = tree_leaves([self.arguments, mutated, result])
        return sum(leaf.nbytes for leaf in touched if isinstance(leaf, Tensor))


class Recorder(TorchDispatchMode):
    """Collects the calls of our ops, one for each signature: calls[signature]."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear_cross_entropy:  # plain PyTorch around an op
            with self:
                return func.reference(*args)
        if func is _READ_VALUE and args[0].device.type == "meta":
            return True
        if isinstance(func, Op) and func.reference.__module__.rpartition(".")[2] not in LIBRARY:
            assert not kwargs
            told = tree_map_only(Tensor, lambda x: f"{x.dtype}{tuple(x.shape)}".removeprefix("torch."), args)
            signature = f"{func.reference.__name__}{told}".replace("'", "")
            if signature not in self.calls:
                self.calls[signature] = Call(func, tree_map_only(Tensor, torch.clone, args))
        return func(*args, **(kwargs or {}))


def recorded(subject: str, shape: BlockShape, device: str) -> dict[str, Call]:
    """The calls of a training step of one of `SUBJECTS`."""
    kind, fields, recipe = SUBJECTS[subject]
    of = shape.model.config().get_text_config()
    heads = of.num_attention_heads, getattr(of, "num_key_value_heads", None) or of.num_attention_heads
    same = sizes(of.hidden_size, of.intermediate_size, 1, *heads, of.vocab_size, head_dim=head_dim(of))
    model = build_model(Model(kind, {**same, "pad_token_id": None, **fields}), torch.bfloat16, device)
    convert(model, recipe)
    ids = torch.randint(of.vocab_size, (shape.batch, shape.sequence), device=device)
    with Recorder() as recorder:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return recorder.calls


def measure_subject(
    subject: str, shape: BlockShape, only: Sequence[str] | None, copy_rate: float, known: Sequence[str]
) -> Row:
    """{signature: figures} of the calls that have not been measured with the subjects before."""
    torch.manual_seed(0)
    new = {signature: call for signature, call in recorded(subject, shape, "cuda").items() if signature not in known}
    found: Row = {}
    with torch.no_grad():
        for signature, call in new.items():
            name = f"{call.op.reference.__name__} {subject}".strip()
            if matches(name, only):
                found[signature] = {"name": name, **attempt(measure, call, copy_rate)}
    return found


def measure(call: Call, copy_rate: float) -> Row:
    """Bytes, ms and shares of `copy_rate`, in bytes per second, and of a copy of the same size, of one kernel."""
    moved = call.moved_bytes(call.run())
    timing = time_ms(call.run)
    rate = moved / timing["ms"] * 1e3
    shares = {"share": rate / copy_rate, "share_of_same_size": copy_ms(moved) / timing["ms"]}
    return {"bytes": moved, **timing, "TB_per_s": rate / 1e12, **shares}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="MODEL[-sTOKENS]", default="7b-s2048", help="as of layer")
    add_common_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure what every subject calls; of one that fails, say so and go on."""
    shape = block_shape(parsed.shape)
    session = Session(parsed, COLUMNS)
    session.table(f"{parsed.shape}: batch {shape.batch}, sequence {shape.sequence}, {shape.model}")
    known: list[str] = []
    for subject in SUBJECTS:
        arguments = (subject, shape, parsed.only, session.copy_rate, known)
        found = session.call(measure_subject, *arguments)
        if "error" in found:
            session.add({"shape": parsed.shape, "name": subject, **found})
            continue
        known += found
        for signature, figures in found.items():
            session.add({"shape": parsed.shape, "call": signature, **figures})
    return 0
