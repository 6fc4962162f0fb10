"""Pages that are generated: what they say comes from the code. Links are checked by `make docs`."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat
from overcoat.train.configfile import help_text, load_config

ROOT = Path(__file__).parents[1]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


def test_every_key_of_the_configuration_is_on_its_page() -> None:
    page = GENERATE["on_page_markdown"]((ROOT / "docs" / "configuration.md").read_text())
    keys = re.findall(r"^\| `([a-z_]+\.[a-z0-9_]+)` \|", page, re.MULTILINE)
    assert keys == re.findall(r"^(\w+\.\w+) = ", help_text(), re.MULTILINE)
    assert len(keys) > 50
    assert '| `train.batch_size` | `int or "auto"` | `8` |' in page
    assert "{{" not in page


def test_the_support_matrix_is_what_convert_says() -> None:
    support_matrix = GENERATE["support_matrix"]
    variables = support_matrix.__globals__  # all types take seconds
    variables["MODEL_TYPES"] = ("llama", "mixtral", "qwen3_vl", "phi", "hunyuan_v1_dense")
    variables["supported_layers"] = lambda: {"LlamaDecoderLayer", "MixtralDecoderLayer", "Qwen3VLTextDecoderLayer"}
    table = support_matrix()
    assert "| Llama | `llama` | `LlamaDecoderLayer` | all | 5.8 U | yes |" in table
    assert "| Mixtral | `mixtral` | `MixtralDecoderLayer` | all but the router | 3.0 U | yes |" in table
    assert "| Qwen3VL | `qwen3_vl` | `Qwen3VLTextDecoderLayer` | all | 5.8 U | yes |" in table
    rows, others = table.split("Found by their structure: ")
    # HunYuan looks like Llama, and norms q and k after the rotation.
    assert others == "Phi; in part: HunYuanDenseV1."
    assert "hunyuan" not in rows
    variables["supported_layers"] = lambda: {"LlamaDecoderLayer", "NewDecoderLayer"}
    with pytest.raises(ValueError, match="add the model types of NewDecoderLayer"):
        support_matrix()


def test_an_unknown_marker_fails_the_build() -> None:
    with pytest.raises(KeyError, match="nothing"):
        GENERATE["on_page_markdown"]("{{ nothing }}")


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^::: overcoat\.(\w+)$", page, re.MULTILINE)) == set(overcoat.__all__)


def test_every_example_is_on_a_page() -> None:
    """As a link, of which the site makes the file itself: text and code cannot differ, and GitHub shows both."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "libraries").glob("*.md"))
    site = GENERATE["on_page_markdown"](pages)
    for path in (ROOT / "examples").glob("*.py"):
        assert f"\n[examples/{path.name}](../../examples/{path.name})\n" in pages
        assert f"\n```python\n{path.read_text()}```\n" in site


def test_no_page_has_the_marks_of_a_conflict() -> None:
    """A page renders with them, and nothing else reads it."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    assert not [page.name for page in pages if re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.filterwarnings("error:this layer")
def test_the_snippet_trains_in_fp8(page: str, tmp_path: Path) -> None:
    """Word for word, but for the device: `from_pretrained` gives a model in eval() mode."""
    LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                                 vocab_size=64)).save_pretrained(tmp_path)  # fmt: skip
    code = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[1].replace('"cuda"', '"cpu"')
    ids = torch.arange(32).reshape(1, 32)
    found = {"path": tmp_path, "loader": [{"input_ids": ids, "labels": ids}]}
    exec(code, found)
    running = overcoat.convert(found["model"]).running()
    assert running["model.layers.0"] == "FP8", running


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tasks").glob("*.md")), ids=lambda page: page.stem)
def test_a_task_is_short_and_its_configurations_are_valid(page: Path, tmp_path: Path) -> None:
    """test_quickstart.py runs its blocks."""
    text = page.read_text()
    assert len(text.split()) <= 400
    for name, lines in re.findall(r"^cat > (\S+) <<'TOML'\n(.*?)^TOML$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(lines)
        commands = re.findall(rf"^overcoat train {name}(.*)$", text, re.MULTILINE)
        assert commands
        for words in commands:
            load_config(tmp_path / name, shlex.split(words.split("--gpus")[0]))
