"""Rendered scenes: answers that the objects bear out, pixels that show them, the same from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from overcoat.paper.scenes import CELLS, COLOURS, KINDS, SIDE, Scene, render, scene, write

MADE = [scene(f"test {number}") for number in range(400)]


def told(made: Scene) -> str:
    """The answer, found again from the question's words and the objects."""
    by_shape = {shape: (colour, column, row) for shape, colour, column, row in made.objects}
    words = made.question.rstrip("?").split()
    if made.kind == "count":
        return str(len(made.objects))
    if made.kind == "colour":
        return by_shape[words[-1]][0]
    if made.kind == "shape":
        return next(shape for shape, (colour, _, _) in by_shape.items() if colour == words[-1])
    if made.kind == "text":
        return made.letter[0] if made.letter else ""
    first, second = by_shape[words[2]], by_shape[words[-1]]
    if "left" in words:
        assert first[1] != second[1]
        return "left" if first[1] < second[1] else "right"
    assert first[2] != second[2]
    return "above" if first[2] < second[2] else "below"


def test_answers_are_right_and_all_kinds_occur() -> None:
    assert all(told(made) == made.answer for made in MADE)
    assert {made.kind for made in MADE} == {*KINDS}
    assert len({(made.question, made.answer) for made in MADE}) > 40


def test_the_image_shows_each_object_in_its_cell() -> None:
    for made in MADE[:40]:
        pixels, cell = np.asarray(render(made)).astype(int), SIDE / CELLS
        assert pixels.shape == (SIDE, SIDE, 3)
        for _, colour, column, row in made.objects:
            middle = pixels[int((row + 0.5) * cell), int((column + 0.5) * cell)]
            assert tuple(middle) == COLOURS[colour]
        if made.letter is not None:
            _, column, row = made.letter
            part = pixels[int(row * cell) : int((row + 1) * cell), int(column * cell) : int((column + 1) * cell)]
            assert part.min() < 60


def test_conversations_and_files(tmp_path: Path) -> None:
    made = write(tmp_path, "train", 5)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert made == [scene(f"train {number}") for number in range(5)] != [scene(f"test {number}") for number in range(5)]
    for row, each in zip(rows, made):
        assert row["messages"][0]["content"] == f"<image>\n{each.question}"
        assert row["messages"][1] == {"role": "assistant", "content": each.answer}
        assert (tmp_path / "images" / row["images"][0]).is_file()
