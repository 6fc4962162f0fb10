"""The page of a real tiny run and its twin: what it shows is what was recorded, and it needs nothing from outside."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from overcoat import cli
from overcoat.report.charts import Series, chart, ticks
from overcoat.report.command import figures, memory, training
from overcoat.report.runs import read_runs
from overcoat.train.configfile import build_config
from overcoat.train.metrics import read_metrics
from overcoat.train.run import run
from overcoat.train.summary import summarize
from tests.train.conftest import TINY, corpus_files  # noqa: F401

QUIET = Console(quiet=True)
# Of a run from before values that nothing reads were refused.
RECORDED = """eval.tasks_limit = 5
model.name = "x"
[data]
files = ["y"]
too_long = "drop"
shuffle_rows = 9
split = "test"
token_dtype = "uint32"
"""
BRANCH = {"branch": "mlp", "kind": "A", "state": "own", "layers": 1, "before": 1.5, "after": 1.0}


@pytest.fixture(scope="session")
def folder(corpus_files: str, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run with everything there is to show; one step was skipped, and the sample is not kind to HTML."""
    place = tmp_path_factory.mktemp("report") / "run"
    words = ["train.fp8_every=4", "memory.report=true", "sample.tokens=8", 'compare.overrides=["recipe.name=bf16"]']
    config = build_config(TINY, [f"data.files={corpus_files}", f"train.run_dir={place}", "train.log_every=1", *words])
    summarize(run(config, QUIET), place, QUIET)
    results = json.loads((place / "results.json").read_text())
    results["runs"][0]["sample"] = "<script>alert(1)</script> & more"
    (place / "results.json").write_text(json.dumps(results))
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if (row["kind"], row["step"]) == ("train", 7):
            row["gradient_norm"] = None
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="session")
def text(folder: Path) -> str:
    output = folder.parent / "report.html"
    assert cli.main(["report", str(folder), "-o", str(output)]) == 0
    return output.read_text()


def charts(text: str) -> dict[str, dict[str, Any]]:
    """Data of all charts, by title."""
    found = re.findall(r'<figcaption>(.*?) <small>.*?data-chart="(.*?)"', text, re.DOTALL)
    return {html.unescape(title): json.loads(html.unescape(data)) for title, data in found}


def lines(data: dict[str, Any]) -> dict[str, list[list[float]]]:
    return {series["n"]: series["p"] for series in data["series"]}


def test_charts_show_what_was_recorded(folder: Path, text: str) -> None:
    found = charts(text)
    mine, twin = (read_metrics(place / "metrics.jsonl") for place in (folder, folder / "twin"))
    losses = lines(found["Loss"])
    for name, metrics in (("run", mine), ("run/twin", twin)):
        assert losses[name] == [[step, pytest.approx(row["loss"], rel=1e-5)] for step, row in metrics["train"].items()]
        evaluated = [[step, pytest.approx(row["loss"], rel=1e-5)] for step, row in metrics["eval"].items()]
        assert losses[f"{name}, held out"] == evaluated
    norms = lines(found["Gradient norm"])
    assert [x for x, _ in norms["run"]] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert [x for x, _ in norms["run, skipped"]] == [7]
    assert "run/twin, skipped" not in norms
    assert {"Tokens per second", "Learning rate", "Peak memory", "Attention", "Zero", "At the largest code"} <= set(
        found
    )
    gaps = lines(found["Loss difference"])["run/twin"]
    assert gaps == [
        [step, pytest.approx(row["loss"] - mine["train"][step]["loss"], abs=1e-5)]
        for step, row in twin["train"].items()
    ]
    for name, told in (("model", "llama"), ("device", "CPU")):
        assert re.search(f"<td>{name}</td><td>{told}</td><td>{told}</td>", text), name
    row = re.search(r"<td>skipped steps</td><td>(\d)</td><td>(\d)</td>", text)
    assert row is not None
    assert row.groups() == ("1", "0")


