"""`benchmarks.model`: the FLOP count, the search for the best batch, and a step's tokens and loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import optimizer
from benchmarks.contestants import TRAINERS
from benchmarks.model import (
    Training,
    Work,
    measure,
    multiplied_parameters,
    search_best_batch,
    step_flops,
)
from benchmarks.optimizer import OPTIMIZERS
from benchmarks.session import OUT_OF_MEMORY
from benchmarks.shapes import build_model
from overcoat.models.dummy_batch import tower_parameters
from overcoat.models.shapes import Model, sizes
from tests.benchmarks.peers import EXPERTS, SEEING, SMALL, module
from tests.benchmarks.test_contestants import FakeFusedLoss
from tests.processes import on_two


@pytest.mark.parametrize(
    "shape", [SMALL, SMALL.changed(tie_word_embeddings=True), EXPERTS.changed(experts_implementation="eager")]
)
def test_flops_are_those_that_pytorch_counts(shape: Model) -> None:
    """PyTorch counts the products as run: all of attention's square, where the formula counts the causal half; of
    experts those that a token visits."""
    model = build_model(shape, torch.float32, "cpu")
    model.set_attn_implementation("eager")
    ids = torch.randint(320, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    parameters = multiplied_parameters(model)
    ours = step_flops(parameters, ids.numel(), 64, model.config)
    products = step_flops(parameters, ids.numel(), 0, model.config)
    assert products + 2 * (ours - products) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(
    ("speeds", "tried", "best"),
    [
        # Tokens per second by batch; what is not there does not fit. The first one was tried before the search.
        ({batch: 1000 * batch / (batch + 8) for batch in range(1, 14)}, [4, 8, 16, 12, 14, 13], 13),
        ({batch: 1000 * batch / (batch + 8) for batch in range(1, 17)}, [4, 8, 16, 32, 24, 20, 18], 16),
        ({1: 100.0}, [4, 2, 1], 1),
        ({}, [4, 2, 1], None),
        ({3: 100.0}, [3, 6, 4], 3),
        ({batch: 1000 * batch / (batch + 0.05) for batch in range(1, 999)}, [4, 8], 8),  # larger ones bring nothing
        ({4: 100.0, 8: 120.0, 12: 110.0, 14: 109.0}, [4, 8, 16, 12, 14, 15], 8),  # the fastest, not the largest
        ({4: 100.0, 8: 120.0, 16: "RuntimeError: no kernel"}, [4, 8, 16], 8),  # another error ends the search
        ({4: "RuntimeError: no kernel"}, [4], None),
    ],
)
def test_the_best_batch_is_found(speeds: dict[int, Any], tried: list[int], best: int | None) -> None:
    seen: list[int] = []

    def run(batch: int) -> dict[str, Any]:
        seen.append(batch)
        found = speeds.get(batch, OUT_OF_MEMORY)
        return {"batch": batch, "error" if isinstance(found, str) else "tokens_per_second": found}

    first = run(tried[0])
    found = search_best_batch(run, first)
    assert seen == tried
    assert found is first if best is None else found["batch"] == best


def test_steps_on_fresh_tokens_tell_their_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every pass of graphs is begun."""
    begun: list[bool] = []
    trainer = TRAINERS["overcoat graphs"]
    uncompiled = trainer._replace(engine=trainer.engine._replace(compile=None))
    monkeypatch.setitem(TRAINERS, "overcoat graphs", uncompiled)
    monkeypatch.setattr("benchmarks.model.begin_pass", lambda: begun.append(True))
    for name, count in (("overcoat", 0), ("overcoat graphs", 2)):
        training = Training(name, Work(SMALL, 2, 32), "cpu")
        losses = []
        for _ in range(2):
            training.step()
            losses.append(training.loss.item())
        assert len(begun) == count
        assert losses[0] != losses[1]
        assert all(abs(value - math.log(320)) < 1 for value in losses)
        assert training.parameters == multiplied_parameters(build_model(SMALL, torch.bfloat16, "cpu"))
        assert training.flops == step_flops(training.parameters, 64, 32, SMALL.config())


