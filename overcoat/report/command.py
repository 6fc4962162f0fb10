"""`overcoat report`: show one or several runs as one HTML page, which needs no network.

    overcoat report runs/demo
    overcoat report runs/a runs/b runs/c -o comparison.html

Losses, speed, memory, gradient norms and learning rates over the steps; the memory of a step by component; how FP8
operands use their range (train.fp8_every); differences of the configurations; samples. A run with [compare] also shows
its second run. The page refers to nothing outside itself.
"""

from __future__ import annotations

import argparse
import datetime
import html
import operator
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overcoat.extras import printable
from overcoat.models.saved_bytes import HEADS, BranchBytes
from overcoat.report.charts import Points, Series, chart
from overcoat.report.runs import Run, read_runs
from overcoat.train.config import require
from overcoat.train.configfile import all_keys
from overcoat.train.metrics import running_mean, shown_bytes, shown_passes
from overcoat.version import VERSION

NUM_COLORS = 8
OPERANDS = {"input": "inputs (E4M3)", "weight": "weights (E4M3)", "gradient": "output gradients"}
# Places and such, which say nothing of what was trained.
UNTOLD = ("train.run_dir", "train.resume", "data.cache_dir", "compare.", "sample.")
escape: Callable[[Any], str] = lambda value: html.escape(str(value))  # noqa: E731


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    target = Path(parsed.output)
    require(target.suffix == ".html" or not target.exists(), f"-o {target} exists, and is no .html: name another file")
    text = page(read_runs(parsed.runs))
    content = text.encode("utf-8", "replace")  # a file may hold half of a surrogate pair
    target.write_bytes(content)
    print(f"{printable(parsed.output)} ({len(content) / 1000:,.0f} kB)")
    return 0


def page(runs: list[Run]) -> str:
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    today = datetime.date.today().isoformat()
    parts = [
        f"<h1>{escape(title)}</h1><p class=soft>Overcoat {VERSION}, {today}</p>",
        f'<div class="card scroll{" summary" * (len(runs) < 3)}" style="margin-top:14px">{figures(runs)}</div>',
        f"<h2>Training</h2><div class=grid>{''.join(training(runs))}</div>",
        f"<h2>Memory over a step</h2><div class=grid>{''.join(memories(runs))}</div>",
    ]
    if any(run.memory.get("branches") for run in runs):
        parts.append("<h2>Saved for the backward</h2>" + "".join(branches(run) for run in runs))
    if any(run.metrics["fp8"] for run in runs):
        parts.append("<h2>FP8 ranges</h2>" + "".join(ranges(run) for run in runs if run.metrics["fp8"]))
    parts.append(f"<h2>Configuration</h2><div class=grid>{configurations(runs)}</div>")
    samples = [(run, run.result["sample"]) for run in runs if run.result.get("sample")]
    if samples:
        cards = (f"<div class=card>{_named(run, runs)}<pre>{escape(text)}</pre></div>" for run, text in samples)
        parts.append(f"<h2>Samples</h2><div class=grid>{''.join(cards)}</div>")
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{''.join(parts)}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _color(place: int) -> str:
    return f"c{place % NUM_COLORS}"


def _named(run: Run, runs: list[Run]) -> str:
    return f'<span class=run style="--c:var(--{_color(runs.index(run))})">{escape(run.name)}</span>'


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(runs: list[Run]) -> str:
    """Return the table of figures, one column per run."""
    lines: list[tuple[str, list[str]]] = [(name, [_or_dash(of, run) for run in runs]) for name, of in FIGURES]
    for task in dict.fromkeys(name for run in runs for name in _tasks(run)):
        lines.append((f"{task}, BF16", [_or_dash(lambda run: f"{_tasks(run)[task][-1][1]:.4f}", run) for run in runs]))  # noqa: B023
    head = "".join(f"<th>{_named(run, runs)}</th>" for run in runs)
    rows = (f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in lines)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _or_dash(of: Callable[[Run], Any], run: Run) -> str:
    try:
        return escape(of(run))
    except (KeyError, IndexError):  # a run that is not at its end, or has no such figure
        return "–"  # noqa: RUF001


def _rows(run: Run) -> list[dict[str, Any]]:
    return list(run.metrics["train"].values())


