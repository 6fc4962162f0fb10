"""`overcoat eval` against sums made by hand, with the real lm-evaluation-harness and no network."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration

import overcoat
from overcoat import cli
from overcoat.eval.command import documents_of
from overcoat.train.build import CPU, load_model
from overcoat.train.checkpoint import write_tensors
from overcoat.train.evaluate import perplexity, windows
from overcoat.train.files import RECORD
from overcoat.train.state import named_tensors
from tests.eval.conftest import sentences, write_task
from tests.models.zoo import make_model

Capture = pytest.CaptureFixture[str]


def evaluated(capsys: Capture, *words: object) -> list[dict[str, Any]]:
    with mock.patch("overcoat.eval.command.compute_in_fp32") as asked:  # of CPUs that are slow in BF16
        assert cli.main(["eval", *map(str, words), "--device", "cpu", "--json"]) == 0
    asked.assert_called_once_with()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held.JSONL"
    path.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in [*sentences(9, seed=5), "é ü"]))
    return path


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Of each id but the first."""
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def write_weights(checkpoint: Path, model: Any) -> None:
    write_tensors(checkpoint, {f"model/{name}": tensor for name, tensor in named_tensors(model).items()})
    (checkpoint / RECORD).touch()


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 1), (4, 3), (8, 8), (3, 2)])
def test_windows_predict_every_token_once(length: int, stride: int) -> None:
    for count in range(1, 12):
        ids, predicted = list(range(100, 100 + count)), []
        for inputs, labels in windows(ids, length, stride):
            assert len(inputs) == len(labels) <= length
            for place, label in enumerate(labels):
                if label != -100:
                    assert inputs[place] == label - 1
                    assert place >= min(label - 101, length - stride)  # context
                    predicted.append(label)
        assert predicted == ids[1:]


