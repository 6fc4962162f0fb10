"""`overcoat init`: what it writes trains as it stands, and holds what the estimate says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3Config, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig

from overcoat import cli
from overcoat.models.shapes import MODELS
from overcoat.train.configfile import load_config, tomllib

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|endoftext|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    back = Tokenizer(models.BPE())
    back.pre_tokenizer, back.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    back.train_from_iterator(
        ["a"],
        trainers.BpeTrainer(
            vocab_size=260, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=back, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    LlamaConfig(**SIZES, vocab_size=300, max_position_embeddings=64, rope_parameters=rope).save_pretrained(
        tmp_path / "shape"
    )
    shutil.copytree(tmp_path / "shape", tmp_path / "bare")
    (tmp_path / "bare/training_args.bin").touch()
    (tmp_path / "shape/model.safetensors").touch()
    save_tokenizer(tmp_path / "shape")
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f'document {number} " of words ' * 30)
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/0.png").touch()
    seen = [
        chats[0],
        {"image": "0.png", "messages": [{"role": "user", "content": "<image>a"}, chats[0]["messages"][1]]},
    ]
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, seen)))
    heard = [{"type": "audio", "audio": "a.wav"}]
    (tmp_path / "heard.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": heard}]}))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "0.png", "prompt": "a", "completion": "b"}))
    (tmp_path / "lost.jsonl").write_text(json.dumps({**seen[1], "image": "1.png"}))
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "unknown")
    (tmp_path / "unknown/model.safetensors").touch()
    Gemma3Config().save_pretrained(tmp_path / "gemma")
    (tmp_path / "gemma/model.safetensors").touch()
    (tmp_path / "odd.JSONL").write_text('{"body": "x"}')
    for name, first in (("none", "{}"), ("lists", "[1, 2]"), ("true", "true")):
        (tmp_path / f"{name}.jsonl").write_text(first)
    (tmp_path / "empty.md").touch()
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_trains_as_it_stands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "init new.toml --model shape --from-scratch --data *.txt --seq 16 --rows 4 --steps 3 --gpu-memory 8GB"
    assert cli.main(words.split()) == 0
    assert "4 of 4 rows fit 7.45 GiB at once, recipe default" in capsys.readouterr().out
    config = load_config("new.toml")
    assert (config.train.batch_size, config.train.accumulation, config.train.steps) == (4, 1, 3)
    assert config.model.config["hidden_size"] == 128
    assert "# optimizer steps" in (place / "new.toml").read_text()
    assert cli.main(["train", "new.toml", "train.device=cpu", "train.tensorboard=false"]) == 0
    made = json.loads((place / "runs/new/export/config.json").read_text())
    assert made["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


def test_a_tokenizer_of_its_own_wants_a_chat_template(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "init chat.toml --model shape --from-scratch --data chats.jsonl --gpu-memory 8GB"
    assert cli.main(words.split()) == 0
    command = "overcoat train chat.toml tokenizer.chat_template=FILE"
    assert capsys.readouterr().out.endswith(f"\n{command}\n")
    assert (place / "chat.toml").read_text().startswith(f"# {command}\n")


def test_less_memory_means_fewer_rows_then_leaner_ways(place: Path) -> None:
    """Of two layers of Llama-2-7B."""
    sizes = dict(zip(SIZES, (4096, 11008, 2, 32)))
    LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=2048).save_pretrained(place / "wide")
    (place / "wide/pytorch_model-00001-of-00002.bin").touch()
    save_tokenizer(place / "wide")
    found, rows = [], []
    for size in ("12GB", "8GB", "6.8GB", "6GB"):
        words = f"init {size}.toml --model ./wide --data chats.jsonl --seq 2048 --rows 16 --gpu-memory {size}"
        assert cli.main(words.split()) == 0
        config = load_config(f"{size}.toml")
        assert (config.model.name, config.data.format, config.train.rows_per_step) == ("./wide", "messages", 16)
        found.append((config.recipe.name, config.optimizer.offload))
        rows.append(config.train.batch_size)
    assert found == [("default", False), ("default", False), ("leanest", False), ("default", True)]
    assert rows[0] > rows[1] > rows[2]


def test_adapters_leave_room_for_more_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two layers of Llama-2-7B, whose weights alone train in twice the memory."""
    sizes = dict(zip(SIZES, (4096, 11008, 2, 32)))
    LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=2048).save_pretrained(place / "wide")
    (place / "wide/model.safetensors").touch()
    save_tokenizer(place / "wide")
    rows = []
    for words in ("", "--lora 8"):
        command = f"init new{len(rows)}.toml --model ./wide --data chats.jsonl --seq 2048 --gpu-memory 8GB {words}"
        assert cli.main(command.split()) == 0
        config = load_config(f"new{len(rows)}.toml")
        rows.append(config.train.batch_size)
    assert rows[1] > rows[0]
    assert (config.lora.rank, config.lora.alpha, config.optimizer.lr) == (8, 16.0, 2e-4)
    assert "adapters of rank 8" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen3-vl-8b"])
