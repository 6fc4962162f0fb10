"""`overcoat estimate --stream`: what a streamed step takes of the GPU, of the host and of the link."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from overcoat import Recipe, cli, memory
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.models.shapes import MODELS
from tests.estimate import recorded
from tests.models.zoo import make_model
from tests.streaming.test_stream import SMALL, prepare, train

STREAMED = Setup(Recipe.leanest(), stream=True)
MEDIUM = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize("resident", [0, 1])
def test_host_memory_is_exact(resident):
    model = make_model("llama", layers=3, **SMALL)
    config = model.config
    optimizer, handle = prepare(model, Recipe.leanest(), "cpu", True, {"resident": resident})
    train(model, optimizer, "cpu", 1)
    setup = Setup(Recipe.leanest(), stream=True, resident=resident)
    found = Predictor(config).predict(2, 32, setup).host_bytes
    states = [optimizer.state[param] for stack in handle.stacks for param in stack.params]
    held = sum(state["exp_avg"].untyped_storage().nbytes() for state in states)
    held += sum(stack.host.untyped_storage().nbytes() for stack in handle.stacks)
    assert found == held


def test_what_is_on_the_gpu_hardly_grows_with_layers():
    few, many = (MODELS["124m"].changed(num_hidden_layers=layers).config() for layers in (4, 8))
    peaks = [Predictor(config).predict(1, 1024, STREAMED).peak_bytes for config in (few, many)]
    assert peaks[1] - peaks[0] < 2**24  # of a layer 14 MB of weights in 16 bits


def test_no_gemm_makes_codes_of_weights_that_come_as_codes():
    """In a small block those of all its weights would be there at once."""
    config, label = make_model("llama", layers=4, **MEDIUM).config, "block 2 forward"
    workspaces = []
    for setup in (STREAMED, Setup(Recipe.leanest(), release_gradients=True)):
        found = Predictor(config).predict(1, 2048, setup)
        at = [phase.label for phase in found.phases].index(label)
        workspaces.append(found.by_phase[at]["workspace"])
    assert workspaces[1] - workspaces[0] == pytest.approx(4 * 1024**2 + 3 * 1024 * 4096, rel=0.001)


@pytest.mark.parametrize("commit", ["af69941", "f2bc5b33"])
def test_peaks_are_those_that_were_measured(commit, monkeypatch):
    """Of the commits that copied through two buffers."""
    monkeypatch.setattr("overcoat.estimate.streaming.BUFFERS", 2)
    (row,) = [row for row in recorded.rows("model") if row["commit"] == commit and "streamed" in row["name"]]
    found = Predictor(MODELS[row["model"]].config()).predict(row["batch"], row["sequence"], STREAMED).peak_bytes
    assert found == pytest.approx(row["peak_bytes"], rel=0.02)


def test_the_link_limits_until_there_are_tokens_enough(capsys):
    words = ["estimate", "--model", "124m", "--recipe", "leanest", "--stream", "--seq", "1024", "--resident", "2"]
    found = []
    for batch, link in (("1", "48GB/s"), ("64", "48GB/s"), ("1", "10TB/s")):
        assert cli.main([*words, "--batch", batch, "--link", link]) == 0
        found.append(next(line for line in capsys.readouterr().out.splitlines() if "limits: at" in line))
    assert [line.split(" limits")[0] for line in found] == ["the link", "the GPU", "the GPU"]
    counts = [int(line.split("from about ")[1].split()[0].replace(",", "")) for line in found]
    assert counts[0] > 1024
    assert counts[1] < 64 * 1024
    assert counts[2] < 1024


def test_several_gpus_share_what_crosses_the_link(capsys):
    words = ["estimate", "--json", "--model", "124m", "--recipe", "leanest", "--stream", "--seq", "1024"]
    found = []
    for gpus in ("1", "4"):
        assert cli.main([*words, "--gpus", gpus]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, four = found
    assert 4 * four["host_bytes"] == pytest.approx(one["host_bytes"], rel=1e-3)
    assert four["peak_bytes"] < one["peak_bytes"]


def test_the_largest_model_is_named(capsys, monkeypatch):
    names = ("124m", "qwen3-0.6b", "olmo-1b")
    monkeypatch.setattr("overcoat.estimate.command.MODELS", {name: MODELS[name] for name in names})
    words = ["estimate", "--model", "124m", "--recipe", "leanest", "--stream", "--seq", "256", "--gpu-memory", "8GB"]
    for host, expected in (("4GB", "qwen3-0.6b"), ("64GB", "olmo-1b"), ("1MB", "none of the named")):
        assert cli.main([*words, "--host-memory", host]) == 0
        assert expected in next(line for line in capsys.readouterr().out.splitlines() if "named model" in line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host-memory", "64GB"], "--host-memory goes with --stream"),
        (["--stream", "--gpus", "5"], "5 GPUs cannot share the 768 rows of"),
        (["--stream", "--gpus", "4", "--nodes", "2", "--hybrid"], "so not with --hybrid"),
        (["--stream", "--accumulation", "2"], "stream is not estimated with accumulation 2"),
        (["--resident", "2"], "resident 2 is for stream alone"),
        (["--stream", "--resident", "12"], "from 0 to 11"),
        (["--stream", "--recipe", "bf16"], "no weight can be streamed"),
    ],
)
def test_what_cannot_be_estimated_is_refused(words, message, capsys):
    assert cli.main(["estimate", "--model", "124m", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_training_configuration_says_so(capsys, tmp_path):
    from tests.train.runs import CONFIGS

    words = [str(CONFIGS / "llama-124m.toml"), "train.stream=true", "optimizer.clip=0", "train.accumulation=1"]
    assert cli.main(["estimate", "--json", "--config", *words]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["stream"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_the_peak_on_a_gpu_is_as_predicted(batch):
    """PyTorch's cuBLAS has a workspace of 32 MiB for each thread that multiplies by it, and both are counted. With one
    row the backward of this model has plans of cublaslt.py alone, which need none: a hook multiplies there."""
    square = torch.ones(16, 16, device="cuda")

    def multiply(_gradient: torch.Tensor) -> None:
        square.mm(square)

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of tests before, which would be part of `before`
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_model("llama", layers=8, **MEDIUM)
    config = model.config
    optimizer, _ = prepare(model, Recipe.leanest(), torch.device("cuda"), True)
    ids = torch.randint(512, (batch, 2048), device="cuda")
    for step in range(3):
        if step == 2:
            memory.forget_peak(torch.device("cuda"))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.register_hook(multiply)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    found = Predictor(config).predict(batch, 2048, STREAMED).peak_bytes
    assert found == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)
