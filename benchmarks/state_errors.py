"""The error of coded AdamW states on the states of a model, by type of parameter.

What counts is what AdamW divides: r = m / (sqrt(v) + eps), against r' from the decoded m' and v'. The error of a pair
of codes over a set of parameters is relative, in units of 1e-4:

    error = 1e4 * sum (r' - r)^2 / sum r^2                    (mean_square * error / 1e4 is the plain MSE)

A code that decodes a v > 0 to 0 makes r' = m'/eps; r' is limited to +-1000, and the share of such lost elements is
reported, with the error of all others (`kept_errors`): the kindest way to look at such a code.

Legend: N groups of 128; groups are (1, N, 128) FP32, padded with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.state_codes import (
    EXACT,
    GROUP_SIZE,
    all_codes,
    maximum_first,
    maximum_second,
    rule_exponents,
    searched_exponent,
)
from benchmarks.state_use import count_use, use_table
from benchmarks.state_variations import vary_first, vary_second
from overcoat.formats import to_groups
from overcoat.kernels.adamw import rows_of

TYPES = ("embedding", "q", "k", "v", "o", "mlp", "norm", "head")
# Part of a parameter's name, and its type; the first that matches.
NAME_PARTS = (
    ("norm", "norm"),
    ("embed", "embedding"),
    ("lm_head", "head"),
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "o"),
    ("mlp", "mlp"),
)
RATIO_LIMIT = 1e3
# Groups analysed at once: bounds the temporaries to some 60 tensors of 134 MB.
CHUNK_GROUPS = 1 << 18

FLOAT_CODES = ("e4m3", "e4m3x", "e5m2", "e5m2x")
# Rows and columns of the paper's tables.
TABLE_1 = (FLOAT_CODES, FLOAT_CODES)
TABLE_8 = (("e4m3x", "de8", "de8x"), (*FLOAT_CODES, "de8", "de8x"))
PAPER, DEFAULT = ("e4m3x", "e4m3x"), ("sqrt8", "log8")
FLASH, INSTALLED = ("flash32", "flash32"), ("flashoptim", "flashoptim")


class Candidate(NamedTuple):
    """A pair of codes and its bytes per parameter, both moments, in long rows."""

    title: str
    pair: tuple[str, str]
    num_bytes: float


CANDIDATES = (
    Candidate('"fp8", the paper\'s rule', PAPER, 2 + 7 / 128),
    Candidate("the paper's best pair", ("de8x", "e4m3x"), 2 + 7 / 128),
    Candidate('"8bit"', DEFAULT, 2 + 6 / 128),
    Candidate("FlashOptim, groups of 32", FLASH, 2 + 4 / 32),
    Candidate("FlashOptim, installed", INSTALLED, 2 + 4 / 32),
    Candidate("FlashOptim, groups of 128", ("flash128", "flash128"), 2 + 4 / 128),
    Candidate('"8bit", groups of 32', ("sqrt8/32", "log8/32"), 2 + 6 / 32),
    Candidate("E4M3, k by error of the moment", ("e4m3k", "e4m3k"), 2 + 7 / 128),
    Candidate("E4M3, k by error of m/sqrt(v)", ("e4m3kr", "e4m3kr"), 2 + 7 / 128),
    Candidate("only m as in 8bit", ("sqrt8", "e4m3x"), 2 + 6 / 128),
    Candidate("only v as in 8bit", ("e4m3x", "log8"), 2 + 7 / 128),
)


def fixed_pairs() -> list[tuple[str, str]]:
    """Every pair of codes that the tables of the paper and the candidates need, once."""
    tables = [(m, v) for rows, columns in (TABLE_1, TABLE_8) for m in rows for v in columns]
    return list(dict.fromkeys([*tables, *(candidate.pair for candidate in CANDIDATES)]))


def parameter_type(name: str) -> str:
    """The type of the parameter of this name in a decoder-only transformers model."""
    for part, kind in NAME_PARTS:
        if part in name:
            return kind
    parts = ", ".join(part for part, _ in NAME_PARTS)
    raise ValueError(f"parameter {name!r} is of no known type; a name must contain one of {parts}")


def groups_by_type(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, Tensor]]:
    """The FP32 moments of every parameter, (m, v), as groups (1, N, 128) of each of TYPES that the model has."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if state["exp_avg"].dtype != torch.float32:
            raise ValueError(f"the state of {name} is {state['exp_avg'].dtype}; train with optimizer.moments=fp32")
        layout = rows_of(parameter.shape, GROUP_SIZE)
        m, v = (
            to_groups(state[key].view(layout.rows, layout.columns), GROUP_SIZE).view(1, -1, GROUP_SIZE)
            for key in ("exp_avg", "exp_avg_sq")
        )
        found.setdefault(parameter_type(name), []).append((m, v))
    return {
        kind: (torch.cat([m for m, _ in found[kind]], 1), torch.cat([v for _, v in found[kind]], 1))
        for kind in TYPES
        if kind in found
    }