def test_memory_is_the_estimate_and_what_was_measured(folder: Path, text: str) -> None:
    (prediction, *_) = (each.prediction for each in read_runs([str(folder)]))
    assert not isinstance(prediction, str)
    assert [sum(each.values()) for each in prediction.by_phase] == [phase.peak for phase in prediction.phases]
    assert max(map(sum, map(dict.values, prediction.by_phase))) == prediction.peak_bytes
    (data,) = (data for title, data in charts(text).items() if title.startswith("run: 2 x 32"))
    measured = json.loads((folder / "memory.json").read_text())["measured"]
    drawn = lines(data)["measured peak"]
    assert drawn == [[place, pytest.approx(each["peak"] / 2**20, rel=1e-5)] for place, each in enumerate(measured)]
    stack = [series for series in data["series"] if series["look"] == "area"]
    on_cpu = [pytest.approx((phase.peak - prediction.handle_bytes) / 2**20, rel=1e-5) for phase in prediction.phases]
    assert [y for _, y in stack[0]["p"]] == on_cpu
    for above, below in itertools.pairwise(stack):
        assert all(a[1] >= b[1] for a, b in zip(above["p"], below["p"]))


def test_branches_are_those_of_the_memory_report(folder: Path, text: str) -> None:
    for path in (folder, folder / "twin"):
        rows = json.loads((path / "memory.json").read_text())["branches"]
        assert rows
        for row in rows:
            cells = (
                row["branch"],
                row["kind"],
                row["state"],
                row["layers"],
                f"{row['before']:,.0f}",
                f"{row['after']:,.0f}",
            )
            assert "".join(f"<td>{cell}</td>" for cell in cells) in text


def test_memory_of_two_runs_has_one_axis(folder: Path, text: str) -> None:
    heights = [re.findall(r'class="y" style="top:(.*?)%">(.*?)<', chart) for chart in text.split("<figure")]
    tall = [found for chart, found in zip(text.split("<figure"), heights, strict=True) if "2 x 32" in chart]
    assert len(tall) == 2
    assert tall[0] == tall[1]


def test_routers_have_charts(folder: Path) -> None:
    (run, _) = read_runs([str(folder)])
    assert not {"Auxiliary loss", "Expert load"} & charts("".join(training([run]))).keys()
    for step, row in run.metrics["train"].items():
        row |= {"aux_loss": 2.0 + step, "expert_load": 1.5}
    drawn = charts("".join(training([run])))
    assert lines(drawn["Auxiliary loss"])["run"][:2] == [[1, 3.0], [2, 4.0]]
    assert {y for _, y in lines(drawn["Expert load"])["run"]} == {1.5}


def test_text_of_a_run_is_escaped(folder: Path, text: str) -> None:
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_tokens_are_those_trained_on(folder: Path, tmp_path: Path) -> None:
    """After step 6 of 12 the run went on with rows of 32 tokens twice as many in a step."""
    run, twin = read_runs([str(folder)])
    assert [run.tokens(step) for step in (1, 12)] == [64, 768]
    assert charts("".join(training([run, twin])))["Loss"]["name"] == "step"
    rows = run.metrics["train"]
    for step in range(7, 13):
        rows[step]["total_tokens"] += 64 * (step - 6)
    drawn = charts("".join(training([run, twin])))["Loss"]
    assert [x for x, _ in lines(drawn)["run"]][5:8] == [384e-6, 512e-6, 640e-6]
    assert [x for x, _ in lines(drawn)["run, held out"]] == [384e-6, 1152e-6]
    assert "<td>tokens</td><td>0.00 M</td>" in figures([run])
    del rows[12]["total_tokens"]  # of a run before they were recorded
    assert run.tokens(12) == 768


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_what_is_not_finite_is_left_out(lost: float) -> None:
    points = [(1.0, 1.0), (2.0, 2.0)]
    expected, found = (chart("loss", "", [Series("a", "c0", of)]) for of in (points, [*points, (3.0, lost)]))
    assert found == expected


def test_a_chart_of_memory_that_is_not_estimated_is_left_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    written = tmp_path / "run/config.toml"
    without = written.read_text().replace("report = true", "report = false")
    written.write_text(without.replace("context = 1", "context = 2"))
    first, *_ = read_runs([str(tmp_path / "run")])
    assert "No estimate: parallel.context = 2, which the estimate does not know." in memory(first, 0)


