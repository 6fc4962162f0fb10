"""`train.compile`: compiled and recorded layers train to the losses of the same layers as they are."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._dynamo.testing import CompileCounterWithBackend

import overcoat
from overcoat.models.compiled import forget
from overcoat.optim.release import BATCH_BYTES
from overcoat.train import loop
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.run import check_before_training, run
from tests.models.graphs import recorded, skipped
from tests.train.runs import CONFIGS, MakeConfig, before_steps, fits_of, losses, run_out_of_memory
from tests.train.test_out_of_memory import Scarcity

Losses = dict[str, dict[int, tuple[float, ...]]]
RELEASED = ("optimizer.release_gradients=true", "optimizer.clip=0")


@pytest.fixture(autouse=True)
def _forget_after() -> Iterator[None]:
    yield
    forget()


def out_of_memory_at(patch: pytest.MonkeyPatch, step: int, rows: int) -> None:
    """Before a step takes so many rows at once."""
    before_steps(patch, lambda state: (state.step + 1, state.plan.micro_batch) == (step, rows) and run_out_of_memory())


# ---- on a CPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[CompileCounterWithBackend]:
    """Counts what is compiled, and runs it without a C++ compiler."""
    counter = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance(force_backend=counter):
        yield counter


@pytest.fixture
def both(make_config: MakeConfig, tmp_path: Path, graphs: CompileCounterWithBackend) -> Callable[..., list[Losses]]:
    """`both("key=value", ...)`: train with these changes, not compiled and compiled."""

    def train(*words: str) -> list[Losses]:
        found = []
        for mode in ("none", "layers"):
            assert graphs.frame_count == 0
            folder = tmp_path / mode
            console = Console(file=io.StringIO())
            run(make_config(f"train.run_dir={folder}", f"train.compile={mode}", "train.steps=4", *words), console)
            found.append(losses(folder))
        assert found[0]["train"].keys() == {1, 2, 3, 4}
        return found

    return train


@pytest.mark.parametrize(
    "words",
    [
        ("recipe.name=leanest", *RELEASED),
        pytest.param(("optimizer.offload=true", "data.document_mask=true"), marks=pytest.mark.nightly),
        pytest.param(("recipe.name=bf16",), marks=pytest.mark.nightly),
    ],
    ids=["leanest, released", "offload, documents", "bf16"],
)
def test_compiled_layers_train_to_the_same_losses(
    both: Callable[..., list[Losses]], graphs: CompileCounterWithBackend, words: tuple[str, ...]
) -> None:
    none, layers = both(*words)
    assert layers == none
    assert graphs.frame_count >= 1


def test_a_step_out_of_memory_is_taken_again_with_layers_compiled_anew(
    both: Callable[..., list[Losses]], graphs: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory_at(monkeypatch, step=3, rows=2)
    none, layers = both("train.accumulation=2", "sample.tokens=4")
    assert layers == none
    assert graphs.frame_count == 2  # two rows, then one, as constants


@pytest.mark.parametrize("words", [(), RELEASED], ids=["", "released"])
def test_graphs_need_a_gpu(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"'graphs' records CUDA graphs, and train.device = 'cpu' .* 'layers' or 'none'"
    ):
        check_before_training(make_config("train.compile=graphs", *words))


# ---- on a GPU -------------------------------------------------------------------------------------------------------

STEPS = 6
SMALL = f"""train.device=cuda train.steps={STEPS} train.log_every=1 train.tensorboard=false train.batch_size=4
    schedule.warmup_steps=1 optimizer.clip=0.5 data.max_bytes=1000000 data.sequence_length=128
    tokenizer.vocab_size=512 eval.every=2 checkpoint.every=3 sample.tokens=8"""


def train(tmp_path: Path, name: str, *words: str) -> Losses:
    """A short run in `tmp_path / name` on tokens that all runs share."""
    places = [f"train.run_dir={tmp_path / name}", f"data.cache_dir={tmp_path / 'data'}", "compare.overrides=[]"]
    run(load_config(CONFIGS / "demo.toml", [*SMALL.split(), *places, *words]), Console(quiet=True))
    return losses(tmp_path / name)


def assert_close(found: Losses, expected: Losses) -> None:
    """As two runs on a GPU are, whose unordered sums differ: to a thousandth, gradient norms to a hundredth."""
    for kind in ("train", "eval"):
        rows = expected[kind]
        assert found[kind].keys() == rows.keys()
        for step, (loss, *rest) in rows.items():  # of a training step also its rate, and the norm
            assert found[kind][step][0] == pytest.approx(loss, rel=1e-3), (kind, step)
            assert found[kind][step][1:] == pytest.approx(tuple(rest), rel=1e-2), (kind, step)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """After each step: how many graphs were there (the run itself forgets them), and how many had been skipped."""
    forget()  # graphs of tests before, in whichever order they run
    found: list[tuple[int, int]] = []
    real, before = loop.train_step, skipped()

    def step(state: Any, config: Config) -> Any:
        record = real(state, config)
        found.append((recorded(), skipped() - before))
        return record

    monkeypatch.setattr(loop, "train_step", step)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("recipe", ["default", "leanest"])
def test_graphs_train_to_the_same_losses(
    recipe: str, accumulation: int, tmp_path: Path, counts: list[tuple[int, int]]
) -> None:
    """Also clipped; once all is recorded, steps are replayed. The gradients' bits: tests/models/test_compiled.py."""
    words = (f"recipe.name={recipe}", f"train.accumulation={accumulation}")
    none = train(tmp_path, "none", *words)
    assert counts == [(0, 0)] * STEPS
    counts.clear()
    assert_close(train(tmp_path, "graphs", *words, "train.compile=graphs"), none)
    layers = load_config(tmp_path / "graphs" / "config.toml").model.config["num_hidden_layers"]
    assert counts[-1] >= (2 * layers, 0)
    assert counts[3:] == [counts[-1]] * (STEPS - 3), counts
    assert {skips for _, skips in counts} == {0}
    assert recorded() == 0


