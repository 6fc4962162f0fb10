"""`benchmarks.pretrained`: tiny models with random weights stand in for the pretrained ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks import pretrained
from benchmarks.__main__ import main
from benchmarks.pretrained import compare, keep_used_tokens

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 48,
    "pad_token_id": 0,
}


def make_model(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    name = "Gemma3ForCausalLM" if kind == "Gemma3Text" else f"{kind}ForCausalLM"
    return getattr(transformers, name)._from_config(config, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its tokenizer, whose texts begin with a token of their own."""
    letters = {each: number for number, each in enumerate(["<bos>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(letters))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    make_model("Gemma3Text").save_pretrained(tmp_path)
    (tmp_path / "text").write_text("abcdefghgfedcb" * 32)
    return tmp_path


@pytest.mark.parametrize("used", [(), ("--used-tokens",)])
def test_every_recipe_has_its_figures(
    folder: Path, used: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrained, "is_installed", lambda _: False)
    words = ["--model", str(folder), "--text", str(folder / "text"), "--json", str(folder / "rows"), *used]
    sizes = ["--steps", "12", "--seeds", "1", "--batch", "2", "--length", "16", "--lr", "0.003"]
    assert main(["pretrained", *words, *sizes, "--recipes", "bf16", "default", "torchao"]) == 0
    bf16, ours, peer = (json.loads(line) for line in (folder / "rows").read_text().splitlines())
    assert bf16["cosine"] > 0.999 > ours["cosine"] > 0.97
    assert bf16["sqnr"] > ours["sqnr"] > 8
    assert bf16["held_out"] < bf16["fp32_loss"] - 0.3, "it has learnt"
    assert bf16["held_out_gap"] == 0
    assert abs(ours["held_out_gap"]) < 0.1
    assert ours["losses"] == [ours["held_out"]]
    assert "absent" in peer
    assert "torchao" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text"])
def test_a_softmax_over_the_used_tokens(kind: str) -> None:
    model = make_model(kind)
    ids = torch.tensor([[0, 7, 40, 7, 3], [0, 3, 40, 40, 7]])  # the padding token as well
    others = torch.ones(48, dtype=torch.bool)
    others[ids.unique()] = False
    with torch.no_grad():
        logits = model(ids).logits.masked_fill(others, -torch.inf)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    found = keep_used_tokens(model, ids)
    loss = model(found, labels=found).loss
    loss.backward()
    weight = model.get_input_embeddings().weight
    assert len(weight) == len(ids.unique())
    torch.testing.assert_close(loss, expected)
    assert weight.grad[0].norm() > 0, "the first is the padding token no more"


def test_comparison() -> None:
    truth = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    found = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([0.4, 4.0])}
    row = compare(found, truth)
    assert row["cosine"] == pytest.approx(25 / (5 * 25.25**0.5))
    assert row["sqnr"] == pytest.approx(20.0, abs=1e-4)
