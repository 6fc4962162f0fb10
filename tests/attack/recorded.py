"""python -m tests.attack.recorded     make recorded.json anew: the numbers of some runs, on this machine

recorded.json has an entry for each kind of machine: PyTorch, transformers, the CPU. On one that it has, numbers must
be those recorded, bit for bit; elsewhere within `ELSEWHERE` of an entry, which is said: of the newest PyTorch that is
not newer than the one here, as random BF16 numbers differ between 2.11 and 2.13. Who changes what a run computes makes
it anew, and the change of the file shows in review what moved.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import overcoat
from overcoat.recipe import Recipe
from overcoat.version import VERSION
from tests.attack import reference
from tests.attack.harness import BASE, SHARD, Child, Finding, start, toml
from tests.models import zoo

FILE = Path(__file__).with_suffix(".json")
# Another order of sums moves BF16's last bit, 2^-8, and with it a step; checksums of tokens hold everywhere.
ELSEWHERE = 0.02
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + "
    "eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
)
# What each has beside BASE; the last is no run, but one step of several families (`layers`).
RUNS: dict[str, dict[str, str]] = {
    "default": {},
    "paper": {"recipe.name": '"paper"', "optimizer.moments": '"fp8"', "optimizer.clip": "0.1"},
    "leanest": {"recipe.name": '"leanest"', "data.document_mask": "true", "train.accumulation": "2"},
    "blocks": {"recipe.linear_scaling": '"block"', "recipe.head": '"fp8"', "recipe.z_loss": "1e-2",
               "schedule.kind": '"wsd"', "model.config.attention_bias": "true"},
    "bf16": {"recipe.name": '"bf16"', "optimizer.moments": '"bf16"', "optimizer.master": '"bf16+16"'},
    "chats": {"data.format": '"messages"', "data.files": '["FOLDER/chats.jsonl"]', "data.sequence_length": "64",
              "tokenizer.chat_template": '"FOLDER/template.jinja"', "optimizer.master": '"bf16"'},
    "int8": {"recipe.kept_format": '"int8"', "model.name": '"FOLDER/zeros"', "optimizer.moments": '["de8", "e4m3"]'},
    "stream": {"data.streaming": "true", "data.shuffle_rows": "8", "optimizer.offload": "true"},
    "lora": {"model.name": '"FOLDER/model"', "lora.rank": "4", "data.held_out": "0.4"},
    "layers": {},
}  # fmt: skip


def machine() -> str:
    """What numbers depend on beside the code."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = f"{found[1] if found else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {cpu}"


def pytorch(key: str) -> tuple[int, ...]:
    """The major and minor version of an entry's PyTorch."""
    return tuple(map(int, re.findall(r"\d+", key)[:2]))


@functools.cache
def entry() -> tuple[bool, dict[str, Any]]:
    """Whether recorded.json has this machine, and the entry to compare with."""
    entries = json.loads(FILE.read_text())
    here = machine()
    if here not in entries:
        older = [key for key in entries if pytorch(key) <= pytorch(here)]
        there = max(older, key=pytorch) if older else min(entries, key=pytorch)
        print(f"truth: recorded on {there}, this is {here}: numbers may differ by {ELSEWHERE:.0%}", flush=True)
        return False, entries[there]
    return True, entries[here]


def compare(name: str, folder: Path) -> Finding:
    """A run beside its record."""
    case, (is_here, known) = f"the recorded run {name!r} of version {entry()[1]['version']}", entry()
    found, right = measure(name, folder), known["runs"][name]
    if isinstance(found, str):
        return case, found
    wrong = [key for key in sorted(right.keys() | found.keys()) if not agree(found.get(key), right.get(key), is_here)]
    return (
        case,
        (wrong and f"{len(wrong)} numbers differ, {wrong[0]}: {found.get(wrong[0])}, not {right.get(wrong[0])}") or "",
    )


def agree(found: Any, right: Any, is_here: bool) -> bool:
    if is_here or type(found) is not type(right) or not isinstance(found, float):
        return found == right or (not is_here and isinstance(right, str) and not right.startswith("tokens"))
    return abs(found - right) <= ELSEWHERE * abs(right)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum of names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def measure(name: str, folder: Path) -> dict[str, Any] | str:
    """The numbers of a run, or why it failed."""
    if name == "layers":
        ended = Child(lambda: print(json.dumps(layers())) or 0, folder).wait()
        return json.loads(ended.output) if not ended.status else ended.last_line()
    write_data(folder)
    keys = {**BASE, **RUNS[name], "data.cache_dir": '"FOLDER/cache"'}
    if "model.name" in keys:
        keys = {key: value for key, value in keys.items() if not key.startswith("model.config")}
    (folder / "run.toml").write_text(toml(keys).replace("FOLDER", str(folder)))
    ended = start(["train", str(folder / "run.toml"), f"train.run_dir={folder / 'run'}"], folder).wait()
    return ended.fault() or ended.last_line() if ended.status else numbers_of(folder)


def numbers_of(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {}
    for row in rows:
        for key in ("loss", "lr", "gradient_norm", "attention_score"):
            if key in row:
                found[f"{row['kind']} {row['step']} {key}"] = row[key]
    for path in folder.glob("cache/tokens/*/tokens.bin"):
        found["tokens"] = "tokens " + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    newest = max((folder / "run/checkpoints").glob("step-*"))
    saved = load_file(newest / SHARD)
    states = {" ".join(key.split("/")[1:]): of for key, of in saved.items() if key.startswith("optimizer/")}
    weights = load_file(next((folder / "run/export").glob("*.safetensors")))
    for key, tensor in weights.items():
        found[f"norm of {key}"] = float(tensor.double().norm())
    return {**found, "weights": digest(weights), "states": digest(states)}


def write_data(folder: Path) -> None:
    """Text, chats and a model, the same each time."""
    generator = random.Random(5)
    words = ["alpha", "beta", "gamma", "delta", "return", "import", "größer", "(", ")", "🧥"]
    spoken = [" ".join(generator.choices(words, k=30)) for _ in range(24)]
    (folder / "text").mkdir()
    for number, text in enumerate(spoken):
        (folder / f"text/{number:02d}.txt").write_text(f"file {number} {text}", encoding="utf-8")
    chats = [
        [{"role": "user", "content": f"{number}? {text[:40]}"}, {"role": "assistant", "content": text[40:90]}]
        for number, text in enumerate(spoken)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "template.jinja").write_text(TEMPLATE)
    options = reference.Options()
    weights = reference.begin(options, True, 3)
    reference.write_model(folder / "model", weights, options)
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # as many models begin
        weights[f"model.layers.0.{name}.weight"].zero_()
    reference.write_model(folder / "zeros", weights, options)


def layers() -> dict[str, Any]:
    """Losses and gradients of one packed step of a family of each kind."""
    found: dict[str, Any] = {}
    for kind in zoo.DISTINCT:
        model = zoo.make_model(kind, layers=1, use_cache=False)
        overcoat.convert(model, Recipe())
        made = zoo.trained(model, zoo.make_batch("packed", length=21))
        found |= {kind: float(made.pop("loss")), f"{kind}, gradients": digest(made)}
    return found


def main() -> int:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    entries, runs = json.loads(FILE.read_text()) if FILE.exists() else {}, {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = measure(name, Path(folder).resolve())
        if isinstance(runs[name], str):
            print(f"{name}: {runs[name]}", file=sys.stderr)
            return 1
    entries.pop(machine(), None)
    FILE.write_text(json.dumps({**entries, machine(): {"version": VERSION, "runs": runs}}, indent=1) + "\n")
    print(f"{FILE.name}: {len(runs)} runs of {machine()}")
    return 0


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.exit(main())