def test_ranges_are_those_of_the_last_sample(folder: Path, text: str) -> None:
    samples = read_metrics(folder / "metrics.jsonl")["fp8"]
    assert list(samples) == [4, 8, 12]
    shown = re.findall(r'title="model\.layers\.\d+ [a-z_ ]+: [^"]+">([0-9.]+)%<', text)
    layers = samples[12]["ranges"].values()
    kinds = ("input", "weight", "gradient")
    assert shown == [f"{100 * products[p][k][1]:.1f}" for k in kinds for products in layers for p in products]
    worst = lines(charts(text)["Zero"])["gradients, worst"]
    expected = [
        max(ops["gradient"][1] for layer in s["ranges"].values() for ops in layer.values()) for s in samples.values()
    ]
    assert [y for _, y in worst] == [pytest.approx(value, rel=1e-5) for value in expected]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: None, "is no run of overcoat: it has no config.toml"),
        (lambda place: (place / "config.toml").write_text(RECORDED), "has no step in"),
        (lambda place: (place / "config.toml").write_text(RECORDED + "\n[data.x]"), "config.toml: unknown key data.x"),
    ],
)
def test_what_is_no_run_is_one_line(
    make: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert cli.main(["report", ""]) == 2
    assert "a RUN is empty" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "out.html")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()
    (tmp_path / "mine.toml").write_text("mine")
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "mine.toml")]) == 2
    assert "mine.toml exists, and is no .html: name another file" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{", "3", "{}", '{"runs": 3, "measured": [1]}'])
@pytest.mark.parametrize("name", ["results.json", "memory.json"])
def test_a_damaged_file_is_named(
    name: str, content: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kept in ("config.toml", "metrics.jsonl"):
        (tmp_path / kept).write_bytes((folder / kept).read_bytes())
    (tmp_path / name).write_text(content)
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "out.html")]) == 2
    assert f"{tmp_path / name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        '{"kind": "train", "step": 0, "loss": 1, "tokens_per_second": 1, "peak_bytes": 1}',
        '{"kind": "train", "step": 1.5, "loss": 1, "tokens_per_second": 1, "peak_bytes": 1}',
        '{"kind": "train", "step": 1, "loss": 1, "tokens_per_second": NaN, "peak_bytes": 1}',
        '{"kind": "train", "step": 1, "loss": 1, "tokens_per_second": 1, "peak_bytes": Infinity}',
        '{"kind": "train", "step": 1, "loss": true, "tokens_per_second": 1, "peak_bytes": 1}',
        '{"kind": "train", "step": 1, "loss": 1, "lr": "x", "tokens_per_second": 1, "peak_bytes": 1}',
        '{"kind": "train", "step": 1, "loss": 1, "tokens_per_second": 1, "peak_bytes": 1, "total_tokens": null}',
        '{"kind": "eval", "step": 1, "loss": 1, "attention_score": []}',
        '{"kind": "tasks", "step": 1, "a/acc": "x"}',
        '{"kind": "fit", "step": 1, "micro_batch": 0, "block_checkpoints": false}',
        '{"kind": "fp8", "step": 1}',
        '{"kind": "fp8", "step": 1, "ranges": {"a": {"b": {"input": [0, -1, 1]}}}}',
        '{"kind": "fp8", "step": 1, "ranges": {"a": {"b": [0, 1, 1]}}}',
        '{"kind": ["train"], "step": 1}',
        "[" * 100000,
    ],
)
def test_a_damaged_row_is_named(row: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kept in ("config.toml", "metrics.jsonl"):
        (tmp_path / kept).write_bytes((folder / kept).read_bytes())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "out.html")]) == 2
    assert "not a row that overcoat wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", '{"runs": [{"num_parameters": "x"}]}'),
        ("results.json", '{"runs": [{"kept_bytes": NaN}]}'),
        ("results.json", '{"runs": [{"sample": 3}]}'),
        ("memory.json", '{"measured": [{"label": "a"}], "figures": {"peak of the step": {}}}'),
        ("memory.json", '{"measured": [{"label": "a", "peak": 1}]}'),
        ("memory.json", '{"measured": [], "branches": 3}'),
        ("memory.json", '{"measured": [], "branches": [{"branch": "mlp"}]}'),
        ("memory.json", json.dumps({"measured": [], "branches": [{**BRANCH, "state": 1}]})),
        ("memory.json", json.dumps({"measured": [], "branches": [{**BRANCH, "after": "x"}]})),
    ],
)
def test_figures_of_another_type_are_named(
    name: str, content: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test_a_damaged_file_is_named(name, content, folder, tmp_path, capsys)


def test_the_ends_of_an_axis_have_ticks() -> None:
    """3 x 0.2 is above 0.6 in floating point."""
    assert ticks(0.0, 0.6, 4) == pytest.approx([0.0, 0.2, 0.4, 0.6])
