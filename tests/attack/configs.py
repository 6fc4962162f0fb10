"""Mutated configurations: one to three odd values, broken files, odd standard outputs.

A refusal names a key, and the corrected configuration then trains in the same directory, unless there is a checkpoint
of the odd one. What is accepted trains to finite losses, the same command again ends the same, and where only keys that
decide nothing (FREE_KEYS) were changed, the numbers are those of the unbroken run.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import FREE_KEYS
from overcoat.train.configfile import all_keys
from tests.attack.harness import Finding, Ground, numbers, results, toml

BIG = ["100_000", str(2**31), str(2**63 - 1), str(10**12), str(10**30)]
NUMBERS = ["0", "1", "2", "3", "5", "7", "-1", "-5", "0.5", "1.5", "1e-300", "1e300", "inf", "-inf", "nan", *BIG]
TEXTS = ['""', '" "', '"x"', '"🧥"', '"a\\nb"', '"a\\"b\\\\"', '"\\u0000"', '"\\u0085\\u2028"', f'"{"long" * 2000}"',
         '"auto"', '"none"', '"all"', '"[bold]"', '"{0}"', '"%s"', '"🧥 \\U0001F600\\r\\n\\t"']  # fmt: skip
ANY = ["true", "false", "[]", "{}", "[1, [2]]", "1979-05-27", "07:32:00", '{a = "b"}', '["x", 1]', *NUMBERS[:8],
       *TEXTS[:4]]  # fmt: skip
PATHS = ["file.txt", "file.txt/x", "dangling", "/dev/null", "/dev/null/x", "/proc/x/y", "new/a/b", "n" * 300, ".", "",
         " ", "\\u0000", "new/🧥", "full/run", "run/inside", "run", "*.txt", "~", "$HOME"]  # fmt: skip
# Keys of transformers' own configuration; odd values must not reach it unread.
MODEL_KEYS = {
    **dict.fromkeys(["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                     "intermediate_size", "max_position_embeddings", "vocab_size", "rms_norm_eps", "eos_token_id",
                     "attention_dropout", "rope_theta"], NUMBERS),
    **dict.fromkeys(["tie_word_embeddings", "rope_parameters", "nonsense"], ANY),
    "num_hidden_layers": [number for number in NUMBERS if number != "100_000"],  # which only takes long to build
    "model_type": ['"gpt2"', '"qwen2"', '"mistral"', '"bert"', '"t5"', '"x"', '""', "3"],
    "hidden_act": TEXTS, "dtype": TEXTS, "auto_map": ['{AutoConfig = "x.X"}'],
}  # fmt: skip
# Data that are no text, or no tokens of data.token_dtype: nothing may train on them.
NO_DATA = ("null.jsonl", "lists.jsonl", "text.gz", "table.parquet", "random.txt", "wide.bin", "cut.bin", "empty.txt",
           "list.jsonl", "image.png")  # fmt: skip
DATA = (*NO_DATA, "text.jsonl", "latin1.txt", "narrow.bin", "text", "text/*.txt", "nothing/*.txt", "dangling")


def make_odd_data(folder: Path) -> None:
    words = "alpha beta gamma delta " * 20
    documents = [f"{number} {words}" for number in range(20)]
    lines: dict[str, list[Any]] = {"null": [None] * 20, "lists": [[text] for text in documents], "text": documents}
    for name, values in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    (folder / "list.jsonl").write_text("[]\n" * 20)
    (folder / "text.gz").write_bytes(gzip.compress("\n".join(documents).encode()))
    (folder / "table.parquet").write_bytes(b"PAR1" + random.Random(0).randbytes(5000) + b"PAR1")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(5000))
    (folder / "random.txt").write_bytes(random.Random(2).randbytes(5000))
    (folder / "latin1.txt").write_bytes("\n".join(f"{text} größer" for text in documents).encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "cut.bin").write_bytes(b"\1" * 2001)
    np.asarray(np.arange(2000) % 250, dtype=np.uint16).tofile(folder / "narrow.bin")
    np.asarray(np.arange(2000) % 250, dtype=np.uint32).tofile(folder / "wide.bin")


def odd_value(key: str, kind: str, random: random.Random) -> str:
    """A value as TOML; `kind` is the type of the key's field."""
    if random.random() < 0.1:
        return random.choice(ANY)
    if key.endswith(("run_dir", "cache_dir", "resume", "model.name", "tokenizer.name")) and random.random() < 0.8:
        return f'"{random.choice(PATHS)}"'
    if key == "data.files":
        chosen = random.sample(DATA, 1 if random.random() < 0.7 else 2)
        return json.dumps([f"{{GROUND}}/{name}" for name in chosen])
    if key == "compare.overrides":
        return json.dumps([f"{other}={odd_value(other, '', random)}" for other in random.sample(list(all_keys()), 1)])
    choices = [f'"{name}"' for name in re.findall(r'"(\w+)"', kind)]
    choices += NUMBERS if "int" in kind or "float" in kind else []
    choices += ["true", "false"] if "bool" in kind else []
    choices += TEXTS if re.search(r"\bstr\b", kind) else []
    choices += ["[0.9]", "[0.5, 0.5]", "[0.9, 1.0]", "[nan, 0.9]", '["e4m3", "log8"]', "[]"] if "list" in kind else []
    return random.choice(choices or ANY)


