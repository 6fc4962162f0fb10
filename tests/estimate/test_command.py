"""`overcoat estimate` from the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overcoat import cli
from overcoat.estimate.command import memory_size
from overcoat.models.shapes import MODELS

CONFIGS = Path(__file__).parents[2] / "configs"


def estimate(capsys, *words):
    assert cli.main(["estimate", *words]) == 0
    return capsys.readouterr().out


def test_options_reach_the_setup(capsys):
    words = ["--model", "124m", "--json", "--recipe", "default", "head=none", "kept_attention=bf16", "--moments"]
    words += ["sqrt8,fp32", "--master", "bf16", "--group-size", "64", "--accumulation", "2", "--offload"]
    data = json.loads(estimate(capsys, *words, "--document-mask", "--dtype", "bfloat16", "--gpus", "2", "--seq", "256"))
    setup = data["setup"]
    assert (setup["recipe"]["head"], setup["recipe"]["kept_attention"]) == (None, "bf16")
    assert (setup["moments"], setup["master"], setup["group_size"]) == (["sqrt8", "fp32"], "bf16", 64)
    assert (setup["accumulation"], setup["offload"], setup["document_mask"]) == (2, True, True)
    assert (data["gpus"], data["sequence"], data["batch"]) == (2, 256, 1)
    assert data["host_bytes"] > 0


def test_adapters_train_in_the_memory_of_a_frozen_model(capsys):
    """Their states are what little is beside the weights and what is kept; half of each on two GPUs."""
    words = ["--model", "124m", "--json", "--seq", "256", "--batch", "2"]
    whole, adapters = (json.loads(estimate(capsys, *words, *more)) for more in ([], ["--lora", "8"]))
    assert adapters["setup"]["lora_rank"] == 8
    added = adapters["parameters"] - whole["parameters"]
    assert 0 < added < whole["parameters"] / 50
    assert adapters["components"]["moments"] < 3 * added
    assert adapters["components"]["remainders"] == 0
    assert adapters["peak_bytes"] < whole["peak_bytes"] / 2
    in_layers = 12 * (4 * 768**2 + 3 * 768 * 2560)  # of 2 bytes, then 1
    for gpus in (1, 2):
        plain, held = (
            json.loads(estimate(capsys, *words, "--lora", "8", "--gpus", str(gpus), "--recipe", *recipe))
            for recipe in (["default"], ["default", "frozen_weights=fp8"])
        )
        assert plain["components"]["weights"] - held["components"]["weights"] == in_layers // gpus


def test_dora_adds_a_magnitude_for_each_row(capsys):
    words = ["--model", "124m", "--json", "--seq", "256", "--lora", "8"]
    plain, dora = (json.loads(estimate(capsys, *words, *more)) for more in ([], ["--dora"]))
    assert dora["parameters"] - plain["parameters"] == 12 * (4 * 768 + 2 * 2560 + 768)
    assert dora["setup"]["dora"] is True
    assert cli.main(["estimate", "--model", "124m", "--dora"]) == 2
    assert "add lora" in capsys.readouterr().err


def test_what_fits_and_what_to_change(capsys, tmp_path):
    MODELS["124m"].changed(num_hidden_layers=4, vocab_size=1024).config().save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--batch", "4", "--gpu-memory", "1550MB", "--json"]
    data = json.loads(estimate(capsys, *words))
    assert data["fits"] is False
    assert data["recommendation"] == ["recipe.checkpoint = block"]
    assert data["recommended_setup"]["recipe"]["checkpoint"] == "block"
    assert data["rungs"][0]["largest_batch"] < 4 <= data["rungs"][1]["largest_batch"]


def test_a_training_configuration_and_changes_to_it(capsys):
    path = str(CONFIGS / "llama-124m.toml")
    data = json.loads(estimate(capsys, "--config", path, "train.batch_size=4", "--json", "optimizer.moments=fp32"))
    assert (data["batch"], data["sequence"], data["setup"]["moments"]) == (4, 1024, "fp32")
    assert data["parameters"] == 124_275_456


@pytest.mark.parametrize(
    ("gpus", "batch", "accumulation", "words"),
    [
        (1, 8, 2, ["train.batch_size=8", "train.accumulation=2"]),
        (2, 8, 1, ["train.batch_size=8", "train.accumulation=2"]),
        (8, 2, 1, ["train.batch_size=8", "train.accumulation=2"]),
        (4, 4, 1, ["train.batch_size=8", "train.accumulation=2", "--nodes=2", "--hybrid", "parallel.shard=hybrid"]),
        (4, 8, 1, ["train.batch_size=auto", "train.global_batch_size=32", "--gpu-memory=2GB"]),
    ],
)
def test_several_gpus_share_the_rows_of_a_configuration(capsys, gpus, batch, accumulation, words):
    """As `overcoat train --gpus N` does; each was said to take all of them."""
    words = ["--config", str(CONFIGS / "demo.toml"), "--gpus", str(gpus), "--json", "train.accumulation=1", *words]
    data = json.loads(estimate(capsys, *words))
    assert (data["batch"], data["setup"]["accumulation"]) == (batch, accumulation)


def test_copies_in_two_machines_are_known_of_a_named_model_too(capsys):
    words = ["--model", "smollm2-135m", "--seq", "128", "--json"]
    alone, copied = (
        json.loads(estimate(capsys, *words, *more)) for more in ([], ["--gpus=2", "--nodes=2", "--hybrid"])
    )
    assert (alone["setup"]["replicated"], copied["setup"]["replicated"]) == (False, True)
    assert copied["peak_bytes"] > 1.03 * alone["peak_bytes"]


@pytest.mark.parametrize(("full", "status"), [(False, 0), (True, 1)])
def test_a_reader_that_is_gone_is_no_mistake_and_a_full_disk_is_one(monkeypatch, capfd, full, status):
    """`overcoat estimate ... | head -1`; and a full disk left half an estimate that was said to be whole."""
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if full else writing, "w") as out, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", out)
        assert cli.main(["estimate", "--config", str(CONFIGS / "demo.toml")]) == status
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    assert ("No space left" in capfd.readouterr().err) == full


AUTO = ["--config", str(CONFIGS / "llama-124m.toml"), "model.config.num_hidden_layers=1"]  # a choice is many dry runs
AUTO += ["train.batch_size=auto", "train.global_batch_size=96"]


def test_an_automatic_batch_is_the_one_that_fits(capsys):
    data = json.loads(estimate(capsys, *AUTO, "--gpu-memory", "4GB", "--json"))
    assert 1 < data["batch"] < 96
    assert data["batch"] * data["setup"]["accumulation"] == 96
    assert data["fits"]
    out = estimate(capsys, *AUTO, f"train.memory_limit_gib={4e9 / 2**30}")
    assert f"train.batch_size = auto: {data['batch']} rows in a forward pass, 96 in a step\n" in out
    assert json.loads(estimate(capsys, *AUTO, "train.memory_limit_gib=2", "--json"))["batch"] < data["batch"]


def test_an_automatic_batch_that_does_not_fit_is_advised(capsys):
    out = estimate(capsys, *AUTO, "--gpu-memory", "1GB")
    assert "auto: 1 row in a forward pass, 96 in a step, which does not fit either" in out
    assert "+ optimizer.offload" in out
    assert "Batch 1 does not fit into 0.93 GiB" in out


def test_an_automatic_batch_needs_to_know_the_memory(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["estimate", *AUTO]) == 2
    assert "this run has none: set train.batch_size to a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "124m", "--recipe", "leaner"], "unknown recipe 'leaner'"),
        (["--model", "124m", "--recipe", "default", "head"], "after the name come field=value"),
        (["--model", "124m", "--recipe", "default", "tail=1"], "Recipe has no field 'tail'"),
        (["--model", "124m", "--moments", "4bit"], "unknown moments '4bit'"),
        (["--model", "124m", "--release-gradients", "--accumulation", "2"], "cannot accumulate 2"),
        (["--model", "124m", "train.batch_size=2"], "changes a --config, and there is none"),
        (["--config", "absent.toml"], "cannot read the config absent.toml"),
        (["--config", str(CONFIGS / "demo.toml"), "--batch", "3"], "--batch does not go with --config"),
        (["--config", str(CONFIGS / "demo.toml"), "train.btch=3"], "did you mean train.batch_size"),
        (["--config", str(CONFIGS / "demo.toml"), "parallel.context=2"], "parallel.context = 2, which the estimate"),
        (["--config", str(CONFIGS / "demo.toml"), "--gpus", "3"], "--gpus 3 cannot share 4 rows"),
        (["--config", str(CONFIGS / "demo.toml"), "--gpus", "2", "parallel.shard=none"], "parallel.shard = 'none'"),
        (["--config", str(CONFIGS / "demo.toml"), "--gpus", "2", "--hybrid"], "parallel.shard = 'full'"),
    ],
)
def test_mistakes_name_the_remedy(capsys, words, message):
    assert cli.main(["estimate", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_parameters": {"rope_type": "zz"}}, "KeyError: 'zz'"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "k not in range"),
    ],
)
def test_a_configuration_of_no_model_is_one_line(capsys, tmp_path, changes, why):
    small = MODELS["124m"].changed(num_hidden_layers=1, vocab_size=64).config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**small, **changes}))
    assert cli.main(["estimate", "--model", str(tmp_path)]) == 2
    assert (
        f"the {changes.get('model_type', 'llama')} model of this configuration cannot be made or run dry: {why}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("1.5tb", 1500 * 10**9),
        ("8000000000", 8 * 10**9),
        ("512MiB", 2**29),
    ],
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "80", "81559", "80 G B", "80GBs", "1e3", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError):
        memory_size(text)


SCRIPT = """
import builtins, contextlib, sys
from overcoat.estimate.command import _scanned_once
read, plain = [], builtins.open
def counting(path, *args, **options):
    read.append(str(path).endswith("llama/modeling_llama.py"))
    return plain(path, *args, **options)
builtins.open = counting
with _scanned_once() if sys.argv[1] == "once" else contextlib.nullcontext():
    import transformers.modeling_utils
builtins.open = plain
import transformers.models
print(sum(read), *sorted(transformers.models.__all__), transformers.LlamaForCausalLM)
"""


@pytest.mark.nightly
def test_transformers_looks_through_its_models_once():
    """And finds what it finds looking twice."""
    found = [
        subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, check=True).stdout.split()
        for way in ("once", "twice")
    ]
    assert int(found[0][0]) == int(found[1][0]) - 1
    assert found[0][1:] == found[1][1:]