def _planned(run: Run) -> str:
    """Return how far the run is to go."""
    train = run.config.train
    return f"{train.epochs:g} epochs" if train.epochs else f"{train.num_steps:,}"


def _skipped(run: Run) -> list[int]:
    return [row["step"] for row in _rows(run) if row.get("gradient_norm") is None]


def _tasks(run: Run) -> dict[str, Points]:
    """Return the results of tasks over steps."""
    found: dict[str, Points] = {}
    for step, row in run.metrics["tasks"].items():
        for name, value in row.items():
            if name not in ("kind", "step") and "_stderr" not in name:
                found.setdefault(name, []).append((step, value))
    return found


def _model(run: Run) -> str:
    model = run.config.model
    return str(model.name or model.config.get("model_type", ""))


def _data(run: Run) -> str:
    data = run.config.data
    return ", ".join([*data.files, *([data.dataset] if data.dataset else [])])


def _hours(run: Run) -> str:
    """Return the time that training took, from tokens and speed of each logged step: of resumed runs all parts."""
    seconds, before = 0.0, 0
    for row in _rows(run):
        total = run.tokens(row["step"])
        seconds += (total - before) / max(row["tokens_per_second"], 1e-9)
        before = total
    return str(datetime.timedelta(seconds=round(seconds)))


FIGURES: tuple[tuple[str, Callable[[Run], Any]], ...] = (
    ("model", _model),
    ("data", _data),
    ("device", lambda run: run.result["device"]),
    ("time of training steps", _hours),
    ("start", lambda run: run.result["start"]),
    ("recipe", lambda run: run.config.recipe.name),
    ("steps", lambda run: f"{_rows(run)[-1]['step']:,} of {_planned(run)}"),
    ("tokens", lambda run: f"{run.tokens(_rows(run)[-1]['step']) / 1e6:,.2f} M"),
    ("passes over the data", lambda run: shown_passes(run.result["passes"])),
    ("parameters", lambda run: f"{run.result['num_parameters'] / 1e6:,.1f} M"),
    (
        "training loss, last tenth",
        lambda run: f"{statistics.fmean(row['loss'] for row in _rows(run)[-max(1, len(_rows(run)) // 10) :]):.4f}",
    ),
    ("held-out loss", lambda run: f"{[*run.metrics['eval'].values()][-1]['loss']:.4f}"),
    ("tokens / s, median", lambda run: f"{statistics.median(row['tokens_per_second'] for row in _rows(run)):,.0f}"),
    ("peak memory", lambda run: shown_bytes(max(row["peak_bytes"] for row in _rows(run)))),
    ("kept for the backward", lambda run: shown_bytes(run.result["kept_bytes"])),
    ("optimizer state", lambda run: shown_bytes(run.result["optimizer_bytes"])),
    ("skipped steps", lambda run: len(_skipped(run))),
)

# ---- charts ---------------------------------------------------------------------------------------------------------


