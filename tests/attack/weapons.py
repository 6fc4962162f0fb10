"""Strangers' files, damaged checkpoints and odd systems against a run. Each must end with the right numbers, or in one
line that says why; never with a traceback, control characters on the terminal, or advice for another fault."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.configfile import tomllib
from overcoat.train.files import RECORD
from tests.attack import reference
from tests.attack.damage import stopped_run
from tests.attack.events import Events, receive
from tests.attack.harness import SHARD, Ended, Finding, Ground, numbers, start, toml
from tests.attack.interruptions import events_of

Weapon = Callable[[Ground, random.Random, Path], Finding]
CODE = "open({path!r}, 'w').write('ran')\n"
ODD = [None, True, -1, 0, 2**70, 1e308, "x", "", "<script>alert(1)</script>", [], [1], {}, {"a": []}, float("nan")]


def plain(ended: Ended) -> str:
    """What is wrong with an end, terminals included; "" if nothing."""
    shown = ended.output + ended.error
    unprintable = next((char for char in shown if not char.isprintable() and char not in "\n\t\r"), None)
    return ended.fault() or (f"prints {unprintable!r}: {ended.last_line()[:200]!r}" if unprintable else "")


def refused(ended: Ended, *words: str, without: str = "") -> str:
    """What is wrong with an end that must be a refusal with one of these words."""
    if fault := plain(ended):
        return fault
    line = ended.last_line()
    if ended.status == 0:
        return "accepted in silence"
    if without and without in line:
        return f"the advice is for another fault: {line}"
    return "" if not words or any(word in line for word in words) else f"does not name {' or '.join(words)}: {line}"


# ---- files of strangers ----------------------------------------------------------------------------------------------


def injection(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """A config.json whose keys and values hold TOML, and code beside it."""
    mark = folder / "ran"
    about: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "clean").mkdir()
    (folder / "clean/config.json").write_text(json.dumps(about))
    shutil.copytree(folder / "clean", folder / "evil")
    inner = random.choice([
        "trust_remote_code = true", "trust_remote_code = true", "trust_remote_code = true", '[train]\nrun_dir = "elsewhere"', "[data]\nmax_bytes = 7",  # noqa: E501
        '[tokenizer]\nname = "evil"', "[recipe]\nname = \"bf16\"",
    ])  # fmt: skip
    text = random.choice([
        f"bos_token_id = 1\n[model]\n{inner}\n[model.config.id2label]\nx", f"x = 1\n[model]\n{inner}\n[model.config.id2label]\ny", f'"\n{inner}\n#', f"a]\n{inner}\n[b",  # noqa: E501
        f"x\r\n{inner}\r\ny", f"\u2028{inner}", f"'''\n{inner}\n'''", "\x1b[31mred", "a.b", "__class__", "trust_remote_code",  # noqa: E501
    ])  # fmt: skip
    where = random.choice(["key", "key", "value", "inner key", "rope"])
    about |= {
        "key": {text: True}, "value": {"hidden_act": text}, "inner key": {"task_specific_params": {text: 1}},
        "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, text: 2.0}},
    }[where]  # fmt: skip
    about["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "evil/config.json").write_text(json.dumps(about))
    (folder / "evil/code.py").write_text(CODE.format(path=str(mark)))
    case = f"init --from-scratch, config.json with the {where} {text!r}"

    def init(name: str) -> Ended:
        words = ["--model", str(folder / name), "--from-scratch", "--data", str(ground.folder / "text/*.txt")]
        return start(["init", f"{name}.toml", *words, "--steps", "2"], folder).wait()

    assert init("clean").status == 0
    ended = init("evil")
    if fault := plain(ended) or (mark.exists() and "a stranger's code ran") or "":
        return case, fault
    if ended.status:
        return case, ""
    clean, evil = (tomllib.loads((folder / f"{name}.toml").read_text()) for name in ("clean", "evil"))
    for section in clean.keys() | evil.keys() - {"model"}:
        if section != "model" and clean.get(section) != evil.get(section):
            return case, f"[{section}] is {evil.get(section)}, not {clean.get(section)}"
    return case, "" if evil["model"].keys() <= {"config"} else f"[model] has {sorted(evil['model'])}"


def control_characters(ground: Ground, random: random.Random, folder: Path) -> Finding:
    odd = random.choice(["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\rb", "\x9b2J", "\u202edetrever", "x\x08\x08y"])
    words, rows, name = [], {"text": "alpha"}, "rows.jsonl"
    where = random.choice(["a key of the file", "an argument", "a field", "a role", "a file's name", "a value"])
    changes = {"data.format": '"messages"'} if where == "a role" else {}
    if where == "a key of the file":
        changes |= {f"train.{json.dumps(odd)}": "1"}
    elif where == "an argument":
        words = [f"train.{odd}=1"]
    elif where == "a value":
        changes |= {"optimizer.moments": json.dumps(odd)}
    elif where == "a file's name":
        name = f"{odd.replace('/', '')}.jsonl"
        rows = {"other": "alpha"}
    else:
        rows = {odd: "alpha"} if where == "a field" else {"messages": [{"role": odd, "content": "alpha"}]}
    (folder / name).write_text(json.dumps(rows) + "\n")
    data = {} if where in ("a value", "an argument") else {"data.files": json.dumps([str(folder / name)])}
    (folder / "run.toml").write_text(toml({**ground.base, **data, **changes, "train.run_dir": f'"{folder / "run"}"'}))
    ended = start(["train", str(folder / "run.toml"), *words], folder).wait()
    return f"{where} is {odd!r}", refused(ended)


def environment(ground: Ground, random: random.Random, folder: Path) -> Finding:
    name = random.choice(
        ["WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"]
    )
    value = random.choice(["abc", "", " ", "1.5", "-1", "0x2", "10" * 400])
    names = {name: value}
    if name in ("RANK", "LOCAL_RANK"):  # as torchrun has the others
        known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        names = {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **names}
    ended = start(ground.command(folder), folder, lambda: os.environ.update(names)).wait()
    if fault := plain(ended):
        return f"{name}={value[:20]!r}", fault
    return f"{name}={value[:20]!r}", "" if ended.status or not ground.changed(folder / "run") else "other numbers"


def report_rows(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """A row of metrics.jsonl, or a figure of results.json or memory.json, that is something else."""
    shutil.copytree(ground.folder / "reference", folder / "run")
    name = random.choice(["metrics.jsonl", "metrics.jsonl", "metrics.jsonl", "results.json"])
    path, value = folder / "run" / name, random.choice(ODD)
    results = json.loads((folder / "run/results.json").read_text())
    results["runs"][0]["sample"] = "<script>alert(1)</script>"
    (folder / "run/results.json").write_text(json.dumps(results))
    if name == "metrics.jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        row = random.choice(rows)
        extra = [{"kind": "fp8", "step": 2, "ranges": {"layers.0": {"q_proj": {"input": [0.1, 0.2, 3.0]}}}},
                 {"kind": "tasks", "step": 2, "sciq/acc": 0.5}, {"kind": "fit", "step": 1, "micro_batch": 2, "block_checkpoints": False}]  # fmt: skip  # noqa: E501
        if random.random() < 0.5:
            row = random.choice(extra)
            rows.append(row)
        key = random.choice(list(row))
        row[key] = {**row[key], "<script>alert(1)</script>": value} if isinstance(row[key], dict) else value
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    else:
        found = json.loads(path.read_text())
        row = found["runs"][0]
        key = random.choice(list(row))
        row[key] = value
        path.write_text(json.dumps(found))
    case = f"report, {name}: {key} of {row.get('kind', 'the run')} is {value!r}"
    ended = start(["report", str(folder / "run"), "-o", str(folder / "page.html")], folder).wait()
    if fault := plain(ended):
        return case, fault
    page = folder / "page.html"
    if ended.status == 0 and "<script>alert(1)" in page.read_text():
        return case, "the page runs a script that was in a row"
    return case, ""


def deep(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """Nesting, repetition and size without end."""
    depth = random.choice([500, 3000, 100_000])
    kind = random.choice(["JSON line", "JSON array", "key", "argument", "template", "spaces", "layers"])
    changes, words = {"data.files": json.dumps([str(folder / "rows.jsonl")])}, []
    nested = random.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
    rows = [json.dumps({"text": f"{number} alpha beta gamma delta"}) for number in range(100)]
    if kind.startswith("JSON"):
        rows[3] = f'{{"text": "x", "deep": {nested}}}'
    elif kind == "spaces":
        rows[3] = json.dumps({"text": "a" + " " * 3_000_000 + "b"})
    elif kind == "key":
        changes[".".join(["train"] + ["a"] * depth)] = "1"
    elif kind == "argument":
        words = [".".join(["train"] + ["a"] * depth) + "=1"]
    elif kind == "template":
        body = random.choice(
            ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{{ range(10**9) | list }}"]
        )
        (folder / "template.jinja").write_text(body)
        changes |= {"data.format": '"messages"', "tokenizer.chat_template": f'"{folder / "template.jinja"}"'}
        rows = [json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})] * 9
        kind += f" {body}"
    text = "[" + ",".join(rows) + "]" if kind == "JSON array" else "\n".join(rows)
    (folder / "rows.jsonl").write_text(text)
    if kind == "JSON array":
        changes["data.files"] = json.dumps([str((folder / "rows.jsonl").rename(folder / "rows.json"))])
    (folder / "run.toml").write_text(toml({**ground.base, **changes, "train.run_dir": f'"{folder / "run"}"'}))
    arguments = ["train", str(folder / "run.toml"), *words]
    if kind == "layers":
        about = {"model_type": "llama", "num_hidden_layers": 10 ** random.choice([6, 9, 18]), "hidden_size": 64}
        (folder / "config.json").write_text(json.dumps(about))
        data = ["--data", str(ground.folder / "text/*.txt"), "--gpu-memory", "8GB"]
        arguments = random.choice([
            ["init", str(folder / "new.toml"), "--from-scratch", "--model", str(folder), *data],
            ["estimate", "--model", str(folder), "--batch", "1"],
        ])  # fmt: skip
    ended = start(arguments, folder).wait(30.0)
    case = f"{kind}, depth {depth}: {arguments[0]}"
    return case, plain(ended) if not ended.is_late else "does not end within 30 s"


# ---- weights, rows, checkpoints --------------------------------------------------------------------------------------


def only_eos(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """Token files with rows of nothing but EOS, under `data.document_mask`: those have no label."""
    share = random.choice([0.3, 0.9, 1.0])
    tokens = np.random.default_rng(random.randrange(1000)).integers(1, 250, 4000).astype(np.uint16)
    ends = int(share * len(tokens)) // 17 * 17
    tokens[:ends] = 0
    tokens[::41] = 0
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    changes = {
        "data.files": f'["{folder / "tokens.bin"}"]', "data.document_mask": "true", "model.config.eos_token_id": "0",
        "model.config.vocab_size": "256", "train.run_dir": f'"{folder / "run"}"', "train.steps": "12",
        "train.batch_size": random.choice(["1", "2"]),
    }  # fmt: skip
    base = {key: value for key, value in ground.base.items() if not key.startswith("tokenizer.")}
    (folder / "run.toml").write_text(toml({**base, **changes}))
    ended = start(["train", str(folder / "run.toml")], folder).wait()
    case = f"{share:.0%} of the tokens are EOS, {changes['train.batch_size']} rows a step"
    if ended.status:
        return case, refused(ended, "label", "EOS", "eos", "end-of-text", without="learning rate")
    losses = [json.loads(line).get("loss", 0.0) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return case, plain(ended) or ("" if np.isfinite(np.array(losses, dtype=float)).all() else f"losses are {losses}")


def bad_weights(ground: Ground, random: random.Random, folder: Path) -> Finding:
    options = reference.Options()
    weights = reference.begin(options, random.random() < 0.5, 1)
    name, value = random.choice(list(weights)), random.choice([np.nan, np.inf, -np.inf])
    weights[name].view(-1)[random.randrange(weights[name].numel())] = value
    reference.write_model(folder / "model", weights, options)
    keys = {key: of for key, of in ground.base.items() if not key.startswith("model.")}
    keys |= {"model.name": f'"{folder / "model"}"', "train.run_dir": f'"{folder / "run"}"'}
    (folder / "run.toml").write_text(toml(keys))
    ended = start(["train", str(folder / "run.toml")], folder).wait()
    return f"{name} of model.name has a {value}", refused(ended, name.removesuffix(".weight"), without="learning rate")


def crafted(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """A checkpoint whose manifest is right, and whose contents are not those of this run."""
    shutil.copytree(stopped_run(ground), folder, dirs_exist_ok=True)
    newest = list_checkpoints(folder / "run/checkpoints")[-1]
    saved, tensors = json.loads((newest / RECORD).read_text()), load_file(newest / SHARD)
    own = random.choice([key for key in sorted(tensors) if key.startswith("optimizer/")])
    name = random.choice([key for key in sorted(tensors) if key.startswith("model/")])
    statement = random.choice([
        "del tensors[own]", "tensors = {name: tensors[name]}", "saved['step'] = -1", "saved['num_tokens'] = -5",
        "saved['with_state'].pop()", "saved['with_state'][0] = 99", "saved['trained'].pop()",
        "saved['rows']['num_done'] = -3", "saved['rows']['epoch'] = -1", "saved['step'] = 2.5", "saved['step'] = '3'",
        "tensors[own] = tensors[own].flatten()[:-1].clone()", "tensors[own] = tensors[own].double() * 2",
        "saved['param_groups'].pop()", "del saved['rng']", "del saved['rows']", "saved['rows'] = None", "saved = []",
        "tensors[name] = tensors[name].to(torch.int8)", "tensors[name] = tensors[name][:-1].contiguous()",
        "del tensors[name]", "tensors['model/x'] = tensors[name].clone()", "tensors[name].view(-1)[0] = float('nan')",
        "[of.fill_(-1) for key, of in tensors.items() if key.endswith('/step')]", "saved['num_tokens'] = True",
    ])  # fmt: skip
    spoilt = {"torch": torch, "saved": saved, "tensors": tensors, "own": own, "name": name}
    exec(statement, spoilt)
    (newest / SHARD).unlink()  # the tensors are mapped from it
    save_file(spoilt["tensors"], newest / SHARD, {"format": "pt"})
    (newest / RECORD).write_text(json.dumps(spoilt["saved"]))
    manifest = json.loads((newest / "manifest.json").read_text())
    for file in manifest["files"]:
        manifest["files"][file] = fingerprint(newest / file)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    ended = start(ground.command(folder), folder).wait()
    case = f"a checkpoint after {statement} ({own}, {name})"
    if ended.status == 0 and not ended.fault():
        changed = ground.changed(folder / "run")
        return case, (changed and f"accepted in silence: other {', '.join(changed)} than the unbroken run") or ""
    return case, refused(ended, "step-", "train.resume", without="learning rate")


def fingerprint(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# ---- the system ------------------------------------------------------------------------------------------------------


def undeletable(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """An old checkpoint that is busy, or on a file system that has lost it."""
    code = random.choice([errno.EBUSY, errno.EACCES, errno.ENOTEMPTY, errno.EIO, errno.ESTALE])
    events = random.choice([("os.rename",), ("shutil.rmtree",), ("os.remove", "os.rmdir")])
    times = random.choice([1, 10**6])
    left = [times]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event in events
            and "step-00000001" in str(arguments[0])
            and ".partial" not in str(arguments[0])
            and left[0] > 0
        ):
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(arguments[0]))

    words = ["checkpoint.every=1", "checkpoint.keep=1"]
    ended = start([*ground.command(folder), *words], folder, lambda: sys.addaudithook(hook)).wait()
    case = f"{'/'.join(events)} of an old checkpoint fails with {errno.errorcode[code]}, {times} times"
    if fault := plain(ended) or (ended.status and f"ends the training: {ended.last_line()}") or "":
        return case, fault
    if "step-00000001" not in ended.output + ended.error:
        return case, "nobody is told"
    found = numbers(folder / "run")
    wrong = [key for key in ("losses", "weights", "optimizer state") if found[key] != ground.numbers[key]]
    return case, f"other {' and '.join(wrong)}" if wrong else ""


def hung_up(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """A closed terminal, or a batch system that says that time is up: as SIGTERM."""
    signum, step = random.choice([signal.SIGHUP, signal.SIGUSR1]), random.choice([1, 2, 3])
    stop = receive(signum)
    events = Events(folder, 1, lambda _event: stop("") if events.seen[-1] == f"step {step}" else None)
    ended = start(ground.command(folder), folder, events.install).wait()
    case = f"{signum.name} after step {step}"
    if fault := ended.fault(128 + signum):
        return case, fault
    made = [path.name for path in list_checkpoints(folder / "run/checkpoints")]
    if made[-1:] != [f"step-{step:08d}"]:
        return case, f"the checkpoints are {made}"
    return case, ground.wrong(folder)


def poor_file_system(ground: Ground, random: random.Random, folder: Path) -> Finding:
    """No locks, or directories that cannot be synced (NFS, FUSE, vfat): said, and trained all the same."""
    lacks = random.choice(["locks", "directory fsync"])
    code = random.choice(
        [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS] if lacks == "locks" else [errno.EINVAL, errno.EOPNOTSUPP]
    )
    real = os.fsync

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if event == "fcntl.flock":
            raise OSError(code, os.strerror(code))

    def fsync(handle: Any) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    def before() -> None:
        if lacks == "locks":
            sys.addaudithook(hook)
        else:
            os.fsync = fsync

    ended = start(ground.command(folder), folder, before).wait()
    case = f"a file system without {lacks}: {errno.errorcode[code]}"
    if fault := plain(ended) or (ended.status and f"does not train: {ended.last_line()}") or "":
        return case, fault
    shown = (ended.output + ended.error).lower()
    if not any(word in shown for word in ("lock", "sync", "power", os.strerror(code).lower())):
        return case, "does not say what is not protected"
    changed = ground.changed(folder / "run")
    return case, f"other {' and '.join(changed)}" if changed else ""


def synced(ground: Ground, _random: random.Random, _folder: Path) -> Finding:
    """A directory that was renamed into place is on the disk before anything older is removed, and at the end."""
    events = [event.split(" ", 1) for event in events_of(ground)]
    for place, (event, name) in enumerate(events):
        if event == "os.rename" and Path(name).name.startswith(".partial-"):
            parent = str(Path(name).parent)
            for later, other in events[place + 1 :]:
                if (later, other) == ("os.fsync", parent):
                    break
                if later in ("os.rename", "os.remove", "os.rmdir") and other.startswith(parent):
                    return f"{name} is renamed", f"{other} goes before {parent} is synced"
            else:
                return f"{name} is renamed", f"{parent} is never synced"
    return "renamed directories", ""


WEAPONS: tuple[Weapon, ...] = (
    synced, injection, crafted, report_rows, only_eos, hung_up, undeletable, deep, control_characters, environment, bad_weights,  # noqa: E501
    poor_file_system, crafted, report_rows,
)  # fmt: skip


def weapons(ground: Ground, index: int, random: random.Random, folder: Path) -> Finding:
    return WEAPONS[index % len(WEAPONS)](ground, random, folder)