@pytest.mark.gpu
def test_graphs_are_recorded_anew_with_fewer_rows(
    tmp_path: Path, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the fifth step's passes, two by then, one is measured and one warms up; the sixth records and replays."""
    out_of_memory_at(monkeypatch, step=5, rows=4)
    none = train(tmp_path, "none")
    counts.clear()
    assert_close(train(tmp_path, "graphs", "train.compile=graphs"), none)
    there = [count > 0 for count, _ in counts]
    assert there == [False, False, True, True, False, True], counts
    assert {skips for _, skips in counts} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("words", [(), RELEASED], ids=["", "released"])
def test_a_resumed_run_of_graphs_goes_on_as_the_whole_one(words: tuple[str, ...], tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *words, "train.compile=graphs")
    resume = f"train.resume={list_checkpoints(tmp_path / 'whole' / 'checkpoints')[0]}"
    rest = train(tmp_path, "rest", *words, "train.compile=graphs", resume)
    later = {kind: {step: row for step, row in rows.items() if step > 3} for kind, rows in whole.items()}
    assert_close(rest, later)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_bytes", [1, BATCH_BYTES])
@pytest.mark.parametrize("recipe", ["default", "leanest"])
def test_graphs_of_released_gradients_train_to_the_same_losses(
    recipe: str, batch_bytes: int, tmp_path: Path, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stepped layer by layer, and at the end of the backward: between evaluations and checkpoints, all replayed."""
    each = functools.partial(overcoat.release_gradients, batch_bytes=batch_bytes)
    monkeypatch.setattr(overcoat, "release_gradients", each)
    words = (f"recipe.name={recipe}", *RELEASED)
    none = train(tmp_path, "none", *words)
    counts.clear()
    assert_close(train(tmp_path, "graphs", *words, "train.compile=graphs"), none)
    layers = load_config(tmp_path / "graphs" / "config.toml").model.config["num_hidden_layers"]
    assert counts[-1] >= (2 * layers, 0)
    assert counts[3:] == [counts[-1]] * (STEPS - 3), counts
    assert {skips for _, skips in counts} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize(("where", "again"), [("backward", []), ("embedding", [4])])
def test_released_graphs_out_of_memory_go_on_as_eager_ones(
    where: str, again: list[int], tmp_path: Path, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fifth step, before a weight has moved, and once weights have: then from the checkpoint of the third."""
    each_alone = functools.partial(overcoat.release_gradients, batch_bytes=1)
    monkeypatch.setattr(overcoat, "release_gradients", each_alone)
    scarcity = Scarcity(5, lambda plan: not plan.block_checkpoints, where).install(monkeypatch)
    found, words = [], (*RELEASED, "train.steps=9")
    for mode in ("none", "graphs"):
        counts.clear()
        scarcity.tried.clear()
        found.append(train(tmp_path, mode, *words, f"train.compile={mode}"))
        assert [step for step, _ in scarcity.tried] == [1, 2, 3, 4, 5, *again, 5, 6, 7, 8, 9]
        assert fits_of(tmp_path / mode) == {5: (4, True)}
    assert_close(found[1], found[0])
    assert counts[-1] > (0, 0)
    assert counts[-2:] == [counts[-1]] * 2, counts
    assert {skips for _, skips in counts} == {0}
