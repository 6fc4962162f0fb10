"""A whole run and its twin: what they leave behind."""

from __future__ import annotations

import io
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import overcoat
from overcoat.train import loop
from overcoat.train import run as run_module
from overcoat.train.build import build_model, make_recipe, summed_loss
from overcoat.train.checkpoint import load_model, read_model
from overcoat.train.config import Config
from overcoat.train.configfile import build_config, differences, dump_toml, load_config
from overcoat.train.corpus import open_corpus
from overcoat.train.data import make_batch
from overcoat.train.metrics import read_metrics
from overcoat.train.run import RunResult, check_before_training, run, run_once, twin_config
from overcoat.train.summary import summarize
from tests.train.conftest import TINY
from tests.train.runs import CONFIGS, OLMOE, MakeConfig, losses, names, stop_at, text_of

TWIN = "compare.overrides=['recipe.name=bf16', 'optimizer.moments=fp32', 'optimizer.master=bf16+16']"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus_files: str) -> tuple[Config, list[RunResult], str, dict]:
    """A run with a twin, a sample and TensorBoard: config, results, printed text, summary."""
    folder = tmp_path_factory.mktemp("run")
    arguments = [f"data.files={corpus_files}", f"train.run_dir={folder}", TWIN, "sample.tokens=8", "sample.prompt=file"]
    config = build_config(TINY, [*arguments, "train.tensorboard=true", "model.config.tie_word_embeddings=false"])
    console = Console(file=io.StringIO(), width=120)
    results = run(config, console)
    summary = summarize(results, folder, console)
    return config, results, text_of(console), summary


def test_a_model_of_which_nothing_trains_in_fp8_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    """Unless that is asked for."""
    words = (
        "model.config.hidden_act=tanh",
        f"train.run_dir={tmp_path / 'run'}",
        "train.steps=1",
        "schedule.warmup_steps=0",
        "sample.tokens=0",
    )
    console = Console(file=io.StringIO())
    words = (*words, "train.device=auto")
    with pytest.raises(ValueError, match=r"no decoder layer trains in FP8: hidden_act is 'tanh'.*recipe\.name=bf16"):
        run_once(make_config(*words), console, "test")
    assert run_once(make_config(*words, "recipe.name=bf16"), console, "test").steps == 1
    assert ("no GPU was found: the CPU trains on " in text_of(console)) != torch.cuda.is_available()


def test_export_loads_in_plain_transformers_with_equal_logits(finished: tuple) -> None:
    config, (result, _), _, _ = finished
    model = AutoModelForCausalLM.from_pretrained(result.export, dtype=torch.bfloat16).eval()
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    assert tokenizer.decode(tokenizer("file 3\nalpha").input_ids) == "file 3\nalpha"
    assert load_model(result.checkpoint).generation_config.eos_token_id == model.generation_config.eos_token_id
    # The very weights of the last checkpoint, under the names of a model never converted.
    plain = build_model(config, tokenizer)
    read_model(Path(result.checkpoint), plain)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())
    inputs = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, plain.eval()(inputs).logits)
    # The held-out loss that the run reported belongs to them: in its own batches, else BF16 products round differently.
    overcoat.convert(model, make_recipe(config.recipe))
    rows, size = open_corpus(config, print).held_out, config.train.batch_size
    batches = [make_batch(rows[start : start + size], tokenizer.eos_token_id, False) for start in range(0, 4, size)]
    with torch.no_grad():
        total = sum(float(summed_loss(model, batch)) for batch in batches)
    assert total / sum(batch.labels.numel() for batch in batches) == pytest.approx(result.held_out_loss, rel=1e-6)


def test_a_run_starts_from_an_exported_model(finished: tuple, make_config: MakeConfig, console: Console) -> None:
    result = finished[1][0]
    config = make_config(f"model.name={result.export}", "model.config={}", "tokenizer.vocab_size=0", "train.steps=3")
    tuned = run_once(config, console, "tuned")
    assert tuned.steps == 3
    assert read_metrics(Path(tuned.metrics))["train"][1]["loss"] < 1.2 * result.held_out_loss


