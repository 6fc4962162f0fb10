"""Configuration of a training run: nested frozen dataclasses, filled from defaults, then a TOML file, then dotted
arguments.

    overcoat train configs/demo.toml train.steps=50 optimizer.lr=1e-3 data.files='["a.txt", "b.txt"]'

Later sources win (`configfile.py`). Everything is checked before any file is opened. Each field defines its key: type,
default, explanation and limits; parsing, `overcoat train --keys` and docs/configuration.md are derived from it.
Combinations of keys are checked in checks.py.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from overcoat.extras import reason

# Keys that may change on resuming: they do not affect the training itself.
FREE_KEYS = (
    "train.run_dir", "train.resume", "train.log_every", "train.tensorboard", "train.loggers", "train.fp8_every",
    "train.on_oom", "train.memory_limit_gib", "train.stream", "train.resident", "recipe.offload_blocks",
    "recipe.frozen_weights", "optimizer.offload", "data.cache_dir", "data.on_lost",
    "checkpoint.", "eval.every", "eval.tasks", "lora.merge", "memory.", "sample.", "compare.", "parallel.shard",
    "parallel.nodes", "parallel.context",
)  # fmt: skip

DEFAULT_STEPS = 1000
ADAPTERS = "adapter_config.json"  # file of a folder of adapters


def option(default: Any, text: str, **limits: float) -> Any:
    """Return a dataclass field: its default, its help text for `--keys`, and the limits of its numbers (at_least,
    above, at_most, below)."""
    metadata = {"help": text, "limits": limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`; for user errors: the message names the value and the remedy."""
    if not condition:
        raise ValueError(message)


def _steps_of(value: float, num_steps: int) -> int:
    """Return a number of steps that may be given as a share of all steps."""
    return int(Fraction(str(value)) * num_steps) if value < 1 else int(value)


@contextlib.contextmanager
def error_context(what: str, kinds: type[Exception] = ValueError, after: str = "") -> Iterator[None]:
    """Re-raise errors of `kinds` as a one-line ValueError: `what`, the error, `after`. Use kinds=Exception around
    library calls; their long messages are shortened."""
    try:
        yield
    except kinds as error:
        why = " ".join(str(error).split()) if kinds is ValueError else reason(error)
        raise ValueError(f"{what}{why}{after}") from error


@dataclass(frozen=True)
class ModelConfig:
    name: str = option("", "Hugging Face model name or local path to start from (fine-tuning), or a folder of adapters")
    config: dict[str, Any] = option({}, "inline model configuration to train from scratch: model_type and its fields")
    dequantize: bool = option(False, "make plain weights of a quantized model.name: FP8, MXFP4, NF4, a .gguf file")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "type of the parameters")
    attention: str | None = option(None, "transformers' attn_implementation: sdpa, ...; left out: the model's own")
    freeze: list[str] = option([], "modules that are not trained, by a part of their names, such as vision_tower")
    trust_remote_code: bool = option(False, "run Python code that a model's or tokenizer's folder brings (auto_map)")

    @property
    def holds_adapters(self) -> bool:
        """True if `name` is a folder of adapters, without their model."""
        folder = Path(self.name)
        return bool(self.name) and (folder / ADAPTERS).is_file() and not (folder / "training.json").is_file()


@dataclass(frozen=True)
class LoraConfig:
    rank: int = option(0, "train adapters of this rank (LoRA) instead of the model; 0: none", at_least=0, at_most=2**16)
    alpha: float = option(16.0, "what adapters add is scaled by alpha / rank", above=0)
    dropout: float = option(0.0, "share of an adapter's input that is zero, drawn anew each time", at_least=0, below=1)
    targets: list[str] = option(["all-linear"], 'layers that get adapters, by the end of their names, or "all-linear"')
    dora: bool = option(False, "DoRA: adapters that also train a magnitude of each row of their weight")
    merge_start: bool = option(False, "merge the adapters that model.name holds into their model, and train that")
    merge: bool = option(False, "export the model with its adapters merged in, instead of the adapters")


