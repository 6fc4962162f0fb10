"""Train in forked children that are killed in chosen moments; run by test_resume.py as `python kill.py CONFIG PLAN`.

PLAN is a JSON list of {"run_dir", "moment", "at"}; one line of JSON says how each child ended. Forking pays for the
imports once. Moments: "step" (SIGKILL right after optimizer step `at`), "sync" (at the `at`-th fsync, all of them
inside the checkpoint writes), "term" and "interrupt" (SIGTERM, SIGINT in step `at`), "outside" (SIGKILL from another
process as soon as the metrics show step `at`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from overcoat import cli
from overcoat.train import files, loop
from overcoat.train.metrics import read_metrics


def child(config: str, plan: dict[str, Any]) -> None:
    moment, at = plan["moment"], plan["at"]
    real_step, real_sync, syncs = loop.train_step, files.sync, count(1)
    signals = {"step": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}

    def step(state: Any, config: Any) -> Any:
        record = real_step(state, config)
        if moment == "outside":
            time.sleep(0.05)
        elif moment in signals and state.step == at:
            os.kill(os.getpid(), signals[moment])
        return record

    def sync(path: Path) -> None:
        if moment == "sync" and next(syncs) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real_sync(path)

    loop.train_step, files.sync = step, sync
    os._exit(cli.main(["train", config, f"train.run_dir={plan['run_dir']}"]))


def kill_from_outside(pid: int, run_dir: Path, at: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or not any(step >= at for step in read_metrics(metrics)["train"]):
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    config, plans = sys.argv[1], json.loads(sys.argv[2])
    for plan in plans:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            child(config, plan)
        if plan["moment"] == "outside":
            kill_from_outside(pid, Path(plan["run_dir"]), plan["at"])
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    # Imported here, once, and not in each child.
    import matplotlib.pyplot
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    from overcoat.train import summary  # noqa: F401

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    main()