def test_twin_differs_in_nothing_but_the_overrides(finished: tuple) -> None:
    config, (mine, twin), _, _ = finished
    assert differences(config, twin_config(config)) == [
        "optimizer.master: 'auto' -> 'bf16+16'",
        "optimizer.moments: '8bit' -> 'fp32'",
        "recipe.name: 'default' -> 'bf16'",
    ]
    assert (mine.steps, mine.num_tokens, mine.num_parameters) == (twin.steps, twin.num_tokens, twin.num_parameters)
    first, second = (read_metrics(Path(result.metrics))["train"] for result in (mine, twin))
    assert first[1]["loss"] == pytest.approx(second[1]["loss"], rel=5e-3)  # same weights, same batch
    assert [row["loss"] for row in first.values()] != [row["loss"] for row in second.values()]
    assert mine.kept_bytes < twin.kept_bytes
    assert mine.optimizer_bytes < 0.4 * twin.optimizer_bytes  # 3 bytes and groups against 10 bytes a parameter


def test_summary_says_where_everything_lies(finished: tuple) -> None:
    config, (mine, twin), printed, summary = finished
    run_dir = Path(config.train.run_dir)
    assert json.loads((run_dir / "results.json").read_text()) == summary
    assert summary["held_out_gap"] == pytest.approx(mine.held_out_loss / twin.held_out_loss - 1)
    for expected in ("held-out loss", f"{mine.held_out_loss:.4f}", f"{twin.held_out_loss:.4f}", "BF16 + FP32 AdamW"):
        assert expected in printed
    for place in (mine.checkpoint, mine.export, summary["plot"], mine.metrics):
        assert place in printed
        assert Path(place).exists()
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events*"))
    assert "total" in (run_dir / "kept.txt").read_text()
    assert mine.sample.startswith("file")
    assert len(mine.sample) > len("file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.config.vocab_size=5"], "model.config.vocab_size = 5: the tokenizer has"),
        (["model.config={}", "model.name=/nowhere/at/all"], "cannot load"),
    ],
)
def test_mistakes_are_errors_before_training(
    make_config: MakeConfig, console: Console, tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_config(*arguments), console)
    # The corrected command may use the same directory: nothing in it counts as another run.
    assert not (tmp_path / "run/checkpoints").exists()
    assert not (tmp_path / "run/config.toml").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optimizer.moment=fp32", r"did you mean optimizer\.moments"),
        ("optimizer.moments=fp9", r"\[optimizer\]: unknown moments 'fp9'"),
        ("optimizer.master=bf17", r"\[optimizer\]: unknown master 'bf17'"),
        ("optimizer.group_size=7", r"\[optimizer\]: group_size 7 must be one of"),
        ("optimizer.weight_decay=-1.0", r"\[optimizer\]: weight_decay"),
        ("model.config.hiden_size=3", "hiden_size for a llama model; did you mean model.config.hidden_size"),
        ("model.config.model_type=lama", "model.config.model_type = 'lama'.*did you mean 'llama'"),
        ("model.config.model_type=clip", "no causal language model"),
        ("recipe.kept_format=e9m9", "kept_format = 'e9m9'"),
        ("train.device=quantum", "train.device = 'quantum'"),
    ],
)
@pytest.mark.parametrize("of_the_twin", [False, True])
def test_mistakes_are_found_before_the_data_are_read(
    make_config: MakeConfig, console: Console, tmp_path: Path, argument: str, message: str, of_the_twin: bool
) -> None:
    changes = [f'compare.overrides=["{argument}"]'] if of_the_twin else [argument]
    with pytest.raises(ValueError, match=message):
        run(make_config(*changes, f"data.files={tmp_path}/nowhere.txt"), console)
    assert not (tmp_path / "run").exists()


def test_what_is_no_override_is_told_with_its_key(make_config: MakeConfig, console: Console) -> None:
    with pytest.raises(ValueError, match=r"^compare\.overrides: '0': arguments look like"):
        run(make_config("compare.overrides=['0']"), console)


