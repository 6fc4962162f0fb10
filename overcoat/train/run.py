"""A whole run, from a configuration to a trained, exported model and its figures; [compare] adds a second run.

RUN_DIR/config.toml      the resolved configuration
        data/            tokens and tokenizer
        checkpoints/     step-00000500/ ... (see checkpoint.py for what resumes and what is an error)
        metrics.jsonl    one row per step; tensorboard/ has the same numbers
        export/          the model as a Hugging Face folder
        loss.png, kept.txt, results.json; memory.txt, memory.png and memory.json with memory.report=true
        twin/            the same files of the [compare] run, on the same tokens
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

import overcoat
from overcoat import memory
from overcoat.models.compiled import compile_layers, eager
from overcoat.optim.sharding import local
from overcoat.streaming.load import RANDOM
from overcoat.train import checkpoint, process
from overcoat.train.batch_plan import BatchPlan, first_plan, memory_to_plan_with, recipe_of
from overcoat.train.build import (
    base_model,
    build_model,
    check_config,
    check_tables,
    check_weights,
    make_optimizer,
    num_positions,
    start_of,
)
from overcoat.train.chat import prompt_ids
from overcoat.train.checks import with_steps
from overcoat.train.config import Config, error_context
from overcoat.train.configfile import build_config, dump_toml
from overcoat.train.corpus import Corpus, cache_dir, open_corpus
from overcoat.train.data import PackedRows
from overcoat.train.documents import warn_if_documents_mix
from overcoat.train.evaluate import Tasks, task_names
from overcoat.train.export import export
from overcoat.train.files import lock, sweep
from overcoat.train.loggers import check_loggers
from overcoat.train.loop import RunStoppedError, evaluate_tasks, train_steps
from overcoat.train.metrics import METRICS, PLAIN, RunLog, read_metrics, shown_passes
from overcoat.train.out_of_memory import LostStepError, RestartError, fatal_oom, free_memory, recorded_plans
from overcoat.train.parallel import build_sharded, check_parallel
from overcoat.train.preflight import check_inline_model, check_named_model
from overcoat.train.process import choose_device
from overcoat.train.products import compute_in_fp32
from overcoat.train.state import TrainState
from overcoat.train.stopping import stop_at
from overcoat.train.vocabulary import embedding_of

LOCK = ".lock"


@dataclass
class RunResult:
    """The figures of one finished run."""

    title: str
    steps: int
    num_tokens: int
    num_parameters: int
    train_loss: float  # mean over the last tenth of the steps
    held_out_loss: float
    tokens_per_second: float  # median over steps; those of a log interval have its mean
    peak_bytes: int
    kept_bytes: int  # of one forward pass, for its backward
    optimizer_bytes: int  # of the first process, for so many parameters:
    held_parameters: int
    device: str
    checkpoint: str
    export: str
    metrics: str
    sample: str
    note: str = ""  # what was left out of the data
    start: str = ""  # the model at the first step
    passes: float = 0.0  # over the data; 0: streamed, not known
    tasks: dict[str, float] = field(default_factory=dict)  # {"sciq/acc": 0.5} at the last step, of eval.tasks


def run(config: Config, console: Console) -> list[RunResult]:
    """Return the results of the configured run, and of its [compare] run if there is one; both resume if
    interrupted."""
    if not config.compare.overrides:
        return [run_once(config, console, "Overcoat")]
    twin = twin_config(config)
    check_before_training(config)
    again = ""
    try:  # the same of the second run, before the first one has spent its hours
        check_before_training(twin)
        again = f"; for this run: delete {twin.train.run_dir} to train it anew"
        checkpoint.choose_checkpoint(twin)
    except ValueError as error:
        raise ValueError(f"the run of [compare]: {error}{again}") from error
    return [_run_checked(config, console, "Overcoat"), _run_checked(twin, console, config.compare.name)]


def check_before_training(config: Config) -> None:
    """Raise ValueError for any mistake that shows without reading data or the run directory."""
    if process.is_first():
        check_loggers(config)
    check_config(config)
    if config.model.name:
        check_named_model(config)
    else:
        check_inline_model(config)
    if config.train.batch_size == "auto":
        memory_to_plan_with(config, choose_device(config.train.device))
    check_parallel(config)
    dump_toml(config)


def twin_config(config: Config) -> Config:
    """Return the configuration of the [compare] run: the same tokens, seed and steps, with `compare.overrides`
    applied."""
    mine = replace(
        config,
        compare=replace(config.compare, overrides=[]),
        train=replace(config.train, run_dir=str(Path(config.train.run_dir) / "twin"), resume="auto"),
        data=replace(config.data, cache_dir=str(cache_dir(config))),
        sample=replace(config.sample, tokens=0),
    )
    with error_context("compare.overrides: "):
        return build_config(asdict(mine), config.compare.overrides)


def run_once(config: Config, console: Console, title: str) -> RunResult:
    """Check the configuration, then train (or resume) one model and return its result."""
    check_before_training(config)
    return _run_checked(config, console, title)


def _run_checked(config: Config, console: Console, title: str) -> RunResult:
    run_dir, chosen = Path(config.train.run_dir), list[Path | None]()
    if process.is_first() and not os.path.exists(run_dir / LOCK):  # unlike Path.exists no error
        chosen.append(checkpoint.choose_checkpoint(config))  # what is refused finds its directory as it was
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} (train.run_dir)", error.filename) from error

    def busy() -> None:
        raise ValueError(f"another process is training in {run_dir}: choose another train.run_dir")

    with lock(run_dir / LOCK, busy) if process.is_first() else contextlib.nullcontext():
        start_from = process.share(lambda: chosen[0] if chosen else checkpoint.choose_checkpoint(config))
        checkpoints = [] if start_from is None else [start_from]
        if start_from is None and process.is_first():
            checkpoint.set_aside_attempt(config)
        while True:
            try:
                return _train_from(checkpoints, config, console, title)
            except LostStepError:
                pass  # said when it happened; the frames of the attempt are gone after this line
            finally:
                free_memory(choose_device(config.train.device), config)  # the twin, or the next attempt, takes it


def _train_from(checkpoints: list[Path], config: Config, console: Console, title: str) -> RunResult:
    """Train from the last of `checkpoints` (from the start if there is none) and return the result; new checkpoints are
    appended."""
    run_dir, device, recorded = Path(config.train.run_dir), choose_device(config.train.device), config

    def say(text: str) -> None:
        if process.is_first():
            console.print(text, **PLAIN)

    if device.type == "cpu" and config.train.device == "auto":  # before texts are read, which may take minutes
        rows = 0 if config.train.epochs else config.train.num_steps * config.train.rows_per_step
        much = f" on {rows * config.data.sequence_length:,} tokens" if rows else ""
        say(f"no GPU was found: the CPU trains{much}, slowly; overcoat estimate says what a GPU takes")
    with process.first_before_others():
        corpus = open_corpus(config, say)
    if isinstance(corpus.rows, PackedRows):
        config = with_steps(config, corpus.rows.num_rows)
        say(passes_line(config, corpus.rows.num_rows))
    tasks = load_tasks(config, corpus)
    say(f"starting from {start_of(config)}")
    with fatal_oom("the model"):
        is_auto = config.train.batch_size == "auto"
        plans = process.share(lambda: recorded_plans(config)) if is_auto else {}  # chosen once
        plan = plans[min(plans)] if plans else first_plan(config, device, corpus.tokenizer)
        state, report = make_state(config, corpus, device, plan)
    say(str(report))
    if config.tokenizer.add_tokens:
        rows = embedding_of(state.model).num_embeddings
        say(f"{len(config.tokenizer.add_tokens)} tokens added: {corpus.num_ids:,} ids, {rows:,} rows of the embedding")
    if device.type == "cpu" and compute_in_fp32() and config.model.dtype == "bfloat16":
        say("this CPU has no AVX-512: BF16 products are computed in FP32 and rounded once")
    if checkpoints:
        _resume(checkpoints[-1], state, config, say)
    where = str(checkpoints[-1]) if checkpoints else f"model.name = {config.model.name!r}"
    check_weights(state.model, where)
    evaluated = process.share(  # what cannot be read is refused before anything is written
        lambda: [kind for kind, rows in read_metrics(run_dir / METRICS).items() if state.step in rows]
    )
    if process.is_first():
        sweep(checkpoint.checkpoint_dir(config))
        checkpoint.set_aside_newer(checkpoint.checkpoint_dir(config), state.step)
        checkpoint.record_config(recorded)

    def save() -> Path:
        checkpoints.append(saver.save())
        return checkpoints[-1]

    with (
        checkpoint.Saver(state, config, corpus.to_save) as saver,
        contextlib.closing(RunLog(config, console, title, state.step, device)) as log,
    ):
        on_tasks = None
        if tasks is not None:
            on_tasks = functools.partial(evaluate_tasks, state, config, tasks, corpus.tokenizer)
        try:
            train_steps(state, config, corpus.held_out, log, save, saver.check, evaluated, on_tasks)
        except (RunStoppedError, LostStepError, RestartError):
            saver.wait()  # what goes on from the newest checkpoint must not without one
            raise
    if state.kept_table and process.is_first():
        (run_dir / "kept.txt").write_text(state.kept_table + "\n", encoding="utf-8")
    export(state, corpus.to_save, run_dir / "export", merge=config.lora.merge and hasattr(state.model, "peft_config"))
    sample = generate_sample(config, corpus, state)
    return process.share(lambda: _result(config, title, state, sample, corpus.note))


def passes_line(config: Config, num_rows: int) -> str:
    """Return a sentence on the rows of the data and how often the training passes over them."""
    passes = shown_passes(config.train.num_steps * config.train.rows_per_step / num_rows)
    rows = f"{num_rows:,} rows of {config.data.sequence_length:,} tokens an epoch"
    return f"{rows}: {config.train.num_steps:,} steps are {passes} passes over the data"


def _resume(path: Path, state: TrainState, config: Config, say: Callable[[str], None]) -> None:
    """Load a checkpoint into `state`. ValueError: no step is left to train."""
    held_out = checkpoint.load_checkpoint(path, state)
    if config.train.resume != "auto":  # another recipe or batch may keep more or less: the first step tells anew
        state.kept_bytes = 0
    step, steps, metrics = state.step, config.train.num_steps, Path(config.train.run_dir) / METRICS
    # A run that took no step of its own is not finished from a checkpoint.
    if process.is_first() and (step > steps or (step == steps and not read_metrics(metrics)["train"])):
        said = config.train.said_steps
        raise ValueError(f"{path} is at step {step} of {said}: nothing is left, raise {said.split()[0]}")
    say(f"resuming from {path}")
    if held_out != state.held_out:
        say("the rows held out are others than before this checkpoint: held-out losses do not compare with those")


def load_tasks(config: Config, corpus: Corpus) -> Tasks | None:
    """Return `eval.tasks` with their data, fetched by the first process; None without tasks. ValueError: a task or its
    data are missing, or need a tokenizer or a single process."""
    names = task_names(config.eval.tasks)
    if not names:
        return None
    if corpus.tokenizer is None:
        raise ValueError("eval.tasks are text, and the token binaries come without a tokenizer: set tokenizer.name")
    with process.first_before_others(), error_context("eval.tasks: "):
        tasks = Tasks(names)
    if tasks.generating and process.count() > 1:
        raise ValueError(
            f"eval.tasks: {', '.join(tasks.generating)} generate text, which several processes do not do in step: "
            "leave them out, and ask overcoat eval of a checkpoint"
        )
    return tasks


def make_state(
    config: Config, corpus: Corpus, device: torch.device, plan: BatchPlan
) -> tuple[TrainState, overcoat.Report]:
    """Return model, optimizer and data at step 0, and the report of `convert`."""
    recipe, is_on_host = recipe_of(config, plan), config.train.stream and process.count() == 1
    # Random weights are drawn layer by layer on the GPU: one thread of the host takes minutes for billions.
    is_drawn = is_on_host and not config.model.name and device.type == "cuda"
    place = torch.device("meta" if is_drawn else "cpu") if is_on_host else device
    if process.count() > 1:
        model, report = build_sharded(config, corpus.tokenizer, device, recipe)
    else:
        model = build_model(config, corpus.tokenizer, place)
        report = overcoat.convert(model, recipe, strict=True)
    check_tables(model, corpus.num_ids, config)
    stop_at(base_model(model), corpus.stops)
    memory.forget_peak(device)
    optimizer = make_optimizer(model, config.optimizer, config.train.seed)
    if config.train.stream:
        if is_drawn:
            torch.manual_seed(config.train.seed)  # `convert` may have drawn numbers, too
        weights = RANDOM if is_drawn else None
        overcoat.stream(model, optimizer, device=device, resident=config.train.resident, weights=weights)
    elif config.optimizer.release_gradients:
        overcoat.release_gradients(model, optimizer)
    if config.data.masks_documents and not config.data.images:
        warn_if_documents_mix(model, corpus.num_ids, device)
    if config.train.compile != "none":
        compile_layers(model, graphs=config.train.compile == "graphs")
    held_out = zlib.crc32(corpus.held_out.tobytes())
    data = (corpus.rows, corpus.identity, corpus.eos)
    return TrainState(model, optimizer, *data, device, plan, corpus.images, held_out), report


def _result(config: Config, title: str, state: TrainState, sample: str, note: str) -> RunResult:
    run_dir = Path(config.train.run_dir)
    metrics = read_metrics(run_dir / METRICS)
    rows = list(metrics["train"].values())
    return RunResult(
        title=title,
        steps=state.step,
        num_tokens=state.num_tokens,
        num_parameters=sum(parameter.numel() for parameter in state.model.parameters()),
        train_loss=statistics.fmean(row["loss"] for row in rows[-max(1, config.train.num_steps // 10) :]),
        held_out_loss=metrics["eval"][state.step]["loss"],
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in rows),
        # Not this process's own: it may have done nothing but read a finished run.
        peak_bytes=max(row["peak_bytes"] for row in rows),
        kept_bytes=state.kept_bytes,
        optimizer_bytes=memory.optimizer_bytes(state.optimizer),
        held_parameters=sum(local(parameter).numel() for parameter in state.model.parameters()),
        device=torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "CPU",
        checkpoint=str(checkpoint.list_checkpoints(checkpoint.checkpoint_dir(config))[-1]),
        export=str(run_dir / "export"),
        metrics=str(run_dir / METRICS),
        sample=sample,
        note=note,
        start=start_of(config),
        passes=state.rows.passes if isinstance(state.rows, PackedRows) else 0.0,
        tasks={
            key: value for key, value in metrics["tasks"].get(state.step, {}).items() if key not in ("kind", "step")
        },
    )


def generate_sample(config: Config, corpus: Corpus, state: TrainState) -> str:
    """Return the text that the trained model generates after `sample.prompt`; the global generators are restored."""
    tokenizer, wanted = corpus.tokenizer, config.sample
    if tokenizer is None or not wanted.tokens:
        return ""
    ids = prompt_ids(config.data, tokenizer, wanted.prompt) or [tokenizer.eos_token_id]
    room = num_positions(state.model)
    ids = ids[-room:]
    inputs = torch.tensor([ids], device=state.device)
    state.model.eval()
    choice = {"do_sample": True, "temperature": wanted.temperature, "top_k": 50} if wanted.temperature else {}
    with torch.random.fork_rng(), torch.no_grad(), eager():
        torch.manual_seed(config.train.seed)
        output = state.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(wanted.tokens, room + 1 - len(ids)),
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            synced_gpus=process.count() > 1,
            **choice,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
