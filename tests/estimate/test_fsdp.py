"""The prediction for two processes against two real ones (FSDP2, gloo on the CPU), phase by phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.utils._python_dispatch import _disable_current_modes

import overcoat
from overcoat import Recipe
from overcoat.estimate import Predictor, Setup, predict
from overcoat.estimate.dry_run import own_loss
from overcoat.estimate.phases import Phase, measure_step
from tests.models.zoo import make_model
from tests.processes import on_two

BATCH, LENGTH = 2, 64
# Embedding and head are nearly as large as a block, so that what becomes of theirs shows. 2047 words: a row is added.
VOCAB, LAYERS = 2047, 3
# (name, whether the head is the embedding, setup)
STEPS = (
    ("default", False, Setup()),
    ("tied, summed in FP32", True, Setup(reduce_dtype="float32")),
    ("leanest, accumulation", False, Setup(Recipe.leanest(), accumulation=2)),
    ("travel in FP8", False, Setup(all_gather="fp8")),
    ("blocks travel in FP8", False, Setup(Recipe(linear_scaling="block"), all_gather="fp8")),
    ("alike in both", False, Setup(reduce_dtype="float32", replicated=True)),
    ("alike in both, FP8", False, Setup(all_gather="fp8", reduce_dtype="float32", replicated=True)),
    ("alike in both, blocks in FP8", False, Setup(Recipe(linear_scaling="block"), all_gather="fp8", replicated=True)),
    ("alike in both, accumulation", False, Setup(replicated=True, accumulation=2)),
    ("released", False, Setup(release_gradients=True)),
)
# gloo's threads drop what they sent a moment late, in one step or another: the least of some steps is the truth.
REPEATS = 3


def _model(tied: bool) -> torch.nn.Module:
    return make_model("llama", layers=LAYERS, vocab_size=VOCAB, tie_word_embeddings=tied)


def _without_copies_of_cpus() -> None:
    """gloo reduces in a copy of what it is given, NCCL, which is predicted, in place; and where a CPU fills up a
    gradient's rows it copies them, a GPU's kernel does not. The meter shall not see that."""

    def unseen(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    for owner, name in ((DefaultReduceScatter, "__call__"), (_fsdp_collectives, "foreach_reduce_scatter_copy_in")):
        setattr(owner, name, unseen(getattr(owner, name)))


def _measure(rank: int, file: str) -> None:
    _without_copies_of_cpus()
    found = {name: _phases(tied, setup) for name, tied, setup in STEPS}
    if rank == 0:
        Path(file).write_text(json.dumps(found))


def _phases(tied: bool, setup: Setup) -> list[Phase]:
    """Least peak and end of each phase, over some steps after the first."""
    model, names = _model(tied), ("replicate", "shard")
    overcoat.convert(model, setup.recipe)
    mesh = init_device_mesh("cpu", (2, 1) if setup.replicated else (2,), mesh_dim_names=names[not setup.replicated :])
    policy = MixedPrecisionPolicy(reduce_dtype=setup.torch_reduce_dtype)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy, mesh=mesh)
        if setup.replicated:  # as `overcoat train` does
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    if setup.all_gather == "fp8":
        overcoat.fp8_all_gather(model)
    optimizer = overcoat.AdamW(model.parameters(), **setup.group)
    if setup.release_gradients:
        overcoat.release_gradients(model, optimizer)

    def step() -> None:
        for _ in range(setup.accumulation):
            ids = torch.randint(VOCAB, (BATCH, LENGTH))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    runs = []
    for _ in range(REPEATS):
        with measure_step(model, optimizer) as phases:
            step()
        runs.append(phases)
    return [Phase(of[0].label, min(x.peak for x in of), min(x.end for x in of)) for of in zip(*runs)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Phase]]:
    """All steps in one pair of processes, which take longer to begin than the steps."""
    file = tmp_path_factory.mktemp("sharded") / "phases.json"
    on_two(_measure, "cpu", str(file))
    return {name: [Phase(*values) for values in phases] for name, phases in json.loads(file.read_text()).items()}


@pytest.mark.parametrize(("name", "tied", "setup"), STEPS, ids=[name for name, *_ in STEPS])
def test_every_phase_of_a_sharded_step(name: str, tied: bool, setup: Setup, measured: dict[str, list[Phase]]) -> None:
    """Within what scalars take, and the optimizer's gathered vectors: 1.5% of a block. Scales of blocks travel besides,
    and shards that cut blocks are filled up before."""
    times = 2 if setup.recipe.linear_scaling == "block" else 1
    prediction = predict(_model(tied).config, BATCH, LENGTH, setup, gpus=1 if setup.replicated else 2)
    absent = prediction.handle_bytes  # a CPU has none
    predicted = [phase._replace(peak=phase.peak - absent, end=phase.end - absent) for phase in prediction.phases]
    assert [phase.label for phase in predicted] == [phase.label for phase in measured[name]]
    for mine, real in zip(predicted, measured[name]):
        assert mine.peak == pytest.approx(real.peak, abs=times * 24576), mine.label
        if real is not measured[name][-1]:  # gradients are freed at its end
            assert mine.end == pytest.approx(real.end, abs=times * 16384), mine.label


def test_experts_are_gathered_in_their_own_dtype() -> None:
    """Two layers are whole at the peak; FP8 saves a byte for each weight of their linear layers."""
    model = make_model("olmoe", layers=LAYERS, num_experts=4)
    linears = sum(p.numel() for name, p in model.model.layers[0].named_parameters() if name.endswith("proj.weight"))
    found = [predict(model.config, BATCH, LENGTH, Setup(all_gather=dtype), gpus=2) for dtype in ("bf16", "fp8")]
    bf16, fp8 = (prediction.components["gathered"] for prediction in found)
    assert bf16 - fp8 == 2 * linears
    assert "experts as they are" in str(found[1].report)


def test_a_dry_run_that_fails_leaves_nothing_behind() -> None:
    """Neither a process group nor a model whose FSDP2 has stopped amid a step."""
    fails = [True]

    def loss_of(model: Any, batch: int, sequence: int) -> torch.Tensor:
        loss = own_loss(model, batch, sequence)
        if fails:
            raise KeyboardInterrupt
        return loss

    predictor, work = Predictor(_model(False).config, loss_of), (BATCH, LENGTH, Setup(), 2)
    with pytest.raises(KeyboardInterrupt):
        predictor.predict(*work)
    fails.clear()
    assert predictor.predict(*work).phases == predict(predictor.config, *work).phases
    assert not dist.is_initialized()