def test_a_twin_of_another_configuration_is_found_before_the_first_run(
    finished: tuple, console: Console, tmp_path: Path
) -> None:
    config, run_dir = finished[0], tmp_path / "run"
    shutil.copytree(Path(config.train.run_dir) / "twin", run_dir / "twin")
    (run_dir / "config.toml").write_text(dump_toml(config))
    other = replace(config, train=replace(config.train, run_dir=str(run_dir)))
    other = replace(other, compare=replace(config.compare, overrides=["optimizer.lr=0.5"]))
    with pytest.raises(ValueError, match=r"the run of \[compare\]: .*another configuration.*delete .*twin to train"):
        run(other, console)
    assert names(run_dir) == ["config.toml", "twin"]


def test_a_stop_in_the_last_step_starts_no_twin(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(TWIN, "train.steps=3")
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(loop.RunStoppedError, match="step-00000003"):
            run(config, console)
    assert not (tmp_path / "run/twin").exists()
    assert [result.steps for result in run(config, console)] == [3, 3]


def test_rows_and_samples_stay_within_a_table_of_positions(make_config: MakeConfig, console: Console) -> None:
    gpt = ('model.config={model_type="gpt2", n_embd=128, n_layer=1, n_head=2, n_positions=32, attn_pdrop=0.0, '
           "resid_pdrop=0.0, embd_pdrop=0.0}")  # fmt: skip
    words = (gpt, "train.steps=1", "schedule.warmup_steps=0", "sample.tokens=40", "sample.prompt=alpha beta")
    with pytest.raises(ValueError, match=r"data\.sequence_length = 33: the model has 32 positions"):
        run_once(make_config(*words, "data.sequence_length=33"), console, "long")
    assert run_once(make_config(*words), console, "gpt").sample.startswith("alpha beta")


def test_a_table_that_is_no_embedding_is_known(make_config: MakeConfig, console: Console) -> None:
    gptj = 'model.config={model_type="gptj", n_embd=128, n_layer=1, n_head=2, n_positions=31, rotary_dim=64}'
    with pytest.raises(ValueError, match=r"data\.sequence_length = 32: the model has 31 positions"):
        run_once(make_config(gptj, "recipe.name=bf16"), console, "table")


def test_rows_beyond_what_rotary_positions_were_made_for_are_told_of(
    make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    words = ("train.steps=1", "schedule.warmup_steps=0", "eval.every=0", "model.config.max_position_embeddings=31")
    told = r"data\.sequence_length = 32: the model was made for 31 positions; lower it, or raise"
    with pytest.warns(UserWarning, match=told):
        run_once(make_config(*words), console, "long")
    packed = ("data.document_mask=true", f"train.run_dir={tmp_path / 'packed'}")
    with pytest.warns(UserWarning, match="lower it, unless all documents are shorter, or raise"):
        run_once(make_config(*words, *packed), console, "packed")
    scaled = ('model.config.rope_parameters={rope_type="linear", rope_theta=1e4, factor=2.0}',
              f"train.run_dir={tmp_path / 'scaled'}")  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="data.sequence_length")
        run_once(make_config(*words, *scaled), console, "scaled")


def test_ids_beyond_the_vocabulary_are_found_before_training(
    finished: tuple, make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    tokens = np.random.default_rng(0).integers(1, 400, 4000).astype(np.uint16)
    tokens[777] = 400
    tokens.tofile(tmp_path / "a.bin")
    binary = (f"data.files={tmp_path}/a.bin", "tokenizer.vocab_size=0")
    with pytest.raises(
        ValueError, match=r"token id 400, but the model's vocabulary .* is 400: it must be at least 401"
    ):
        run_once(make_config(*binary, "model.config.vocab_size=400"), console, "binary")
    assert run_once(make_config(*binary, "model.config.vocab_size=401"), console, "binary").steps == 12
    model = (f"model.name={finished[1][0].export}", "model.config={}", f"train.run_dir={tmp_path / 'other'}")
    with pytest.raises(
        ValueError, match=r"the tokenizer has 3[3-9]\d tokens, but the model's vocabulary .* is 3[12]\d"
    ):
        run_once(make_config(*model, "tokenizer.vocab_size=340"), console, "tokenizer")


@pytest.mark.parametrize("model", [(), OLMOE], ids=["llama", "olmoe"])
def test_released_gradients_train_the_same_model(
    model: tuple[str, ...], make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """Bit for bit as without release and without clipping, also after going back to a checkpoint."""
    for flag in ("false", "true"):
        words = (f"optimizer.release_gradients={flag}", "optimizer.clip=0", f"train.run_dir={tmp_path / flag}", *model)
        run_once(make_config(*words, "checkpoint.keep=9"), console, "Overcoat")
    found, expected = (losses(tmp_path / flag)["train"] for flag in ("true", "false"))
    assert {step: loss for step, (loss, *_) in found.items()} == {step: loss for step, (loss, *_) in expected.items()}
    assert all(norm > 0 for _, _, norm in found.values())
    resume = f"train.resume={tmp_path / 'true/checkpoints/step-00000006'}"
    assert run_once(make_config(*words, resume), console, "again").train_loss == found[12][0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_streamed_model_of_random_weights_trains_the_same(
    device: str, make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn on a GPU layer by layer. From its step 6 on, streamed again or resident, come the same losses."""
    places = []
    monkeypatch.setattr(run_module, "build_model", lambda *given: places.append(given[2].type) or build_model(*given))
    words = ("train.stream=true", "optimizer.clip=0", "checkpoint.keep=9", f"train.device={device}")
    run_once(make_config(*words, f"train.run_dir={tmp_path / 'streamed'}"), console, "streamed")
    expected = losses(tmp_path / "streamed")["train"]
    assert expected[1][0] == pytest.approx(math.log(320), abs=0.2)
    resume = f"train.resume={tmp_path / 'streamed/checkpoints/step-00000006'}"
    for name, changes in (("again", ()), ("resident", ("train.stream=false", "optimizer.release_gradients=true"))):
        run_once(make_config(*words, *changes, resume, f"train.run_dir={tmp_path / name}"), console, name)
        found = losses(tmp_path / name)["train"]
        assert [found[step][0] for step in range(7, 13)] == [expected[step][0] for step in range(7, 13)]
    assert places == (["meta", "meta", "cuda"] if device == "cuda" else ["cpu"] * 3)


def test_a_small_host_is_told_before_data_are_read(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overcoat.streaming.choice.bytes_free", lambda: 1)
    with pytest.raises(ValueError, match=r"more host memory \(weights .* are free"):
        check_before_training(make_config("train.stream=true", "optimizer.clip=0"))


# ---- FP8 training against its BF16 twin: same seed, same tokens, the same held-out loss to 1 % ----------------------


SMALLER = """model.config.hidden_size=128 model.config.intermediate_size=256 model.config.num_hidden_layers=2
    model.config.num_attention_heads=2 model.config.num_key_value_heads=2 tokenizer.vocab_size=512
    data.max_bytes=1000000 data.sequence_length=128 schedule.warmup_steps=20 train.steps=160 train.batch_size=8
    train.log_every=50 train.tensorboard=false train.device=cpu eval.every=0 checkpoint.every=0 sample.tokens=0"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("twin")
    places = [f"train.run_dir={folder / 'fp8'}", f"data.cache_dir={folder / 'data'}"]
    return load_config(CONFIGS / "demo.toml", [*SMALLER.split(), *places])


@pytest.fixture(scope="module")
def twin_loss(config: Config, tmp_path_factory: pytest.TempPathFactory) -> float:
    torch.set_num_threads(1)
    return run_once(in_folder(config, tmp_path_factory.mktemp("bf16")), Console(quiet=True), "twin").held_out_loss


def in_folder(config: Config, folder: Path) -> Config:
    """The BF16 twin of `config`, training in `folder`."""
    twin = twin_config(config)
    return replace(twin, train=replace(twin.train, run_dir=str(folder)))


@pytest.mark.nightly  # CI has the gradients themselves: tests/models/test_numerics.py
def test_held_out_loss_is_within_one_percent_of_the_twin(config: Config, twin_loss: float) -> None:
    result = run_once(config, Console(quiet=True), "FP8")
    assert twin_loss < 4.6  # from ln(512) = 6.2: it has learnt something
    assert abs(result.held_out_loss / twin_loss - 1) < 0.01
