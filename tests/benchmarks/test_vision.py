"""`benchmarks.vision`: which layers an arm converts or rounds, labels where the trainer has them, means over seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from benchmarks.vision import ARMS, KINDS, convert_as, summary, write_scenes
from overcoat.formats import E4M3, E5M2
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.family import decoder_layers
from overcoat.paper.scenes import scene
from overcoat.paper.vision import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    build(folder / "model", 64, 1, 1)
    return folder


@pytest.mark.parametrize(
    ("arm", "converted"),
    {"bf16": "", "products": "", "default": "tower text", "tower": "tower", "text": "text"}.items(),
)
def test_an_arm_converts_its_layers(folder: Path, arm: str, converted: str) -> None:
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "model")
    convert_as(model, ARMS[arm])
    found = {name for name, layer in decoder_layers(model).items() if isinstance(layer, Fp8DecoderLayer)}
    named = {"tower": "vision_tower", "text": "language_model"}
    assert found == {name for part in converted.split() for name in decoder_layers(model) if named[part] in name}


@pytest.mark.parametrize(("formats", "changed"), [((None, None), "00"), ((E4M3, None), "11"), ((None, E5M2), "01")])
def test_products_round_what_they_are_told(folder: Path, formats: tuple[None, None], changed: str) -> None:
    """Output and weight gradient, against the plain layers; in eval() nothing is rounded."""
    results = []
    for chosen in (None, formats):
        model = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
        convert_as(model, ARMS["bf16"]._replace(products=chosen))
        layer: nn.Module = decoder_layers(model)["model.vision_tower.encoder.layers.0"].train()
        x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
        y = layer(x, attention_mask=None)
        y.square().sum().backward()
        results.append((y.detach(), layer.mlp.fc1.weight.grad, layer.eval()(x, attention_mask=None).detach()))
    (y, grad, quiet), (y2, grad2, quiet2) = results
    assert (
        "".join(str(int(not torch.allclose(a, b, rtol=1e-4, atol=1e-5))) for a, b in ((y, y2), (grad, grad2)))
        == changed
    )
    torch.testing.assert_close(quiet, quiet2)


def test_labels_are_the_answer_and_the_end(folder: Path) -> None:
    write_scenes(folder, "test", 5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    with np.load(folder / "test.npz") as arrays:
        for row in range(5):
            made = scene(f"test {row}")
            labels, place = arrays["labels"][row], arrays["answers"][row]
            assert tokenizer.decode(labels[labels >= 0]) == f"{made.answer} <eos>"
            assert tokenizer.decode(labels[place]) == made.answer
            assert tokenizer.decode(arrays["ids"][row][place + 1]) == made.answer
            assert (arrays["ids"][row] == 2).sum() == 64
            assert KINDS[arrays["kinds"][row]] == made.kind


def test_summary_pairs_seeds() -> None:
    def row(arm: str, seed: int, loss: float) -> dict[str, object]:
        return {
            "arm": arm,
            "seed": seed,
            "steps": 9,
            "found": [{"loss": loss, "fp8_loss": 1.0, **dict.fromkeys(KINDS, 50.0)}],
        }

    text = summary([row("bf16", 0, 0.25), row("bf16", 1, 0.75), row("default", 0, 0.5), row("default", 1, 1.5)])
    assert (
        "| default | 2 | 1.0000 +- 0.5000 | 0.5000 +- 0.2500 | 1.0000 +- 0.0000 | 50.0 +- 0.0 | 50.0 +- 0.0 |" in text
    )
