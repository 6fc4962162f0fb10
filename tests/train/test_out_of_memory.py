"""Steps that run out of memory, simulated on the CPU: taken again, recorded, replayed.

What a run with a fallback computes is compared, bit for bit, with a run that was configured so from that step on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import overcoat
from overcoat.train import loop
from overcoat.train.batch_plan import BatchPlan
from overcoat.train.checkpoint import read_record
from overcoat.train.config import Config
from overcoat.train.out_of_memory import DoesNotFitError, OomRetry, is_out_of_memory
from overcoat.train.run import RunResult, run_once
from overcoat.train.state import TrainState
from tests.train.runs import (
    MakeConfig,
    assert_same_end,
    assert_same_run,
    before_steps,
    fits_of,
    losses,
    make_state,
    names,
    run_out_of_memory,
    text_of,
)

FOUR_ROWS = ("train.batch_size=4", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=2")
STREAM = ("data.streaming=true", "data.shuffle_rows=8", "data.held_out=0.3")
RELEASED = (*FOUR_ROWS, "optimizer.release_gradients=true", "optimizer.clip=0")
Train = Callable[..., RunResult]


@dataclass
class Scarcity:
    """A GPU on which the micro-batch number `place` of step `step` runs out of memory while `too_much(fit)`.

    where: in the forward pass, in the loss's backward, or when backward arrives at the embedding, its last part.
    """

    step: int
    too_much: Callable[[BatchPlan], bool]
    where: str = "forward"
    place: int = 0
    tried: list[tuple[int, BatchPlan]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Scarcity:
        real_loss = loop.summed_loss
        now: dict[str, Any] = {}

        def begin(state: TrainState) -> None:
            self.tried.append((state.step + 1, state.plan))
            now.update(place=-1, fails=state.step + 1 == self.step and self.too_much(state.plan))

        def loss(model: Any, *batch: Any) -> torch.Tensor:
            now["place"] += model.training
            if not (model.training and now["fails"] and now["place"] == self.place):
                return real_loss(model, *batch)
            if self.where == "forward":
                run_out_of_memory()
            hook = lambda _m, _a, out: out.register_hook(run_out_of_memory) and None  # noqa: E731
            handle = model.get_input_embeddings().register_forward_hook(hook)
            result = real_loss(model, *batch)
            handle.remove()
            if self.where == "backward":
                result.register_hook(run_out_of_memory)
            return result

        before_steps(monkeypatch, begin)
        monkeypatch.setattr(loop, "summed_loss", loss)
        return self


@pytest.fixture
def train(make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train("key=value", ..., to="folder", scarce=(...,))`: a run in `tmp_path / to` that runs out of memory."""

    def run(*words: str, to: str = "run", scarce: tuple[Scarcity, ...] = (), start: str = "") -> RunResult:
        resume = [f"train.resume={start}"] if start else []
        with monkeypatch.context() as patch:
            for scarcity in scarce:
                scarcity.install(patch)
            return run_once(make_config(*words, f"train.run_dir={tmp_path / to}", *resume), console, to)

    return run


WAYS = {
    "smaller_batch": ((2, False), ("train.batch_size=2", "train.accumulation=2")),
    "leaner_recipe": ((4, True), ("recipe.checkpoint=block",)),
}


@pytest.mark.parametrize(
    ("way", "where"),
    [*(pytest.param("smaller_batch", where, marks=pytest.mark.nightly) for where in ("forward", "backward")),
     ("smaller_batch", "embedding"), ("leaner_recipe", "embedding")],
)  # fmt: skip
def test_a_step_is_taken_again_as_if_it_had_been_configured_so(
    train: Train, console: Console, tmp_path: Path, way: str, where: str
) -> None:
    plan, changes = WAYS[way]
    words = (*FOUR_ROWS, "data.document_mask=true")  # then micro-batches differ in their labels
    scarcity, run_dir = Scarcity(3, lambda tried: tried == BatchPlan(4), where), tmp_path / "run"
    result = train(*words, f"train.on_oom={way}", scarce=(scarcity,))
    assert [step for step, _ in scarcity.tried] == [1, 2, 3, 3, 4]
    assert scarcity.tried[-1][1] == BatchPlan(*plan)
    assert fits_of(run_dir) == {3: plan}
    assert text_of(console).count("step 3 ran out of memory; taking it again with") == 1
    start = run_dir / "checkpoints/step-00000002"
    other = train(*words, *changes, to="other", start=str(start))
    expected, found = losses(tmp_path / "other"), losses(run_dir)
    assert {step: found["train"][step] for step in (3, 4)} == expected["train"]
    assert found["eval"][4] == expected["eval"][4]
    assert result.num_tokens == 4 * 4 * 32
    assert_same_end(run_dir, tmp_path / "other")
    if way == "leaner_recipe":  # what the last fit keeps, and not what the first did
        assert other.kept_bytes == result.kept_bytes < read_record(start)["kept_bytes"]


