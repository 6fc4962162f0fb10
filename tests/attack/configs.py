"""Mutated configurations: one to three odd values, broken files, odd standard outputs.

A refusal names a key, and the corrected configuration then trains in the same directory, unless there is a checkpoint
of the odd one. What is accepted trains to finite losses, the same command again ends the same, and where only keys that
decide nothing (FREE_KEYS) were changed, the numbers are those of the unbroken run.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from pathlib import Path

import numpy as np

from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import FREE_KEYS
from overcoat.train.configfile import all_keys
from tests.attack.harness import Finding, Ground, numbers, start, toml

NUMBERS = f"0 1 2 3 5 7 -1 -5 0.5 1.5 1e-300 1e300 inf -inf nan {2**31} {2**63 - 1} {10**12} {10**30}".split()
TEXTS = ['""', '" "', '"x"', '"🧥"', '"a\\nb"', '"a\\"b\\\\"', '"\\u0000"', '"\\u0085\\u2028"', f'"{"long" * 2000}"',
         '"auto"', '"none"', '"all"', '"[bold]"', '"{0}"', '"%s"', '"🧥 \\U0001F600\\r\\n\\t"']  # fmt: skip
LISTS = ["[0.9]", "[0.5, 0.5]", "[0.9, 1.0]", "[nan, 0.9]", '["e4m3", "log8"]', "[]"]
VALUES = {"int|float": NUMBERS, "bool": ["true", "false"], r"\bstr\b": TEXTS, "list": LISTS}  # by type of the field
ANY = ["true", "false", "[]", "{}", "[1, [2]]", "1979-05-27", '{a = "b"}', '["x", 1]', *NUMBERS[:8], *TEXTS[:4]]
PATHS = ["", " ", "n" * 300, ".", "file.txt", "file.txt/x", "dangling", "/dev/null", "/dev/null/x", "/proc/x/y", "run",
         "new/a/b", "\\u0000", "new/🧥", "full/run", "run/inside", "*.txt", "~", "$HOME"]  # fmt: skip
# Keys of transformers' own configuration; odd values must not reach it unread.
MODEL_KEYS = {
    **dict.fromkeys(["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
                     "intermediate_size", "max_position_embeddings", "vocab_size", "rms_norm_eps", "eos_token_id",
                     "attention_dropout", "rope_theta"], NUMBERS),
    **dict.fromkeys(["tie_word_embeddings", "rope_parameters", "nonsense"], ANY),
    "model_type": ['"gpt2"', '"qwen2"', '"mistral"', '"bert"', '"t5"', '"x"', '""', "3"],
    "hidden_act": TEXTS, "dtype": TEXTS, "auto_map": ['{AutoConfig = "x.X"}'],
}  # fmt: skip
TEXT = [f"{number} {'alpha beta gamma delta ' * 20}" for number in range(20)]
# No text, or no tokens of data.token_dtype: nothing may train on them.
NO_DATA = {
    "null.jsonl": b'{"text": null}\n' * 20, "lists.jsonl": b'{"text": ["a", "b"]}\n' * 20, "list.jsonl": b"[]\n" * 20,
    "empty.txt": b"", "cut.bin": b"\1" * 2001, "wide.bin": (np.arange(2000, dtype=np.uint32) % 250).tobytes(),
    "table.parquet": b"PAR1" + bytes(5000) + b"PAR1", "image.png": b"\x89PNG\r\n\x1a\n" + bytes(range(250)),
    "random.txt": random.Random(2).randbytes(5000), "cut.gz": gzip.compress("\n".join(TEXT).encode())[:-40],
}  # fmt: skip
DATA = {
    "text.gz": gzip.compress("\n".join(TEXT).encode()),
    "text.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXT).encode(), "narrow.bin": bytes(range(250)) * 16,
    "latin1.txt": "größer\n".join(TEXT).encode("latin-1"),
}  # fmt: skip


def odd_value(key: str, kind: str, random: random.Random) -> str:
    """A value as TOML; `kind` is the type of the key's field."""
    if random.random() < 0.1:
        return random.choice(ANY)
    if key.endswith(("run_dir", "cache_dir", "resume", "model.name", "tokenizer.name")) and random.random() < 0.8:
        return f'"{random.choice(PATHS)}"'
    if key == "data.files":
        names = [*NO_DATA, *DATA, "text", "text/*.txt", "nothing/*.txt", "dangling"]
        return json.dumps([f"GROUND/{name}" for name in random.sample(names, random.choice([1, 1, 2]))])
    if key == "compare.overrides":
        other = random.choice(list(all_keys()))
        return json.dumps([f"{other}={odd_value(other, '', random)}"])
    choices = [f'"{name}"' for name in re.findall(r'"(\w+)"', kind)]
    choices += [value for pattern, values in VALUES.items() if re.search(pattern, kind) for value in values]
    return random.choice(choices or ANY)


def mutate(ground: Ground, random: random.Random) -> dict[str, str]:
    kinds = {key: str(spec.type) for key, spec in all_keys().items() if key != "model.config"}
    changes: dict[str, str] = {}
    for _ in range(random.choice([1, 1, 1, 2, 2, 3])):
        name, key = random.choice(list(MODEL_KEYS)), random.choice(["data.files", *kinds])
        value = odd_value(key, kinds[key], random).replace("GROUND", str(ground.folder))
        changes |= {f"model.config.{name}": random.choice(MODEL_KEYS[name])} if random.random() < 0.2 else {key: value}
    return changes


