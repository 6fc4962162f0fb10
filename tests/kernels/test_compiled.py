"""What ptxas would make wrong bytes of: searched for in the PTX of every kernel that makes FP8, without a GPU.

ptxas 12.8 and 12.9, Triton's for sm_90, lose the other uses of a conversion to two FP8 bytes that is the low half of a
`mov.b32` (docs/research/kernels.md). As high half, or as half of two such words, it is safe; so is ptxas 13.0.
Conversions of the same two numbers, which are one to ptxas, are not safe as half of any such word.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("triton")

from tests.kernels.compare import INTERPRETED

if INTERPRETED:
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from tests.kernels import variants

CONVERSION = re.compile(r"cvt\.rn\.satfinite\.(?:relu\.)?e\dm\dx2\.\w+\s+(%\w+),")
SOURCES = re.compile(r"cvt\.rn\.satfinite\.((?:relu\.)?e\dm\dx2)\.\w+\s+(%\w+),([^;]+)")
JOIN = re.compile(r"mov\.b32\s+%\w+,\s*\{\s*(%\w+),\s*(%\w+)\s*\}")


def lost_conversions(ptx: str) -> list[str]:
    """Registers that ptxas takes for dead: FP8 pairs that are the low half of a word and used in another way too, and
    pairs made twice, if they are half of one."""
    ptx = named_apart(re.sub(r"//.*", "", ptx))
    pairs = set(CONVERSION.findall(ptx))
    low, halves, otherwise = Counter[str](), Counter[str](), Counter[str]()
    for statement in ptx.split(";"):
        statement += ";"
        join = JOIN.search(statement)
        if ".reg" in statement:
            continue
        if join:
            low[join[1]] += 1
            halves.update(join.groups())
        else:
            written = CONVERSION.search(statement)
            used = re.findall(r"%\w+", statement)
            if written:
                used.remove(written[1])
            otherwise.update(used)
    made: dict[tuple[str, ...], list[str]] = {}
    for form, register, sources in SOURCES.findall(ptx):
        made.setdefault((form, *re.findall(r"%\w+", sources)), []).append(register)
    twice = {register for registers in made.values() if len(registers) > 1 for register in registers}
    return sorted(
        register for register in pairs if (low[register] and otherwise[register]) or twice & {register} & set(halves)
    )


def named_apart(ptx: str) -> str:
    """The registers that blocks `{ .reg .b16 a, b; ... }` declare, each with a name of its own."""

    def rename(block: re.Match[str]) -> str:
        text, number = block[0], block.start()
        for name in {name for names in re.findall(r"\.reg\s+\.\w+\s+([^;%]+);", text) for name in names.split(",")}:
            text = re.sub(rf"(?<![\w%.]){name.strip()}\b", f"%{name.strip()}_{number}", text)
        return text

    return re.sub(r"\{\s*\.reg[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", rename, ptx)


@pytest.fixture(scope="module")
def launched():
    return variants.launched()


def test_samples_launch_every_kernel(launched):
    assert not set(variants.entry_kernels()) - set(launched)


@pytest.mark.nightly  # compiles every variant of every kernel; on a GPU wrong bytes fail the tests of the kernel
@pytest.mark.parametrize("name", variants.entry_kernels())
def test_ptxas_loses_no_conversion(name, launched):
    for variant in launched[name]:
        ptx = variant.ptx()
        assert bool(ptx) == bool(CONVERSION.search(named_apart(ptx))), (
            f"the search for conversions has become blind: {variant}"
        )
        lost = lost_conversions(ptx)
        assert not lost, f"ptxas would lose {len(lost)} FP8 pairs: {variant}"
