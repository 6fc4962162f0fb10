"""`benchmarks.bias`: functions that are transformers' own when nothing is coded, and a bias that was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import bias
from benchmarks.bias import CODES, KEPT, gradients, prepare, study, table


@pytest.fixture(params=["Llama", "Olmo"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    config = getattr(transformers, f"{request.param}Config")(
        **sizes, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0, bos_token_id=0, pad_token_id=None
    )
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1 if "norm" in name else 0, 0.3)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: None)


def test_without_codes_gradients_are_transformers_own(export: Path) -> None:
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    ours = gradients(prepare(export, "cpu")[0], ids, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=2e-4, atol=1e-5)


def test_a_planted_bias_is_found_and_chance_is_none(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"none": lambda x: x, "longer": lambda x: 1.01 * x, "chance": lambda x: x + 0.05 * torch.randn_like(x)}
    monkeypatch.setattr(bias, "CODES", codes)
    model, _ = prepare(export, "cpu")
    generator = torch.Generator().manual_seed(2)
    of_weights, of_attention = study(model, [torch.randint(64, (1, 24), generator=generator) for _ in range(60)])
    down = "model.layers.1.mlp.down_proj.weight"
    none, longer, chance = (of_weights[name][down] for name in codes)
    assert none["error"] == none["bias"] == none["along"] == 0
    assert 0.5 < longer["bias"] < 4
    assert 0.5 < longer["along"] < 4
    assert chance["error"] > longer["error"]
    assert abs(chance["bias squared"]) < 4 * chance["+- bias squared"]
    assert f"| longer | down_proj | {longer['error']:.1f}"[:20] in table(of_weights)
    rows = of_attention
    assert set(rows) == set(KEPT)
    # With o of the same v, rows of dS add up to zero; with kept ones they do not.
    again, kept = rows["all sqrt8, o again"], rows["all sqrt8"]
    assert again["row sum of dS: rms"] < 1e-3 < kept["row sum of dS: rms"]
    assert rows["12-bit q k, sqrt8 v, o again"]["dS: error"] < rows["all e4m3"]["dS: error"]


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 128).expand(4000, 128)
    decoded = CODES["sqrt8 stochastic"](x)
    deviation = (decoded.mean(0) - x[0]) / (decoded.std(0).clamp(min=1e-12) / 4000**0.5)
    inside = x[0].abs() < x[0].abs().max()
    assert deviation[inside].abs().max() < 5
    assert decoded.std(0)[inside].max() > 0