def break_file(content: bytes, random: random.Random) -> tuple[str, bytes]:
    """A configuration file that was damaged, or is another thing."""
    place = random.randrange(len(content))
    flipped = bytes([content[place] ^ 1 << random.randrange(8)])
    section = random.choice(["train", "data", "model", "optimizer", "sample", "recipe", "x"])
    return random.choice([
        (f"cut at {place}", content[:place]), ("nothing", b""), ("UTF-16", content.decode().encode("utf-16")),
        (f"a bit flipped at {place}: {flipped!r}", content[:place] + flipped + content[place + 1 :]),
        ("not UTF-8", content + b'sample.prompt = "\xff\xfe"\n'), ("a byte order mark", b"\xef\xbb\xbf" + content),
        (f"{section} = 5", f"{section} = 5\n".encode() + content), ("a line twice", content + content.split(b"\n")[7]),
        (f"[[{section}]]", content + f"\n[[{section}]]\n".encode()),
        ("deeply nested", b"sample.prompt = " + b"[" * 3000 + b"]" * 3000 + b"\n" + content),
    ])  # fmt: skip


def configs(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    for name, content in {**NO_DATA, **DATA}.items():
        (ground.folder / name).write_bytes(content)
    (folder / "file.txt").write_text("years of work")
    (folder / "dangling").symlink_to("nowhere")
    config, run_dir, stdout = folder / "odd.toml", folder / "run", ""
    plain = {**ground.base, "train.run_dir": f'"{run_dir}"'}
    changes, arguments = mutate(ground, random), ["train", str(config)]
    if any(key.startswith(("data.", "tokenizer.", "model.name", "model.config.vocab_size")) for key in changes):
        plain["data.cache_dir"] = f'"{folder / "cache"}"'  # not all cases' own
    if index % 8 == 1:
        stdout = ["closed", "full", "ascii"][index // 8 % 3]
        changes = {"sample.prompt": '"größer 🧥"', "sample.tokens": "4"}
    case = "overcoat train " + " ".join(f"{key}={value[:80]}" for key, value in changes.items()) + f" {stdout}"
    config.write_text(toml(plain if index % 2 == 0 else {**plain, **changes}))
    if index % 8 == 0:
        changes, (case, broken) = {}, break_file(config.read_bytes(), random)
        config.write_bytes(broken)
    elif index % 2 == 0:
        arguments += [f"{key}={value}" for key, value in changes.items()]

    ended = start(arguments, folder, wrong_stdout=stdout).wait()
    is_whole = (folder / "file.txt").read_text() == "years of work"
    if fault := ended.fault(143) or ("" if is_whole else "it destroyed a file that is not its own"):
        return case, fault
    if ended.status == 143 or (ended.status == 0 and index % 8 == 0):  # many steps, ended by the time limit's SIGTERM
        return case, ""
    if ended.status == 0:
        return case, accepted(ground, arguments, changes, folder)
    if changes and not stdout and (fault := unclear(ended.last_line(), changes)):
        return case, fault
    if not run_dir.exists() or list_checkpoints(run_dir / "checkpoints"):
        return case, ""
    config.write_text(toml(plain))
    wrong = ground.wrong(folder, arguments=arguments[:2])
    return f"{case}, refused with {ended.last_line()[:200]!r}, then corrected", wrong


def unclear(line: str, changes: dict[str, str]) -> str:
    """A message names some key or its section, a value that was given, or the last part of a key that was changed; of a
    file that is no TOML the line."""
    names = [*all_keys(), *(f"[{key.partition('.')[0]}]" for key in all_keys()), "[model.config]", "overcoat estimate"]
    names += ["is not valid TOML: "]
    names += [key.rpartition(".")[2] for key in changes] + [value.strip('"') for value in changes.values() if value[5:]]
    names += [item for value in changes.values() for item in re.findall(r'"([^"]{4,})"', value)]  # of a list's items
    return "" if any(name in line for name in names) else f"a message that names no key: {line}"


def accepted(ground: Ground, arguments: list[str], changes: dict[str, str], folder: Path) -> str:
    """What is wrong with a run that was accepted, "" if nothing."""
    if any(f"/{name}" in changes.get("data.files", "") for name in NO_DATA):
        return "accepted in silence: trains on what is no text, or no tokens"
    run_dir = folder / changes.get("train.run_dir", "run").strip('"')
    if not (run_dir / "results.json").exists():
        return "" if "run_dir" in str(changes) else "done, without a results.json"
    losses = [value for run in json.loads((run_dir / "results.json").read_text())["runs"] for value in run.values()]
    if not all(math.isfinite(value) for value in losses if isinstance(value, float)):
        return f"done, but not all figures are finite: {losses}"
    before, decides = numbers(run_dir), [key for key in changes if not key.startswith(FREE_KEYS)]
    ended = start(arguments, folder).wait()
    if ended.status or ended.fault():
        return f"accepted, then the same command: {ended.fault() or ended.last_line()}"
    after = numbers(run_dir)
    if changed := [key for key in before if str(before[key]) != str(after[key])]:
        return f"accepted, then the same command ends with other {' and '.join(changed)}"
    changed = [key for key in ("losses", "weights", "optimizer state") if before[key] != ground.numbers[key]]
    return f"keys that decide nothing changed {' and '.join(changed)}" if changed and not decides else ""
