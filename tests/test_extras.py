"""Optional packages: one that is missing is one clear sentence, one that is broken speaks for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from overcoat.extras import load_extra


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
