"""Optional packages: one that is missing is one clear sentence, one that is broken speaks for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from overcoat.extras import check_exists, fit_terminal, load_extra, load_pretrained
from overcoat.train.config import DataConfig
from overcoat.train.sources import open_dataset


@pytest.mark.parametrize("module", ["surely_not_installed", "surely_not_installed.part", "json.surely_not_there"])
def test_a_missing_package_says_what_it_is_for_and_how_to_get_it(module: str) -> None:
    """An old version of a package may lack the module: the remedy is the same."""
    package = module.partition(".")[0]
    expected = rf"^loading a thing needs the package '{package}': pip install 'overcoat\[extra\]'$"
    with pytest.raises(ValueError, match=expected) as caught:
        load_extra(module, "extra", "loading a thing")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import surely_not_installed", ModuleNotFoundError, "No module named 'surely_not_installed'"),
        ("from overcoat_test_broken import surely_not_there", ImportError, "cannot import name 'surely_not_there'"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
    ],
)
def test_a_broken_package_keeps_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], message: str
) -> None:
    """Installing it again would not help: what it needs is missing, or it is broken itself."""
    (tmp_path / "overcoat_test_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=message):
        load_extra("overcoat_test_broken", "hf", "reading")


def test_a_path_to_nothing_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of retries without a network; a folder of models says nothing about the next one's name."""
    monkeypatch.chdir(tmp_path)
    for there in ("out/done/config.toml", "Qwen/Qwen3-8B/config.json"):
        Path(there).parent.mkdir(parents=True)
        Path(there).touch()
    for name in ("runs/none", "./none", "/none", "~/none", "a/b/none", "out/none"):
        for look in (
            lambda name: load_pretrained("AutoConfig", "the model", name, False),
            lambda name: open_dataset(DataConfig(dataset=name)),
        ):
            with pytest.raises(ValueError, match=rf"{name}: no such file or folder"):
                look(name)
    with pytest.raises(ValueError, match=r"out/done/config.toml is a run: for a hub name start where no folder out is"):
        check_exists("out/none")
    for name in (
        "gpt2",
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
        "out/done",
        "x" * 300 + "/y",
        "hf://datasets/a/b",
        "buckets/a/b/c",
    ):
        check_exists(name)


def test_lines_fit_a_terminal_without_cutting_words() -> None:
    row = "+ release_gradients            33.79      35.32             0   no clipping by the norm of all gradients"
    shown = fit_terminal(f"{row}\n\nshort", 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == f"{row} short".split()
    assert shown.splitlines()[-2:] == ["", "short"]
