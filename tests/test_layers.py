"""The package's layers: a module imports from its own package and from layers below, and never in a circle."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter

from overcoat.models import family
from tests.mutations import MUTATIONS, ROOT

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "overcoat").rglob("*.py"))
}
# From the bottom up. "" is the package itself: what `import overcoat` gives.
LAYERS = (
    ("version", "recipe", "extras", "memory", "pinned_memory", "ops of the device"),
    ("formats",),
    ("kernels",),
    ("block", "optim"),
    ("models",),
    ("distributed",),
    ("streaming",),
    ("",),
    ("estimate",),
    ("train",),
    ("report", "init", "eval", "doctor"),
    ("export",),
    ("cli",),
    ("__main__",),
)
# What the formats' references are written with.
LOWEST_KERNELS = ("op", "language", "launch", "instructions", "hardware")
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def part_of(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    name = module.removeprefix("overcoat").removeprefix(".")
    if name.removeprefix("kernels.") in LOWEST_KERNELS:
        return "ops of the device"
    return name if name in RANKS else name.split(".")[0]


def imports(module: str, code: str) -> set[str]:
    """The package's modules that the code of a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            assert node.level == 0, f"{module}: imports are absolute here"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
    return found - {module}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {module: imports(module, path.read_text()) for module, path in MODULES.items()}


def test_nothing_is_imported_from_above() -> None:
    assert not [module for module in MODULES if part_of(module) not in RANKS], "give these a place in LAYERS"
    from_above = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if part_of(module) != part_of(other) and RANKS[part_of(other)] >= RANKS[part_of(module)]
    ]
    assert not from_above


def test_nothing_is_imported_in_a_circle() -> None:
    TopologicalSorter(graph()).prepare()


def test_what_counts_as_an_import() -> None:
    code = "import torch, overcoat\nfrom overcoat import memory, Recipe\ndef f():\n    from overcoat.train import run\n"
    assert imports("overcoat.x", code) == {"overcoat", "overcoat.memory", "overcoat.train.run"}
    assert part_of("overcoat.kernels.hardware") == "ops of the device"
    assert (part_of("overcoat.kernels.adamw"), part_of("overcoat")) == ("kernels", "")


def test_mutations_are_of_code_that_is_there() -> None:
    """`python -m tests.mutations` takes an hour; that a text is gone shows at once."""
    for mutation in MUTATIONS:
        assert (ROOT / "overcoat" / mutation.path).read_text().count(mutation.text) == 1, mutation.name


def test_every_file_of_families_is_imported() -> None:
    files = {path.stem for path in (ROOT / "overcoat/models/families").glob("*.py")} - {"__init__"}
    assert {*family.MODULES} == files