@dataclass(frozen=True)
class RecipeConfig:
    name: Literal["default", "paper", "leanest", "bf16"] = option("default", "the named overcoat.Recipe to start from")
    kept_format: str | None = option(None, "replaces the recipe's format of saved activations: sqrt8, e4m3, int8")
    group_size: int | None = option(None, "replaces the recipe's group size: 128, 64, 32, 16")
    kept_attention: str | None = option(None, "replaces how q, k, v, o are saved: 8bit, bf16")
    checkpoint: str | None = option(None, 'replaces the recipe\'s recomputation: "block", or "none"')
    linear_scaling: str | None = option(None, "replaces what shares an FP8 scale in linear layers: tensor, block")
    grad_format: str | None = option(None, "replaces the format of output gradients: e5m2, e4m3")
    offload_blocks: int | str | None = option(None, 'blocks that save activations in host memory: a number, or "all"')
    head: str | None = option(None, 'replaces the GEMMs of the loss: "bf16", "fp8", or "none" (all logits at once)')
    frozen_weights: str | None = option(None, 'how frozen weights (the base of [lora]) are held: "bf16", "fp8"')
    z_loss: float | None = option(None, "weight of log(sum exp)^2 in the training loss, per label (PaLM: 1e-4)")


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = option(
        "adamw", 'optimizer: "adamw", or "muon" for the matrices of hidden layers and AdamW for all else'
    )
    lr: float = option(3e-4, "peak learning rate", above=0)
    betas: list[float] = option([0.9, 0.95], "decay of the first and the second moment", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.1, "decoupled weight decay, on matrices only (not on norm weights and biases)")
    adamw_lr: float = option(0.0, "muon: peak learning rate of AdamW's weights; 0: optimizer.lr", at_least=0)
    momentum: float = option(0.95, "muon: decay of the momentum", at_least=0, below=1)
    nesterov: bool = option(True, "muon: Nesterov's momentum")
    newton_schulz_steps: int = option(5, "muon: steps of the iteration that orthogonalizes", at_least=1, at_most=20)
    scale: Literal["match_rms_adamw", "spectral"] = option(
        "match_rms_adamw", "muon: learning rate by shape: the RMS of AdamW's updates, or sqrt(max(1, rows / columns))"
    )
    qkv: Literal["split", "whole"] = option(
        "split", "muon: orthogonalize q, k and v of a fused weight apart, or as one"
    )
    moments: str | list[str] = option("8bit", 'format of the moments: "8bit", "fp8", "bf16", "fp32", or a pair')
    master: str = option("auto", 'master weights of BF16 weights: "auto", "bf16+8", "bf16+16" (exact FP32), "bf16"')
    group_size: int = option(128, "elements that share one scale in the moments")
    offload: bool = option(False, "moments and remainders in host memory, copied through the GPU: same steps, slower")
    release_gradients: bool = option(
        False, "step and free each gradient in the backward; needs clip=0, no accumulation"
    )
    clip: float = option(1.0, "largest norm of all gradients; 0 and inf do not clip", at_least=0, at_most=math.inf)

    def peak_lr(self, algorithm: str) -> float:
        """Return the peak learning rate of the parameter groups of an algorithm."""
        return self.adamw_lr if self.adamw_lr and algorithm == "adamw" else self.lr

    @property
    def codes(self) -> str | tuple[str, str]:
        """Return `moments` in the form AdamW takes."""
        return self.moments if isinstance(self.moments, str) else (self.moments[0], self.moments[1])