@pytest.mark.parametrize("name", ["overcoat", "overcoat leanest", "bf16 eager, torch AdamW"])
def test_experts_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters, from the shape alone."""
    if "bf16" in name:  # its fused AdamW of a CPU takes no BF16
        monkeypatch.setitem(TRAINERS, name, TRAINERS[name]._replace(optimizer="overcoat 8bit, bf16+8"))
    training = Training(name, Work(EXPERTS, 2, 32), "cpu")
    for group in training.optimizer.param_groups:
        group["lr"] = 0.05
    training.step()
    before = {key: p.detach().clone() for key, p in training.model.named_parameters()}
    training.step()
    assert abs(training.loss.item() - math.log(320)) < 3
    assert not any(torch.equal(p, before[key]) for key, p in training.model.named_parameters())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("kind", "side"), [("llava", 16), ("qwen3_vl", 24)])
@pytest.mark.parametrize("name", ["overcoat", "bf16 eager, torch AdamW"])
def test_models_that_see_train_with_their_tower_or_without(name: str, kind: str, side: int, frozen: bool) -> None:
    work = Work(SEEING[kind], 2, 32, frozen, side)
    if "bf16" in name:  # its fused AdamW of a CPU takes no BF16
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TRAINERS, name, TRAINERS[name]._replace(optimizer="overcoat 8bit, bf16+8"))
            training = Training(name, work, "cpu")
    else:
        training = Training(name, work, "cpu")
    for group in training.optimizer.param_groups:
        group["lr"] = 0.05
    training.step()
    before = {key: p.detach().clone() for key, p in training.model.named_parameters()}
    training.step()
    assert training.loss.isfinite()
    moved = {key: not torch.equal(p, before[key]) for key, p in training.model.named_parameters()}
    tower = {id(p) for p in tower_parameters(training.model)}
    for key, p in training.model.named_parameters():
        if "layernorm" in key or "bias" in key:  # CLIP's last is not used, softmax does not see k's bias
            continue
        assert moved[key] is not (frozen and id(p) in tower), key


@pytest.mark.parametrize(
    "name",
    [
        "overcoat fp8 all-gather", pytest.param("overcoat released", marks=pytest.mark.nightly),
        "bf16 eager, torch AdamW, FSDP2 CPU offload",
    ],
)  # fmt: skip
def test_a_model_under_fsdp(name: str) -> None:
    """In a process of its own as on GPUs."""
    figures = measure(name, Work(SMALL, 2, 32, gpus=1), 2, "cpu")
    assert figures["tokens_per_second"] == pytest.approx(2 * 32 / figures["ms"] * 1e3)
    assert abs(figures["loss"] - math.log(320)) < 1


def _sharded_peer(rank: int) -> None:
    """With liger-kernel's loss, which reads the head's weight, inside of the model's forward."""
    with pytest.MonkeyPatch.context() as patch:
        module(patch, "liger_kernel")
        module(patch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=FakeFusedLoss)
        patch.setitem(TRAINERS, "peer", TRAINERS["bf16 eager, torch AdamW"]._replace(optimizer="overcoat 8bit, bf16+8"))
        training = Training("peer", Work(SMALL, 2, 32, gpus=2), "cpu")
        assert all(isinstance(parameter, DTensor) for parameter in training.model.parameters())
        training.step()
        before = training.model.lm_head.weight.to_local().clone()
        training.step()
        assert FakeFusedLoss.calls == 2
        assert not torch.equal(training.model.lm_head.weight.to_local(), before)
        losses = [torch.zeros(()) for _ in range(2)]
        torch.distributed.all_gather(losses, training.loss)
        assert losses[0] != losses[1]  # rows of one's own
        assert all(abs(float(loss) - math.log(320)) < 1 for loss in losses)


def test_peers_under_fsdp() -> None:
    on_two(_sharded_peer, "cpu")


@pytest.mark.gpu
def test_the_peak_of_graphs_counts_what_recording_them_allocates() -> None:
    """In replays nothing is allocated: counted as the others', the peak would lack what blocks keep, 5.8 U each."""
    rows, tokens = 8, 1024
    work = Work(Model("LlamaConfig", sizes(512, 1024, 4, 4, 4, 1024)), rows, tokens)
    figures = measure("overcoat graphs", work, 2)
    kept = 4 * 5.5 * rows * tokens * 512 * 2
    states = (2 + 2 + 3) * figures["parameters"]  # weight, gradient, moments and remainder
    assert figures["peak_bytes"] > kept + states
    assert kept < figures["kept_bytes"] < 1.3 * kept + 2**27  # with cuBLAS's workspaces and the like


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "overcoat", "overcoat graphs", "overcoat leanest, released", "overcoat leanest, streamed",
        "bf16 compile, torch AdamW",
    ],
)  # fmt: skip
def test_a_tiny_run_measures_speed_and_memory(name: str) -> None:
    figures = measure(name, Work(Model("LlamaConfig", sizes(512, 1024, 2, 4, 4, 1024)), 2, 256), 2)
    assert figures["kept_bytes"] > 0
    assert figures["tokens_per_second"] == pytest.approx(2 * 256 / figures["ms"] * 1e3)
    assert figures["reserved_bytes"] >= figures["peak_bytes"] > 2 * figures["parameters"] * ("streamed" not in name)
    assert 0 < figures["loss"] < 20


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise mp.ProcessRaisedException("\n\n-- Process 1 terminated\nTraceback\nOutOfMemoryError: CUDA\n", 1, 9)

    monkeypatch.setattr(mp, "start_processes", fail)
    with pytest.raises(RuntimeError, match=r"^rank 1: OutOfMemoryError: CUDA$"):
        measure("overcoat", Work(SMALL, 2, 32, gpus=2), 1, "cpu")


# ---- `benchmarks.optimizer`: who takes part, and on a GPU what a tiny run measures ----------------------------------


@pytest.mark.parametrize("name", [name for name, who in OPTIMIZERS.items() if not who.needs])
def test_whoever_needs_no_package_steps(name: str) -> None:
    contestant = OPTIMIZERS[name]
    before = torch.full((4, 128), 0.01, dtype=contestant.dtype)  # where a step of LR is more than half an ulp of BF16
    param = torch.nn.Parameter(before.clone())
    param.grad = torch.ones_like(param)
    contestant.make([param]).step()
    assert (param < before).all()


@pytest.mark.gpu
def test_a_tiny_run_measures_bytes_and_time() -> None:
    """torch's fused step in BF16: 4 bytes of state, 2 (2 + 4) + 2 of traffic; ours: README's state bytes."""
    figures = optimizer.measure("torch fused BF16", 4, (1024, 1024), 4e12)
    assert figures["state_bytes_per_parameter"] == pytest.approx(4.0, abs=0.01)
    assert figures["traffic_bytes_per_parameter"] == pytest.approx(14.0, abs=0.02)
    assert figures["all_in_bytes_per_parameter"] >= 8.0
    assert figures["ms"] > 0
    assert figures["share"] == pytest.approx(figures["TB_per_s"] / 4.0)
    ours = optimizer.measure("overcoat 8bit, bf16+8, unchecked", 4, (1024, 1024), 4e12)
    assert ours["state_bytes_per_parameter"] == pytest.approx(3.05, abs=0.2)
