"""tokenizer.add_tokens: read as one token each, trained, and in the export's tokenizer and model alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from overcoat.train.build import build_model
from overcoat.train.config import Config
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run_once
from overcoat.train.tokenizer import make_tokenizer, train_tokenizer
from tests.processes import on_two
from tests.train.runs import CPU, MakeConfig, losses, newest, stop_at, tensors_in, text_of

TOKENS = ["<tool>", "</tool>"]
TEXT = "alpha <tool>beta</tool> gamma"
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
Started = Callable[..., Config]


@pytest.fixture
def started(make_config: MakeConfig, tmp_path: Path) -> Started:
    """`started(word, ...)`: from a Llama of 320 tokens on texts with two more. tied: its head is the embedding."""
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number} {TEXT} " * 20)
    tokenizer = train_tokenizer(make_config())

    def make(*words: str, tied: bool = False) -> Config:
        if not (tmp_path / "base").exists():
            torch.manual_seed(0)
            shape = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=tied)
            LlamaForCausalLM(shape).bfloat16().save_pretrained(tmp_path / "base")
            tokenizer.save_pretrained(tmp_path / "base")
        named = ["model.config={}", f"model.name={tmp_path}/base", "tokenizer.vocab_size=0"]
        added = [f"data.files={tmp_path}/texts/*.txt", f"tokenizer.add_tokens={TOKENS}"]
        return make_config(*named, *added, "train.steps=4", "optimizer.lr=1e-2", *words)

    return make


def new_ids(folder: Path) -> list[int]:
    """The ids of the new tokens in an exported tokenizer, which reads and writes the text as it is."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT).input_ids
    found = tokenizer.convert_tokens_to_ids(TOKENS)
    assert [ids.count(each) for each in found] == [1, 1]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=True) == "alpha beta gamma"
    return found


def initial(config: Config) -> torch.Tensor:
    return build_model(config, make_tokenizer(config), CPU).get_input_embeddings().weight.detach()


def test_the_whole_model_trains_them(started: Started, console: Console, tmp_path: Path) -> None:
    result = run_once(started(), console, "whole")
    model = AutoModelForCausalLM.from_pretrained(result.export, dtype=torch.bfloat16)
    ids = new_ids(Path(result.export))
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 384
    assert f"2 tokens added: {ids[-1] + 1} ids, 384 rows" in text_of(console)
    before = initial(started())
    assert before.shape == (384, 128)
    old = load_file(tmp_path / "base/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(before[: len(old)], old)
    assert all(not torch.equal(before[row], model.get_input_embeddings().weight[row]) for row in ids)


@pytest.mark.parametrize("tied", [False, True])
def test_beside_adapters_their_rows_alone_are_trained(
    tied: bool, started: Started, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and resumed on the way; the adapters' folder holds the rows, and peft loads the trained model from it."""
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(RunStoppedError):
            run_once(started("lora.rank=4", tied=tied), console, "run")
    result = run_once(started("lora.rank=4"), console, "run")
    whole = run_once(started("lora.rank=4", f"train.run_dir={tmp_path}/whole", "lora.merge=true"), console, "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    ids, held = new_ids(Path(result.export)), load_file(f"{result.export}/adapter_model.safetensors")
    tables = {name: each for name, each in held.items() if "lora_" not in name}
    assert sorted(tuple(each.shape) for each in tables.values()) == [(2, 128)] * (1 if tied else 2)
    assert len(tensors_in(newest(tmp_path / "run"))) < 200
    before = initial(started("lora.rank=4"))
    for each in tables.values():
        assert not torch.equal(each.bfloat16(), before[ids])
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(result.export, dtype=torch.bfloat16).eval()
    merged = AutoModelForCausalLM.from_pretrained(whole.export, dtype=torch.bfloat16).eval()
    assert new_ids(Path(whole.export)) == ids
    assert merged.config.vocab_size == 384
    inputs = AutoTokenizer.from_pretrained(result.export)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        mine, other = loaded(inputs).logits[..., : ids[-1] + 1], merged(inputs).logits[..., : ids[-1] + 1]
    torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)


def test_adapters_with_tokens_go_on(started: Started, console: Console, tmp_path: Path) -> None:
    first = run_once(started("lora.rank=4"), console, "first")
    words = [f"model.name={first.export}", "tokenizer.add_tokens=[]", f"train.run_dir={tmp_path}/second"]
    second = run_once(started(*words), console, "second")
    assert second.train_loss < first.train_loss
    before, after = (load_file(f"{each.export}/adapter_model.safetensors") for each in (first, second))
    assert before.keys() == after.keys()
    assert new_ids(Path(second.export)) == new_ids(Path(first.export))


def _run(_rank: int, config: Config) -> None:
    run_once(config, Console(quiet=True), "many")


def test_two_processes_train_the_same_rows(started: Started, console: Console, tmp_path: Path) -> None:
    words = ("lora.rank=4", "train.batch_size=1", "train.accumulation=2", "eval.rows=2")
    run_once(started(*words), console, "one")
    on_two(_run, "cpu", started(*words, f"train.run_dir={tmp_path}/two"))
    mine, other = (load_file(tmp_path / name / "export/adapter_model.safetensors") for name in ("run", "two"))
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        torch.testing.assert_close(tensor, other[key], rtol=0, atol=2e-3)


def test_a_model_of_its_own_has_rows_for_them(make_config: MakeConfig) -> None:
    config = make_config(f"tokenizer.add_tokens={TOKENS}")
    tokenizer = make_tokenizer(config)
    assert build_model(config, tokenizer, CPU).config.vocab_size == len(tokenizer) == 322


def test_a_table_with_room_stays(started: Started, tmp_path: Path) -> None:
    """And a token that the tokenizer has keeps its id."""
    config = started('tokenizer.add_tokens=["<tool>", "<|endoftext|>"]')
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=330)).bfloat16()
    model.save_pretrained(tmp_path / "base")
    tokenizer = make_tokenizer(config)
    assert (len(tokenizer), tokenizer.eos_token_id) == (321, 0)
    assert build_model(config, tokenizer, CPU).config.vocab_size == 330


def test_the_tokenizer_of_another_model_adds_no_rows(started: Started, tmp_path: Path) -> None:
    config = started()
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=300)).save_pretrained(tmp_path / "base")
    assert build_model(config, make_tokenizer(config), CPU).config.vocab_size == 300


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (['tokenizer.add_tokens=["<a>", "<a>"]'], r"tokenizer\.add_tokens = .*each once"),
        (["tokenizer.add_tokens="], r"tokenizer\.add_tokens = \[''\]"),
        (["data.special_tokens=text"], r"tokenizer\.add_tokens = .*data\.special_tokens = 'text'"),
    ],
)
def test_what_no_token_can_be_is_refused(words: list[str], why: str, started: Started) -> None:
    with pytest.raises(ValueError, match=why):
        started(*words)