def test_gradients_of_finished_micro_batches_are_dropped(train: Train, tmp_path: Path) -> None:
    scarcity = Scarcity(3, lambda plan: plan.micro_batch > 1, "embedding", place=1)
    train(*FOUR_ROWS, "train.batch_size=2", "train.accumulation=2", scarce=(scarcity,))
    start = tmp_path / "run/checkpoints/step-00000002"
    train(*FOUR_ROWS, "train.batch_size=1", "train.accumulation=4", to="other", start=str(start))
    assert_same_end(tmp_path / "run", tmp_path / "other")


def test_a_run_killed_after_a_fallback_repeats_it_at_its_step_and_not_before(
    train: Train, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fallbacks, one of them in the first step; the process dies after both and before its next checkpoint."""
    words = (*FOUR_ROWS, *STREAM, "train.log_every=1", "train.steps=5")

    class DeadError(Exception):
        pass

    def die(state: TrainState) -> None:
        if state.step + 1 == 4:
            raise DeadError

    def scarce() -> tuple[Scarcity, Scarcity]:
        return Scarcity(3, lambda plan: not plan.block_checkpoints), Scarcity(1, lambda plan: plan.micro_batch > 1)

    train(*words, to="whole", scarce=scarce())
    with monkeypatch.context() as patch:
        before_steps(patch, die)
        with pytest.raises(DeadError):
            train(*words, scarce=scarce())
    again = scarce()
    train(*words, scarce=again)
    assert again[0].tried == [*((step, BatchPlan(1, True)) for step in (3, 4, 5))]  # it runs out no more
    assert fits_of(tmp_path / "run") == fits_of(tmp_path / "whole") == {1: (1, False), 3: (1, True)}
    assert "step 3: 1 row in a forward pass, block checkpoints, as recorded" in text_of(console)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_cannot_go_on_keeps_what_it_has(train: Train, console: Console, tmp_path: Path) -> None:
    """Every way out is tried once; then there is a checkpoint, rows already drawn included, and a way to go on."""
    words = (*FOUR_ROWS, *STREAM, "train.steps=5", "train.log_every=3")
    scarcity, run_dir = Scarcity(4, lambda _: True), tmp_path / "run"
    with pytest.raises(DoesNotFitError, match=r"step 4 .* nothing leaner is left.*overcoat estimate.*offload"):
        train(*words, scarce=(scarcity,))
    assert scarcity.tried[3:] == [(4, BatchPlan(4)), (4, BatchPlan(2)), (4, BatchPlan(1)), (4, BatchPlan(1, True))]
    assert "step 4 does not fit; " in text_of(console)
    assert names(run_dir / "checkpoints") == ["step-00000002", "step-00000003"]
    assert list(losses(run_dir)["train"]) == [1, 2, 3]
    train(*words, "optimizer.offload=true")
    train(*words, "checkpoint.every=3", to="whole")
    leanest = (
        "train.batch_size=1",
        "train.accumulation=4",
        "recipe.checkpoint=block",
        f"data.cache_dir={run_dir}/data",
    )
    train(*words, *leanest, to="other", start=str(tmp_path / "whole/checkpoints/step-00000003"))
    assert {step: losses(run_dir)["train"][step] for step in (4, 5)} == losses(tmp_path / "other")["train"]


@pytest.mark.parametrize("word", ["train.on_oom=error", "train.on_oom=smaller_batch"])
def test_nothing_is_tried_where_nothing_may_change(train: Train, tmp_path: Path, word: str) -> None:
    scarcity = Scarcity(1, lambda _: True)
    with pytest.raises(DoesNotFitError, match="step 1 ran out of memory with 1 row in a forward pass"):
        train("train.batch_size=1", "recipe.name=leanest", word, scarce=(scarcity,))
    assert scarcity.tried == [(1, BatchPlan(1))]
    assert not (tmp_path / "run/checkpoints").exists()  # nothing was reached that could be kept


def test_the_optimizers_own_step_is_not_repeated(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = overcoat.AdamW.step, []

    def step(self: overcoat.AdamW, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return run_out_of_memory() if len(steps) == 3 else real(self, *args, **kwargs)

    monkeypatch.setattr(overcoat.AdamW, "step", step)
    with pytest.raises(DoesNotFitError, match="the optimizer's step ran out of memory, whatever the batch"):
        train(*FOUR_ROWS)
    assert len(steps) == 3
    assert fits_of(tmp_path / "run") == {}
    assert names(tmp_path / "run/checkpoints") == ["step-00000002"]


@pytest.mark.parametrize(
    ("where", "has_moved", "step"),
    [("backward", False, 4), pytest.param("embedding", True, 2, marks=pytest.mark.nightly), ("embedding", True, 4)],
)
def test_released_gradients_go_back_to_the_checkpoint_only_if_weights_have_moved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, has_moved: bool, step: int
) -> None:
    """Also before the first checkpoint. Either way the run is the one that has block checkpoints from that step on."""
    each_alone = functools.partial(overcoat.release_gradients, batch_bytes=1)
    monkeypatch.setattr(overcoat, "release_gradients", each_alone)
    scarcity, run_dir = Scarcity(step, lambda plan: not plan.block_checkpoints, where), tmp_path / "run"
    train(*RELEASED, scarce=(scarcity,))
    before = [(number, BatchPlan(4)) for number in range(1, step + 1)]
    again = [(n, BatchPlan(4)) for n in range((step - 1) // 2 * 2 + 1, step)] if has_moved else []
    after = [(number, BatchPlan(4, True)) for number in range(step, 5)]
    assert scarcity.tried == before + again + after
    assert fits_of(run_dir) == {step: (4, True)}
    assert list(losses(run_dir)["train"]) == [1, 2, 3, 4]
    # The reference stops before that step and is told to go on with block checkpoints.
    train(*RELEASED, f"checkpoint.every={step - 1}", to="before")
    start = tmp_path / f"before/checkpoints/step-{step - 1:08d}"
    train(*RELEASED, "recipe.checkpoint=block", to="after", start=str(start))
    assert_same_end(run_dir, tmp_path / "after")


def test_released_gradients_take_all_rows_where_a_run_had_taken_fewer(train: Train, tmp_path: Path) -> None:
    """They cannot accumulate; block checkpoints they take over."""
    too_much = lambda plan: plan.micro_batch > 2 or not plan.block_checkpoints  # noqa: E731
    train(*FOUR_ROWS, scarce=(Scarcity(3, too_much),))
    assert fits_of(tmp_path / "run")[3] != (4, False)
    last = Scarcity(0, lambda _: False)
    train(*RELEASED, "train.steps=5", scarce=(last,), start=str(tmp_path / "run/checkpoints/step-00000002"))
    assert [(step, plan.micro_batch) for step, plan in last.tried] == [(3, 4), (4, 4), (5, 4)]
    assert last.tried[-1][1].block_checkpoints


def test_released_gradients_end_with_an_error_where_no_leaner_recipe_is_left(train: Train) -> None:
    with pytest.raises(DoesNotFitError, match="step 3 ran out of memory with 4 rows in a forward pass, block checkp"):
        train(*RELEASED, scarce=(Scarcity(3, lambda _: True),))


# ---- a state alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config("train.batch_size=4", "model.config.vocab_size=50")


@pytest.fixture
def state(config: Config) -> TrainState:
    return make_state(config)


def test_an_evaluation_that_does_not_fit_takes_fewer_rows(
    config: Config, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = state.rows.next_rows(6)
    expected, sizes, real = loop.evaluate(state, config, rows), [], loop.summed_loss

    def loss(model: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch.input_ids))
        return run_out_of_memory() if sizes[-1] > 1 else real(model, batch)

    monkeypatch.setattr(loop, "summed_loss", loss)
    assert loop.evaluate(state, config, rows) == pytest.approx(expected, rel=1e-3)  # BF16 products of other shapes
    assert sizes == [4, 2, 1, 1, 1, 1, 1, 1]
    assert (state.model.training, state.plan) == (True, BatchPlan(4))
    monkeypatch.setattr(loop, "summed_loss", run_out_of_memory)
    with pytest.raises(DoesNotFitError, match="an evaluation ran out of memory, whatever the batch"):
        loop.evaluate(state, config, rows)
    assert state.model.training


def test_generators_are_put_back_and_nothing_of_the_failed_step_is_alive(config: Config, state: TrainState) -> None:
    drawn: list[float] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def take_step(*_: Any) -> str:
        assert all(reference() is None for reference in alive)
        large = torch.rand(100)
        alive.append(weakref.ref(large))
        drawn.append(float(large[0]))
        holder: list[Any] = [large]
        holder.append(holder)  # a cycle, which only the garbage collector ends
        return "taken" if len(drawn) == 3 else run_out_of_memory()

    lines: list[tuple[str, Any]] = []
    attempt = OomRetry(take_step, config, state, lambda text, row: lines.append((text, row)))
    assert attempt(state, config) == "taken"
    assert drawn[0] == drawn[1] == drawn[2]
    assert [row["micro_batch"] for _, row in lines] == [2, 1]
    assert "CUDA out of memory. Tried to allocate 1.00 GiB.)" in lines[0][0]  # the first line of the reason
    assert state.plan == BatchPlan(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_counts_as_running_out_of_memory(
    config: Config, state: TrainState, error: RuntimeError, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected

    def take_step(*_: Any) -> None:
        raise error

    with pytest.raises(DoesNotFitError if expected else RuntimeError):
        OomRetry(take_step, config, state, lambda *_: None)(state, config)
