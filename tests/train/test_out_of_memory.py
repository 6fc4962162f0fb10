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
from overcoat import cli
from overcoat.train import loop
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import Config
from overcoat.train.configfile import dump_toml
from overcoat.train.fit import Fit
from overcoat.train.metrics import read_metrics
from overcoat.train.out_of_memory import DoesNotFitError, Fitting, is_out_of_memory
from overcoat.train.run import run_once
from overcoat.train.state import TrainState
from tests.train.test_loop import make_state
from tests.train.test_resume import assert_same_run, losses

MakeConfig = Callable[..., Config]
FOUR_ROWS = ("train.batch_size=4", "train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "eval.every=4")
MESSAGE = "CUDA out of memory. Tried to allocate 1.00 GiB.\nmore lines"


@dataclass
class Scarcity:
    """A GPU on which the micro-batch number `place` of step `step` runs out of memory while `too_much(fit)`.

    where: in the forward pass, in the loss's backward, or when backward arrives at the embedding, its last part.
    """

    step: int
    too_much: Callable[[Fit], bool]
    where: str = "forward"
    place: int = 0
    tried: list[tuple[int, Fit]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_step, real_loss = loop.train_step, loop.summed_loss
        now: dict[str, Any] = {}

        def step(state: TrainState, config: Config) -> loop.StepRecord:
            self.tried.append((state.step + 1, state.fit))
            now.update(place=-1, fails=state.step + 1 == self.step and self.too_much(state.fit))
            return real_step(state, config)

        def loss(model: Any, batch: Any) -> torch.Tensor:
            now["place"] += model.training
            if not (model.training and now["fails"] and now["place"] == self.place):
                return real_loss(model, batch)
            if self.where == "forward":
                fail()
            embedding = model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda _m, _a, out: out.register_hook(fail) and None)
            result = real_loss(model, batch)
            handle.remove()
            if self.where == "backward":
                result.register_hook(fail)
            return result

        monkeypatch.setattr(loop, "train_step", step)
        monkeypatch.setattr(loop, "summed_loss", loss)


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def fits_of(run_dir: Path) -> dict[int, tuple[int, bool]]:
    rows = read_metrics(run_dir / "metrics.jsonl")["fit"]
    return {step: (row["micro_batch"], row["block_checkpoints"]) for step, row in rows.items()}


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def configured_from(checkpoint: Path, make_config: MakeConfig, folder: Path, *changes: str, console: Console) -> Path:
    """The directory of a run that goes on from a checkpoint with changes of its configuration, and of nothing else."""
    config = make_config(*FOUR_ROWS, *changes, f"train.run_dir={folder}", f"train.resume={checkpoint}")
    run_once(config, console, "reference")
    return folder


WAYS = {
    "smaller_batch": ((2, False), ("train.batch_size=2", "train.accumulation=2")),
    "leaner_recipe": ((4, True), ("recipe.checkpoint=block",)),
}


@pytest.mark.parametrize("where", ["forward", "backward", "embedding"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_taken_again_as_if_it_had_been_configured_so(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, where: str
) -> None:
    fit, changes = WAYS[way]
    words = ("data.document_mask=true",)  # then micro-batches differ in their labels
    with monkeypatch.context() as patch:
        scarcity = Scarcity(5, lambda tried: tried == Fit(4), where)
        scarcity.install(patch)
        result = run_once(make_config(*FOUR_ROWS, *words, f"train.on_oom={way}"), console, "run")
    assert [step for step, _ in scarcity.tried] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert scarcity.tried[-1][1] == Fit(*fit)
    run_dir = tmp_path / "run"
    assert fits_of(run_dir) == {5: fit}
    assert text_of(console).count("step 5 ran out of memory; taking it again with") == 1
    checkpoint = run_dir / "checkpoints/step-00000004"
    reference = configured_from(checkpoint, make_config, tmp_path / "other", *words, *changes, console=console)
    expected, found = losses(reference), losses(run_dir)
    assert {step: found["train"][step] for step in range(5, 9)} == expected["train"]
    assert found["eval"][8] == expected["eval"][8]
    assert result.num_tokens == 8 * 4 * 32
    assert_same_end(run_dir, reference)
    saved = [torch.load(list_checkpoints(d / "checkpoints")[-1] / "training.pt") for d in (run_dir, reference)]
    if way == "leaner_recipe":  # what the last fit keeps, and not what the first did
        assert saved[0]["kept_bytes"] < torch.load(checkpoint / "training.pt")["kept_bytes"]


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Weights, optimizer states and position in the data of the last checkpoints."""
    from safetensors.torch import load_file

    ends = [list_checkpoints(folder / "checkpoints")[-1] for folder in (run_dir, reference)]
    mine, other = (load_file(end / "model.safetensors") for end in ends)
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    saved, expected = (torch.load(end / "training.pt") for end in ends)
    assert saved["rows"] == expected["rows"]
    for index, state in expected["optimizer"]["state"].items():
        assert all(torch.equal(tensor, saved["optimizer"]["state"][index][name]) for name, tensor in state.items())


def test_gradients_of_finished_micro_batches_are_dropped(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Scarcity(5, lambda fit: fit.micro_batch > 1, "embedding", place=1).install(patch)
        run_once(make_config(*FOUR_ROWS, "train.batch_size=2", "train.accumulation=2"), console, "run")
    run_dir = tmp_path / "run"
    changes = ("train.batch_size=1", "train.accumulation=4")
    checkpoint = run_dir / "checkpoints/step-00000004"
    reference = configured_from(checkpoint, make_config, tmp_path / "other", *changes, console=console)
    assert_same_end(run_dir, reference)


def test_a_run_killed_after_a_fallback_repeats_it_at_its_step_and_not_before(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fallbacks, one of them in the first step; the process dies after both and before its next checkpoint."""
    words = (*FOUR_ROWS, "data.streaming=true", "data.shuffle_rows=8", "data.held_out=0.3", "train.log_every=1")

    class DeadError(Exception):
        pass

    def install(patch: pytest.MonkeyPatch, dies: bool) -> list[tuple[int, Fit]]:
        first = Scarcity(6, lambda fit: not fit.block_checkpoints)
        first.install(patch)
        Scarcity(1, lambda fit: fit.micro_batch > 1).install(patch)
        real = loop.train_step

        def step(state: TrainState, config: Config) -> loop.StepRecord:
            if dies and state.step + 1 == 7:
                raise DeadError
            return real(state, config)

        patch.setattr(loop, "train_step", step)
        return first.tried

    with monkeypatch.context() as patch:
        install(patch, dies=False)
        run_once(make_config(*words, f"train.run_dir={tmp_path / 'whole'}"), console, "whole")
    with monkeypatch.context() as patch:
        install(patch, dies=True)
        with pytest.raises(DeadError):
            run_once(make_config(*words), console, "run")
    with monkeypatch.context() as patch:
        tried = install(patch, dies=False)
        run_once(make_config(*words), console, "run")
    assert tried == [(5, Fit(1)), *((step, Fit(1, True)) for step in (6, 7, 8))]  # it runs out no more
    assert fits_of(tmp_path / "run") == fits_of(tmp_path / "whole") == {1: (1, False), 6: (1, True)}
    assert "step 6: 1 row in a forward pass, block checkpoints, as recorded" in text_of(console)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_cannot_go_on_keeps_what_it_has(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way out is tried once; then there is a checkpoint, rows already drawn included, and a way to go on."""
    words = (*FOUR_ROWS, "train.steps=7", "train.log_every=5", "data.streaming=true", "data.held_out=0.3")
    with monkeypatch.context() as patch:
        scarcity = Scarcity(6, lambda _: True)
        scarcity.install(patch)
        with pytest.raises(DoesNotFitError, match=r"step 6 .* nothing leaner is left.*overcoat estimate.*offload"):
            run_once(make_config(*words), console, "run")
    assert scarcity.tried[5:] == [(6, Fit(4)), (6, Fit(2)), (6, Fit(1)), (6, Fit(1, True))]
    run_dir = tmp_path / "run"
    assert "step 6 does not fit; " in text_of(console)
    assert [path.name for path in list_checkpoints(run_dir / "checkpoints")] == ["step-00000004", "step-00000005"]
    assert list(losses(run_dir)["train"]) == [1, 2, 3, 4, 5]
    run_once(make_config(*words, "optimizer.offload=true"), console, "run")
    changes = ("train.batch_size=1", "train.accumulation=4", "recipe.checkpoint=block", "train.steps=7")
    changes += ("data.streaming=true", "data.held_out=0.3", f"data.cache_dir={run_dir / 'data'}")
    with monkeypatch.context() as patch:
        Scarcity(6, lambda _: False).install(patch)
        whole = make_config(*words, f"train.run_dir={tmp_path / 'whole'}", "checkpoint.every=5")
        whole_dir = Path(run_once(whole, console, "whole").metrics).parent
    checkpoint = whole_dir / "checkpoints/step-00000005"
    reference = configured_from(checkpoint, make_config, tmp_path / "other", *changes, console=console)
    assert {step: losses(run_dir)["train"][step] for step in (6, 7)} == losses(reference)["train"]


@pytest.mark.parametrize("word", ["train.on_oom=error", "train.on_oom=smaller_batch"])
def test_nothing_is_tried_where_nothing_may_change(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    scarcity = Scarcity(1, lambda _: True)
    scarcity.install(monkeypatch)
    with pytest.raises(DoesNotFitError, match="step 1 ran out of memory with 1 row in a forward pass"):
        run_once(make_config("train.batch_size=1", "recipe.name=leanest", word), console, "run")
    assert scarcity.tried == [(1, Fit(1))]
    assert not (tmp_path / "run/checkpoints").exists()  # nothing was reached that could be kept


def test_the_optimizers_own_step_is_not_repeated(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = overcoat.AdamW.step, []

    def step(self: overcoat.AdamW, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return fail() if len(steps) == 5 else real(self, *args, **kwargs)

    monkeypatch.setattr(overcoat.AdamW, "step", step)
    with pytest.raises(DoesNotFitError, match="the optimizer's step ran out of memory, whatever the batch"):
        run_once(make_config(*FOUR_ROWS), console, "run")
    assert len(steps) == 5
    assert fits_of(tmp_path / "run") == {}
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-00000004"]


RELEASED = (*FOUR_ROWS, "optimizer.release_gradients=true", "optimizer.clip=0")


@pytest.mark.parametrize(
    ("where", "has_moved", "step"), [("backward", False, 6), ("embedding", True, 2), ("embedding", True, 6)]
)
def test_released_gradients_go_back_to_the_checkpoint_only_if_weights_have_moved(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, has_moved: bool, step: int,
) -> None:  # fmt: skip
    """Also before the first checkpoint. Either way the run is the one that has block checkpoints from that step on."""
    each_alone = functools.partial(overcoat.release_gradients, batch_bytes=1)
    monkeypatch.setattr(overcoat, "release_gradients", each_alone)
    with monkeypatch.context() as patch:
        scarcity = Scarcity(step, lambda fit: not fit.block_checkpoints, where)
        scarcity.install(patch)
        run_once(make_config(*RELEASED), console, "run")
    run_dir = tmp_path / "run"
    before = [(number, Fit(4)) for number in range(1, step + 1)]
    again = [(n, Fit(4)) for n in range(4 * (step // 4) + 1, step)] if has_moved else []
    after = [(number, Fit(4, True)) for number in range(step, 9)]
    assert scarcity.tried == before + again + after
    assert fits_of(run_dir) == {step: (4, True)}
    assert list(losses(run_dir)["train"]) == list(range(1, 9))
    # The reference stops before that step and is told to go on with block checkpoints.
    reference = tmp_path / "other"
    some = make_config(*RELEASED, f"checkpoint.every={step - 1}", f"train.run_dir={reference}")
    run_once(some, console, "before")
    changes = (*RELEASED, "recipe.checkpoint=block")
    checkpoint = reference / f"checkpoints/step-{step - 1:08d}"
    configured_from(checkpoint, make_config, tmp_path / "after", *changes, console=console)
    assert_same_end(run_dir, tmp_path / "after")


def test_released_gradients_end_with_an_error_where_no_leaner_recipe_is_left(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scarcity(3, lambda _: True).install(monkeypatch)
    with pytest.raises(DoesNotFitError, match="step 3 ran out of memory with 4 rows in a forward pass, block checkp"):
        run_once(make_config(*RELEASED), console, "run")


def test_an_evaluation_that_does_not_fit_takes_fewer_rows(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("train.batch_size=4", "model.config.vocab_size=50")
    state = make_state(config)
    rows = state.rows.next_rows(6)
    expected, sizes, real = loop.evaluate(state, config, rows), [], loop.summed_loss

    def loss(model: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch.input_ids))
        return fail() if sizes[-1] > 1 else real(model, batch)  # type: ignore[return-value]

    monkeypatch.setattr(loop, "summed_loss", loss)
    assert loop.evaluate(state, config, rows) == pytest.approx(expected, rel=1e-3)  # BF16 products of other shapes
    assert sizes == [4, 2, 1, 1, 1, 1, 1, 1]
    assert state.model.training
    assert state.fit == Fit(4)
    monkeypatch.setattr(loop, "summed_loss", fail)
    with pytest.raises(torch.OutOfMemoryError):
        loop.evaluate(state, config, rows)
    assert state.model.training


# ---- Fitting alone --------------------------------------------------------------------------------------------------


def test_generators_are_put_back_and_nothing_of_the_failed_step_is_alive(make_config: MakeConfig) -> None:
    config = make_config("train.batch_size=4", "model.config.vocab_size=50")
    state = make_state(config)
    drawn: list[float] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def take_step(state: TrainState, _config: Config) -> str:
        assert all(reference() is None for reference in alive)
        large = torch.rand(100)
        alive.append(weakref.ref(large))
        drawn.append(float(large[0]))
        holder: list[Any] = [large]
        holder.append(holder)  # a cycle, which only the garbage collector ends
        if len(drawn) < 3:
            fail()
        return "taken"

    lines: list[tuple[str, Any]] = []
    fitting = Fitting(take_step, config, state, lambda text, row: lines.append((text, row)))
    assert fitting(state, config) == "taken"
    assert drawn[0] == drawn[1] == drawn[2]
    assert [row["micro_batch"] for _, row in lines] == [2, 1]
    assert "CUDA out of memory. Tried to allocate 1.00 GiB.)" in lines[0][0]  # the first line of the reason
    assert state.fit == Fit(1)


def test_another_error_is_not_taken_for_it(make_config: MakeConfig) -> None:
    config = make_config("model.config.vocab_size=50")
    state = make_state(config)

    def take_step(_state: TrainState, _config: Config) -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        Fitting(take_step, config, state, lambda *_: None)(state, config)


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
def test_what_counts_as_running_out_of_memory(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_command_line_says_it_in_one_line(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Scarcity(2, lambda _: True).install(monkeypatch)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(make_config("train.on_oom=error", "train.tensorboard=true")))
    assert cli.main(["train", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("overcoat: training failed: step 2 ran out of memory with 2 rows in a forward pass")
    assert len(printed.err.splitlines()) == 1
