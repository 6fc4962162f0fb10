"""The wheel and sdist of `make dist`; `make nightly` tries the wheel in an empty environment of each Python here."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from overcoat.version import VERSION
from tests import wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"  # setuptools would find what an earlier build has left in the tree
    shutil.copytree(ROOT / "overcoat", source / "overcoat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "benchmarks"):  # both stay out
        (source / name).mkdir()
    files = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
    for name in (*files, "tests/test_wheel.py", "benchmarks/__init__.py", "benchmarks/__main__.py"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return str(path)


def test_the_wheel_has_the_package_its_types_and_its_command(built: str) -> None:
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        info = f"overcoat-{VERSION}.dist-info"
        assert archive.read(f"{info}/entry_points.txt").decode().split() == [
            "[console_scripts]", "overcoat", "=", "overcoat.cli:main",
        ]  # fmt: skip
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "overcoat").rglob("*.py")}
    inside = {name for name in names if name.startswith("overcoat/")}
    data = {f"overcoat/{name}" for name in ("py.typed", "report/page.css", "report/page.js")}
    assert inside == {*modules, *data}
    assert {name.split("/")[0] for name in names} == {"overcoat", info}


def test_the_index_gets_a_page_without_dead_links(built: str) -> None:
    with zipfile.ZipFile(built) as archive:
        found = email.message_from_bytes(archive.read(f"overcoat-{VERSION}.dist-info/METADATA"))
    assert found["Description-Content-Type"] == "text/markdown"
    assert found["License-Expression"] == "Apache-2.0"
    page, readme = str(found.get_payload()), (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "[Trainer](docs/libraries/trainer.md)" in readme  # of which the text stays
    assert "Trainer, Accelerate" in page.replace("\n", " ")
    titles = [line for line in readme.splitlines() if line.startswith("#")]
    assert [line for line in page.splitlines() if line.startswith("#")] == titles


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    inside = [target.partition("#")[0] for target in targets if not target.startswith("https://")]
    assert [target for target in inside if not (ROOT / target).exists()] == []
    assert len(inside) > 10


def test_the_sdist_has_neither_tests_nor_benchmarks(built: str) -> None:
    with tarfile.open(next(Path(built).parent.glob("*.tar.gz"))) as archive:
        assert {name.split("/")[1] for name in archive.getnames() if "/" in name} >= {
            "overcoat",
            "pyproject.toml",
            "setup.py",
        }
        assert [name for name in archive.getnames() if "/tests" in name or "/benchmarks" in name] == []


@pytest.mark.nightly
@pytest.mark.parametrize("minor", wheel.MINORS)
def test_every_python_of_this_machine_takes_the_wheel(built: str, minor: int) -> None:
    found = [python for python in wheel.pythons() if f"3.{minor}" in python]
    if not found:
        pytest.skip(f"no Python 3.{minor} with venv here")
    wheel.try_one(found[0], built, None)


def test_the_changelog_begins_with_this_version() -> None:
    titles = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert titles[0].split()[1] == VERSION