# ---- errors --------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums over elements, 0-d FP64, additive over parameters.

    elements: that are not padding or never touched (v > 0). reference: of r^2. errors, kept: of (r' - r)^2 by pair,
    over all elements, and over those whose v is not lost. lost: by code of v, how many v > 0 decode to 0.
    """

    elements: Tensor
    reference: Tensor
    errors: dict[tuple[str, str], Tensor]
    kept: dict[tuple[str, str], Tensor]
    lost: dict[str, Tensor]

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(
            self.elements + other.elements,
            self.reference + other.reference,
            {pair: value + other.errors[pair] for pair, value in self.errors.items()},
            {pair: value + other.kept[pair] for pair, value in self.kept.items()},
            {name: value + other.lost[name] for name, value in self.lost.items()},
        )


def sum_errors(m: Tensor, v: Tensor, eps: float) -> Sums:
    """The sums of one set of groups: of `fixed_pairs`, of each variation beside the other code of "8bit", and of each
    code alone, the other moment exact.

    Pairs with a code that cannot run here are left out.
    """
    inverse = 1.0 / (v.sqrt() + eps)

    def ratio_of_first(decoded: Tensor) -> Tensor:
        return decoded * inverse

    def ratio_of_second(decoded: Tensor) -> Tensor:
        return m / (decoded.sqrt() + eps)

    codes = all_codes(m.device)
    first = {name: code(m) for name, code in codes.first.items()}
    second = {name: code(v) for name, code in codes.second.items()}
    m_max, v_max = maximum_first(m), maximum_second(v)
    m_rule, v_rule = rule_exponents(m, v)
    first["e4m3k"] = searched_exponent(m, m_max, m_rule, False, lambda x: x)[0]
    first["e4m3kr"] = searched_exponent(m, m_max, m_rule, False, ratio_of_first)[0]
    second["e4m3k"] = searched_exponent(v, v_max, v_rule, True, torch.sqrt)[0]
    second["e4m3kr"] = searched_exponent(v, v_max, v_rule, True, ratio_of_second)[0]
    varied_first, varied_second = vary_first(m, v, ratio_of_first), vary_second(v, ratio_of_second)
    pairs = [
        *fixed_pairs(),
        *((name, DEFAULT[1]) for name in varied_first),
        *((DEFAULT[0], name) for name in varied_second),
    ]
    first |= varied_first
    second |= varied_second
    pairs += [*((name, EXACT) for name in first), *((EXACT, name) for name in second)]
    return _sum_pairs(m, v, eps, first, second, pairs)


def _sum_pairs(
    m: Tensor,
    v: Tensor,
    eps: float,
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    pairs: list[tuple[str, str]],
) -> Sums:
    ratio = m / (v.sqrt() + eps)
    positive = v > 0
    inverses = {name: 1.0 / (decoded.sqrt() + eps) for name, decoded in second.items()}
    lost = {name: positive & (decoded == 0) for name, decoded in second.items()}
    errors, kept = {}, {}
    for pair in pairs:
        if pair[0] in first and pair[1] in second:
            decoded = (first[pair[0]] * inverses[pair[1]]).clamp(-RATIO_LIMIT, RATIO_LIMIT)
            squares = (decoded - ratio).square()
            errors[pair] = squares.sum(dtype=torch.float64)
            kept[pair] = squares.masked_fill(lost[pair[1]], 0.0).sum(dtype=torch.float64)
    counts = {name: mask.sum(dtype=torch.float64) for name, mask in lost.items()}
    return Sums(positive.sum(dtype=torch.float64), ratio.square().sum(dtype=torch.float64), errors, kept, counts)


def error_table(sums: dict[str, Sums]) -> dict[str, Any]:
    """Figures of a result row from the sums of each type; "all" pools them. Pairs are named "m v" with a bar between.

    Returns:
        elements and mean_square (of r), by type; errors by pair and type; kept_errors the same for pairs that lose
        elements; lost: share of v > 0 decoded to 0, by code of v and type, for codes that lose any.
    """
    total, *rest = sums.values()
    for part in rest:
        total = total + part
    every = {**sums, "all": total}

    def by_type(value: Any) -> dict[str, float]:
        return {kind: float(f"{float(value(part)):.4g}") for kind, part in every.items()}

    lossy = {name for name, count in total.lost.items() if count > 0}
    return {
        "elements": {kind: int(part.elements) for kind, part in every.items()},
        "mean_square": by_type(lambda part: part.reference / part.elements),
        "errors": {
            "|".join(pair): by_type(lambda part, pair=pair: 1e4 * part.errors[pair] / part.reference)
            for pair in total.errors
        },
        "kept_errors": {
            "|".join(pair): by_type(lambda part, pair=pair: 1e4 * part.kept[pair] / part.reference)
            for pair in total.errors
            if pair[1] in lossy
        },
        "lost": {
            name: by_type(lambda part, name=name: part.lost[name] / part.elements)
            for name in total.lost
            if name in lossy
        },
    }


@torch.no_grad()
def analyse(model: nn.Module, optimizer: torch.optim.Optimizer, eps: float) -> dict[str, Any]:
    """All figures of the FP32 states that `optimizer` holds for `model`: those of `error_table` and of `use_table`."""
    sums: dict[str, Sums] = {}
    counts: dict[str, dict[str, Tensor]] = {}
    for kind, (m, v) in groups_by_type(model, optimizer).items():
        for m_part, v_part in zip(m.split(CHUNK_GROUPS, 1), v.split(CHUNK_GROUPS, 1), strict=True):
            new = sum_errors(m_part, v_part, eps)
            sums[kind] = sums[kind] + new if kind in sums else new
            use = count_use(m_part, v_part, eps)
            counts[kind] = {name: counts[kind][name] + use[name] for name in use} if kind in counts else use
    return {**error_table(sums), **use_table(counts)}
