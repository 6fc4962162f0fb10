"""One optimizer step and one evaluation against plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import overcoat
from overcoat.train import loop
from overcoat.train.build import build_model, make_optimizer
from overcoat.train.config import Config
from overcoat.train.data import PackedRows, make_batch
from overcoat.train.fit import Fit
from overcoat.train.loop import check_finite, evaluate, train_step
from overcoat.train.loss import summed_loss
from overcoat.train.metrics import MetricsLog, format_bytes, read_metrics
from overcoat.train.run import run_once
from overcoat.train.state import TrainState, rng_state, set_rng_state

MakeConfig = Callable[..., Config]
EXACT = ("model.dtype=float32", "optimizer.moments=fp32", "model.config.vocab_size=50")


def make_state(config: Config, document_mask_eos: int | None = 0) -> TrainState:
    """An unconverted model on simple tokens: what the loop adds is plain PyTorch and can be compared with it."""
    model = build_model(config, None).train()
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 60, 40)
    tokens = np.arange(lengths.sum()) * 7 % 49 + 1  # each token decides the next
    ends = np.cumsum(lengths)
    tokens[ends - 1] = 0
    rows = PackedRows(tokens, np.stack([ends - lengths, ends], axis=1), config.data.sequence_length, seed=0)
    optimizer = make_optimizer(model, config.optimizer, 0)
    return TrainState(
        model, optimizer, rows, "test", document_mask_eos, torch.device("cpu"), Fit(config.train.batch_size)
    )


def test_summed_loss_is_the_models_own(make_config: MakeConfig) -> None:
    state = make_state(make_config(*EXACT))
    rows = state.rows.next_rows(3)
    batch = make_batch(rows, None, document_mask=False)
    own = state.model(input_ids=torch.from_numpy(rows), labels=torch.from_numpy(rows)).loss
    # The model's own loss has no label for the last token of what it is given; ours is given one token less.
    torch.testing.assert_close(summed_loss(state.model, batch) / batch.num_labels, own)


def test_a_converted_model_sums_the_same_loss_without_logits(make_config: MakeConfig) -> None:
    state = make_state(make_config(*EXACT, "data.document_mask=true"))
    batch = make_batch(state.rows.next_rows(3), 0, document_mask=True)
    expected = summed_loss(state.model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in state.model.named_parameters()}
    state.model.zero_grad()
    overcoat.convert(state.model, overcoat.Recipe(fp8=False))
    with overcoat.memory.record_kept(state.model) as kept:
        loss = summed_loss(state.model, batch)
    assert "linear_cross_entropy" in kept.by_op()
    assert not any(row.shape[-1:] == (50,) for row in kept.rows)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(summed_loss(state.model.eval(), batch), expected.detach())


def test_one_step_is_adamw_on_the_mean_gradient_with_clipping(make_config: MakeConfig) -> None:
    config = make_config(*EXACT, "optimizer.clip=0.01", "optimizer.eps=1e-3", "train.accumulation=2")
    state, other = make_state(config), make_state(config)
    record = train_step(state, config)
    batch = make_batch(other.rows.next_rows(4), 0, document_mask=False)  # both batches of two at once
    loss = F.cross_entropy(other.model(batch.input_ids).logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.01)
    decayed = [p for p in other.model.parameters() if p.ndim > 1]
    plain = [p for p in other.model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    # The first of two warm-up steps has half the peak learning rate.
    torch.optim.AdamW(groups, lr=3e-3 / 2, betas=(0.9, 0.95), eps=1e-3).step()
    torch.testing.assert_close(record.loss, loss.detach())
    torch.testing.assert_close(record.gradient_norm, norm)
    assert norm > 0.02  # clipping had something to do
    for mine, theirs in zip(state.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert record.num_tokens == 4 * 32


def test_accumulation_weighs_every_label_the_same(make_config: MakeConfig) -> None:
    """Under document_mask batches differ in the number of labels; two small ones still equal one large one."""
    small = make_config(*EXACT, "data.document_mask=true", "train.accumulation=2", "train.batch_size=1")
    large = make_config(*EXACT, "data.document_mask=true", "train.batch_size=2")
    records = [train_step(make_state(config), config) for config in (small, large)]
    torch.testing.assert_close(records[0].loss, records[1].loss)
    torch.testing.assert_close(records[0].gradient_norm, records[1].gradient_norm)


def test_first_forward_is_measured(make_config: MakeConfig) -> None:
    config = make_config(*EXACT)
    state = make_state(config)
    train_step(state, config)
    first = state.kept_bytes
    assert "total" in state.kept_table
    train_step(state, config)
    # The logits' FP32 log-probabilities alone: 2 rows of 32 tokens, 50 words.
    assert state.kept_bytes == first > 2 * 32 * 50 * 4


def test_evaluate_is_the_mean_over_labels_and_leaves_training_alone(make_config: MakeConfig) -> None:
    config = make_config(*EXACT, "data.document_mask=true")
    state = make_state(config)
    rows = state.rows.next_rows(5)  # batches of 2, 2 and 1
    before = rng_state()["torch"]
    loss = evaluate(state, config, rows)
    batch = make_batch(rows, 0, document_mask=True)
    with torch.no_grad():
        logits = state.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert state.model.training
    assert torch.equal(before, rng_state()["torch"])
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_converted_model_trains(make_config: MakeConfig) -> None:
    config = make_config("model.config.vocab_size=50")
    state = make_state(config)
    assert len(overcoat.convert(state.model).converted) == 2
    losses = [float(train_step(state, config).loss) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05


def test_generators_are_restored() -> None:
    import random

    saved = rng_state()
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    set_rng_state(saved)
    assert [random.random(), np.random.rand(), float(torch.rand(()))] == drawn


def row(step: int, loss: float = 1.0, norm: float = 1.0) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": loss, "gradient_norm": norm}


def test_a_skipped_step_is_marked_and_a_lost_loss_ends_the_run() -> None:
    rows = [row(1), row(2, norm=float("inf")), row(3)]
    check_finite(rows)
    assert [r["gradient_norm"] for r in rows] == [1.0, None, 1.0]
    with pytest.raises(FloatingPointError, match="step 5: the loss is nan"):
        check_finite([row(4), row(5, loss=float("nan")), row(6, loss=float("nan"))])


def test_ten_skipped_steps_in_a_row_end_the_run_however_they_are_reported() -> None:
    bad = [row(step, norm=float("inf")) for step in range(1, 10)]
    for size in (1, 4, 9):
        skipped = 0
        for start in range(0, 9, size):
            skipped = check_finite([dict(r) for r in bad[start : start + size]], skipped)
        assert skipped == 9
        assert check_finite([row(10), row(11, norm=float("nan"))], skipped) == 1
        with pytest.raises(FloatingPointError, match="step 10: the gradients of 10 steps in a row were not finite"):
            check_finite([row(10, norm=float("nan")), row(11)], skipped)


@pytest.mark.parametrize("num_bad", [1, 10])
def test_a_skipped_step_alone_in_its_interval_is_survived(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch, num_bad: int
) -> None:
    real = loop.train_step

    def step(state: TrainState, config: Config) -> loop.StepRecord:
        record = real(state, config)
        if 2 <= record.step < 2 + num_bad:
            record.gradient_norm = torch.tensor(float("inf"))
        return record

    monkeypatch.setattr(loop, "train_step", step)
    config = make_config("train.log_every=1", "checkpoint.every=1")
    if num_bad == 1:
        metrics = read_metrics(Path(run_once(config, console, "run").metrics))["train"]
        assert [s for s, r in metrics.items() if r["gradient_norm"] is None] == [2]
    else:
        with pytest.raises(FloatingPointError, match="step 11: the gradients of 10 steps in a row"):
            run_once(config, console, "run")


def test_metrics_forget_what_a_dead_process_logged_after_its_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    config = make_config()
    path = tmp_path / "run/metrics.jsonl"
    log = MetricsLog(config, 0)
    log.write(row(1), row(2), {"kind": "eval", "step": 2, "loss": 5.0}, row(3, loss=9.0))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log = MetricsLog(config, 2)
    log.write(row(3, loss=3.0))
    log.close()
    found = read_metrics(path)
    assert {step: r["loss"] for step, r in found["train"].items()} == {1: 1.0, 2: 1.0, 3: 3.0}
    assert found["eval"][2]["loss"] == 5.0
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines() if "resume" in line] == ["resume"]


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (1234, "1.23 KB"), (5_678_000, "5.68 MB"), (123.4e9, "123 GB")]
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text