def mutate(ground: Ground, random: random.Random) -> dict[str, str]:
    kinds = {key: str(spec.type) for key, spec in all_keys().items() if key != "model.config"}
    model_keys = {f"model.config.{name}": values for name, values in MODEL_KEYS.items()}
    changes = {}
    for _ in range(random.choice([1, 1, 1, 2, 2, 3])):
        if random.random() < 0.2:
            key = random.choice(list(model_keys))
            changes[key] = random.choice(model_keys[key])
        else:
            key = random.choice(["data.files", *kinds])
            changes[key] = odd_value(key, kinds[key], random).replace("{GROUND}", str(ground.folder))
    return changes


def break_file(content: bytes, random: random.Random) -> tuple[str, bytes]:
    """A configuration file that was damaged, or is another thing."""
    place = random.randrange(len(content))
    flipped = bytes([content[place] ^ 1 << random.randrange(8)])
    section = random.choice(["train", "data", "model", "optimizer", "sample", "recipe", "x"])
    return random.choice([
        (f"cut at {place}", content[:place]),
        (f"a bit flipped at {place}: {flipped!r}", content[:place] + flipped + content[place + 1 :]),
        ("not UTF-8", content + b'sample.prompt = "\xff\xfe"\n'),
        ("a byte order mark", b"\xef\xbb\xbf" + content),
        ("UTF-16", content.decode().encode("utf-16")),
        (f"{section} = 5", b"%s = 5\n" % section.encode() + content),
        (f"[[{section}]]", content + b"\n[[%s]]\n" % section.encode()),
        ("a line twice", content + content.splitlines(keepends=True)[place % 20]),
        ("deeply nested", b"sample.prompt = " + b"[" * 3000 + b"]" * 3000 + b"\n" + content),
        ("nothing", b""),
    ])  # fmt: skip


def attack(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    if not (ground.folder / "text.gz").exists():
        make_odd_data(ground.folder)
    (folder / "file.txt").write_text("years of work")
    (folder / "dangling").symlink_to("nowhere")
    config, run_dir, stdout = folder / "odd.toml", folder / "run", ""
    plain = {**ground.base, "train.run_dir": f'"{run_dir}"'}
    changes, arguments = mutate(ground, random), ["train", str(config)]
    case = "overcoat train " + " ".join(f"{key}={value[:80]}" for key, value in changes.items())
    if any(key.startswith(("data.", "tokenizer.", "model.name", "model.config.vocab_size")) for key in changes):
        plain["data.cache_dir"] = f'"{folder / "cache"}"'  # not all cases' own
    if index % 8 == 0:
        changes = {}
        what, content = break_file(toml(plain).encode(), random)
        config.write_bytes(content)
        case = f"overcoat train FILE ({what})"
    elif index % 8 == 1:
        changes = {"sample.prompt": '"größer 🧥"', "sample.tokens": "4"}
        stdout = ["closed", "full", "ascii"][index // 8 % 3]
        config.write_text(toml({**plain, **changes}))
        case = f"standard output {stdout}"
    elif index % 2:
        config.write_text(toml({**plain, **changes}))
    else:
        config.write_text(toml(plain))
        arguments += [f"{key}={value}" for key, value in changes.items()]

    ended = ground.start(arguments, folder, wrong_stdout=stdout).wait()
    if fault := ended.fault(143):
        return Finding(case, fault)
    if (folder / "file.txt").read_text() != "years of work":
        return Finding(case, "it destroyed a file that is not its own")
    if ended.status == 143 or (ended.status == 0 and index % 8 == 0):  # many steps, ended by the time limit's SIGTERM
        return Finding(case, "")
    if ended.status == 0:
        return Finding(case, accepted(ground, arguments, changes, folder))
    if changes and not stdout and (fault := unclear(ended.last_line(), changes)):
        return Finding(case, fault)
    if not run_dir.exists() or list_checkpoints(run_dir / "checkpoints"):
        return Finding(case, "")
    config.write_text(toml(plain))
    wrong = ground.wrong(run_dir, ["train", str(config)], folder)
    return Finding(f"{case}, refused with {ended.last_line()[:200]!r}, then corrected", wrong)


def unclear(line: str, changes: dict[str, str]) -> str:
    """A message names some key or its section, a value that was given, or the last part of a key that was changed."""
    sections = {f"[{key.partition('.')[0]}]" for key in all_keys()}
    names = [
        *all_keys(),
        *sections,
        "[model.config]",
        "overcoat estimate",
        *(key.rpartition(".")[2] for key in changes),
    ]
    values = [value.strip('"') for value in changes.values() if len(value) > 5]
    return "" if any(name in line for name in names + values) else f"a message that names no key: {line}"


def accepted(ground: Ground, arguments: list[str], changes: dict[str, str], folder: Path) -> str:
    """What is wrong with a run that was accepted, "" if nothing."""
    if any(f"/{name}" in changes.get("data.files", "") for name in NO_DATA):
        return "accepted in silence: trains on what is no text, or no tokens"
    place = changes.get("train.run_dir", "run").strip('"')
    run_dir = folder / place
    if not (run_dir / "results.json").exists():
        return "" if "run_dir" in str(changes) else "done, without a results.json"
    if fault := results(run_dir):
        return fault
    before = numbers(run_dir)
    ended = ground.train(arguments, folder)
    if fault := ended.fault():
        return f"accepted, then the same command: {fault}"
    if ended.status != 0:
        return f"accepted, then the same command refuses: {ended.last_line()}"
    after = numbers(run_dir)
    if changed := [key for key in before if str(before[key]) != str(after[key])]:
        return f"accepted, then the same command ends with other {' and '.join(changed)}"
    decides = [key for key in changes if not key.startswith(FREE_KEYS)]
    changed = [key for key in ("losses", "weights", "optimizer state") if before[key] != ground.numbers[key]]
    return f"keys that decide nothing changed {' and '.join(changed)}" if changed and not decides else ""
