"""Rendered scenes with questions and answers, made up: what stands in for a vision-language model's data offline.

One to four shapes of different kinds and colours in the cells of a three by three grid, and perhaps a letter. A scene's
question is of one of five kinds: how many shapes, which colour, which shape, which of two places, which letter. All
comes from a seed; scenes for testing have seeds of their own.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from overcoat.extras import load_extra

SIDE, CELLS = 64, 3
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle", "bar")
LETTERS = "ACEHKLTX"
KINDS = ("count", "colour", "shape", "position", "text")


class Scene(NamedTuple):
    """objects: (shape, colour, column, row); letter: with its column and row, or None."""

    objects: tuple[tuple[str, str, int, int], ...]
    letter: tuple[str, int, int] | None
    kind: str
    question: str
    answer: str


def scene(seed: str) -> Scene:
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    places = draw.sample([(column, row) for column in range(CELLS) for row in range(CELLS)], 5)
    shapes, colours = draw.sample(SHAPES, 4), draw.sample([*COLOURS], 4)
    count = draw.randint(2 if kind == "position" else 1, 4)
    objects = tuple((shapes[i], colours[i], *places[i]) for i in range(count))
    letter = (draw.choice(LETTERS), *places[4]) if kind == "text" or draw.random() < 0.3 else None
    shape, colour, column, row = objects[0]
    if kind == "count":
        question, answer = "How many shapes are there?", str(count)
    elif kind == "colour":
        question, answer = f"What colour is the {shape}?", colour
    elif kind == "shape":
        question, answer = f"Which shape is {colour}?", shape
    elif kind == "text":
        assert letter is not None
        question, answer = "Which letter is written?", letter[0]
    elif column != objects[1][2]:
        question = f"Is the {shape} left or right of the {objects[1][0]}?"
        answer = "left" if column < objects[1][2] else "right"
    else:
        question = f"Is the {shape} above or below the {objects[1][0]}?"
        answer = "above" if row < objects[1][3] else "below"
    return Scene(objects, letter, kind, question, answer)


def render(made: Scene) -> Any:
    """The image, (SIDE, SIDE) RGB of Pillow."""
    drawing = load_extra("PIL.ImageDraw", "hf", "benchmarks paper table5")
    image = load_extra("PIL.Image", "hf", "benchmarks paper table5").new("RGB", (SIDE, SIDE), "white")
    pen, cell = drawing.Draw(image), SIDE / CELLS
    for shape, colour, column, row in made.objects:
        x, y, radius = (column + 0.5) * cell, (row + 0.5) * cell, 0.38 * cell
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "triangle":
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])
        else:
            pen.rectangle(box if shape == "square" else (x - radius, y - 3, x + radius, y + 3), fill=COLOURS[colour])
    if made.letter is not None:
        letter, column, row = made.letter
        pen.text(((column + 0.5) * cell, (row + 0.5) * cell), letter, fill="black", anchor="mm", font_size=16)
    return image


def write(folder: Path, split: str, count: int) -> list[Scene]:
    """`folder`/SPLIT.jsonl as conversations, LLaVA's form, and their images beside."""
    made = [scene(f"{split} {number}") for number in range(count)]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, each in enumerate(made):
        render(each).save(folder / "images" / f"{split}-{number}.png")
        asked = {"role": "user", "content": f"<image>\n{each.question}"}
        messages = [asked, {"role": "assistant", "content": each.answer}]
        lines.append(json.dumps({"messages": messages, "images": [f"{split}-{number}.png"], "kind": each.kind}))
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return made
