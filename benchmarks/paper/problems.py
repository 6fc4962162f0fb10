"""Word problems with worked solutions, made up: what stands in for MetaMathQA and GSM8K where there is no network.

    {"prompt": "Mia has 4 boxes of 6 pens ... How many pens are left?\\n",
     "completion": "Pens in the boxes: 4 * 6 = 24. Pens left: 24 - 5 = 19. The answer is 19."}

A template is a question, what its numbers must fulfil, and the steps of its solution. Numbers, names and things are
drawn from a seed. Never trained on are every sixth template ("new templates") and, of the others, an eighth of all
combinations of numbers ("new numbers"), chosen by their checksum.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

NAMES = (
    *("Mia", "Tom", "Ada", "Ben", "Lea", "Max", "Eva", "Jon", "Ida", "Leo", "Zoe", "Sam", "Nia", "Raj", "Yuki"),
    "Omar",
)
THINGS = ("pens", "apples", "books", "stamps", "shells", "cards", "coins", "beads", "cakes", "balls", "eggs", "kites")
# By name of the variable: a to e up to 20, p to s up to 9, m and n up to 99.
RANGES = {**dict.fromkeys("abcde", (2, 20)), **dict.fromkeys("pqrs", (2, 9)), **dict.fromkeys("mn", (21, 99))}


class Template(NamedTuple):
    """A line of problems.txt: question | given: assignments and conditions, with ";" between | steps of the solution,
    "label: name = expression", whose last value is the answer. steps: (label, name, expression)."""

    question: str
    given: tuple[str, ...]
    steps: tuple[tuple[str, str, str], ...]


class Problem(NamedTuple):
    template: int
    prompt: str
    completion: str
    answer: int


def _template(line: str) -> Template:
    question, given, steps = (part.strip() for part in line.split(" |"))
    found = (re.fullmatch(r"(.+): (\w) = (.+)", step.strip()) for step in steps.split(";"))
    conditions = tuple(part.strip() for part in given.split(";") if part.strip())
    return Template(question, conditions, tuple((match[1], match[2], match[3]) for match in found if match))


TEMPLATES = tuple(map(_template, Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()))
NEW = frozenset(range(5, len(TEMPLATES), 6))  # templates that are never trained on
EASY = frozenset(number for number, template in enumerate(TEMPLATES) if len(template.steps) < 3) - NEW
SPLITS = ("train", "easy", "numbers", "templates")


def _numbers(template: Template, draw: random.Random) -> dict[str, int] | None:
    """Numbers of a question that fulfil what is given; None: these draws do not."""
    named = {*re.findall(r"\{(\w)\}", template.question), *re.findall("[a-z]", " ".join(template.given))}
    numbers = {name: draw.randint(*RANGES[name]) for name in sorted(named & {*RANGES})}
    for part in template.given:
        name, is_assignment, expression = part.partition(" = ")
        value = eval(expression if is_assignment else part, {"__builtins__": {}}, numbers)
        if is_assignment:
            numbers[name] = value
        elif not value:
            return None
    return numbers


def _problem(number: int, numbers: dict[str, int], draw: random.Random) -> Problem:
    template, values = TEMPLATES[number], dict(numbers)
    first, second = draw.sample([name for name in NAMES if name != "Max"], 2)
    thing = draw.choice(THINGS)
    words = {"P": first, "Q": second, "x": thing, "X": thing.capitalize()}
    lines = []
    for label, name, expression in template.steps:
        value = eval(expression.replace("/", "//"), {"__builtins__": {}}, values)
        shown = re.sub("[a-z]", lambda found: str(values[found[0]]), expression)
        values[name] = value
        lines.append(f"{label.format(**words)}: {shown} = {value}.")
    completion = f"{' '.join(lines)} The answer is {value}."
    return Problem(number, f"{template.question.format(**words, **numbers)}\n", completion, value)


def is_held_out(number: int, numbers: dict[str, int]) -> bool:
    """True if a template's numbers are for testing only."""
    return zlib.crc32(repr((number, sorted(numbers.items()))).encode()) % 8 == 0


def problems(split: str, count: int, seed: int = 0) -> list[Problem]:
    """`count` different problems: "train"; "easy" (of it, at most two steps); "numbers" and "templates": held out.
    ValueError: there is no such split, or it has fewer."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: choose one of {', '.join(SPLITS)}")
    return list(itertools.islice(_stream(split, count, seed), count))


def _stream(split: str, count: int, seed: int) -> Iterator[Problem]:
    draw, seen, repeated = random.Random(f"{split} {seed}"), set(), 0
    trained = sorted(set(range(len(TEMPLATES))) - NEW)
    places = {"templates": sorted(NEW), "easy": sorted(EASY)}.get(split, trained)
    while True:
        number = draw.choice(places)
        numbers = _numbers(TEMPLATES[number], draw)
        if numbers is None or (split != "templates" and is_held_out(number, numbers) != (split == "numbers")):
            continue
        problem = _problem(number, numbers, draw)
        repeated = repeated + 1 if problem.prompt in seen else 0
        if repeated > 1000:
            raise ValueError(f"{count} problems: the split {split!r} has fewer different ones")
        if not repeated:
            seen.add(problem.prompt)
            yield problem


def write(path: Path, found: Iterable[Problem], as_text: bool = False) -> Path:
    """JSON lines of prompt and completion; `as_text`: of both as one text, for pretraining. Arms may share the file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        for problem in found:
            pair = {"prompt": problem.prompt, "completion": problem.completion}
            row = {"text": problem.prompt + problem.completion} if as_text else pair
            file.write(json.dumps(row) + "\n")
    return partial.replace(path)
