"""What gets leaner, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from overcoat.train.build import make_recipe
from overcoat.train.config import Config
from overcoat.train.fit import Fit, divisors, leanest, next_leaner, recipe_of
from overcoat.train.out_of_memory import fit_at

MakeConfig = Callable[..., Config]
TWELVE = ("train.batch_size=6", "train.accumulation=2")


def ladder(config: Config, fit: Fit) -> list[tuple[int, bool]]:
    """Everything that is tried, one after the other."""
    found = []
    while (leaner := next_leaner(config, fit)) is not None:
        found.append(tuple(leaner))
        fit = leaner
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [(4, False), (3, False), (2, False), (1, False), (1, True)]),
        (("train.on_oom=leaner_recipe",), [(6, True), (4, True), (3, True), (2, True), (1, True)]),
        (("recipe.name=leanest",), [(4, False), (3, False), (2, False), (1, False)]),
        (("recipe.name=bf16", "train.on_oom=leaner_recipe"), [(4, False), (3, False), (2, False), (1, False)]),
        (("train.on_oom=error",), []),
    ],
)
def test_what_is_tried(make_config: MakeConfig, words: tuple[str, ...], expected: list[tuple[int, bool]]) -> None:
    config = make_config(*TWELVE, *words)
    assert ladder(config, Fit(6)) == expected
    assert all(config.train.rows_per_step % rows == 0 for rows, _ in expected)


@pytest.mark.parametrize("way", ["smaller_batch", "leaner_recipe"])
def test_released_gradients_keep_their_batch(make_config: MakeConfig, way: str) -> None:
    config = make_config("optimizer.release_gradients=true", "optimizer.clip=0", f"train.on_oom={way}")
    assert ladder(config, Fit(2)) == [(2, True)]


def test_block_checkpoints_change_nothing_else_of_the_recipe(make_config: MakeConfig) -> None:
    config = make_config("recipe.name=paper", "recipe.z_loss=1e-4", "recipe.head=fp8")
    asked = make_recipe(config.recipe)
    assert asked.z_loss == 1e-4
    assert recipe_of(config, Fit(2)) == asked
    assert recipe_of(config, Fit(2, True)) == replace(asked, checkpoint="block")


def test_divisors() -> None:
    assert divisors(12) == [12, 6, 4, 3, 2, 1]
    assert divisors(1) == [1]
    assert divisors(7) == [7, 1]
    assert divisors(16) == [16, 8, 4, 2, 1]
    assert len(divisors(2**30)) == 31  # at once: the largest batch there may be


def test_fits_only_get_leaner() -> None:
    assert leanest([Fit(4), Fit(8, True), Fit(6)]) == Fit(4, True)
    recorded = {3: Fit(8), 5: Fit(8, True), 9: Fit(4)}
    assert fit_at(recorded, 2) is None
    assert [fit_at(recorded, step) for step in (3, 4, 5, 8, 9, 100)] == [
        Fit(8), Fit(8), Fit(8, True), Fit(8, True), Fit(4, True), Fit(4, True),
    ]  # fmt: skip


def test_a_fit_reads_as_text() -> None:
    assert str(Fit(1)) == "1 row in a forward pass"
    assert str(Fit(8, True)) == "8 rows in a forward pass, block checkpoints"