@pytest.mark.parametrize("words", ["", "--window 16", "--window 16 --stride 4", "--joined --batch 3"])
def test_perplexity_is_the_sum_made_by_hand(words: str, text: Path, folder: Path, capsys: Capture) -> None:
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    (result,) = evaluated(capsys, folder, "--text", text, *words.split())
    found = result["text"][str(text)]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    window = 16 if "window" in words else 64
    stride = 4 if "stride" in words else window
    nll, tokens = 0.0, 0
    for document in ["\n\n".join(documents)] if "joined" in words else documents:
        ids = [tokenizer.bos_token_id, *tokenizer(document).input_ids]
        done = 0
        while done < len(ids) - 1:
            begin = max(0, done + stride - window) if done else 0
            end = min(begin + window, len(ids) - 1)
            nll -= float(log_probabilities(model, ids[begin : end + 1])[done - begin :].sum())
            tokens, done = tokens + end - done, end
    size = len("\n\n".join(documents).encode()) if "joined" in words else sum(len(text.encode()) for text in documents)
    assert (found["tokens"], found["bytes"]) == (tokens, size)
    # Rows of a batch are other products in BF16.
    assert found["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=5e-3)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-3)
    assert (found["window"], found["stride"], found["ran"]) == (window, stride, "bfloat16")


def test_fp8_runs_in_fp8_and_says_so(text: Path, folder: Path, capsys: Capture) -> None:
    plain, fp8 = evaluated(capsys, folder, "--text", text, "--recipe", "bf16", "--recipe", "default")
    (bf16,), (eight,) = plain["text"].values(), fp8["text"].values()
    assert eight["ran"] == "FP8 in 2 of 2 layers"
    assert eight["perplexity"] != bf16["perplexity"]
    assert eight["perplexity"] == pytest.approx(bf16["perplexity"], rel=0.1)


def test_a_run_is_its_export_or_its_newest_checkpoint(
    text: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    model, run = AutoModelForCausalLM.from_pretrained(folder), tmp_path / "run"
    older, newest = (run / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    shutil.copytree(folder, older)
    shutil.copytree(folder, newest, ignore=shutil.ignore_patterns("*.safetensors"))
    (run / "config.toml").touch()
    write_weights(newest, model)
    (result,) = evaluated(capsys, run, "--text", text)
    (expected,) = evaluated(capsys, folder, "--text", text)
    assert (result["folder"], result["text"]) == (str(newest), expected["text"])
    older.rename(run / "export")
    (result,) = evaluated(capsys, run, "--text", text)
    assert (result["folder"], result["text"]) == (str(run / "export"), expected["text"])


def test_a_model_without_sdpa_is_evaluated_and_exported(
    text: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Gemma 2, whose scores are capped: transformers computes its attention by itself."""
    model = make_model("gemma2", layers=2, vocab_size=300)
    for place, weights in ((tmp_path / "whole", None), (tmp_path / "checkpoint", {})):
        model.save_pretrained(place, state_dict=weights)
        AutoTokenizer.from_pretrained(folder).save_pretrained(place)
    write_weights(tmp_path / "checkpoint", model)
    found = evaluated(capsys, tmp_path / "whole", tmp_path / "checkpoint", "--text", text)
    (figures,) = found[0]["text"].values()
    tokenizer, (window, stride) = AutoTokenizer.from_pretrained(folder), (figures["window"], figures["stride"])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()  # its rotary angles are FP32
    expected = perplexity(read, tokenizer, documents_of("--text", str(text)), window, stride, 8)
    assert [result["text"][str(text)]["perplexity"] for result in found] == [expected["perplexity"]] * 2
    words = ["--output", tmp_path / "out", "--evaluate", text, "--device", "cpu"]
    assert cli.main(["export", *map(str, (tmp_path / "whole", *words))]) == 0


# ---- tasks ----------------------------------------------------------------------------------------------------------


def test_accuracy_is_what_is_counted_by_hand(
    choices: tuple[Path, list[dict[str, Any]]], folder: Path, capsys: Capture
) -> None:
    task, rows = choices
    plain, fp8 = evaluated(capsys, folder, "--tasks", task, "--recipe", "bf16", "--recipe", "default")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for result, is_fp8 in ((plain, False), (fp8, True)):
        if is_fp8:
            overcoat.convert(model, eval_fp8=True)
        model.eval()
        right = 0
        for row in rows:
            scores = []
            for choice in row["choices"]:
                before, whole = (tokenizer(t).input_ids for t in (row["question"], f"{row['question']} {choice}"))
                scores.append(float(log_probabilities(model, whole)[len(before) - 1 :].sum()))
            right += scores.index(max(scores)) == row["label"]
        found = result["tasks"]["tiny_choice"]
        assert 0 < right < len(rows)
        # Padded rows have other maxima, so FP8 may choose otherwise where two are close.
        assert found["acc"] == pytest.approx(right / len(rows), abs=1 / len(rows) if is_fp8 else 1e-9)
        assert found["ran"] == ("FP8 in 2 of 2 layers" if is_fp8 else "bfloat16")


def test_what_generates_uses_a_cache_and_the_table_says_so(tmp_path: Path, folder: Path, capsys: Capture) -> None:
    how = "output_type: generate_until\ngeneration_kwargs:\n  until: ['.']\n  max_gen_toks: 3"
    task = write_task(tmp_path, "tiny_write", [{"question": "the cat", "label": "sat"}], how, "exact_match")
    words = ["eval", folder, folder, "--tasks", task, "--recipe", "default", "--device", "cpu"]
    assert cli.main(list(map(str, words))) == 0
    table = capsys.readouterr().out
    assert table.count("exact match") == 1
    assert "key/value cache" in table
    assert "FP8 in" not in table


def test_a_sharded_model_that_sees_takes_the_rows_of_its_text(tmp_path: Path, folder: Path, text: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {**sizes, "model_type": "llama", "vocab_size": 300, "max_position_embeddings": 4096}
    pictures = {**sizes, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=pictures, text_config=words, image_token_index=299))
    model.config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    write_weights(tmp_path, model)
    assert cli.main(["eval", str(tmp_path), "--text", str(text), "--window", "2049", "--device", "cpu"]) == 0


@pytest.mark.parametrize("kind", ["folder", "checkpoint", "quantized"])
def test_adapters_are_evaluated_with_their_model(
    kind: str, text: Path, folder: Path, choices: Any, tmp_path: Path, capsys: Capture
) -> None:
    base, place = str(folder), tmp_path / kind
    if kind == "quantized":
        base = str(tmp_path / "fp8")
        assert cli.main(["export", str(folder), "--format", "fp8", "--output", base, "--device", "cpu"]) == 0
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(base, CPU, {"dtype": "auto"}, dequantize=kind == "quantized")
    plain = perplexity(model.eval(), tokenizer, documents_of("--text", str(text)), 64, 64, 8)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    if kind == "checkpoint":
        place.mkdir()
        write_weights(place, model)
        model.peft_config["default"].save_pretrained(place)
    else:
        model.save_pretrained(place)
    expected = perplexity(model, tokenizer, documents_of("--text", str(text)), 64, 64, 8)
    assert expected["perplexity"] != plain["perplexity"]
    found, in_fp8 = evaluated(capsys, place, "--text", text, "--recipe", "bf16", "--recipe", "default")
    figures = found["text"][str(text)]
    assert {key: figures[key] for key in expected} == expected
    assert in_fp8["text"][str(text)]["ran"] == "FP8 in 2 of 2 layers"
    (result,) = evaluated(capsys, place, "--tasks", choices[0], "--limit", "3")
    assert {"acc", "ran"} <= result["tasks"]["tiny_choice"].keys()
    assert cli.main(["export", str(place), "--output", str(tmp_path / "x"), "--device", "cpu"]) == 2
    assert "holds adapters without their model" in capsys.readouterr().err


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("FOLDER", "nothing to evaluate: give --text or --tasks"),
        ("FOLDER --text nothing.txt", "--text nothing.txt: no files found for 'nothing.txt'"),
        ("./nothing --text TEXT", "./nothing: no such file or folder"),
        ("BLANK --text TEXT", "a TARGET is empty"),
        ("EMPTY --text TEXT", "is no run, checkpoint or model folder"),
        ("FOLDER --text TEXT --window 65", "--window 65: "),
        ("FOLDER --text TEXT --window 8 --stride 9", "--stride 9: must not be above --window 8"),
        ("FOLDER --text TEXT --batch 0", "--batch 0: must be at least 1"),
        ("FOLDER --tasks nothing.yaml", "task 'nothing.yaml': no task of lm-eval, and no YAML file of one"),
        (
            "FOLDER --text DATA:default:test --text-key body",
            "no field 'body' (text_key) among text",
        ),
        ("FOLDER --text DATA:default:dev", "data': Bad split: dev"),
        ("FOLDER --text :default", "--text :default: no NAME before the colon"),
        ("FOLDER --text TABLE", "a .csv file is not read as text: convert it to .jsonl, "),
        ("FOLDER --text ZEROS", "holds NUL characters and is not text: leave it out\n"),
        ("FOLDER --text NULLS:default:test", "row 2: 'text' holds null, not text"),
        ("FOLDER --text CHATS", "no field 'text' (text_key)"),
        ("DAMAGED --text TEXT", "is damaged: config.json"),
        ("ADAPTERS --text TEXT", "holds adapters of kind IA3"),
    ],
)
def test_one_line_says_what_is_missing(
    words: str, said: str, text: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "manifest.json").write_text('{"files": {"config.json": {"bytes": 1, "sha256": "0"}}}')
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/adapter_config.json").write_text('{"peft_type": "IA3"}')
    places = {
        "ADAPTERS": tmp_path / "adapters",
        "FOLDER": folder,
        "TEXT": text,
        "BLANK": "",
        "EMPTY": tmp_path,
        "DAMAGED": damaged,
        "DATA": tmp_path / "data",
        "NULLS": tmp_path / "nulls",
        "CHATS": tmp_path / "chats.jsonl",
        "TABLE": tmp_path / "table.csv",
        "ZEROS": tmp_path / "zeros.txt",
    }
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "zeros.txt").write_text("a\0")
    (tmp_path / "nulls").mkdir()
    (tmp_path / "nulls/test.jsonl").write_text('{"text": "the cat"}\n{"text": null}\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "data").mkdir()
    shutil.copy(text, tmp_path / "data/test.jsonl")
    asked = [":".join(str(places.get(part, part)) for part in word.split(":")) for word in words.split()]
    assert cli.main(["eval", *asked, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert "data." not in error  # a key of training


def test_a_task_without_its_data_is_named(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    task = write_task(tmp_path, "lost", [], "output_type: multiple_choice\ndoc_to_choice: choices", "acc")
    (tmp_path / "lost.jsonl").unlink()
    assert cli.main(["eval", str(folder), "--tasks", str(task), "--device", "cpu"]) == 2
    assert f"task '{task}': cannot be loaded: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["eval", str(folder), "--tasks", "paper", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "evaluating copa, arc_easy, sciq, hellaswag, gsm8k needs the package 'lm_eval'" in said
