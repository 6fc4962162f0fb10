"""Estimates as text and as data: what a prediction holds, in words and numbers that one finds by hand."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from overcoat import Recipe
from overcoat.estimate import Setup
from overcoat.estimate.fit import CHANGES, Advice, Rung
from overcoat.estimate.predict import LASTING, Phase, Prediction
from overcoat.estimate.table import as_data, not_converted, recommendation
from overcoat.models.convert import LayerReport, Report

GIB = 2**30
# Of an even 16 GiB.
COMPONENTS = {**dict.fromkeys(LASTING, 0), "weights": 8 * GIB, "moments": 2**20 - 1, "gradients": 4 * GIB}
COMPONENTS["kept activations"] = 4 * GIB - COMPONENTS["moments"]


def made(**changes):
    """A prediction with these numbers."""
    phases = [Phase("block 3 backward", 16 * GIB, 15 * GIB)]
    of_step = (COMPONENTS, "block 3 backward", phases, 10**9, 0, Report(Recipe()), [COMPONENTS])
    return replace(Prediction(Setup(), 8, 1024, 1, *of_step), **changes)


NEEDED = f"{made().total_bytes / GIB:.2f}"


class MadeRoom:
    """A GPU of 20 GiB, on which every setup needs the same and so many rows fit."""

    def __init__(self, rows=3, gpus=1):
        self.batch, self.gpus, self.limit, self.rows = 8, gpus, 20 * GIB, rows

    def largest_batch(self, setup):
        return self.rows

    def predict(self, setup):
        return made()


def made_advice(changes):
    rungs = [Rung(None, made()), *(Rung(change, made()) for change in CHANGES[:2])]
    return Advice(rungs, changes, Setup())


NO_ROOM = f"Batch 8 does not fit into 20.00 GiB: with everything above it needs {NEEDED} GiB; "


@pytest.mark.parametrize(
    ("room", "changes", "sentence"),
    [
        (MadeRoom(), [], "Batch 8 fits into 20.00 GiB as asked."),
        (
            MadeRoom(gpus=4, rows=9),
            CHANGES[:2],
            f"Batch 8 fits into 20.00 GiB on each of 4 GPUs with {CHANGES[0].name}, {CHANGES[1].name}: {NEEDED} GiB "
            "needed, largest batch 9.",
        ),
        (MadeRoom(), None, NO_ROOM + "batch 3 fits with all of it."),
        (MadeRoom(rows=0), None, NO_ROOM + "shorter sequences, more GPUs, or a smaller model."),
    ],
    ids=["fits", "changed", "smaller", "never"],
)
def test_recommendations(room, changes, sentence):
    assert recommendation(room, made_advice(changes and list(changes))) == sentence


@pytest.mark.parametrize(("changes", "fits"), [([], True), ([CHANGES[0]], False), (None, False)])
def test_data_hold_the_same_as_the_tables_and_are_plain(changes, fits):
    """What `--json` prints can be read again; the recipe is data too."""
    report = Report(Recipe(), [LayerReport("layers.0", "Layer", False, "has a hook")])
    data = as_data(made(report=report, host_bytes=7), MadeRoom(), made_advice(changes))
    plain = json.loads(json.dumps(dataclasses.asdict(Setup())))
    assert json.loads(json.dumps(data["setup"])) == plain
    assert data["setup"]["recipe"]["kept_format"] == "sqrt8"
    assert (data["left_alone"], data["host_bytes"]) == ({"layers.0": "has a hook"}, 7)
    assert sum(data["components"].values()) == data["peak_bytes"]
    assert data["total_bytes"] == data["peak_bytes"] + data["slack_bytes"] + data["context_bytes"]
    assert (data["fits"], data["gpu_memory"]) == (fits, 20 * GIB)
    assert data["recommendation"] == (None if changes is None else [change.name for change in changes])
    assert data["recommended_setup"] == (None if changes is None else dataclasses.asdict(Setup()))
    assert [rung["change"] for rung in data["rungs"]] == [None, CHANGES[0].name, CHANGES[1].name]
    assert [rung["largest_batch"] for rung in data["rungs"]] == [3] * 3
    assert "rungs" not in as_data(made(), None, None)


def test_layers_that_keep_their_precision():
    """Each reason once; the baseline's layers are what was asked for."""
    reasons = ["has a hook", "Recipe.bf16()", "has a hook", "gate of its own"]
    layers = [LayerReport(f"layers.{i}", "Layer", False, reason) for i, reason in enumerate(reasons)]
    layers.append(LayerReport("layers.4", "Layer", True, ""))
    line = not_converted(made(report=Report(Recipe(), layers)))
    assert line == "4 of 5 decoder layers keep their precision: gate of its own; has a hook"
    for layer in (layers[1], layers[4]):
        assert not_converted(made(report=Report(Recipe(), [layer]))) == ""
