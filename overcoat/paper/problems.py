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
# question | given: assignments and conditions | steps: "label: name = expression", the last one's value is the answer
TEXT = """
{P} has {a} {x} and buys {b} more. How many {x} does {P} have now? | | {X} in all: t = a + b
{P} had {m} {x} and gave away {a}. How many {x} are left? | m > a | {X} left: t = m - a
{P} fills {p} bags with {q} {x} each. How many {x} are in the bags? | | {X} in the bags: t = p * q
{P} shares {n} {x} among {p} friends equally. How many {x} does each get? | n = p * a | {X} for each: t = n / p
{P} has {a} {x}. {Q} has {b} {x} more than {P}. How many {x} does {Q} have? | | {X} of {Q}: t = a + b
{P} has {p} boxes of {q} {x} and {a} loose ones. How many {x} does {P} have? | | {X} in boxes: t = p * q; All {x}: r = t + a
{P} has {p} boxes of {q} {x} and loses {r}. How many {x} are left? | r < p * q | {X} in boxes: t = p * q; {X} left: u = t - r
{P} buys {p} {x} at {q} dollars each and pays with {n} dollars. What is the change? | n > p * q | Price: t = p * q; Change: u = n - t
{P} has {a} {x}, {Q} has {p} times as many. How many {x} do both have? | a < 13 | {X} of {Q}: t = p * a; Both: u = a + t
{P} collects {a} {x} on Monday, {b} on Tuesday and {c} on Wednesday. How many {x} in all? | | Two days: t = a + b; Three days: u = t + c
{P} shares {n} {x} among {p} friends and gives each {q} more from a bag. How many {x} does each have? | n = p * a | Share: t = n / p; Each has: u = t + q
{P} reads {p} pages a day for {q} days, then {a} pages on Sunday. How many pages is that? | | On those days: t = p * q; In all: u = t + a
A rope of {n} metres is cut into {p} equal parts. Two parts are sold. How many metres are sold? | n = p * a | One part: t = n / p; Two parts: u = t * 2
{P} earns {q} dollars an hour and works {p} hours, then spends {r} dollars. How much is left? | r < p * q | Earned: t = p * q; Left: u = t - r
A bus has {m} people. At a stop {a} get off and {b} get on. How many people are on it now? | m > a | After those who left: t = m - a; Now: u = t + b
{P} plants {p} rows of {q} trees. {Q} plants {r} rows of {s} trees. How many trees are that? | | Trees of {P}: t = p * q; Trees of {Q}: u = r * s; All: v = t + u
{P} has {p} packs of {q} {x} and shares them with {r} friends, equally among the {k}. How many {x} does each get? | k = r + 1; p % k == 0 | {X} in all: t = p * q; Each: u = t / k
{P} has {p} packs of {q} {x}, gives {r} to {Q} and finds {a} more. How many {x} now? | r < p * q | In packs: t = p * q; After giving: u = t - r; Now: v = u + a
A shop sells {p} {x} at {q} dollars and {r} hats at {s} dollars. How much does it take in? | | For the {x}: t = p * q; For the hats: u = r * s; In all: v = t + u
{P} is {a} years old. {Q} is {p} times as old, and Max is {q} years older than {Q}. How old is Max? | a < 13 | {Q}: t = p * a; Max: u = t + q
{P} had {n} dollars, bought {p} {x} at {q} dollars each and found {r} dollars. How many dollars now? | n > p * q | Price: t = p * q; Left: u = n - t; Now: v = u + r
A farm has {a} cows and {b} hens. How many legs do they have together? | | Legs of cows: t = a * 4; Legs of hens: u = b * 2; All legs: v = t + u
{P} walks {p} km each day for {q} days, {Q} walks {r} km less in all. How far do both walk? | r < p * q | {P}: t = p * q; {Q}: u = t - r; Both: v = t + u
{P} bakes {n} {x}, puts them on {p} plates equally and eats {q} from one. How many are on that plate? | n = p * a; a > q | On a plate: t = n / p; Left there: u = t - q
{P} has {a} {x}, {Q} has {b}. They put all together and share equally. How many does each get? | (a + b) % 2 == 0 | Together: t = a + b; Each: u = t / 2
A tank holds {n} litres. {p} buckets of {q} litres are taken out and {r} litres poured in. How many litres are in it? | n > p * q | Taken out: t = p * q; Left: u = n - t; Now: v = u + r
{P} makes {p} bracelets with {q} beads each out of {n} beads, and buys {a} more beads. How many beads are left? | n > p * q | Used: t = p * q; Left: u = n - t; With the new: v = u + a
{P} saves {p} dollars a week for {q} weeks and gets {a} from {Q}. A toy costs {r}. How much is left? | r < p * q | Saved: t = p * q; With the gift: u = t + a; Left: v = u - r
A hall has {p} rows of {q} seats. {r} seats are broken and {s} are taken. How many are free? | r + s < p * q | Seats: t = p * q; Not broken: u = t - r; Free: v = u - s
{P} has twice as many {x} as {Q}. {Q} has {a} and loses {p}. How many {x} do both have now? | a > p | {P}: t = a * 2; {Q}: u = a - p; Both: v = t + u
{P} fills {p} jars with {q} {x} each. {r} jars break. How many {x} are in whole jars? | r < p | Whole jars: t = p - r; {X} in them: u = t * q
{P} buys {p} boxes of {q} {x}. A third of the boxes are empty. How many {x} are there? | p % 3 == 0 | Empty boxes: t = p / 3; Full boxes: u = p - t; {X}: v = u * q
Each of {p} children brings {q} {x} and {r} hats. How many things do they bring? | | By one child: t = q + r; By all: u = t * p
{P} has {n} {x}. Half are red, and {p} of the red ones are sold. How many red ones are left? | n % 2 == 0; n > 2 * p | Red: t = n / 2; Left: u = t - p
A box weighs {a} kg empty. With {p} {x} of {q} kg each, how heavy are two such boxes? | | {X}: t = p * q; One box: u = t + a; Two boxes: v = u * 2
{P} runs {p} laps of {q} minutes and rests {r} minutes between laps. How long does it take? | | Running: t = p * q; Pauses: k = p - 1; Resting: u = k * r; In all: v = t + u
{P} picks {a} {x} in the first hour and {p} more each next hour. How many {x} in three hours? | | Second hour: t = a + p; Third hour: u = t + p; Two hours: v = a + t; In all: w = v + u
{P} buys {p} {x} for {q} dollars each and sells each for {r} dollars. What does {P} gain? | r > q | Gain on one: t = r - q; In all: u = t * p
A train has {p} cars with {q} seats, and {r} more cars with {s} seats. {a} seats are free. How many are taken? | a < p * q + r * s | First cars: t = p * q; Other cars: u = r * s; Seats: v = t + u; Taken: w = v - a
{P} has {n} {x} in {p} equal piles and gives {q} piles to {Q}. How many {x} does {P} keep? | n = p * a; q < p | One pile: t = n / p; Piles kept: k = p - q; {X} kept: u = k * t
{P} and {Q} have {n} {x} together. {P} has {p} more than {Q}. How many does {Q} have? | n > p; (n - p) % 2 == 0 | Without the difference: t = n - p; {Q}: u = t / 2
{P} has {a} red and {b} blue {x} and puts them into bags of {p}. How many bags are filled? | (a + b) % p == 0 | {X}: t = a + b; Bags: u = t / p
A class of {n} pupils forms groups of {p}. Each group gets {q} {x}. How many {x} are needed? | n = p * a | Groups: t = n / p; {X}: u = t * q
{P} pays {p} dollars for each of {q} days and {r} dollars at the end, but gets {s} back. How much is that? | r + p * q > s | For the days: t = p * q; With the end: u = t + r; In all: v = u - s
Of {n} {x}, {P} takes {a} and {Q} takes {p} fewer than {P}. How many {x} are left? | a > p; n > 2 * a - p | {Q} takes: t = a - p; Both take: u = a + t; Left: v = n - u
{P} cuts {p} cakes into {q} pieces each. {r} guests eat {s} pieces each. How many pieces are left? | p * q > r * s | Pieces: t = p * q; Eaten: u = r * s; Left: v = t - u
{P} has {a} {x}. Each week {P} buys {p} and loses {q}. How many {x} after {r} weeks? | p > q | More each week: t = p - q; More in all: u = t * r; Then: v = a + u
{P} needs {n} {x} and has {p} packs of {q}. A pack more has {r}. How many {x} are missing with it? | n > p * q + r | In packs: t = p * q; With one more: u = t + r; Missing: v = n - u
"""  # noqa: E501


class Template(NamedTuple):
    """See TEXT. steps: (label, name, expression)."""

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


TEMPLATES = tuple(_template(line) for line in TEXT.strip().splitlines())
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
    """Whether a template's numbers are for testing only."""
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