def test_images_that_rows_name_are_planned_with(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in shapes that see; text alone takes more rows."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its retries would take 100 s
    rows = {}
    for data in ("seen", "chats"):
        words = f"init {data}.toml --model {name} --data {data}.jsonl --rows 840 --gpu-memory 80GB"
        assert cli.main(words.split()) == 0
        config = load_config(f"{data}.toml")
        assert config.model.name == MODELS[name].checkpoint
        assert config.data.images == ("pictures" if data == "seen" else "")
        rows[data] = config.train.batch_size
    assert rows["chats"] > rows["seen"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data 0.txt", "--model is missing, and there is no terminal to ask on"),
        ("--model shape", "--data is missing, and there is no terminal to ask on"),
        ("--model coat-1b --data 0.txt", "--model coat-1b has no weights to start from: --from-scratch"),
        ("--model bare --data 0.txt", "--model bare has no weights to start from: --from-scratch"),
        ("--model shape/config.json --data 0.txt", "config.json has no weights to start from: --from-scratch"),
        ("--model shape --data 0.txt --gpu-memory 1GB", "not one row of 1024 tokens of shape fits 0.931 GiB"),
        ("--model shape --data 0.txt --gpu-memory 1MB", "fits 0.000931 GiB"),
        ("--model shape --data empty.md", "empty.md is empty: leave it out"),
        ("--model shape --data *ty.md", "empty.md: empty, no data: give other files as --data"),
        ("--model shape --data latin.md", "latin.md is not UTF-8 text"),
        ("--model llava-1.5-7b --data lost.jsonl", "names the image 1.png, which is neither beside it nor in a folder"),
        ("--model shape --data heard.jsonl", "heard.jsonl:1: a part of type 'audio': text and images are supported"),
        ("--model llava-1.5-7b --data pairs.jsonl", "pairs.jsonl:1: 'image' names images, which would be left out"),
        ("--model shape --data seen.jsonl --gpu-memory 8GB", "--data name images, which --model shape does not see"),
        ("--model unknown --data seen.jsonl --gpu-memory 8GB", "a qwen2_5_vl model, no causal language model of"),
        ("--model unknown --data seen.jsonl --gpu-memory 8GB", "; configs/llava-1.5-7b.toml is an example of a file"),
        ("--model gemma --data seen.jsonl --gpu-memory 8GB", "a gemma3 model, whose images cannot be planned with;"),
        (
            "--model qwen3-vl-8b --data 0.txt --from-scratch",
            "sees images, and starts from weights: leave --from-scratch",
        ),
        ("--model shape --data 0.txt --from-scratch --lora 8", "lora.rank = 8: adapters of random weights"),
        ("--model shape --data 0.txt --rows 2000000", "2048000000 tokens: must be at most"),
        ("--model shape --data odd.JSONL", "its fields are body; wanted are text, messages"),
        ("--model shape --data none.jsonl", "none.jsonl:1: its fields are none; wanted are text, messages"),
        ("--model shape --data lists.jsonl", "lists.jsonl:1: a list, not an object: correct or remove the row"),
        ("--model shape --data true.jsonl", "true.jsonl:1: true or false, not an object"),
        ("--model shape --data none.txt", "no files found for 'none.txt'"),
        ("0.txt --model shape --data 0.txt", "0.txt exists: name another file"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (place / "overcoat.toml").exists()


def test_what_toml_cannot_say_is_said(place: Path) -> None:
    MistralConfig(**{**SIZES, "num_key_value_heads": 2}, sliding_window=None).save_pretrained(place / "mistral")
    with pytest.warns(UserWarning, match="mistral has no sliding_window, which TOML cannot say: here it is 4096"):
        assert cli.main(["init", "--model", "mistral", "--from-scratch", "--data", "0.txt"]) == 0


def test_what_is_left_out_is_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["shape", "0.txt 1.txt", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert cli.main(["init"]) == 0
    config = load_config("overcoat.toml")
    assert (config.model.name, config.data.files) == ("shape", ["0.txt", "1.txt"])
    assert config.train.rows_per_step == 16


@pytest.mark.parametrize(
    ("answer", "said"), [("lots", "GPU memory: 'lots' is no size"), (EOFError(), "--model is missing")]
)
def test_an_answer_that_is_none_is_one_line(
    answer: Any, said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [] if isinstance(answer, EOFError) else ["--model", "shape", "--data", "0.txt"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=[answer]))
    assert cli.main(["init", *words]) == 2
    assert said in capsys.readouterr().err


HOSTILE = "bos_token_id = 1\n[model]\ntrust_remote_code = true\nname = 'theirs'\n[model.config]\nx"


@pytest.mark.parametrize(
    "said",
    [
        {HOSTILE: 1},
        {HOSTILE: {"a": 1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, HOSTILE: 1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, 'x"]\n[model': {"trust_remote_code": True}}},
        {"auto_map": {"AutoConfig": "theirs.Config"}},
        {"trust_remote_code": True, "_attn_implementation": "theirs/kernel", "attn_implementation": "theirs/kernel"},
        {"hidden_act": "silu", 'a.b"\x1b[31m': "\n[model]\ntrust_remote_code = true"},
    ],
)
def test_a_strangers_config_json_sets_only_its_own_keys(said: dict[str, Any], place: Path) -> None:
    file = place / "shape/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    words = "init new.toml --model shape --from-scratch --data 0.txt --seq 16 --gpu-memory 8GB"
    if cli.main(words.split()) != 0:
        assert not (place / "new.toml").exists()
        return
    found, config = tomllib.loads((place / "new.toml").read_text()), load_config("new.toml")
    assert (config.model.trust_remote_code, config.model.name, config.model.attention) == (False, "", None)
    assert found["model"].keys() == {"config"}
    assert found["model"]["config"].keys() <= LlamaConfig().to_dict().keys()
    assert found["model"]["config"]["hidden_size"] == 128


@pytest.mark.parametrize("name", ["new\nline.txt", "quo'te\".txt", "\x1b[31mred.txt", "back\\slash.txt"])
def test_names_of_files_are_written_as_they_are(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / name).write_text("some text")
    target = f"{name}.toml"
    assert cli.main(["init", target, "--model", "shape", "--data", name, "--gpu-memory", "8GB"]) == 0
    assert load_config(target).data.files == [name]
    assert "\x1b" not in capsys.readouterr().out


def test_a_template_that_training_refuses_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(place / "shape", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert cli.main(["init", "--model", "shape", "--data", "chats.jsonl", "--gpu-memory", "8GB"]) == 2
    error = capsys.readouterr().err
    assert "overcoat.toml is written, but overcoat train refuses it as it is: the tokenizer's chat template" in error
    assert load_config("overcoat.toml").data.format == "messages"


@pytest.mark.parametrize(
    ("words", "length", "said"),
    [
        ("--steps 50", (50, None, 5), "50 steps are about 10 passes"),
        ("", (None, 3.0, 0.1), "15 steps are about 3 passes"),  # 1,000 would be 200
        ("--epochs 1.5", (None, 1.5, 0.1), "8 steps are about 1.5 passes"),
        ("--from-scratch", (1000, None, 100), "1,000 steps are about 797 passes"),  # 4 bytes count as a token
    ],
)
def test_passes_over_the_data_are_said(
    words: str, length: tuple[Any, ...], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And small data are passed over three times."""
    (place / "one.txt").write_text("x" * 999)
    command = f"init --model shape --data one.txt --seq 100 --rows 2 --gpu-memory 8GB {words}"
    assert cli.main(command.split()) == 0
    assert said in capsys.readouterr().out
    assert f"# {said}" in (place / "overcoat.toml").read_text()
    config = load_config("overcoat.toml")
    assert (config.train.steps, config.train.epochs, config.schedule.warmup_steps) == length
    often = max(10, (length[0] or 0) // 10)  # not at each of a few steps
    assert config.eval.every == often <= config.checkpoint.every


@pytest.mark.parametrize("epochs", ["0", "-1"])
def test_epochs_are_above_0(epochs: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--model", "shape", "--data", "0.txt", "--epochs", epochs]) == 2
    assert "train.epochs" in capsys.readouterr().err


def test_folders_of_other_kinds_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Dataset.from_dict({"text": ["a"]}).save_to_disk(place / "saved")
    (place / "adapters").mkdir()
    (place / "adapters/adapter_config.json").write_text("{}")
    for words, said in (
        ("--model shape --data saved", "was written by datasets.save_to_disk"),
        ("--model adapters --data 0.txt", "holds adapters without their model"),
    ):
        assert cli.main(["init", *words.split()]) == 2
        assert said in capsys.readouterr().err