def training(runs: list[Run]) -> Iterator[str]:
    """Yield charts of losses, speed and the like over steps, or over tokens if steps differ in tokens."""
    by_tokens = len({run.tokens(step) / step for run in runs for step in run.metrics["train"]}) > 1
    x_name = "million tokens" if by_tokens else "step"

    def place_of(run: Run, step: int) -> float:
        return run.tokens(step) / 1e6 if by_tokens else step

    def points(run: Run, kind: str, key: str) -> Points:
        return [(place_of(run, step), row[key]) for step, row in run.metrics[kind].items() if row.get(key) is not None]

    def lines(key: str, kind: str = "train") -> list[Series]:
        return [Series(run.name, _color(place), points(run, kind, key)) for place, run in enumerate(runs)]

    def smoothed(key: str) -> list[Series]:
        found: list[Series] = []
        for one in lines(key):
            found.append(one._replace(look="faint"))
            means = running_mean([y for _, y in one.points], max(1, len(one.points) // 50))
            found.append(one._replace(points=[(x, mean) for (x, _), mean in zip(one.points, means, strict=True)]))
        return found

    def extra(what: str, points_of: Callable[[Run], Points]) -> list[Series]:
        return [Series(f"{run.name}, {what}", _color(i), points_of(run), "dots") for i, run in enumerate(runs)]

    norms = smoothed("gradient_norm")
    top = max((y for one in norms for _, y in one.points), default=1.0)
    losses = smoothed("loss") + extra("held out", lambda run: points(run, "eval", "loss"))
    norms += extra("skipped", lambda run: [(place_of(run, step), top) for step in _skipped(run)])
    yield chart("Loss", "nats per token, running mean", losses, x_name=x_name, settles=True)
    yield chart("Loss difference", f"to {runs[0].name}, running mean", differences(runs, place_of), x_name=x_name)
    yield chart("Tokens per second", "", lines("tokens_per_second"), x_name=x_name, zero=True)
    yield chart("Gradient norm", "before clipping, running mean", norms, x_name=x_name, log=True)
    yield chart("Learning rate", "", lines("lr"), x_name=x_name, zero=True)
    peaks = [one._replace(points=[(x, y / 2**30) for x, y in one.points]) for one in lines("peak_bytes")]
    yield chart("Peak memory", "GiB so far", peaks, x_name=x_name, zero=True)
    yield chart("Auxiliary loss", "of the routers, per label", lines("aux_loss"), x_name=x_name)
    yield chart("Expert load", "busiest expert over the mean; none is dropped", lines("expert_load"), x_name=x_name)
    yield chart("Attention", "largest log-sum-exp in a held-out row", lines("attention_score", "eval"), x_name=x_name)
    for task in dict.fromkeys(name for run in runs for name in _tasks(run)):
        yield chart(task, "BF16", lines(task, "tasks"), x_name=x_name)


def differences(runs: list[Run], place_of: Callable[[Run, int], float]) -> Iterator[Series]:
    """Yield the training loss of each run but the first minus the first's, at the steps that both have logged."""
    first, *others = ({step: row["loss"] for step, row in run.metrics["train"].items()} for run in runs)
    for place, (run, losses) in enumerate(zip(runs[1:], others, strict=True), 1):
        gaps = {step: loss - first[step] for step, loss in losses.items() if None not in (loss, first.get(step))}
        means = running_mean([*gaps.values()], max(1, len(gaps) // 20))
        yield Series(run.name, _color(place), [(place_of(run, step), y) for step, y in zip(gaps, means, strict=True)])


def memories(runs: list[Run]) -> Iterator[str]:
    """Yield the runs' charts of memory, whose axes are one."""
    peaks = [run.prediction.peak_bytes for run in runs if not isinstance(run.prediction, str)]
    peaks += [phase["peak"] for run in runs for phase in run.memory.get("measured", [])]
    return (memory(run, max(peaks, default=0)) for run in runs)


def memory(run: Run, top: float) -> str:
    """Chart a step's memory by phase: estimated components, and the measured peaks if memory.report was on. top: bytes
    that the axis reaches."""
    prediction, measured = run.prediction, run.memory.get("measured", [])
    if isinstance(prediction, str):
        why = f"No estimate: {escape(prediction)}."
        return f'<div class="card wide">{escape(run.name)}<p class=note>{why}</p></div>'
    labels = [phase.label for phase in prediction.phases]
    on_cpu = run.result.get("device") == "CPU"
    names = [name for name in prediction.by_phase[0] if any(each[name] for each in prediction.by_phase)]
    absent = prediction.handle_bytes if on_cpu else 0  # cuBLAS' workspaces
    size, unit = (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")
    sums, series = [0.0] * len(labels), []
    for number, name in enumerate(names):
        for index, each in enumerate(prediction.by_phase):
            sums[index] += (each[name] - (absent if name == "libraries" else 0)) / size
        series.append(Series(name, f"s{number % 9}", list(enumerate(sums)), "area"))
    series.reverse()
    note = "Components at each phase's fullest moment, as estimated for one GPU that trains alone."
    if [phase["label"] for phase in measured] == labels:
        peaks = [(float(index), phase["peak"] / size) for index, phase in enumerate(measured)]
        series.append(Series("measured peak", "ink", peaks, "steps"))
        both = run.memory["figures"]["peak of the step"]
        note += (
            f" Peak of the step: estimated {shown_bytes(both['predicted'])}, measured {shown_bytes(both['measured'])}."
        )
    elif not measured:
        note += " Not measured: memory.report = true measures a step."
    if on_cpu:
        note += " On a CPU there is no cuBLAS workspace."
    title = f"{run.name}: {prediction.batch} x {prediction.sequence} tokens in a forward pass"
    return chart(title, unit, series, x_name="phase", zero=True, labels=labels, note=note, top=top / size)


def branches(run: Run) -> str:
    """Return the table of what each branch of the layers saves; "" if `memory.report` did not measure it."""
    found = run.memory.get("branches", [])
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    rows = [BranchBytes(**row).cells() for row in found]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    note = f"{escape(run.name)}: bytes per token that a branch of one layer saves, before and after conversion."
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<p class=soft>{note}</p>{table}" if found else ""


# ---- FP8 ranges -----------------------------------------------------------------------------------------------------


def ranges(run: Run) -> str:
    """Show the shares of zeros and of the largest code: of the last sample by layer, and over the steps."""
    samples = run.metrics["fp8"]
    step, last = next(reversed(samples.items()))
    products = list(dict.fromkeys(product for layer in last["ranges"].values() for product in layer))
    panels = "".join(_heat(last["ranges"], products, operand) for operand in OPERANDS)
    charts = "".join(
        chart(title, "share of codes: median and worst GEMM", _over_steps(samples, number), zero=True)
        for number, title in ((1, "Zero"), (0, "At the largest code"))
    )
    note = (
        f"{escape(run.name)}, step {step:,}: share of codes that are zero in each layer's GEMMs, red from 1%: values "
        "that underflowed. Rows of zeros alone (tokens without labels) are left out. Hover over a cell for more."
    )
    return f"<p class=soft>{note}</p><div class=panels>{panels}</div><div class=grid>{charts}</div>"


def _redness(zero: float) -> float:
    """Return how red a share of underflowed codes is, in percent: below 1% not at all."""
    return 80 * min(1.0, zero / 0.5) ** 0.5 if zero >= 0.01 else 0.0


def _heat(layers: dict[str, Any], products: list[str], operand: str) -> str:
    heads = "".join(f"<th>{escape(product.replace('_proj', ''))}</th>" for product in products)
    rows = []
    for layer, found in layers.items():
        cells = []
        for product in products:
            if operand not in found.get(product, {}):
                cells.append("<td></td>")
                continue
            saturated, zero, limit = found[product][operand]
            tip = f"{layer} {product}: {zero:.3%} zero, {saturated:.3%} at the largest code, range ±{limit:.3g}"
            cells.append(f'<td style="--v:{_redness(zero):.0f}" title="{escape(tip)}">{zero:.1%}</td>')
        name = next((part for part in reversed(layer.split(".")) if part.isdigit()), layer)
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    table = f"<table><thead><tr><th>layer</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="card"><b>{OPERANDS[operand]}</b><div class=heat>{table}</div></div>'


def _over_steps(samples: dict[int, dict[str, Any]], number: int) -> Iterator[Series]:
    for place, operand in enumerate(OPERANDS):
        shares = {}
        for step, row in samples.items():
            found = [kinds for layer in row["ranges"].values() for kinds in layer.values() if operand in kinds]
            if found:
                shares[step] = [kinds[operand][number] for kinds in found]
        yield Series(f"{operand}s", _color(place), [(x, statistics.median(of)) for x, of in shares.items()])
        yield Series(f"{operand}s, worst", _color(place), [(x, max(of)) for x, of in shares.items()], "dashed")


# ---- configurations -------------------------------------------------------------------------------------------------


def configurations(runs: list[Run]) -> str:
    """Show the keys in which runs differ, and each whole configuration, folded."""
    keys = [key for key in all_keys() if not key.startswith(UNTOLD)]
    values = {key: [operator.attrgetter(key)(run.config) for run in runs] for key in keys}
    differing = {key: found for key, found in values.items() if any(value != found[0] for value in found)}
    parts = []
    if differing:
        head = "".join(f"<th>{_named(run, runs)}</th>" for run in runs)
        rows = "".join(
            f"<tr><td>{key}</td>{''.join(f'<td>{escape(value)}</td>' for value in found)}</tr>"
            for key, found in differing.items()
        )
        table = f"<table><thead><tr><th>differences</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        parts.append(f'<div class="card wide scroll">{table}</div>')
    for run in runs:
        text = (run.folder / "config.toml").read_text(encoding="utf-8")
        parts.append(f"<details class=card><summary>{_named(run, runs)}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)