@dataclass(frozen=True)
class ScheduleConfig:
    kind: Literal["cosine", "linear", "wsd", "constant"] = option("cosine", "shape after the warm-up")
    warmup_steps: int | float = option(
        100, "steps of linear warm-up from 0 to the peak; below 1: a share of all steps", at_least=0
    )
    decay_steps: int | float = option(
        0, "wsd only: steps of the final linear decay; below 1: a share of all steps; 0: a fifth", at_least=0
    )
    final_ratio: float = option(0.1, "final learning rate, as a share of the peak", at_least=0, at_most=1)

    def warmup(self, num_steps: int) -> int:
        """Return the steps of warm-up among `num_steps`."""
        return _steps_of(self.warmup_steps, num_steps)

    def decay(self, num_steps: int) -> int:
        """Return the steps of the final decay among `num_steps`, of kind "wsd"."""
        default = min(max(1, num_steps // 5), num_steps - self.warmup(num_steps))
        return _steps_of(self.decay_steps, num_steps) or default


@dataclass(frozen=True)
class DataConfig:
    files: list[str] = option(
        [], 'paths, patterns: .txt, .jsonl, .ndjson, .json, .parquet, also .gz, or .bin; or "stdlib", "site-packages"'
    )
    dataset: str = option("", "name for datasets.load_dataset; with data.files these become its data_files")
    dataset_config: str = option("", "the configuration (second argument) of the dataset")
    split: str = option("train", "split of the dataset to train on")
    format: Literal["text", "messages", "prompt-completion"] = option(
        "text", "what a row of the data is: text, a conversation, or a prompt and its completion"
    )
    text_key: str = option("text", "field that holds the text, in JSON, parquet and datasets")
    messages_key: str = option("messages", "field with a conversation: a list of {role, content} or {from, value}")
    prompt_key: str = option("prompt", "field with a prompt: text, or messages")
    completion_key: str = option("completion", "field with its completion, which alone is trained on")
    prompt_template: str = option("{prompt}", "what a prompt of text is put into; {...} is any field")
    images: str = option("", 'the folder of the images that "messages" name, for a vision-language model.name')
    too_long: Literal["truncate", "drop"] = option(
        "truncate", "conversations above data.sequence_length: keep their beginning, or leave them out"
    )
    special_tokens: Literal["tokens", "text"] = option(
        "tokens", 'special tokens that a text spells out, such as "<|im_end|>": read as tokens, or as plain text'
    )
    token_dtype: Literal["uint16", "uint32"] = option("uint16", "element type of .bin files")
    on_lost: Literal["refuse", "warn"] = option(
        "refuse", "turns, calls, tools that the chat template leaves out: refuse the row, or count it and train on"
    )
    dedupe: bool = option(False, "leave out documents and conversations that are copies of an earlier one")
    streaming: bool = option(False, "tokenize on the fly instead of once into data.cache_dir")
    shuffle_rows: int = option(256, "streaming only: rows in the shuffle buffer", at_least=1)
    max_bytes: int = option(0, "read at most this much text, in UTF-8; 0 reads all", at_least=0)
    sequence_length: int = option(1024, "tokens in a row", at_least=2)
    document_mask: bool = option(False, "keep attention and loss inside a document; conversations always are")
    held_out: float = option(0.01, "share kept for evaluation: whole documents, by their content", above=0, below=1)
    cache_dir: str = option("", "where tokens are kept; default: data/ in the run directory")

    @property
    def is_chat(self) -> bool:
        """True if a row of the data is a conversation, of which some tokens are trained on."""
        return self.format != "text"

    @property
    def masks_documents(self) -> bool:
        """True if attention stays inside a document of a packed row."""
        return self.document_mask or self.is_chat

    @property
    def is_tokens(self) -> bool:
        """True if the data are token binaries already."""
        return bool(self.files) and not self.dataset and self.files[0].endswith(".bin")


@dataclass(frozen=True)
class TokenizerConfig:
    name: str = option("", "Hugging Face name or local path; default: the model's, else one trained on the data")
    vocab_size: int = option(0, "train a byte-level BPE of this size on the data", at_least=0, at_most=2**22)
    add_tokens: list[str] = option([], "special tokens to add; the model's embeddings grow by them, and are trained")
    train_bytes: int = option(32_000_000, "text to train it on, taken evenly from the data", at_least=1)
    chat_template: str = option("", "a file with a Jinja chat template, or the tokenizer that has it; default: its own")


@dataclass(frozen=True)
class TrainConfig:
    run_dir: str = option("", "everything the run writes goes here; default: runs/ and the config file's name")
    steps: int | None = option(None, "optimizer steps; left out: as many as train.epochs has, or 1000", at_least=1)
    epochs: float | None = option(None, "passes over the data, such as 3 or 1.5, instead of train.steps", above=0)
    batch_size: int | Literal["auto"] = option(
        8, 'rows in a micro-batch; "auto": as many as fit, a divisor of train.global_batch_size', at_least=1
    )
    accumulation: int = option(1, 'micro-batches in a step; with batch_size = "auto" it follows', at_least=1)
    global_batch_size: int = option(0, 'rows in a step: only, and needed, with batch_size = "auto"', at_least=0)
    memory_limit_gib: float = option(0.0, 'GiB of GPU that batch_size = "auto" plans with; 0: what is free', at_least=0)
    on_oom: Literal["smaller_batch", "leaner_recipe", "error"] = option(
        "smaller_batch", "a step out of memory is repeated: with fewer rows at once, or first with block checkpoints"
    )
    seed: int = option(0, "of initialisation, data order and stochastic rounding", at_least=0, below=2**32)
    device: str = option("auto", '"cuda", "cuda:1", "cpu", or "auto"')
    compile: Literal["none", "layers", "graphs"] = option(
        "none", '"layers": torch.compile of decoder layers; "graphs": and CUDA graphs (small models or batches)'
    )
    stream: bool = option(
        False, "layers' weights and states in host memory, a layer at a time on the GPU; needs clip=0"
    )
    resident: int = option(0, "with train.stream: layers that stay on the GPU", at_least=0)
    resume: str = option("auto", '"auto" (newest checkpoint of run_dir, if any), or the path of a checkpoint')
    log_every: int = option(10, "steps between logged losses", at_least=1)
    fp8_every: int = option(0, "steps between samples of how FP8 operands use their range; 0: none", at_least=0)
    tensorboard: bool = option(True, "also write TensorBoard events")
    loggers: list[Literal["tensorboard", "wandb", "mlflow"]] = option([], "also log to these (docs: report)")

    @property
    def num_steps(self) -> int:
        """Return the optimizer steps of the run; with train.epochs only once `steps` was derived from the data."""
        assert self.steps or not self.epochs
        return self.steps or DEFAULT_STEPS

    @property
    def said_steps(self) -> str:
        """Return the key that decides the number of steps, and its value, for messages."""
        known = f" ({self.steps} steps)" if self.steps else ""
        return f"train.epochs = {self.epochs:g}{known}" if self.epochs else f"train.steps = {self.num_steps}"

    def steps_of_epochs(self, num_rows: int) -> int:
        """Return the steps of train.epochs over `num_rows` rows, the last one whole."""
        return math.ceil(Fraction(str(self.epochs)) * num_rows / self.rows_per_step)

    @property
    def rows_per_step(self) -> int:
        """Return the rows of one optimizer step: the global batch size."""
        return self.global_batch_size if self.batch_size == "auto" else self.batch_size * self.accumulation


@dataclass(frozen=True)
class ParallelConfig:
    shard: Literal["full", "hybrid", "none"] = option(
        "full", '"full": FSDP2 over all processes; "hybrid": within a node, replicas between nodes; "none": replicas'
    )
    nodes: int = option(0, 'groups of processes for shard = "hybrid"; 0: the machines of the run', at_least=0)
    context: int = option(
        1, "context parallelism: processes that split each row, for rows too long for one GPU", at_least=1
    )
    all_gather: Literal["fp8", "bf16"] = option("fp8", 'gather weights of FP8 layers in FP8; "bf16": in model.dtype')
    reduce_dtype: Literal["float32", "bfloat16"] = option("float32", "in which gradients are summed between processes")
    accumulate: Literal["sharded", "whole"] = option(
        "sharded", '"whole": reduce once a step, not after each batch; 4 bytes a parameter on each GPU (bfloat16: 2)'
    )


@dataclass(frozen=True)
class EvalConfig:
    every: int = option(100, "steps between evaluations; 0 evaluates at the end only", at_least=0)
    rows: int = option(64, "held-out rows to evaluate on, always the same", at_least=1)
    tasks: list[str] = option([], 'tasks of lm-evaluation-harness: names, YAML files, or "paper" (docs: evaluate)')
    tasks_every: int = option(0, "steps between two evaluations on eval.tasks; 0: at the end only", at_least=0)
    tasks_limit: int = option(0, "examples of each task; 0: all", at_least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(500, "steps between checkpoints; 0: at the end, and on SIGTERM or Ctrl-C", at_least=0)
    keep: int = option(2, "how many of the newest to keep", at_least=1)
    asynchronous: bool = option(True, "train on while a copy in host memory is written, if the host has room for it")


@dataclass(frozen=True)
class MemoryConfig:
    report: bool = option(False, "measure the second step's memory, beside the prediction: memory.txt, .png, .json")


@dataclass(frozen=True)
class SampleConfig:
    prompt: str = option("", "text that the sample at the end continues; empty begins a new document")
    tokens: int = option(64, "tokens to generate, within the model's positions; 0: none", at_least=0, at_most=2**16)
    temperature: float = option(0.8, "0 is greedy", at_least=0)


@dataclass(frozen=True)
class CompareConfig:
    name: str = option("BF16 + FP32 AdamW", "title of the second run in the table")
    overrides: list[str] = option([], 'train again with these changes, e.g. ["recipe.name=bf16"]')


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    @property
    def releases_gradients(self) -> bool:
        """True if each parameter is stepped inside the backward."""
        return self.optimizer.release_gradients or self.train.stream

    @property
    def not_estimated(self) -> str:
        """Return the first option in use that the memory estimate does not cover, "" if there is none."""
        unknown: dict[str, Any] = {"data.images": self.data.images, "model.freeze": self.model.freeze}
        unknown |= {"tokenizer.add_tokens": self.lora.rank and self.tokenizer.add_tokens}
        unknown |= {"model.name": self.model.holds_adapters and not self.lora.merge_start and "adapters"}
        unknown |= {"parallel.accumulate": self.parallel.accumulate == "whole" and "whole"}
        unknown |= {"parallel.context": self.parallel.context > 1 and self.parallel.context}
        unknown |= {"train.accumulation": self.train.stream and self.train.accumulation > 1 and self.train.accumulation}
        return next(
            (f"{key} = {value!r}, which the estimate does not know" for key, value in unknown.items() if value), ""
        )
